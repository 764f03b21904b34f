//! Reclaim: what a pod uses of a card beyond its request is borrowed, and is reclaimed where it keeps
//! a pod off whose request fits by the books.
//!
//! The ledger keeps the place ([`crate::queue`]), says who is to give memory back ([`Ledger::reclaims`]) and
//! wakes the pod once NVML shows the room. It acts on nobody. Nobody who is within its request is ever named,
//! nobody at all while the node's report is stale, and one card's memory is reclaimed for only one
//! pod at a time. What does not come until the deadline is given up, and another card is tried.

use std::mem::take;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_pack::{Cost, Mib, Refusal};

use crate::Ledger;
use crate::books::{Node, Uid};
use crate::borrowers::beyond_capacity;
use crate::budget::Budget;
use crate::earmarks::{Cause, Earmark, Ended};
use crate::evidence::Evidence;
use crate::known::Known;
use crate::means::Reserved;
use crate::reason::Reason;
use crate::round::{Offer, Round};
use crate::sight::Sight;
use crate::trial::Host;

/// A pod that uses more of a card than it asked for.
#[derive(Clone, Debug)]
pub struct Borrower {
    /// The pod.
    pub pod: Arc<PodFacts>,
    /// The card.
    pub uuid: Box<str>,
    /// What it holds there.
    pub held: Mib,
    /// What it uses there.
    pub used: Mib,
}

/// What is missing of cards, by their index in the view.
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

impl Ledger {
    /// Looks after what is reclaimed: ends what has come to its end, asks others where the first did not
    /// suffice, and begins anew for pods that wait. To be called every second or so.
    pub fn reclaim(&mut self, now: Duration) {
        if !self.parts.config.reclaim {
            return;
        }
        self.note_refusals(now);
        self.expire(now);
        for uid in self.parts.earmarks.all_of(Cause::Reclaim) {
            self.look_after(&uid, now);
        }
        self.call_more_back(now);
    }

    /// Goes on with the search for pods that wait: the first of each kind.
    fn call_more_back(&mut self, now: Duration) {
        if self.parts.books.lending().is_empty() {
            self.calling = Round::default();
            return;
        }
        let mut round = take(&mut self.calling);
        if round.is_over() {
            let may = |uid: &str| self.sight(now).may_reclaim(uid).is_some();
            round = Round::of(self.sight(now).without_room(may));
        }
        let mut budget = Budget::of_round();
        while let Some((uid, found)) = round.go_on(
            &mut budget,
            |uid| {
                self.sight(now).may_reclaim(uid)?;
                let nodes = self.parts.books.nodes();
                Some(nodes.map(|(name, _)| name.clone()).collect())
            },
            |uid, name, budget| self.sight(now).offer_of_borrowers(uid, name, budget),
        ) {
            match found {
                Offer::Plan(plan) if !plan.rank.is_unknown => {
                    self.pursue(&uid, Cause::Reclaim, plan, now)
                }
                Offer::Plan(plan) => {
                    let sight = self.sight(now);
                    let open = sight.books.pod(&uid);
                    if let Some(open) = open.map(|pod| sight.evidence(pod, &plan.node)) {
                        self.parts.ask_for_evidence(&uid, open, now);
                    }
                }
                // Every card was tried: a later look tries them all again.
                Offer::Nothing => {
                    if let Some(pod) = self.parts.books.pod(&uid) {
                        self.parts.earmarks.all_tried(pod, Cause::Reclaim, now);
                    }
                }
                Offer::Fits => {}
            }
        }
        self.calling = round;
        self.parts.count_spent(budget.spent());
    }

    /// What is reclaimed now, and from whom.
    #[must_use]
    pub fn reclaims(&self, now: Duration) -> Vec<Reserved> {
        let all = self.parts.earmarks.all_of(Cause::Reclaim);
        all.iter()
            .filter_map(|uid| self.sight(now).reclamation(uid))
            .collect()
    }

    /// Calls memory back for a pod that was refused on all of these nodes, unless the pod has another way.
    pub(crate) fn reclaim_for(&mut self, pod: &PodFacts, candidates: &[&str], now: Duration) {
        if !self.sight(now).may_reclaim_for(pod) {
            return;
        }
        // Where the candidates are too many for a call, a look compares them all.
        let mut budget = Budget::of_call();
        let mut best: Option<Plan> = None;
        for name in candidates {
            if budget.is_spent() {
                return;
            }
            let sight = self.sight(now);
            let plan = match sight.awaits_others(pod, name) {
                true => None,
                false => sight.plan_reclaim(pod, name, &mut budget),
            };
            best = best.into_iter().chain(plan).min();
        }
        if let Some(plan) = best {
            self.pursue(&pod.uid, Cause::Reclaim, plan, now);
        }
    }

    /// One reclaim goes on, with others if need be, or ends.
    fn look_after(&mut self, uid: &Uid, now: Duration) {
        let Some(earmark) = self.parts.earmarks.find(uid, Cause::Reclaim) else {
            return;
        };
        let (name, asked) = (earmark.node(), earmark.waits_for());
        let pod = self.parts.books.pod(uid).cloned();
        let wants = |pod: &Arc<PodFacts>| self.sight(now).wants(pod, earmark);
        let Some(pod) = pod.filter(wants) else {
            self.parts.end(uid, Ended::Gone);
            return;
        };
        // Borrowers give back for a pod that can come, or not at all.
        let rejected = self.sight(now).evidence(&pod, name) == Evidence::Rejected;
        let outdated = self.sight(now).outdated(&pod, name);
        let goes_on = || {
            self.sight(now).check(name).ok()?;
            let node = self.parts.books.node(name)?;
            let mut budget = Budget::of(&self.parts.config);
            let cards = earmark.cards();
            let missing = self
                .sight(now)
                .missing(&pod, name, node, cards, true, &mut budget)?;
            match self
                .sight(now)
                .choose_borrowers(node, &missing, asked, true)
            {
                Some(_) => Some(None),
                None => {
                    let others = self
                        .sight(now)
                        .choose_borrowers(node, &missing, asked, false);
                    others.map(Some)
                }
            }
        };
        match goes_on() {
            _ if rejected => self.parts.end(uid, Ended::Late),
            Some(_) if let Some(open) = outdated => self.parts.ask_for_evidence(uid, open, now),
            Some(None) => {}
            Some(Some(victims)) => self.parts.change(|it, _| it.reclaim_from(uid, victims)),
            None => self.parts.end(uid, Ended::Late),
        }
    }
}

impl Sight<'_> {
    fn may_reclaim(&self, uid: &str) -> Option<Arc<PodFacts>> {
        let pod = self.asleep(uid)?;
        self.may_reclaim_for(&pod).then_some(pod)
    }

    /// What the borrowers of a node could leave to a pod that waits.
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

impl Known<'_> {
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

    /// Those of the chosen who are needed still.
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
        let victims = victims.filter_map(|(gpu, (uid, held, used))| {
            let pod = self.books.pod(uid).filter(|pod| !pod.deleting)?.clone();
            let uuid = gpu.uuid.as_str().into();
            Some(Borrower {
                pod,
                uuid,
                held,
                used,
            })
        });
        Some(victims.collect())
    }

    /// Why a node is refused for the pod, if memory may be reclaimed for it there.
    pub(crate) fn refused_because(&self, uid: &str, name: &str, reason: Reason) -> Reason {
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

    /// Does the pod fit somewhere, so that it will be woken? True, too, if that takes too long to tell.
    pub(crate) fn may_fit_now(&self, pod: &PodFacts) -> bool {
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
        // Of a node that is gone the report may be there still: nobody is bound to it.
        let is_there = self
            .books
            .node(name)
            .is_some_and(|node| node.facts().is_some());
        is_there
            && self.may_fit(name, pod)
            && self.evidence(pod, name) != Evidence::Rejected
            && !matches!(
                self.trial().choose(pod, name, budget),
                Err(reason) if reason != Reason::NotYet
            )
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
        if !node.lends() || self.check(name).is_err() {
            return None;
        }
        let called: Vec<&Earmark> = self.earmarks.reclaims_on(name).collect();
        let is_free = |uuid: &str| {
            !called.iter().any(|it| it.has(uuid))
                && !self.earmarks.avoids_card(&pod.uid, Cause::Reclaim, uuid)
        };
        let repaid = node.gpus().iter().map(|gpu| Arc::from(gpu.uuid.as_str()));
        let mut trial = self.trial().repaid(repaid.filter(|uuid| is_free(uuid)));
        // Which GPU packs best says nothing of who has to give back there.
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

    /// What is missing of these cards for the pod to have what it is to get of them. None if one of them
    /// takes it no more. With `ended`, what the last report shows of pods that are gone is about to come.
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
