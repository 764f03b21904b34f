use std::collections::BTreeMap;

use gpustow_pack::{Claim, ClaimKind, Request};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::*;

fn pod(value: Value) -> Pod {
    serde_json::from_value(value).unwrap()
}

fn facts(value: Value) -> PodFacts {
    PodFacts::from_pod(&pod(value), names::GPU_MEM).unwrap()
}

#[test]
fn a_pod_is_reduced_to_what_scheduling_needs() {
    let facts = facts(json!({
        "metadata": {
            "uid": "u", "namespace": "ns", "name": "p", "resourceVersion": "7",
            "creationTimestamp": "1970-01-01T00:01:00Z",
            "annotations": {
                names::EPOCH: "12",
                names::ASSIGNMENT: r#"{"version":1,"gpus":[{"uuid":"GPU-a","mib":5}],"containers":{}}"#,
            },
        },
        "spec": {
            "nodeName": "n", "schedulerName": "gpustow-scheduler", "priority": 3,
            "schedulingGates": [{"name": "g"}],
            "containers": [{"name": "c", "resources": {"limits": {names::GPU_MEM: "5"}}}],
        },
        "status": {
            "nominatedNodeName": "m", "startTime": "1970-01-01T00:01:30Z",
            "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}],
        },
    }));
    let claims = vec![Claim::new(ClaimKind::Main, 1, Mib(5))];
    let assignment = Assignment {
        charges: vec![("GPU-a".into(), Mib(5))],
        containers: vec![],
        exclusive: None,
        compute: 0,
        instance: None,
    };
    assert_eq!(
        facts,
        PodFacts {
            resource_version: "7".into(),
            created: 60,
            started: 90,
            node: Some("n".into()),
            starting_since: Some(i64::MAX),
            priority: 3,
            nominated: Some("m".into()),
            asks: Asks::of(Request {
                claims,
                ..Request::default()
            }),
            containers: Arc::from(["c".into()]),
            assignment: Some(Ok(Arc::new(assignment))),
            epoch: Some(12),
            gated: true,
            waiting: true,
            grace: 30,
            refusal: facts.refusal,
            ..PodFacts::new("ns", "p", "u")
        }
    );
    assert_ne!(facts.refusal, 0);
}

#[test]
fn disruptions_and_reservations_are_read_from_true_conditions_reasons_and_annotations_alone() {
    let reserved = Reservation::new("n", BTreeMap::new(), Timestamp::UNIX_EPOCH).encode();
    let facts = |status: &str, annotation: &str| {
        facts(json!({
            "metadata": {"uid": "u", "annotations": {names::RESERVATION: annotation}},
            "spec": {"terminationGracePeriodSeconds": 7, "containers": [{"name": "c"}]},
            "status": {"conditions": [
                {"type": names::RECLAIM_CONDITION, "status": status, "reason": "Evict"},
                {"type": "DisruptionTarget", "status": status, "reason": names::PREEMPTED},
                {"type": names::RESERVED_CONDITION, "status": status, "message": "on node m: x"},
            ]},
        }))
    };
    let held = facts("True", &reserved);
    assert_eq!(held.asked_back, Some(Action::Evict));
    assert!(held.preempted);
    assert_eq!((held.reserved_on.as_deref(), held.grace), (Some("n"), 7));
    let ended = facts("False", &reserved);
    assert_eq!(ended.asked_back, None);
    assert!(!ended.preempted);
    assert_eq!(ended.reserved_on, None);
    for unreadable in ["", "on node n: x"] {
        assert_eq!(facts("True", unreadable).reserved_on, None);
    }
}

#[test]
fn a_pod_without_uid_has_no_facts_and_an_empty_one_asks_for_nothing() {
    assert_eq!(PodFacts::from_pod(&Pod::default(), names::GPU_MEM), None);
    let facts = facts(json!({"metadata": {"uid": "u"}, "status": {"nominatedNodeName": ""}}));
    assert_eq!(facts.asks, Asks::nothing());
    assert_eq!(
        (facts.nominated, facts.node, facts.waiting),
        (None, None, false)
    );
}

#[test]
fn asks_without_claims_is_for_nothing() {
    let on_host = Request {
        cpu_milli: 1000,
        ..Request::default()
    };
    let mut asks = Asks::of(on_host);
    assert!(asks.is_nothing() && asks.request().is_none());
    asks.change(|request| request.claims = vec![Claim::new(ClaimKind::Main, 1, Mib(5))]);
    let cpu = asks.request().map(|request| request.cpu_milli);
    assert_eq!((cpu, asks.claims().len()), (Some(1000), 1));
    asks.change(|request| request.claims.clear());
    assert!(asks.is_nothing());
}

#[test]
fn rubbish_in_annotations_is_kept_as_rubbish() {
    let facts = facts(json!({
        "metadata": {"uid": "u", "annotations": {
            names::EPOCH: "-1", names::ASSIGNMENT: "?", names::GPU_COUNT: "?",
        }},
        "spec": {"containers": [{"name": "c", "resources": {"limits": {names::GPU_MEM: "5"}}}]},
    }));
    assert_eq!(facts.epoch, None);
    assert!(facts.assignment.unwrap().is_err());
    assert!(facts.asks.readable().is_err());
}

/// Row 10 of the data's way: when the memory of a pod is free again.
#[test]
fn memory_is_released_at_the_end_and_not_before() {
    let ended = || json!({"terminated": {"exitCode": 0}});
    let running = || json!({"running": {}});
    let crashed = || json!({"waiting": {"reason": "CrashLoopBackOff"}});
    let status = |main: Value, sidecar: Value, init: Value| {
        json!({
            "phase": "Running",
            "containerStatuses": [{"name": "main", "state": main}],
            "initContainerStatuses": [{"name": "init", "state": init}, {"name": "sidecar", "state": sidecar}],
        })
    };
    for (deleting, status, released, what) in [
        (false, json!({"phase": "Pending"}), false, "new"),
        (false, json!({"phase": "Succeeded"}), true, "succeeded"),
        (false, json!({"phase": "Failed"}), true, "failed"),
        (
            false,
            status(crashed(), running(), ended()),
            false,
            "crash-looping",
        ),
        (
            false,
            status(ended(), ended(), ended()),
            false,
            "between two runs",
        ),
        (
            true,
            json!({"phase": "Pending"}),
            false,
            "deleted before the kubelet saw it",
        ),
        (
            true,
            status(running(), running(), ended()),
            false,
            "being deleted",
        ),
        (
            true,
            status(ended(), running(), ended()),
            false,
            "a sidecar still runs",
        ),
        (
            true,
            status(ended(), ended(), crashed()),
            false,
            "an init container waits",
        ),
        (
            true,
            status(ended(), ended(), ended()),
            true,
            "everything ended",
        ),
        (
            true,
            json!({"containerStatuses": [{"name": "main", "state": ended()}]}),
            false,
            "half told",
        ),
    ] {
        let time = deleting.then_some("2026-01-01T00:00:00Z");
        let facts = facts(json!({
            "metadata": {"uid": "u", "deletionTimestamp": time},
            "spec": {
                "nodeName": "n",
                "initContainers": [{"name": "init"}, {"name": "sidecar", "restartPolicy": "Always"}],
                "containers": [{"name": "main"}],
            },
            "status": status,
        }));
        assert_eq!(
            (facts.deleting, facts.released),
            (deleting, released),
            "{what}"
        );
    }
}

#[test]
fn a_deleted_pod_is_waited_for_no_longer_than_ten_minutes() {
    for (grace, deleted_at, gone_by) in [
        (Some(30), "1970-01-01T01:00:30Z", Some(3630)),
        (Some(0), "1970-01-01T01:00:00Z", Some(3600)),
        (None, "1970-01-01T01:00:00Z", Some(3600)),
        // A year after the request, which came an hour after 1970 began.
        (Some(31_536_000), "1971-01-01T01:00:00Z", Some(4200)),
    ] {
        let facts = facts(json!({
            "metadata": {
                "uid": "u", "deletionTimestamp": deleted_at, "deletionGracePeriodSeconds": grace,
            },
            "spec": {"containers": [{"name": "main"}]},
        }));
        assert_eq!(facts.gone_by, gone_by, "{grace:?}");
    }
}

#[test]
fn soft_preferences_are_found_and_hard_ones_are_not_taken_for_them() {
    let soft = "preferredDuringSchedulingIgnoredDuringExecution";
    let term = json!([{"weight": 1, "podAffinityTerm": {"topologyKey": "z"}, "preference": {}}]);
    for (spec, expected) in [
        (json!({}), false),
        (
            json!({"affinity": {"nodeAffinity": {}, "podAffinity": {soft: []}}}),
            false,
        ),
        (json!({"affinity": {"nodeAffinity": {soft: term}}}), true),
        (json!({"affinity": {"podAffinity": {soft: term}}}), true),
        (json!({"affinity": {"podAntiAffinity": {soft: term}}}), true),
        (
            json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "z"}]}}}),
            false,
        ),
        (
            json!({"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "z", "whenUnsatisfiable": "DoNotSchedule"}]}),
            false,
        ),
        (
            json!({"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "z", "whenUnsatisfiable": "ScheduleAnyway"}]}),
            true,
        ),
    ] {
        let text = spec.to_string();
        let mut full = json!({"containers": []});
        full.as_object_mut()
            .unwrap()
            .extend(spec.as_object().unwrap().clone());
        assert_eq!(
            has_soft_preferences(&pod(json!({"spec": full}))),
            expected,
            "{text}"
        );
    }
    assert!(!has_soft_preferences(&Pod::default()));
}

#[test]
fn tolerations_match_as_in_kubernetes() {
    let taints = [("k".into(), "v".into())];
    for (tolerations, expected) in [
        (json!([]), false),
        (json!([{"operator": "Exists"}]), true),
        (json!([{"key": "k", "operator": "Exists"}]), true),
        (json!([{"key": "k", "value": "v"}]), true),
        (
            json!([{"key": "k", "operator": "Equal", "value": "v", "effect": "PreferNoSchedule"}]),
            true,
        ),
        (json!([{"key": "k", "value": "w"}]), false),
        (json!([{"key": "j", "operator": "Exists"}]), false),
        (json!([{"key": "k", "operator": "Gt", "value": "v"}]), false),
        (
            json!([{"key": "k", "operator": "Exists", "effect": "NoSchedule"}]),
            false,
        ),
    ] {
        let text = tolerations.to_string();
        let pod = pod(json!({"spec": {"containers": [], "tolerations": tolerations}}));
        assert_eq!(
            tolerates_prefer_no_schedule(&pod, &taints),
            expected,
            "{text}"
        );
        assert!(tolerates_prefer_no_schedule(&pod, &[]));
    }
}

#[test]
fn volumes_to_be_provisioned_and_claims_take_time() {
    for (spec, expected) in [
        (json!({"volumes": [{"name": "a", "emptyDir": {}}]}), false),
        (
            json!({"volumes": [{"name": "a", "persistentVolumeClaim": {"claimName": "c"}}]}),
            true,
        ),
        (json!({"volumes": [{"name": "a", "ephemeral": {}}]}), true),
        (json!({"resourceClaims": [{"name": "a"}]}), true),
    ] {
        let text = spec.to_string();
        let mut full = json!({"containers": []});
        full.as_object_mut()
            .unwrap()
            .extend(spec.as_object().unwrap().clone());
        assert_eq!(
            uses_volumes_or_claims(&pod(json!({"spec": full}))),
            expected,
            "{text}"
        );
    }
}

#[test]
fn claims_by_name_tie_a_pod_to_its_node() {
    for (spec, expected) in [
        (json!({"volumes": [{"name": "a", "emptyDir": {}}]}), false),
        (json!({"volumes": [{"name": "a", "ephemeral": {}}]}), false),
        (
            json!({"volumes": [{"name": "a", "persistentVolumeClaim": {"claimName": "c"}}]}),
            true,
        ),
        (
            json!({"resourceClaims": [{"name": "a", "resourceClaimTemplateName": "t"}]}),
            false,
        ),
        (
            json!({"resourceClaims": [{"name": "a", "resourceClaimName": "c"}]}),
            true,
        ),
    ] {
        let text = spec.to_string();
        let limits = json!({"limits": {names::GPU_MEM: "1"}});
        let mut full = json!({"containers": [{"name": "main", "resources": limits}]});
        full.as_object_mut()
            .unwrap()
            .extend(spec.as_object().unwrap().clone());
        let facts = facts(json!({"metadata": {"uid": "u"}, "spec": full}));
        assert_eq!(facts.tied, expected, "{text}");
    }
}

#[test]
fn the_models_that_a_pod_is_bound_to_are_read_from_selector_and_affinity() {
    let models = |spec: Value| facts(json!({"metadata": {"uid": "u"}, "spec": spec})).models;
    let term = |models: &[&str]| {
        json!({"matchExpressions": [
            {"key": "zone", "operator": "Exists"},
            {"key": names::GPU_PRODUCT, "operator": "In", "values": models},
        ]})
    };
    let required = |terms: &[Value]| {
        let terms = json!({"nodeSelectorTerms": terms});
        let key = "requiredDuringSchedulingIgnoredDuringExecution";
        json!({"containers": [], "affinity": {"nodeAffinity": {key: terms}}})
    };
    let selector = json!({"containers": [], "nodeSelector": {names::GPU_PRODUCT: "Tesla-T4"}});
    assert_eq!(*models(selector), ["Tesla-T4".into()]);
    let either = required(&[term(&["B", "A"]), term(&["B"])]);
    assert_eq!(*models(either), ["A".into(), "B".into()]);
    let free = required(&[term(&["A"]), json!({"matchFields": []})]);
    assert!(models(free).is_empty());
    assert!(models(json!({"containers": []})).is_empty());
}

#[test]
fn what_may_be_used_and_done_is_read_from_annotations() {
    let facts = |notes: Value| {
        let mut notes = notes;
        notes[names::ASSIGNMENT] =
            r#"{"version":1,"gpus":[{"uuid":"GPU-a","mib":5000}],"containers":{"c":["GPU-a"]}}"#
                .into();
        facts(json!({
            "metadata": {"uid": "u", "annotations": notes},
            "spec": {"containers": [
                {"name": "c", "resources": {"limits": {names::GPU_MEM: "5000"}}},
            ]},
        }))
    };
    let plain = facts(json!({}));
    assert_eq!((plain.limit_on("GPU-a"), plain.action), (None, None));
    let burst = facts(json!({names::MEM_LIMIT: "9000", names::RECLAIM_ACTION: "KillProcess"}));
    assert_eq!(burst.limit_on("GPU-a"), Some(Mib(9000)));
    assert_eq!(burst.action, Some(Action::KillProcess));
    let unknown = facts(json!({names::MEM_LIMIT: "max", names::RECLAIM_ACTION: "shoot"}));
    assert_eq!(unknown.limit_on("GPU-a"), Some(limit::WHOLE));
    assert_eq!(unknown.action, Some(Action::Event));
}

#[test]
fn only_a_marked_pod_that_is_recreated_anywhere_may_be_moved() {
    let of = |mark: &str, api: &str, kind: &str, controller: bool| {
        facts(json!({ "metadata": {
            "uid": "u", "annotations": { names::EVICTABLE: mark },
            "ownerReferences": [{
                "apiVersion": api, "kind": kind, "name": "o", "uid": "o", "controller": controller,
            }],
        }}))
        .evictable
    };
    for (api, kind) in [
        ("apps/v1", "ReplicaSet"),
        ("apps/v1", "StatefulSet"),
        ("batch/v1", "Job"),
        ("v1", "ReplicationController"),
        ("jobset.x-k8s.io/v1alpha2", "JobSet"),
        ("kubeflow.org/v1", "PyTorchJob"),
    ] {
        assert_eq!(of("true", api, kind, true).as_deref(), Some("o"), "{kind}");
    }
    // A pod may name any owner; none of these makes a replacement.
    for (api, kind) in [
        ("v1", "ConfigMap"),
        ("v1", "Node"),
        ("batch/v1", "CronJob"),
        ("networking.k8s.io/v1", "Ingress"),
    ] {
        assert_eq!(of("true", api, kind, true), None, "{kind}");
    }
    let evictable =
        |mark: &str, kind: &str, controller: bool| of(mark, "apps/v1", kind, controller);
    for (mark, kind, controller) in [
        ("false", "ReplicaSet", true),
        ("yes", "ReplicaSet", true),
        ("true", "ReplicaSet", false),
        ("true", "DaemonSet", true),
    ] {
        assert_eq!(evictable(mark, kind, controller), None, "{mark} {kind}");
    }
}

#[test]
fn nomination_is_the_extenders_if_its_last_wake_up_says_so() {
    let own = |status: &str, reason: &str, node: Option<&str>| {
        let pod = facts(json!({"metadata": {"uid": "u"}, "status": {
            "nominatedNodeName": node,
            "conditions": [{"type": names::AVAILABLE_CONDITION, "status": status, "reason": reason}],
        }}));
        pod.own_nomination
    };
    assert!(own("True", names::NOMINATED, Some("m")));
    assert!(!own("True", "MemoryAvailable", Some("m")));
    assert!(!own("False", names::NOMINATED, Some("m")));
    assert!(!own("True", names::NOMINATED, None));
}
