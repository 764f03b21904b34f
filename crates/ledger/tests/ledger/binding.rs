//! From the reservation to the bound pod, with outcomes late, lost and doubled.

use gpustow_api::PodFacts;
use gpustow_ledger::{Ask, BindRefusal, Config, Outcome, Reason};

use crate::act::Act as _;
use crate::build::{ask, asking, assumed, at, bound, choose, free, ledger, pod};
use crate::reservations::{AFTER, keep, keeping};

#[test]
fn an_unknown_outcome_holds_its_memory_beyond_every_deadline() {
    let mut ledger = ledger(&[("a", &[100]), ("b", &[100])]);
    let p = pod("p", 60);
    choose(&mut ledger, &p, &["a"], at(0));
    assert!(ledger.begin_bind(&p, "a", at(0)).is_ok());
    ledger.expire(at(10_000));
    assert!(ledger.is_binding("p"));
    assert_eq!((free(&ledger, "a"), assumed(&ledger)), (vec![40], (0, 1)));
    assert_eq!(choose(&mut ledger, &p, &["a", "b"], at(1)), ["a"]);
    let refused = ledger.filter(&ask(&p), &["b"], at(1)).refused;
    assert_eq!(refused, [("b", Reason::BindUnderWay)]);
    let elsewhere = ledger.begin_bind(&p, "b", at(1));
    assert_eq!(elsewhere, Err(BindRefusal::UnderWay("a".into())));
}

#[test]
fn a_second_bind_keeps_the_memory_of_the_first() {
    let mut ledger = ledger(&[("a", &[100])]);
    let p = pod("p", 60);
    let first = ledger.begin_bind(&p, "a", at(0));
    assert_eq!(ledger.begin_bind(&p, "a", at(0)), first);
    ledger.end_bind(&p, Outcome::Conflict, at(0));
    assert_eq!(
        (free(&ledger, "a"), ledger.is_binding("p")),
        (vec![40], true)
    );
    ledger.end_bind(&p, Outcome::Failed, at(0));
    assert_eq!((free(&ledger, "a"), assumed(&ledger)), (vec![100], (0, 0)));
}

#[test]
fn a_bound_pod_is_held_whichever_source_says_so_first() {
    let mut ledger = ledger(&[("a", &[100])]);
    for watch_first in [true, false] {
        let p = pod("p", 60);
        ledger.apply_pod(p.clone());
        let assignment = ledger.begin_bind(&p, "a", at(0)).expect("room");
        let told = PodFacts {
            node: Some("a".into()),
            assignment: Some(Ok(assignment)),
            ..p.clone()
        };
        if watch_first {
            ledger.apply_pod(told.clone());
        }
        ledger.end_bind(&p, Outcome::Bound, at(0));
        // A copy from before the bind arrives late.
        ledger.apply_pod(p.clone());
        assert_eq!((free(&ledger, "a"), assumed(&ledger)), (vec![40], (0, 0)));
        assert_eq!(choose(&mut ledger, &p, &["a"], at(1)), ["a"]);
        assert_eq!((free(&ledger, "a"), assumed(&ledger)), (vec![40], (0, 0)));
        let again = ledger.begin_bind(&p, "a", at(1));
        assert_eq!(again, Err(BindRefusal::Bound("a".into())));
        ledger.delete_pod("p");
        assert_eq!(free(&ledger, "a"), [100]);
    }
}

#[test]
fn a_pod_deleted_during_its_bind_holds_nothing_afterwards() {
    let mut ledger = ledger(&[("a", &[100])]);
    let p = pod("p", 60);
    ledger.apply_pod(p.clone());
    assert!(ledger.begin_bind(&p, "a", at(0)).is_ok());
    ledger.delete_pod("p");
    ledger.end_bind(&p, Outcome::Bound, at(0));
    assert_eq!((free(&ledger, "a"), ledger.pods().count()), (vec![100], 0));
}

#[test]
fn a_bind_without_a_reservation_needs_room() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(bound("old", "a", "a-0", 60));
    assert!(ledger.begin_bind(&pod("p", 60), "a", at(0)).is_err());
    assert!(ledger.begin_bind(&pod("q", 40), "a", at(0)).is_ok());
}

#[test]
fn a_list_that_began_before_our_bind_does_not_undo_it() {
    let mut ledger = ledger(&[("a", &[100])]);
    let p = pod("p", 60);
    let began = ledger.copies();
    assert!(ledger.begin_bind(&p, "a", at(5)).is_ok());
    ledger.end_bind(&p, Outcome::Bound, at(5));
    ledger.reset_pods(Vec::new(), began);
    assert_eq!(free(&ledger, "a"), [40]);
    ledger.reset_pods(Vec::new(), ledger.copies());
    assert_eq!(free(&ledger, "a"), [100]);
}

#[test]
fn a_list_that_lacks_a_pod_that_a_watch_has_shown_ends_it() {
    let mut ledger = ledger(&[("a", &[100])]);
    let p = pod("p", 60);
    ledger.apply_pod(p.clone());
    let began = ledger.copies();
    assert!(ledger.begin_bind(&p, "a", at(5)).is_ok());
    ledger.end_bind(&p, Outcome::Bound, at(5));
    ledger.reset_pods(Vec::new(), began);
    assert_eq!((free(&ledger, "a"), ledger.pods().count()), (vec![100], 0));
}

#[test]
fn a_list_with_an_older_copy_does_not_undo_a_bind() {
    let mut ledger = ledger(&[("a", &[100])]);
    let p = pod("p", 60);
    let began = ledger.copies();
    assert!(ledger.begin_bind(&p, "a", at(5)).is_ok());
    ledger.end_bind(&p, Outcome::Bound, at(5));
    ledger.reset_pods(vec![p.into()], began);
    assert_eq!(free(&ledger, "a"), [40]);
}

#[test]
fn a_node_whose_bindings_are_refused_is_left_for_another() {
    let mut ledger = ledger(&[("a", &[100]), ("b", &[100])]);
    let p = pod("p", 60);
    ledger.apply_pod(p.clone());
    let mut cycle = |outcome| {
        let node = choose(&mut ledger, &p, &["a", "b"], at(0))[0];
        assert!(ledger.begin_bind(&p, node, at(0)).is_ok());
        ledger.end_bind(&p, outcome, at(0));
        node
    };
    let first = cycle(Outcome::Refused);
    let second = cycle(Outcome::Refused);
    assert_ne!(first, second);
    // Both nodes refused it: they are as good as each other again.
    assert_eq!(cycle(Outcome::Refused), first);
    assert_eq!(cycle(Outcome::Failed), second);
    assert_eq!(cycle(Outcome::Failed), second);
}

#[test]
fn a_pod_that_finds_its_node_full_at_its_bind_is_soon_sent_to_one_node_alone() {
    let mut ledger = ledger(&[("a", &[100]), ("b", &[100]), ("c", &[100])]);
    let p = pod("p", 60);
    ledger.apply_pod(p.clone());
    ledger.apply_pod(bound("full", "c", "c-0", 60));
    let cooperative = Ask {
        cooperative: true,
        ..ask(&p)
    };
    for _ in 0..2 {
        let nodes = ledger.filter(&cooperative, &["a", "b"], at(0)).nodes;
        assert_eq!(nodes.len(), 2);
        // Its own preferences led it where another pod was faster.
        let full = ledger.begin_bind(cooperative.pod, "c", at(0));
        assert!(matches!(full, Err(BindRefusal::NoFit { .. })));
    }
    let nodes = ledger.filter(&cooperative, &["a", "b"], at(0)).nodes;
    assert_eq!(nodes.len(), 1);
}

#[test]
fn reservation_lasts_until_the_bind_though_a_refusal_before_the_offer_is_shown_late() {
    let mut ledger = keeping(&[("a", 2)], Config::default());
    ledger.apply_pod(bound("one", "a", "a-0", 100));
    let large = asking("large", &[(2, 100)]);
    ledger.apply_pod(large.clone());
    assert_eq!(choose(&mut ledger, &large, &["a"], at(0)), [""; 0]);
    keep(&mut ledger, AFTER);
    let later = pod("later", 100);
    ledger.apply_pod(later.clone());
    assert_eq!(choose(&mut ledger, &later, &["a"], at(AFTER)), [""; 0]);

    ledger.delete_pod("one");
    assert_eq!(choose(&mut ledger, &large, &["a"], at(AFTER)), ["a"]);
    keep(&mut ledger, 2 * AFTER);
    let refused = PodFacts {
        waiting: true,
        refusal: 1,
        ..large.clone()
    };
    ledger.apply_pod(refused);
    assert_eq!(choose(&mut ledger, &later, &["a"], at(AFTER)), [""; 0]);
    assert!(ledger.begin_bind(&large, "a", at(AFTER)).is_ok());
    ledger.end_bind(&large, Outcome::Bound, at(AFTER));
    assert!(ledger.reservations().is_empty());
}
