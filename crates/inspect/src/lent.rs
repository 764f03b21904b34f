//! What of the cards is lent, and what of that is reclaimed: by the agents' reports, and by what the extender has
//! written on pods.

use std::collections::BTreeMap;

use gpustow_api::names;
use gpustow_api::reserved::Reservation;
use gpustow_ledger::{CardView, ShareState};
use gpustow_pack::Mib;
use kube::ResourceExt as _;

use crate::{Cluster, PodInfo, state};

/// The pods for which room is kept, by node.
pub struct Loans<'c>(BTreeMap<String, Vec<(&'c PodInfo, Reservation)>>);

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
        let mut kept: BTreeMap<String, Vec<_>> = BTreeMap::new();
        for pod in cluster.pods.values().filter(|pod| pod.waits()) {
            let annotation = pod.object.annotations().get(names::RESERVATION);
            let reserved = annotation.and_then(|text| Reservation::decode(text));
            let holds = state::holds(&pod.object, names::RESERVED_CONDITION).is_some();
            if let Some(reserved) = reserved.filter(|_| holds) {
                let of_node = kept.entry(reserved.node.clone()).or_default();
                of_node.push((pod, reserved));
            }
        }
        Self(kept)
    }

    /// What of a card of this node is lent and reclaimed.
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
        let here = kept.filter(|(_, reserved)| reserved.gpus.contains_key(&*card.uuid));
        let kept_for =
            here.map(|(pod, reserved)| format!("{} until {}", pod.full_name(), reserved.until));
        Loan {
            lent: borrowers.iter().map(|(_, lent)| *lent).sum(),
            kept_for: kept_for.collect(),
            called_from: asked
                .map(|(pod, _)| format!("{}/{}", pod.namespace, pod.name))
                .collect(),
        }
    }
}
