//! The same pods on clusters without gpustow, where NVIDIA's device plugin hands out `nvidia.com/gpu`: whole GPUs, or
//! each GPU four times. kube-scheduler counts them, and nothing counts memory.
//!
//! Both get more than they have in practice: each pod goes only to GPUs that are large enough for it, as if its author
//! had named them, whole GPUs are given away smallest first, and a program that found no memory starts again at once
//! when there is some.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::time::Duration;

use super::picture::{CardPicture, NodePicture, Picture};
use super::tally::Tally;
use super::workload::{Arrival, SPAN, Workload};

/// How the device plugin hands out GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// Each GPU to one pod.
    Whole,
    /// Each GPU to up to four pods, with `replicas: 4`.
    TimeSlicing,
}

impl Sharing {
    pub(crate) const ALL: [Self; 2] = [Self::Whole, Self::TimeSlicing];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Whole => "whole GPUs",
            Self::TimeSlicing => "time-slicing",
        }
    }

    /// Pods to which one GPU is given at a time.
    fn replicas(self) -> usize {
        match self {
            Self::Whole => 1,
            Self::TimeSlicing => 4,
        }
    }
}

struct Gpu {
    node: usize,
    model: String,
    total_mib: u64,
    /// Pods that have it, running or not, by their place in the workload.
    pods: Vec<usize>,
    used_mib: u64,
}

/// A cluster of the workload's nodes at one moment of virtual time.
pub(crate) struct Cluster<'a> {
    pub(crate) sharing: Sharing,
    workload: &'a Workload,
    gpus: Vec<Gpu>,
    /// Pods without a node: priority, and place in the workload.
    queue: BTreeSet<(Reverse<i32>, usize)>,
    /// Pods with a node whose program finds no memory.
    stuck: BTreeSet<usize>,
    running: BTreeSet<usize>,
    /// When running pods finish.
    ends: BTreeSet<(Duration, usize)>,
    arrived: usize,
    pub(crate) tally: Tally,
    /// Pods whose program failed at least once because its GPU was full.
    failed: BTreeSet<usize>,
}

impl<'a> Cluster<'a> {
    pub(crate) fn new(sharing: Sharing, workload: &'a Workload) -> Self {
        let nodes = workload.nodes.iter().enumerate();
        let gpus = nodes.flat_map(|(node, it)| {
            it.gpus.iter().map(move |(model, total_mib)| Gpu {
                node,
                model: (*model).to_owned(),
                total_mib: *total_mib,
                pods: Vec::new(),
                used_mib: 0,
            })
        });
        Self {
            sharing,
            workload,
            gpus: gpus.collect(),
            queue: BTreeSet::new(),
            stuck: BTreeSet::new(),
            running: BTreeSet::new(),
            ends: BTreeSet::new(),
            arrived: 0,
            tally: Tally::default(),
            failed: BTreeSet::new(),
        }
    }

    /// Lets the workload happen up to `until`.
    pub(crate) fn live(&mut self, until: Duration) {
        let until = until.min(SPAN);
        loop {
            let arrival = self.workload.pods.get(self.arrived).map(|pod| pod.at);
            let end = self.ends.first().map(|(at, _)| *at);
            let next = arrival.into_iter().chain(end).fold(until, Duration::min);
            self.tally.pass(next, self.allocated(), self.running.len());
            while let Some(pod) = self.pod(self.arrived).filter(|pod| pod.at <= next) {
                self.tally.arrive(&pod.name, next);
                self.queue.insert((Reverse(pod.priority), self.arrived));
                self.arrived += 1;
            }
            while self.ends.first().is_some_and(|(at, _)| *at <= next) {
                if let Some((_, pod)) = self.ends.pop_first() {
                    self.end(pod);
                }
            }
            for entry in self.queue.clone() {
                if self.bind(entry.1) {
                    self.queue.remove(&entry);
                }
            }
            for pod in self.stuck.clone() {
                self.start(pod, next);
            }
            if next == until {
                return;
            }
        }
    }

    fn pod(&self, index: usize) -> Option<&'a Arrival> {
        self.workload.pods.get(index)
    }

    /// Gives the pod its GPUs if one node has enough of them.
    fn bind(&mut self, index: usize) -> bool {
        let Some(pod) = self.pod(index) else {
            return false;
        };
        let offered =
            |gpu: &Gpu| gpu.total_mib >= pod.mib && gpu.pods.len() < self.sharing.replicas();
        let nodes = 0..self.workload.nodes.len();
        let choices = nodes.filter_map(|node| {
            let of_node = self.gpus.iter().enumerate();
            let mut gpus: Vec<(u64, usize)> = of_node
                .filter(|(_, gpu)| gpu.node == node && offered(gpu))
                .map(|(at, gpu)| match self.sharing {
                    Sharing::Whole => (gpu.total_mib, at),
                    Sharing::TimeSlicing => (gpu.pods.len() as u64, at),
                })
                .collect();
            gpus.sort_unstable();
            gpus.truncate(pod.gpus);
            (gpus.len() == pod.gpus).then_some(gpus)
        });
        let Some(chosen) = choices.min() else {
            return false;
        };
        for (_, at) in chosen {
            if let Some(gpu) = self.gpus.get_mut(at) {
                gpu.pods.push(index);
            }
        }
        self.stuck.insert(index);
        true
    }

    /// Starts the pod's program if each of its GPUs has memory for it.
    fn start(&mut self, index: usize, now: Duration) {
        let Some(pod) = self.pod(index) else {
            return;
        };
        let has = |gpu: &&mut Gpu| gpu.pods.contains(&index);
        let fits = |gpu: &mut Gpu| gpu.used_mib + pod.mib <= gpu.total_mib;
        if !self.gpus.iter_mut().filter(has).all(fits) {
            self.failed.insert(index);
            return;
        }
        for gpu in self.gpus.iter_mut().filter(has) {
            gpu.used_mib += pod.mib;
        }
        self.stuck.remove(&index);
        self.running.insert(index);
        self.ends.insert((now + pod.runs_for, index));
        self.tally.start(&pod.name, now);
    }

    fn end(&mut self, index: usize) {
        let mib = self.pod(index).map_or(0, |pod| pod.mib);
        for gpu in self.gpus.iter_mut().filter(|gpu| gpu.pods.contains(&index)) {
            gpu.pods.retain(|pod| *pod != index);
            gpu.used_mib -= mib;
        }
        self.running.remove(&index);
        self.tally.finished += 1;
    }

    /// The share of all GPU memory that running pods asked for, 0 to 1.
    pub(crate) fn allocated(&self) -> f64 {
        let total: u64 = self.gpus.iter().map(|gpu| gpu.total_mib).sum();
        let used: u64 = self.gpus.iter().map(|gpu| gpu.used_mib).sum();
        used as f64 / total.max(1) as f64
    }

    pub(crate) fn running(&self) -> usize {
        self.running.len()
    }

    /// Pods whose program found its GPU full at least once.
    pub(crate) fn failed(&self) -> usize {
        self.failed.len()
    }

    /// The GPUs and the pods that run on them.
    pub(crate) fn picture(&self) -> Picture {
        let mut picture = Picture {
            running: self.running.len(),
            ..Picture::default()
        };
        for gpu in &self.gpus {
            if picture.nodes.len() == gpu.node {
                let name = format!("node-{}", gpu.node);
                picture.nodes.push(NodePicture {
                    name,
                    cards: Vec::new(),
                });
            }
            let pods = gpu.pods.iter().filter(|pod| self.running.contains(pod));
            let pods = pods.filter_map(|pod| self.pod(*pod));
            let card = CardPicture {
                uuid: String::new(),
                model: gpu.model.clone(),
                total_mib: gpu.total_mib,
                pods: pods.map(|pod| (pod.name.clone(), pod.mib)).collect(),
            };
            if let Some(node) = picture.nodes.last_mut() {
                node.cards.push(card);
            }
        }
        picture
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::Mix;

    #[test]
    fn whole_gpus_run_at_most_one_pod_each() {
        let workload = Workload::new(Mix::Small, &[], 42, 6, 420);
        let mut whole = Cluster::new(Sharing::Whole, &workload);
        for hour in 1..=12 {
            whole.live(Duration::from_secs(hour * 3600));
            assert!(whole.running() <= workload.gpus);
            assert!(whole.picture().cards().all(|card| card.pods.len() <= 1));
        }
        let tally = &whole.tally;
        assert_eq!(tally.arrived, 420);
        assert_eq!(
            tally.arrived,
            tally.finished + whole.running() + tally.waiting()
        );
        assert_eq!(whole.failed(), 0);
    }

    #[test]
    fn time_slicing_starts_pods_that_find_no_memory() {
        let workload = Workload::new(Mix::Small, &[], 42, 6, 420);
        let mut sliced = Cluster::new(Sharing::TimeSlicing, &workload);
        sliced.live(SPAN);
        assert!(sliced.failed() > 0);
        assert_eq!(sliced.picture().over_committed(), 0);
        let tally = &sliced.tally;
        assert_eq!(
            tally.arrived,
            tally.finished + sliced.running() + tally.waiting()
        );
    }
}
