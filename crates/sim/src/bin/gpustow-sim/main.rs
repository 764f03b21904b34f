//! Replays workloads through gpustow's decisions and through others'.

mod advise;
mod churn;
mod replay;
mod starts;

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, Parser, ValueEnum};
use gpustow_sim::baselines::Choice;
use gpustow_sim::bench::bench;
use gpustow_sim::progress::{INTERRUPTED, Progress, stop_at_ctrl_c};
use gpustow_sim::protocol::Mode;
use gpustow_sim::trace::{self, TraceNode, TracePod};

/// Replay workloads through gpustow's packing policies and through others'.
///
/// Long runs tell their progress on stderr. Ctrl-C prints what is done and ends with code 130.
#[derive(Parser)]
#[command(name = "gpustow-sim", version)]
enum Command {
    /// Replay a trace by the protocol of the FGD paper: arrivals only, what does not fit is dropped
    Replay(replay::Args),
    /// Let pods come, wait, run and go at a given load: waiting time and waste by policy
    Churn(churn::Args),
    /// Count the pods that start on a GPU on which another starts, at the times of a trace
    Starts(starts::Args),
    /// Judge advice on what to request, on the recorded GPU memory of pods
    Advise(advise::Args),
    /// Compare every policy on a synthetic list, and with --openb print every goal and every pod list of
    /// that trace; fails where gpustow's are worse than committed or others differ from what was published
    Bench(Bench),
}

/// How to print.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    /// For people
    Table,
    /// For programs
    Json,
}

/// What is run, and how it is shown.
#[derive(Args)]
struct Runs {
    /// What cards are counted in: u (thousandths), r-paper or r-guess (MiB, two guesses of the
    /// models that the trace does not name)
    #[arg(long, default_value = "u")]
    mode: Mode,
    /// So many of the nodes, drawn with each seed; without it all
    #[arg(long, value_name = "N")]
    nodes_count: Option<usize>,
    /// Seeds: one, or the first and last of a range
    #[arg(long, default_value = "42..51", value_parser = seeds)]
    seeds: (u64, u64),
    /// Policies, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "tight")]
    policy: Vec<Choice>,
    /// How to print
    #[arg(long, value_enum, default_value = "table")]
    output: Output,
}

impl Runs {
    fn seeds(&self) -> RangeInclusive<u64> {
        self.seeds.0..=self.seeds.1
    }

    fn count(&self) -> usize {
        let more = usize::try_from(self.seeds.1 - self.seeds.0);
        let seeds = more.unwrap_or(usize::MAX).saturating_add(1);
        seeds.saturating_mul(self.policy.len())
    }
}

#[derive(Args)]
struct Bench {
    /// Folder with the openb trace's node list and pod lists, and fgd_published_means.csv
    #[arg(long, value_name = "DIR")]
    openb: Option<PathBuf>,
    /// Seeds: one, or the first and last of a range; no policy was tuned on the default
    #[arg(long, default_value = "1000..1009", value_parser = seeds)]
    seeds: (u64, u64),
}

fn seeds(text: &str) -> Result<(u64, u64), String> {
    let (first, last) = text.split_once("..").unwrap_or((text, text));
    let number = |text: &str| {
        text.parse()
            .map_err(|_| format!("{text:?} is not a number"))
    };
    let (first, last) = (number(first)?, number(last)?);
    if first > last {
        return Err(format!("{first} is after {last}"));
    }
    Ok((first, last))
}

fn read_nodes(path: &Path) -> Result<Vec<TraceNode>> {
    trace::nodes(&trace::read(path)?).with_context(|| path.display().to_string())
}

fn read_pods(path: &Path) -> Result<Vec<TracePod>> {
    trace::pods(&trace::read(path)?).with_context(|| path.display().to_string())
}

fn main() -> Result<ExitCode> {
    let command = Command::parse();
    stop_at_ctrl_c()?;
    match command {
        Command::Replay(args) => replay::run(&args)?,
        Command::Churn(args) => churn::run(&args)?,
        Command::Starts(args) => starts::run(&args)?,
        Command::Advise(args) => advise::run(&args)?,
        Command::Bench(args) => bench(args.openb.as_deref(), args.seeds.0..=args.seeds.1)?,
    }
    Ok(if Progress::stopped() {
        eprintln!("interrupted: this is what was done until then");
        INTERRUPTED.into()
    } else {
        ExitCode::SUCCESS
    })
}
