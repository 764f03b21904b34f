//! GPUs that several nodes report: one machine under two names, or nodes inside one machine. Each is one GPU, whose
//! memory is promised once: a hold through one node counts on all of them. This module does not know which report is
//! right.

use std::collections::BTreeSet;
use std::sync::Arc;

use gpustow_api::gpunode::Gpu;
use gpustow_pack::{Mib, Starts};

use super::{Books, Change};
use crate::maps::HashMap;

/// The nodes that report each GPU.
#[derive(Debug, Default)]
pub(super) struct Reporters {
    of: HashMap<Box<str>, Vec<Arc<str>>>,
    /// GPUs that more than one node reports: most clusters have none.
    shared: usize,
}

impl Reporters {
    fn add(&mut self, uuid: &str, name: &Arc<str>) {
        let nodes = self.of.entry(uuid.into()).or_default();
        if !nodes.contains(name) {
            nodes.push(name.clone());
            self.shared += usize::from(nodes.len() == 2);
        }
    }

    fn remove(&mut self, uuid: &str, name: &str) {
        let Some(nodes) = self.of.get_mut(uuid) else {
            return;
        };
        let before = nodes.len();
        nodes.retain(|it| **it != *name);
        self.shared -= usize::from(before == 2 && nodes.len() == 1);
        if nodes.is_empty() {
            self.of.swap_remove(uuid);
        }
    }

    /// The nodes other than `name` that report one of these GPUs, in order.
    fn others(&self, name: &str, gpus: &[Gpu]) -> BTreeSet<Arc<str>> {
        if self.shared == 0 {
            return BTreeSet::new();
        }
        let nodes = gpus.iter().filter_map(|gpu| self.of.get(&*gpu.uuid));
        let nodes = nodes.flatten().filter(|it| ***it != *name);
        nodes.cloned().collect()
    }
}

/// The shares of a node's cards that pods hold through other nodes.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Elsewhere(Vec<(Box<str>, Share)>);

/// The share of one card that pods hold.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Share {
    pub(super) held: Mib,
    /// One of them holds all of it.
    pub(super) whole: bool,
    /// Hundredths of its compute.
    pub(super) compute: u16,
    /// Its memory slices, where MIG instances are made.
    pub(super) slices: u8,
    /// How they start on it.
    pub(super) starts: Starts,
}

impl Elsewhere {
    pub(super) fn on(&self, uuid: &str) -> Share {
        let share = self.0.iter().find(|(it, _)| **it == *uuid);
        share.map_or_else(Share::default, |(_, share)| *share)
    }
}

impl Books {
    /// The node reports these GPUs from now on. Gives back the other nodes for which that changes
    /// something.
    pub(super) fn reports(&mut self, name: &Arc<str>, gpus: &[Gpu]) -> BTreeSet<Arc<str>> {
        let known = self.nodes.get(name).map_or(&[][..], |node| node.gpus());
        if known
            .iter()
            .map(|gpu| &gpu.uuid)
            .eq(gpus.iter().map(|gpu| &gpu.uuid))
        {
            return BTreeSet::new();
        }
        let mut others = self.reporters.others(name, known);
        for gpu in known {
            self.reporters.remove(&gpu.uuid, name);
        }
        for gpu in gpus {
            self.reporters.add(&gpu.uuid, name);
        }
        others.extend(self.reporters.others(name, gpus));
        others
    }

    /// The holds of pods through the node have changed: recomputes the nodes that share a GPU with it.
    pub(super) fn touch_others(&mut self, name: &str, change: &mut Change) {
        let gpus = self.nodes.get(name).map_or(&[][..], |node| node.gpus());
        let others = self.reporters.others(name, gpus);
        others.iter().for_each(|name| self.share(name, change));
    }

    /// The node shares other cards than before, with nodes of which these are all, before and after.
    pub(super) fn share_again(
        &mut self,
        name: &Arc<str>,
        others: &BTreeSet<Arc<str>>,
        change: &mut Change,
    ) {
        for name in others.iter().chain([name]) {
            self.share(name, change);
        }
    }

    /// Recomputes a node if the holds on its cards through other nodes have changed.
    fn share(&mut self, name: &Arc<str>, change: &mut Change) {
        let elsewhere = self.elsewhere(name);
        let Some(node) = self.nodes.get_mut(name) else {
            return;
        };
        if node.share_with(elsewhere) {
            self.refresh(name, change);
        }
    }

    fn elsewhere(&self, name: &str) -> Elsewhere {
        let gpus = self.nodes.get(name).map_or(&[][..], |node| node.gpus());
        let held = gpus.iter().filter_map(|gpu| {
            let nodes = self.reporters.of.get(&*gpu.uuid)?;
            let others = nodes.iter().filter(|it| ***it != *name);
            let shares =
                others.filter_map(|other| Some(self.nodes.get(other)?.share_of(&gpu.uuid)));
            let sum = shares.fold(Share::default(), |sum, share| Share {
                held: sum.held + share.held,
                whole: sum.whole || share.whole,
                compute: sum.compute.saturating_add(share.compute),
                slices: sum.slices | share.slices,
                starts: sum.starts.max(share.starts),
            });
            (sum.held > Mib::ZERO).then(|| (gpu.uuid.as_str().into(), sum))
        });
        Elsewhere(held.collect())
    }
}
