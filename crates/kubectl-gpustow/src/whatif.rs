//! `whatif`: a cluster's own nodes and pods, placed again.

mod replay;

use std::io::{IsTerminal as _, Write, stderr};
use std::str::FromStr as _;

use anyhow::Result;
use gpustow_inspect::Source;
use gpustow_pack::PolicyKind;

use crate::answer::Answer;
use crate::output::Shown::{Always, Table, Wide};
use crate::output::{Listing, Output, Screen, Value, column};
use replay::Scenario;

pub(crate) use replay::{Added, Inventory, Rehearsal};

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct WhatifArgs {
    /// Policies, separated by commas; a pod that names one keeps its own
    #[arg(long, value_delimiter = ',', default_value = "tight")]
    pub(crate) policy: Vec<PolicyKind>,
    /// Add N nodes, copies of NODE or else of the commonest kind; may be repeated
    #[arg(long, value_name = "N[:NODE]", value_parser = added)]
    pub(crate) add_nodes: Vec<Added>,
    /// Remove the N nodes whose pods hold the least GPU memory
    #[arg(long, value_name = "N", default_value = "0")]
    pub(crate) remove_nodes: usize,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// Pods that a cell names.
const NAMED: usize = 3;

/// Reads `N` or `N:NODE`.
pub(crate) fn added(text: &str) -> Result<Added, String> {
    let (count, like) = match text.split_once(':') {
        Some((count, like)) => (count, Some(like.to_owned())),
        None => (text, None),
    };
    let count = usize::from_str(count).ok();
    let count = count.filter(|count| *count <= 100_000);
    let count = count.ok_or_else(|| format!("{text:?} is neither N nor N:NODE"))?;
    Ok(Added { count, like })
}

/// Places everything again, as often as it was asked for.
pub(crate) async fn run(
    source: &Source,
    args: &WhatifArgs,
    out: &mut (dyn Write + Send),
    screen: Screen,
) -> Result<Answer> {
    let lists = source.lists().await?;
    let (nodes, gpunodes) = (lists.nodes, lists.gpunodes);
    let pods = lists.pods.into_iter().map(|it| it.pod).collect();
    let cluster = Inventory::new(nodes, gpunodes, pods, &source.resource_name)?;
    let mut clusters = vec![("same", cluster.clone())];
    if !args.add_nodes.is_empty() || args.remove_nodes > 0 {
        let mut changed = cluster.clone();
        changed.change(&args.add_nodes, args.remove_nodes)?;
        clusters.push(("changed", changed));
    }
    let replays: usize = clusters.iter().map(|(_, it)| it.replays()).sum();
    let replays = replays * args.policy.len();
    let is_watched = screen.terminal && stderr().is_terminal();
    let mut begun = 0;
    let mut begins = || {
        begun += 1;
        if is_watched {
            eprint!("\r\x1b[Kplacing everything again, {begun} of at most {replays}");
        }
    };
    let mut scenarios = vec![cluster.as_it_is()];
    for (title, cluster) in &clusters {
        let replayed = args.policy.iter();
        scenarios.extend(replayed.map(|policy| cluster.replay(title, *policy, &mut begins)));
    }
    if is_watched {
        eprint!("\r\x1b[K");
    }
    listing(scenarios).print(&args.output, screen, out)
}

fn listing(rows: Vec<Scenario>) -> Listing<Scenario> {
    Listing {
        kind: "WhatIf",
        columns: vec![
            column("SCENARIO", "scenario", Always, |row| row.title.into()),
            column("POLICY", "policy", Always, |row| {
                row.policy.map(PolicyKind::name).into()
            }),
            column("NODES", "nodes", Always, |row| row.nodes.into()),
            column("GPUS", "gpus", Always, |row| row.gpus.into()),
            column("PLACED", "placed", Always, |row| row.placed.into()),
            column("WAITING", "waiting", Always, |row| row.waiting.len().into()),
            column("ALLOCATED", "allocatedBytes", Always, |row| {
                row.allocated.into()
            }),
            column("%", "allocatedPercent", Always, |row| percent(row).into()),
            column("EMPTY-GPUS", "emptyGpus", Always, |row| row.empty.into()),
            column("LARGEST", "largestFreeBytes", Always, |row| {
                row.largest.into()
            }),
            column("COULD-GO", "nodesToSpare", Always, |row| {
                row.to_spare.map(|it| it.0).into()
            }),
            column("GPUS-COULD-GO", "gpusToSpare", Wide, |row| {
                row.to_spare.map(|it| it.1).into()
            }),
            column("NEWLY-PLACED", "", Table, |row| few(&row.newly_placed)),
            column("NEWLY-WAITING", "", Table, |row| few(&row.newly_waiting)),
            column("NEWLY-PLACED", "newlyPlacedPods", Wide, |row| {
                row.newly_placed.clone().into()
            }),
            column("NEWLY-WAITING", "newlyWaitingPods", Wide, |row| {
                row.newly_waiting.clone().into()
            }),
            column("WAITING-PODS", "waitingPods", Wide, |row| {
                row.waiting.iter().cloned().collect::<Vec<_>>().into()
            }),
        ],
        rows,
        total: None,
        name: |row| match row.policy {
            Some(policy) => format!("scenario/{}-{policy}", row.title),
            None => format!("scenario/{}", row.title),
        },
        empty: "",
        answer: Answer::Yes,
    }
}

#[allow(clippy::cast_precision_loss, reason = "one digit is shown")]
fn percent(row: &Scenario) -> f64 {
    100.0 * row.allocated.0 as f64 / row.capacity.0.max(1) as f64
}

fn few(names: &[String]) -> Value {
    let mut few: Vec<String> = names.iter().take(NAMED).cloned().collect();
    if names.len() > NAMED {
        few.push(format!("{} more", names.len() - NAMED));
    }
    Value::things(&few)
}
