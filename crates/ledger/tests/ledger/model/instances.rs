//! MIG instances in the model: which slices of a card pods have, by definition.

use gpustow_api::gpunode::Gpu;
use gpustow_api::instances::Instance;
use gpustow_api::{Assignment, PodFacts};
use gpustow_ledger::CardView;

use super::server::Server;
use super::world::{World, require};
use crate::build::makes_instances;

/// The slices that an assignment takes of a card on which an agent makes instances: without an instance, all of them.
fn taken(assignment: &Assignment, uuid: &str) -> u8 {
    let mut charges = assignment.charges.iter();
    match charges.any(|(card, _)| **card == *uuid) {
        true => (assignment.instance.as_ref()).map_or(u8::MAX, |it| it.mask()),
        false => 0,
    }
}

impl Server {
    /// The card as an agent shows it that makes instances for the pods of the node; others made one in a slice, from one on.
    pub(super) fn divided(&self, node: &str, card: Gpu, by_others: u8) -> Gpu {
        let here = self.pods.iter();
        let here = here.filter(|pod| pod.node.as_deref() == Some(node) && !pod.released);
        let made = here.filter_map(|pod| {
            let assigned = pod.assignment.as_ref()?.as_ref().ok()?;
            let own = assigned.instance.as_ref()?;
            (taken(assigned, &card.uuid) > 0).then(|| Instance {
                profile: own.profile.to_string(),
                start: own.start,
                slices: own.slices,
                pod: Some(pod.uid.to_string()),
            })
        });
        let mut instances: Vec<Instance> = made.collect();
        let other = by_others.checked_sub(1).filter(|start| *start < 4);
        let other = other.map(|start| Instance {
            profile: "1g".to_owned(),
            start,
            slices: 1,
            pod: None,
        });
        let made = instances.iter().fold(0, |mask, it| mask | it.mask());
        instances.extend(other.filter(|it| it.mask() & made == 0));
        let divided = makes_instances(card, &instances);
        Gpu {
            // Each pod has its own memory there, and uses no other.
            pods: Vec::new(),
            ..divided
        }
    }
}

impl World {
    /// The pod's instance is of the smallest profile that holds it, where one may start and no other lies.
    pub(super) fn check_instance(
        &self,
        pod: &PodFacts,
        node: &str,
        card: &Gpu,
        assignment: &Assignment,
    ) -> Result<(), String> {
        let isolated = pod.asks.request().is_some_and(|it| it.isolated);
        let bad = || format!("{} gets {assignment:?} of {card:?}", pod.uid);
        require(isolated == card.mig.is_some(), bad)?;
        require(isolated == assignment.instance.is_some(), bad)?;
        let Some((own, mig)) = assignment.instance.as_ref().zip(card.mig.as_ref()) else {
            return Ok(());
        };
        let asked = pod.asks.claims().iter().map(|claim| claim.mib.0).sum();
        let holds = mig.profiles.iter();
        let holds = holds.filter(|it| u64::from(it.memory_mib) >= asked);
        let smallest = holds.min_by_key(|it| it.slices);
        let is_it = smallest.is_some_and(|it| {
            *it.name == *own.profile && it.slices == own.slices && it.starts.contains(&own.start)
        });
        require(is_it, bad)?;
        let (uuid, uid) = (&card.uuid, &pod.uid);
        let others = self.server.assignments(node, uid);
        let others = others.fold(0, |mask, it| mask | taken(it, uuid));
        let there = mig.instances.iter();
        let there = there.filter(|it| it.pod.as_deref() != Some(&**uid));
        let there = there.fold(0, |mask, it| mask | it.mask());
        require(own.mask() & (others | there) == 0, || {
            format!("others have {others:#b} and {there:#b}: {}", bad())
        })
    }

    /// The free memory of a card where an agent makes instances: the slices that no pod and no instance has.
    pub(super) fn free_slices(&self, node: &str, gpu: &Gpu, card: &CardView) -> Option<u64> {
        let mig = gpu.mig.as_ref()?;
        let bound = |uid: &str| {
            let index = self.server.find(uid)?;
            self.server.pods[index].assignment.as_ref()?.as_ref().ok()
        };
        let holders = card.pods.iter().filter(|share| share.charged.0 > 0);
        let mut used = holders.fold(0, |mask, share| {
            mask | bound(&share.uid).map_or(u8::MAX, |it| taken(it, &gpu.uuid))
        });
        let holds = |uid: &str| {
            let here = |pod: &PodFacts| pod.node.as_deref() == Some(node) && !pod.released;
            let index = self.server.find(uid);
            index.is_some_and(|index| here(&self.server.pods[index]))
        };
        for it in &mig.instances {
            if it.pod.as_deref().is_none_or(|uid| !holds(uid)) {
                used |= it.mask();
            }
        }
        Some(u64::from((!used & 0b1111).count_ones()) * (gpu.total_mib / 4))
    }
}
