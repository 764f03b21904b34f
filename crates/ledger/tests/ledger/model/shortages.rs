//! The shortages of lent memory in the model, by definition.

use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_api::gpunode::Gpu;
use gpustow_ledger::Shortage;
use gpustow_pack::Mib;

use super::world::{World, require};

use crate::act::Act as _;

/// A pod on a card: the memory that it holds there and uses.
pub(super) struct There {
    pub(super) pod: Arc<PodFacts>,
    pub(super) held: u64,
    pub(super) used: u64,
}

impl There {
    fn excess(&self) -> u64 {
        match self.held {
            0 => 0,
            held => self.used.saturating_sub(held),
        }
    }

    /// The part of its request that it may still allocate.
    fn left(&self) -> u64 {
        self.held.saturating_sub(self.used)
    }

    /// It was asked to give back, or ends.
    fn was_asked(&self) -> bool {
        self.pod.deleting || self.pod.asked_back.is_some()
    }
}

impl World {
    /// The shortage of every card is as in the definition. No pod is asked that is within its request, and none by a
    /// stale report. No more pods are asked than necessary, and none if the pods that were asked already suffice.
    pub(super) fn check_shortages(&self) -> Result<(), String> {
        let all = self.ledger.shortages(self.now);
        let mut known = 0;
        for (name, report) in &self.known {
            for gpu in &report.gpus {
                let is_it = |short: &&Shortage| *short.node == **name && *short.uuid == *gpu.uuid;
                let short = all.iter().find(is_it);
                known += usize::from(short.is_some());
                let there = self.there(name, gpu);
                let missing = self.missing(name, gpu, &there);
                let found = short.map_or(0, |short| short.missing.0);
                require(found == missing, || {
                    format!("{missing} is missing of {}: {all:?}", gpu.uuid)
                })?;
                if let Some(short) = short {
                    let waited_for = |it: &There| !self.is_passed_over(&it.pod.uid);
                    check_victims(short, &there, waited_for)?;
                }
            }
        }
        require(all.len() == known, || format!("twice or nowhere: {all:?}"))
    }

    /// The pods that hold something of the card.
    pub(super) fn there(&self, name: &str, gpu: &Gpu) -> Vec<There> {
        let here = self.ledger.pods();
        let here = here.filter(|pod| pod.node.as_deref() == Some(name) && !pod.released);
        let there = here.map(|pod| {
            let held = match &pod.assignment {
                None => 0,
                Some(Ok(assignment)) => {
                    let charges = assignment.charges.iter();
                    let own = charges.filter(|(uuid, _)| **uuid == *gpu.uuid);
                    own.map(|(_, mib)| mib.0).sum()
                }
                Some(Err(_)) => {
                    let claims = pod.asks.claims().iter();
                    match claims.clone().any(|claim| claim.percentage > 0) {
                        true => u64::MAX,
                        false => claims.map(|claim| claim.mib.0).sum(),
                    }
                }
            };
            let own = gpu.pods.iter().filter(|used| *used.uid == *pod.uid);
            There {
                pod: pod.clone(),
                held,
                used: own.map(|used| used.used_mib).sum(),
            }
        });
        there.collect()
    }

    /// The memory that must be given back on the card.
    fn missing(&self, name: &str, gpu: &Gpu, there: &[There]) -> u64 {
        let backs = self.ledger.reclaims(self.now);
        let mut called = backs.iter().flat_map(|back| &back.cards);
        if !self.switches.reclaim {
            return 0;
        }
        let speaks = self.is_fresh(name) && self.is_readable(name) && gpu.healthy;
        if !speaks || called.any(|(uuid, _)| **uuid == *gpu.uuid) {
            return 0;
        }
        // One pod grows at a time, and all that woke.
        let grow = there
            .iter()
            .filter(|it| !it.pod.deleting && it.pod.sleep.is_none());
        let grow = grow.map(There::left).max().unwrap_or(0);
        let grow = grow.saturating_add(wanted(there, |pod| pod.wants_all()));
        let lent = there.iter().map(There::excess).sum();
        grow.saturating_sub(free(gpu, there)).min(lent)
    }
}

/// The memory of the card that no process uses.
pub(super) fn free(gpu: &Gpu, there: &[There]) -> u64 {
    let used: u64 = there.iter().map(|it| it.used).sum();
    let all = gpu.capacity(Mib::ZERO).0;
    all.saturating_sub(used + gpu.unmanaged_mib)
}

/// The memory that these pods may still allocate of their requests, ending pods apart.
pub(super) fn wanted(there: &[There], of: impl Fn(&PodFacts) -> bool) -> u64 {
    let some = there.iter().filter(|it| !it.pod.deleting && of(&it.pod));
    some.fold(0, |sum, it| sum.saturating_add(it.left()))
}

fn check_victims(
    short: &Shortage,
    there: &[There],
    waited_for: impl Fn(&There) -> bool,
) -> Result<(), String> {
    let is_victim = |it: &&There| {
        let mut victims = short.victims.iter();
        victims.any(|victim| victim.pod.uid == it.pod.uid)
    };
    let victims: Vec<&There> = there.iter().filter(is_victim).collect();
    require(victims.len() == short.victims.len(), || {
        format!("not there: {short:?}")
    })?;
    let all: u64 = victims.iter().map(|it| it.excess()).sum();
    let asked = there.iter().filter(|it| it.was_asked() && waited_for(it));
    let asked: u64 = asked.map(There::excess).sum();
    for it in &victims {
        require(it.excess() > 0 && !it.pod.deleting, || {
            format!("uses {} of {} and is a victim: {short:?}", it.used, it.held)
        })?;
        require(all - it.excess() < short.missing.0, || {
            format!("more than it takes: {short:?}")
        })?;
        require(it.was_asked() || asked < short.missing.0, || {
            format!("those who were asked suffice: {short:?}")
        })?;
    }
    let ending = there.iter().filter(|it| it.pod.deleting);
    let ending: u64 = ending.map(There::excess).sum();
    require(all + ending >= short.missing.0, || {
        format!("too few: {short:?}")
    })
}
