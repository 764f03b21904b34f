//! The later fact counts: lists and reads against the ledger's memory, and answers that come late against the end of a
//! pod.

use gpustow_api::PodFacts;
use gpustow_ledger::{Ledger, Outcome, Reason};

use crate::build::{ask, at, bound, choose, exclusive, free, ledger, pod};

fn on_a() -> Ledger {
    ledger(&[("a", &[100])])
}

/// A copy in which kube-scheduler reports that it has given the pod up, in words of this digest.
fn refused(uid: &str, refusal: u64) -> PodFacts {
    PodFacts {
        refusal,
        waiting: true,
        resource_version: refusal.to_string().into(),
        ..pod(uid, 60)
    }
}

/// A server that was restored to an older state has the pod unbound. The ledger then equals one that only saw that
/// list.
#[test]
fn a_later_list_in_which_a_bound_pod_is_unbound_frees_its_memory() {
    let by_watch: fn(&mut Ledger) = |ledger| ledger.apply_pod(bound("p", "a", "a-0", 60));
    let by_us: fn(&mut Ledger) = |ledger| {
        let p = pod("p", 60);
        ledger.apply_pod(p.clone());
        ledger.begin_bind(&p, "a", at(1)).expect("it fits");
        ledger.end_bind(&p, Outcome::Bound, at(1));
    };
    for bind in [by_watch, by_us] {
        let mut ledger = on_a();
        bind(&mut ledger);
        assert_eq!(free(&ledger, "a"), [40]);
        ledger.reset_pods(vec![pod("p", 60).into()], ledger.copies());
        assert_eq!(free(&ledger, "a"), [100]);
        assert_eq!(choose(&mut ledger, &pod("p", 60), &["a"], at(2)), ["a"]);
        assert!(ledger.begin_bind(&pod("p", 60), "a", at(2)).is_ok());
        assert_eq!(free(&ledger, "a"), [40]);
    }
}

#[test]
fn a_bind_under_way_outlives_a_list_in_which_the_pod_is_unbound() {
    let mut ledger = on_a();
    let p = pod("p", 60);
    ledger.begin_bind(&p, "a", at(1)).expect("it fits");
    ledger.reset_pods(Vec::new(), ledger.copies());
    ledger.reset_pods(vec![p.clone().into()], ledger.copies());
    ledger.apply_pod(p);
    assert_eq!(choose(&mut ledger, &pod("q", 60), &["a"], at(2)), [""; 0]);
}

#[test]
fn a_read_that_was_sent_later_unbinds_and_one_sent_before_does_not() {
    let mut ledger = on_a();
    let asked = ledger.copies();
    ledger.apply_pod(bound("p", "a", "a-0", 60));
    let unbound = PodFacts {
        resource_version: "0".into(),
        ..pod("p", 60)
    };
    ledger.read_back(unbound.clone(), asked, at(1));
    assert_eq!(free(&ledger, "a"), [40]);
    ledger.read_back(unbound, ledger.copies(), at(1));
    assert_eq!(free(&ledger, "a"), [100]);
}

#[test]
fn a_late_read_does_not_bring_a_deleted_pod_back_and_a_later_one_or_a_list_does() {
    let p = bound("p", "a", "a-0", 60);
    let deleted = || {
        let mut ledger = on_a();
        let asked = ledger.copies();
        ledger.apply_pod(p.clone());
        ledger.delete_pod("p");
        ledger.read_back(p.clone(), asked, at(1));
        assert_eq!(free(&ledger, "a"), [100]);
        ledger
    };
    let mut read = deleted();
    read.read_back(p.clone(), read.copies(), at(1));
    let mut listed = deleted();
    listed.reset_pods(vec![p.clone().into()], listed.copies());
    assert_eq!((free(&read, "a"), free(&listed, "a")), (vec![40], vec![40]));
}

#[test]
fn a_filter_call_after_the_deletion_reserves_nothing() {
    let mut ledger = on_a();
    ledger.apply_pod(pod("p", 60));
    ledger.delete_pod("p");
    let p = pod("p", 60);
    let verdict = ledger.filter(&ask(&p), &["a"], at(1));
    assert_eq!(verdict.refused, [("a", Reason::Gone)]);
    assert_eq!(free(&ledger, "a"), [100]);
}

#[test]
fn a_reservation_ends_with_a_list_that_began_later_and_lacks_the_pod() {
    let mut ledger = on_a();
    let before = ledger.copies();
    assert_eq!(choose(&mut ledger, &pod("p", 60), &["a"], at(1)), ["a"]);
    ledger.reset_pods(Vec::new(), before);
    assert_eq!(free(&ledger, "a"), [40]);
    ledger.reset_pods(Vec::new(), ledger.copies());
    assert_eq!(free(&ledger, "a"), [100]);
}

#[test]
fn a_reservation_ends_when_the_scheduler_says_again_that_it_gave_the_pod_up() {
    let mut ledger = ledger(&[("a", &[100]), ("b", &[100])]);
    ledger.apply_pod(refused("p", 1));
    assert_eq!(
        choose(&mut ledger, &refused("p", 2), &["a", "b"], at(1)),
        ["a"]
    );
    // Two copies that are older than the question, and one without a refusal.
    for copy in [refused("p", 1), refused("p", 2), pod("p", 60)] {
        ledger.apply_pod(copy);
        assert_eq!(free(&ledger, "a"), [40]);
    }
    ledger.apply_pod(refused("p", 3));
    assert_eq!(free(&ledger, "a"), [100]);
    assert!(ledger.is_waiting("p"));
    // Something after us did not want that node.
    assert_eq!(
        choose(&mut ledger, &refused("p", 3), &["a", "b"], at(1)),
        ["b"]
    );
    let p = refused("p", 3);
    ledger.begin_bind(&p, "b", at(1)).expect("it fits");
    ledger.apply_pod(refused("p", 4));
    assert_eq!(free(&ledger, "b"), [40]);
}

#[test]
fn a_bind_that_no_watch_confirms_is_to_be_read_again() {
    let mut ledger = on_a();
    let p = pod("p", 60);
    ledger.begin_bind(&p, "a", at(1)).expect("it fits");
    ledger.end_bind(&p, Outcome::Bound, at(1));
    assert!(ledger.unconfirmed(at(5)).is_empty());
    let late = ledger.unconfirmed(at(60));
    assert_eq!(late.iter().map(|pod| &*pod.uid).collect::<Vec<_>>(), ["p"]);
    ledger.apply_pod(bound("p", "a", "a-0", 60));
    assert!(ledger.unconfirmed(at(60)).is_empty());
}

#[test]
fn what_a_pod_asks_for_at_its_bind_is_fitted_again() {
    let mut ledger = ledger(&[("a", &[100, 100])]);
    ledger.apply_pod(bound("other", "a", "a-0", 10));
    let p = pod("p", 60);
    assert_eq!(choose(&mut ledger, &p, &["a"], at(1)), ["a"]);
    assert_eq!(free(&ledger, "a"), [30, 100]);
    let whole = exclusive(p);
    let assignment = ledger.begin_bind(&whole, "a", at(1)).expect("it fits");
    assert_eq!(&*assignment.charges[0].0, "a-1");
    assert_eq!(free(&ledger, "a"), [90, 0]);
}
