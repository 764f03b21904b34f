//! Memory that pods use beyond their requests is reclaimed for pods that have a right to it.

use gpustow_api::PodFacts;
use gpustow_api::config::Action;
use gpustow_api::gpunode::{Condition, PROCESSES_READABLE, PodUse};
use gpustow_ledger::{Config, Ledger, Reason};

use crate::act::Act as _;
use crate::build::{ask, at, bound, card, choose, node, pod, report, used, waiting};

pub(crate) const CARD: u64 = 100;

/// A ledger that reclaims memory, with one node for each list. Each list in it is a card of 100, with the use of pods
/// there.
pub(crate) fn lent(nodes: &[(&str, &[&[PodUse]])]) -> Ledger {
    lent_by(Config::default(), nodes)
}

fn lent_by(config: Config, nodes: &[(&str, &[&[PodUse]])]) -> Ledger {
    let mut ledger = Ledger::new(Config {
        reclaim: true,
        ..config
    });
    for (name, cards) in nodes {
        ledger.apply_node(node(name));
        uses(&mut ledger, name, cards, 0);
    }
    ledger
}

pub(crate) fn uses(ledger: &mut Ledger, name: &str, cards: &[&[PodUse]], second: u64) {
    let cards = cards.iter().enumerate().map(|(index, pods)| {
        let mut card = card(&format!("{name}-{index}"), CARD);
        card.pods = pods.to_vec();
        card
    });
    let mut status = report(&cards.collect::<Vec<_>>());
    status.heartbeat = Some(second.to_string());
    ledger.apply_gpunode(name, status, at(second));
}

pub(crate) fn with_priority(priority: i32, pod: PodFacts) -> PodFacts {
    PodFacts { priority, ..pod }
}

/// The pods that the ledger would have give memory back: (for which pod, victim, its use beyond its request).
pub(crate) fn victims(ledger: &Ledger, second: u64) -> Vec<(String, String, u64)> {
    let backs = ledger.reclaims(at(second));
    let each = backs.iter().flat_map(|back| {
        back.borrowers.iter().map(|victim| {
            let excess = victim.used.minus(victim.held).0;
            (back.pod.uid.to_string(), victim.pod.uid.to_string(), excess)
        })
    });
    each.collect()
}

pub(crate) fn is(waits: &str, victim: &str, excess: u64) -> (String, String, u64) {
    (waits.to_owned(), victim.to_owned(), excess)
}

/// `uid` asks on node `a` and is refused.
pub(crate) fn refused(ledger: &mut Ledger, pod: &PodFacts, second: u64) -> Vec<Reason> {
    ledger.apply_pod(pod.clone());
    let verdict = ledger.filter(&ask(pod), &["a"], at(second));
    assert_eq!(verdict.nodes, [""; 0]);
    verdict.refused.into_iter().map(|(_, why)| why).collect()
}

#[test]
fn a_pod_that_has_a_right_gets_what_was_lent_once_it_is_given_back() {
    let mut ledger = lent(&[("a", &[&[used("greedy", 90)]])]);
    ledger.apply_pod(bound("greedy", "a", "a-0", 30));
    assert_eq!(refused(&mut ledger, &pod("p", 60), 0), [Reason::Reclaimed]);
    assert_eq!(victims(&ledger, 0), [is("p", "greedy", 60)]);
    assert_eq!(
        ledger.explain(&pod("p", 60), "a", at(0)),
        Err(Reason::Reclaimed)
    );
    // In addition to the kept room, 10 are free by the books and by the present use.
    let second = ledger.filter(&ask(&pod("q", 11)), &["a"], at(1));
    assert_eq!(
        second.refused,
        [("a", Reason::Fit(gpustow_pack::Refusal::NoRoom))]
    );
    assert_eq!(choose(&mut ledger, &pod("r", 10), &["a"], at(1)), ["a"]);
    ledger.delete_pod("r");
    // It gives half of it back: that is not for others.
    uses(&mut ledger, "a", &[&[used("greedy", 60)]], 2);
    let second = ledger.filter(&ask(&pod("q", 11)), &["a"], at(2));
    assert_eq!(second.refused, [("a", Reason::Reclaimed)]);
    assert!(ledger.begin_bind(&pod("q", 11), "a", at(2)).is_err());
    let higher = with_priority(1, pod("higher", 11));
    assert_eq!(choose(&mut ledger, &higher, &["a"], at(2)), ["a"]);
    ledger.delete_pod("higher");
    ledger.reclaim(at(3));
    assert_eq!(victims(&ledger, 3), [is("p", "greedy", 30)]);
    // And now all.
    uses(&mut ledger, "a", &[&[used("greedy", 30)]], 4);
    assert_eq!(victims(&ledger, 4), []);
    let woken = ledger.wake(9, at(4));
    assert_eq!(woken.iter().map(|pod| &*pod.uid).collect::<Vec<_>>(), ["p"]);
    assert_eq!(choose(&mut ledger, &pod("p", 60), &["a"], at(4)), ["a"]);
    assert!(ledger.reclaims(at(4)).is_empty());
}

#[test]
fn room_of_a_nominated_pod_is_kept_though_memory_is_reclaimed_for_another() {
    let mut ledger = lent(&[("a", &[&[used("greedy", 90)]])]);
    ledger.apply_pod(bound("greedy", "a", "a-0", 30));
    assert_eq!(refused(&mut ledger, &pod("p", 50), 0), [Reason::Reclaimed]);
    assert_eq!(victims(&ledger, 0), [is("p", "greedy", 60)]);
    ledger.apply_pod(PodFacts {
        nominated: Some("a".into()),
        ..with_priority(1, pod("first", 8))
    });
    // 10 are free, and the memory of `greedy` may not come back.
    assert!(choose(&mut ledger, &pod("q", 5), &["a"], at(1)).is_empty());
    assert_eq!(choose(&mut ledger, &pod("r", 2), &["a"], at(1)), ["a"]);
}

#[test]
fn reclaim_does_nothing_unless_it_is_configured() {
    let mut ledger = crate::build::ledger(&[("a", &[CARD])]);
    ledger.apply_pod(bound("greedy", "a", "a-0", 30));
    uses(&mut ledger, "a", &[&[used("greedy", 90)]], 0);
    let no_room = Reason::Fit(gpustow_pack::Refusal::NoRoom);
    assert_eq!(refused(&mut ledger, &pod("p", 60), 0), [no_room]);
    ledger.reclaim(at(1));
    assert!(ledger.reclaims(at(1)).is_empty());
}

#[test]
fn low_priority_goes_first_then_who_borrows_most_and_no_more_than_it_takes() {
    let on_card = [
        used("high", 40),
        used("low", 15),
        used("mid", 20),
        used("within", 10),
    ];
    let mut ledger = lent(&[("a", &[&on_card])]);
    for (uid, priority, mib) in [
        ("high", 9, 10),
        ("low", 0, 10),
        ("mid", 0, 10),
        ("within", 0, 10),
    ] {
        ledger.apply_pod(with_priority(priority, bound(uid, "a", "a-0", mib)));
    }
    // 15 are free, and 60 by the books: mid has 10 of the 20, and low has at most 5.
    refused(&mut ledger, &pod("p", 20), 0);
    assert_eq!(victims(&ledger, 0), [is("p", "mid", 10)]);
    ledger.delete_pod("p");
    refused(&mut ledger, &pod("p", 30), 0);
    assert_eq!(victims(&ledger, 0), [is("p", "low", 5), is("p", "mid", 10)]);
    ledger.delete_pod("p");
    // With high the others are not needed.
    refused(&mut ledger, &pod("p", 45), 0);
    assert_eq!(victims(&ledger, 0), [is("p", "high", 30)]);
    ledger.delete_pod("p");
    refused(&mut ledger, &pod("p", 60), 0);
    assert_eq!(victims(&ledger, 0).len(), 3);
    ledger.delete_pod("p");
    // That much is promised.
    refused(&mut ledger, &pod("p", 61), 0);
    assert_eq!(victims(&ledger, 0), []);
}

#[test]
fn of_two_who_borrow_as_much_the_one_that_has_been_idle_longest_gives_back() {
    let idle = |uid: &str, since: Option<&str>| PodUse {
        idle_since: since.map(str::to_owned),
        ..used(uid, 30)
    };
    let mut ledger = lent(&[(
        "a",
        &[&[
            idle("busy", None),
            idle("late", Some("2026-01-01T10:00:00Z")),
            idle("long", Some("2026-01-01T09:00:00Z")),
        ]],
    )]);
    for uid in ["busy", "late", "long"] {
        ledger.apply_pod(bound(uid, "a", "a-0", 10));
    }
    refused(&mut ledger, &pod("p", 30), 0);
    assert_eq!(victims(&ledger, 0), [is("p", "long", 20)]);
    ledger.delete_pod("p");
    refused(&mut ledger, &pod("p", 50), 0);
    assert_eq!(
        victims(&ledger, 0),
        [is("p", "late", 20), is("p", "long", 20)]
    );
}

#[test]
fn a_pod_that_holds_nothing_there_or_is_not_seen_is_no_victim() {
    // One holds the other card, one is unknown, strangers are no pods.
    let mut ledger = lent(&[("a", &[&[used("elsewhere", 60), used("unknown", 20)], &[]])]);
    ledger.apply_pod(bound("elsewhere", "a", "a-1", 95));
    refused(&mut ledger, &pod("p", 50), 0);
    ledger.reclaim(at(1));
    assert!(ledger.reclaims(at(1)).is_empty());
}

#[test]
fn no_pod_is_asked_by_a_stale_report() {
    let mut ledger = lent(&[("a", &[&[used("greedy", 90)]])]);
    ledger.apply_pod(bound("greedy", "a", "a-0", 30));
    refused(&mut ledger, &pod("p", 60), 170);
    assert_eq!(victims(&ledger, 180), [is("p", "greedy", 60)]);
    assert_eq!(victims(&ledger, 181), []);
    ledger.reclaim(at(181));
    assert!(ledger.reclaims(at(181)).is_empty());
}

#[test]
fn no_pod_is_asked_if_the_agent_cannot_tell_whose_processes_they_are() {
    let mut ledger = lent(&[("a", &[&[]])]);
    ledger.apply_pod(bound("greedy", "a", "a-0", 30));
    let mut greedy = card("a-0", CARD);
    greedy.pods = vec![used("greedy", 90)];
    let mut half = report(&[greedy]);
    half.conditions = vec![Condition {
        r#type: PROCESSES_READABLE.to_owned(),
        status: "False".to_owned(),
        ..Condition::default()
    }];
    ledger.apply_gpunode("a", half, at(0));
    refused(&mut ledger, &pod("p", 60), 0);
    assert!(ledger.reclaims(at(0)).is_empty());
}

#[test]
fn reclaim_works_for_one_pod_at_a_time_on_a_gpu() {
    let greedy = [used("one", 90)];
    let mut ledger = lent(&[("a", &[&greedy, &[used("two", 90)]])]);
    ledger.apply_pod(bound("one", "a", "a-0", 10));
    ledger.apply_pod(bound("two", "a", "a-1", 10));
    for uid in ["p", "q", "r"] {
        refused(&mut ledger, &pod(uid, 40), 0);
    }
    assert_eq!(victims(&ledger, 0).len(), 2);
    let backs = ledger.reclaims(at(0));
    assert_ne!(backs[0].cards, backs[1].cards);
    // The third has its turn when one of them has its room.
    uses(
        &mut ledger,
        "a",
        &[&[used("one", 10)], &[used("two", 90)]],
        1,
    );
    let first = backs
        .iter()
        .find(|back| *back.cards[0].0 == *"a-0")
        .unwrap();
    assert_eq!(choose(&mut ledger, &first.pod, &["a"], at(1)), ["a"]);
    assert_eq!(choose(&mut ledger, &pod("r", 40), &["a"], at(1)), ["a"]);
}

#[test]
fn what_does_not_come_is_given_up_and_another_card_is_tried() {
    let mut ledger = lent(&[("a", &[&[used("one", 90)], &[used("two", 91)]])]);
    ledger.apply_pod(PodFacts {
        grace: 20,
        ..bound("one", "a", "a-0", 10)
    });
    ledger.apply_pod(bound("two", "a", "a-1", 10));
    refused(&mut ledger, &pod("p", 40), 0);
    assert_eq!(victims(&ledger, 0), [is("p", "one", 80)]);
    ledger.apply_pod(PodFacts {
        waiting: true,
        reserved_on: Some("a".into()),
        ..pod("p", 40)
    });
    // A minute, and the time that the victim has to end.
    assert_eq!(ledger.reclaims(at(0))[0].until, at(80));
    ledger.reclaim(at(79));
    assert_eq!(victims(&ledger, 79), [is("p", "one", 80)]);
    ledger.reclaim(at(80));
    assert_eq!(victims(&ledger, 80), [is("p", "two", 81)]);
    // There is no third card: for a minute nothing is kept for the pod, and a pod that fits next to them gets the room.
    let now = |ledger: &mut Ledger, second: u64| {
        uses(
            ledger,
            "a",
            &[&[used("one", 90)], &[used("two", 91)]],
            second,
        );
        ledger.reclaim(at(second));
        victims(ledger, second)
    };
    assert_eq!(now(&mut ledger, 140), []);
    assert_eq!(now(&mut ledger, 199), []);
    assert_eq!(
        choose(&mut ledger, &pod("small", 9), &["a"], at(199)),
        ["a"]
    );
    now(&mut ledger, 200);
    assert_eq!(now(&mut ledger, 230), [is("p", "one", 80)]);
    // The second time it is two minutes.
    assert_eq!(now(&mut ledger, 310), [is("p", "two", 81)]);
    for second in [370, 371, 489] {
        assert_eq!(now(&mut ledger, second), [], "at {second}");
    }
    now(&mut ledger, 490);
    assert_eq!(now(&mut ledger, 491), [is("p", "one", 80)]);
}

#[test]
fn reclaim_leaves_preemption_fifteen_seconds_before_it_tries_another_gpu() {
    let both: &[&[PodUse]] = &[&[used("one", 80)], &[used("two", 81)]];
    for (preempt_fragmented, tries) in [(false, 60), (true, 75)] {
        let config = Config {
            preempt_fragmented,
            ..Config::default()
        };
        let mut ledger = lent_by(config, &[("a", both)]);
        ledger.apply_pod(bound("one", "a", "a-0", 10));
        ledger.apply_pod(bound("two", "a", "a-1", 10));
        refused(&mut ledger, &pod("p", 40), 0);
        ledger.apply_pod(PodFacts {
            waiting: true,
            reserved_on: Some("a".into()),
            ..pod("p", 40)
        });
        let second = (0..120).find(|second| {
            uses(&mut ledger, "a", both, *second);
            ledger.reclaim(at(*second));
            victims(&ledger, *second).contains(&is("p", "two", 71))
        });
        assert_eq!(second, Some(tries), "{preempt_fragmented}");
    }
}

#[test]
fn preempt_has_its_turn_after_a_reclaim_without_result() {
    // No GPU has 40 free, all together have 64.
    let all: &[&[PodUse]] = &[&[used("one", 80)], &[used("two", 81)], &[used("firm", 75)]];
    let config = Config {
        preempt_fragmented: true,
        ..Config::default()
    };
    let mut ledger = lent_by(config, &[("a", all)]);
    for (uid, card, mib) in [("one", "a-0", 10), ("two", "a-1", 10), ("firm", "a-2", 75)] {
        ledger.apply_pod(bound(uid, "a", card, mib));
    }
    let waits = PodFacts {
        waiting: true,
        ..with_priority(10, pod("p", 40))
    };
    let second = (0..75).find(|second| {
        uses(&mut ledger, "a", all, *second);
        refused(&mut ledger, &waits, *second);
        ledger.reclaim(at(*second));
        ledger.fragmented(at(*second));
        !ledger.preemptions(at(*second)).is_empty()
    });
    assert!(second.is_some_and(|second| second >= 60), "{second:?}");
}

#[test]
fn others_are_asked_where_the_first_does_not_suffice_any_more() {
    let mut ledger = lent(&[("a", &[&[used("one", 50), used("two", 30)]])]);
    ledger.apply_pod(bound("one", "a", "a-0", 10));
    ledger.apply_pod(bound("two", "a", "a-0", 10));
    refused(&mut ledger, &pod("p", 60), 0);
    assert_eq!(victims(&ledger, 0), [is("p", "one", 40)]);
    // It gives back, and the other takes it.
    uses(&mut ledger, "a", &[&[used("one", 15), used("two", 80)]], 1);
    ledger.reclaim(at(1));
    assert_eq!(victims(&ledger, 1), [is("p", "two", 70)]);
}

#[test]
fn what_a_victim_that_is_gone_still_uses_is_about_to_come() {
    let mut ledger = lent(&[("a", &[&[used("one", 45), used("two", 45)]])]);
    ledger.apply_pod(bound("one", "a", "a-0", 10));
    ledger.apply_pod(bound("two", "a", "a-0", 10));
    refused(&mut ledger, &pod("p", 70), 0);
    assert_eq!(victims(&ledger, 0).len(), 2);
    // Its agent has yet to report that.
    ledger.delete_pod("one");
    ledger.reclaim(at(1));
    assert_eq!(victims(&ledger, 1), [is("p", "two", 35)]);
    uses(&mut ledger, "a", &[&[used("two", 10)]], 2);
    assert_eq!(choose(&mut ledger, &pod("p", 70), &["a"], at(2)), ["a"]);
}

#[test]
fn reclaim_spares_a_pod_while_as_much_comes_of_another_that_is_gone() {
    let mut ledger = lent(&[("a", &[&[used("one", 45), used("two", 45)]])]);
    ledger.apply_pod(bound("one", "a", "a-0", 10));
    ledger.apply_pod(bound("two", "a", "a-0", 10));
    refused(&mut ledger, &pod("p", 40), 0);
    assert_eq!(victims(&ledger, 0), [is("p", "one", 35)]);
    // Its agent has yet to report that.
    ledger.delete_pod("two");
    ledger.reclaim(at(1));
    assert_eq!(victims(&ledger, 1), []);
    uses(&mut ledger, "a", &[&[used("one", 45)]], 2);
    assert_eq!(choose(&mut ledger, &pod("p", 40), &["a"], at(2)), ["a"]);
}

#[test]
fn a_successor_goes_on_with_the_pods_and_nodes_of_its_predecessor() {
    let mut ledger = lent(&[
        ("a", &[&[used("one", 90)]]),
        ("b", &[&[used("two", 60), used("three", 35)]]),
    ]);
    ledger.apply_pod(bound("one", "a", "a-0", 10));
    ledger.apply_pod(bound("two", "b", "b-0", 10));
    ledger.apply_pod(PodFacts {
        asked_back: Some(Action::Event),
        ..bound("three", "b", "b-0", 10)
    });
    ledger.apply_pod(PodFacts {
        waiting: true,
        reserved_on: Some("b".into()),
        ..pod("p", 30)
    });
    ledger.reclaim(at(1));
    assert_eq!(victims(&ledger, 1), [is("p", "three", 25)]);
}

#[test]
fn a_pod_that_fits_elsewhere_calls_nothing_back() {
    let mut ledger = lent(&[("a", &[&[used("greedy", 90)]]), ("b", &[&[]])]);
    ledger.apply_pod(bound("greedy", "a", "a-0", 30));
    ledger.apply_pod(waiting(0, pod("p", 60)));
    ledger.reclaim(at(1));
    assert!(ledger.reclaims(at(1)).is_empty());
    assert_eq!(
        choose(&mut ledger, &pod("p", 60), &["a", "b"], at(2)),
        ["b"]
    );
}
