//! Random interleavings of everything that can happen to the ledger, against a simulated API
//! server that is the truth and a kube-scheduler that rejects nodes for reasons of its own.
//! `GPUSTOW_HISTORIES` changes the number of histories, `GPUSTOW_FROM` is the first.

mod bystanders;
mod checks;
mod create;
mod disruptions;
mod event;
mod evidence;
mod gangs;
mod instances;
mod lending;
mod over_limits;
mod queued;
mod reservations;
mod scheduler;
mod server;
mod shortages;
mod sleepers;
mod switches;
mod windows;
mod world;

use std::panic::{self, AssertUnwindSafe};
use std::thread;

use event::Event;
pub(crate) use event::Random;
use switches::Switches;
use world::World;

/// Histories of `make test`.
const HISTORIES: u64 = 10_000;
const LENGTH: u64 = 36;

/// One history: its switches, and its events.
#[derive(Clone)]
struct History {
    switches: Switches,
    events: Vec<Event>,
}

fn history(seed: u64) -> History {
    let mut random = Random::new(seed);
    let mut switches = Switches::draw(&mut random);
    switches.draw_words(&mut Random::new(!seed));
    switches.draw_rules(&mut Random::new(seed.rotate_left(32)));
    // Chance alone seldom leads to a pod that waits for memory that others borrow or hold.
    let mut events = switches.prelude(&mut random);
    let length = 4 + random.below(LENGTH);
    events.extend((0..length).map(|_| switches.event(&mut random)));
    History { switches, events }
}

fn run(history: &History) -> Result<(), String> {
    let outcome = panic::catch_unwind(AssertUnwindSafe(|| {
        let mut world = World::new(history.switches);
        for event in &history.events {
            world.step(event)?;
        }
        world.settle()
    }));
    outcome.unwrap_or_else(|_| Err("panic".into()))
}

/// The results of a history's steps, its pods, and the ledger's snapshot in the end.
fn story(history: &History) -> String {
    let mut world = World::new(history.switches);
    let events = history.events.iter();
    let told = events.map(|event| world.step(event)).collect::<Vec<_>>();
    let settled = world.settle();
    let snapshot = world.ledger.snapshot(world.now);
    format!("{told:?} {settled:?} {:?} {snapshot:?}", world.server.pods)
}

/// Drops events as long as the history still fails.
fn shrink(mut history: History) -> History {
    let mut index = 0;
    while index < history.events.len() {
        let mut fewer = history.clone();
        fewer.events.remove(index);
        if run(&fewer).is_err() {
            history = fewer;
            index = 0;
        } else {
            index += 1;
        }
    }
    history
}

fn number(variable: &str) -> Option<u64> {
    let value = std::env::var(variable).ok()?;
    value.parse().ok()
}

/// Each history draws the features that are on, alone or together. In each, cards hold their pods' charges, and a
/// ledger that has only seen lists has equal books. A pod that fits is woken, ungated and placed.
/// * Queue: no pod gets room that a pod before it would take, and no room is kept beyond its deadline.
/// * Reclaim: no pod within its request is a victim, none is disrupted by old data, and everything that is reclaimed
///   ends.
/// * Pods that wake: each learns that its memory is free once borrowers gave it back, and no two learn of one memory.
/// * Reservations: they stay within the bounds, and none is made twice. None is made that could not hold its pod, and
///   none outlasts its pod or its time. No pod of higher priority is kept away.
/// * Preemption for fragmented memory and defragmentation: victims are of lower priority or may move. The victims of
///   one pod are on one node, and room is kept for a while only. A node is emptied of all pods or of none, and only
///   while no pod waits.
#[test]
fn no_history_breaks_an_invariant() {
    if let Some((seed, why)) = search() {
        panic!("seed {seed}: {why}");
    }
}

/// Maps hash at random, and no decision follows from that.
#[test]
fn a_history_repeats() {
    for seed in 1..1000 {
        let history = history(seed);
        let (first, second) = (story(&history), story(&history));
        assert!(first == second, "seed {seed}:\n{first}\n{second}");
    }
}

/// The first history found that breaks an invariant, and how.
fn search() -> Option<(u64, String)> {
    let histories = number("GPUSTOW_HISTORIES").unwrap_or(HISTORIES);
    let first = number("GPUSTOW_FROM").unwrap_or(1);
    let threads = thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let part = |thread: u64| {
        (first + thread..first + histories)
            .step_by(usize::try_from(threads).unwrap_or(1))
            .find_map(|seed| Some((seed, run(&history(seed)).err()?)))
    };
    let (seed, first) = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || part(thread)))
            .collect();
        let died = || Some((0, "a worker died".to_owned()));
        workers
            .into_iter()
            .find_map(|worker| worker.join().unwrap_or_else(|_| died()))
    })?;
    let shrunk = shrink(history(seed));
    let why = run(&shrunk).err().unwrap_or(first);
    let History { switches, events } = shrunk;
    Some((seed, format!("{why}\nwith {switches:?}\nafter {events:#?}")))
}
