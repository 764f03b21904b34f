//! `starts`: pods that start on a card on which another starts, at the times of a trace.

use std::path::PathBuf;

use anyhow::Result;
use gpustow_sim::protocol::Workload;
use gpustow_sim::starts::collisions;

use crate::{Mode, read_nodes, read_pods};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Node list: CSV with sn,cpu_milli,memory_mib,gpu,model
    #[arg(long, value_name = "CSV")]
    nodes: PathBuf,
    /// Pod list: CSV with name,cpu_milli,memory_mib,num_gpu,gpu_milli,creation_time,deletion_time
    #[arg(long, value_name = "CSV")]
    pods: PathBuf,
    /// How long a pod starts
    #[arg(long, value_name = "SECONDS", default_value = "180")]
    lasts: u64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    println!(
        "| pods start | pods that share a card | start beside another | wait together | cards in use |"
    );
    println!("|---|---|---|---|---|");
    for (how, alone) in [("as they come", false), ("alone", true)] {
        let pods = read_pods(&args.pods)?;
        let mut workload = Workload::new(read_nodes(&args.nodes)?, pods.clone(), Mode::Units)?;
        let found = collisions(&mut workload, pods, args.lasts, alone)?;
        println!(
            "| {how} | {} | {} ({:.1} %) | {} s | {:.1} |",
            found.pods,
            found.collide,
            100.0 * found.collide as f64 / found.pods.max(1) as f64,
            found.waited,
            found.cards
        );
    }
    Ok(())
}
