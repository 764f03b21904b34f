//! The pods: pods that stay, pods of low priority that may use more than they request, waiting pods, and new ones.

use std::sync::Arc;

use gpustow_api::gpunode::PodUse;
use gpustow_api::{Assignment, PodFacts, names};
use gpustow_pack::Mib;
use serde_json::{Value, json};

use crate::load::{facts, node_name, uuid};

/// The memory on each card: of a pod that stays, and of a low-priority pod that may move. Then the use of the latter
/// beyond its request, and the use of programs outside of pods.
pub(crate) const STAYS: u64 = 30_000;
pub(crate) const LOW: u64 = 20_000;
pub(crate) const BORROWED: u64 = 5_000;
pub(crate) const UNMANAGED: u64 = 5_000;
/// The request of a waiting pod on each card. `NOWHERE` is more than a card has without the low-priority pod. The other
/// is free by the requests, but more than is free in fact once that pod gives back its borrowed memory.
pub(crate) const NOWHERE: u64 = 60_000;
pub(crate) const BY_THE_BOOKS: u64 = 28_000;

pub(crate) fn uid(pod: &PodFacts, node: usize, card: usize) -> String {
    format!("{}-{node}-{card}", pod.name)
}

pub(crate) fn use_of(pod: &PodFacts, node: usize, card: usize, used_mib: u64) -> PodUse {
    PodUse {
        uid: uid(pod, node, card),
        used_mib,
        ..PodUse::default()
    }
}

/// A pod that requests so much over its GPUs.
pub(crate) fn pod(name: &str, mib: u64, gpus: u64, priority: i32) -> Value {
    json!({
        "metadata": {
            "uid": name, "name": name, "namespace": "team-a", "resourceVersion": "1",
            "creationTimestamp": "2026-11-21T08:00:00Z",
            "annotations": {names::GPU_COUNT: gpus.to_string()},
        },
        "spec": {
            "schedulerName": names::SCHEDULER,
            "priority": priority,
            "containers": [{"name": "main", "resources": {
                "limits": {names::GPU_MEM: mib.to_string()},
                "requests": {names::GPU_MEM: mib.to_string(), "cpu": "100m", "memory": "1Gi"},
            }}],
        },
        "status": {"phase": "Pending"},
    })
}

/// One of low priority that may use more than it requests, and may be moved.
pub(crate) fn borrower() -> PodFacts {
    let mut pod = pod("low", LOW, 1, 1);
    let notes = &mut pod["metadata"]["annotations"];
    notes[names::MEM_LIMIT] = "max".into();
    notes[names::EVICTABLE] = "true".into();
    pod["metadata"]["ownerReferences"] = json!([{
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "web", "controller": true,
    }]);
    facts(pod)
}

/// The same pod on a card.
pub(crate) fn on_card(pod: &PodFacts, node: usize, card: usize, mib: u64) -> PodFacts {
    let uuid = uuid(node, card);
    let assignment = Assignment {
        charges: vec![(uuid.as_str().into(), Mib(mib))],
        containers: vec![("main".into(), vec![uuid.as_str().into()])],
        exclusive: None,
        compute: 0,
        instance: None,
    };
    let uid = uid(pod, node, card);
    PodFacts {
        uid: uid.as_str().into(),
        name: uid.into(),
        node: Some(node_name(node).into()),
        assignment: Some(Ok(Arc::new(assignment))),
        ..pod.clone()
    }
}

pub(crate) fn gate(pod: &mut Value) {
    pod["spec"]["schedulingGates"] = json!([{"name": names::GATE}]);
}

/// A pod of its own kind that kube-scheduler could not place; one of four wants two GPUs.
pub(crate) fn waiting(kind: usize, request: u64, gated: bool) -> PodFacts {
    let gpus = if kind % 4 == 3 { 2 } else { 1 };
    let mib = (request + 100 * kind as u64) * gpus;
    let mut pod = pod(&format!("waits-{kind}"), mib, gpus, 10);
    if gated {
        gate(&mut pod);
    } else {
        pod["status"]["conditions"] = json!([
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"},
        ]);
    }
    facts(pod)
}
