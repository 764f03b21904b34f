//! The demo on real time, in the terminal or as lines.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::interval;

use super::Args;
use super::device_plugin::{Cluster, Sharing};
use super::report::{Row, broken, summary};
use super::screen::Screen;
use super::workload::Workload;
use super::world::{Clock, World};

/// Before each look of the scheduler, so that the extender has seen what it sees.
const LOOK: Duration = Duration::from_millis(1);

/// Runs it: see [`super::run`].
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let runtime = tokio::runtime::Runtime::new().context("cannot start the runtime")?;
    let code = runtime.block_on(play(args));
    // Extenders and watches run for ever.
    runtime.shutdown_background();
    code
}

async fn play(args: &Args) -> Result<ExitCode> {
    let workload = Arc::new(args.workload(args.seed)?);
    let folder = tempfile::Builder::new().prefix("gpustow-demo-").tempdir();
    let folder = folder.context("cannot make a folder for the kubeconfig")?;
    let kubeconfig = folder.path().join("kubeconfig");
    let mut worlds = Vec::new();
    let mut schedulers = Vec::new();
    for policy in args.policies() {
        let world = Arc::new(World::new(policy, workload.clone())?);
        if worlds.is_empty() {
            world.open(&kubeconfig).await?;
        }
        schedulers.push((world.clone(), world.start(LOOK).await?));
        worlds.push(world);
    }
    let clock = Clock::new(args.speed * 60.0);
    let mut lives = JoinSet::new();
    for (world, scheduler) in schedulers {
        lives.spawn(async move { world.live(scheduler, clock).await });
    }
    let look = format!("kubectl gpustow --kubeconfig {} ui", kubeconfig.display());
    let complete = watch(&worlds, &workload, clock, &mut lives, look).await?;
    lives.shutdown().await;
    let mut plugins = Sharing::ALL.map(|sharing| Cluster::new(sharing, &workload));
    let rows = rows(&worlds, &mut plugins, clock.now());
    print!("{}", summary(args, workload.gpus, clock.now(), &rows));
    Ok(match broken(&rows) {
        Some(broken) => {
            eprintln!("{broken}");
            ExitCode::FAILURE
        }
        None if complete => ExitCode::SUCCESS,
        None => ExitCode::from(130),
    })
}

fn rows(worlds: &[Arc<World>], plugins: &mut [Cluster<'_>], now: Duration) -> Vec<Row> {
    let ours = worlds.iter().map(|world| Row::of(world, now));
    let mut rows: Vec<Row> = ours.collect();
    for plugin in plugins {
        plugin.live(now);
        rows.push(Row::of_device_plugin(plugin, now));
    }
    rows
}

/// Shows the first world until all have lived (true) or the user stops (false).
async fn watch(
    worlds: &[Arc<World>],
    workload: &Workload,
    clock: Clock,
    lives: &mut JoinSet<Result<()>>,
    look: String,
) -> Result<bool> {
    let first = worlds.first().context("no policy")?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut plugins = Sharing::ALL.map(|sharing| Cluster::new(sharing, workload));
    let mut screen = Screen::open(look)?;
    let mut tick = interval(Duration::from_millis(100));
    loop {
        tokio::select! {
            ended = lives.join_next() => match ended {
                Some(ended) => ended??,
                None => return Ok(true),
            },
            _ = tick.tick() => {
                let now = clock.now();
                let rows = rows(worlds, &mut plugins, now);
                if screen.show(first, rows, now)? {
                    return Ok(false);
                }
            },
            _ = terminate.recv() => return Ok(false),
            _ = interrupt.recv() => return Ok(false),
        }
    }
}
