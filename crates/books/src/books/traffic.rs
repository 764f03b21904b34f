//! When pods last came or left, for each node and each namespace. An older verdict of kube-scheduler on a node may be
//! invalid ([`gpustow_api::Regards`]).

use std::sync::Arc;

use gpustow_api::{PodFacts, Regards};

use super::Books;
use crate::maps::HashMap;

/// Namespaces that are remembered. Of all others the last pod came when the last of these was forgotten.
const NAMESPACES: usize = 4096;

/// On the ledger's clock.
#[derive(Clone, Copy, Debug, Default)]
struct Last {
    /// When a pod came or left.
    pod: u64,
    /// When one came or left that keeps others away.
    repelling: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Traffic {
    nodes: HashMap<Arc<str>, Last>,
    namespaces: HashMap<Arc<str>, Last>,
    others: Last,
}

impl Traffic {
    pub(super) fn note(&mut self, node: &Arc<str>, pod: Option<&PodFacts>, at: u64) {
        let repels = pod.map(|pod| pod.repels).unwrap_or_default();
        let mark = |last: &mut Last, repels| {
            last.pod = at;
            last.repelling = if repels { at } else { last.repelling };
        };
        mark(
            self.nodes.entry(node.clone()).or_default(),
            repels > Regards::NoPod,
        );
        let Some(namespace) = pod.map(|pod| &pod.namespace) else {
            return;
        };
        if self.namespaces.len() >= NAMESPACES && !self.namespaces.contains_key(namespace) {
            self.namespaces.clear();
            mark(&mut self.others, true);
        }
        let last = self.namespaces.entry(namespace.clone());
        mark(last.or_insert(self.others), repels == Regards::AllPods);
    }

    pub(super) fn forget(&mut self, node: &str) {
        self.nodes.swap_remove(node);
    }
}

impl Books {
    /// A pod has come to the node, bound or assumed, or left it.
    pub(super) fn note_traffic(&mut self, node: &Arc<str>, uid: &str) {
        let pod = self.pod(uid).cloned();
        self.traffic.note(node, pod.as_deref(), self.copies);
    }

    /// When pods last came or left that decide, for kube-scheduler, whether the node is for the pod; on the ledger's clock.
    pub(crate) fn last_traffic(&self, node: &str, pod: &PodFacts) -> u64 {
        let Traffic {
            nodes,
            namespaces,
            others,
        } = &self.traffic;
        let last = |of: Last, regarded: bool| if regarded { of.pod } else { of.repelling };
        let regards = pod.constraints.regards;
        let here = nodes.get(node).copied().unwrap_or_default();
        let of_namespace = namespaces.get(&pod.namespace).unwrap_or(others);
        last(here, regards > Regards::NoPod).max(last(*of_namespace, regards == Regards::AllPods))
    }
}
