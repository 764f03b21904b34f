//! The borrowed memory of the cards, and its reclaim. The sources are the agents' reports and the extender's fields in
//! pods.

use std::collections::BTreeMap;

use gpustow_api::names;
use gpustow_api::reserved::Reservation;
use gpustow_ledger::{CardView, ShareState};
use gpustow_pack::Mib;
use kube::ResourceExt as _;

use crate::owner::Holder;
use crate::{Cluster, PodInfo, state};

/// The pods for which room is reserved, by node.
pub struct Borrowings<'c>(BTreeMap<String, Vec<(&'c PodInfo, Reservation)>>);

/// The borrowed memory, reservations and reclaims of one card.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Borrowed {
    /// The card's memory that pods use in addition to their own share.
    pub memory: Mib,
    /// The pods for which room is reserved there, and until when.
    pub reservations: Vec<Holder>,
    /// The pods that were asked to give back.
    pub reclaimed_from: Vec<String>,
}

impl<'c> Borrowings<'c> {
    /// The reservations in the whole cluster.
    pub fn of(cluster: &'c Cluster) -> Self {
        let mut by_node: BTreeMap<String, Vec<_>> = BTreeMap::new();
        for pod in cluster.pods.values().filter(|pod| pod.waits()) {
            let annotation = pod.object.annotations().get(names::RESERVATION);
            let reserved = annotation.and_then(|text| Reservation::decode(text));
            let holds = state::holds(&pod.object, names::RESERVED_CONDITION).is_some();
            if let Some(reserved) = reserved.filter(|_| holds) {
                let of_node = by_node.entry(reserved.node.clone()).or_default();
                of_node.push((pod, reserved));
            }
        }
        Self(by_node)
    }

    /// The borrowed memory, reservations and reclaims of a card of this node.
    pub fn on(&self, cluster: &Cluster, node: &str, card: &CardView) -> Borrowed {
        let bound = card
            .pods
            .iter()
            .filter(|pod| pod.state == ShareState::Bound);
        let borrowers = bound.filter_map(|pod| {
            let borrowed = pod.used?.minus(pod.charged);
            (pod.charged > Mib::ZERO && borrowed > Mib::ZERO).then_some((pod, borrowed))
        });
        let borrowers: Vec<_> = borrowers.collect();
        let was_asked = |uid: &str| {
            let pod = cluster.pods.get(uid);
            pod.is_some_and(|pod| pod.facts.asked_back.is_some())
        };
        let asked = borrowers.iter().filter(|(pod, _)| was_asked(&pod.uid));
        let all = self.0.get(node).into_iter().flatten();
        let here = all.filter(|(_, reserved)| reserved.gpus.contains_key(&*card.uuid));
        let reservations = here.map(|(pod, reserved)| Holder {
            pod: Some(pod.full_name()),
            until: Some(reserved.until.to_string()),
            ..Holder::default()
        });
        Borrowed {
            memory: borrowers.iter().map(|(_, borrowed)| *borrowed).sum(),
            reservations: reservations.collect(),
            reclaimed_from: asked
                .map(|(pod, _)| format!("{}/{}", pod.namespace, pod.name))
                .collect(),
        }
    }
}
