//! The search for pods that could end for another: one node after the other, and no more in one look than its budget
//! takes. The next look goes on where this one stopped. The best plan counts by kube-scheduler's order.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_books::{Budget, Cause, Evidence, HashMap, Reason, Turn, Uid};
use gpustow_pack::Mib;

use super::gangs::Waits;
use super::{KINDS, Plan, Rank, Site, importance};
use crate::parts::Parts;
use crate::round::{Candidate, Offer, Round};
use crate::sight::Sight;

/// So long a pod must have waited without room and without a nomination: kube-scheduler had its chance.
const CHANCE: Duration = Duration::from_secs(1);
/// The time that a pod waits for kube-scheduler's own preemption, and for room from pods that terminate on other nodes.
/// Room that has not come by then evidently does not help.
const PATIENCE: Duration = Duration::from_secs(60);

/// The state between two looks.
#[derive(Debug, Default)]
pub struct Preempt {
    /// Since when pods have waited for room that is fragmented.
    since: HashMap<Uid, Duration>,
    /// Where the next round goes on among the kinds that wait.
    after: Option<Turn>,
    round: Round<Rank>,
    /// The clock of gains when the round began.
    began: u64,
    pub(super) gangs: Waits,
}

impl Preempt {
    /// Goes on with the search for pods that could end for others, and keeps the room of the plans.
    pub(super) fn search(&mut self, parts: &mut Parts) {
        let (now, sight) = (parts.now, parts.sight());
        self.since
            .retain(|uid, _| sight.preempts_for(uid).is_some());
        if self.round.is_over() {
            let may = |uid: &str| sight.preempts_for(uid).is_some() && sight.asleep(uid).is_some();
            let mut pods = sight.next_without_more(&mut self.after, KINDS, may);
            pods.retain(|uid| {
                let since = *self.since.entry(uid.clone()).or_insert(now);
                now.saturating_sub(since) >= CHANCE
            });
            (self.round, self.began) = (Round::of(pods), sight.queue.gains());
        }
        let since = &self.since;
        let patient = |uid: &Uid| {
            let since = since.get(uid);
            since.is_some_and(|since| now.saturating_sub(*since) < PATIENCE)
        };
        let nodes = |sight: &Sight<'_>, uid: &Uid| {
            let pod = sight.preempts_for(uid)?;
            // Where an earlier extender began it goes on.
            let began = pod.reserved_on.clone().filter(|node| {
                let (uid, best) = (uid, None);
                let begun = Candidate { uid, node, best };
                let offer = sight.verdict(pod, &begun, patient(uid), &mut Budget::of_look());
                matches!(offer, Offer::Plan(_))
            });
            Some(began.map_or_else(|| sight.node_names(), |node| vec![node]))
        };
        let look = |sight: &Sight<'_>, it: Candidate<'_, Rank>, budget: &mut Budget| {
            let pod = sight.preempts_for(it.uid);
            pod.map_or(Offer::Served, |pod| {
                sight.verdict(pod, &it, patient(it.uid), budget)
            })
        };
        let is_open = |plan: &Plan| plan.rank.open.is_some();
        let budget = Budget::of_look();
        let ends = (self.round).run(parts, Cause::Preempt, budget, nodes, look, is_open);
        for uid in &ends.pursued {
            parts.earmarks.note_looked(uid, self.began);
        }
        self.since
            .extend(ends.fit.into_iter().map(|uid| (uid, now)));
    }
}

impl Sight<'_> {
    /// The pod, if others may end for it.
    fn preempts_for(&self, uid: &str) -> Option<&Arc<PodFacts>> {
        self.books.pod(uid).filter(|pod| self.may_preempt(pod))
    }

    /// The offer of one node to the pod.
    fn verdict(
        &self,
        pod: &Arc<PodFacts>,
        candidate: &Candidate<'_, Rank>,
        patient: bool,
        budget: &mut Budget,
    ) -> Offer<Rank> {
        let name = candidate.node;
        let evidence = self.evidence(pod, name);
        if evidence == Evidence::Rejected && !patient {
            return Offer::Nothing;
        }
        let Some(site) = self.site(pod, name) else {
            return Offer::Nothing;
        };
        let bound = site.node.bound();
        budget.charge(bound.len() / 8);
        if self.may_fit(name, pod) && evidence != Evidence::Rejected {
            match self.trial().choose(pod, name, budget) {
                Ok(_) => return Offer::Fits,
                Err(Reason::NotYet) => return Offer::Spent,
                Err(_) => {}
            }
        }
        if self.books.refused_in_tree(name, pod).is_some() || self.earmarks.avoids_node(pod, name) {
            return Offer::Nothing;
        }
        let may_come = !site.leaving.is_empty() && evidence != Evidence::Rejected;
        if may_come && let Some((_, choice)) = self.reprieve(&site, &[], &[], None, budget) {
            // The pods that terminate make the room: the node is left out.
            let began = pod.reserved_on.as_ref() == Some(name);
            let plan = || self.plan_of(&site, Vec::new(), 0, &choice);
            return match began.then(plan).flatten() {
                Some(plan) => Offer::Plan(plan),
                None if patient => Offer::Served,
                None => Offer::Nothing,
            };
        }
        // For a pod of a PodGroup kube-scheduler asks no extender for victims.
        if evidence == Evidence::Short && !self.books.comes_alone(pod) {
            let pods = bound.keys().filter_map(|uid| self.books.pod(uid));
            let mut pods = pods.filter(|pod| !pod.deleting);
            let helps = patient
                && pods.any(|other| other.priority < pod.priority)
                && self.preempt(pod, name, &[], budget).is_some();
            return match helps {
                true => Offer::Served,
                false if budget.is_spent() => Offer::Spent,
                false => Offer::Nothing,
            };
        }
        let open = (!self.was_offered(pod, name)).then_some(Reverse(evidence));
        let best = candidate.best.map(|plan| plan.rank.open);
        if open.is_some() && (!evidence.is_open() || best.is_some_and(|best| best <= open)) {
            return Offer::Nothing;
        }
        let best = self.plans_on(&site, budget).into_iter().min();
        match best {
            _ if budget.is_spent() => Offer::Spent,
            Some(mut plan) => {
                plan.rank.open = open;
                Offer::Plan(plan)
            }
            None => Offer::Nothing,
        }
    }

    /// The best plan on one node.
    pub(crate) fn plan_preempt(
        &self,
        pod: &PodFacts,
        name: &str,
        budget: &mut Budget,
    ) -> Option<Plan> {
        let site = self.site(pod, name)?;
        let plans = self.plans_on(&site, budget);
        plans.into_iter().min()
    }

    /// Who could end on one node: for each of its cards, or for all of them where the pod asks for several.
    fn plans_on(&self, site: &Site<'_>, budget: &mut Budget) -> Vec<Plan> {
        let mut lower = self.books.evictable(site.name, site.pod.priority);
        budget.charge(lower.len());
        if lower.is_empty() {
            return Vec::new();
        }
        lower.sort_unstable_by_key(|pod| importance(pod));
        let (sites, mib): (Vec<Option<usize>>, _) = match site.request.claims.as_slice() {
            [claim] if claim.gpus <= 1 => {
                let cards = 0..site.node.gpus().len();
                (cards.map(Some).collect(), claim.mib)
            }
            _ => (vec![None], Mib::ZERO),
        };
        let mut plans = Vec::new();
        for card in sites {
            let holds = |pod: &Arc<PodFacts>| {
                card.is_none_or(|card| {
                    let hold = site.node.bound().get(&pod.uid);
                    hold.is_some_and(|hold| hold.on(site.node.uuid(card)) > Mib::ZERO)
                })
            };
            let others = lower.iter().filter(|pod| holds(pod)).cloned();
            let others: Vec<_> = others.collect();
            if others.is_empty() || !self.could_take(site, card, mib, &others) {
                continue;
            }
            let only = card.as_ref().map(std::slice::from_ref);
            let protected = self.books.protected(&others);
            let found = self.reprieve(site, &others, &protected, only, budget);
            let plan = found.and_then(|(victims, choice)| {
                let is_it = |pod: &&Arc<PodFacts>| protected.contains(&pod.uid);
                let broken = victims.iter().filter(is_it).count();
                self.plan_of(site, victims, broken, &choice)
            });
            plans.extend(plan);
        }
        plans
    }

    /// Is the card large enough for so much if all of these leave it? Asked before a fit, which costs more.
    fn could_take(
        &self,
        site: &Site<'_>,
        card: Option<usize>,
        mib: Mib,
        others: &[Arc<PodFacts>],
    ) -> bool {
        let Some(card) = card else {
            return true;
        };
        let goes =
            |uid: &str| site.leaving.contains(uid) || others.iter().any(|other| *other.uid == *uid);
        let view = site.node.view().cards.get(card);
        view.is_some_and(|view| {
            let stays = site.node.held(site.node.uuid(card), |uid| !goes(uid));
            view.usable && view.capacity.minus(stays) >= mib
        })
    }
}
