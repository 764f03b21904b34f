//! `replay`: arrivals until more is asked for than there is.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use gpustow_sim::progress::Progress;
use gpustow_sim::protocol::{CpuPods, Wave, Workload};
use gpustow_sim::replay::replay_all;
use gpustow_sim::report::{Summary, table, whole_table};
use serde_json::json;

use crate::{Output, Runs, read_nodes, read_pods};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Node list: CSV with sn,cpu_milli,memory_mib,gpu,model
    #[arg(long, value_name = "CSV")]
    nodes: PathBuf,
    /// Pod list: CSV with name,cpu_milli,memory_mib,num_gpu,gpu_milli and, if any, gpu_spec
    #[arg(long, value_name = "CSV")]
    pods: PathBuf,
    /// Pod list to draw from, from --at on, until as much has been asked for as there is
    #[arg(long, value_name = "CSV", requires = "at")]
    then: Option<PathBuf>,
    /// Percent of the GPUs asked for when the list changes
    #[arg(long, value_name = "PERCENT", requires = "then", value_parser = clap::value_parser!(u32).range(..=100))]
    at: Option<u32>,
    /// Who places pods without GPUs; in a cluster they do not reach gpustow
    #[arg(long, value_enum, default_value = "policy")]
    cpu_pods: CpuPods,
    #[command(flatten)]
    runs: Runs,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut workload = Workload::new(
        read_nodes(&args.nodes)?,
        read_pods(&args.pods)?,
        args.runs.mode,
    )?;
    ensure!(workload.cards() > 0, "{}: no GPUs", args.nodes.display());
    ensure!(
        workload.jobs.iter().any(|job| job.demand() > 0),
        "{}: no pod asks for GPUs",
        args.pods.display()
    );
    workload.cpu_pods = args.cpu_pods;
    workload.nodes = args.runs.nodes_count.unwrap_or(usize::MAX);
    if let (Some(path), Some(at)) = (&args.then, args.at) {
        let jobs = workload.read(read_pods(path)?);
        workload.wave = Some(Wave { at, jobs });
    }
    let mut progress = Progress::new(args.runs.count());
    let mut summaries = Vec::new();
    for policy in &args.runs.policy {
        let runs = replay_all(&workload, *policy, args.runs.seeds(), &mut progress)?;
        if !runs.is_empty() {
            summaries.push((policy.to_string(), Summary::of(&runs)));
        }
    }
    match args.runs.output {
        Output::Table => {
            print!("{}\n{}", table(&summaries), whole_table(&summaries));
        }
        Output::Json => {
            let policies: BTreeMap<_, _> = summaries.into_iter().collect();
            let document = json!({
                "protocol": "fgd",
                "mode": args.runs.mode.name(),
                "seeds": args.runs.seeds,
                "complete": !Progress::stopped(),
                "policies": policies,
            });
            println!("{}", serde_json::to_string_pretty(&document)?);
        }
    }
    Ok(())
}
