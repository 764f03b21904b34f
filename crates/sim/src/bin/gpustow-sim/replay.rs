//! `replay`: arrivals until more is asked for than there is.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::ValueEnum;
use gpustow_sim::baselines::Choice;
use gpustow_sim::plot::{svg, write_whole};
use gpustow_sim::progress::Progress;
use gpustow_sim::protocol::{Mode, Workload};
use gpustow_sim::replay::replay_all;
use gpustow_sim::report::{Summary, table};
use serde_json::json;

use crate::{Output, read_nodes, read_pods, seeds};

/// What comes when.
#[derive(Clone, Copy, ValueEnum)]
enum Protocol {
    /// Arrivals until 130 % of the GPUs are asked for, without departures
    Fgd,
}

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Node list: CSV with sn,cpu_milli,memory_mib,gpu,model
    #[arg(long, value_name = "CSV")]
    nodes: PathBuf,
    /// Pod list: CSV with name,cpu_milli,memory_mib,num_gpu,gpu_milli and, if any, gpu_spec
    #[arg(long, value_name = "CSV")]
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
    /// Draw allocation against arrivals, a line per policy
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// How to print
    #[arg(long, value_enum, default_value = "table")]
    output: Output,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let Protocol::Fgd = args.protocol;
    let workload = Workload::new(read_nodes(&args.nodes)?, read_pods(&args.pods)?, args.mode)?;
    ensure!(workload.cards() > 0, "{}: no GPUs", args.nodes.display());
    ensure!(
        workload.jobs.iter().any(|job| job.demand() > 0),
        "{}: no pod asks for GPUs",
        args.pods.display()
    );
    let (first, last) = args.seeds;
    let seeds = usize::try_from(last - first + 1).unwrap_or(usize::MAX);
    let mut progress = Progress::new(seeds.saturating_mul(args.policy.len()));
    let mut summaries = Vec::new();
    for policy in &args.policy {
        let runs = replay_all(&workload, *policy, first..=last, &mut progress)?;
        if !runs.is_empty() {
            summaries.push((policy.name(), Summary::of(&runs)));
        }
    }
    if let Some(path) = &args.plot {
        let list = args.pods.file_stem().unwrap_or_default().to_string_lossy();
        let cards = workload.cards();
        let title = format!("{list}: {cards} GPUs, mode {}, {seeds} seeds", args.mode);
        write_whole(path, &svg(&title, &summaries))?;
    }
    match args.output {
        Output::Table => print!("{}", table(&summaries)),
        Output::Json => {
            let policies: BTreeMap<_, _> = summaries.into_iter().collect();
            let document = json!({
                "protocol": "fgd",
                "mode": args.mode.name(),
                "seeds": [first, last],
                "complete": !Progress::stopped(),
                "policies": policies,
            });
            println!("{}", serde_json::to_string_pretty(&document)?);
        }
    }
    Ok(())
}
