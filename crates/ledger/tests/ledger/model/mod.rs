//! Random interleavings of everything that can happen to the ledger, against a simulated API
//! server that is the truth. `GPUSTOW_HISTORIES` raises the number of histories, `GPUSTOW_SEED`
//! chooses others.

mod checks;
mod event;
mod scheduler;
mod server;
mod world;

use std::panic::{self, AssertUnwindSafe};
use std::thread;

use event::Event;
pub(crate) use event::Random;
use world::World;

const HISTORIES: u64 = 100_000;
const LENGTH: u64 = 36;

fn history(seed: u64) -> Vec<Event> {
    let mut random = Random::new(seed);
    let length = 4 + random.below(LENGTH);
    (0..length).map(|_| Event::random(&mut random)).collect()
}

fn run(events: &[Event]) -> Result<(), String> {
    let outcome = panic::catch_unwind(AssertUnwindSafe(|| {
        let mut world = World::new();
        for event in events {
            world.step(event)?;
        }
        world.settle()
    }));
    outcome.unwrap_or_else(|_| Err("panic".into()))
}

/// Drops events as long as the history still fails.
fn shrink(mut events: Vec<Event>) -> Vec<Event> {
    let mut index = 0;
    while index < events.len() {
        let mut fewer = events.clone();
        fewer.remove(index);
        if run(&fewer).is_err() {
            events = fewer;
            index = 0;
        } else {
            index += 1;
        }
    }
    events
}

fn number(variable: &str) -> Option<u64> {
    let value = std::env::var(variable).ok()?;
    value.parse().ok()
}

#[test]
fn no_history_breaks_an_invariant() {
    let histories = number("GPUSTOW_HISTORIES").map_or(HISTORIES, |n| n.max(HISTORIES));
    let first = number("GPUSTOW_SEED").unwrap_or(1);
    let threads = thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let search = |thread: u64| {
        (first + thread..first + histories)
            .step_by(usize::try_from(threads).unwrap_or(1))
            .find_map(|seed| Some((seed, run(&history(seed)).err()?)))
    };
    let failing = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || search(thread)))
            .collect();
        workers
            .into_iter()
            .find_map(|worker| worker.join().expect("a worker"))
    });
    if let Some((seed, first)) = failing {
        let events = shrink(history(seed));
        let why = run(&events).err().unwrap_or(first);
        panic!("seed {seed}: {why}\nafter {events:#?}");
    }
}
