//! The judgements as a table, and the goals.

use serde::Serialize;

use super::{Judged, Request};
use crate::report::Mean;

/// Goals are for GPUs of this size or larger, in MiB.
const LARGE: u64 = 140_000;
/// Pods at least, relative to requests at the peak.
const LEAST_PODS: f64 = 1.2;
/// Episodes of each GPU and day at most.
const MOST_EPISODES: f64 = 0.1;

/// A goal for advice.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Goal {
    /// Size of a GPU, in MiB.
    pub gpu_mib: u64,
    /// Episodes of each GPU and day at most.
    pub most_episodes: f64,
    /// Pods at least, relative to requests at the peak.
    pub least_pods: f64,
    /// Is it so?
    pub met: bool,
}

/// The goals for recorded pods that each have a history, and whether these judgements meet them.
#[must_use]
pub fn goals(judged: &[Judged]) -> Vec<Goal> {
    let request = Request::Advised.name();
    let of_it = judged.iter().filter(|it| {
        it.series == "trace" && it.request == request && it.replicas == 1 && it.gpu_mib >= LARGE
    });
    of_it
        .map(|it| Goal {
            gpu_mib: it.gpu_mib,
            most_episodes: MOST_EPISODES,
            least_pods: LEAST_PODS,
            met: it.episodes.mean <= MOST_EPISODES && it.pods.mean >= LEAST_PODS,
        })
        .collect()
}

/// The judgements as a table, and which goals they meet.
#[must_use]
pub fn advice_table(judged: &[Judged]) -> String {
    let mut text = format!(
        "{:<9}{:>8}  {:>8}  {:<15}{:>12}{:>16}{:>17}{:>17}{:>14}{:>13}{:>11}\n",
        "series",
        "replicas",
        "GPU MiB",
        "request",
        "pods",
        "over, %",
        "episodes a day",
        "GPUs without, %",
        "above, %",
        "worst pod, %",
        "moves, %"
    );
    let of = |it: &Mean, digits: usize| format!("{:.digits$} ±{:.digits$}", it.mean, it.ci95);
    for it in judged {
        text += &format!(
            "{:<9}{:>8}  {:>8}  {:<15}{:>12}{:>16}{:>17}{:>17}{:>14}{:>13}{:>11}\n",
            it.series,
            it.replicas,
            it.gpu_mib,
            it.request,
            of(&it.pods, 2),
            of(&it.over_pct, 3),
            of(&it.episodes, 2),
            of(&it.without_pct, 1),
            of(&it.above_pct, 1),
            of(&it.worst_pod_pct, 0),
            of(&it.moves_pct, 1),
        );
    }
    for it in goals(judged) {
        let met = if it.met { "met" } else { "missed" };
        text += &format!(
            "goal {met}: at most {} episodes a day and at least {} times the pods on GPUs of {} MiB\n",
            it.most_episodes, it.least_pods, it.gpu_mib
        );
    }
    text
}
