//! Queued pods that a leader would have ungated: a replica that finds one takes over.

use gpustow_api::PodFacts;
use gpustow_ledger::{Config, Ledger};

use crate::build::{at, pod};
use crate::queued::{full, held};

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
        let pods = ledger.stalled(at(1));
        pods.iter()
            .map(|pod| pod.uid.to_string())
            .collect::<Vec<_>>()
    };
    // The leader is another replica: this one ungates no pod.
    assert_eq!(stalled(&ledger), ["small", "z-foreign"]);
    // With reservations the leader may keep the room for "large", which has waited as long.
    let without = Config {
        queue: true,
        ..Config::default()
    };
    ledger.configure(Config {
        reserve_after: Some(at(1)),
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
    // The leader may do so, too, where a condition states that memory is kept.
    ledger.apply_pod(PodFacts {
        reserved_on: Some("n".into()),
        ..held("large", 70)
    });
    assert_eq!(stalled(&ledger), ["z-foreign"]);
    ledger.apply_pod(held("large", 70));
    ledger.delete_pod("small");
    ledger.delete_pod("z-foreign");
    assert!(stalled(&ledger).is_empty());
}

#[test]
fn stalled_pods_are_found_behind_any_number_that_do_not_fit() {
    let mut ledger = full(40);
    for number in 0..100 {
        // Each of another size.
        ledger.apply_pod(held(&format!("a{number}"), 61 + number));
    }
    ledger.apply_pod(held("z", 60));
    let stalled = ledger.stalled(at(1));
    let stalled: Vec<&str> = stalled.iter().map(|pod| &*pod.uid).collect();
    assert_eq!(stalled, ["z"]);
}

#[test]
fn pods_without_a_gate_that_fit_nowhere_hide_no_stalled_pod() {
    let mut ledger = full(40);
    for number in 0..100 {
        ledger.apply_pod(pod(&format!("a{number}"), 61 + number));
    }
    ledger.apply_pod(held("z", 60));
    assert_eq!(ledger.stalled(at(1)).len(), 1);
    // The leader may have assumed this one.
    ledger.apply_pod(pod("b", 50));
    assert!(ledger.stalled(at(1)).is_empty());
}
