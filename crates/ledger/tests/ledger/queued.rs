//! The queue: which pods are ungated, in which order, and with which room.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{PodFacts, QueueFrom};
use gpustow_ledger::{Config, Ledger, Reason, Ungate, Victims};

use crate::build::{ask, at, bound, choose, joins, pod};

/// One card of 100 MiB on a node `a`, so much of which is taken.
pub(crate) fn full(taken: u64) -> Ledger {
    with(Config::default(), taken)
}

fn with(config: Config, taken: u64) -> Ledger {
    let mut ledger = Ledger::new(Config {
        queue: true,
        ..config
    });
    joins(&mut ledger, "a", &[100]);
    ledger.apply_pod(bound("old", "a", "a-0", taken));
    ledger
}

/// It is queued.
pub(crate) fn held(name: &str, mib: u64) -> PodFacts {
    PodFacts {
        queued: true,
        ..pod(name, mib)
    }
}

fn ungated(ledger: &mut Ledger, now: Duration) -> Vec<(String, Ungate)> {
    let pods = ledger.wake(100, now);
    let ungates = pods.iter().filter(|pod| pod.queued);
    let because = |pod: &Arc<PodFacts>| (pod.uid.to_string(), ledger.ungated_because(&pod.uid));
    ungates.map(because).collect()
}

fn names(ungates: &[(String, Ungate)]) -> Vec<&str> {
    ungates.iter().map(|(name, _)| &**name).collect()
}

/// The API server has taken the gate off.
fn out(ledger: &mut Ledger, pod: &PodFacts) {
    ledger.apply_pod(PodFacts {
        queued: false,
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
    assert_eq!(ungated(&mut ledger, at(1)), []);
    assert_eq!(ledger.queued_before("a"), Some(2));
    ledger.delete_pod("old");
    let ungates = ungated(&mut ledger, at(1));
    assert_eq!(names(&ungates), ["y-urgent", "z-first", "a"]);
    assert!(ungates.iter().all(|(_, why)| *why == Ungate::Room));
    assert_eq!(ungated(&mut ledger, at(1)), []);
}

#[test]
fn one_for_which_there_is_room_already_is_let_out_at_once() {
    let mut ledger = full(40);
    ledger.apply_pod(held("large", 70));
    ledger.apply_pod(held("small", 60));
    assert_eq!(names(&ungated(&mut ledger, at(1))), ["small"]);
}

#[test]
fn the_room_is_kept_for_it_until_its_filter_call() {
    let mut ledger = full(100);
    let first = held("first", 60);
    ledger.apply_pod(first.clone());
    ledger.delete_pod("old");
    assert_eq!(names(&ungated(&mut ledger, at(1))), ["first"]);
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
    assert_eq!(names(&ungated(&mut ledger, at(1))), ["first"]);
    out(&mut ledger, &first);
    assert_eq!(ungated(&mut ledger, at(10)), []);
    assert_eq!(names(&ungated(&mut ledger, at(11))), ["second"]);
}

#[test]
fn the_room_is_anothers_when_it_was_refused() {
    let mut ledger = full(100);
    let first = held("first", 60);
    ledger.apply_pod(first.clone());
    ledger.apply_pod(held("second", 60));
    ledger.delete_pod("old");
    assert_eq!(names(&ungated(&mut ledger, at(1))), ["first"]);
    out(&mut ledger, &first);
    // Something before us keeps it off the node.
    assert!(choose(&mut ledger, &first, &[], at(2)).is_empty());
    assert_eq!(names(&ungated(&mut ledger, at(2))), ["second"]);
}

#[test]
fn pod_beside_the_queue_gets_no_room_that_one_before_it_would_take() {
    let mut ledger = full(100);
    ledger.apply_pod(held("first", 60));
    assert_eq!(ungated(&mut ledger, at(1)), []);
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
    assert_eq!(names(&ungated(&mut ledger, at(1))), ["first"]);
}

#[test]
fn a_pod_that_was_let_out_by_another_client_gets_none_either() {
    let mut ledger = full(100);
    let second = PodFacts {
        created: 1,
        ..held("second", 60)
    };
    ledger.apply_pod(held("first", 60));
    ledger.apply_pod(second.clone());
    assert_eq!(ungated(&mut ledger, at(1)), []);
    // An extender that another has relieved meanwhile takes the gate off, late.
    out(&mut ledger, &second);
    ledger.delete_pod("old");
    assert!(choose(&mut ledger, &second, &["a"], at(1)).is_empty());
    assert_eq!(names(&ungated(&mut ledger, at(1))), ["first"]);
}

#[test]
fn pod_of_higher_priority_goes_before_the_queue() {
    let mut ledger = full(100);
    ledger.apply_pod(held("first", 60));
    assert_eq!(ungated(&mut ledger, at(1)), []);
    ledger.delete_pod("old");
    let urgent = PodFacts {
        priority: 1,
        ..pod("urgent", 60)
    };
    assert_eq!(choose(&mut ledger, &urgent, &["a"], at(1)), ["a"]);
    assert_eq!(ungated(&mut ledger, at(1)), []);
}

#[test]
fn pod_that_no_node_could_hold_is_ungated_and_wants_no_queue() {
    let mut ledger = full(100);
    ledger.apply_pod(held("huge", 101));
    assert_eq!(
        ungated(&mut ledger, at(1)),
        [("huge".to_owned(), Ungate::NoNode)]
    );
    assert_eq!(ledger.queue_from(), []);
    // It is not seen to have gone: once more, later.
    assert_eq!(ungated(&mut ledger, at(5)), []);
    assert_eq!(names(&ungated(&mut ledger, at(11))), ["huge"]);
    ledger.apply_pod(held("too", 101));
    assert_eq!(names(&ungated(&mut ledger, at(12))), ["too"]);
}

/// In a full cluster kube-scheduler finds too little in sum, and asks nothing.
#[test]
fn pod_that_no_node_could_hold_is_named_although_kube_scheduler_never_asks_about_it() {
    let mut ledger = full(100);
    let waits = |name: &str, mib| PodFacts {
        waiting: true,
        ..pod(name, mib)
    };
    for (name, mib) in [("huge", 101), ("fits", 100), ("too", 101)] {
        ledger.apply_pod(waits(name, mib));
    }
    let mut named = Vec::new();
    for second in 0..60 {
        ledger.wake(64, at(second));
        let pods = ledger.hopeless().into_iter();
        named.extend(pods.map(|pod| pod.name.to_string()));
    }
    named.sort_unstable();
    assert_eq!(named, ["huge", "too"]);
}

#[test]
fn pod_refused_for_want_of_room_wants_a_queue() {
    let mut ledger = full(100);
    assert_eq!(ledger.queue_from(), []);
    let first = pod("first", 60);
    ledger.apply_pod(first.clone());
    assert!(choose(&mut ledger, &first, &["a"], at(1)).is_empty());
    let from = |priority, mib_per_gpu| QueueFrom {
        priority,
        mib_per_gpu,
        gpus: 1,
    };
    assert_eq!(ledger.queue_from(), [from(0, 60)]);
    // A larger one adds nothing, unless its priority is higher.
    for (name, priority) in [("larger", 0), ("urgent", 1)] {
        let larger = PodFacts {
            priority,
            ..pod(name, 70)
        };
        ledger.apply_pod(larger.clone());
        assert!(choose(&mut ledger, &larger, &["a"], at(1)).is_empty());
    }
    assert_eq!(ledger.queue_from(), [from(1, 70), from(0, 60)]);
    ledger.delete_pod("urgent");
    assert_eq!(ledger.queue_from(), [from(0, 60)]);
    ledger.delete_pod("first");
    assert_eq!(ledger.queue_from(), [from(0, 70)]);
    ledger.delete_pod("larger");
    assert_eq!(ledger.queue_from(), []);
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
    let ungates = ungated(&mut ledger, at(1));
    assert_eq!(
        names(&ungates),
        ["urgent-0", "urgent-1", "urgent-2", "urgent-3"]
    );
    assert!(ungates.iter().all(|(_, why)| *why == Ungate::MayPreempt));
    assert_eq!(ungated(&mut ledger, at(3)), []);
    for number in 0..4 {
        out(&mut ledger, &urgent(number));
    }
    // The first was bound, and the others came to nothing within a while.
    ledger.apply_pod(bound("urgent-0", "a", "a-0", 60));
    assert_eq!(names(&ungated(&mut ledger, at(4))), ["urgent-4"]);
}

#[test]
fn queue_that_is_off_ungates_all_pods() {
    let mut ledger = Ledger::new(Config::default());
    ledger.apply_pod(held("p", 10));
    assert_eq!(ungated(&mut ledger, at(1)), [("p".to_owned(), Ungate::Off)]);
}

#[test]
fn whose_scheduler_does_not_ask_us_is_let_through() {
    let mut ledger = full(100);
    ledger.apply_pod(PodFacts {
        scheduler: "default-scheduler".into(),
        ..held("p", 10)
    });
    assert_eq!(
        ungated(&mut ledger, at(1)),
        [("p".to_owned(), Ungate::NotOurs)]
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
    assert_eq!(ungated(&mut ledger, at(1)), []);
    assert_eq!(ledger.queued().pods, 0);
    ledger.apply_pod(PodFacts {
        gated: false,
        ..twice
    });
    assert_eq!(names(&ungated(&mut ledger, at(1))), ["p"]);
}

#[test]
fn the_room_is_anothers_when_the_gate_cannot_be_taken_off() {
    let mut ledger = full(100);
    ledger.apply_pod(held("first", 60));
    ledger.apply_pod(held("second", 60));
    ledger.delete_pod("old");
    assert_eq!(names(&ungated(&mut ledger, at(1))), ["first"]);
    ledger.ungate_failed("first");
    assert_eq!(names(&ungated(&mut ledger, at(1))), ["second"]);
    ledger.delete_pod("second");
    assert_eq!(ungated(&mut ledger, at(2)), []);
    assert_eq!(names(&ungated(&mut ledger, at(6))), ["first"]);
}

/// Queued pods of which kube-scheduler's own filters refuse all but the last: how long that one waits. The refusals
/// appear at once, in the pods' conditions.
fn wait_behind_barred(barred: usize) -> Duration {
    let mut ledger = full(100);
    for number in 0..=barred {
        ledger.apply_pod(PodFacts {
            created: number as i64,
            ..held(&format!("p{number}"), 60)
        });
    }
    assert_eq!(ungated(&mut ledger, at(1)), []);
    ledger.delete_pod("old");
    let last = format!("p{barred}");
    let step = Duration::from_millis(100);
    let mut now = at(1);
    loop {
        for pod in ledger.wake(100, now) {
            let free = PodFacts {
                queued: false,
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
    assert_eq!(names(&ungated(&mut ledger, at(1))), ["p0"]);
    let barred = PodFacts {
        waiting: true,
        queued: false,
        ..held("p0", 60)
    };
    ledger.apply_pod(barred);
    assert_eq!(names(&ungated(&mut ledger, at(1))), ["p1", "p2"]);
    let (first, second) = (held("p1", 60), held("p2", 60));
    out(&mut ledger, &first);
    out(&mut ledger, &second);
    let beside = pod("beside", 60);
    let verdict = ledger.filter(&ask(&beside), &["a"], at(1));
    assert_eq!(verdict.refused, [("a", Reason::Nominated)]);
    let free = |pod: &PodFacts| PodFacts {
        queued: false,
        ..pod.clone()
    };
    assert_eq!(choose(&mut ledger, &free(&second), &["a"], at(1)), ["a"]);
    let mut budget = ledger.budget();
    let others = ledger.preempt(&free(&second), "a", &[], &mut budget, at(1));
    assert_eq!(others, Some(Victims::default()), "filter and preempt agree");
    assert!(choose(&mut ledger, &free(&first), &["a"], at(1)).is_empty());
}

#[test]
fn room_offered_to_a_pod_of_higher_priority_is_not_for_those_that_are_offered_room_beside_it() {
    let mut ledger = full(100);
    let high = PodFacts {
        priority: 1,
        ..held("high", 10)
    };
    let woken = pod("woken", 50);
    assert!(choose(&mut ledger, &woken, &["a"], at(0)).is_empty());
    ledger.apply_pod(woken.clone());
    ledger.apply_pod(high.clone());
    ledger.delete_pod("old");
    // Both are offered room, and a third pod of the lower priority asks before they do.
    assert_eq!(choose(&mut ledger, &pod("third", 50), &["a"], at(1)), ["a"]);
    let verdict = ledger.filter(&ask(&woken), &["a"], at(1));
    assert_eq!(verdict.refused, [("a", Reason::Nominated)]);
    out(&mut ledger, &high);
    assert_eq!(choose(&mut ledger, &high, &["a"], at(2)), ["a"]);
}

/// The gates of these cannot be taken off.
#[test]
fn pods_whose_gate_stays_keep_no_pod_behind_them_gated() {
    let mut ledger = Ledger::new(Config::default());
    for number in 0..700 {
        ledger.apply_pod(held(&format!("a{number:03}"), 10));
    }
    ledger.apply_pod(held("z", 10));
    let mut named = (0..60).flat_map(|second| ungated(&mut ledger, at(second)));
    assert!(named.any(|(name, _)| name == "z"));
}
