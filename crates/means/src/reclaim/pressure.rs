//! Cards that are short of lent memory. A pod could not grow to its request there, or less memory is free than the
//! agent is to keep free. Meanwhile other pods use more than their requests.
//!
//! Like reclaim, this module names the pods that are to give memory back, and does not act on pods. It never names a
//! pod within its request, and never uses a stale report. It skips a card of which memory is already reclaimed. A pod
//! that was asked has a condition that shows it. It comes first, and stays named until the shortage ends or until its
//! time is over.

use std::collections::BTreeSet;
use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_api::gpunode::{Gpu, PodUse};
use gpustow_books::Node;
use gpustow_pack::Mib;

use crate::demand::{Purpose, Shortage};
use crate::sight::Sight;

impl Sight<'_> {
    /// The nodes with GPUs that may be short.
    pub fn may_be_short(&self) -> Vec<Arc<str>> {
        if !self.config.reclaim {
            return Vec::new();
        }
        let short = self.books.short().iter().cloned();
        let asked = self.books.sleepers(None).filter(|pod| pod.wants_all());
        let asked = asked.filter_map(|pod| pod.node.clone());
        let all: BTreeSet<Arc<str>> = short.chain(asked).collect();
        all.into_iter().collect()
    }

    /// The GPUs of one node that are short now.
    pub fn shortages_on(&self, name: &str) -> Vec<Shortage> {
        let node = self.books.named_node(name).filter(|_| self.config.reclaim);
        let fresh = node.filter(|(name, node)| node.lends() && self.check(name).is_ok());
        let each = fresh.into_iter().flat_map(|(name, node)| {
            let cards = node.gpus().iter().enumerate();
            cards.filter_map(move |(card, gpu)| self.shortage(name, node, card, gpu))
        });
        each.collect()
    }

    /// The free memory of a card, and the pods that may still grow there to their requests, each with the amount. A pod
    /// that sleeps does not grow.
    pub fn below_request<'s>(
        &'s self,
        name: &Arc<str>,
        node: &'s Node,
        gpu: &Gpu,
    ) -> (Mib, Vec<(Mib, &'s Arc<PodFacts>)>) {
        let here = |uid: &str| {
            let pod = self.books.pod(uid)?;
            (!pod.released && pod.node.as_ref() == Some(name)).then_some(pod)
        };
        // The memory of pods that are gone is about to become free.
        let there = gpu.pods.iter().filter(|used| here(&used.uid).is_some());
        let used: Mib = there.map(|used| Mib(used.used_mib)).sum();
        let free = gpu.capacity(Mib::ZERO).minus(used + Mib(gpu.unmanaged_mib));
        let left = |uid: &str, held: Mib| {
            let is_its = |used: &&PodUse| *used.uid == *uid;
            let its = gpu.pods.iter().filter(is_its);
            held.minus(its.map(|used| Mib(used.used_mib)).sum())
        };
        let below = node.bound().iter().filter_map(|(uid, hold)| {
            let pod = here(uid).filter(|pod| !pod.deleting && !pod.is_asleep())?;
            let left = left(uid, hold.on(&gpu.uuid));
            (left > Mib::ZERO).then_some((left, pod))
        });
        (free, below.collect())
    }

    fn shortage(&self, name: &Arc<str>, node: &Node, card: usize, gpu: &Gpu) -> Option<Shortage> {
        let borrowers = || node.borrowers(gpu);
        borrowers().next()?;
        let mut reclaims = self.earmarks.reclaims_on(name);
        // The figures of a GPU that does not take pods may be old.
        if !gpu.healthy || gpu.missing || reclaims.any(|it| it.has(&gpu.uuid)) {
            return None;
        }
        let (free, below) = self.below_request(name, node, gpu);
        // All that pods asked for which slept; of the others, one may grow at a time.
        let (asked, others): (Vec<_>, Vec<_>) = below.into_iter().partition(|it| it.1.wants_all());
        let one = others.iter().max_by_key(|(left, pod)| (*left, &pod.uid));
        let harmed = asked.iter().max_by_key(|(left, pod)| (*left, &pod.uid));
        let harmed = harmed.or(one).map(|(_, pod)| *pod);
        let left: Mib = asked.iter().chain(one).map(|(left, _)| *left).sum();
        let headroom = Mib(node.status()?.headroom_mib);
        let (wanted, harm) = match harmed.filter(|_| left > free) {
            Some(pod) => (left.max(headroom), Purpose::Pod(pod.clone())),
            None => (headroom, Purpose::Headroom(headroom)),
        };
        // A pod that should be gone by now gives nothing back.
        let able = borrowers().filter(|(uid, ..)| {
            let pod = self.books.pod(uid);
            pod.is_some_and(|pod| !self.is_late(pod))
        });
        let lent: Mib = able.map(|(_, held, used)| used.minus(held)).sum();
        let missing = wanted.minus(free).min(lent);
        if missing == Mib::ZERO {
            return None;
        }
        let chosen = self.choose_borrowers(node, &[(card, missing)], &[], false)?;
        let victims = borrowers().filter(|(uid, ..)| chosen.contains(uid));
        let victims = victims.filter_map(|it| self.borrower(gpu, it));
        Some(Shortage {
            node: name.clone(),
            uuid: gpu.uuid.as_str().into(),
            harm,
            missing,
            victims: victims.collect(),
        })
    }
}
