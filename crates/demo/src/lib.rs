//! A simulated cluster: the real extender and the real agents on simulated GPUs, with a simulated API server, scheduler
//! and kubelets around them, and pods that come and go. The same pods go through one such cluster per policy, and
//! through clusters where NVIDIA's device plugin hands out GPUs. Time is virtual, so a seed gives the same table each
//! time.

mod animation;
mod api_server;
mod device_plugin;
mod drawing;
mod openb;
mod picture;
mod progress;
mod report;
mod scheduler;
mod tally;
mod workload;
mod world;

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, mpsc};
use std::thread;

use anyhow::{Context as _, Result, anyhow, bail};
use clap::Parser;
use gpustow_pack::PolicyKind;
use gpustow_sim::trace::TracePod;
use gpustow_simworld::repeat;
use tokio::runtime::Runtime;

use device_plugin::{Cluster, Sharing};
use picture::Frame;
use progress::Progress;
use report::{Row, over_seeds, summary};
use workload::{Mix, SPAN, Workload};
use world::World;

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

    /// Place gpustow's pods by this policy
    #[arg(long, default_value_t, value_parser = PolicyKind::from_str)]
    pub policy: PolicyKind,

    /// Compare the policy with gpustow's other policies, too
    #[arg(long)]
    pub policies: bool,

    /// Draw the pods and the nodes from this mix
    #[arg(long, value_enum, default_value_t)]
    workload: Mix,

    /// Take the pods of --workload openb from this list, or from openb_pod_list_default.csv in this folder
    #[arg(long, value_name = "FILE")]
    openb: Option<PathBuf>,

    /// Write an animated picture (SVG) of the policy beside whole GPUs
    #[arg(long, value_name = "FILE", conflicts_with = "seeds")]
    pub picture: Option<PathBuf>,
}

impl Args {
    fn trace(&self) -> Result<Vec<TracePod>> {
        match (self.workload, &self.openb) {
            (Mix::Openb, Some(path)) => openb::read(path),
            (Mix::Openb, None) => bail!(openb::MISSING),
            (_, Some(_)) => bail!("--openb needs --workload openb"),
            (_, None) => Ok(Vec::new()),
        }
    }

    fn workload(&self, trace: &[TracePod], seed: u64) -> Result<Workload> {
        let (nodes, pods) = (self.nodes.into(), usize::try_from(self.pods)?);
        Ok(Workload::new(self.workload, trace, seed, nodes, pods))
    }

    fn compared(&self) -> &[PolicyKind] {
        match self.policies {
            true => &PolicyKind::ALL,
            false => std::slice::from_ref(&self.policy),
        }
    }
}

/// Runs the demo: 0 if all went well, 1 if a GPU was over-committed or a pod was lost.
///
/// # Errors
/// If something does not start, or the picture cannot be written.
pub fn run(args: &Args) -> Result<ExitCode> {
    let trace = args.trace()?;
    let mut all = Vec::new();
    for number in 0..args.seeds {
        let seed = args.seed.wrapping_add(number.into());
        let workload = Arc::new(args.workload(&trace, seed)?);
        if number == 0 {
            println!("{}", report::heading(args, &workload));
        }
        let (rows, frames) = simulate(args, seed, &workload)?;
        if let Some(file) = &args.picture {
            let whole = animation::frames(&mut Cluster::new(Sharing::Whole, &workload));
            let picture = animation::svg(&frames, &whole);
            std::fs::write(file, picture).with_context(|| file.display().to_string())?;
        }
        if args.seeds == 1 {
            let mut whole = Cluster::new(Sharing::Whole, &workload);
            print!("{}", drawing::side_by_side(&mut whole, &frames));
            print!("{}", summary(&rows));
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

/// Runs every policy on paused time, each on a thread of its own. Returns a row for each policy and each kind of device
/// plugin, and pictures of the compared policy's cluster.
fn simulate(args: &Args, seed: u64, workload: &Arc<Workload>) -> Result<(Vec<Row>, Vec<Frame>)> {
    let runtimes = runtimes(seed, args.compared().len())?;
    let (progress, (done, end)) = (Progress::of(args.compared()), mpsc::channel());
    let mut lives = thread::scope(|scope| {
        let (progress, _done) = (&progress, done);
        scope.spawn(move || progress.tell(&end));
        let lives = progress.each().zip(runtimes);
        let lives = lives.map(|((policy, lived), runtime)| {
            scope.spawn(move || {
                repeat::seed(seed);
                runtime.block_on(one(policy, workload.clone(), lived))
            })
        });
        let lives = lives.collect::<Vec<_>>().into_iter().map(|life| {
            let life = life.join();
            life.map_err(|_| anyhow!("a cluster panicked"))?
        });
        lives.collect::<Result<Vec<_>>>()
    })?;
    lives.sort_by_key(|(policy, ..)| *policy != args.policy);
    let frames = lives.first().map(|(_, _, frames)| frames.clone());
    let plugin = Sharing::ALL.map(|sharing| {
        let mut cluster = Cluster::new(sharing, workload);
        cluster.live(SPAN);
        Row::of_device_plugin(&cluster)
    });
    let ours = lives.into_iter().map(|(_, row, _)| row);
    Ok((
        plugin.into_iter().chain(ours).collect(),
        frames.unwrap_or_default(),
    ))
}

async fn one(
    policy: PolicyKind,
    workload: Arc<Workload>,
    lived: &AtomicU64,
) -> Result<(PolicyKind, Row, Vec<Frame>)> {
    repeat::start_time();
    let world = World::new(policy, workload)?;
    let scheduler = world.start().await?;
    world.live(scheduler, lived).await?;
    Ok((policy, Row::of(&world), world.frames()))
}

/// Runtimes on paused time. One thread makes them all: tokio counts the runtimes of a process and draws from that count in
/// which order a runtime polls.
fn runtimes(seed: u64, count: usize) -> Result<Vec<Runtime>> {
    let make = move || {
        repeat::seed(seed);
        let make = |_| {
            let mut builder = tokio::runtime::Builder::new_current_thread();
            builder.enable_time().start_paused(true).build()
        };
        (0..count).map(make).collect::<io::Result<Vec<_>>>()
    };
    let made = thread::spawn(make).join();
    let made = made.map_err(|_| anyhow!("cannot start the runtimes"))?;
    made.context("cannot start the runtimes")
}
