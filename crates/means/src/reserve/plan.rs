//! Which GPUs of a node could be reserved for a pod, and which pods must finish before they are free.

use std::cmp::Reverse;
use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_books::{Budget, Cause, Charges, Hold, Holder, Host, Node, Reason, Uid};
use gpustow_pack::{Mib, Request};

use crate::round::Offer;
use crate::sight::Sight;

/// The fewer others lose theirs, the fewer have to finish and the less has to come free, the better.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    overtakes: usize,
    waits_for: usize,
    missing: Mib,
}

pub(super) type Plan = crate::means::Plan<Rank>;

impl Sight<'_> {
    /// The offer of a node to a pod without a reservation.
    pub(super) fn offer_of_node(
        &self,
        uid: &Uid,
        name: &Arc<str>,
        budget: &mut Budget,
    ) -> Offer<Rank> {
        let pod = match self.asleep(uid) {
            // That one pod of a gang fits helps none of it.
            Some(pod) if self.is_of_gang(&pod, &pod) => Some(pod),
            asleep => self.without_room_on(name, asleep, budget),
        };
        let plan = |pod: Arc<PodFacts>| Offer::of(self.place_on_node(&pod, name, budget));
        pod.map_or(Offer::Fits, plan)
    }
}

impl Sight<'_> {
    /// The best reservation for the pod on this node.
    pub(crate) fn place_on_node(
        &self,
        pod: &PodFacts,
        name: &str,
        budget: &mut Budget,
    ) -> Option<Plan> {
        let request = pod.asks.request()?;
        let (name, node) = self.books.named_node(name)?;
        self.check(name).ok()?;
        self.admits(name, node, pod, request).then_some(())?;
        self.place_on(name, node, pod, request, budget)
    }

    /// Does the node take such pods, and is it large enough?
    pub(super) fn admits(
        &self,
        name: &str,
        node: &Node,
        pod: &PodFacts,
        request: &Request,
    ) -> bool {
        let enough = node
            .facts()
            .is_none_or(|facts| facts.cpu_milli >= request.cpu_milli && facts.ram >= request.ram);
        enough && self.books.is_open(name, &pod.constraints)
    }

    /// The cards of this node that are to be kept for the pod: the cards with the fewest pods on them.
    fn place_on(
        &self,
        name: &Arc<str>,
        node: &Node,
        pod: &PodFacts,
        request: &Arc<Request>,
        budget: &mut Budget,
    ) -> Option<Plan> {
        let least = request.claims.iter().map(|claim| claim.gpus as usize);
        let least = least.max().unwrap_or_default().max(1);
        (node.gpus().len() >= least).then_some(())?;
        // The cards that others wait for there, and whether the pod may take them.
        let mut taken: Vec<(&str, Option<&Uid>)> = Vec::new();
        let mine = Holder::Pod(pod.uid.clone());
        let others = self.earmarks.holders(name).filter(|it| **it != mine);
        for holder in others.filter(|it| !self.is_reserved_for_gang(it, pod)) {
            // Which cards those get that kube-scheduler preempts for is not known.
            let earmark = self.earmarks.earmark_of(holder)?;
            let cards = Some(earmark.cards()).filter(|cards| !cards.is_empty())?;
            let loses = match holder {
                Holder::Pod(uid) if earmark.cause() == Cause::Reserve => {
                    let other = self.books.pod(uid);
                    let lower = other.is_some_and(|other| other.priority < pod.priority);
                    lower.then_some(uid)
                }
                _ => None,
            };
            taken.extend(cards.iter().map(|(card, _)| (&**card, loses)));
        }
        let mut trial = self.trial().keeping_nothing();
        for (other, charges) in self.reserved_for_gang(name, node, pod) {
            trial.take(other, name, &charges);
        }
        let cards = &trial.left(pod, name, budget).ok()?.view().cards;
        budget.charge_view(node);
        let mut order = Vec::new();
        for (card, seen) in cards.iter().enumerate().filter(|(_, card)| card.usable) {
            let uuid = node.uuid(card);
            let by_others = taken.iter().filter(|(other, _)| *other == uuid);
            if by_others.clone().all(|(_, loses)| loses.is_some())
                && !self.earmarks.avoids_card(&pod.uid, Cause::Reserve, uuid)
            {
                let shares = node.shares();
                let pods = shares.filter(|(_, hold, _)| hold.on(uuid) > Mib::ZERO);
                order.push((by_others.count(), pods.count(), Reverse(seen.free), card));
            }
        }
        order.sort_unstable();
        // Cards that others wait for come last.
        let free = order.iter().filter(|(by_others, ..)| *by_others == 0);
        let mut only: Vec<usize> = free.map(|(.., card)| *card).collect();
        for (count, &(by_others, .., card)) in order.iter().enumerate() {
            trial.clear(name, card, budget);
            only.extend((by_others > 0).then_some(card));
            if count + 1 < least {
                continue;
            }
            match trial.fit(pod, name, Some(&only), Host::Beside, budget) {
                Ok(choice) => {
                    let charges = choice.placement.charges;
                    return Some(self.plan_of_cards(name, node, pod, &charges, &taken));
                }
                Err(Reason::NotYet) => return None,
                Err(_) => {}
            }
        }
        None
    }

    fn plan_of_cards(
        &self,
        name: &Arc<str>,
        node: &Node,
        pod: &PodFacts,
        charges: Charges<'_>,
        taken: &[(&str, Option<&Uid>)],
    ) -> Plan {
        let cards = node.by_uuid(charges);
        let is_its = |uuid: &str| cards.iter().any(|(card, _)| **card == *uuid);
        let overtaken = taken.iter().filter(|(uuid, _)| is_its(uuid));
        let mut overtakes: Vec<Uid> = overtaken.filter_map(|(_, loses)| loses.cloned()).collect();
        overtakes.sort_unstable();
        overtakes.dedup();
        let Ends {
            pods: waits_for,
            missing,
            ..
        } = self.ends(name, node, pod, charges);
        let rank = Rank {
            overtakes: overtakes.len(),
            waits_for: waits_for.len(),
            missing,
        };
        Plan {
            rank,
            node: name.clone(),
            cards,
            waits_for,
            overtakes,
        }
    }

    /// Is this reserved for another pod of the pod's gang?
    fn is_reserved_for_gang(&self, holder: &Holder, pod: &PodFacts) -> bool {
        let Holder::Pod(uid) = holder else {
            return false;
        };
        let other = self.books.pod(uid).filter(|other| other.uid != pod.uid);
        other.is_some_and(|other| self.is_of_gang(pod, other))
            && self.earmarks.find(uid, Cause::Reserve).is_some()
    }

    /// Other pods of the pod's gang with reserved GPUs on the node, and these GPUs: the pods come together.
    fn reserved_for_gang(
        &self,
        name: &str,
        node: &Node,
        pod: &PodFacts,
    ) -> Vec<(&PodFacts, Vec<(usize, Mib)>)> {
        let holders = self.earmarks.holders(name);
        let holders = holders.filter(|it| self.is_reserved_for_gang(it, pod));
        let reserved = holders.filter_map(|it| {
            let other = self.earmarks.pod_of(it, self.books)?;
            let earmark = self.reservation(&other.uid)?;
            Some((other, node.charges(earmark.cards())))
        });
        reserved.collect()
    }

    /// The pods that have to end, at the least, before the pod gets these charges, and the memory that is not free.
    pub(super) fn ends(
        &self,
        name: &str,
        node: &Node,
        pod: &PodFacts,
        charges: Charges<'_>,
    ) -> Ends {
        let leaves = |uid: &Uid| self.books.pod(uid).is_some_and(|pod| self.leaves(pod));
        let gangs = self.reserved_for_gang(name, node, pod);
        let gangs = || gangs.iter().flat_map(|(_, charges)| charges);
        let mut ends = Ends::default();
        for &(card, mib) in charges {
            let Some(seen) = node.view().cards.get(card) else {
                continue;
            };
            let uuid = node.uuid(card);
            let holds = node
                .shares()
                .filter(|(_, hold, _)| hold.on(uuid) > Mib::ZERO);
            let mut holds: Vec<(&Uid, &Hold)> = holds.map(|(uid, hold, _)| (uid, hold)).collect();
            let repels = |hold: &Hold| pod.asks.request().is_some_and(|it| hold.repels(it));
            // The order: pods that may not share the GPU with the pod, leaving pods, pods that are already counted, the
            // largest.
            holds.sort_unstable_by_key(|(uid, hold)| {
                let known = (!leaves(uid), !ends.pods.contains(uid));
                (!repels(hold), known, Reverse(hold.on(uuid)), *uid)
            });
            let of_gang = gangs().filter(|(other, _)| *other == card);
            let of_gang: Mib = of_gang.map(|(_, mib)| *mib).sum();
            let mut missing = mib.minus(seen.free.minus(of_gang));
            ends.missing = ends.missing + missing;
            for (uid, hold) in holds {
                if missing == Mib::ZERO && !repels(hold) {
                    break;
                }
                ends.is_repelled |= repels(hold);
                missing = missing.minus(hold.on(uuid));
                if !leaves(uid) && !ends.pods.contains(uid) {
                    ends.pods.push(uid.clone());
                }
            }
        }
        ends
    }
}

/// The obstacles between a pod and the GPUs that are reserved for it.
#[derive(Debug, Default)]
pub(super) struct Ends {
    /// Pods that have to finish.
    pub(super) pods: Vec<Uid>,
    missing: Mib,
    /// A pod that may not share a GPU with it is there.
    is_repelled: bool,
}

impl Ends {
    /// Is all of it free?
    pub(super) fn are_over(&self) -> bool {
        self.missing == Mib::ZERO && !self.is_repelled
    }
}
