//! Which pods to evict.

use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_ledger::{Config, Ledger, Victims};

use crate::build::{
    asking, at, card, choose, holder_since as holder, ledger, node, pod, protect, report,
    requesting, waits,
};
use crate::fragmented::{fragmented, named};

fn preempt(ledger: &mut Ledger, mib: u64, victims: &[&str], protected: &[&str]) -> Option<Victims> {
    protect(ledger, protected, 0);
    let pod = PodFacts {
        priority: 10,
        ..pod("p", mib)
    };
    let victims: Vec<Arc<str>> = victims.iter().map(|uid| (*uid).into()).collect();
    ledger.preempt(&pod, "a", &victims, &mut ledger.budget(), at(0))
}

fn chosen(victims: Option<Victims>) -> Option<(Vec<String>, i64)> {
    victims.map(|v| {
        (
            v.uids.iter().map(ToString::to_string).collect(),
            v.protected,
        )
    })
}

#[test]
fn no_other_pod_goes_if_the_given_victims_suffice() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(holder("x", "a-0", 50, 0, 0));
    ledger.apply_pod(holder("y", "a-0", 50, 0, 0));
    assert_eq!(
        preempt(&mut ledger, 50, &["x"], &[]),
        Some(Victims::default())
    );
}

#[test]
fn preempt_offers_no_node_where_a_victim_should_be_gone_by_now() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(PodFacts {
        deleting: true,
        gone_by: Some(1_000),
        ..holder("x", "a-0", 50, 0, 0)
    });
    ledger.tell_time(1_055);
    assert_eq!(
        preempt(&mut ledger, 60, &["x"], &[]),
        Some(Victims::default())
    );
    ledger.tell_time(1_060);
    assert_eq!(preempt(&mut ledger, 60, &["x"], &[]), None);
}

#[test]
fn others_are_added_on_the_card_where_they_help_and_none_needlessly() {
    let mut ledger = ledger(&[("a", &[100, 100])]);
    ledger.apply_pod(holder("x", "a-0", 60, 0, 0));
    ledger.apply_pod(holder("useless", "a-1", 10, 0, 5));
    ledger.apply_pod(holder("y", "a-0", 40, 1, 0));
    ledger.apply_pod(holder("firm", "a-1", 90, 10, 0));
    assert_eq!(
        chosen(preempt(&mut ledger, 100, &["x"], &[])),
        Some((vec!["y".into()], 0))
    );
}

#[test]
fn the_unprotected_go_first_then_low_priority_then_the_youngest() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(holder("guarded", "a-0", 25, 0, 9));
    ledger.apply_pod(holder("high", "a-0", 25, 2, 9));
    ledger.apply_pod(holder("old", "a-0", 25, 1, 1));
    ledger.apply_pod(holder("young", "a-0", 25, 1, 2));
    let mut order = |mib| chosen(preempt(&mut ledger, mib, &[], &["guarded"]));
    let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(order(25), Some((names(&["young"]), 0)));
    assert_eq!(order(50), Some((names(&["young", "old"]), 0)));
    assert_eq!(order(75), Some((names(&["young", "old", "high"]), 0)));
    assert_eq!(
        order(100),
        Some((names(&["young", "old", "high", "guarded"]), 1))
    );
}

#[test]
fn equals_and_those_that_leave_already_are_not_evicted() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(holder("equal", "a-0", 50, 10, 0));
    let leaving = holder("leaving", "a-0", 50, 0, 0);
    ledger.apply_pod(PodFacts {
        deleting: true,
        ..leaving
    });
    assert!(ledger.evictable("a", 10).is_empty());
    assert_eq!(preempt(&mut ledger, 50, &[], &[]), None);
    assert_eq!(
        preempt(&mut ledger, 50, &["leaving"], &[]),
        Some(Victims::default())
    );
}

#[test]
fn a_request_larger_than_any_card_evicts_no_pod() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(holder("x", "a-0", 50, 0, 0));
    assert_eq!(preempt(&mut ledger, 101, &["x"], &[]), None);
    assert_eq!(
        preempt(&mut ledger, 100, &[], &[]).map(|v| v.uids.len()),
        Some(1)
    );
}

#[test]
fn a_given_victim_that_helps_no_pod_is_spared_if_the_sums_suffice_without_it() {
    let mut ledger = ledger(&[("a", &[100, 100])]);
    ledger.apply_pod(holder("x", "a-0", 50, 0, 0));
    ledger.apply_pod(holder("firm", "a-0", 50, 10, 0));
    ledger.apply_pod(holder("y", "a-1", 60, 0, 0));
    // By the node's sum x is enough: 40 + 50 are free then, but on no card.
    let added = preempt(&mut ledger, 60, &["x"], &[]).expect("room");
    assert_eq!(added.uids, ["y".into()]);
    let spared = |pod: &PodFacts| {
        let mut budget = ledger.budget();
        let spared = ledger.spared(pod, "a", &["x".into()], &added.uids, &mut budget, at(0));
        spared.uids
    };
    let p = pod("p", 60);
    assert_eq!(spared(&p), ["x".into()]);
    // 100 fit on the card, and the sum has 100 without x; 101 fit on no card.
    assert_eq!(spared(&pod("p", 100)), ["x".into()]);
    assert!(spared(&pod("p", 101)).is_empty());
    // A pod that needs all of the node's CPU needs that of x, too.
    let hungry = requesting(p, |request| request.cpu_milli = 64_000);
    assert_eq!(spared(&hungry), ["x".into()]);
    let x = holder("x", "a-0", 50, 0, 0);
    let x = requesting(x, |request| request.cpu_milli = 1);
    ledger.apply_pod(PodFacts {
        resource_version: "2".into(),
        ..x
    });
    let kept = ledger.spared(
        &hungry,
        "a",
        &["x".into()],
        &added.uids,
        &mut ledger.budget(),
        at(0),
    );
    assert!(kept.uids.is_empty());
}

/// The call has spent its budget for searches: a node that it cannot judge is not offered.
#[test]
fn no_pod_is_evicted_if_the_call_cannot_afford_to_look() {
    let mut sparing = Ledger::new(Config {
        search_steps: 1,
        ..Config::default()
    });
    for name in ["a", "b"] {
        sparing.apply_node(node(name));
        let cards = [
            card(&format!("{name}-0"), 100),
            card(&format!("{name}-1"), 100),
        ];
        sparing.apply_gpunode(name, report(&cards), at(0));
        sparing.apply_pod(PodFacts {
            node: Some(name.into()),
            ..holder(&format!("x{name}"), &format!("{name}-0"), 60, 0, 0)
        });
    }
    let p = PodFacts {
        priority: 10,
        ..asking("p", &[(1, 90), (1, 80)])
    };
    let mut budget = sparing.budget();
    let mut offered =
        |node: &str, victims: &[Arc<str>]| sparing.preempt(&p, node, victims, &mut budget, at(0));
    // The budget is one search, to its end.
    assert_eq!(offered("a", &["xa".into()]), Some(Victims::default()));
    assert_eq!(offered("b", &["xb".into()]), None);
    // Another call has its own; but no pod is added whose eviction it cannot judge.
    let mut budget = sparing.budget();
    assert_eq!(sparing.preempt(&p, "b", &[], &mut budget, at(0)), None);
    // A pod on one card is placed without a search.
    let one = PodFacts {
        priority: 10,
        ..pod("one", 100)
    };
    let mut budget = sparing.budget();
    for name in ["a", "b"] {
        let victims = [format!("x{name}").into()];
        let found = sparing.preempt(&one, name, &victims, &mut budget, at(0));
        assert_eq!(found, Some(Victims::default()));
    }
}

#[test]
fn kube_scheduler_gets_victims_by_the_switches_and_asks_again_in_time() {
    let mut ledger = fragmented();
    let pod = waits("p", 80);
    let on = Config {
        preempt_fragmented: true,
        preempt_after: at(60),
        ..Config::default()
    };
    let off = Config {
        preempt_fragmented: false,
        ..on
    };
    assert!(choose(&mut ledger, &pod, &["a"], at(1)).is_empty());
    for (config, age, may, woken) in [
        (off, 100, false, &[][..]),
        (on, 59, false, &[]),
        (on, 60, true, &["p"]),
        (on, 61, true, &[]),
        (off, 61, false, &[]),
    ] {
        ledger.configure(config);
        ledger.tell_time(age);
        assert_eq!(named(&ledger.wake(9, at(1))), woken, "{age}");
        assert_eq!(ledger.may_preempt_fragmented(&pod, at(1)), may, "{age}");
    }
}

#[test]
fn room_comes_where_a_pod_that_is_leaving_is_all_that_is_in_the_way() {
    let leaves = |uid: &str, card: &str| PodFacts {
        deleting: true,
        gone_by: Some(1_000),
        ..holder(uid, card, 60, 0, 0)
    };
    let mut ledger = ledger(&[("a", &[100]), ("b", &[100]), ("c", &[100])]);
    ledger.apply_pod(leaves("x", "a-0"));
    ledger.apply_pod(leaves("y", "b-0"));
    ledger.apply_pod(holder("z", "b-0", 40, 0, 0));
    ledger.apply_pod(holder("low", "c-0", 60, 0, 0));
    let comes = |ledger: &Ledger, nodes: &[&str]| {
        ledger.room_comes(&waits("p", 80), nodes.iter().copied(), at(0))
    };
    ledger.tell_time(1_000);
    assert!(comes(&ledger, &["c", "a"]));
    assert!(!comes(&ledger, &["b", "c"]));
    // One that should be gone does not count.
    ledger.tell_time(1_060);
    assert!(!comes(&ledger, &["c", "a"]));
}
