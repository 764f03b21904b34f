//! Preemption for pods of PodGroups that come alone, and for gangs whose pods are for several kinds of node.

use std::collections::BTreeSet;

use gpustow_api::intree::Label;
use gpustow_api::{GroupPolicy, NodeFacts, PodGroupFacts};
use gpustow_ledger::Ledger;
use serde_json::json;

use crate::act::Act as _;
use crate::build::{at, card, choose, holder, node, placed_by, report, waits};
use crate::gang_victims::{in_group, ledger, pod_group, preemptions, set};

/// Looks for some seconds; which pods finish then, and for which pod.
fn looks(ledger: &mut Ledger, seconds: std::ops::Range<u64>) -> Vec<(String, String)> {
    for second in seconds {
        ledger.fragmented(at(second));
        let all = preemptions(ledger, second).into_iter();
        let each = all.flat_map(|it| {
            let waits = it.pod.uid.to_string();
            let victims = it.victims.into_iter();
            victims.map(move |victim| (victim.uid.to_string(), waits.clone()))
        });
        let each: Vec<_> = each.collect();
        if !each.is_empty() {
            return each;
        }
    }
    Vec::new()
}

#[test]
fn pod_of_a_basic_group_preempts_on_a_full_node_as_one_without_a_group() {
    let mut ledger = ledger(&[("a", &[100, 100])]);
    ledger.apply_pod(holder("x", "a-0", 100, 1));
    ledger.apply_pod(holder("y", "a-1", 100, 2));
    ledger.apply_pod_group(PodGroupFacts {
        policy: GroupPolicy::Basic,
        ..pod_group("g", 0, true)
    });
    ledger.apply_pod(in_group("g", waits("p", 100)));
    let expected = vec![("x".to_owned(), "p".to_owned())];
    assert_eq!(looks(&mut ledger, 0..5), expected);
}

#[test]
fn pod_beyond_min_count_preempts_on_a_full_node_and_where_memory_is_fragmented() {
    for held in [100, 60] {
        let mut ledger = ledger(&[("a", &[100, 100, 100])]);
        ledger.apply_pod(holder("x", "a-0", held, 1));
        ledger.apply_pod(holder("y", "a-1", held, 2));
        ledger.apply_pod_group(pod_group("g", 1, true));
        ledger.apply_pod(in_group("g", holder("first", "a-2", 100, 10)));
        let p = in_group("g", waits("p", 70));
        ledger.apply_pod(p.clone());
        if held < 100 {
            assert!(choose(&mut ledger, &p, &["a"], at(0)).is_empty());
        }
        let expected = vec![("x".to_owned(), "p".to_owned())];
        assert_eq!(looks(&mut ledger, 0..5), expected, "{held}");
    }
}

#[test]
fn gang_for_two_kinds_of_node_preempts_on_both_though_kube_scheduler_asks_about_its_first_pod() {
    let mut ledger = ledger(&[]);
    for (name, kind) in [("a", "leader"), ("b", "worker"), ("c", "worker")] {
        ledger.apply_node(NodeFacts {
            labels: [Label::new("kind", kind).into()].into(),
            ..node(name)
        });
        ledger.apply_gpunode(name, report(&[card(&format!("{name}-0"), 100)]), at(0));
        ledger.apply_pod(holder(name, &format!("{name}-0"), 30, 1));
    }
    ledger.apply_pod_group(pod_group("g", 3, true));
    let pods = [("g0", "leader"), ("g1", "worker"), ("g2", "worker")].map(|(name, kind)| {
        let spec = json!({ "nodeSelector": { "kind": kind } });
        in_group("g", placed_by(waits(name, 70 + 1), spec))
    });
    pods.iter().for_each(|pod| ledger.apply_pod(pod.clone()));
    assert!(choose(&mut ledger, &pods[0], &["a"], at(0)).is_empty());
    let victims: BTreeSet<String> = looks(&mut ledger, 0..5)
        .into_iter()
        .map(|it| it.0)
        .collect();
    assert_eq!(victims, set(&["a", "b", "c"]));
}
