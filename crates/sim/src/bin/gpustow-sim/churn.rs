//! `churn`: pods come and go.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use gpustow_ledger::Config;
use gpustow_sim::baselines::Choice;
use gpustow_sim::churn::{
    ChurnSummary, Lifetimes, Moving, Plan, churn_all, churn_table, sizes_table, unused_table,
};
use gpustow_sim::progress::Progress;
use gpustow_sim::protocol::Workload;
use gpustow_sim::stowed::Keep;
use gpustow_sim::synthetic;
use serde_json::json;

use crate::{Output, Runs, read_nodes, read_pods};

/// Pods come at random (a Poisson process) at a rate that keeps a given part of the GPUs busy, and
/// run for an hour on average. What does not fit waits, and is tried again in the order of arrival
/// whenever a pod ends. The first two hours are not measured, the next six are.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Node list: CSV with sn,cpu_milli,memory_mib,gpu,model; without it, a synthetic one
    #[arg(long, value_name = "CSV")]
    nodes: Option<PathBuf>,
    /// Pod list to draw from: CSV with name,cpu_milli,memory_mib,num_gpu,gpu_milli and, if any,
    /// gpu_spec; without it, a synthetic one
    #[arg(long, value_name = "CSV")]
    pods: Option<PathBuf>,
    /// Pod list to draw from in the last three hours
    #[arg(long, value_name = "CSV")]
    change_mix: Option<PathBuf>,
    /// GPUs asked for, times how long, relative to those there are: one or several
    #[arg(long, value_delimiter = ',', default_value = "0.9,0.95,1,1.05", value_parser = load)]
    load: Vec<f64>,
    /// Distribution of run times
    #[arg(long, value_enum, default_value = "exponential")]
    lifetimes: Lifetimes,
    /// Minutes after which a place is kept for a pod that waits, or off: one or several. gpustow's own
    /// policies alone keep places; how long pods of each size wait is printed as well
    #[arg(long, value_delimiter = ',', default_value = "off", value_parser = minutes)]
    keep: Vec<Minutes>,
    /// Minutes without an end after which a place is given up
    #[arg(long, default_value = "240", value_parser = number)]
    keep_for: f64,
    /// Places kept at a time, at most
    #[arg(long, default_value_t = Config::default().reserve_max)]
    keep_reservations: usize,
    /// Of how many of all GPUs, in percent; one place may be more
    #[arg(long, default_value_t = Config::default().reserve_max_percent)]
    keep_percent: usize,
    /// Pods that may be moved in an hour to join up free memory for one that waits, or off: one or several. A pod that is
    /// moved goes on where it was; gpustow's own policies alone move pods; how long pods of each size wait is printed too
    #[arg(long = "move", value_delimiter = ',', default_value = "off", value_parser = count)]
    moves: Vec<Count>,
    /// Compare each number of --move with and without emptying nearly empty nodes, which moves all of their pods to fuller
    /// ones; the GPUs of nodes without any pod are printed as well
    #[arg(long)]
    empty_nodes: bool,
    /// Of how many pods in a hundred the owner lets them be moved
    #[arg(long, default_value = "50", value_parser = clap::value_parser!(u8).range(1..=100))]
    evictable: u8,
    /// Where a pod has ended, place so many of those that wait longest and fit there together, the largest first, and
    /// not each in its turn; or off: one or several
    #[arg(long, value_delimiter = ',', default_value = "off", value_parser = count)]
    together: Vec<Count>,
    #[command(flatten)]
    runs: Runs,
}

/// The settings that differ from one run with a policy to the next.
#[derive(Default, PartialEq)]
struct Way {
    after: Option<f64>,
    per_hour: Option<usize>,
    empties: bool,
    together: Option<usize>,
}

impl Way {
    fn all(args: &Args) -> Vec<Self> {
        let mut ways = Vec::new();
        for keep in &args.keep {
            for moves in &args.moves {
                let both = args.empty_nodes && moves.0.is_some();
                let empties: &[bool] = if both { &[false, true] } else { &[false] };
                for empties in empties {
                    ways.extend(args.together.iter().map(|together| Self {
                        after: keep.0,
                        per_hour: moves.0,
                        empties: *empties,
                        together: together.0,
                    }));
                }
            }
        }
        ways
    }

    /// Has the plan keep places and move pods this way.
    fn set(&self, plan: &mut Plan, args: &Args) {
        plan.together = self.together;
        plan.moving = self.per_hour.map(|per_hour| Moving {
            evictable: args.evictable.into(),
            per_hour,
            empties: self.empties,
        });
        plan.keep = self.after.map(|after| Keep {
            after: lasting(after),
            lasts: lasting(args.keep_for),
            places: args.keep_reservations,
            percent: args.keep_percent,
        });
    }

    /// The name of a policy that is run this way.
    fn name(&self, policy: Choice) -> String {
        let mut name = policy.to_string();
        if let Some(after) = self.after {
            name += &format!(", keep {after}");
        }
        if let Some(per_hour) = self.per_hour {
            name += &format!(", move {per_hour}");
        }
        if self.empties {
            name += ", empty";
        }
        if let Some(together) = self.together {
            name += &format!(", together {together}");
        }
        name
    }
}

/// A number of minutes, or none.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Minutes(Option<f64>);

fn minutes(text: &str) -> Result<Minutes, String> {
    match text {
        "off" => Ok(Minutes(None)),
        _ => number(text).map(|minutes| Minutes(Some(minutes))),
    }
}

/// A number of pods, or none.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Count(Option<usize>);

fn count(text: &str) -> Result<Count, String> {
    let number = || text.parse().ok().filter(|it| (1..=100_000).contains(it));
    match text {
        "off" => Ok(Count(None)),
        _ => number()
            .map(|count| Count(Some(count)))
            .ok_or_else(|| format!("{text:?} is neither off nor a number from 1 to 100000")),
    }
}

fn number(text: &str) -> Result<f64, String> {
    let number = text
        .parse()
        .ok()
        .filter(|it| (0.0..=100_000.0).contains(it));
    number.ok_or_else(|| format!("{text:?} is not a number of minutes up to 100000"))
}

fn lasting(minutes: f64) -> Duration {
    Duration::from_secs_f64(60.0 * minutes)
}

pub(crate) fn load(text: &str) -> Result<f64, String> {
    let load = text
        .parse()
        .ok()
        .filter(|load| (0.01..=10.0).contains(load));
    load.ok_or_else(|| format!("{text:?} is not a number from 0.01 to 10"))
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let nodes = match &args.nodes {
        Some(path) => read_nodes(path)?,
        None => synthetic::nodes(args.runs.nodes_count.unwrap_or(synthetic::NODES)),
    };
    let pods = match &args.pods {
        Some(path) => read_pods(path)?,
        None => synthetic::pods(),
    };
    let mut workload = Workload::new(nodes, pods, args.runs.mode)?;
    let then = match &args.change_mix {
        Some(path) => Some(workload.read(read_pods(path)?)),
        None => None,
    };
    let mut plan = Plan {
        hosts: args.runs.nodes_count.unwrap_or(workload.hosts.len()),
        workload,
        standing: None,
        then,
        load: 0.0,
        lifetimes: args.lifetimes,
        keep: None,
        moving: None,
        together: None,
    };
    let ways = Way::all(args);
    let runs = args.load.len().saturating_mul(ways.len());
    let mut progress = Progress::new(args.runs.count().saturating_mul(runs));
    let mut summaries = Vec::new();
    for load in &args.load {
        plan.load = *load;
        for policy in &args.runs.policy {
            for way in &ways {
                way.set(&mut plan, args);
                let runs = churn_all(&plan, *policy, args.runs.seeds(), &mut progress)?;
                if !runs.is_empty() {
                    summaries.push((*load, way.name(*policy), ChurnSummary::of(&runs)));
                }
            }
        }
    }
    match args.runs.output {
        Output::Table => {
            print!("{}", churn_table(&summaries));
            if ways.iter().any(|way| *way != Way::default()) {
                print!("\n{}", sizes_table(&summaries));
            }
            if args.empty_nodes {
                print!("\n{}", unused_table(&summaries));
            }
        }
        Output::Json => {
            let mut loads: BTreeMap<String, BTreeMap<String, ChurnSummary>> = BTreeMap::new();
            for (load, policy, summary) in summaries {
                let policies = loads.entry(load.to_string()).or_default();
                policies.insert(policy, summary);
            }
            let document = json!({
                "protocol": "churn",
                "mode": args.runs.mode.name(),
                "nodes": plan.hosts.min(plan.workload.hosts.len()),
                "seeds": args.runs.seeds,
                "complete": !Progress::stopped(),
                "loads": loads,
            });
            println!("{}", serde_json::to_string_pretty(&document)?);
        }
    }
    Ok(())
}
