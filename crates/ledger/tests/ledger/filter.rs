//! Filter and prioritize: the choice, its reservation, and the result when something after us refuses it.

use gpustow_api::NodeFacts;
use gpustow_ledger::{Ask, Outcome, ShareState};

use crate::build::{ask, asking, assumed, at, bound, choose, exclusive, free, ledger, node, pod};

const TWO: [(&str, &[u64]); 2] = [("a", &[100]), ("b", &[100])];

#[test]
fn the_fullest_card_that_does_is_chosen_and_reserved() {
    let mut ledger = ledger(&TWO);
    ledger.apply_pod(bound("old", "b", "b-0", 40));
    assert_eq!(
        choose(&mut ledger, &pod("p", 60), &["a", "b"], at(1)),
        ["b"]
    );
    assert_eq!((free(&ledger, "b"), assumed(&ledger)), (vec![0], (1, 0)));
    let snapshot = ledger.snapshot(at(1));
    let shares = &snapshot[1].cards[0].pods;
    assert!(
        shares
            .iter()
            .any(|share| *share.uid == *"p" && share.state == ShareState::Reserved)
    );
}

#[test]
fn reserving_twice_is_one_reservation() {
    let mut ledger = ledger(&TWO);
    for _ in 0..3 {
        assert_eq!(choose(&mut ledger, &pod("p", 60), &["a"], at(1)), ["a"]);
        assert_eq!((free(&ledger, "a"), assumed(&ledger)), (vec![40], (1, 0)));
    }
}

#[test]
fn a_node_refused_after_us_goes_last_until_all_were_tried() {
    let mut ledger = ledger(&[("a", &[100]), ("b", &[100]), ("c", &[100])]);
    let asked: Vec<_> = (0..4)
        .map(|_| choose(&mut ledger, &pod("p", 60), &["a", "b", "c"], at(1))[0])
        .collect();
    assert_eq!(asked, ["a", "b", "c", "a"]);
}

#[test]
fn a_reservation_that_expires_counts_as_a_refusal() {
    let mut ledger = ledger(&TWO);
    let pod = pod("p", 60);
    ledger.apply_pod(pod.clone());
    assert_eq!(choose(&mut ledger, &pod, &["a", "b"], at(0)), ["a"]);
    ledger.expire(at(30));
    assert!(ledger.is_waiting("p"));
    assert_eq!(choose(&mut ledger, &pod, &["a", "b"], at(31)), ["b"]);
}

#[test]
fn a_settled_bind_is_no_refusal() {
    let mut ledger = ledger(&TWO);
    let pod = pod("p", 60);
    ledger.apply_pod(pod.clone());
    choose(&mut ledger, &pod, &["a", "b"], at(0));
    assert!(ledger.begin_bind(&pod, "a", at(0)).is_ok());
    ledger.end_bind(&pod, Outcome::Failed, at(0));
    assert_eq!(choose(&mut ledger, &pod, &["a", "b"], at(0)), ["a"]);
}

#[test]
fn a_reservation_ends_at_its_deadline_and_a_slow_one_later() {
    let mut ledger = ledger(&TWO);
    let (quick, slow) = (pod("quick", 60), pod("slow", 60));
    choose(&mut ledger, &quick, &["a"], at(0));
    ledger.filter(
        &Ask {
            slow: true,
            ..ask(&slow)
        },
        &["b"],
        at(0),
    );
    ledger.expire(at(29));
    assert_eq!(assumed(&ledger), (2, 0));
    ledger.expire(at(30));
    assert_eq!(
        (free(&ledger, "a"), free(&ledger, "b")),
        (vec![100], vec![40])
    );
    ledger.expire(at(660));
    assert_eq!(free(&ledger, "b"), [100]);
}

#[test]
fn a_deleted_pod_gives_its_reservation_back() {
    let mut ledger = ledger(&TWO);
    ledger.apply_pod(pod("p", 60));
    choose(&mut ledger, &pod("p", 60), &["a"], at(0));
    ledger.delete_pod("p");
    assert_eq!((free(&ledger, "a"), assumed(&ledger)), (vec![100], (0, 0)));
}

#[test]
fn prefer_no_schedule_comes_last_unless_tolerated() {
    let mut ledger = ledger(&TWO);
    ledger.apply_node(NodeFacts {
        prefer_no_schedule: vec![("spot".into(), "".into())],
        ..node("a")
    });
    let wary = pod("wary", 10);
    let verdict = ledger.filter(
        &Ask {
            tolerates: &|_| false,
            ..ask(&wary)
        },
        &["a", "b"],
        at(0),
    );
    assert_eq!(verdict.nodes, ["b"]);
    ledger.delete_pod("wary");
    assert_eq!(
        choose(&mut ledger, &pod("bold", 10), &["a", "b"], at(0)),
        ["a"]
    );
    let wary = pod("again", 10);
    let verdict = ledger.filter(
        &Ask {
            tolerates: &|_| false,
            ..ask(&wary)
        },
        &["a"],
        at(0),
    );
    assert_eq!(verdict.nodes, ["a"]);
}

#[test]
fn a_cooperative_pod_hears_of_every_node_until_two_conflicts() {
    let mut ledger = ledger(&[("a", &[100]), ("b", &[100]), ("c", &[10])]);
    let pod = pod("p", 60);
    ledger.apply_pod(pod.clone());
    let cooperative = Ask {
        cooperative: true,
        ..ask(&pod)
    };
    for _ in 0..2 {
        let verdict = ledger.filter(&cooperative, &["c", "b", "a"], at(0));
        assert_eq!((verdict.nodes, verdict.refused.len()), (vec!["a", "b"], 1));
        assert_eq!(
            (free(&ledger, "a"), free(&ledger, "b")),
            (vec![40], vec![100])
        );
        // The scheduler prefers the other: the reservation moves.
        assert!(ledger.begin_bind(cooperative.pod, "b", at(0)).is_ok());
        assert_eq!(
            (free(&ledger, "a"), free(&ledger, "b")),
            (vec![100], vec![40])
        );
        ledger.end_bind(&pod, Outcome::Conflict, at(0));
    }
    assert_eq!(ledger.filter(&cooperative, &["b", "a"], at(0)).nodes, ["a"]);
}

#[test]
fn ranks_run_from_ten_to_zero_and_agree_with_filter() {
    let sizes: [(&str, &[u64]); 4] = [("a", &[100]), ("b", &[80]), ("c", &[60]), ("d", &[10])];
    let mut ledger = ledger(&sizes);
    let pod = pod("p", 50);
    let cooperative = Ask {
        cooperative: true,
        ..ask(&pod)
    };
    let verdict = ledger.filter(&cooperative, &["a", "b", "c", "d"], at(0));
    assert_eq!(verdict.nodes, ["c", "b", "a"]);
    assert_eq!(
        ledger.rank(
            cooperative.pod,
            cooperative.tolerates,
            &["a", "b", "c", "d"],
            at(0)
        ),
        [0, 5, 10, 0]
    );
    assert_eq!(
        ledger.rank(cooperative.pod, cooperative.tolerates, &["a"], at(0)),
        [10]
    );
    assert!(
        ledger
            .rank(cooperative.pod, cooperative.tolerates, &[], at(0))
            .is_empty()
    );
}

#[test]
fn several_cards_and_whole_cards() {
    let mut ledger = ledger(&[("a", &[100, 100, 80])]);
    assert_eq!(
        choose(&mut ledger, &asking("two", &[(2, 90)]), &["a"], at(0)),
        ["a"]
    );
    assert_eq!(free(&ledger, "a"), [10, 10, 80]);
    assert_eq!(
        choose(&mut ledger, &exclusive(pod("whole", 50)), &["a"], at(0)),
        ["a"]
    );
    assert_eq!(free(&ledger, "a"), [10, 10, 0]);
    assert!(choose(&mut ledger, &exclusive(pod("late", 5)), &["a"], at(0)).is_empty());
}

#[test]
fn nodes_outside_the_window_that_refused_the_pod_stay_last() {
    let mut ledger = ledger(&[("a", &[100]), ("b", &[100]), ("c", &[90])]);
    let p = pod("p", 60);
    ledger.apply_pod(p.clone());
    assert_eq!(choose(&mut ledger, &p, &["a", "b"], at(0)), ["a"]);
    assert_eq!(choose(&mut ledger, &p, &["b"], at(1)), ["b"]);
    // Both were refused by something else. A window of `a` alone forgets `a` and not `b`.
    assert_eq!(choose(&mut ledger, &p, &["a"], at(2)), ["a"]);
    assert_eq!(choose(&mut ledger, &p, &["b", "c"], at(3)), ["c"]);
}
