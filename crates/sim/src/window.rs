//! The nodes that kube-scheduler shows an extender for one pod: a window that goes round the cluster.
//!
//! It follows `findNodesThatPassFilters` and `numFeasibleNodesToFind` of Kubernetes 1.36
//! (`pkg/scheduler/schedule_one.go`): kube-scheduler looks at one node after the other, beginning where it stopped for
//! the pod before, until enough of them pass its own filters. The extender sees those alone.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;
use gpustow_api::intree::nodes_to_find;
use serde::Serialize;

use crate::hosts::{Host, Job};

/// Goroutines of kube-scheduler's that share the nodes among them: its `parallelism`.
const PARALLELISM: usize = 16;

/// When kube-scheduler stops looking for nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enough {
    /// `percentageOfNodesToScore`; 0 is adaptive.
    Percent(usize),
    /// This many nodes, though kube-scheduler might look for more.
    Nodes(usize),
}

impl Enough {
    /// Of a cluster with so many nodes.
    #[must_use]
    pub fn of(self, nodes: usize) -> usize {
        match self {
            Self::Nodes(enough) => enough.clamp(1, nodes.max(1)),
            Self::Percent(percentage) => nodes_to_find(percentage, nodes),
        }
    }
}

impl fmt::Display for Enough {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Percent(0) => f.write_str("adaptive"),
            Self::Percent(percent) => write!(f, "{percent}%"),
            Self::Nodes(nodes) => write!(f, "{nodes}"),
        }
    }
}

impl FromStr for Enough {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str, most: usize| text.parse().ok().filter(|it| *it <= most);
        let found = match text.strip_suffix('%') {
            _ if text == "adaptive" => Some(Self::Percent(0)),
            Some(percent) => number(percent, 100).map(Self::Percent),
            None => number(text, 1_000_000)
                .filter(|it| *it > 0)
                .map(Self::Nodes),
        };
        found.ok_or_else(|| {
            format!(
                "{text:?} is neither a number of nodes, nor a percentage such as 10%, nor adaptive"
            )
        })
    }
}

/// What is done for a pod for which a window would open an empty node, if every node shown would not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum InUse {
    /// The empty node is opened
    #[default]
    Off,
    /// The best node in use of the window is taken, if one fits
    Prefer,
    /// The pod is nominated to the best node in use of all
    Nominate,
}

/// How kube-scheduler samples nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// When it stops looking.
    pub enough: Enough,
    /// How many of its goroutines run at the same time: with one, a window is an unbroken run of nodes.
    pub workers: usize,
    /// What is done for a pod for which the window would open an empty node, if every node shown would not.
    pub in_use: InUse,
}

impl Default for Window {
    /// Every node.
    fn default() -> Self {
        Self {
            enough: Enough::Percent(100),
            workers: 1,
            in_use: InUse::default(),
        }
    }
}

impl Window {
    /// Every node is in it.
    #[must_use]
    pub fn is_all(self) -> bool {
        self.enough == Enough::Percent(100)
    }

    /// What it adds to the name of a policy.
    #[must_use]
    pub fn suffix(self) -> String {
        match (self.is_all(), self.in_use) {
            (true, _) => String::new(),
            (_, InUse::Off) => format!(", window {}", self.enough),
            (_, InUse::Prefer) => format!(", window {} prefer", self.enough),
            (_, InUse::Nominate) => format!(", window {} nominate", self.enough),
        }
    }
}

/// The order in which so many nodes are looked at, as distances from the first one. kube-scheduler gives them out in chunks.
fn order(nodes: usize, workers: usize) -> Vec<usize> {
    let chunk = nodes.isqrt().min(nodes / PARALLELISM + 1).max(1);
    let chunks = nodes.div_ceil(chunk);
    let workers = workers.clamp(1, PARALLELISM);
    let mut order = Vec::with_capacity(nodes);
    for first in (0..chunks).step_by(workers) {
        let last = (first + workers).min(chunks);
        for offset in 0..chunk {
            let nodes_of = (first..last).map(|index| index * chunk + offset);
            order.extend(nodes_of.filter(|at| *at < nodes));
        }
    }
    order
}

/// What sampling did to the pods of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Looks {
    /// Attempts to place a pod with GPUs.
    pub attempts: usize,
    /// Those refused in the first window although a node outside it fits.
    pub refused: usize,
    /// Further windows that these took, together.
    pub further: usize,
    /// The most that one of them took.
    pub most: usize,
    /// Pods that opened an empty node although a node in use outside the window fits.
    pub opened: usize,
    /// Pods that were nominated to a node outside the window.
    pub nominated: usize,
}

/// [`Looks`] of several runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Sampled {
    /// Attempts refused in the first window although a node outside it fits, in percent.
    pub refused_pct: f64,
    /// Further windows until such a pod is placed: the mean.
    pub further_mean: f64,
    /// The most of them.
    pub further_max: usize,
    /// Pods that opened an empty node although a node in use outside the window fits, in percent.
    pub opened_pct: f64,
    /// Pods nominated to a node outside the window, in percent.
    pub nominated_pct: f64,
}

impl Sampled {
    /// Those of these runs.
    #[must_use]
    pub fn of(runs: impl IntoIterator<Item = Looks>) -> Self {
        let sum = runs.into_iter().fold(Looks::default(), |sum, run| Looks {
            attempts: sum.attempts + run.attempts,
            refused: sum.refused + run.refused,
            further: sum.further + run.further,
            most: sum.most.max(run.most),
            opened: sum.opened + run.opened,
            nominated: sum.nominated + run.nominated,
        });
        let percent = |count: usize| 100.0 * count as f64 / sum.attempts.max(1) as f64;
        Self {
            refused_pct: percent(sum.refused),
            further_mean: sum.further as f64 / sum.refused.max(1) as f64,
            further_max: sum.most,
            opened_pct: percent(sum.opened),
            nominated_pct: percent(sum.nominated),
        }
    }
}

/// What sampling did, a run's name per line.
#[must_use]
pub fn sampled_table<'a>(lines: impl IntoIterator<Item = (String, &'a Sampled)>) -> String {
    let heads = [
        "refused %",
        "more windows",
        "most",
        "opened %",
        "nominated %",
    ];
    let mut text = format!("{:<40}", "window");
    text.extend(heads.map(|head| format!("{head:>14}")));
    text.push('\n');
    for (name, sampled) in lines {
        text += &format!(
            "{name:<40}{:>14.3}{:>14.2}{:>14}{:>14.2}{:>14.2}\n",
            sampled.refused_pct,
            sampled.further_mean,
            sampled.further_max,
            sampled.opened_pct,
            sampled.nominated_pct,
        );
    }
    text
}

/// kube-scheduler's look at the nodes: what it counts of them, and where it stopped.
#[derive(Debug)]
pub struct Sampler {
    window: Window,
    order: Vec<usize>,
    next: usize,
    /// GPU memory of each node less what its pods ask for: kube-scheduler knows no cards, and not that a pod which wants a
    /// whole card may be charged more than it asks for.
    free: Vec<u64>,
    /// What happened so far.
    pub looks: Looks,
}

/// The nodes that one look found.
#[derive(Debug, PartialEq, Eq)]
pub struct Look {
    /// Those that pass kube-scheduler's filters, in the order of their numbers.
    pub shown: Vec<usize>,
    /// How many nodes were looked at for them.
    pub processed: usize,
}

impl Sampler {
    /// Of these hosts, none of which is in use.
    #[must_use]
    pub fn new(hosts: &[Host], window: Window) -> Self {
        Self {
            window,
            order: order(hosts.len(), window.workers),
            next: 0,
            free: hosts.iter().map(|host| host.left.iter().sum()).collect(),
            looks: Looks::default(),
        }
    }

    /// The window's settings.
    #[must_use]
    pub fn window(&self) -> Window {
        self.window
    }

    /// The next window for this pod.
    pub fn look(&mut self, hosts: &[Host], job: &Job) -> Look {
        let enough = self.window.enough.of(hosts.len());
        let (mut shown, mut processed) = (Vec::new(), 0);
        for distance in &self.order {
            let at = (self.next + distance) % hosts.len();
            let host = &hosts[at];
            if host.admits(job) && self.free[at] >= asked(job) {
                // The one beyond what is enough ends the search, and is not counted.
                if shown.len() == enough {
                    break;
                }
                shown.push(at);
            }
            processed += 1;
        }
        self.next = (self.next + processed) % hosts.len().max(1);
        shown.sort_unstable();
        Look { shown, processed }
    }

    /// A pod is on this host now.
    pub fn took(&mut self, host: usize, job: &Job) {
        if let Some(free) = self.free.get_mut(host) {
            *free = free.saturating_sub(asked(job));
        }
    }

    /// It is no longer there.
    pub fn gave(&mut self, host: usize, job: &Job) {
        if let Some(free) = self.free.get_mut(host) {
            *free += asked(job);
        }
    }
}

/// The GPU memory of a node that the pod asks for.
fn asked(job: &Job) -> u64 {
    job.gpus as u64 * job.units
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hosts::Models;

    fn hosts(left: &[u64]) -> Vec<Host> {
        let host = |left: &u64| Host {
            cpu: 1000,
            ram: 1000,
            model: 1,
            card: *left,
            left: vec![*left],
        };
        left.iter().map(host).collect()
    }

    fn job(units: u64) -> Job {
        Job {
            class: 0,
            cpu: 1,
            ram: 1,
            gpus: 1,
            milli: 500,
            units,
            models: Models::MAX,
        }
    }

    fn nodes(enough: usize, workers: usize) -> Window {
        Window {
            enough: Enough::Nodes(enough),
            workers,
            ..Window::default()
        }
    }

    #[test]
    fn windows_follow_each_other_and_skip_nodes_whose_sum_is_short() {
        let hosts = hosts(&[9, 1, 9, 9, 1, 9]);
        let mut sampler = Sampler::new(&hosts, nodes(2, 1));
        let shown = |sampler: &mut Sampler| sampler.look(&hosts, &job(5)).shown;
        // The look goes on to the third node that fits, which the next one begins with.
        assert_eq!(shown(&mut sampler), [0, 2]);
        assert_eq!(shown(&mut sampler), [3, 5]);
        assert_eq!(shown(&mut sampler), [0, 2]);
    }

    #[test]
    fn every_node_is_looked_at_where_too_few_fit() {
        let hosts = hosts(&[9, 1, 9]);
        let mut sampler = Sampler::new(&hosts, nodes(3, 1));
        let look = sampler.look(&hosts, &job(5));
        assert_eq!((look.shown, look.processed), (vec![0, 2], 3));
        assert_eq!(sampler.look(&hosts, &job(5)).shown, [0, 2]);
    }

    #[test]
    fn the_sum_counts_what_pods_ask_for() {
        let hosts = hosts(&[9, 9]);
        let mut sampler = Sampler::new(&hosts, Window::default());
        sampler.took(0, &job(5));
        assert_eq!(sampler.look(&hosts, &job(5)).shown, [1]);
        sampler.gave(0, &job(5));
        assert_eq!(sampler.look(&hosts, &job(5)).shown, [0, 1]);
    }

    #[test]
    fn workers_at_the_same_time_take_chunks_of_their_own() {
        let alone: Vec<usize> = (0..1000).collect();
        assert_eq!(order(1000, 1), alone);
        let mut together = order(1000, 16);
        // Chunks of 31: the least of the root and a sixteenth.
        assert_eq!(together[..3], [0, 31, 62]);
        assert_eq!(together[16], 1);
        together.sort_unstable();
        assert_eq!(together, alone);
        assert_eq!(order(1, 16), [0]);
    }

    #[test]
    fn windows_are_read_as_they_are_written() -> Result<(), String> {
        for text in ["adaptive", "10%", "100%", "60"] {
            assert_eq!(text.parse::<Enough>()?.to_string(), text);
        }
        for text in ["", "0", "101%", "-1", "x%"] {
            assert!(text.parse::<Enough>().is_err(), "{text}");
        }
        Ok(())
    }
}
