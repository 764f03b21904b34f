//! What a replay of a cluster showed, as a table or a document.

use gpustow_pack::{Mib, PolicyKind};
use serde::Serialize;

use super::Placed;

/// Pods that a table names.
const NAMED: usize = 10;

/// The cluster in one shape under one policy. Memory in bytes.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Scenario {
    /// Which nodes: as they are, or changed.
    pub scenario: &'static str,
    /// The policy; none for the pods where they are now.
    pub policy: Option<&'static str>,
    /// Nodes with GPUs.
    pub nodes: usize,
    /// Their GPUs.
    pub gpus: usize,
    /// Pods that have their GPU memory.
    pub placed_pods: usize,
    /// Pods that wait, by namespace and name.
    pub waiting_pods: Vec<String>,
    /// Pods that wait here and have a place now.
    pub newly_waiting_pods: Vec<String>,
    /// Pods that wait now and have a place here.
    pub newly_placed_pods: Vec<String>,
    /// GPU memory that pods hold.
    pub allocated_bytes: u64,
    /// In percent of what pods may hold.
    pub allocated_percent: f64,
    /// GPUs that nobody holds anything on.
    pub empty_gpus: usize,
    /// The largest piece that is free on one GPU.
    pub largest_free_bytes: u64,
    /// Nodes that could go, the emptiest first, without making more pods wait; found by bisection.
    pub nodes_to_spare: Option<usize>,
    /// Their GPUs.
    pub gpus_to_spare: Option<usize>,
}

impl Scenario {
    pub(super) fn new(
        scenario: &'static str,
        policy: Option<PolicyKind>,
        now: &Placed,
        then: &Placed,
        pods: usize,
    ) -> Self {
        let cards = &then.cards;
        let held: Mib = cards.iter().map(|card| card.held).sum();
        let capacity: Mib = cards.iter().map(|card| card.capacity).sum();
        let free = cards
            .iter()
            .filter(|card| card.healthy)
            .map(|card| card.free);
        let empty = cards.iter().filter(|card| card.held == Mib::ZERO);
        let percent = 100.0 * held.0 as f64 / capacity.0.max(1) as f64;
        Self {
            scenario,
            policy: policy.map(PolicyKind::name),
            nodes: then.nodes.len(),
            gpus: cards.len(),
            placed_pods: pods - then.waiting.len(),
            waiting_pods: then.waiting.iter().cloned().collect(),
            newly_waiting_pods: then.waiting.difference(&now.waiting).cloned().collect(),
            newly_placed_pods: now.waiting.difference(&then.waiting).cloned().collect(),
            allocated_bytes: held.bytes(),
            allocated_percent: (percent * 100.0).round() / 100.0,
            empty_gpus: empty.count(),
            largest_free_bytes: free.max().unwrap_or_default().bytes(),
            nodes_to_spare: None,
            gpus_to_spare: None,
        }
    }
}

/// Everything that was asked.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Document {
    /// What this is.
    pub kind: &'static str,
    /// False if Ctrl-C ended it.
    pub complete: bool,
    /// One entry per policy and set of nodes.
    pub scenarios: Vec<Scenario>,
}

fn gib(bytes: u64) -> String {
    format!("{:.1}Gi", bytes as f64 / f64::from(1 << 30))
}

fn listed(names: &[String]) -> String {
    let shown = names
        .iter()
        .take(NAMED)
        .cloned()
        .collect::<Vec<_>>()
        .join(", ");
    match names.len().checked_sub(NAMED + 1) {
        Some(more) => format!("{shown} and {} more", more + 1),
        None => shown,
    }
}

/// The scenarios as a table, one per line, and below it the pods whose fate changes.
#[must_use]
pub fn whatif_table(scenarios: &[Scenario]) -> String {
    let mut text = format!(
        "{:<14}{:<11}{:>6}{:>6}{:>8}{:>9}{:>10}{:>8}{:>12}{:>10}{:>15}\n",
        "NODES",
        "POLICY",
        "COUNT",
        "GPUS",
        "PLACED",
        "WAITING",
        "ALLOCATED",
        "%",
        "EMPTY GPUS",
        "LARGEST",
        "COULD GO"
    );
    for it in scenarios {
        let spare = it.nodes_to_spare.zip(it.gpus_to_spare);
        text += &format!(
            "{:<14}{:<11}{:>6}{:>6}{:>8}{:>9}{:>10}{:>8.1}{:>12}{:>10}{:>15}\n",
            it.scenario,
            it.policy.unwrap_or("-"),
            it.nodes,
            it.gpus,
            it.placed_pods,
            it.waiting_pods.len(),
            gib(it.allocated_bytes),
            it.allocated_percent,
            it.empty_gpus,
            gib(it.largest_free_bytes),
            spare.map_or_else(
                || "-".to_owned(),
                |(nodes, gpus)| format!("{nodes} ({gpus} GPUs)")
            ),
        );
    }
    for it in scenarios {
        let title = format!("{}, {}", it.scenario, it.policy.unwrap_or("now"));
        for (what, names) in [
            ("waits", &it.waiting_pods),
            ("waits that has a place now", &it.newly_waiting_pods),
            ("has a place that waits now", &it.newly_placed_pods),
        ] {
            if !names.is_empty() {
                text += &format!("{title}: {what}: {}\n", listed(names));
            }
        }
    }
    text
}
