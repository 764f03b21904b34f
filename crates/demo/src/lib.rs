//! A simulated cluster in the terminal: the real extender over real HTTP and the real agents on
//! simulated cards, with a simulated API server, scheduler and kubelets around them, and pods that
//! come and go. The same pods go through one such cluster per policy at the same time; one of them
//! is shown.

mod api_server;
mod picture;
mod report;
mod scheduler;
mod screen;
mod store;
mod view;
mod workload;
mod world;

use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Parser;
use gpustow_pack::PolicyKind;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::interval;

use report::{Row, over_seeds, summary};
use screen::Screen;
use workload::Workload;
use world::{Clock, World};

/// Watch pods being packed onto the GPUs of a simulated cluster.
///
/// The extender is the real one and is called over HTTP, and so are the nodes' agents, on cards out
/// of files; API server, scheduler and kubelets are simulated. Twelve hours pass; every policy gets
/// the same pods, one of them is shown.
#[derive(Clone, Debug, Parser)]
#[command(name = "demo", version)]
pub struct Args {
    /// What nodes and pods are drawn from: the same seed, the same workload
    #[arg(long, default_value_t = 42)]
    pub seed: u64,

    /// Runs with so many seeds from that one on, one after another, and compares the policies over all
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub seeds: u16,

    /// Nodes: 8 GPUs of 80 GiB, 4 of 24 GiB, 2 of 48 and 2 of 16 GiB, in turn
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u16).range(1..=30))]
    pub nodes: u16,

    /// Pods that come within the twelve hours; the fewer, the longer each runs
    #[arg(long, default_value_t = 420, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    pub pods: u32,

    /// Simulated minutes per second
    #[arg(long, default_value = "30", value_parser = speed)]
    pub speed: f64,

    /// The policy to show; the others run beside it and are in the summary
    #[arg(long, default_value_t, value_parser = PolicyKind::from_str)]
    pub policy: PolicyKind,
}

fn speed(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(speed) if (0.01..=10_000.0).contains(&speed) => Ok(speed),
        _ => Err("must be a number from 0.01 to 10000".to_owned()),
    }
}

/// Runs the demo: 0 if all went well, 1 if a card was over-committed or a pod was lost, 130 if
/// somebody stopped it.
///
/// # Errors
/// If something does not start, or the terminal cannot be drawn on.
pub fn run(args: &Args) -> Result<ExitCode> {
    let runtime = tokio::runtime::Runtime::new().context("cannot start the runtime")?;
    let code = runtime.block_on(play(args));
    // Extenders and watches run for ever.
    runtime.shutdown_background();
    code
}

async fn play(args: &Args) -> Result<ExitCode> {
    let mut all = Vec::new();
    for run in 0..u64::from(args.seeds) {
        let args = Args {
            seed: args.seed.wrapping_add(run),
            ..args.clone()
        };
        let (rows, complete) = once(&args).await?;
        if rows.iter().any(|row| !row.is_sound()) {
            return Ok(ExitCode::FAILURE);
        }
        if !complete {
            return Ok(ExitCode::from(130));
        }
        all.push(rows);
    }
    if all.len() > 1 {
        print!("{}", over_seeds(&all));
    }
    Ok(ExitCode::SUCCESS)
}

/// One run: what every policy came to, and whether nobody stopped it.
async fn once(args: &Args) -> Result<(Vec<Row>, bool)> {
    let pods = usize::try_from(args.pods)?;
    let workload = Arc::new(Workload::new(args.seed, args.nodes.into(), pods));
    let folder = tempfile::Builder::new().prefix("gpustow-demo-").tempdir();
    let folder = folder.context("cannot make a folder for the cards")?;
    let mut policies = PolicyKind::ALL.to_vec();
    policies.sort_by_key(|policy| *policy != args.policy);
    let mut worlds = Vec::new();
    let mut schedulers = Vec::new();
    for policy in policies {
        let world = Arc::new(World::new(policy, workload.clone(), folder.path())?);
        schedulers.push((world.clone(), world.start().await?));
        worlds.push(world);
    }
    let clock = Clock {
        start: Instant::now(),
        speed: args.speed * 60.0,
    };
    let mut lives = JoinSet::new();
    for (world, scheduler) in schedulers {
        lives.spawn(async move { world.live(scheduler, clock).await });
    }
    let complete = watch(&worlds, clock, &mut lives).await?;
    lives.shutdown().await;
    let rows: Vec<Row> = worlds
        .iter()
        .map(|world| Row::of(world, clock.now()))
        .collect();
    print!("{}", summary(args, workload.gpus, clock.now(), &rows));
    Ok((rows, complete))
}

/// Shows the first world until all have lived (true) or somebody wants to stop (false).
async fn watch(
    worlds: &[Arc<World>],
    clock: Clock,
    lives: &mut JoinSet<Result<()>>,
) -> Result<bool> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut screen = Screen::open(worlds)?;
    let mut tick = interval(Duration::from_millis(100));
    loop {
        tokio::select! {
            ended = lives.join_next() => match ended {
                Some(ended) => ended??,
                None => return Ok(true),
            },
            _ = tick.tick() => if screen.show(worlds, clock)? {
                return Ok(false);
            },
            _ = terminate.recv() => return Ok(false),
            _ = interrupt.recv() => return Ok(false),
        }
    }
}
