//! Shares of compute, which pods hold of GPUs with MPS in addition to memory.

use std::sync::Arc;

use gpustow_api::{Assignment, PodFacts};
use gpustow_ledger::{BindRefusal, Config, Ledger, Outcome, Reason, Victims};
use gpustow_pack::Refusal;

use crate::build::{at, bound, card, choose, computing, ledger, mps, node, pod, refused, report};

const NO_COMPUTE: Reason = Reason::Fit(Refusal::NoCompute);

/// Node `a` with one GPU of 100 MiB that has MPS, and node `b` with one that has none.
fn nodes() -> Ledger {
    let mut ledger = ledger(&[("b", &[100])]);
    ledger.apply_node(node("a"));
    ledger.apply_gpunode("a", report(&[mps(card("a-0", 100))]), at(0));
    ledger
}

/// A pod bound to `a`, with that share of its GPU.
fn holder(uid: &str, mib: u64, percent: u8) -> PodFacts {
    let pod = bound(uid, "a", "a-0", mib);
    let assignment = pod.assignment.clone().and_then(Result::ok);
    let assignment = assignment.map(|assignment| {
        Ok(Arc::new(Assignment {
            compute: percent,
            ..(*assignment).clone()
        }))
    });
    PodFacts {
        assignment,
        ..computing(pod, percent)
    }
}

fn compute(ledger: &Ledger) -> u16 {
    let snapshot = ledger.snapshot(at(0));
    let node = snapshot.iter().find(|node| &*node.name == "a");
    node.map_or(0, |node| node.cards[0].compute.free)
}

/// Why the bind is refused, if it is.
fn bind(ledger: &mut Ledger, pod: &PodFacts, node: &str) -> Option<Reason> {
    match ledger.begin_bind(pod, node, at(1)) {
        Err(BindRefusal::NoFit { reason, .. }) => Some(reason),
        _ => None,
    }
}

#[test]
fn pods_with_a_share_go_to_gpus_with_mps_and_all_others_elsewhere() {
    let mut ledger = nodes();
    let share = computing(pod("share", 10), 30);
    assert_eq!(choose(&mut ledger, &share, &["a", "b"], at(0)), ["a"]);
    let plain = pod("plain", 10);
    assert_eq!(choose(&mut ledger, &plain, &["a", "b"], at(0)), ["b"]);
    let other = computing(pod("other", 10), 30);
    let why = |pod, node| refused(&mut nodes(), pod, node);
    assert_eq!(why(&other, "b"), Some(Reason::Fit(Refusal::NoMps)));
    assert_eq!(why(&plain, "a"), Some(Reason::Fit(Refusal::OnlyMps)));
}

#[test]
fn gpu_has_at_most_as_many_pods_as_mps_has_clients() {
    let mut ledger = nodes();
    for number in 0..48 {
        ledger.apply_pod(holder(&format!("p{number}"), 1, 1));
    }
    let waits = computing(pod("waits", 1), 1);
    assert_eq!(refused(&mut ledger, &waits, "a"), Some(NO_COMPUTE));
    ledger.delete_pod("p0");
    assert_eq!(choose(&mut ledger, &waits, &["a"], at(0)), ["a"]);
}

#[test]
fn shares_of_a_gpu_are_at_most_a_hundred_whether_assumed_or_bound() {
    let mut ledger = nodes();
    ledger.apply_pod(holder("bound", 10, 30));
    let assumed = computing(pod("assumed", 10), 50);
    assert_eq!(choose(&mut ledger, &assumed, &["a"], at(0)), ["a"]);
    assert_eq!(compute(&ledger), 20);
    let waits = computing(pod("waits", 10), 30);
    ledger.apply_pod(waits.clone());
    assert_eq!(refused(&mut ledger, &waits, "a"), Some(NO_COMPUTE));
    let small = computing(pod("small", 10), 20);
    assert_eq!(choose(&mut ledger, &small, &["a"], at(0)), ["a"]);
    // Compute that becomes free wakes the pod that waits for it; the pod does not wait for memory.
    ledger.delete_pod("bound");
    let woken = ledger.wake(9, at(1));
    assert_eq!(
        woken.iter().map(|pod| &*pod.uid).collect::<Vec<_>>(),
        ["waits"]
    );
}

#[test]
fn administrator_decides_how_much_of_a_gpu_its_pods_may_hold_together() {
    let mut ledger = nodes();
    ledger.apply_pod(holder("bound", 10, 80));
    let second = computing(pod("second", 10), 80);
    assert_eq!(refused(&mut ledger, &second, "a"), Some(NO_COMPUTE));
    ledger.configure(Config {
        compute: 200,
        ..Config::default()
    });
    assert_eq!(choose(&mut ledger, &second, &["a"], at(0)), ["a"]);
    ledger.configure(Config::default());
    // No compute is free, and no pod is evicted for that.
    assert_eq!(compute(&ledger), 0);
    assert_eq!(bind(&mut ledger, &second, "a"), Some(NO_COMPUTE));
}

#[test]
fn bind_is_refused_if_mps_came_or_went_since_filter() {
    let mut ledger = nodes();
    let share = computing(pod("share", 10), 30);
    let plain = pod("plain", 10);
    assert_eq!(choose(&mut ledger, &share, &["a"], at(0)), ["a"]);
    assert_eq!(choose(&mut ledger, &plain, &["b"], at(0)), ["b"]);
    ledger.apply_gpunode("a", report(&[card("a-0", 100)]), at(1));
    ledger.apply_gpunode("b", report(&[mps(card("b-0", 100))]), at(1));
    let mut bind = |pod, node| bind(&mut ledger, pod, node);
    assert_eq!(bind(&share, "a"), Some(Reason::Fit(Refusal::NoMps)));
    assert_eq!(bind(&plain, "b"), Some(Reason::Fit(Refusal::OnlyMps)));
}

#[test]
fn assignment_says_the_share_and_what_it_says_counts() {
    let mut ledger = nodes();
    let share = computing(pod("share", 10), 30);
    choose(&mut ledger, &share, &["a"], at(0));
    let assignment = ledger.begin_bind(&share, "a", at(0)).unwrap();
    assert_eq!(assignment.compute, 30);
    ledger.end_bind(&share, Outcome::Bound, at(0));
    // Its owner changes the annotation afterwards.
    ledger.apply_pod(PodFacts {
        asks: computing(pod("share", 10), 1).asks,
        ..holder("share", 10, 30)
    });
    assert_eq!(compute(&ledger), 70);
}

#[test]
fn compute_that_is_held_through_one_node_is_not_free_on_another() {
    let mut ledger = nodes();
    ledger.apply_node(node("c"));
    ledger.apply_gpunode("c", report(&[mps(card("a-0", 100))]), at(0));
    ledger.apply_pod(holder("bound", 10, 80));
    let other = computing(pod("other", 10), 30);
    assert_eq!(refused(&mut ledger, &other, "c"), Some(NO_COMPUTE));
}

#[test]
fn preemption_ends_those_who_hold_compute() {
    let mut ledger = nodes();
    ledger.apply_pod(holder("small", 10, 20));
    ledger.apply_pod(holder("large", 10, 80));
    let high = PodFacts {
        priority: 10,
        ..computing(pod("high", 10), 60)
    };
    let victims = ledger.preempt(&high, "a", &[], &mut ledger.budget(), at(0));
    let uids = victims.map(|victims: Victims| victims.uids);
    assert_eq!(uids, Some(vec!["large".into()]));
}
