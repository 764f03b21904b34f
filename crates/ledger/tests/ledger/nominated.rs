//! Pods that preempt hold the room they wait for.

use gpustow_api::PodFacts;
use gpustow_ledger::Reason;

use crate::build::{ask, at, bound, choose, ledger, pod};

fn nominated(uid: &str, mib: u64, priority: i32) -> PodFacts {
    PodFacts {
        nominated: Some("a".into()),
        priority,
        ..pod(uid, mib)
    }
}

fn with_priority(uid: &str, mib: u64, priority: i32) -> PodFacts {
    PodFacts {
        priority,
        ..pod(uid, mib)
    }
}

#[test]
fn a_nominated_pod_holds_its_room_against_its_equals_and_below() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(nominated("first", 80, 5));
    for priority in [0, 5] {
        let other = with_priority("other", 30, priority);
        let refused = ledger.filter(&ask(&other), &["a"], at(0)).refused;
        assert_eq!(refused, [("a", Reason::Nominated)]);
        assert!(ledger.begin_bind(&ask(&other), "a", at(0)).is_err());
    }
    assert_eq!(choose(&mut ledger, &pod("small", 20), &["a"], at(0)), ["a"]);
    ledger.delete_pod("small");
    assert_eq!(
        choose(&mut ledger, &with_priority("higher", 30, 6), &["a"], at(0)),
        ["a"]
    );
    ledger.delete_pod("higher");
    assert_eq!(
        choose(&mut ledger, &nominated("first", 80, 5), &["a"], at(0)),
        ["a"]
    );
}

#[test]
fn room_that_victims_will_leave_is_not_held_twice() {
    let mut ledger = ledger(&[("a", &[100])]);
    let victim = PodFacts {
        deleting: true,
        ..bound("victim", "a", "a-0", 60)
    };
    ledger.apply_pod(victim);
    ledger.apply_pod(nominated("first", 80, 5));
    // The victim leaves 60 of the 80; 20 of the 40 that are free now are kept.
    assert!(choose(&mut ledger, &pod("large", 21), &["a"], at(0)).is_empty());
    assert_eq!(choose(&mut ledger, &pod("small", 20), &["a"], at(0)), ["a"]);
}

#[test]
fn a_nomination_ends_when_the_pod_reserves_or_goes() {
    let mut ledger = ledger(&[("a", &[100]), ("b", &[100])]);
    let first = nominated("first", 80, 5);
    ledger.apply_pod(first.clone());
    assert_eq!(choose(&mut ledger, &first, &["b"], at(0)), ["b"]);
    assert_eq!(choose(&mut ledger, &pod("other", 30), &["a"], at(0)), ["a"]);
    ledger.delete_pod("other");
    ledger.delete_pod("first");
    assert_eq!(choose(&mut ledger, &pod("other", 30), &["a"], at(0)), ["a"]);
}

#[test]
fn a_preemptor_makes_room_beside_those_nominated_before_it() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(bound("low", "a", "a-0", 30));
    ledger.apply_pod(nominated("first", 40, 5));
    let second = with_priority("second", 50, 5);
    let victims = ledger.preempt(&ask(&second), "a", &[], &|_| false, at(0));
    let uids = victims.map(|victims| victims.uids);
    assert_eq!(uids, Some(vec!["low".into()]));
}
