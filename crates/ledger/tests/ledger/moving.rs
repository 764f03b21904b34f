//! What is kept while pods move for one that waits for pieces.

use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_ledger::{Config, Ledger};

use crate::build::{at, bound, card, choose, node, pod, report};

/// A ledger that has pods move, with two cards of 100 MiB on two nodes and 60 free on each: 80 fit on none.
fn scattered() -> Ledger {
    let config = Config {
        moves: true,
        ..Config::default()
    };
    let mut ledger = Ledger::new(config);
    for name in ["a", "b"] {
        ledger.apply_node(node(name));
        ledger.apply_gpunode(name, report(&[card(&format!("{name}-0"), 100)]), at(0));
    }
    ledger.apply_pod(movable("x", "a-0", 40));
    ledger.apply_pod(movable("y", "b-0", 30));
    ledger.apply_pod(bound("z", "b", "b-0", 10));
    ledger.apply_pod(waits("p", 80));
    ledger
}

fn movable(uid: &str, card: &str, mib: u64) -> PodFacts {
    let node = card.split('-').next().unwrap_or_default();
    PodFacts {
        movable: Some("its-replicaset".into()),
        ..bound(uid, node, card, mib)
    }
}

fn leaving(uid: &str, card: &str, mib: u64) -> PodFacts {
    PodFacts {
        deleting: true,
        ..movable(uid, card, mib)
    }
}

fn waits(uid: &str, mib: u64) -> PodFacts {
    PodFacts {
        waiting: true,
        ..pod(uid, mib)
    }
}

/// A pod of the same controller as those that may move.
fn successor(uid: &str, mib: u64) -> PodFacts {
    PodFacts {
        movable: Some("its-replicaset".into()),
        ..waits(uid, mib)
    }
}

/// Who is named at `second`, which is six seconds after the first look.
fn due(ledger: &mut Ledger, second: u64) -> Option<String> {
    let first = ledger.due_to_move(at(second - 6));
    assert!(first.is_none(), "named at the first look: {first:?}");
    let due = ledger.due_to_move(at(second));
    due.map(|pod| pod.uid.to_string())
}

/// Decides for `p` while budgets protect these, and so many may move.
fn decide(ledger: &mut Ledger, protected: &[&str], most: usize, second: u64) -> bool {
    let broken = |pods: &[Arc<PodFacts>]| {
        let broken = pods.iter().filter(|pod| protected.contains(&&*pod.uid));
        broken.map(|pod| pod.uid.clone()).collect()
    };
    ledger.move_for("p", &broken, most, at(second))
}

/// Who moves still for `p`, and where it is to go.
fn moving(ledger: &mut Ledger, second: u64) -> Option<(String, Vec<String>)> {
    ledger.scattered(at(second));
    let all = ledger.preemptions(at(second));
    let of_it = all.iter().find(|it| it.moves && *it.pod.uid == *"p")?;
    let who = of_it.victims.iter().map(|pod| pod.uid.to_string());
    Some((of_it.node.to_string(), who.collect()))
}

fn on(node: &str, who: &[&str]) -> Option<(String, Vec<String>)> {
    let who = who.iter().map(|uid| (*uid).to_owned());
    Some((node.to_owned(), who.collect()))
}

#[test]
fn one_moves_and_both_get_the_room_that_is_kept_for_them() {
    let mut ledger = scattered();
    assert_eq!(due(&mut ledger, 6).as_deref(), Some("p"));
    assert!(decide(&mut ledger, &[], 1, 6));
    assert_eq!(moving(&mut ledger, 7), on("b", &["y"]));
    // One at a time, and nobody gets what is kept: 60 of a-0 for p's 80 are none of it, 30 for y's successor are.
    assert!(ledger.due_to_move(at(60)).is_none());
    assert!(choose(&mut ledger, &waits("late", 40), &["a", "b"], at(7)).is_empty());
    assert_eq!(
        choose(&mut ledger, &waits("small", 25), &["a"], at(7)),
        ["a"]
    );

    ledger.apply_pod(leaving("y", "b-0", 30));
    assert_eq!(moving(&mut ledger, 8), on("b", &[]));
    // Of the same controller, and not of the same size.
    assert!(choose(&mut ledger, &successor("large", 40), &["a"], at(8)).is_empty());
    let comes = successor("y2", 30);
    assert_eq!(choose(&mut ledger, &comes, &["a", "b"], at(8)), ["a"]);
    ledger.apply_pod(movable("y2", "a-0", 30));
    ledger.delete_pod("y");
    assert!(choose(&mut ledger, &waits("late", 40), &["b"], at(9)).is_empty());
    assert_eq!(
        choose(&mut ledger, &waits("p", 80), &["a", "b"], at(9)),
        ["b"]
    );
    assert_eq!(moving(&mut ledger, 9), None);
    // Nothing is kept any more: 100 less 40, 25 and 30, and less 10 and 80, is all that there is.
    assert_eq!(
        choose(&mut ledger, &waits("five", 5), &["a"], at(10)),
        ["a"]
    );
    assert_eq!(
        choose(&mut ledger, &waits("ten", 10), &["b"], at(10)),
        ["b"]
    );
}

#[test]
fn nobody_moves_without_the_setting_against_a_budget_or_beyond_the_rate() {
    let mut off = Ledger::new(Config::default());
    off.apply_pod(waits("p", 80));
    assert!(off.due_to_move(at(60)).is_none());

    let mut ledger = scattered();
    assert!(!decide(&mut ledger, &[], 0, 6));
    assert!(!decide(&mut ledger, &["x", "y"], 5, 6));
    assert_eq!(moving(&mut ledger, 6), None);
    // The least that no budget forbids.
    assert!(decide(&mut ledger, &["y"], 5, 6));
    assert_eq!(moving(&mut ledger, 6), on("a", &["x"]));
}

#[test]
fn a_search_that_found_nothing_rests() {
    let mut ledger = scattered();
    assert_eq!(due(&mut ledger, 6).as_deref(), Some("p"));
    assert!(!decide(&mut ledger, &["x", "y"], 5, 6));
    assert!(ledger.due_to_move(at(30)).is_none());
    assert!(ledger.due_to_move(at(36)).is_some());
}

#[test]
fn room_is_given_up_in_time_and_not_tried_there_again() {
    let mut ledger = scattered();
    assert!(decide(&mut ledger, &[], 1, 6));
    let over = 6 + Config::default().call_back_for.as_secs() + 40;
    assert_eq!(moving(&mut ledger, over), None);
    // y stayed: nothing is kept for its successor either.
    let late = choose(&mut ledger, &waits("late", 60), &["a"], at(over));
    assert_eq!(late, ["a"]);
    ledger.delete_pod("late");
    // Nobody moves for it elsewhere before a pause.
    assert!(!decide(&mut ledger, &[], 1, over));
    let later = over + 61;
    assert!(decide(&mut ledger, &[], 1, later));
    assert_eq!(moving(&mut ledger, later), on("a", &["x"]));
}

#[test]
fn who_left_for_nothing_finds_a_place_all_the_same() {
    let mut ledger = scattered();
    assert!(decide(&mut ledger, &[], 1, 6));
    ledger.apply_pod(leaving("y", "b-0", 30));
    // The pod that it was for is deleted meanwhile.
    ledger.delete_pod("p");
    assert_eq!(moving(&mut ledger, 7), None);
    assert!(choose(&mut ledger, &waits("late", 60), &["a"], at(7)).is_empty());
    assert_eq!(
        choose(&mut ledger, &successor("y2", 30), &["a"], at(7)),
        ["a"]
    );

    // And if it does not come, not for ever.
    let mut ledger = scattered();
    assert!(decide(&mut ledger, &[], 1, 6));
    ledger.apply_pod(leaving("y", "b-0", 30));
    ledger.delete_pod("y");
    let over = at(6 + 2 * Config::default().call_back_for.as_secs() + 40);
    ledger.apply_gpunode("a", report(&[card("a-0", 100)]), over);
    ledger.scattered(over);
    assert_eq!(choose(&mut ledger, &waits("late", 60), &["a"], over), ["a"]);
}
