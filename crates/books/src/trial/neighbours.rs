//! The other pods that decide whether a pod may come, by their rules or its own.

use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_pack::Traits;

use super::{Spot, Trial};

impl Trial<'_> {
    /// Does anti-affinity keep the pod off the node, because of pods that stay there or that have come?
    pub(super) fn is_kept_off(&self, spot: usize, pod: &PodFacts) -> bool {
        let node = self.spots[spot].node;
        let stay = node.bound().keys();
        let stay = stay.filter(|uid| **uid != pod.uid && !self.is_gone(node, uid));
        let came = self.steps.iter().filter(|step| step.spot == spot);
        let others = stay.chain(came.map(|step| &step.uid));
        let mut others = others.filter_map(|uid| self.known.books.pod(uid));
        others.any(|it| !it.released && it.is_kept_off_by(pod))
    }

    /// Does the affinity group hold GPUs, but none of this node?
    pub(super) fn is_elsewhere(&self, group: &str, spot: usize) -> bool {
        let mut others = self.steps.iter().filter(|step| step.spot != spot);
        let came = others.any(|step| {
            let rules = step.request.rules.as_ref();
            rules.is_some_and(|rules| rules.affinity.as_deref() == Some(group))
        });
        let (books, gone) = (self.known.books, |uid: &str| self.has_left(uid));
        let is_elsewhere = |name: &Arc<str>| books.is_group_elsewhere(group, name, gone);
        came || self.name(spot).is_some_and(is_elsewhere)
    }

    /// The traits of the node's GPUs that rules read. A pod of an affinity group goes to the group's GPUs, even if
    /// these are cleared.
    pub(super) fn traits(&self, spot: usize, group: Option<&Arc<str>>) -> Vec<Traits<'_>> {
        let Spot {
            node,
            left,
            cleared,
            ..
        } = &self.spots[spot];
        let mut traits = node.traits(|uid| self.is_gone(node, uid));
        for card in cleared {
            if let Some(card) = traits.get_mut(*card) {
                let is_of =
                    |it: &&gpustow_pack::Rules| group.is_some() && it.affinity.as_ref() == group;
                card.holders.retain(is_of);
            }
        }
        for (rules, cards) in left.rules() {
            for card in cards {
                if let Some(card) = traits.get_mut(*card) {
                    card.holders.push(rules);
                }
            }
        }
        traits
    }
}
