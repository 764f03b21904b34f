//! Places kept for pods that have waited for long, so that nobody who comes later overtakes them for ever.
//!
//! A *place* is cards of one node. Whatever comes free of them is kept for one waiting pod until all that it asks for
//! is free together: pods of equal or lower priority get none of it. The ledger does not know when pods end, so it
//! takes the place on which the fewest have to. Nobody is made to end, and the pod may go elsewhere at any time.
//!
//! Places are given out in the order of turns, a few at a time and over a small part of all cards. One is given up
//! for another on which fewer have to end, for a pod of higher priority, and when nobody has ended there for long:
//! then other cards are tried. Of pods that ask for the same, the one whose turn is first takes the place that is
//! free first. None of it is stored: after a restart the places follow from the pods that wait.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_pack::{Mib, Request};

use crate::books::{Node, Uid};
use crate::budget::Budget;
use crate::queue::CalledBack;
use crate::{Ledger, Reason};

/// Kinds of waiting pods among which one look finds those that wait longest.
const KINDS: usize = 64;

/// Cards that are kept for a pod.
#[derive(Clone, Debug)]
pub struct Place {
    /// For whom.
    pub pod: Arc<PodFacts>,
    /// Where.
    pub node: Arc<str>,
    /// When that is given up, unless somebody ends there before.
    pub until: Duration,
    /// Who has to end.
    pub ends: Vec<Uid>,
    /// The cards that the pod is to get, by UUID, and what it will hold of each.
    pub cards: Vec<(Box<str>, Mib)>,
}

/// Why a place was given up before its pod had it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GivenUp {
    /// Another place was found on which fewer pods have to end.
    Better,
    /// The cards did not come free in time.
    Late,
    /// The node takes the pod no more.
    Unfit,
    /// The bound on places is for pods whose turn is before.
    Overtaken,
}

impl GivenUp {
    /// Every cause.
    pub const ALL: [Self; 4] = [Self::Better, Self::Late, Self::Unfit, Self::Overtaken];

    /// The value of metric labels.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Better => "better",
            Self::Late => "late",
            Self::Unfit => "unfit",
            Self::Overtaken => "overtaken",
        }
    }
}

/// A place that could be kept: the fewer have to end and the less has to come free, the better.
struct Plan {
    /// Those who have to end.
    ends: Vec<Uid>,
    missing: Mib,
    node: Arc<str>,
    cards: Vec<(Box<str>, Mib)>,
}

impl Plan {
    fn order(&self) -> (usize, Mib, &str) {
        (self.ends.len(), self.missing, &self.node)
    }
}

impl Ledger {
    /// Gives places to those who have waited for long, and ends what is to end. To be called every second or so;
    /// `unix` is the time in seconds since 1970, from which the pods' own age follows. True if room was given up
    /// that others may want.
    pub fn keep_places(&mut self, now: Duration, unix: i64) -> bool {
        let Some(after) = self.config.keep else {
            return false;
        };
        let before = self.queue.places_given_up();
        self.expire(now);
        self.end_unfit_places(now);
        let mut cards = 0;
        let (mut kept, mut without) = (0, Vec::new());
        let all: usize = self.books.nodes().map(|(_, node)| node.gpus().len()).sum();
        let most = all * self.config.keep_percent / 100;
        for (pod, has) in self.in_need(after, unix) {
            let wants = cards_of(&pod);
            if kept == self.config.keep_places || kept > 0 && cards + wants > most {
                if has {
                    self.queue
                        .give_up(&pod.uid, GivenUp::Overtaken, &self.books);
                }
                continue;
            }
            // Whoever fits is woken, and needs no place.
            if !has && self.may_fit_now(&pod, now) {
                continue;
            }
            (kept, cards) = (kept + 1, cards + wants);
            if !has {
                without.push(pod);
            }
        }
        for pod in without {
            match self.best_place(&pod, None, now) {
                Some(plan) => self.keep_place(&pod, plan, now),
                // Every card was tried: a later look tries them all again.
                None => self.queue.call_all_again(&pod.uid, now),
            }
        }
        self.move_one_place(now);
        self.queue.places_given_up() != before
    }

    /// The places that are kept now.
    #[must_use]
    pub fn places(&self) -> Vec<Place> {
        let all = self.queue.all_places();
        all.iter().filter_map(|uid| self.place(uid)).collect()
    }

    /// The place that is kept for this pod.
    #[must_use]
    pub fn place(&self, uid: &str) -> Option<Place> {
        let (node, what) = self.queue.place(uid)?;
        Some(Place {
            pod: self.books.pod(uid)?.clone(),
            node: node.clone(),
            until: self.queue.kept_until(uid)?,
            ends: what.victims().to_vec(),
            cards: what.cards().to_vec(),
        })
    }

    /// The node on which the fewest pods must finish before this pod fits, and those pods. None if it would fit on
    /// no node that takes pods now, whichever of them finish.
    #[must_use]
    pub fn fewest_to_finish(
        &self,
        pod: &PodFacts,
        now: Duration,
    ) -> Option<(Arc<str>, Vec<Arc<PodFacts>>)> {
        let plan = self.best_place(pod, None, now)?;
        let pods = plan.ends.iter().filter_map(|uid| self.books.pod(uid));
        Some((plan.node, pods.cloned().collect()))
    }

    /// How many places were given up so far for this cause.
    #[must_use]
    pub fn given_up(&self, cause: GivenUp) -> u64 {
        self.queue.given_up(cause)
    }

    /// Those who have waited for long, and whether they have a place: in the order in which they are to
    /// have one. Of equal priority whoever has one keeps it.
    fn in_need(&self, after: Duration, unix: i64) -> Vec<(Arc<PodFacts>, bool)> {
        let after = i64::try_from(after.as_secs()).unwrap_or(i64::MAX);
        let placed = self.queue.all_places().into_iter();
        let placed = placed.map(|uid| (uid, true));
        let others = self.queue.without_room(KINDS, |_| true).into_iter();
        let others = others.map(|uid| (uid, false));
        let in_need = placed.chain(others).filter_map(|(uid, has)| {
            let pod = self.asleep(&uid)?;
            let long = unix.saturating_sub(pod.created) >= after && pod.nominated.is_none();
            let free = self.books.reservation(&uid).is_none() && !self.books.is_unfenced(&uid);
            (has || long && free).then_some((pod, has))
        });
        let mut in_need: Vec<_> = in_need.collect();
        in_need.sort_by(|(one, one_has), (other, other_has)| {
            let key = |pod: &PodFacts, has: bool| (Reverse(pod.priority), !has, pod.created);
            let order = key(one, *one_has).cmp(&key(other, *other_has));
            order.then_with(|| (&one.name, &one.uid).cmp(&(&other.name, &other.uid)))
        });
        in_need
    }

    /// Ends places of pods that changed, or on nodes that take them no more.
    fn end_unfit_places(&mut self, now: Duration) {
        for uid in self.queue.all_places() {
            let Some((name, what)) = self.queue.place(&uid) else {
                continue;
            };
            let (name, what) = (name.clone(), what.clone());
            let pod = self
                .books
                .pod(&uid)
                .filter(|pod| pod.node.is_none() && !pod.deleting && !pod.gated && !pod.released);
            let Some(pod) = pod else {
                self.queue.end_kept(&uid, &self.books);
                continue;
            };
            let fits = || {
                let request = pod.request.as_ref().ok().filter(|it| what.is_for(it))?;
                let node = self.books.node(&name)?;
                self.check(&name, now).ok()?;
                self.admits(&name, node, pod, request).then_some(())?;
                let charges = node.charges(what.cards());
                let good = |&(card, mib): &(usize, Mib)| {
                    let card = node.view().cards.get(card);
                    card.is_some_and(|card| card.usable && card.capacity >= mib)
                };
                (charges.len() == what.cards().len() && charges.iter().all(good)).then_some(())
            };
            if fits().is_none() {
                self.queue.give_up(&uid, GivenUp::Unfit, &self.books);
                continue;
            }
            // As it comes nearer it is waited for as long again.
            let ends = self.books.node(&name);
            let ends = ends.map(|node| self.ends(node, &node.charges(what.cards())));
            if let Some(ends) = ends {
                let nearer = ends.len() < what.victims().len();
                let until = nearer.then_some(now + self.config.keep_for);
                self.queue.place_nearer(&uid, ends, until);
            }
        }
    }

    /// Gives up one place for a better one; each look is for another pod.
    fn move_one_place(&mut self, now: Duration) {
        let Some(uid) = self.queue.next_place() else {
            return;
        };
        let (Some(pod), Some((name, what))) = (self.books.pod(&uid), self.queue.place(&uid)) else {
            return;
        };
        let (pod, name, what) = (pod.clone(), name.clone(), what.clone());
        if let Some(plan) = self.best_place(&pod, Some(&name), now)
            && plan.ends.len() < what.victims().len()
        {
            self.queue.give_up(&uid, GivenUp::Better, &self.books);
            self.keep_place(&pod, plan, now);
        }
    }

    fn keep_place(&mut self, pod: &PodFacts, plan: Plan, now: Duration) {
        let Ok(request) = pod.request.clone() else {
            return;
        };
        let until = now + self.config.keep_for;
        let what = CalledBack::new(request, plan.cards, plan.ends);
        self.queue.keep_place(&pod.uid, &plan.node, what, until);
    }

    /// The best place for the pod, on any node but this one.
    fn best_place(&self, pod: &PodFacts, but: Option<&Arc<str>>, now: Duration) -> Option<Plan> {
        let request = pod.request.as_ref().ok()?;
        let mut budget = Budget::of(&self.config);
        let others = self.books.nodes().filter(|(name, _)| Some(*name) != but);
        let plans = others.filter_map(|(name, node)| {
            self.check(name, now).ok()?;
            self.admits(name, node, pod, request).then_some(())?;
            self.place_on(name, node, pod, request, &mut budget)
        });
        plans.min_by(|one, other| one.order().cmp(&other.order()))
    }

    /// Does the node take such pods, and is it large enough?
    fn admits(&self, name: &str, node: &Node, pod: &PodFacts, request: &Request) -> bool {
        let enough = node
            .facts()
            .is_none_or(|facts| facts.cpu_milli >= request.cpu_milli && facts.ram >= request.ram);
        enough && self.excluded(name, &pod.constraints).is_none()
    }

    /// The cards of this node that are to be kept for the pod: those with the fewest pods on them.
    fn place_on(
        &self,
        name: &Arc<str>,
        node: &Node,
        pod: &PodFacts,
        request: &Arc<Request>,
        budget: &mut Budget,
    ) -> Option<Plan> {
        let mut taken: Vec<&str> = Vec::new();
        for uid in self.queue.kept_on(name).filter(|uid| **uid != pod.uid) {
            // Which cards those get that kube-scheduler preempts for is not known.
            let cards = self.queue.kept_cards(uid)?;
            taken.extend(cards.iter().map(|(card, _)| &**card));
        }
        let mut view = node.view().clone();
        let empty = node.view_of(|_| false);
        let mut order = Vec::new();
        for (card, now) in view.cards.iter_mut().enumerate() {
            let uuid = node.uuid(card);
            let open = !taken.contains(&uuid) && !self.queue.was_in_vain(&pod.uid, uuid);
            now.usable &= open;
            if now.usable {
                let pods = node
                    .shares()
                    .filter(|(_, hold, _)| hold.on(uuid) > Mib::ZERO);
                order.push((pods.count(), Reverse(now.free), card));
            }
        }
        order.sort_unstable();
        let least = request.claims.iter().map(|claim| claim.gpus as usize);
        let least = least.max().unwrap_or_default().max(1);
        for (count, &(.., card)) in order.iter().enumerate() {
            view.cards[card] = *empty.cards.get(card)?;
            if count + 1 < least {
                continue;
            }
            match self.scores.fit_within(&view, request, budget) {
                Ok(choice) => {
                    let charges = choice.placement.charges;
                    let cards = charges.iter();
                    let cards = cards.map(|&(card, mib)| (node.uuid(card).into(), mib));
                    let missing = charges.iter().filter_map(|&(card, mib)| {
                        Some(mib.minus(node.view().cards.get(card)?.free))
                    });
                    return Some(Plan {
                        ends: self.ends(node, &charges),
                        missing: missing.sum(),
                        node: name.clone(),
                        cards: cards.collect(),
                    });
                }
                Err(Reason::NotYet) => return None,
                Err(_) => {}
            }
        }
        None
    }

    /// Who has to end, at the least, before the pod has so much of these cards.
    fn ends(&self, node: &Node, charges: &[(usize, Mib)]) -> Vec<Uid> {
        let leaves = |uid: &Uid| self.books.pod(uid).is_some_and(|pod| pod.deleting);
        let mut ends: Vec<Uid> = Vec::new();
        for &(card, mib) in charges {
            let Some(now) = node.view().cards.get(card) else {
                continue;
            };
            let uuid = node.uuid(card);
            let holds = node.shares().map(|(uid, hold, _)| (hold.on(uuid), uid));
            let mut holds: Vec<(Mib, &Uid)> = holds.filter(|(held, _)| *held > Mib::ZERO).collect();
            // Those who leave anyway first, then those who are counted already, then the largest.
            holds.sort_unstable_by_key(|(held, uid)| {
                (!leaves(uid), !ends.contains(uid), Reverse(*held), *uid)
            });
            let mut missing = mib.minus(now.free);
            for (held, uid) in holds {
                if missing == Mib::ZERO {
                    break;
                }
                missing = missing.minus(held);
                if !leaves(uid) && !ends.contains(uid) {
                    ends.push(uid.clone());
                }
            }
        }
        ends
    }
}

/// How many cards the pod asks for.
fn cards_of(pod: &PodFacts) -> usize {
    let claims = pod.request.iter().flat_map(|request| &request.claims);
    claims.map(|claim| claim.gpus as usize).sum()
}

impl Ledger {
    /// Is this place of another free for the pod, which asks for the same, has one too, and whose turn is before?
    pub(crate) fn may_take_place(&self, pod: &PodFacts, other: &PodFacts) -> bool {
        let turn = |pod: &PodFacts| (Reverse(pod.priority), pod.created, pod.name.clone());
        let both = || {
            [pod, other]
                .iter()
                .all(|pod| self.queue.place(&pod.uid).is_some())
        };
        both() && pod.request == other.request && turn(pod) < turn(other)
    }
}
