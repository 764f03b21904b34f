//! The waits of `/filter` when 16 kinds of pods wait and no feature can help them. It runs on 500 and 5,000 nodes, with
//! each feature on and off. `make bench ARGS=beside` runs it alone.
//!
//! Time is virtual and costs are real: each part of the extender holds the ledger's lock when its loop would. It holds
//! the lock as long as it computes, and a call that comes meanwhile waits. Computing is the thread's CPU time, so other
//! programs of the machine only spoil its caches.

#![allow(
    clippy::expect_used,
    reason = "a bench that cannot make its world has to stop"
)]
#![allow(
    dead_code,
    reason = "the module of the load is shared with the other benches"
)]

mod extender;
#[path = "../load.rs"]
mod load;
mod pods;
mod scheduler;
mod world;

use std::time::Duration;

use gpustow_api::config::{Action, After, QueueMode};
use gpustow_ledger::Config;
use gpustow_settings::Feature;
use pods::{BY_THE_BOOKS, NOWHERE};
use world::World;

const SIZES: [usize; 2] = [500, 5_000];
pub(crate) const KINDS: usize = 16;
const ROUNDS: u64 = 3;
/// The measured time, after a while in which all loops have looked.
pub(crate) const WARM_UP: Duration = Duration::from_secs(10);
pub(crate) const LASTS: Duration = Duration::from_secs(40);

/// The configuration of the administrator: one feature is on, or none.
pub(crate) fn config(on: Option<Feature>) -> Config {
    let mut spec = gpustow_settings::cautious();
    match on {
        Some(Feature::Queue) => spec.queue.mode = QueueMode::Always,
        Some(Feature::Reclaim) => spec.reclaim.action = Action::Evict,
        Some(Feature::Preempt) => spec.preempt.fragmented = true,
        Some(Feature::Reserve) => spec.reserve.after = After(Some(Duration::from_secs(1))),
        Some(Feature::Defragment) => spec.defragment.evictions_per_hour = 10,
        Some(Feature::Provision) => spec.provision.max = 10,
        // The ledger does nothing for it by itself.
        Some(Feature::Claims) | None => {}
    }
    gpustow_settings::ledger(&spec)
}

/// The request of a waiting pod on each card.
fn request(on: Feature) -> u64 {
    match on {
        Feature::Reclaim => BY_THE_BOOKS,
        _ => NOWHERE,
    }
}

fn main() {
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    if filter.is_some_and(|filter| !"beside".contains(&filter)) {
        return;
    }
    println!(
        "\n/filter beside {KINDS} kinds of pods that no feature can help; ms, median (least to most) of {ROUNDS} runs of \
         {} s",
        LASTS.as_secs()
    );
    println!("| nodes | feature | p50 | p99 | p99 on ÷ off | longest hold of the lock |");
    println!("|---|---|---|---|---|---|");
    for nodes in SIZES {
        for request in [NOWHERE, BY_THE_BOOKS] {
            let runs = |on| -> Vec<Figures> {
                let run = |seed| World::new(nodes, request, on, seed).run();
                (0..ROUNDS).map(run).collect()
            };
            let off = runs(None);
            row(nodes, "off", &off, &off);
            for feature in Feature::ALL {
                if self::request(feature) == request {
                    row(nodes, feature.name(), &runs(Some(feature)), &off);
                }
            }
        }
    }
}

fn row(nodes: usize, name: &str, runs: &[Figures], off: &[Figures]) {
    let spread = |figures: Vec<f64>| {
        let mut all = figures;
        all.sort_by(f64::total_cmp);
        let (least, most) = (all[0], all[all.len() - 1]);
        format!("{:.2} ({least:.2} to {most:.2})", all[all.len() / 2])
    };
    let of = |figure: fn(&Figures) -> f64| spread(runs.iter().map(figure).collect());
    let ratios = runs.iter().zip(off).map(|(on, off)| on.p99 / off.p99);
    let longest = runs
        .iter()
        .max_by(|one, other| one.longest.0.total_cmp(&other.longest.0));
    println!(
        "| {nodes} | {name} | {} | {} | {} | {:.1}, {} |",
        of(|it| it.p50),
        of(|it| it.p99),
        spread(ratios.collect()),
        longest.map_or(f64::NAN, |it| it.longest.0),
        longest.map_or("", |it| it.longest.1),
    );
}

/// Milliseconds.
pub(crate) struct Figures {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    /// The longest hold of the lock, and its purpose.
    pub(crate) longest: (f64, &'static str),
}
