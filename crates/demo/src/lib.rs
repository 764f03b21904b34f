//! A simulated cluster: the real extender and the real agents on simulated GPUs, with a simulated API server, scheduler
//! and kubelets around them, and pods that come and go. The same pods go through one such cluster per policy, and
//! through clusters where NVIDIA's device plugin hands out GPUs. Time is virtual, so a seed gives the same table each
//! time; `--live` runs it on real time, in the terminal.

mod animation;
mod api_server;
mod device_plugin;
mod live;
mod picture;
mod report;
mod scheduler;
mod screen;
mod tally;
mod view;
mod workload;
mod world;

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use clap::Parser;
use gpustow_pack::PolicyKind;

use device_plugin::{Cluster, Sharing};
use picture::Frame;
use report::{Row, over_seeds, summary};
use workload::{SPAN, Workload};
use world::{Clock, World};

/// Simulated seconds per second of the paused clock, by which extender and agents go. It is slow enough that their
/// pauses do not show.
const VIRTUAL: f64 = 60.0;
/// Before each look of the scheduler: longer than any pause of the extender between an event and its answer.
const LOOK: Duration = Duration::from_millis(50);

/// Compare gpustow's packing with whole GPUs and time-slicing on a simulated cluster.
///
/// Twelve hours pass in seconds. The extender and the nodes' agents are the real ones; API server, scheduler, kubelets
/// and GPUs are simulated. Each row of the table gets the same pods, and the same seed gives the same table.
#[derive(Clone, Debug, Parser)]
#[command(name = "demo", version)]
pub struct Args {
    /// Draw nodes and pods from this seed
    #[arg(long, default_value_t = 42)]
    pub seed: u64,

    /// Run this many seeds, from --seed on, and compare the policies over all of them
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub seeds: u16,

    /// Set the number of nodes: 8 GPUs of 80 GiB, 4 of 24 GiB, 2 of 48 and 2 of 16 GiB, in turn
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u16).range(1..=30))]
    pub nodes: u16,

    /// Set the number of pods that arrive within the twelve hours; with fewer pods, each runs longer
    #[arg(long, default_value_t = 420, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    pub pods: u32,

    /// Compare this policy with the others; --live shows it
    #[arg(long, default_value_t, value_parser = PolicyKind::from_str)]
    pub policy: PolicyKind,

    /// Watch it in the terminal, on real time
    #[arg(long, conflicts_with = "seeds")]
    pub live: bool,

    /// Let this many simulated minutes pass per second
    #[arg(long, default_value = "30", value_parser = speed, requires = "live")]
    pub speed: f64,

    /// Write an animated picture (SVG) of the policy beside whole GPUs
    #[arg(long, value_name = "FILE", conflicts_with_all = ["seeds", "live"])]
    pub picture: Option<PathBuf>,
}

fn speed(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(speed) if (0.01..=10_000.0).contains(&speed) => Ok(speed),
        _ => Err("must be a number from 0.01 to 10000".to_owned()),
    }
}

impl Args {
    fn workload(&self, seed: u64) -> Result<Workload> {
        let pods = usize::try_from(self.pods)?;
        Ok(Workload::new(seed, self.nodes.into(), pods))
    }

    /// Every policy, the one that is compared first.
    fn policies(&self) -> Vec<PolicyKind> {
        let mut policies = PolicyKind::ALL.to_vec();
        policies.sort_by_key(|policy| *policy != self.policy);
        policies
    }
}

/// Runs the demo: 0 if all went well, 1 if a GPU was over-committed or a pod was lost, 130 if
/// the user stopped it.
///
/// # Errors
/// If something does not start, or the terminal cannot be drawn on.
pub fn run(args: &Args) -> Result<ExitCode> {
    if args.live {
        return live::run(args);
    }
    let mut all = Vec::new();
    for number in 0..args.seeds {
        let seed = args.seed.wrapping_add(number.into());
        let workload = Arc::new(args.workload(seed)?);
        let (rows, frames) = simulate(args, &workload)?;
        if let Some(file) = &args.picture {
            let whole = animation::frames(&mut Cluster::new(Sharing::Whole, &workload));
            let picture = animation::svg(&frames, &whole);
            std::fs::write(file, picture).with_context(|| file.display().to_string())?;
        }
        if args.seeds == 1 {
            print!("{}", summary(args, workload.gpus, SPAN, &rows));
        } else {
            eprintln!("{} of {} seeds", number + 1, args.seeds);
        }
        if let Some(broken) = report::broken(&rows) {
            eprintln!("seed {seed}: {broken}");
            return Ok(ExitCode::FAILURE);
        }
        all.push(rows);
    }
    if args.seeds > 1 {
        print!("{}", over_seeds(&all));
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs every policy on paused time, each on a thread of its own: a row for each and for the device plugin, and what
/// the first policy's cluster looked like.
fn simulate(args: &Args, workload: &Arc<Workload>) -> Result<(Vec<Row>, Vec<Frame>)> {
    let (mut rows, mut frames) = (Vec::new(), Vec::new());
    thread::scope(|scope| {
        let runs = args.policies().into_iter();
        let runs = runs.map(|policy| scope.spawn(move || one(policy, workload.clone())));
        for run in runs.collect::<Vec<_>>() {
            let (row, seen) = run.join().map_err(|_| anyhow!("a cluster panicked"))??;
            rows.push(row);
            if frames.is_empty() {
                frames = seen;
            }
        }
        anyhow::Ok(())
    })?;
    for sharing in Sharing::ALL {
        let mut cluster = Cluster::new(sharing, workload);
        cluster.live(SPAN);
        rows.push(Row::of_device_plugin(&cluster, SPAN));
    }
    Ok((rows, frames))
}

fn one(policy: PolicyKind, workload: Arc<Workload>) -> Result<(Row, Vec<Frame>)> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(async {
        let world = World::new(policy, workload)?;
        let scheduler = world.start(LOOK).await?;
        world.live(scheduler, Clock::new(VIRTUAL)).await?;
        Ok((Row::of(&world, SPAN), world.frames()))
    })
}
