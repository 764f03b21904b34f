//! Runs of several seeds as one table or one JSON document.

use serde::Serialize;

use super::LendRun;
use crate::churn::{mean, quantile};
use crate::report::Mean;

/// One way at one load over all seeds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LendSummary {
    /// Seeds that were run to their end.
    pub runs: usize,
    /// Pods with GPUs that run, by card.
    pub pods_per_gpu: Mean,
    /// What programs use of the cards' memory, in percent.
    pub used_pct: Mean,
    /// Minutes in which the programs on a card want more than it has, in percent.
    pub over_pct: Mean,
    /// Minutes that a pod waits, where pods run for an hour on average: the mean, and the 99th percentile.
    pub wait_minutes: Mean,
    /// The 99th percentile of the same.
    pub wait_p99_minutes: Mean,
    /// Pods reclaimed, a day that a pod of a part of a card runs.
    pub called_back_per_pod_day: Mean,
    /// Allocations refused for want of memory, likewise.
    pub refused_per_pod_day: Mean,
    /// Those with which the pod would have used no more than it asked for.
    pub refused_below_request_per_pod_day: Mean,
}

impl LendSummary {
    /// The summary of the runs of one way.
    #[must_use]
    pub fn of(runs: &[LendRun]) -> Self {
        let over =
            |value: &dyn Fn(&LendRun) -> f64| Mean::of(&runs.iter().map(value).collect::<Vec<_>>());
        Self {
            runs: runs.len(),
            pods_per_gpu: over(&|run| run.pods),
            used_pct: over(&|run| run.used),
            over_pct: over(&|run| run.over),
            wait_minutes: over(&|run| mean(&run.waits)),
            wait_p99_minutes: over(&|run| quantile(&run.waits, 0.99)),
            called_back_per_pod_day: over(&|run| run.called),
            refused_per_pod_day: over(&|run| run.failed),
            refused_below_request_per_pod_day: over(&|run| run.failed_below),
        }
    }
}

/// The summaries as a table, one load and way per line.
#[must_use]
pub fn lend_table(summaries: &[(f64, &str, LendSummary)]) -> String {
    let heads = [
        "pods/GPU",
        "used %",
        "minutes over, %",
        "wait, min",
        "wait p99, min",
        "called/day",
        "refused/day",
        "below request/day",
    ];
    let mut text = format!("{:>5} {:<8}", "load", "way");
    for head in heads {
        text += &format!("{head:>19}");
    }
    text.push('\n');
    for (load, name, summary) in summaries {
        text += &format!("{load:>5} {name:<8}");
        for Mean { mean, ci95, .. } in [
            &summary.pods_per_gpu,
            &summary.used_pct,
            &summary.over_pct,
            &summary.wait_minutes,
            &summary.wait_p99_minutes,
            &summary.called_back_per_pod_day,
            &summary.refused_per_pod_day,
            &summary.refused_below_request_per_pod_day,
        ] {
            text += &format!("{:>19}", format!("{mean:.2} ±{ci95:.2}"));
        }
        text.push('\n');
    }
    text
}
