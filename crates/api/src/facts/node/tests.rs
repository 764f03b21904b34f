use serde_json::json;

use super::*;

#[test]
fn a_node_is_its_allocatable_and_its_soft_taints() {
    let node = serde_json::from_value(json!({
        "metadata": {"name": "n"},
        "spec": {"unschedulable": true, "taints": [
            {"key": "a", "value": "1", "effect": "PreferNoSchedule"},
            {"key": "b", "effect": "NoSchedule"},
        ]},
        "status": {
            "allocatable": {"cpu": "3920m", "memory": "2097151Ki", "pods": "110"},
            "conditions": [
                {"type": "DiskPressure", "status": "False", "lastHeartbeatTime": "1970-01-01T00:00:09Z"},
                {"type": "Ready", "status": "True", "lastHeartbeatTime": "1970-01-01T00:01:00Z"},
            ],
        },
    }));
    let node: Node = node.unwrap();
    assert_eq!(
        NodeFacts::from_node(&node),
        NodeFacts {
            name: "n".into(),
            cpu_milli: 3920,
            ram: Bytes(2_097_151 << 10),
            prefer_no_schedule: vec![("a".into(), "1".into())],
            pods: Some(110),
            cordoned: true,
            heartbeat: Some(60),
            ..NodeFacts::from_node(&node)
        }
    );
    assert_eq!(NodeFacts::from_node(&Node::default()), NodeFacts::default());
}

#[test]
fn cordoned_gpus_are_listed_with_commas() {
    for (list, expected) in [
        ("GPU-b,GPU-a", vec!["GPU-a", "GPU-b"]),
        (" GPU-a , ,GPU-a\n", vec!["GPU-a"]),
        (",,", vec![]),
        ("{\"GPU-a\": true}", vec!["{\"GPU-a\": true}"]),
    ] {
        let node = json!({"metadata": {"name": "n", "annotations": {names::CORDONED_GPUS: list}}});
        let node = NodeFacts::from_node(&serde_json::from_value(node).unwrap());
        let listed: Vec<&str> = node.cordoned_gpus.iter().map(|it| &**it).collect();
        assert_eq!(listed, expected, "{list:?}");
    }
}
