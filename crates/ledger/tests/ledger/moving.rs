//! The room that is kept while pods move for one that waits for pieces.

use gpustow_api::PodFacts;
use gpustow_ledger::{Cause, Config, Ledger};

use crate::act::Act as _;
use crate::build::{at, bound, card, choose, joins, offer_all, pod, protect, report, waiting};

/// A ledger that has pods move, with two cards of 100 MiB on two nodes and 60 free on each: 80 fit on none.
fn fragmented() -> Ledger {
    let config = Config {
        defragment: true,
        ..Config::default()
    };
    let mut ledger = Ledger::new(config);
    for name in ["a", "b"] {
        joins(&mut ledger, name, &[100]);
    }
    ledger.apply_pod(evictable("x", "a-0", 40));
    ledger.apply_pod(evictable("y", "b-0", 30));
    ledger.apply_pod(bound("z", "b", "b-0", 10));
    ledger.apply_pod(waiting(0, pod("p", 80)));
    ledger
}

/// As [`fragmented`], with a second card on each node that has 30 free: 80 fit in the sum of each node, and on no card.
fn in_pieces(config: Config) -> Ledger {
    let mut ledger = Ledger::new(Config {
        defragment: true,
        ..config
    });
    for name in ["a", "b"] {
        joins(&mut ledger, name, &[100; 2]);
        let full = format!("{name}-1");
        ledger.apply_pod(bound(&format!("f{name}"), name, &full, 70));
    }
    ledger.apply_pod(evictable("x", "a-0", 40));
    ledger.apply_pod(evictable("y", "b-0", 30));
    ledger.apply_pod(bound("z", "b", "b-0", 10));
    ledger
}

fn evictable(uid: &str, card: &str, mib: u64) -> PodFacts {
    let node = card.split('-').next().unwrap_or_default();
    PodFacts {
        evictable: Some("its-replicaset".into()),
        ..bound(uid, node, card, mib)
    }
}

fn leaving(uid: &str, card: &str, mib: u64) -> PodFacts {
    PodFacts {
        deleting: true,
        ..evictable(uid, card, mib)
    }
}

/// A pod of the same controller as the pods that may move.
fn successor(uid: &str, mib: u64) -> PodFacts {
    PodFacts {
        evictable: Some("its-replicaset".into()),
        ..waiting(0, pod(uid, mib))
    }
}

/// Who is named at `second`, which is six seconds after kube-scheduler's call and the first look.
fn due(ledger: &mut Ledger, second: u64) -> Option<String> {
    offer_all(ledger, at(second - 6));
    let first = ledger.defragment(5, at(second - 6));
    assert!(first.is_none(), "named at the first look: {first:?}");
    let due = ledger.defragment(5, at(second));
    due.map(|pod| pod.uid.to_string())
}

/// Decides for `p` while budgets protect these, and so many may move.
fn decide(ledger: &mut Ledger, protected: &[&str], most: usize, second: u64) -> bool {
    offer_all(ledger, at(second - 6));
    protect(ledger, protected, 0);
    ledger.defragment(most, at(second - 6));
    ledger.defragment(most, at(second)).is_some()
}

/// Who moves still for `p`, and where it is to go.
fn moving(ledger: &mut Ledger, second: u64) -> Option<(String, Vec<String>)> {
    ledger.fragmented(at(second));
    let all = ledger.preemptions(at(second));
    let of_it = all
        .iter()
        .find(|it| it.cause == Cause::Defragment && *it.pod.uid == *"p")?;
    let who = of_it.victims.iter().map(|pod| pod.uid.to_string());
    Some((of_it.node.to_string(), who.collect()))
}

pub(crate) fn on(node: &str, who: &[&str]) -> Option<(String, Vec<String>)> {
    let who = who.iter().map(|uid| (*uid).to_owned());
    Some((node.to_owned(), who.collect()))
}

#[test]
fn one_moves_and_both_get_the_room_that_is_kept_for_them() {
    let mut ledger = fragmented();
    assert_eq!(due(&mut ledger, 6).as_deref(), Some("p"));
    assert_eq!(moving(&mut ledger, 7), on("b", &["y"]));
    // One pod moves at a time. No other pod gets kept room: of a-0's 60, 30 are kept for y's successor and none for p.
    assert!(ledger.defragment(5, at(60)).is_none());
    assert!(
        choose(
            &mut ledger,
            &waiting(0, pod("late", 40)),
            &["a", "b"],
            at(7)
        )
        .is_empty()
    );
    assert_eq!(
        choose(&mut ledger, &waiting(0, pod("small", 25)), &["a"], at(7)),
        ["a"]
    );

    ledger.apply_pod(leaving("y", "b-0", 30));
    assert_eq!(moving(&mut ledger, 8), on("b", &[]));
    // Of the same controller, and not of the same size.
    assert!(choose(&mut ledger, &successor("large", 40), &["a"], at(8)).is_empty());
    let comes = successor("y2", 30);
    assert_eq!(choose(&mut ledger, &comes, &["a", "b"], at(8)), ["a"]);
    ledger.apply_pod(evictable("y2", "a-0", 30));
    ledger.delete_pod("y");
    assert!(choose(&mut ledger, &waiting(0, pod("late", 40)), &["b"], at(9)).is_empty());
    assert_eq!(
        choose(&mut ledger, &waiting(0, pod("p", 80)), &["a", "b"], at(9)),
        ["b"]
    );
    assert_eq!(moving(&mut ledger, 9), None);
    // Nothing is kept any more: 100 less 40, 25 and 30, and less 10 and 80, is all that there is.
    assert_eq!(
        choose(&mut ledger, &waiting(0, pod("five", 5)), &["a"], at(10)),
        ["a"]
    );
    assert_eq!(
        choose(&mut ledger, &waiting(0, pod("ten", 10)), &["b"], at(10)),
        ["b"]
    );
}

#[test]
fn no_pod_moves_without_the_setting_against_a_budget_or_beyond_the_rate() {
    let mut off = Ledger::new(Config::default());
    off.apply_pod(waiting(0, pod("p", 80)));
    assert!(off.defragment(5, at(60)).is_none());

    assert!(!decide(&mut fragmented(), &[], 0, 6));
    let mut ledger = fragmented();
    assert!(!decide(&mut ledger, &["x", "y"], 5, 6));
    assert_eq!(moving(&mut ledger, 6), None);
    let mut ledger = fragmented();
    // The least that no budget forbids.
    assert!(decide(&mut ledger, &["y"], 5, 6));
    assert_eq!(moving(&mut ledger, 6), on("a", &["x"]));
}

#[test]
fn a_search_that_found_nothing_rests() {
    let mut ledger = fragmented();
    assert!(!decide(&mut ledger, &["x", "y"], 5, 6));
    protect(&mut ledger, &["x", "y"], 2);
    assert!(ledger.defragment(5, at(30)).is_none());
    assert!(ledger.defragment(5, at(36)).is_some());
}

#[test]
fn room_is_given_up_in_time_and_not_tried_there_again() {
    let mut ledger = fragmented();
    assert!(decide(&mut ledger, &[], 1, 6));
    let over = 6 + Config::default().reclaim_for.as_secs() + 40;
    assert_eq!(moving(&mut ledger, over), None);
    // y stayed: nothing is kept for its successor either.
    let late = choose(&mut ledger, &waiting(0, pod("late", 60)), &["a"], at(over));
    assert_eq!(late, ["a"]);
    ledger.delete_pod("late");
    // No pod moves for it elsewhere before a pause.
    assert!(!decide(&mut ledger, &[], 1, over));
    let later = over + 67;
    assert!(decide(&mut ledger, &[], 1, later));
    assert_eq!(moving(&mut ledger, later), on("a", &["x"]));
}

#[test]
fn who_left_for_nothing_finds_a_place_all_the_same() {
    let mut ledger = fragmented();
    assert!(decide(&mut ledger, &[], 1, 6));
    ledger.apply_pod(leaving("y", "b-0", 30));
    // The pod that it was for is deleted meanwhile.
    ledger.delete_pod("p");
    assert_eq!(moving(&mut ledger, 7), None);
    assert!(choose(&mut ledger, &waiting(0, pod("late", 60)), &["a"], at(7)).is_empty());
    assert_eq!(
        choose(&mut ledger, &successor("y2", 30), &["a"], at(7)),
        ["a"]
    );

    // And if it does not come, not for ever.
    let mut ledger = fragmented();
    assert!(decide(&mut ledger, &[], 1, 6));
    ledger.apply_pod(leaving("y", "b-0", 30));
    ledger.delete_pod("y");
    let over = at(6 + 2 * Config::default().reclaim_for.as_secs() + 40);
    ledger.apply_gpunode("a", report(&[card("a-0", 100)]), over);
    ledger.fragmented(over);
    assert_eq!(
        choose(&mut ledger, &waiting(0, pod("late", 60)), &["a"], over),
        ["a"]
    );
}

#[test]
fn a_replacement_has_the_namespace_and_priority_of_the_pod_that_moved() {
    let mut ledger = fragmented();
    assert!(decide(&mut ledger, &[], 1, 6));
    ledger.apply_pod(leaving("y", "b-0", 30));
    // 30 of a-0's 60 are kept, so that 40 do not fit in the rest.
    let forged = PodFacts {
        namespace: "other".into(),
        ..successor("forged", 30)
    };
    ledger.apply_pod(bound("z2", "a", "a-0", 30));
    assert!(choose(&mut ledger, &forged, &["a"], at(7)).is_empty());
    let lower = PodFacts {
        priority: -1,
        ..successor("lower", 30)
    };
    assert!(choose(&mut ledger, &lower, &["a"], at(7)).is_empty());
    let comes = successor("y2", 30);
    assert_eq!(choose(&mut ledger, &comes, &["a"], at(7)), ["a"]);
}

/// Looks at each of these seconds, with a call and a report every 25. When it was decided who moves, and where.
fn first_move(
    ledger: &mut Ledger,
    offered: &[&str],
    seconds: std::ops::Range<u64>,
) -> Option<(u64, String)> {
    for second in seconds {
        if second % 25 == 0 {
            for view in ledger.snapshot(at(second)) {
                let name = &*view.name;
                let cards: Vec<_> = view.cards.iter().map(|it| card(&it.uuid, 100)).collect();
                let mut status = report(&cards);
                status.heartbeat = Some(second.to_string());
                ledger.apply_gpunode(name, status, at(second));
            }
            if !offered.is_empty() {
                assert!(choose(ledger, &waiting(0, pod("p", 80)), offered, at(second)).is_empty());
            }
        }
        if ledger.defragment(5, at(second)).is_some() {
            let (node, _) = moving(ledger, second)?;
            return Some((second, node));
        }
    }
    None
}

#[test]
fn no_pod_moves_on_a_node_that_kube_scheduler_does_not_offer() {
    // The least would move from b.
    let waiting = || {
        let mut ledger = in_pieces(Config::default());
        ledger.apply_pod(waiting(0, pod("p", 80)));
        ledger
    };
    let mut ledger = waiting();
    let moved = first_move(&mut ledger, &["a"], 0..60);
    assert_eq!(moved, Some((5, "a".to_owned())));
    let mut ledger = waiting();
    assert_eq!(first_move(&mut ledger, &[], 0..60), None);
    let woken = ledger.wake(9, at(60));
    assert!(woken.iter().any(|pod| *pod.uid == *"p"), "{woken:?}");
}

#[test]
fn pods_move_without_a_call_where_the_sum_of_the_node_does_not_suffice() {
    // kube-scheduler offers none of these nodes, and 60 of the 80 are free on each.
    let moved = first_move(&mut fragmented(), &[], 0..60);
    assert_eq!(moved, Some((5, "b".to_owned())));
}

#[test]
fn queued_pod_is_ungated_so_that_kube_scheduler_asks() {
    let mut ledger = in_pieces(Config {
        queue: true,
        ..Config::default()
    });
    ledger.apply_pod(PodFacts {
        queued: true,
        waiting: false,
        ..waiting(0, pod("p", 80))
    });
    assert_eq!(first_move(&mut ledger, &[], 0..10), None);
    let woken = ledger.wake(9, at(10));
    let ungated: Vec<_> = woken.iter().map(|pod| pod.uid.to_string()).collect();
    assert_eq!(ungated, ["p"]);
}

#[test]
fn a_pod_that_never_terminates_keeps_no_other_node_from_being_freed() {
    let mut ledger = fragmented();
    ledger.apply_pod(leaving("x", "a-0", 40));
    // x could go nowhere, so that y moves to a third node.
    joins(&mut ledger, "c", &[30]);
    let moved = (0..4).find_map(|round| {
        let mut status = report(&[card("c-0", 30)]);
        status.heartbeat = Some(round.to_string());
        ledger.apply_gpunode("c", status, at(25 * round));
        first_move(&mut ledger, &["a", "b"], 25 * round..25 * round + 25)
    });
    let (second, node) = moved.unwrap();
    assert!((60..100).contains(&second), "{second}");
    assert_eq!(node, "b");
}

#[test]
fn seventeen_kinds_that_cannot_be_helped_keep_no_pod_behind_them_from_moves() {
    let mut ledger = fragmented();
    for number in 0..17 {
        ledger.apply_pod(PodFacts {
            priority: 1000,
            ..waiting(0, pod(&format!("large{number}"), 101 + number))
        });
    }
    let moved = first_move(&mut ledger, &["a", "b"], 0..60);
    assert!(moved.is_some());
}

#[test]
fn one_look_for_moves_costs_no_more_with_five_hundred_nodes_than_with_fifty() {
    let most = |nodes: usize| {
        let mut ledger = Ledger::new(Config {
            defragment: true,
            ..Config::default()
        });
        for number in 0..nodes {
            let name = format!("n{number}");
            joins(&mut ledger, &name, &[100; 4]);
            for index in 0..4 {
                let card = format!("{name}-{index}");
                ledger.apply_pod(evictable(&card, &card, 50 + index));
            }
        }
        ledger.apply_pod(waiting(0, pod("p", 80)));
        let (mut most, mut looked) = (0, 0);
        for second in 0..60 {
            if second % 25 == 0 {
                offer_all(&mut ledger, at(second));
            }
            let before = ledger.work();
            ledger.defragment(5, at(second));
            most = most.max(ledger.work() - before);
            looked += ledger.work() - before;
        }
        assert!(looked > 0);
        most
    };
    let (few, many) = (most(50), most(500));
    println!("{few} and {many} a look");
    assert!(few <= 6_000 && many <= 6_000, "{few} and {many}");
}

#[test]
fn pod_whose_volume_may_tie_it_to_its_node_moves_to_no_other() {
    let mut ledger = fragmented();
    let tied = |uid: &str, card: &str, mib| PodFacts {
        tied: true,
        ..evictable(uid, card, mib)
    };
    ledger.apply_pod(tied("y", "b-0", 30));
    assert!(decide(&mut ledger, &[], 1, 6));
    assert_eq!(moving(&mut ledger, 7), on("a", &["x"]));
    let mut ledger = fragmented();
    ledger.apply_pod(tied("x", "a-0", 40));
    ledger.apply_pod(tied("y", "b-0", 30));
    assert!(!decide(&mut ledger, &[], 1, 6));
    // To another card of its node it may.
    let cards = [0, 1].map(|index| card(&format!("b-{index}"), 100));
    ledger.apply_gpunode("b", report(&cards), at(40));
    ledger.apply_pod(bound("full", "b", "b-1", 70));
    assert!(decide(&mut ledger, &[], 1, 60));
    assert_eq!(moving(&mut ledger, 61), on("b", &["y"]));
}

/// A pod that waits for 80 MiB, and nodes with one pod of so many MiB each that may move.
fn each_with_one(sizes: &[u64]) -> Ledger {
    let mut ledger = Ledger::new(Config {
        defragment: true,
        ..Config::default()
    });
    for (index, mib) in sizes.iter().enumerate() {
        let name = format!("n{index:02}");
        joins(&mut ledger, &name, &[100]);
        ledger.apply_pod(evictable(
            &format!("p{index:02}"),
            &format!("{name}-0"),
            *mib,
        ));
    }
    ledger.apply_pod(waiting(0, pod("p", 80)));
    ledger
}

#[test]
fn pods_that_budgets_protect_keep_no_other_from_moving() {
    let sizes: Vec<u64> = (0..30).map(|index| 21 + index).collect();
    let mut ledger = each_with_one(&sizes);
    let protected: Vec<String> = (0..29).map(|index| format!("p{index:02}")).collect();
    protect(&mut ledger, &protected, 0);
    let moved = (0..120).find(|&second| {
        offer_all(&mut ledger, at(second));
        ledger.defragment(100, at(second)).is_some()
    });
    let moves = moved.and_then(|second| moving(&mut ledger, second));
    assert_eq!(moves, on("n29", &["p29"]), "{moved:?}");
}

#[test]
fn plan_of_fewer_pods_is_taken_where_the_hour_allows_no_more() {
    let mut ledger = each_with_one(&[60]);
    for name in ["m", "o"] {
        joins(&mut ledger, name, &[100]);
    }
    for (uid, mib) in [("s", 25), ("t", 25)] {
        ledger.apply_pod(evictable(uid, "m-0", mib));
    }
    ledger.apply_pod(bound("stays", "o", "o-0", 30));
    assert!(decide(&mut ledger, &[], 1, 6));
    assert_eq!(moving(&mut ledger, 6), on("n00", &["p00"]));
}
