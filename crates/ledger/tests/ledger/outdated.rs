//! kube-scheduler's answer about a node is no evidence once other pods came there or left, for a pod that regards them.

use gpustow_api::{PodFacts, names};
use gpustow_ledger::Ledger;
use serde_json::{Value, json};

use crate::act::Act as _;
use crate::build::{at, bound, choose, placed_by, required, waits};
use crate::evidence::{TWO, first_decision, ledger, low, named, report_of};

/// Why kube-scheduler takes one replica on a node and no second.
fn kinds_of_replicas() -> Vec<Value> {
    let spread =
        json!({ "maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule" });
    let claim = json!({ "name": "v", "persistentVolumeClaim": { "claimName": "c" } });
    vec![
        required("podAntiAffinity", names::HOSTNAME),
        required("podAntiAffinity", "zone"),
        json!({ "topologySpreadConstraints": [spread] }),
        json!({ "ports": [{ "containerPort": 80, "hostPort": 80 }] }),
        json!({ "volumes": [claim] }),
    ]
}

#[test]
fn one_pod_ends_for_replicas_that_come_at_once_if_kube_scheduler_takes_one_of_them() {
    for spec in kinds_of_replicas() {
        let mut ledger = ledger(&[("a", &[100, 100, 100, 100])]);
        let replica = |uid: &str| placed_by(waits(uid, 80), spec.clone());
        let replicas = ["p0", "p1", "p2", "p3"].map(replica);
        for replica in &replicas {
            ledger.apply_pod(replica.clone());
            assert!(choose(&mut ledger, replica, &["a"], at(0)).is_empty());
        }
        let (second, first, _, victims) = first_decision(&mut ledger, 0..5).unwrap();
        assert_eq!((&*first, victims.len()), ("p0", 1), "{spec}");
        // It terminates for half a minute, and the others see no more of it than kube-scheduler.
        for second in second..second + 30 {
            first_decision(&mut ledger, second..second + 1);
            let all = ledger.preemptions(at(second));
            assert!(all.iter().all(|it| *it.pod.uid == *"p0"), "{spec}: {all:?}");
        }
        let victim = &victims[0];
        ledger.delete_pod(victim);
        ledger.apply_pod(PodFacts {
            priority: 10,
            ..placed_by(bound("p0", "a", victim, 80), spec.clone())
        });
        // kube-scheduler is asked again, and no node passes its own filters for the others.
        let mut woken = Vec::new();
        for second in second + 30..second + 90 {
            report_of(&mut ledger, "a", &[100, 100, 100, 100], second);
            let decided = first_decision(&mut ledger, second..second + 1);
            assert_eq!(decided, None, "{spec}");
            woken.extend(named(&ledger.wake(9, at(second))));
        }
        assert!(woken.contains(&"p1".to_owned()), "{spec}: {woken:?}");
        // Once it takes another there, another pod ends.
        assert!(choose(&mut ledger, &replicas[1], &["a"], at(200)).is_empty());
        report_of(&mut ledger, "a", &[100, 100, 100, 100], 200);
        let decided = first_decision(&mut ledger, 200..205);
        assert_eq!(decided.map(|it| it.1).as_deref(), Some("p1"), "{spec}");
    }
}

#[test]
fn offer_ends_for_a_plain_pod_only_when_a_pod_comes_that_keeps_others_away() {
    let newcomer = |spec: Value| placed_by(bound("new", "a", "a-1", 1), spec);
    for (spec, ends) in [
        (json!({}), true),
        (required("podAffinity", "zone"), true),
        (required("podAntiAffinity", names::HOSTNAME), false),
        (required("podAntiAffinity", "zone"), false),
    ] {
        let mut ledger = ledger(&[("a", TWO)]);
        let p = waits("p", 80);
        ledger.apply_pod(p.clone());
        assert!(choose(&mut ledger, &p, &["a"], at(0)).is_empty());
        ledger.apply_pod(newcomer(spec.clone()));
        assert_eq!(first_decision(&mut ledger, 0..5).is_some(), ends, "{spec}");
    }
}

#[test]
fn offer_ends_with_a_pod_that_comes_to_another_node_only_if_rules_reach_that_far() {
    for (spec, ends) in [
        (required("podAntiAffinity", names::HOSTNAME), true),
        (required("podAntiAffinity", "zone"), false),
    ] {
        for own_namespace in [true, false] {
            let mut ledger = ledger(&[("a", TWO)]);
            let p = placed_by(waits("p", 80), spec.clone());
            ledger.apply_pod(p.clone());
            assert!(choose(&mut ledger, &p, &["a"], at(0)).is_empty());
            let mut other = bound("other", "b", "b-0", 1);
            if !own_namespace {
                other.namespace = "another".into();
            }
            ledger.apply_pod(other);
            let decided = first_decision(&mut ledger, 0..5).is_some();
            assert_eq!(decided, ends || !own_namespace, "{spec}");
        }
    }
}

#[test]
fn victims_that_are_left_wait_for_kube_scheduler_when_a_pod_comes_to_the_node() {
    let mut ledger = ledger(&[("a", TWO)]);
    ledger.apply_pod(PodFacts {
        priority: 1,
        ..bound("more", "a", "a-0", 20)
    });
    ledger.apply_pod(PodFacts {
        priority: 9,
        ..low("a-1")
    });
    let spec = required("podAntiAffinity", names::HOSTNAME);
    let p = placed_by(waits("p", 95), spec);
    ledger.apply_pod(p.clone());
    assert!(choose(&mut ledger, &p, &["a"], at(0)).is_empty());
    let (second, _, _, victims) = first_decision(&mut ledger, 0..5).unwrap();
    assert_eq!(victims.len(), 2, "{victims:?}");
    ledger.apply_pod(bound("new", "a", "a-9", 1));
    let left = |ledger: &Ledger, second| {
        let all = ledger.preemptions(at(second));
        all.iter().map(|it| it.victims.len()).collect::<Vec<_>>()
    };
    assert_eq!(left(&ledger, second), [0]);
    ledger.fragmented(at(second + 1));
    assert_eq!(named(&ledger.wake(9, at(second + 1))), ["p"]);
    assert!(choose(&mut ledger, &p, &["a"], at(second + 2)).is_empty());
    assert_eq!(left(&ledger, second + 2), [2]);
}
