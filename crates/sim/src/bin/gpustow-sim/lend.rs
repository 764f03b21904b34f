//! `lend`: pods come and go, and use more and less of their memory from one minute to the next.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use gpustow_sim::advise::{Request, series};
use gpustow_sim::churn::Lifetimes;
use gpustow_sim::lend::{LendPlan, LendSummary, Recorded, Way, lend_all, lend_table};
use gpustow_sim::progress::Progress;
use gpustow_sim::protocol::{Mode, Workload};
use gpustow_sim::{synthetic, trace};
use serde_json::json;

use crate::churn::load;
use crate::{Output, count_of, read_nodes, read_pods, seeds};

/// Give each pod of a part of a GPU a use over time, the list's size being the most that it uses, and compare three ways:
/// each requests the most (asked); each requests what its use advises and borrows the rest (lent); each requests the most and
/// GPUs count as larger than they are (scaled). Pods come and go as in churn.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The use of pods: CSV with seconds,pod,mib, a line for each minute of each pod; without it, a synthetic one
    #[arg(long, value_name = "CSV")]
    trace: Option<PathBuf>,
    /// What pods request where they borrow: p95 or p99, as advised from all of their use, or half of the peak
    #[arg(long, default_value = "p95")]
    request: Request,
    /// What agents keep free of each GPU where pods borrow, in percent
    #[arg(long, default_value = "0", value_parser = clap::value_parser!(u64).range(0..=50))]
    headroom: u64,
    /// Node list, as for churn; without it, a synthetic one
    #[arg(long, value_name = "CSV")]
    nodes: Option<PathBuf>,
    /// Pod list to draw from, as for churn; without it, a synthetic one
    #[arg(long, value_name = "CSV")]
    pods: Option<PathBuf>,
    /// The most that pods use, times how long they run, relative to the GPUs there are: one or several
    #[arg(long, value_delimiter = ',', default_value = "1,1.5", value_parser = load)]
    load: Vec<f64>,
    /// Distribution of run times
    #[arg(long, value_enum, default_value = "exponential")]
    lifetimes: Lifetimes,
    /// What cards are counted in: u (thousandths), r-paper or r-guess
    #[arg(long, default_value = "u")]
    mode: Mode,
    /// So many of the nodes, drawn with each seed; without it all
    #[arg(long, value_name = "N")]
    nodes_count: Option<usize>,
    /// Seeds: one, or the first and last of a range
    #[arg(long, default_value = "1..5", value_parser = seeds)]
    seeds: (u64, u64),
    /// How to print
    #[arg(long, value_enum, default_value = "table")]
    output: Output,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let all = match &args.trace {
        Some(path) => series(&trace::read(path)?).with_context(|| path.display().to_string())?,
        None => synthetic::uses(),
    };
    let nodes = match &args.nodes {
        Some(path) => read_nodes(path)?,
        None => synthetic::nodes(args.nodes_count.unwrap_or(synthetic::NODES)),
    };
    let pods = match &args.pods {
        Some(path) => read_pods(path)?,
        None => synthetic::pods(),
    };
    let workload = Workload::new(nodes, pods, args.mode)?;
    let mut plan = LendPlan {
        hosts: args.nodes_count.unwrap_or(workload.hosts.len()),
        workload,
        load: 0.0,
        lifetimes: args.lifetimes,
        recorded: Recorded::of(&all, args.request),
        headroom: args.headroom,
    };
    let runs = args.load.len() * Way::ALL.len();
    let mut progress = Progress::new(count_of(args.seeds).saturating_mul(runs));
    let mut summaries = Vec::new();
    for load in &args.load {
        plan.load = *load;
        for way in Way::ALL {
            let runs = lend_all(&plan, way, args.seeds.0..=args.seeds.1, &mut progress)?;
            if !runs.is_empty() {
                summaries.push((*load, way.name(), LendSummary::of(&runs)));
            }
        }
    }
    match args.output {
        Output::Table => {
            println!(
                "{} recorded pods request {:.2} of their peak where they borrow",
                all.len(),
                plan.recorded.request()
            );
            print!("{}", lend_table(&summaries));
        }
        Output::Json => {
            let mut loads: BTreeMap<String, BTreeMap<&str, LendSummary>> = BTreeMap::new();
            for (load, way, summary) in summaries {
                let ways = loads.entry(load.to_string()).or_default();
                ways.insert(way, summary);
            }
            let document = json!({
                "protocol": "lend",
                "mode": args.mode.name(),
                "request": plan.recorded.request(),
                "nodes": plan.hosts.min(plan.workload.hosts.len()),
                "seeds": args.seeds,
                "complete": !Progress::stopped(),
                "loads": loads,
            });
            println!("{}", serde_json::to_string_pretty(&document)?);
        }
    }
    Ok(())
}
