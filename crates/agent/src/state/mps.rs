//! GPUs that pods share through NVIDIA's MPS, and the reasons why such a GPU does not get pods. The compute mode can
//! close a GPU, too.
//!
//! MPS fails open: a program that does not find a control daemon runs without MPS, and nothing limits its compute or
//! memory.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::devices::Card;
use crate::pods::{NodePod, NodePods};
use crate::shares::CardUse;

use super::State;

impl State {
    /// Takes in the answer of MPS's control daemon: the reason why clients could not start now, if there is one.
    pub fn heard_of_mps(&mut self, fails: Option<String>) {
        if self.mps_fails != fails {
            match &fails {
                Some(fails) => tracing::warn!("{fails}"),
                None => tracing::info!("the control daemon of MPS answers"),
            }
        }
        self.mps_fails = fails;
    }

    /// True if the card is shared through MPS. MIG instances do not use MPS here.
    pub(super) fn has_mps(&self, card: &Card) -> bool {
        self.settings.mps && card.place.parent.is_none() && card.on_demand.is_none()
    }

    /// The pods with a share of the card's compute and a process there that bypasses MPS, now and at the look before. A
    /// process that has just started may not be known as a client yet.
    pub(super) fn past_mps(
        &self,
        card: &Card,
        used: &CardUse,
        pods: &NodePods,
    ) -> BTreeSet<Arc<str>> {
        let before = self.known.get(&card.uuid).filter(|_| self.has_mps(card));
        let Some(before) = before.map(|known| &known.seen.used.beside_mps) else {
            return BTreeSet::new();
        };
        let has_share = |uid: &&Arc<str>| {
            let assignment = pods.get(uid).and_then(|pod| pod.facts.assignment.as_ref());
            assignment.is_some_and(|it| it.as_ref().is_ok_and(|it| it.compute > 0))
        };
        let lasting = used.beside_mps.intersection(before);
        lasting.filter(has_share).cloned().collect()
    }

    /// The reason why the card does not get pods. It should have MPS but lacks it, or its compute mode does not admit
    /// another process. Behind MPS, all pods are one process.
    pub(super) fn closed(
        &self,
        card: &Card,
        used: &CardUse,
        past: &BTreeSet<Arc<str>>,
        pods: &NodePods,
    ) -> Option<String> {
        let name = |pod: &NodePod| format!("pod {}/{}", pod.facts.namespace, pod.facts.name);
        if card.most_processes == Some(0) {
            return Some("compute mode PROHIBITED: set it to DEFAULT".to_owned());
        }
        if self.has_mps(card) {
            let by = || Some(name(pods.get(past.first()?)?) + " uses it without MPS");
            return self.mps_fails.clone().or_else(by);
        }
        card.most_processes?;
        let holder = pods.iter().find(|pod| pod.assigned(&card.uuid).0 > 0);
        let foreign = used.other_pods.saturating_add(used.host) > 0;
        let by = holder.map(name);
        let by = by.or_else(|| foreign.then(|| "a process".to_owned()))?;
        Some(format!("compute mode EXCLUSIVE_PROCESS, and {by} has it"))
    }
}
