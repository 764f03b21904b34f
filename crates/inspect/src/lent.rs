//! What of the cards is lent, and what of that is called back: by the agents' reports, and by what the extender has
//! written on pods.

use std::collections::BTreeMap;

use gpustow_api::{kept, names};
use gpustow_ledger::{CardView, ShareState};
use gpustow_pack::Mib;

use crate::{Cluster, PodInfo, state};

/// The pods for which room is kept, by node.
pub struct Loans<'c>(BTreeMap<&'c str, Vec<(&'c PodInfo, &'c str)>>);

/// What of one card is lent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Loan {
    /// What pods use beyond what they hold there.
    pub lent: Mib,
    /// The pods for which room is kept there, and until when.
    pub kept_for: Vec<String>,
    /// The pods that were asked to give back.
    pub called_from: Vec<String>,
}

impl<'c> Loans<'c> {
    /// What is kept in the whole cluster.
    pub fn of(cluster: &'c Cluster) -> Self {
        let mut kept: BTreeMap<&str, Vec<_>> = BTreeMap::new();
        for pod in cluster.pods.values().filter(|pod| pod.waits()) {
            if let Some(message) = state::holds(&pod.object, names::KEPT_CONDITION)
                && let Some(node) = kept::node(message)
            {
                kept.entry(node).or_default().push((pod, message));
            }
        }
        Self(kept)
    }

    /// What of a card of this node is lent and called back.
    pub fn on(&self, cluster: &Cluster, node: &str, card: &CardView) -> Loan {
        let bound = card
            .pods
            .iter()
            .filter(|pod| pod.state == ShareState::Bound);
        let borrowers = bound.filter_map(|pod| {
            let lent = pod.used?.minus(pod.charged);
            (pod.charged > Mib::ZERO && lent > Mib::ZERO).then_some((pod, lent))
        });
        let borrowers: Vec<_> = borrowers.collect();
        let was_asked = |uid: &str| {
            let pod = cluster.pods.get(uid);
            pod.is_some_and(|pod| pod.facts.asked_back.is_some())
        };
        let asked = borrowers.iter().filter(|(pod, _)| was_asked(&pod.uid));
        let kept = self.0.get(node).into_iter().flatten();
        let here = kept.filter(|(_, message)| message.contains(&card.uuid));
        let kept_for = here.map(|(pod, message)| match kept::until(message) {
            Some(until) => format!("{} until {until}", pod.full_name()),
            None => pod.full_name(),
        });
        Loan {
            lent: borrowers.iter().map(|(_, lent)| *lent).sum(),
            kept_for: kept_for.collect(),
            called_from: asked
                .map(|(pod, _)| format!("{}/{}", pod.namespace, pod.name))
                .collect(),
        }
    }
}
