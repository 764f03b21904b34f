//! Random interleavings of everything that can happen to the ledger, against a simulated API
//! server that is the truth. `GPUSTOW_HISTORIES` raises the number of histories, `GPUSTOW_SEED`
//! chooses others.

mod checks;
mod event;
mod lending;
mod line;
mod over_limits;
mod places;
mod scheduler;
mod server;
mod shortages;
mod world;

use std::panic::{self, AssertUnwindSafe};
use std::thread;

use event::Event;
pub(crate) use event::Random;
use world::World;

const HISTORIES: u64 = 100_000;
const LENGTH: u64 = 36;

/// What is drawn, whether memory is called back, whether there is a line, and whether places are kept.
#[derive(Clone, Copy)]
struct Kind {
    draw: fn(&mut Random) -> Event,
    call_back: bool,
    line: bool,
    keep: bool,
}

fn history(kind: Kind, seed: u64) -> Vec<Event> {
    let mut random = Random::new(seed);
    // Chance alone seldom leads to a pod that waits for what others borrow.
    let mut events = match kind.call_back {
        true => Event::borrowing(&mut random),
        false => Vec::new(),
    };
    let length = 4 + random.below(LENGTH);
    events.extend((0..length).map(|_| (kind.draw)(&mut random)));
    events
}

fn run(kind: Kind, events: &[Event]) -> Result<(), String> {
    let outcome = panic::catch_unwind(AssertUnwindSafe(|| {
        let mut world = World::new(kind.call_back, kind.line, kind.keep);
        for event in events {
            world.step(event)?;
        }
        world.settle()
    }));
    outcome.unwrap_or_else(|_| Err("panic".into()))
}

/// Drops events as long as the history still fails.
fn shrink(kind: Kind, mut events: Vec<Event>) -> Vec<Event> {
    let mut index = 0;
    while index < events.len() {
        let mut fewer = events.clone();
        fewer.remove(index);
        if run(kind, &fewer).is_err() {
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
    let found = search(Kind {
        draw: Event::random,
        call_back: false,
        line: false,
        keep: false,
    });
    if let Some((seed, why)) = found {
        panic!("seed {seed}: {why}");
    }
}

/// In histories in which pods stand in line: whoever fits is let out, nobody is given what one before it in turn would
/// take, room is kept for nobody beyond its deadline, and all that holds without a line holds with it.
#[test]
fn no_history_of_a_line_breaks_an_invariant() {
    let found = search(Kind {
        draw: Event::of_line,
        call_back: false,
        line: true,
        keep: false,
    });
    if let Some((seed, why)) = found {
        panic!("seed {seed}: {why}");
    }
}

/// In histories of use, limits, priorities, budgets, agents that restart and reports that are late: nobody within its
/// request is a victim, nobody acts on old data, every call-back ends, and all that holds without calling back holds
/// with it.
#[test]
fn no_history_of_use_breaks_an_invariant() {
    let found = search(Kind {
        draw: Event::of_use,
        call_back: true,
        line: false,
        keep: false,
    });
    if let Some((seed, why)) = found {
        panic!("seed {seed}: {why}");
    }
}

/// In histories in which places are kept: no more than the bounds say, none twice, none that could not hold its pod,
/// none beyond its pod or its time, nobody of higher priority is kept away, and all that holds without places
/// holds with them.
#[test]
fn no_history_of_places_breaks_an_invariant() {
    let found = search(Kind {
        draw: Event::of_places,
        call_back: false,
        line: false,
        keep: true,
    });
    if let Some((seed, why)) = found {
        panic!("seed {seed}: {why}");
    }
}

/// The first history found that breaks an invariant, and how.
fn search(kind: Kind) -> Option<(u64, String)> {
    let histories = number("GPUSTOW_HISTORIES").map_or(HISTORIES, |n| n.max(HISTORIES));
    let first = number("GPUSTOW_SEED").unwrap_or(1);
    let threads = thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let part = |thread: u64| {
        (first + thread..first + histories)
            .step_by(usize::try_from(threads).unwrap_or(1))
            .find_map(|seed| Some((seed, run(kind, &history(kind, seed)).err()?)))
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
    let events = shrink(kind, history(kind, seed));
    let why = run(kind, &events).err().unwrap_or(first);
    Some((seed, format!("{why}\nafter {events:#?}")))
}
