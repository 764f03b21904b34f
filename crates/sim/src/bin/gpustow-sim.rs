//! Replays workloads through gpustow's decisions and through others'.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::{Args, Parser, ValueEnum};
use gpustow_sim::baselines::Choice;
use gpustow_sim::bench::bench;
use gpustow_sim::protocol::{Mode, Workload};
use gpustow_sim::replay::replay;
use gpustow_sim::report::{Summary, table};
use gpustow_sim::trace;
use serde_json::json;

/// Replay workloads through gpustow's packing policies and through others'.
#[derive(Parser)]
#[command(name = "gpustow-sim", version)]
enum Command {
    /// Replay a trace by the protocol of the FGD paper: arrivals only, what does not fit is dropped
    Replay(Replay),
    /// Compare every policy on every pod list of the openb trace, and the published ones with what was
    /// published; fails where they differ
    Bench(Bench),
}

/// How to print.
#[derive(Clone, Copy, ValueEnum)]
enum Output {
    Table,
    Json,
}

/// What comes when.
#[derive(Clone, Copy, ValueEnum)]
enum Protocol {
    /// Arrivals until 130 % of the GPUs are asked for, without departures
    Fgd,
}

#[derive(Args)]
struct Replay {
    /// Node list: CSV with sn,cpu_milli,memory_mib,gpu,model
    #[arg(long)]
    nodes: PathBuf,
    /// Pod list: CSV with name,cpu_milli,memory_mib,num_gpu,gpu_milli and, if any, gpu_spec
    #[arg(long)]
    pods: PathBuf,
    /// What comes when
    #[arg(long, value_enum, default_value = "fgd")]
    protocol: Protocol,
    /// What cards are counted in: u (thousandths), r-paper or r-guess (MiB, two guesses of the
    /// models that the trace does not name)
    #[arg(long, default_value = "u")]
    mode: Mode,
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

#[derive(Args)]
struct Bench {
    /// Folder with the node list, pod lists and fgd_published_means.csv
    #[arg(long)]
    openb: PathBuf,
    /// Seeds: one, or the first and last of a range
    #[arg(long, default_value = "42..51", value_parser = seeds)]
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

fn main() -> Result<()> {
    match Command::parse() {
        Command::Replay(args) => run(&args),
        Command::Bench(args) => bench(&args.openb, args.seeds),
    }
}

fn run(args: &Replay) -> Result<()> {
    let Protocol::Fgd = args.protocol;
    let of = |path: &PathBuf| path.display().to_string();
    let nodes = trace::nodes(&trace::read(&args.nodes)?).with_context(|| of(&args.nodes))?;
    let pods = trace::pods(&trace::read(&args.pods)?).with_context(|| of(&args.pods))?;
    let workload = Workload::new(nodes, pods, args.mode)?;
    ensure!(workload.cards() > 0, "{}: no GPUs", args.nodes.display());
    let (first, last) = args.seeds;
    let mut summaries = Vec::new();
    for policy in &args.policy {
        let runs = (first..=last).map(|seed| replay(&workload, *policy, seed));
        let runs: Vec<_> = runs.collect::<Result<_>>()?;
        summaries.push((policy.name(), Summary::of(&runs)));
    }
    match args.output {
        Output::Table => print!("{}", table(&summaries)),
        Output::Json => {
            let policies: BTreeMap<_, _> = summaries.into_iter().collect();
            let document = json!({
                "protocol": "fgd",
                "mode": args.mode.name(),
                "seeds": [first, last],
                "policies": policies,
            });
            println!("{}", serde_json::to_string_pretty(&document)?);
        }
    }
    Ok(())
}
