//! Pods that sleep: the memory that others may borrow of their requests, and the time when they learn that it is free.

use gpustow_api::{Memory, PodFacts, Sleep};
use gpustow_ledger::{Config, Ledger};

use crate::act::Act as _;
use crate::build::{at, bound, card, node, report, used};

/// A ledger that reclaims, with a node whose one GPU of 100 is used like this by `greedy`, which holds 20, and by `one` and
/// `two`, which hold 40 each.
fn ledger(greedy: u64, one: (u64, Option<Sleep>), two: (u64, Option<Sleep>)) -> Ledger {
    let mut ledger = Ledger::new(Config {
        reclaim: true,
        ..Config::default()
    });
    ledger.apply_node(node("a"));
    ledger.apply_pod(bound("greedy", "a", "a-0", 20));
    for (uid, (_, sleep)) in [("one", one), ("two", two)] {
        ledger.apply_pod(PodFacts {
            sleep,
            ..bound(uid, "a", "a-0", 40)
        });
    }
    uses(&mut ledger, greedy, one.0, two.0);
    ledger
}

fn uses(ledger: &mut Ledger, greedy: u64, one: u64, two: u64) {
    let mut gpu = card("a-0", 100);
    gpu.pods = vec![used("greedy", greedy), used("one", one), used("two", two)];
    ledger.apply_gpunode("a", report(&[gpu]), at(0));
}

fn asleep(told: Option<Memory>) -> Option<Sleep> {
    let asleep = true;
    Some(Sleep { asleep, told })
}

fn awake(told: Option<Memory>) -> Option<Sleep> {
    let asleep = false;
    Some(Sleep { asleep, told })
}

/// The memory that must be given back of the GPU.
fn missing(ledger: &Ledger) -> u64 {
    let short = ledger.shortages(at(0));
    short.iter().map(|it| it.missing.0).sum()
}

fn news(ledger: &mut Ledger) -> Vec<(String, Memory, u64)> {
    let all = ledger.memory_news(|_| false, at(0)).into_iter();
    all.map(|it| {
        let missing = it.missing.iter().map(|(_, mib)| mib.0).sum();
        (it.pod.uid.to_string(), it.memory, missing)
    })
    .collect()
}

fn is(uid: &str, memory: Memory, missing: u64) -> (String, Memory, u64) {
    (uid.to_owned(), memory, missing)
}

#[test]
fn others_borrow_all_that_a_pod_does_not_use_while_it_sleeps() {
    // Without a word of its own, room is kept for the one that lacks most.
    assert_eq!(missing(&ledger(60, (2, None), (2, None))), 2);
    let mut ledger = ledger(96, (2, asleep(None)), (2, asleep(Some(Memory::Asleep))));
    assert_eq!(missing(&ledger), 0);
    assert_eq!(news(&mut ledger), [is("one", Memory::Asleep, 0)]);
}

#[test]
fn pod_that_wakes_is_told_when_all_that_it_requested_is_free() {
    let told = Some(Memory::Asleep);
    let mut ledger = ledger(96, (2, awake(told)), (2, asleep(told)));
    assert_eq!(missing(&ledger), 38);
    assert_eq!(news(&mut ledger), [is("one", Memory::Reclaiming, 38)]);
    uses(&mut ledger, 70, 2, 2);
    assert_eq!((missing(&ledger), news(&mut ledger).len()), (12, 1));
    uses(&mut ledger, 58, 2, 2);
    assert_eq!(missing(&ledger), 0);
    assert_eq!(news(&mut ledger), [is("one", Memory::Free, 0)]);
    // It has all of it: nothing is news.
    uses(&mut ledger, 58, 40, 2);
    assert_eq!(news(&mut ledger), [is("one", Memory::Free, 0)]);
}

#[test]
fn two_pods_that_wake_are_not_told_of_the_same_memory() {
    let told = Some(Memory::Asleep);
    let mut ledger = ledger(58, (2, awake(told)), (2, awake(told)));
    // Room for both is reclaimed.
    assert_eq!(missing(&ledger), 38);
    let both = [
        is("one", Memory::Free, 0),
        is("two", Memory::Reclaiming, 38),
    ];
    assert_eq!(news(&mut ledger), both);
    // The pod that was informed first has not allocated yet, whether its copy shows the news or not.
    let told = ledger.memory_news(|uid| uid == "two", at(0));
    assert!(
        told.iter()
            .all(|it| &*it.pod.uid == "one" && it.memory == Memory::Reclaiming)
    );
    assert_eq!(told.len(), 1);
    ledger.apply_pod(PodFacts {
        sleep: awake(Some(Memory::Free)),
        ..bound("one", "a", "a-0", 40)
    });
    assert_eq!(news(&mut ledger), both[1..]);
    uses(&mut ledger, 20, 2, 2);
    assert_eq!(news(&mut ledger), [is("two", Memory::Free, 0)]);
}

#[test]
fn what_a_pod_was_told_holds_until_it_sleeps_again() {
    let mut ledger = ledger(
        96,
        (2, awake(Some(Memory::Free))),
        (2, asleep(Some(Memory::Free))),
    );
    assert_eq!(missing(&ledger), 38);
    assert_eq!(news(&mut ledger), [is("two", Memory::Asleep, 0)]);
}

#[test]
fn nothing_is_told_by_a_stale_report() {
    let mut ledger = ledger(20, (2, awake(None)), (2, awake(None)));
    assert_eq!(ledger.memory_news(|_| false, at(180)).len(), 2);
    assert_eq!(ledger.memory_news(|_| false, at(181)).len(), 0);
}
