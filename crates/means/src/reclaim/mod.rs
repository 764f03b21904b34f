//! Reclaim: a pod borrows the memory that it uses of a card beyond its request. This memory is reclaimed where it keeps
//! off a pod whose request fits by the books.
//!
//! The ledger earmarks the room, names the pods that must give memory back, and wakes the pod once NVML shows the room.
//! It does not act on pods. It never names a pod within its request, and names no pod while the node's report is stale.
//! The memory of one card is reclaimed for only one pod at a time. Memory that does not come before the deadline is
//! given up, and another card is tried.

mod borrowers;
mod limits;
mod pressure;

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_api::gpunode::Gpu;
use gpustow_books::{Budget, Cause, Config, Earmark, Ended, Evidence, Host, Node, Reason, Uid};
use gpustow_pack::{Cost, Mib, Refusal};

use crate::demand::{Borrower, Demand, Demands, Purpose, Reserved};
use crate::means::{Makes, Means, best};
use crate::parts::Parts;
use crate::round::{Candidate, Offer, Round};
use crate::sight::Sight;
use borrowers::beyond_capacity;
pub(crate) use limits::Limits;
pub use limits::OverLimit;

/// The missing memory of cards, by card index in the view.
type Missing = Vec<(usize, Mib)>;

/// A plan where nothing may be done yet comes last. Then the one with fewer victims is taken, then the one that asks for
/// less.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    /// kube-scheduler is not known to have offered the node.
    is_unknown: bool,
    /// No earlier extender began there.
    is_new: bool,
    victims: usize,
    missing: Mib,
    cost: Cost,
}

type Plan = crate::means::Plan<Rank>;

/// Reclaim between two looks.
#[derive(Debug, Default)]
pub struct Reclaim {
    round: Round<Rank>,
    limits: Limits,
}

impl Means for Reclaim {
    fn cause(&self) -> Cause {
        Cause::Reclaim
    }

    fn after(&self, config: &Config) -> Option<Duration> {
        config.reclaim.then_some(config.reclaim_after)
    }

    /// Ends reclaims that are over, asks other pods where the first did not suffice, and begins again for waiting pods.
    fn look(&mut self, parts: &mut Parts, _: usize) {
        if !parts.config.reclaim {
            return;
        }
        parts.note_refusals();
        for uid in parts.earmarks.all_of(Cause::Reclaim) {
            parts.look_after(&uid, Cause::Reclaim, |known, pod, it| {
                known.still_reclaims(pod, it)
            });
        }
        if parts.books.lending().is_empty() {
            self.round = Round::default();
            return;
        }
        if self.round.is_over() {
            let sight = parts.sight();
            self.round = Round::of(sight.without_room(|uid| sight.may_reclaim(uid).is_some()));
        }
        let nodes = |sight: &Sight<'_>, uid: &Uid| {
            sight.may_reclaim(uid)?;
            Some(sight.node_names())
        };
        let look = |sight: &Sight<'_>, it: Candidate<'_, _>, budget: &mut Budget| {
            sight.offer_of_borrowers(it.uid, it.node, budget)
        };
        let is_open = |plan: &Plan| plan.rank.is_unknown;
        let budget = Budget::of_round();
        (self.round).run(parts, Cause::Reclaim, budget, nodes, look, is_open);
    }

    fn plan(&self, known: &Sight<'_>, pod: &Arc<PodFacts>, budget: &mut Budget) -> Option<Makes> {
        let nodes = known.open_to(pod);
        best(nodes.filter_map(|name| known.plan_reclaim(pod, name, budget)))
    }

    fn reserved(&self, sight: &Sight<'_>) -> Vec<Reserved> {
        let all = sight.earmarks.all_of(Cause::Reclaim).into_iter();
        all.filter_map(|uid| sight.reclamation(&uid)).collect()
    }

    fn demand(&self, sight: &Sight<'_>, all: &mut Demands) {
        let short = std::mem::take(&mut all.short);
        let mut add = |cause, node: &Arc<str>, purpose: Purpose, victims: Vec<Borrower>| {
            for borrower in victims {
                all.reclaim(Demand {
                    victim: borrower.pod.clone(),
                    cause,
                    action: sight.action_on(&borrower.pod).into(),
                    node: node.clone(),
                    purpose: purpose.clone(),
                    gang: None,
                    cards: vec![borrower],
                });
            }
        };
        let reserved = self.reserved(sight);
        for back in &reserved {
            let purpose = Purpose::Pod(back.pod.clone());
            add(Cause::Reclaim, &back.node, purpose, back.borrowers.clone());
        }
        for short in short {
            add(Cause::Pressure, &short.node, short.harm, short.victims);
        }
        for OverLimit { node, victim, .. } in self.limits.over(sight) {
            add(Cause::OverLimit, &node, Purpose::Limit, vec![victim]);
        }
        all.reserved.extend(reserved);
    }

    fn still(&self, sight: &Sight<'_>, demand: &Demand) -> bool {
        let victim = &demand.victim;
        let gives = |borrowers: &[Borrower]| borrowers.iter().any(|it| it.pod.uid == victim.uid);
        match demand.cause {
            Cause::Pressure => sight
                .shortages_on(&demand.node)
                .into_iter()
                .any(|it| gives(&it.victims) && it.harm.uid() == demand.purpose.uid()),
            Cause::OverLimit => self.limits.is_over(victim, &demand.node, sight),
            _ => {
                let back = demand.purpose.uid().and_then(|uid| sight.reclamation(uid));
                back.is_some_and(|it| gives(&it.borrowers))
            }
        }
    }
}

impl Reclaim {
    /// Which pods are over their limits.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The pods over their limits, to be changed.
    pub fn limits_mut(&mut self) -> &mut Limits {
        &mut self.limits
    }

    /// Reclaims memory for a pod that was refused on all of these nodes, unless the pod has another way.
    pub fn at_once(parts: &mut Parts, pod: &PodFacts, candidates: &[&str]) {
        let sight = parts.sight();
        if !sight.may_reclaim_for(pod) {
            return;
        }
        // Where the candidates are too many for a call, a look compares them all.
        let mut budget = Budget::of_call();
        let mut best: Option<Plan> = None;
        for name in candidates {
            if budget.is_spent() {
                return;
            }
            let plan = match sight.awaits_others(pod, name) {
                true => None,
                false => sight.plan_reclaim(pod, name, &mut budget),
            };
            best = best.into_iter().chain(plan).min();
        }
        if let Some(plan) = best {
            parts.pursue(&pod.uid, Cause::Reclaim, plan);
        }
    }
}

impl Sight<'_> {
    /// Do the asked pods still suffice, or which others are to give memory back?
    fn still_reclaims(&self, pod: &PodFacts, earmark: &Earmark) -> Result<Option<Vec<Uid>>, Ended> {
        let (name, asked) = (earmark.node(), earmark.waits_for());
        if self.evidence(pod, name) == Evidence::Rejected {
            return Err(Ended::Late);
        }
        let goes_on = || {
            self.check(name).ok()?;
            let node = self.books.node(name)?;
            let mut budget = Budget::of(self.config);
            let missing = self.missing(pod, name, node, earmark.cards(), true, &mut budget)?;
            match self.choose_borrowers(node, &missing, asked, true) {
                Some(_) => Some(None),
                None => (self.choose_borrowers(node, &missing, asked, false)).map(Some),
            }
        };
        goes_on().ok_or(Ended::Late)
    }
}

impl Sight<'_> {
    fn may_reclaim(&self, uid: &str) -> Option<Arc<PodFacts>> {
        let pod = self.asleep(uid)?;
        self.may_reclaim_for(&pod).then_some(pod)
    }

    /// The offer of a node's borrowers to a waiting pod.
    fn offer_of_borrowers(&self, uid: &Uid, name: &Arc<str>, budget: &mut Budget) -> Offer<Rank> {
        let Some(pod) = self.without_room_on(name, self.may_reclaim(uid), budget) else {
            return Offer::Fits;
        };
        let mut plan = || {
            if self.books.refused_in_tree(name, &pod).is_some() {
                return None;
            }
            let continues = pod.reserved_on.as_ref() == Some(name);
            let offered = match self.evidence(&pod, name) {
                Evidence::Offered | Evidence::Short => true,
                Evidence::Unknown | Evidence::Outdated | Evidence::Awaited => continues,
                Evidence::Rejected => return None,
            };
            let mut plan = self.plan_reclaim(&pod, name, budget)?;
            (plan.rank.is_unknown, plan.rank.is_new) = (!offered, !continues);
            Some(plan)
        };
        Offer::of(plan())
    }
}

impl Sight<'_> {
    pub(crate) fn reclamation(&self, uid: &str) -> Option<Reserved> {
        let earmark = self.earmarks.find(uid, Cause::Reclaim)?;
        let pod = self.books.pod(uid)?;
        let borrowers = match self.outdated(pod, earmark.node()) {
            Some(_) => Vec::new(),
            None => self.victims(pod, earmark).unwrap_or_default(),
        };
        let victims = borrowers.iter().map(|it| it.pod.clone()).collect();
        Some(Reserved {
            borrowers,
            ..Reserved::of(pod, earmark, victims)
        })
    }

    /// The chosen pods that are still needed.
    fn victims(&self, pod: &PodFacts, earmark: &Earmark) -> Option<Vec<Borrower>> {
        let (name, waits_for) = (earmark.node(), earmark.waits_for());
        self.check(name).ok()?;
        let node = self.books.node(name)?;
        let mut budget = Budget::of(self.config);
        let missing = self.missing(pod, name, node, earmark.cards(), true, &mut budget)?;
        let needed = self.choose_borrowers(node, &missing, waits_for, true)?;
        let short = missing.iter().filter(|(_, mib)| *mib > Mib::ZERO);
        let short = short.filter_map(|(card, _)| node.gpus().get(*card));
        let lent = short.flat_map(|gpu| node.borrowers(gpu).map(move |it| (gpu, it)));
        let victims = lent.filter(|(_, (uid, ..))| needed.contains(uid));
        let victims = victims.filter_map(|(gpu, it)| self.borrower(gpu, it));
        Some(victims.collect())
    }

    /// A pod that is not being deleted, with the memory that it holds and uses of a GPU.
    fn borrower(&self, gpu: &Gpu, (uid, held, used): (&Uid, Mib, Mib)) -> Option<Borrower> {
        let pod = self.books.pod(uid).filter(|pod| !pod.deleting)?;
        Some(Borrower {
            pod: pod.clone(),
            uuid: gpu.uuid.as_str().into(),
            held,
            used,
        })
    }

    /// Why a node is refused for the pod, if memory may be reclaimed for it there.
    pub fn refused_because(&self, uid: &str, name: &str, reason: Reason) -> Reason {
        let is_here = || {
            let earmark = self.earmarks.find(uid, Cause::Reclaim);
            earmark.is_some_and(|it| **it.node() == *name)
        };
        match reason {
            Reason::Fit(Refusal::NoRoom) if is_here() => Reason::Reclaimed,
            other => other,
        }
    }

    /// May memory be reclaimed for the pod?
    fn may_reclaim_for(&self, pod: &PodFacts) -> bool {
        let Some(known) = self.books.pod(&pod.uid) else {
            return false;
        };
        // Otherwise every GPU with borrowers would be tried before preemption has its turn.
        let yields = self.config.preempt_fragmented
            && known.preempts
            && self.earmarks.yields_reclaim(&pod.uid, self.now);
        self.config.reclaim
            && pod.asks.request().is_some()
            && self.has_waited(pod, self.config.reclaim_after)
            && !self.earmarks.is_nominated(pod)
            && known.asks == pod.asks
            && !yields
            && self.not_now(Cause::Reclaim, known).is_none()
    }

    /// Does the pod fit on any node, so that it will be woken? True, too, if the budget is spent before the answer.
    pub fn may_fit_now(&self, pod: &PodFacts) -> bool {
        let mut budget = Budget::of(self.config);
        let mut nodes = self.books.nodes();
        nodes.any(|(name, _)| self.fits_now_on(name, pod, &mut budget))
    }

    /// The pod, if it needs a plan: a pod that fits is woken.
    pub(crate) fn without_room_on(
        &self,
        name: &str,
        pod: Option<Arc<PodFacts>>,
        budget: &mut Budget,
    ) -> Option<Arc<PodFacts>> {
        pod.filter(|pod| !self.fits_now_on(name, pod, budget))
    }

    /// Does the pod fit on this node, so that it will be woken? Not where kube-scheduler's own filters refuse it.
    pub(crate) fn fits_now_on(&self, name: &str, pod: &PodFacts, budget: &mut Budget) -> bool {
        if pod.asks.request().is_none() {
            return true;
        }
        let refuses = |reason| reason != Reason::NotYet;
        self.books.is_there(name)
            && self.may_fit(name, pod)
            && self.evidence(pod, name) != Evidence::Rejected
            && !self.trial().choose(pod, name, budget).is_err_and(refuses)
    }

    /// Who would have to give memory back on this node for the pod.
    pub(crate) fn plan_reclaim(
        &self,
        pod: &PodFacts,
        name: &str,
        budget: &mut Budget,
    ) -> Option<Plan> {
        let request = pod.asks.request()?;
        let (name, node) = self.books.named_node(name)?;
        self.check(name).ok()?;
        node.lends().then_some(())?;
        let called: Vec<&Earmark> = self.earmarks.reclaims_on(name).collect();
        let is_free = |uuid: &str| {
            !called.iter().any(|it| it.has(uuid))
                && !self.earmarks.avoids_card(&pod.uid, Cause::Reclaim, uuid)
        };
        let repaid = node.gpus().iter().map(|gpu| Arc::from(gpu.uuid.as_str()));
        let mut trial = self.trial().repaid(repaid.filter(|uuid| is_free(uuid)));
        // The packing order of GPUs does not consider the pods that have to give memory back there.
        let one_gpu = matches!(request.claims.as_slice(), [claim] if claim.gpus == 1);
        let parts: Vec<Option<[usize; 1]>> = match one_gpu {
            true => (0..node.gpus().len()).map(|card| Some([card])).collect(),
            false => vec![None],
        };
        let plans = parts.iter().filter_map(|part| {
            let only = part.as_ref().map(|card| &card[..]);
            let choice = trial.fit(pod, name, only, Host::Beside, budget).ok()?;
            let cards = node.by_uuid(&choice.placement.charges);
            let missing = self.missing(pod, name, node, &cards, false, budget)?;
            let victims = self.choose_borrowers(node, &missing, &[], false)?;
            let rank = Rank {
                is_unknown: false,
                is_new: true,
                victims: victims.len(),
                missing: missing.iter().map(|(_, mib)| *mib).sum(),
                cost: choice.cost,
            };
            (!victims.is_empty()).then(|| Plan {
                rank,
                node: name.clone(),
                cards,
                waits_for: victims,
                overtakes: Vec::new(),
            })
        });
        // Of GPUs that are alike the first is taken.
        plans.reduce(|best, plan| if plan.rank < best.rank { plan } else { best })
    }

    /// The memory that is missing on these cards for the pod's share of each. None if one of the cards does not take
    /// the pod any more. With `ended`, memory that the last report shows of pods that are gone counts as free.
    fn missing(
        &self,
        pod: &PodFacts,
        name: &str,
        node: &Node,
        cards: &[(Arc<str>, Mib)],
        ended: bool,
        budget: &mut Budget,
    ) -> Option<Missing> {
        let request = pod.asks.request()?;
        let charges = node.charges(cards);
        let mut trial = self.trial();
        let left = trial.left(pod, name, budget).ok();
        let view = left.filter(|_| charges.len() == cards.len())?.view();
        let left = |card: usize| {
            let gpu = node.gpus().get(card).filter(|_| ended);
            gpu.map_or(Mib::ZERO, |gpu| node.ended_in(gpu))
        };
        let missing = |(card, mib): (usize, Mib)| {
            let room = request.room(view.cards.get(card)?)?;
            // Borrowers may use the headroom, too: that comes back before anything is free.
            let wanted = mib + beyond_capacity(node, card);
            Some((card, wanted.minus(room).minus(left(card))))
        };
        charges.into_iter().map(missing).collect()
    }
}
