//! GPUs that are left to ResourceClaims: pods get the GPUs that were opened for them, and no others.

use gpustow_ledger::{Config, Ledger, Reason};
use gpustow_pack::Refusal;

use crate::build::{at, bound, choose, ledger, pod, probed};

/// A node with two GPUs, whose fence is on.
fn fenced() -> Ledger {
    let mut ledger = ledger(&[("a", &[100, 50])]);
    ledger.configure(Config {
        fence: true,
        ..Config::default()
    });
    ledger
}

fn open(ledger: &mut Ledger, uuids: &[&str]) -> bool {
    ledger.open("a", uuids.iter().map(|uuid| (*uuid).into()))
}

#[test]
fn fence_lets_pods_have_only_gpus_that_were_opened() {
    let mut ledger = fenced();
    assert_eq!(probed(&mut ledger, 40), Some(Reason::Claimed));
    assert!(open(&mut ledger, &["a-1"]) && !open(&mut ledger, &["a-1"]));
    assert_eq!(probed(&mut ledger, 40), None);
    assert_eq!(probed(&mut ledger, 60), Some(Reason::Claimed));
    assert_eq!(
        probed(&mut ledger, 120),
        Some(Reason::Fit(Refusal::TooLarge))
    );
    let [view] = ledger.snapshot(at(1)).try_into().unwrap();
    let states = view.cards.iter().map(|card| (card.claimed, card.healthy));
    assert_eq!(states.collect::<Vec<_>>(), [(true, false), (false, true)]);
    // Turned off, it is gone, and turned on again, nothing is open.
    ledger.configure(Config::default());
    assert_eq!(probed(&mut ledger, 60), None);
    ledger.configure(Config {
        fence: true,
        ..Config::default()
    });
    assert_eq!(probed(&mut ledger, 40), Some(Reason::Claimed));
}

#[test]
fn gpu_that_opens_wakes_a_pod_that_waits_for_it() {
    let mut ledger = fenced();
    let waits = pod("p", 60);
    ledger.apply_pod(waits.clone());
    assert!(choose(&mut ledger, &waits, &["a"], at(0)).is_empty());
    assert!(ledger.wake(9, at(1)).is_empty());
    open(&mut ledger, &["a-0"]);
    assert_eq!(ledger.wake(9, at(2)).len(), 1);
}

#[test]
fn gpu_closes_only_if_no_pod_holds_or_is_about_to_hold_something_of_it() {
    let mut ledger = fenced();
    open(&mut ledger, &["a-0", "a-1"]);
    ledger.apply_pod(bound("old", "a", "a-1", 30));
    let new = pod("p", 60);
    choose(&mut ledger, &new, &["a"], at(0));
    let held = |ledger: &Ledger| {
        let mut all = ledger.fenced("a");
        all.sort_by(|a, b| a.uuid.cmp(&b.uuid));
        all.iter().map(|it| it.held).collect::<Vec<_>>()
    };
    assert_eq!(held(&ledger), [true, true]);
    assert!(!ledger.close("a", "a-0") && !ledger.close("a", "a-1"));
    assert!(ledger.begin_bind(&new, "a", at(0)).is_ok());
    ledger.delete_pod("old");
    assert!(ledger.close("a", "a-1"));
    assert_eq!(held(&ledger), [true, false]);
    assert_eq!(probed(&mut ledger, 50), Some(Reason::Claimed));
}

#[test]
fn next_leader_opens_no_gpu_that_the_last_one_opened() {
    let mut ledger = fenced();
    open(&mut ledger, &["a-0", "a-1"]);
    assert_eq!(probed(&mut ledger, 60), None);
    ledger.withhold([]);
    assert_eq!(probed(&mut ledger, 60), Some(Reason::Claimed));
}
