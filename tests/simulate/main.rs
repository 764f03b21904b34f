//! The whole extender in a simulated world: its routes, watches, binds, epochs, wake-ups and acts, and the agents'
//! reports. It runs on one thread and on paused time, against a simulated API server and kube-scheduler. Every seed is
//! a history of its own, and the same history each time: a world has a process of its own, whose random numbers are the
//! seed's.
//!
//! `make simulate SEEDS=1000 FROM=0` runs 1000 worlds; `make simulate SEED=7` runs one and prints its story.

mod autoscaler;
mod cache;
mod call;
mod check;
mod control_plane;
mod crowd;
mod disruptions;
mod empty;
mod gangs;
mod machine;
mod net;
mod past;
mod preempt;
mod probes;
mod scheduler;
mod server;
mod stage;
mod starts;
mod story;
mod switches;
mod trouble;
mod users;
mod world;

use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use gpustow_simworld::repeat;

use story::Story;
use world::World;

/// Seeds of `make test`.
const FEW: u64 = 20;

fn number(name: &str) -> Result<Option<u64>> {
    let text = std::env::var(name).ok().filter(|text| !text.is_empty());
    let number = text.map(|text| text.parse().with_context(|| format!("{name}={text}")));
    number.transpose()
}

/// One world, on a thread whose random numbers are the seed's. Prints its story.
fn live(seed: u64) -> Result<()> {
    on_paused_time(seed, async move || {
        let story = Story::new();
        let _heard = story.listen();
        let ended = World::run(seed, story.clone()).await;
        println!("{}", story.text());
        ended
    })
}

/// Plays something on a thread of its own, whose random numbers are the seed's.
fn on_paused_time<T: Send>(seed: u64, play: impl AsyncFnOnce() -> Result<T> + Send) -> Result<T> {
    let life = move || {
        repeat::seed(seed);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()?;
        runtime.block_on(async {
            repeat::start_time();
            play().await
        })
    };
    std::thread::scope(|scope| scope.spawn(life).join())
        .map_err(|_| anyhow!("the world panicked"))?
}

/// Runs the world in a process of its own. Returns whether it ends well, and its story.
fn lives(seed: u64) -> Result<(bool, String)> {
    let mut world = Command::new(std::env::current_exe()?);
    world.args(["a_world_comes_right", "--exact", "--nocapture"]);
    world.env("RUST_LOG", "off");
    let output = world.env("GPUSTOW_SEED", seed.to_string()).output()?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    // Leaves out the test program's own lines, and its duration.
    let story = said
        .lines()
        .filter(|line| line.starts_with(' ') || line.starts_with("Error"));
    let story = story.collect::<Vec<_>>().join("\n");
    Ok((output.status.success(), story))
}

/// That of `GPUSTOW_SEED`, or the first.
#[test]
fn a_world_comes_right() -> Result<()> {
    live(number("GPUSTOW_SEED")?.unwrap_or(0))
}

#[test]
fn every_world_comes_right() -> Result<()> {
    let from = number("GPUSTOW_FROM")?.unwrap_or(0);
    let seeds = number("GPUSTOW_SEEDS")?.unwrap_or(FEW);
    let (next, began) = (AtomicU64::new(from), Instant::now());
    let worker = || -> Result<()> {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= from.saturating_add(seeds) {
                return Ok(());
            }
            let (well, story) = lives(seed)?;
            if !well {
                next.store(u64::MAX, Ordering::Relaxed);
                bail!("{story}\nlive through it again: make simulate SEED={seed}");
            }
            let done = seed - from + 1;
            if done % 500 == 0 {
                let (took, next) = (began.elapsed().as_secs(), from + done);
                println!("{done} of {seeds} worlds, {took} s; go on from there: FROM={next}");
            }
        }
    };
    let width = std::thread::available_parallelism()?.get();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..width).map(|_| scope.spawn(worker)).collect();
        for worker in workers {
            worker
                .join()
                .map_err(|_| anyhow!("the test itself panicked"))??;
        }
        Ok(())
    })
}

#[test]
fn a_world_repeats() -> Result<()> {
    for seed in 0..3 {
        let (first, again) = (lives(seed)?.1, lives(seed)?.1);
        ensure!(first.contains("is bound to"), "{first}");
        let mut lines = first.lines().zip(again.lines());
        let differs = lines.find(|(first, again)| first != again);
        ensure!(first == again, "seed {seed}: {differs:?}");
    }
    Ok(())
}
