//! Waking the pods that wait.

use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_api::gpunode::Gpu;
use gpustow_ledger::Ledger;

use crate::build::{ask, at, bound, card, choose, exclusive, ledger, pod, report, waiting};

/// A ledger with one full card of 100, and pods that wait for these MiB, the first the oldest.
fn full(waiting: &[(&str, u64)]) -> Ledger {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(bound("old", "a", "a-0", 100));
    for (age, &(uid, mib)) in waiting.iter().enumerate() {
        let pod = PodFacts {
            created: age as i64,
            ..pod(uid, mib)
        };
        ledger.apply_pod(pod.clone());
        assert!(choose(&mut ledger, &pod, &["a"], at(0)).is_empty());
    }
    ledger
}

fn wake(ledger: &mut Ledger, limit: usize, now: Duration) -> Vec<String> {
    let pods = ledger.wake(limit, now);
    pods.iter().map(|pod| pod.uid.to_string()).collect()
}

#[test]
fn no_pod_is_woken_without_room() {
    let mut ledger = full(&[("p", 60)]);
    assert!((0..200).all(|second| wake(&mut ledger, 9, at(second)).is_empty()));
    assert_eq!(ledger.waiting(), 1);
}

#[test]
fn those_that_fit_together_are_woken_at_once_in_the_schedulers_order() {
    let mut ledger = full(&[("p", 60), ("q", 60), ("r", 30), ("s", 30)]);
    let urgent = PodFacts {
        priority: 1,
        created: 9,
        ..pod("urgent", 10)
    };
    ledger.apply_pod(PodFacts {
        waiting: true,
        ..urgent
    });
    ledger.delete_pod("old");
    assert_eq!(wake(&mut ledger, 9, at(1)), ["urgent", "p", "r"]);
}

#[test]
fn a_change_of_a_bound_pod_is_no_room() {
    let mut ledger = full(&[("p", 60)]);
    ledger.delete_pod("old");
    ledger.apply_pod(bound("new", "a", "a-0", 40));
    assert_eq!(wake(&mut ledger, 9, at(1)), ["p"]);
    for version in ["2", "3"] {
        let touched = bound("new", "a", "a-0", 40);
        ledger.apply_pod(PodFacts {
            resource_version: version.into(),
            ..touched
        });
        assert!(wake(&mut ledger, 9, at(2)).is_empty());
    }
}

#[test]
fn the_limit_holds_and_the_rest_follows() {
    let mut ledger = full(&[("p", 30), ("q", 30), ("r", 30), ("s", 30)]);
    ledger.delete_pod("old");
    assert_eq!(wake(&mut ledger, 2, at(1)), ["p", "q"]);
    assert_eq!(wake(&mut ledger, 2, at(1)), ["r"]);
    assert!(wake(&mut ledger, 2, at(1)).is_empty());
}

fn of_priority(priority: i32, uid: &str) -> PodFacts {
    PodFacts {
        priority,
        ..pod(uid, 60)
    }
}

/// A ledger with one card of 100, for 60 of which a pod of priority 1 was woken.
fn woken() -> Ledger {
    let mut ledger = full(&[]);
    let pod = of_priority(1, "p");
    assert!(choose(&mut ledger, &pod, &["a"], at(0)).is_empty());
    ledger.apply_pod(pod);
    ledger.delete_pod("old");
    assert_eq!(wake(&mut ledger, 9, at(1)), ["p"]);
    ledger
}

#[test]
fn room_that_a_pod_was_woken_for_is_not_for_those_of_lower_priority() {
    let mut ledger = woken();
    let lower = of_priority(0, "lower");
    assert!(choose(&mut ledger, &lower, &["a"], at(1)).is_empty());
    // The other 40 are for every pod, and so is the whole card once the pod has not come.
    assert_eq!(choose(&mut ledger, &pod("small", 40), &["a"], at(1)), ["a"]);
    ledger.delete_pod("small");
    assert_eq!(choose(&mut ledger, &lower, &["a"], at(9)), ["a"]);
}

#[test]
fn room_that_a_pod_was_woken_for_goes_to_the_first_of_its_priority_or_a_higher_one() {
    for priority in [1, 2] {
        let other = of_priority(priority, "other");
        assert_eq!(choose(&mut woken(), &other, &["a"], at(1)), ["a"]);
    }
}

#[test]
fn a_woken_pod_that_still_waits_is_woken_again_ever_more_rarely() {
    let mut ledger = full(&[("p", 60)]);
    ledger.delete_pod("old");
    let woken: Vec<u64> = (0..1200)
        .filter(|&second| {
            let mut status = report(&[card("a-0", 100)]);
            status.heartbeat = Some(second.to_string());
            ledger.apply_gpunode("a", status, at(second));
            !wake(&mut ledger, 9, at(second)).is_empty()
        })
        .collect();
    let pauses: Vec<u64> = woken.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(woken[0], 0);
    assert_eq!(pauses, [4, 8, 16, 32, 64, 128, 256, 300, 300]);
}

#[test]
fn a_pod_that_woke_without_result_leaves_the_room_to_the_next() {
    // The first fits by memory, but something else keeps it off the node.
    let mut ledger = full(&[("barred", 60), ("p", 60)]);
    ledger.delete_pod("old");
    assert_eq!(wake(&mut ledger, 9, at(1)), ["barred"]);
    let woken: Vec<_> = (2..8)
        .flat_map(|second| wake(&mut ledger, 9, at(second)))
        .collect();
    assert!(woken.contains(&"p".to_owned()), "{woken:?}");
}

#[test]
fn a_fresh_report_and_a_card_that_recovers_are_room() {
    let mut ledger = ledger(&[("a", &[100])]);
    let p = pod("p", 60);
    ledger.apply_pod(p.clone());
    assert!(choose(&mut ledger, &p, &["a"], at(500)).is_empty());
    let ill = Gpu {
        healthy: false,
        ..card("a-0", 100)
    };
    ledger.apply_gpunode("a", report(std::slice::from_ref(&ill)), at(501));
    assert!(wake(&mut ledger, 9, at(501)).is_empty());
    ledger.apply_gpunode("a", report(&[card("a-0", 100)]), at(502));
    assert_eq!(wake(&mut ledger, 9, at(502)), ["p"]);
    assert!(choose(&mut ledger, &p, &["b"], at(1000)).is_empty());
    let mut heartbeat = report(&[card("a-0", 100)]);
    heartbeat.heartbeat = Some("again".into());
    ledger.apply_gpunode("a", heartbeat, at(1000));
    assert_eq!(wake(&mut ledger, 9, at(1000)), ["p"]);
}

#[test]
fn a_pod_that_waits_since_before_our_start_is_woken_if_it_fits() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(waiting(0, pod("p", 60)));
    let woken: Vec<_> = (0..4)
        .flat_map(|second| wake(&mut ledger, 9, at(second)))
        .collect();
    assert_eq!(woken, ["p"]);
}

#[test]
fn who_has_a_reservation_or_may_not_run_is_left_alone() {
    let mut ledger = full(&[("p", 60), ("gated", 10), ("leaving", 10), ("bad", 10)]);
    ledger.delete_pod("old");
    assert_eq!(choose(&mut ledger, &pod("p", 60), &["a"], at(1)), ["a"]);
    ledger.apply_pod(waiting(0, pod("p", 60)));
    ledger.apply_pod(PodFacts {
        gated: true,
        waiting: true,
        ..pod("gated", 10)
    });
    ledger.apply_pod(PodFacts {
        deleting: true,
        waiting: true,
        ..pod("leaving", 10)
    });
    ledger.apply_pod(PodFacts {
        released: true,
        ..pod("bad", 10)
    });
    assert!((1..20).all(|second| wake(&mut ledger, 9, at(second)).is_empty()));
    assert_eq!(ledger.waiting(), 0);
}

#[test]
fn room_kept_for_a_nominated_pod_wakes_no_other_pod() {
    let mut ledger = full(&[("p", 60)]);
    let first = PodFacts {
        nominated: Some("a".into()),
        priority: 5,
        ..pod("first", 80)
    };
    ledger.apply_pod(first);
    ledger.delete_pod("old");
    assert!((1..20).all(|second| wake(&mut ledger, 9, at(second)).is_empty()));
    ledger.delete_pod("first");
    assert_eq!(wake(&mut ledger, 9, at(20)), ["p"]);
}

#[test]
fn a_pod_that_no_watch_ever_shows_is_forgotten() {
    let mut ledger = ledger(&[("a", &[10])]);
    assert!(
        ledger
            .filter(&ask(&pod("ghost", 60)), &["a"], at(0))
            .nodes
            .is_empty()
    );
    assert!(wake(&mut ledger, 9, at(59)).is_empty());
    assert_eq!(ledger.waiting(), 1);
    assert!(wake(&mut ledger, 9, at(60)).is_empty());
    assert_eq!(ledger.waiting(), 0);
}

#[test]
fn thousands_wait_on_thousands_of_nodes_and_each_gets_its_room() {
    let names: Vec<String> = (0..1000).map(|index| format!("n{index}")).collect();
    let sizes: Vec<(&str, &[u64])> = names.iter().map(|name| (&**name, &[100][..])).collect();
    let mut ledger = ledger(&sizes);
    for name in &names {
        ledger.apply_pod(bound(name, name, &format!("{name}-0"), 100));
    }
    for index in 0..3000 {
        let waiting = PodFacts {
            waiting: true,
            ..pod(&format!("p{index}"), 50 + index % 40)
        };
        let whole = index % 40 == 0;
        ledger.apply_pod(if whole { exclusive(waiting) } else { waiting });
    }
    names.iter().for_each(|name| ledger.delete_pod(name));
    let candidates: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut woken: Vec<String> = Vec::new();
    for _ in 0..100 {
        for pod in ledger.wake(100, at(1)) {
            assert_eq!(choose(&mut ledger, &pod, &candidates, at(1)).len(), 1);
            woken.push(pod.uid.to_string());
        }
    }
    let count = woken.len();
    woken.sort_unstable();
    woken.dedup();
    assert_eq!((woken.len(), count), (1000, 1000));
}

/// However many pods join at once: a call that cannot note all of them reports it, and the next calls note the rest.
#[test]
fn a_crowd_that_joins_at_once_is_noted_in_slices_and_woken_all_the_same() {
    let mut ledger = ledger(&[("a", &[100])]);
    let waiting = |number: i64, mib| PodFacts {
        waiting: true,
        created: number,
        ..pod(&format!("p{number}"), mib)
    };
    (0..3000).for_each(|number| ledger.apply_pod(waiting(number, 101)));
    // It is there before anybody waits for it, and the last to join is the one that fits.
    ledger.apply_pod(waiting(3000, 50));
    let mut calls = 1;
    while ledger.wake(10, at(1)).is_empty() && ledger.wakes_on() {
        calls += 1;
    }
    assert!(calls > 1, "all at once");
    let woken = ledger.wake(10, at(3));
    assert_eq!(
        woken.iter().map(|pod| &*pod.uid).collect::<Vec<_>>(),
        ["p3000"]
    );
}

/// The same pod, which wants a whole card.
fn whole(pod: &PodFacts) -> PodFacts {
    exclusive(pod.clone())
}

#[test]
fn pod_that_asks_for_something_else_keeps_no_pod_of_its_former_kind_waiting() {
    let waits = |uid: &str, created| PodFacts {
        created,
        ..pod(uid, 60)
    };
    let (first, second) = (waits("first", 0), waits("second", 1));
    // Its watch is late, or its next call is.
    for call_is_late in [false, true] {
        let mut ledger = ledger(&[("a", &[100])]);
        ledger.apply_pod(bound("old", "a", "a-0", 100));
        for pod in [&first, &second] {
            ledger.apply_pod(pod.clone());
            assert!(choose(&mut ledger, pod, &["a"], at(0)).is_empty());
        }
        ledger.apply_pod(whole(&first));
        if call_is_late {
            assert!(choose(&mut ledger, &first, &["a"], at(0)).is_empty());
        }
        // 80 are free, and not the whole card.
        ledger.apply_pod(bound("small", "a", "a-0", 20));
        ledger.delete_pod("old");
        let woken = (0..4).find_map(|second| ledger.wake(10, at(second)).pop());
        assert_eq!(
            woken.map(|pod| pod.uid.to_string()).as_deref(),
            Some("second")
        );
    }
}
