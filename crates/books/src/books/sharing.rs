//! The affinity rules of pods: the holders of a node's GPUs, and the nodes of each affinity group.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gpustow_pack::{Mib, Traits};

use super::{Books, Hold, Node};

/// On which nodes the pods of each affinity group hold something.
#[derive(Debug, Default)]
pub(super) struct Sharing {
    nodes: BTreeMap<Arc<str>, BTreeSet<Arc<str>>>,
    /// The affinity groups by node.
    groups: BTreeMap<Arc<str>, BTreeSet<Arc<str>>>,
}

impl Sharing {
    /// The pods of these groups hold something on the node.
    pub(super) fn put(&mut self, node: &Arc<str>, groups: BTreeSet<Arc<str>>) {
        let old = self.groups.remove(node).unwrap_or_default();
        for group in old.difference(&groups) {
            if let Some(nodes) = self.nodes.get_mut(group) {
                nodes.remove(node);
                if nodes.is_empty() {
                    self.nodes.remove(group);
                }
            }
        }
        for group in groups.difference(&old) {
            let nodes = self.nodes.entry(group.clone()).or_default();
            nodes.insert(node.clone());
        }
        if !groups.is_empty() {
            self.groups.insert(node.clone(), groups);
        }
    }
}

impl Books {
    /// Does the affinity group hold GPUs, but none of this node, if the pods that `gone` accepts were not there?
    pub fn is_group_elsewhere(&self, group: &str, node: &str, gone: impl Fn(&str) -> bool) -> bool {
        let is_its = |hold: &Hold| {
            let rules = hold.rules();
            rules.is_some_and(|rules| rules.affinity.as_deref() == Some(group))
        };
        let has = |name: &Arc<str>| {
            let shares = self.node(name).into_iter().flat_map(Node::shares);
            let mut shares = shares.filter(|(uid, ..)| !gone(uid));
            shares.any(|(_, hold, _)| is_its(hold))
        };
        let nodes = self.sharing.nodes.get(group);
        nodes.is_some_and(|nodes| !nodes.contains(node) && nodes.iter().any(has))
    }
}

impl Node {
    /// The affinity groups whose pods hold something here.
    pub(super) fn affinities(&self) -> BTreeSet<Arc<str>> {
        let ruled = self.shares().filter_map(|(_, hold, _)| hold.rules());
        ruled.filter_map(|rules| rules.affinity.clone()).collect()
    }

    /// The traits of the GPUs that rules read, in the view's order, if the pods that `gone` accepts were not there.
    pub fn traits(&self, gone: impl Fn(&str) -> bool) -> Vec<Traits<'_>> {
        let shares = self.shares().filter(|(uid, ..)| !gone(uid));
        let ruled = shares.filter_map(|(_, hold, _)| Some((hold, hold.rules()?)));
        let ruled: Vec<_> = ruled.collect();
        let gpus = self.gpus().iter().map(|gpu| {
            let here = ruled
                .iter()
                .filter(|(hold, _)| hold.on(&gpu.uuid) > Mib::ZERO);
            Traits {
                uuid: &gpu.uuid,
                model: &gpu.model,
                holders: here.map(|(_, rules)| *rules).collect(),
            }
        });
        gpus.collect()
    }
}
