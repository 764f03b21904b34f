//! Runs of several seeds as one table or one JSON document.

use std::collections::BTreeMap;

use serde::Serialize;

use super::ChurnRun;
use crate::report::Mean;

/// One policy at one load over all seeds. Percentages are of the cluster's cards.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChurnSummary {
    /// Seeds that were run to their end.
    pub runs: usize,
    /// Held by pods.
    pub allocation_pct: Mean,
    /// Asked for by pods that wait.
    pub waiting_pct: Mean,
    /// Free while as much or more waits.
    pub waste_pct: Mean,
    /// Demand that did not start at once, in percent of all that came.
    pub delayed_pct: Mean,
    /// Minutes that a pod waits, where pods run for an hour on average: mean, p50, p99 and max.
    pub wait_minutes: BTreeMap<&'static str, Mean>,
    /// The mean by kind of demand.
    pub wait_minutes_by_kind: BTreeMap<&'static str, Mean>,
    /// Of the pods of all seeds together, by kind of demand: their number, p50, p99 and max.
    pub waits_by_kind: BTreeMap<&'static str, Waits>,
    /// Pods moved, in an hour.
    pub moves_per_hour: Mean,
    /// GPUs of nodes without any pod.
    pub unused_pct: Mean,
    /// Hours of such GPUs.
    pub unused_gpu_hours: Mean,
    /// Allocation, waste and mean wait of each seed, to compare policies seed by seed.
    pub per_seed: Vec<[f64; 3]>,
}

/// How long pods of one size wait, in minutes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Waits {
    /// How many there were.
    pub pods: usize,
    /// Half of them wait no longer.
    pub p50: f64,
    /// One in a hundred waits longer.
    pub p99: f64,
    /// The longest of all.
    pub max: f64,
}

impl Waits {
    fn of(mut waits: Vec<f64>) -> Self {
        waits.sort_by(f64::total_cmp);
        Self {
            pods: waits.len(),
            p50: quantile(&waits, 0.5),
            p99: quantile(&waits, 0.99),
            max: quantile(&waits, 1.0),
        }
    }
}

/// The mean of these.
fn mean(waits: &[f64]) -> f64 {
    waits.iter().sum::<f64>() / waits.len().max(1) as f64
}

/// A quantile of these, which ascend.
fn quantile(waits: &[f64], share: f64) -> f64 {
    let index = (share * waits.len() as f64) as usize;
    let last = waits.len().saturating_sub(1);
    waits.get(index.min(last)).copied().unwrap_or(0.0)
}

impl ChurnSummary {
    /// The summary of the runs of one policy.
    #[must_use]
    pub fn of(runs: &[ChurnRun]) -> Self {
        let over = |value: &dyn Fn(&ChurnRun) -> f64| {
            Mean::of(&runs.iter().map(value).collect::<Vec<_>>())
        };
        let all: Vec<Vec<f64>> = runs
            .iter()
            .map(|run| {
                let mut all: Vec<f64> = run.waits.values().flatten().copied().collect();
                all.sort_by(f64::total_cmp);
                all
            })
            .collect();
        let waits = |value: &dyn Fn(&[f64]) -> f64| {
            Mean::of(&all.iter().map(|all| value(all)).collect::<Vec<_>>())
        };
        let mut kinds: BTreeMap<&'static str, Vec<f64>> = BTreeMap::new();
        for (kind, waits) in runs.iter().flat_map(|run| &run.waits) {
            kinds.entry(kind).or_default().push(mean(waits));
        }
        let mut together: BTreeMap<&'static str, Vec<f64>> = BTreeMap::new();
        for (kind, waits) in runs.iter().flat_map(|run| &run.waits) {
            together.entry(kind).or_default().extend(waits);
        }
        let together = together.into_iter();
        let per_seed = runs.iter().zip(&all);
        Self {
            runs: runs.len(),
            allocation_pct: over(&|run| run.allocated),
            waiting_pct: over(&|run| run.waiting),
            waste_pct: over(&|run| run.wasted),
            delayed_pct: over(&|run| run.delayed),
            wait_minutes: [
                ("mean", waits(&mean)),
                ("p50", waits(&|all| quantile(all, 0.5))),
                ("p99", waits(&|all| quantile(all, 0.99))),
                ("max", waits(&|all| quantile(all, 1.0))),
            ]
            .into(),
            wait_minutes_by_kind: kinds
                .into_iter()
                .map(|(kind, means)| (kind, Mean::of(&means)))
                .collect(),
            waits_by_kind: together
                .map(|(kind, waits)| (kind, Waits::of(waits)))
                .collect(),
            moves_per_hour: over(&|run| run.moves),
            unused_pct: over(&|run| run.unused),
            unused_gpu_hours: over(&|run| run.unused_hours),
            per_seed: per_seed
                .map(|(run, all)| [run.allocated, run.wasted, mean(all)])
                .collect(),
        }
    }
}

/// The summaries as a table, one load and policy per line.
#[must_use]
pub fn churn_table(summaries: &[(f64, String, ChurnSummary)]) -> String {
    let heads = ["alloc %", "waste %", "waiting %", "delayed %"];
    let waits = ["mean", "p50", "p99", "max"];
    let mut text = format!("{:>5} {:<24}", "load", "policy");
    for head in heads {
        text += &format!("{head:>14}");
    }
    for head in waits {
        text += &format!("{:>15}", format!("wait {head}, min"));
    }
    text.push('\n');
    for (load, name, summary) in summaries {
        text += &format!("{load:>5} {name:<24}");
        for mean in [
            &summary.allocation_pct,
            &summary.waste_pct,
            &summary.waiting_pct,
            &summary.delayed_pct,
        ] {
            text += &format!("{:>14}", shown(mean));
        }
        for wait in waits {
            let mean = summary.wait_minutes.get(wait).map(shown);
            text += &format!("{:>15}", mean.unwrap_or_default());
        }
        text.push('\n');
    }
    text
}

/// The GPUs of nodes that hold no pod and could be removed, one load and policy per line.
#[must_use]
pub fn unused_table(summaries: &[(f64, String, ChurnSummary)]) -> String {
    let head = ["unused %", "unused GPU-h", "moves/h"];
    let mut text = format!("{:>5} {:<24}", "load", "policy");
    text.extend(head.map(|head| format!("{head:>18}")));
    text.push('\n');
    for (load, name, summary) in summaries {
        text += &format!("{load:>5} {name:<24}");
        for mean in [
            &summary.unused_pct,
            &summary.unused_gpu_hours,
            &summary.moves_per_hour,
        ] {
            text += &format!("{:>18}", shown(mean));
        }
        text.push('\n');
    }
    text
}

fn shown(mean: &Mean) -> String {
    format!("{:.2} ±{:.2}", mean.mean, mean.ci95)
}

/// How long pods of each size wait, one load, policy and size per line.
#[must_use]
pub fn sizes_table(summaries: &[(f64, String, ChurnSummary)]) -> String {
    let head = [
        "alloc %", "±", "moves/h", "pods", "p50, min", "p99, min", "max, min",
    ];
    let mut text = format!("{:>5} {:<24} {:<6}", "load", "policy", "size");
    text.extend(head.map(|head| format!("{head:>10}")));
    text.push('\n');
    for (load, name, summary) in summaries {
        let allocated = &summary.allocation_pct;
        let moves = summary.moves_per_hour.mean;
        for (kind, waits) in &summary.waits_by_kind {
            let Waits {
                pods,
                p50,
                p99,
                max,
            } = waits;
            text += &format!("{load:>5} {name:<24} {kind:<6}");
            text += &format!("{:>10.2}{:>10.2}", allocated.mean, allocated.ci95);
            text += &format!("{moves:>10.1}{pods:>10}");
            text += &format!("{p50:>10.2}{p99:>10.2}{max:>10.2}\n");
        }
    }
    text
}
