//! Pods that an earlier extender may still bind.

use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_ledger::{Ledger, Outcome, Reason, ShareState, Victims};

use crate::build::{ask, at, bound, card, choose, free, ledger, pod, report};

/// The pod is known and could not be fenced.
fn withhold(ledger: &mut Ledger, pod: &PodFacts) {
    ledger.apply_pod(pod.clone());
    ledger.withhold([Arc::new(pod.clone())]);
}

fn changed(pod: &PodFacts) -> PodFacts {
    PodFacts {
        resource_version: "changed".into(),
        ..pod.clone()
    }
}

#[test]
fn its_memory_is_held_wherever_it_could_land_and_nowhere_else() {
    let mut ledger = ledger(&[("a", &[100, 50]), ("b", &[100]), ("c", &[60])]);
    ledger.apply_pod(bound("x", "b", "b-0", 50));
    withhold(&mut ledger, &pod("p", 60));
    assert_eq!(free(&ledger, "a"), [40, 50]);
    assert_eq!(free(&ledger, "b"), [50]);
    assert_eq!(free(&ledger, "c"), [0]);
    assert_eq!(ledger.unfenced(), 1);
}

#[test]
fn it_is_refused_and_others_take_the_rest() {
    let mut ledger = ledger(&[("a", &[100])]);
    let p = pod("p", 60);
    withhold(&mut ledger, &p);
    let refused = ledger.filter(&ask(&p), &["a"], at(0)).refused;
    assert_eq!(refused, [("a", Reason::Unfenced)]);
    assert!(ledger.begin_bind(&p, "a", at(0)).is_err());
    assert!(choose(&mut ledger, &pod("q", 60), &["a"], at(0)).is_empty());
    let r = pod("r", 40);
    assert_eq!(choose(&mut ledger, &r, &["a"], at(0)), ["a"]);
    assert!(ledger.begin_bind(&r, "a", at(0)).is_ok());
    ledger.end_bind(&r, Outcome::Bound, at(0));
    // It lands.
    ledger.apply_pod(PodFacts {
        resource_version: "bound".into(),
        ..bound("p", "a", "a-0", 60)
    });
    assert_eq!((free(&ledger, "a"), ledger.unfenced()), (vec![0], 0));
}

#[test]
fn it_is_over_when_the_pod_changes_or_goes() {
    for goes in [false, true] {
        let mut ledger = ledger(&[("a", &[100]), ("b", &[100])]);
        let p = pod("p", 60);
        withhold(&mut ledger, &p);
        ledger.apply_pod(p.clone());
        assert_eq!(free(&ledger, "a"), [40]);
        match goes {
            true => ledger.delete_pod("p"),
            false => ledger.apply_pod(changed(&p)),
        }
        assert_eq!(
            (free(&ledger, "a"), free(&ledger, "b")),
            (vec![100], vec![100])
        );
        assert_eq!(ledger.unfenced(), 0);
    }
}

#[test]
fn a_pod_that_changed_before_the_list_holds_nothing() {
    let mut ledger = ledger(&[("a", &[100])]);
    let p = pod("p", 60);
    ledger.apply_pod(changed(&p));
    ledger.withhold([Arc::new(p)]);
    assert_eq!((free(&ledger, "a"), ledger.unfenced()), (vec![100], 0));
}

#[test]
fn a_node_that_reports_later_holds_it_too() {
    let mut ledger = ledger(&[("a", &[100])]);
    withhold(&mut ledger, &pod("p", 60));
    let late = report(&[card("b-0", 100)]);
    ledger.apply_gpunode("b", late, at(0));
    assert_eq!(free(&ledger, "b"), [40]);
}

#[test]
fn what_is_withheld_is_shown_under_the_pod_it_is_for() {
    let mut ledger = ledger(&[("a", &[100])]);
    withhold(&mut ledger, &pod("p", 60));
    let snapshot = ledger.snapshot(at(0));
    let shares = snapshot.iter().flat_map(|node| &node.cards[0].pods);
    let shares: Vec<_> = shares
        .map(|share| (&*share.uid, &*share.name, share.charged.0, share.state))
        .collect();
    assert_eq!(shares, [("p", "p", 60, ShareState::Withheld)]);
}

#[test]
fn no_pod_is_evicted_for_it() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(bound("x", "a", "a-0", 100));
    let p = PodFacts {
        priority: 10,
        ..pod("p", 60)
    };
    let victims =
        |ledger: &Ledger| ledger.preempt(&p, "a", &["x".into()], &mut ledger.budget(), at(0));
    assert_eq!(victims(&ledger), Some(Victims::default()));
    withhold(&mut ledger, &p);
    assert_eq!(victims(&ledger), None);
}
