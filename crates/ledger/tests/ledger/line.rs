//! The line: who is let out of it, in which order, and with which room.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_ledger::{Config, Ledger, Lift, Reason, Victims};

use crate::build::{ask, at, bound, card, choose, node, pod, report};

/// One card of 100 MiB on a node `a`, so much of which is taken.
fn full(taken: u64) -> Ledger {
    with(Config::default(), taken)
}

fn with(config: Config, taken: u64) -> Ledger {
    let mut ledger = Ledger::new(Config {
        line: true,
        ..config
    });
    ledger.apply_node(node("a"));
    ledger.apply_gpunode("a", report(&[card("a-0", 100)]), at(0));
    ledger.apply_pod(bound("old", "a", "a-0", taken));
    ledger
}

/// Stands in line.
fn held(name: &str, mib: u64) -> PodFacts {
    PodFacts {
        in_line: true,
        ..pod(name, mib)
    }
}

fn lifted(ledger: &mut Ledger, now: Duration) -> Vec<(String, Lift)> {
    let pods = ledger.wake(100, now);
    let lifts = pods.iter().filter(|pod| pod.in_line);
    let because = |pod: &Arc<PodFacts>| (pod.uid.to_string(), ledger.lifted_because(&pod.uid));
    lifts.map(because).collect()
}

fn names(lifts: &[(String, Lift)]) -> Vec<&str> {
    lifts.iter().map(|(name, _)| &**name).collect()
}

/// The API server has taken the gate off.
fn out(ledger: &mut Ledger, pod: &PodFacts) {
    ledger.apply_pod(PodFacts {
        in_line: false,
        resource_version: "2".into(),
        ..pod.clone()
    });
}

#[test]
fn they_are_let_out_by_priority_then_age_then_name_as_far_as_there_is_room() {
    let mut ledger = full(100);
    let late = |name, priority, created| PodFacts {
        priority,
        created,
        preempts: false,
        ..held(name, 30)
    };
    for pod in [
        late("b", 0, 1),
        late("a", 0, 1),
        late("z-first", 0, 0),
        late("y-urgent", 1, 5),
    ] {
        ledger.apply_pod(pod);
    }
    assert_eq!(lifted(&mut ledger, at(1)), []);
    assert_eq!(ledger.before_in_line("a"), Some(2));
    ledger.delete_pod("old");
    let lifts = lifted(&mut ledger, at(1));
    assert_eq!(names(&lifts), ["y-urgent", "z-first", "a"]);
    assert!(lifts.iter().all(|(_, why)| *why == Lift::Room));
    assert_eq!(lifted(&mut ledger, at(1)), []);
}

#[test]
fn one_for_which_there_is_room_already_is_let_out_at_once() {
    let mut ledger = full(40);
    ledger.apply_pod(held("large", 70));
    ledger.apply_pod(held("small", 60));
    assert_eq!(names(&lifted(&mut ledger, at(1))), ["small"]);
}

#[test]
fn the_room_is_kept_for_it_until_its_filter_call() {
    let mut ledger = full(100);
    let first = held("first", 60);
    ledger.apply_pod(first.clone());
    ledger.delete_pod("old");
    assert_eq!(names(&lifted(&mut ledger, at(1))), ["first"]);
    out(&mut ledger, &first);
    let beside = pod("beside", 60);
    let verdict = ledger.filter(&ask(&beside), &["a"], at(2));
    assert_eq!(verdict.refused, [("a", Reason::Nominated)]);
    assert_eq!(choose(&mut ledger, &first, &["a"], at(3)), ["a"]);
    ledger.delete_pod("first");
    assert_eq!(choose(&mut ledger, &beside, &["a"], at(3)), ["a"]);
}

#[test]
fn the_room_is_anothers_when_it_does_not_come() {
    let mut ledger = full(100);
    let first = held("first", 60);
    ledger.apply_pod(first.clone());
    ledger.apply_pod(held("second", 60));
    ledger.delete_pod("old");
    assert_eq!(names(&lifted(&mut ledger, at(1))), ["first"]);
    out(&mut ledger, &first);
    assert_eq!(lifted(&mut ledger, at(10)), []);
    assert_eq!(names(&lifted(&mut ledger, at(11))), ["second"]);
}

#[test]
fn the_room_is_anothers_when_it_was_refused() {
    let mut ledger = full(100);
    let first = held("first", 60);
    ledger.apply_pod(first.clone());
    ledger.apply_pod(held("second", 60));
    ledger.delete_pod("old");
    assert_eq!(names(&lifted(&mut ledger, at(1))), ["first"]);
    out(&mut ledger, &first);
    // Something before us keeps it off the node.
    assert!(choose(&mut ledger, &first, &[], at(2)).is_empty());
    assert_eq!(names(&lifted(&mut ledger, at(2))), ["second"]);
}

#[test]
fn a_pod_beside_the_line_gets_no_room_that_one_before_it_would_take() {
    let mut ledger = full(100);
    ledger.apply_pod(held("first", 60));
    assert_eq!(lifted(&mut ledger, at(1)), []);
    ledger.delete_pod("old");
    let beside = PodFacts {
        created: 1,
        ..pod("beside", 60)
    };
    assert!(choose(&mut ledger, &beside, &["a"], at(1)).is_empty());
    let small = PodFacts {
        created: 1,
        ..pod("small", 40)
    };
    assert_eq!(choose(&mut ledger, &small, &["a"], at(1)), ["a"]);
    assert_eq!(names(&lifted(&mut ledger, at(1))), ["first"]);
}

#[test]
fn a_pod_that_was_let_out_by_somebody_else_gets_none_either() {
    let mut ledger = full(100);
    let second = PodFacts {
        created: 1,
        ..held("second", 60)
    };
    ledger.apply_pod(held("first", 60));
    ledger.apply_pod(second.clone());
    assert_eq!(lifted(&mut ledger, at(1)), []);
    // An extender that another has relieved meanwhile takes the gate off, late.
    out(&mut ledger, &second);
    ledger.delete_pod("old");
    assert!(choose(&mut ledger, &second, &["a"], at(1)).is_empty());
    assert_eq!(names(&lifted(&mut ledger, at(1))), ["first"]);
}

#[test]
fn one_of_higher_priority_goes_before_the_line() {
    let mut ledger = full(100);
    ledger.apply_pod(held("first", 60));
    assert_eq!(lifted(&mut ledger, at(1)), []);
    ledger.delete_pod("old");
    let urgent = PodFacts {
        priority: 1,
        ..pod("urgent", 60)
    };
    assert_eq!(choose(&mut ledger, &urgent, &["a"], at(1)), ["a"]);
    assert_eq!(lifted(&mut ledger, at(1)), []);
}

#[test]
fn whom_no_node_could_hold_is_let_through_and_wants_no_line() {
    let mut ledger = full(100);
    ledger.apply_pod(held("huge", 101));
    assert_eq!(
        lifted(&mut ledger, at(1)),
        [("huge".to_owned(), Lift::NoNode)]
    );
    assert!(!ledger.wants_line());
    // It is not seen to have gone: once more, later.
    assert_eq!(lifted(&mut ledger, at(5)), []);
    assert_eq!(names(&lifted(&mut ledger, at(11))), ["huge"]);
    ledger.apply_pod(held("too", 101));
    assert_eq!(names(&lifted(&mut ledger, at(12))), ["too"]);
}

#[test]
fn somebody_refused_for_want_of_room_wants_a_line() {
    let mut ledger = full(100);
    assert!(!ledger.wants_line());
    let first = pod("first", 60);
    ledger.apply_pod(first.clone());
    assert!(choose(&mut ledger, &first, &["a"], at(1)).is_empty());
    assert!(ledger.wants_line());
    ledger.delete_pod("first");
    assert!(!ledger.wants_line());
}

#[test]
fn few_that_may_preempt_are_let_through_without_room() {
    let mut ledger = full(100);
    let urgent = |number: u32| PodFacts {
        priority: 1,
        ..held(&format!("urgent-{number}"), 60)
    };
    for number in 0..6 {
        ledger.apply_pod(urgent(number));
    }
    ledger.apply_pod(held("equal", 60));
    let never = PodFacts {
        priority: 1,
        preempts: false,
        ..held("never", 60)
    };
    ledger.apply_pod(never);
    let lifts = lifted(&mut ledger, at(1));
    assert_eq!(
        names(&lifts),
        ["urgent-0", "urgent-1", "urgent-2", "urgent-3"]
    );
    assert!(lifts.iter().all(|(_, why)| *why == Lift::MayPreempt));
    assert_eq!(lifted(&mut ledger, at(3)), []);
    for number in 0..4 {
        out(&mut ledger, &urgent(number));
    }
    // The first was bound, and the others came to nothing within a while.
    ledger.apply_pod(bound("urgent-0", "a", "a-0", 60));
    assert_eq!(names(&lifted(&mut ledger, at(4))), ["urgent-4"]);
}

#[test]
fn without_a_line_everybody_is_let_through() {
    let mut ledger = Ledger::new(Config::default());
    ledger.apply_pod(held("p", 10));
    assert_eq!(lifted(&mut ledger, at(1)), [("p".to_owned(), Lift::Off)]);
}

#[test]
fn whose_scheduler_does_not_ask_us_is_let_through() {
    let mut ledger = full(100);
    ledger.apply_pod(PodFacts {
        scheduler: "default-scheduler".into(),
        ..held("p", 10)
    });
    assert_eq!(
        lifted(&mut ledger, at(1)),
        [("p".to_owned(), Lift::NotOurs)]
    );
}

#[test]
fn other_peoples_gates_are_awaited() {
    let mut ledger = full(0);
    let twice = PodFacts {
        gated: true,
        ..held("p", 10)
    };
    ledger.apply_pod(twice.clone());
    assert_eq!(lifted(&mut ledger, at(1)), []);
    assert_eq!(ledger.queued().pods, 0);
    ledger.apply_pod(PodFacts {
        gated: false,
        ..twice
    });
    assert_eq!(names(&lifted(&mut ledger, at(1))), ["p"]);
}

#[test]
fn the_room_is_anothers_when_the_gate_cannot_be_taken_off() {
    let mut ledger = full(100);
    ledger.apply_pod(held("first", 60));
    ledger.apply_pod(held("second", 60));
    ledger.delete_pod("old");
    assert_eq!(names(&lifted(&mut ledger, at(1))), ["first"]);
    ledger.lift_failed("first");
    assert_eq!(names(&lifted(&mut ledger, at(1))), ["second"]);
    ledger.delete_pod("second");
    assert_eq!(lifted(&mut ledger, at(2)), []);
    assert_eq!(names(&lifted(&mut ledger, at(6))), ["first"]);
}

#[test]
fn the_first_are_shown_to_an_autoscaler_a_few_at_a_time() {
    let config = Config {
        line_show: 2,
        ..Config::default()
    };
    let mut ledger = with(config, 100);
    for number in 0..4 {
        ledger.apply_pod(held(&format!("p{number}"), 60));
    }
    let lifts = lifted(&mut ledger, at(1));
    assert_eq!(names(&lifts), ["p0", "p1"]);
    assert!(lifts.iter().all(|(_, why)| *why == Lift::Shown));
    for number in 0..2 {
        let shown = held(&format!("p{number}"), 60);
        out(&mut ledger, &shown);
        let free = PodFacts {
            in_line: false,
            ..shown
        };
        assert!(choose(&mut ledger, &free, &["a"], at(2)).is_empty());
    }
    assert_eq!(lifted(&mut ledger, at(100)), []);
    // One of them leaves, and the next is shown; the room is the first one's.
    ledger.delete_pod("p1");
    assert_eq!(names(&lifted(&mut ledger, at(101))), ["p2"]);
    ledger.delete_pod("old");
    let first = PodFacts {
        in_line: false,
        ..held("p0", 60)
    };
    let woken: Vec<_> = ledger
        .wake(100, at(102))
        .iter()
        .map(|pod| pod.uid.to_string())
        .collect();
    assert_eq!(woken, ["p0"], "the first in turn is offered the room");
    assert_eq!(choose(&mut ledger, &first, &["a"], at(102)), ["a"]);
}

/// Queued pods of which kube-scheduler's own filters refuse all but the last: how long that one waits. The refusals
/// are told at once, in the pods' conditions.
fn wait_behind_barred(barred: usize) -> Duration {
    let mut ledger = full(100);
    for number in 0..=barred {
        ledger.apply_pod(PodFacts {
            created: number as i64,
            ..held(&format!("p{number}"), 60)
        });
    }
    assert_eq!(lifted(&mut ledger, at(1)), []);
    ledger.delete_pod("old");
    let last = format!("p{barred}");
    let step = Duration::from_millis(100);
    let mut now = at(1);
    loop {
        for pod in ledger.wake(100, now) {
            let free = PodFacts {
                in_line: false,
                ..PodFacts::clone(&pod)
            };
            ledger.apply_pod(free.clone());
            if *pod.uid == *last {
                assert_eq!(choose(&mut ledger, &free, &["a"], now), ["a"]);
                return now - at(1);
            }
            ledger.apply_pod(PodFacts {
                waiting: true,
                ..free
            });
        }
        now += step;
        assert!(now < at(3600), "never");
    }
}

#[test]
fn pod_behind_barred_pods_is_ungated_within_the_bound() {
    for barred in [10_usize, 30, 100] {
        let took = wait_behind_barred(barred);
        let bound = at(2) * (2 + barred.ilog2());
        assert!(took <= bound, "{barred} barred: {took:?}");
    }
}

#[test]
fn room_offered_to_many_goes_to_the_first_that_asks_and_to_no_other() {
    let mut ledger = full(100);
    for name in ["p0", "p1", "p2"] {
        ledger.apply_pod(held(name, 60));
    }
    ledger.delete_pod("old");
    assert_eq!(names(&lifted(&mut ledger, at(1))), ["p0"]);
    let barred = PodFacts {
        waiting: true,
        in_line: false,
        ..held("p0", 60)
    };
    ledger.apply_pod(barred);
    assert_eq!(names(&lifted(&mut ledger, at(1))), ["p1", "p2"]);
    let (first, second) = (held("p1", 60), held("p2", 60));
    out(&mut ledger, &first);
    out(&mut ledger, &second);
    let beside = pod("beside", 60);
    let verdict = ledger.filter(&ask(&beside), &["a"], at(1));
    assert_eq!(verdict.refused, [("a", Reason::Nominated)]);
    let free = |pod: &PodFacts| PodFacts {
        in_line: false,
        ..pod.clone()
    };
    assert_eq!(choose(&mut ledger, &free(&second), &["a"], at(1)), ["a"]);
    let mut budget = ledger.budget();
    let others = ledger.preempt(&free(&second), "a", &[], &|_| false, &mut budget, at(1));
    assert_eq!(others, Some(Victims::default()), "filter and preempt agree");
    assert!(choose(&mut ledger, &free(&first), &["a"], at(1)).is_empty());
}

#[test]
fn pod_that_was_shown_for_ten_minutes_gives_its_slot_to_the_next() {
    let config = Config {
        line_show: 2,
        ..Config::default()
    };
    let mut ledger = with(config, 100);
    (0..5).for_each(|number| ledger.apply_pod(held(&format!("p{number}"), 60)));
    let mut shown = Vec::new();
    for minute in 0..=20 {
        ledger.apply_gpunode("a", report(&[card("a-0", 100)]), at(60 * minute));
        for (name, _) in lifted(&mut ledger, at(60 * minute)) {
            let waits = PodFacts {
                waiting: true,
                ..held(&name, 60)
            };
            out(&mut ledger, &waits);
            shown.push((minute, name));
        }
    }
    let expected = [(0, "p0"), (0, "p1"), (10, "p2"), (10, "p3"), (20, "p4")];
    assert_eq!(
        shown,
        expected.map(|(minute, name)| (minute, name.to_owned()))
    );
}

#[test]
fn stalled_pods_are_those_that_fit_or_need_no_room() {
    let mut ledger = full(40);
    ledger.apply_pod(held("large", 70));
    ledger.apply_pod(held("small", 60));
    ledger.apply_pod(PodFacts {
        scheduler: "default-scheduler".into(),
        ..held("z-foreign", 70)
    });
    let stalled = |ledger: &Ledger| {
        let pods = ledger.stalled_in_line(at(1));
        pods.iter()
            .map(|pod| pod.uid.to_string())
            .collect::<Vec<_>>()
    };
    // The leader is another replica: this one ungates no pod.
    assert_eq!(stalled(&ledger), ["small", "z-foreign"]);
    // With reservations the leader may keep the room for "large", which has waited as long.
    let without = Config {
        line: true,
        ..Config::default()
    };
    ledger.configure(Config {
        keep: Some(at(1)),
        ..without
    });
    assert_eq!(stalled(&ledger), ["z-foreign"]);
    ledger.apply_pod(PodFacts {
        priority: 9,
        ..held("small", 60)
    });
    assert_eq!(stalled(&ledger), ["small", "z-foreign"]);
    ledger.apply_pod(held("small", 60));
    ledger.configure(without);
    // So it does where a condition says that memory is kept.
    ledger.apply_pod(PodFacts {
        kept_on: Some("n".into()),
        ..held("large", 70)
    });
    assert_eq!(stalled(&ledger), ["z-foreign"]);
    ledger.apply_pod(held("large", 70));
    ledger.delete_pod("small");
    ledger.delete_pod("z-foreign");
    assert!(stalled(&ledger).is_empty());
}
