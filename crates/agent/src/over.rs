//! Pods that use more of a card than they may.

use std::sync::Arc;

use gpustow_api::limit::Enforce;
use gpustow_pack::Mib;

use crate::pods::NodePods;
use crate::state::State;

/// A pod that uses more of a card than it may.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverUse {
    /// The pod's UID.
    pub uid: Arc<str>,
    /// Namespace and name.
    pub pod: String,
    /// The card.
    pub uuid: String,
    /// The memory that it uses.
    pub used: Mib,
    /// The memory that it requested.
    pub assigned: Mib,
    /// The memory that it may use.
    pub allowed: Mib,
}

impl State {
    /// Pods that use more of a card than they may, if gpustow must watch that.
    pub fn over_users<'a>(&'a self, pods: &'a NodePods) -> impl Iterator<Item = OverUse> + 'a {
        self.cards().flat_map(move |seen| {
            seen.gpu.pods.iter().filter_map(move |share| {
                let pod = pods.get(&share.uid)?;
                let (used, assigned) = (Mib(share.used_mib), pod.assigned(&seen.gpu.uuid));
                let allowed = pod.allowed(&seen.gpu.uuid);
                let watched = pod.enforce != Enforce::None;
                // Zero: the card is not the pod's own, and another notice reports that.
                (watched && assigned > Mib::ZERO && used > allowed).then(|| OverUse {
                    uid: pod.facts.uid.clone(),
                    pod: format!("{}/{}", pod.facts.namespace, pod.facts.name),
                    uuid: seen.gpu.uuid.clone(),
                    used,
                    assigned,
                    allowed,
                })
            })
        })
    }
}
