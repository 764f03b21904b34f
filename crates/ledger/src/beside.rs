//! A node as it is for a pod beside those for whom room is kept there.

use std::cmp::Reverse;

use gpustow_api::PodFacts;
use gpustow_pack::{Bytes, Card, Mib, NodeGpus, Request};

use crate::Reason;
use crate::books::{Node, Uid};
use crate::budget::Budget;
use crate::maps::HashSet;
use crate::queue::{Cause, Earmark, Holder};
use crate::sight::Sight;

/// A pod for which room is earmarked, made or not.
#[derive(Clone, Copy)]
pub(crate) struct Other<'a> {
    pod: &'a PodFacts,
    /// None if only a nomination earmarks it.
    earmark: Option<&'a Earmark>,
}

impl<'a> Other<'a> {
    /// What is earmarked, if it is for this cause.
    fn earmark_if(&self, is_it: impl Fn(Cause) -> bool) -> Option<&'a Earmark> {
        self.earmark.filter(|it| is_it(it.cause()))
    }

    fn reclaim(&self) -> Option<&'a Earmark> {
        self.earmark_if(|cause| cause == Cause::Reclaim)
    }
}

impl Sight<'_> {
    /// Pods that are not assumed, for which room is earmarked on a node, and that the pod must make way for.
    pub(crate) fn others_kept<'s>(
        &'s self,
        name: &'s str,
        pod: &'s PodFacts,
    ) -> impl Iterator<Item = Other<'s>> {
        let counts = move |holder: &&Holder| match holder {
            Holder::Pod(uid) => *uid != pod.uid && self.books.assumed(uid).is_none(),
            Holder::Replacement(_) => !self.queue.is_replaced_by(holder, pod),
        };
        let others = self
            .queue
            .holders(name)
            .filter(counts)
            .filter_map(|holder| {
                let earmark = self.queue.earmark_of(holder);
                let pod = self.queue.pod_of(holder, self.books)?;
                Some(Other { pod, earmark })
            });
        // Room that a pod was woken for is not for those of lower priority. Among equals the first that asks has it.
        let woken = self.queue.woken_for(name, self.now);
        let woken = woken.filter_map(|uid| self.books.pod(uid));
        let woken = woken.filter(|it| it.priority > pod.priority);
        let woken = woken.map(|pod| Other { pod, earmark: None });
        others
            .chain(woken)
            // Of room that is offered to several ungated pods, the first that asks has its part.
            .filter(move |it| {
                let ungated = it.earmark_if(|cause| cause == Cause::Ungated);
                ungated.is_none() || !self.queue.is_offered(&pod.uid, name)
            })
            .filter(|it| it.pod.priority >= pod.priority && !it.pod.gated && !it.pod.deleting)
            // Room for one pod of a gang is for any of them: they are placed together.
            .filter(|it| !self.is_of_gang(pod, it.pod))
            .filter(|it| !self.may_take_reservation(pod, it.pod))
    }

    /// Why the room there is not for the pod.
    pub(crate) fn kept_because(&self, name: &str, pod: &PodFacts) -> Reason {
        let others = || self.others_kept(name, pod);
        let reserves = |cause| cause == Cause::Reserve;
        match () {
            () if others().all(|it| it.reclaim().is_some()) => Reason::Reclaimed,
            () if others().any(|it| it.earmark_if(reserves).is_some()) => Reason::Reserved,
            () => Reason::Nominated,
        }
    }

    /// The node's view without those that `gone` names, less what the pods for which room is kept there will
    /// need beyond what those have who are leaving, and beyond what is reclaimed for them: GPU memory, CPU and memory
    /// of the host. None if no room is kept; [`Reason::NotYet`] if that could not be told within the budget.
    pub(crate) fn beside_kept(
        &self,
        name: &str,
        node: &Node,
        pod: &PodFacts,
        gone: impl Fn(&str) -> bool,
        budget: &mut Budget,
    ) -> Result<Option<NodeGpus>, Reason> {
        budget.charge_view(node);
        let mut view = node.view_of(|uid| !gone(uid));
        let kept = self.take_kept(&mut view, name, node, pod, gone, budget)?;
        Ok(kept.then_some(view))
    }

    /// Takes what is kept for others out of a view of the node, as in `beside_kept` of the ledger. False if
    /// nothing is.
    pub(crate) fn take_kept(
        &self,
        view: &mut NodeGpus,
        name: &str,
        node: &Node,
        pod: &PodFacts,
        gone: impl Fn(&str) -> bool,
        budget: &mut Budget,
    ) -> Result<bool, Reason> {
        let others = self.others_kept(name, pod);
        let mut kept: Vec<_> = others.filter(|it| !gone(&it.pod.uid)).collect();
        if kept.is_empty() {
            return Ok(false);
        }
        kept.sort_unstable_by_key(|it| (Reverse(it.pod.priority), it.pod.created, &it.pod.uid));
        // A pod that is to end for one of them is leaving, if not yet to be seen; one that should be gone by now is not.
        let ending: HashSet<&Uid> = kept
            .iter()
            .filter_map(|it| it.earmark_if(Cause::evicts))
            .flat_map(Earmark::waits_for)
            .collect();
        let leaving = |uid: &str| {
            self.books
                .pod(uid)
                .is_some_and(|known| match known.deleting {
                    true => !self.is_late(known),
                    false => ending.contains(&known.uid),
                })
        };
        let called = |uuid: &str| {
            let mut reclaims = kept.iter().filter_map(Other::reclaim);
            reclaims.any(|it| it.has(uuid))
        };
        budget.charge_view(node);
        let mut later = node.view_without_loans(|uid| !leaving(uid) && !gone(uid), called);
        // kube-scheduler keeps CPU and memory of the host for pods that it nominated, and for no others.
        let freed_cpu = later.cpu_free_milli.saturating_sub(view.cpu_free_milli);
        let freed_ram = later.ram_free.minus(view.ram_free);
        let cards = later.cards.iter().zip(&view.cards);
        let freed_compute: Vec<u16> = cards
            .map(|(later, now)| later.compute.free.saturating_sub(now.compute.free))
            .collect();
        let (mut needs_cpu, mut needs_ram) = (0u64, Bytes::ZERO);
        let mut needs = vec![Mib::ZERO; view.cards.len()];
        let mut needs_compute = vec![0u16; view.cards.len()];
        let mut needs_slices = vec![0u8; view.cards.len()];
        let mut freed: Vec<Mib> = (0..view.cards.len())
            .map(|card| node.held(node.uuid(card), |uid| leaving(uid) && !gone(uid)))
            .collect();
        for other in &kept {
            let Some(request) = other.pod.asks.request() else {
                continue;
            };
            let charges = match other.earmark.filter(|it| !it.cards().is_empty()) {
                Some(earmark) => {
                    if earmark.cause() == Cause::Reclaim {
                        for (card, gpu) in node.gpus().iter().enumerate() {
                            let back = self.coming_back(node, gpu, earmark, &gone);
                            freed[card] = freed[card] + back;
                        }
                    }
                    node.charges(earmark.cards())
                }
                None => match self.fit_on(
                    name,
                    node,
                    &later,
                    other.pod,
                    |uid| leaving(uid) || gone(uid),
                    budget,
                ) {
                    Ok(choice) => choice.placement.charges,
                    Err(Reason::NotYet) => return Err(Reason::NotYet),
                    Err(_) => continue,
                },
            };
            needs_cpu = needs_cpu.saturating_add(request.cpu_milli);
            needs_ram = needs_ram + request.ram;
            for (card, mib) in charges {
                let taken = |card: &Card| card.slices.map_or(0, |slices| slices.taken);
                let before = taken(&later.cards[card]);
                later.cards[card].take(request, mib);
                needs_slices[card] |= taken(&later.cards[card]) & !before;
                needs[card] = needs[card] + mib;
                let compute = &mut needs_compute[card];
                *compute = compute.saturating_add(request.compute.into());
            }
        }
        let needs_cpu = needs_cpu.saturating_sub(freed_cpu);
        view.cpu_free_milli = view.cpu_free_milli.saturating_sub(needs_cpu);
        view.ram_free = view.ram_free.minus(needs_ram.minus(freed_ram));
        for (index, card) in view.cards.iter_mut().enumerate() {
            card.free = card.free.minus(needs[index].minus(freed[index]));
            let compute = needs_compute[index].saturating_sub(freed_compute[index]);
            card.compute.free = card.compute.free.saturating_sub(compute);
            if let Some(slices) = &mut card.slices {
                slices.taken |= needs_slices[index];
            }
        }
        Ok(true)
    }

    /// The node as it would be for `pod` if those that `gone` names were not there.
    pub(crate) fn view_without(
        &self,
        name: &str,
        node: &Node,
        pod: &PodFacts,
        gone: impl Fn(&str) -> bool,
        budget: &mut Budget,
    ) -> Result<NodeGpus, Reason> {
        let beside = self.beside_kept(name, node, pod, &gone, budget)?;
        Ok(beside.unwrap_or_else(|| {
            budget.charge_view(node);
            node.view_of(|uid| !gone(uid))
        }))
    }
}

/// Is CPU or memory of the host kept for others so that too little is left for the request? What the node is short of
/// anyway is kube-scheduler's to say.
pub(crate) fn is_host_kept(left: &NodeGpus, free: &NodeGpus, request: &Request) -> bool {
    left.cpu_free_milli < request.cpu_milli.min(free.cpu_free_milli)
        || left.ram_free < request.ram.min(free.ram_free)
}
