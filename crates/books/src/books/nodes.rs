//! Facts about nodes and their reports from watches and lists.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::gpunode::GpuNodeStatus;
use gpustow_api::{NodeFacts, intree};

use super::{Books, Change, Event};
use crate::maps::HashSet;

impl Books {
    /// A node as a watch shows it.
    pub fn apply_node(&mut self, facts: NodeFacts) -> Change {
        let mut change = Change::default();
        let name = facts.name.clone();
        let node = self.nodes.entry(name.clone()).or_default();
        if node.facts() != Some(&facts) {
            if !node.facts().is_some_and(|old| intree::alike(old, &facts)) {
                change.note(Event::Opened(name.clone()));
            }
            node.set_facts(Some(facts));
            self.touch(&name, &mut change);
        }
        change
    }

    /// A node is gone. Pods bound to it still count should it come back.
    pub fn delete_node(&mut self, name: &str) -> Change {
        let mut change = Change::default();
        if let Some(node) = self.nodes.get_mut(name) {
            node.set_facts(None);
            self.touch(name, &mut change);
        }
        change
    }

    /// A GpuNode as a watch shows it. A changed report is fresh from `now` on.
    pub fn apply_gpunode(&mut self, name: &str, status: GpuNodeStatus, now: Duration) -> Change {
        let mut change = Change::default();
        let known = self.nodes.get(name).and_then(|node| node.status());
        if known == Some(&status) {
            return change;
        }
        let models = self.models.take(status.gpus.iter().map(|gpu| &*gpu.model));
        let name: Arc<str> = name.into();
        let others = self.reports(&name, &status.gpus);
        let node = self.nodes.entry(name.clone()).or_default();
        let is_stale = |gate: super::Gate| gate.is_stale(now, self.stale_after);
        let was_stale = is_stale(node.gate()) == Some(true);
        let old = node.report(status, now, models);
        if was_stale && is_stale(node.gate()) == Some(false) {
            let (name, gained) = (name.clone(), true);
            change.note(Event::Node { name, gained });
        }
        self.touch(&name, &mut change);
        self.follow_starts(Some(&name), &mut change);
        self.share_again(&name, &others, &mut change);
        match old {
            Some(old) => self.models.release(&old),
            None => self.withhold_on(&name, &mut change),
        }
        change
    }

    /// A GpuNode is gone.
    pub fn delete_gpunode(&mut self, name: &str) -> Change {
        let mut change = Change::default();
        let name: Arc<str> = name.into();
        let others = self.reports(&name, &[]);
        let node = self.nodes.get_mut(&name);
        if let Some(models) = node.and_then(|node| node.forget_report()) {
            self.models.release(&models);
            self.share_again(&name, &others, &mut change);
            self.touch(&name, &mut change);
        }
        change
    }

    /// Pods may have these cards of the node, and no others where the fence is on.
    pub fn open(&mut self, name: &str, open: HashSet<Arc<str>>) -> Option<Change> {
        let node = self.nodes.get_mut(name);
        node.is_some_and(|node| node.open(open)).then(|| {
            let mut change = Change::default();
            self.touch(name, &mut change);
            change
        })
    }

    /// Pods may not have this card any more.
    pub fn close(&mut self, name: &str, uuid: &str) -> Change {
        let mut change = Change::default();
        let node = self.nodes.get_mut(name);
        if node.is_some_and(|node| node.close(uuid)) {
            self.touch(name, &mut change);
        }
        change
    }

    /// Nodes that a list with these names lacks.
    pub fn nodes_beside(&self, listed: &HashSet<&str>) -> Vec<Arc<str>> {
        let names = self.nodes.keys();
        names
            .filter(|name| !listed.contains(&***name))
            .cloned()
            .collect()
    }

    /// True if the node's report is stale now; none if there is no report.
    pub fn is_stale(&self, gate: super::Gate, now: Duration) -> Option<bool> {
        gate.is_stale(now, self.stale_after)
    }
}
