//! `whatif`: a cluster's own nodes and pods, placed anew.

use std::str::FromStr;

use anyhow::{Context, Result};
use gpustow_pack::PolicyKind;
use gpustow_sim::progress::Progress;
use gpustow_sim::whatif::{Added, Cluster, Document, whatif_table};
use kubectl_gpustow::Source;

use crate::Output;

/// Places every pod that asks for GPU memory anew, in the order in which kube-scheduler would take
/// them (priority, then age): what would fit, what would wait, how many nodes could go without
/// making more pods wait. Nothing is written to the cluster. Node selectors, required node affinity,
/// taints, CPU and host memory count; affinity between pods, topology spread, volumes, quotas and
/// preemption do not.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    source: Source,
    /// Policies, separated by commas; a pod that names one keeps its own
    #[arg(long, value_delimiter = ',', default_value = "tight")]
    policy: Vec<PolicyKind>,
    /// Add N nodes, copies of NODE or else of the commonest kind; may be repeated
    #[arg(long, value_name = "N[:NODE]", value_parser = added)]
    add_nodes: Vec<Added>,
    /// Take N nodes out: those whose pods hold the least GPU memory
    #[arg(long, value_name = "N", default_value = "0")]
    remove_nodes: usize,
    /// How to print
    #[arg(short, long, value_enum, default_value = "table")]
    output: Output,
}

fn added(text: &str) -> Result<Added, String> {
    let (count, like) = match text.split_once(':') {
        Some((count, like)) => (count, Some(like.to_owned())),
        None => (text, None),
    };
    let count = usize::from_str(count)
        .ok()
        .filter(|count| *count <= 100_000);
    let count = count.ok_or_else(|| format!("{text:?} is neither N nor N:NODE"))?;
    Ok(Added { count, like })
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start")?;
    let lists = runtime.block_on(args.source.lists())?;
    let cluster = Cluster::new(lists, &args.source.resource_name)?;
    let mut changed = cluster.clone();
    changed.change(&args.add_nodes, args.remove_nodes)?;
    let is_changed = !args.add_nodes.is_empty() || args.remove_nodes > 0;
    let mut clusters = vec![("same", &cluster)];
    if is_changed {
        clusters.push(("changed", &changed));
    }
    let replays = clusters
        .iter()
        .map(|(_, cluster)| cluster.replays())
        .sum::<usize>();
    let mut progress = Progress::new(replays * args.policy.len());
    let mut scenarios = vec![cluster.as_it_is()];
    for (title, cluster) in clusters {
        for policy in &args.policy {
            scenarios.extend(cluster.replay(title, *policy, &mut progress));
        }
    }
    match args.output {
        Output::Table => print!("{}", whatif_table(&scenarios)),
        Output::Json => {
            let document = Document {
                kind: "WhatIf",
                complete: !Progress::stopped(),
                scenarios,
            };
            println!("{}", serde_json::to_string_pretty(&document)?);
        }
    }
    Ok(())
}
