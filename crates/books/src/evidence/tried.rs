//! The failures of pods' earlier attempts, and the node where the next attempt begins.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::Shown;
use crate::books::Uid;
use crate::scores::Slot;

/// The failures of a pod's earlier attempts.
#[derive(Clone, Debug, Default)]
pub struct Tried {
    nodes: BTreeSet<Arc<str>>,
    conflicts: u32,
    /// Where the next call begins to look at nodes that are not remembered.
    next: Slot,
}

impl Tried {
    /// Did something after us refuse this node?
    pub fn has(&self, node: &str) -> bool {
        self.nodes.contains(node)
    }

    /// How often something after this extender refused a placement.
    pub fn failures(&self) -> usize {
        self.nodes.len() + self.conflicts as usize
    }
}

impl Shown {
    /// How kube-scheduler tried the pod last.
    pub fn tried(&self, uid: &str) -> Option<&Tried> {
        self.tried.get(uid)
    }

    /// A node was reserved for this pod, and no bind came.
    pub(super) fn note_refusal(&mut self, uid: &Uid, node: &Arc<str>) {
        let tried = self.tried.entry(uid.clone()).or_default();
        tried.nodes.insert(node.clone());
    }

    /// A bind of this pod came too late. Two, and filter decides alone.
    pub(super) fn note_conflict(&mut self, uid: &Uid) {
        self.tried.entry(uid.clone()).or_default().conflicts += 1;
    }

    /// All of these nodes that would do were tried: these may be tried again. Others kube-scheduler has not shown.
    pub fn try_again(&mut self, uid: &str, candidates: &[&str]) {
        if let Some(tried) = self.tried.get_mut(uid) {
            for name in candidates {
                tried.nodes.remove(*name);
            }
        }
    }

    /// The nodes that are to be looked at, in the order of their slots from where the last call for
    /// this pod stopped.
    pub fn in_turn<T>(&self, uid: &str, nodes: &mut [(Slot, T)]) {
        let next = self.tried.get(uid).map_or(0, |tried| tried.next);
        nodes.sort_unstable_by_key(|&(slot, _)| (slot < next, slot));
    }

    /// This call has looked at everything up to here, or at everything there is.
    pub fn stopped_at(&mut self, uid: &Uid, next: Option<Slot>) {
        match next {
            Some(next) => self.tried.entry(uid.clone()).or_default().next = next,
            None => {
                if let Some(tried) = self.tried.get_mut(uid) {
                    tried.next = 0;
                }
            }
        }
    }
}
