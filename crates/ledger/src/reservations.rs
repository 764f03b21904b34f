//! Reservations for pods that have waited long, so that later pods do not overtake them for ever.
//!
//! A reservation is on cards of one node. What becomes free of them is kept for one waiting pod until all that it requests
//! is free together: pods of equal or lower priority get none of it. The ledger does not know when pods finish, so it
//! takes the cards on which the fewest must. No pod is made to finish, and the waiting pod may go elsewhere at any time.
//!
//! Reservations are made in the order of turns, a few at a time and over a small part of all cards. One ends for another
//! on which fewer must finish, for a pod of higher priority, and if no pod has finished there for long:
//! then other cards are tried. Of pods that request the same, the one whose turn is first takes the reservation that is
//! free first. None of it is stored: after a restart the reservations follow from the pods that wait.
//!
//! Only a pod for which a node was found counts for the bounds. A reservation of which all is free lasts a minute: a pod
//! that does not come for it cannot, and pods that can are served before it from then on.

mod plan;

use std::cmp::Reverse;
use std::mem::take;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Group, PodFacts};
use gpustow_pack::Mib;

use crate::Ledger;
use crate::books::Uid;
use crate::budget::Budget;
use crate::earmarks::{Cause, Ended};
use crate::known::Known;
use crate::maps::HashMap;
use crate::means::Reserved;
use crate::round::{Offer, Round};
use crate::turn::Turn;

/// A reservation of which all is free is kept for so long: its pod was woken, and something else keeps it off.
const FREE_FOR: Duration = Duration::from_secs(60);
/// The pod that did not come has no other for as long at first, then for twice as long each time, up to this.
const LONGEST_PAUSE: Duration = Duration::from_secs(960);

/// What looks remember of reservations; lost at a restart without harm.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// The search for pods without one.
    round: Round<plan::Rank>,
    /// The search for a better one.
    compared: Round<plan::Rank>,
    /// Since when all of it has been free.
    free: HashMap<Uid, Duration>,
    /// Pods that did not come though all was free.
    absent: HashMap<Uid, Absent>,
}

/// A pod that did not come.
#[derive(Clone, Copy, Debug, Default)]
struct Absent {
    times: u32,
    until: Duration,
}

/// The order in which pods are to have reservations: those that did not come for one last, then by priority; of equals
/// the one that has one.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    absent: u32,
    priority: Reverse<i32>,
    has_none: bool,
    turn: Turn,
}

impl Ledger {
    /// Reserves cards for pods that have waited long, and ends reservations that are over. To be called every second or so;
    /// `unix` is the time in seconds since 1970, from which the pods' own age follows. True if room was given up
    /// that others may want.
    pub fn keep_reservations(&mut self, now: Duration, unix: i64) -> bool {
        let Some(after) = self.parts.config.keep else {
            return false;
        };
        let before = self.reservations_given_up();
        self.expire(now);
        self.end_unfit_reservations(now);
        self.forget_absent();
        self.reserve_places(after, unix, now);
        self.keep_bounds();
        self.compare_places(now);
        self.reservations_given_up() != before
    }

    fn reservations_given_up(&self) -> u64 {
        Ended::GIVEN_UP.iter().map(|how| self.given_up(*how)).sum()
    }

    /// Goes on with the search for pods that have none.
    fn reserve_places(&mut self, after: Duration, unix: i64, now: Duration) {
        let mut round = take(&mut self.placing.round);
        if round.is_over() {
            round = Round::of(self.in_need(after, unix, now));
        }
        let mut budget = Budget::of_round();
        while let Some((uid, found)) = round.go_on(
            &mut budget,
            |uid| self.nodes_for(uid, after, unix, now),
            |uid, name, budget| self.sight(now).offer_of_node(uid, name, budget),
        ) {
            match found {
                Offer::Plan(plan) => self.pursue(&uid, Cause::Reserve, plan, now),
                // Every card was tried: a later look tries them all again.
                Offer::Nothing => {
                    if let Some(pod) = self.parts.books.pod(&uid) {
                        self.parts.earmarks.all_tried(pod, Cause::Reserve, now);
                    }
                }
                Offer::Fits => {}
            }
        }
        self.placing.round = round;
        self.parts.count_spent(budget.spent());
    }

    /// The reservations of now.
    #[must_use]
    pub fn reservations(&self) -> Vec<Reserved> {
        let all = self.parts.earmarks.all_of(Cause::Reserve);
        all.iter().filter_map(|uid| self.reservation(uid)).collect()
    }

    /// The reservation for this pod.
    #[must_use]
    pub fn reservation(&self, uid: &str) -> Option<Reserved> {
        let earmark = self.parts.earmarks.find(uid, Cause::Reserve)?;
        let until = earmark.until();
        let free = self.placing.free.get(uid);
        let victims = earmark.waits_for().iter();
        let victims = victims.filter_map(|uid| self.parts.books.pod(uid).cloned());
        Some(Reserved {
            until: free.map_or(until, |since| until.min(*since + FREE_FOR)),
            ..Reserved::of(self.parts.books.pod(uid)?, earmark, victims.collect())
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
        let plan = self.sight(now).plan_reserve(pod, &mut Budget::of_plan());
        let (node, pods) = plan?;
        let pods = pods.iter().filter_map(|uid| self.parts.books.pod(uid));
        Some((node, pods.cloned().collect()))
    }

    /// How many reservations have ended like this.
    #[must_use]
    pub fn given_up(&self, how: Ended) -> u64 {
        self.parts.earmarks.count_ended(Cause::Reserve, how)
    }

    /// The pods that have waited for long and have none, in the order in which they are to have one: one of each kind.
    fn in_need(&self, after: Duration, unix: i64, now: Duration) -> Vec<Uid> {
        let is_in_need = |uid: &str| self.needs_reservation(uid, after, unix, now).is_some();
        let in_need = self.sight(now).without_room(is_in_need);
        let rank = |uid: &Uid| Some(self.standing(self.parts.books.pod(uid)?, false));
        let mut in_need: Vec<_> = in_need.iter().filter_map(rank).collect();
        in_need.sort_unstable();
        let uids = in_need.iter().map(|rank| rank.turn.uid().clone());
        uids.collect()
    }

    /// The pod, if it is to have a reservation and has none.
    fn needs_reservation(
        &self,
        uid: &str,
        after: Duration,
        unix: i64,
        now: Duration,
    ) -> Option<Arc<PodFacts>> {
        let sight = self.sight(now);
        let pod = sight.asleep(uid)?;
        let after = i64::try_from(after.as_secs()).unwrap_or(i64::MAX);
        let long = unix.saturating_sub(pod.created) >= after;
        let rests = self.absent_until(uid, now).is_some();
        (long && !rests && sight.not_now(Cause::Reserve, &pod).is_none()).then_some(pod)
    }

    /// The pod did not come for its reservation: until then it has no other.
    pub(crate) fn absent_until(&self, uid: &str, now: Duration) -> Option<Duration> {
        let absent = self.placing.absent.get(uid)?;
        (absent.until > now).then_some(absent.until)
    }

    fn standing(&self, pod: &PodFacts, has: bool) -> Rank {
        let absent = self.placing.absent.get(&pod.uid);
        Rank {
            absent: absent.map_or(0, |absent| absent.times),
            priority: Reverse(pod.priority),
            has_none: !has,
            turn: Turn::of(pod),
        }
    }

    /// The pods that have reservations, in their order. A pod that is being ungated counts.
    fn placed(&self) -> Vec<(Rank, Arc<PodFacts>)> {
        let placed = self.parts.earmarks.all_of(Cause::Reserve).into_iter();
        let placed = placed.filter_map(|uid| {
            let pod = self.parts.books.pod(&uid)?;
            Some((self.standing(pod, true), pod.clone()))
        });
        let mut placed: Vec<_> = placed.collect();
        placed.sort_unstable_by(|(rank, _), (other, _)| rank.cmp(other));
        placed
    }

    /// How many GPUs may be reserved in all, but for the first pod.
    fn most_cards(&self) -> usize {
        let all: usize = self
            .parts
            .books
            .nodes()
            .map(|(_, node)| node.gpus().len())
            .sum();
        all * self.parts.config.keep_percent / 100
    }

    /// The nodes to be looked at for a pod: none if the bound is reached by those before it.
    fn nodes_for(
        &self,
        uid: &Uid,
        after: Duration,
        unix: i64,
        now: Duration,
    ) -> Option<Vec<Arc<str>>> {
        let pod = self.needs_reservation(uid, after, unix, now)?;
        let rank = self.standing(&pod, false);
        let mut bound = Bound::new(self.parts.config.keep_reservations, self.most_cards());
        for (other, pod) in self.placed() {
            if other < rank {
                bound.takes(&pod);
            }
        }
        if !bound.takes(&pod) {
            return None;
        }
        // Last, for it is a search.
        let mut budget = Budget::of_look();
        let rest = self.sight(now).reserved_with(&pod, &mut budget);
        self.parts.count_spent(budget.spent());
        let rest = rest?;
        let names = || {
            self.parts
                .books
                .nodes()
                .map(|(name, _)| name.clone())
                .collect()
        };
        rest.iter().all(|pod| bound.takes(pod)).then(names)
    }

    /// Gives up what is beyond the bound.
    fn keep_bounds(&mut self) {
        let mut bound = Bound::new(self.parts.config.keep_reservations, self.most_cards());
        for (_, pod) in self.placed() {
            if !bound.takes(&pod) {
                self.parts.end(&pod.uid, Ended::Overtaken);
            }
        }
    }

    /// Pods that are gone or have their room are absent no more.
    fn forget_absent(&mut self) {
        let (placing, parts) = (&mut self.placing, &self.parts);
        placing
            .free
            .retain(|uid, _| parts.earmarks.find(uid, Cause::Reserve).is_some());
        let waits = |uid: &Uid| {
            let pod = parts.books.pod(uid);
            pod.is_some_and(|pod| pod.node.is_none() && !pod.released)
        };
        placing.absent.retain(|uid, _| waits(uid));
    }

    /// All of the reservation is free: for a minute the pod is waited for, then others come first.
    fn wait_for_pod(&mut self, uid: &Uid, now: Duration) {
        let since = *self.placing.free.entry(uid.clone()).or_insert(now);
        if now < since + FREE_FOR {
            return;
        }
        let absent = self.placing.absent.entry(uid.clone()).or_default();
        let pause = FREE_FOR.saturating_mul(1 << absent.times.min(16));
        absent.until = now + pause.min(LONGEST_PAUSE);
        absent.times += 1;
        self.parts.end(uid, Ended::Late);
    }

    /// Ends reservations of pods that changed, or on nodes that take them no more.
    fn end_unfit_reservations(&mut self, now: Duration) {
        for uid in self.parts.earmarks.all_of(Cause::Reserve) {
            let Some(earmark) = self.parts.earmarks.find(&uid, Cause::Reserve) else {
                continue;
            };
            let (name, cards) = (earmark.node(), earmark.cards());
            let pod = self.parts.books.pod(&uid).filter(|pod| pod.may_be_placed());
            let Some(pod) = pod else {
                self.parts.end(&uid, Ended::Gone);
                continue;
            };
            let fits = || {
                let request = pod.asks.request().filter(|it| earmark.is_for(it))?;
                let node = self.parts.books.node(name)?;
                self.sight(now).check(name).ok()?;
                self.sight(now)
                    .admits(name, node, pod, request)
                    .then_some(())?;
                let charges = node.charges(cards);
                let good = |&(card, mib): &(usize, Mib)| {
                    let card = node.view().cards.get(card);
                    card.is_some_and(|card| card.usable && card.capacity >= mib)
                };
                (charges.len() == cards.len() && charges.iter().all(good)).then_some(())
            };
            if fits().is_none() {
                self.parts.end(&uid, Ended::Unfit);
                continue;
            }
            // As it comes nearer it is waited for as long again.
            let Some(node) = self.parts.books.node(name) else {
                continue;
            };
            let charges = node.charges(cards);
            let sight = self.sight(now);
            let ends = sight.ends(name, node, pod, &charges);
            if ends.are_over() && !sight.is_awaited_by_gang(pod) {
                self.wait_for_pod(&uid, now);
            } else {
                self.placing.free.swap_remove(&uid);
                let nearer = ends.are_over() || ends.pods.len() < earmark.waits_for().len();
                let until = nearer.then_some(now + self.parts.config.keep_for);
                self.parts
                    .earmarks
                    .reservation_nearer(&uid, ends.pods, until);
            }
        }
    }

    /// Gives up one reservation for a better one; each round is for another pod.
    fn compare_places(&mut self, now: Duration) {
        let mut round = take(&mut self.placing.compared);
        if round.is_over() {
            round = Round::of(self.parts.earmarks.next_reservation().into_iter().collect());
        }
        let mut budget = Budget::of_round();
        let found = round.go_on(
            &mut budget,
            |uid| {
                let here = self.parts.earmarks.find(uid, Cause::Reserve)?.node();
                let others = self.parts.books.nodes().map(|(name, _)| name);
                Some(others.filter(|name| *name != here).cloned().collect())
            },
            |uid, name, budget| match self.parts.books.pod(uid) {
                Some(pod) => Offer::of(self.sight(now).place_on_node(pod, name, budget)),
                None => Offer::Nothing,
            },
        );
        self.placing.compared = round;
        if let Some((uid, Offer::Plan(plan))) = found
            && let Some(earmark) = self.parts.earmarks.find(&uid, Cause::Reserve)
            && *earmark.node() != plan.node
            && plan.overtakes.is_empty()
            && plan.waits_for.len() < earmark.waits_for().len()
        {
            self.parts.end(&uid, Ended::Better);
            self.pursue(&uid, Cause::Reserve, plan, now);
        }
        self.parts.count_spent(budget.spent());
    }
}

/// How much may be reserved.
struct Bound {
    pods: usize,
    cards: usize,
    /// The first pod may have any number of GPUs, and so may the others of its gang.
    first: Option<Option<Group>>,
}

impl Bound {
    fn new(pods: usize, cards: usize) -> Self {
        Self {
            pods,
            cards,
            first: None,
        }
    }

    /// Takes a reservation for this pod. False if that is too much.
    fn takes(&mut self, pod: &PodFacts) -> bool {
        let gang = pod.group.as_ref().filter(|gang| gang.is_in_tree());
        let is_first = match &self.first {
            None => true,
            Some(first) => gang.is_some() && first.as_ref() == gang,
        };
        let cards = cards_of(pod);
        if self.pods == 0 || !is_first && cards > self.cards {
            return false;
        }
        self.pods -= 1;
        self.cards = self.cards.saturating_sub(cards);
        self.first.get_or_insert_with(|| gang.cloned());
        true
    }
}

/// How many cards the pod asks for.
fn cards_of(pod: &PodFacts) -> usize {
    let claims = pod.asks.claims().iter();
    claims.map(|claim| claim.gpus as usize).sum()
}

impl Known<'_> {
    /// The other pods for which GPUs are to be reserved together with this one; none if its gang fits. Nothing is reserved for
    /// a part of a gang where a bound leaves too little for the rest.
    fn reserved_with(&self, pod: &PodFacts, budget: &mut Budget) -> Option<Vec<Arc<PodFacts>>> {
        let Some((open, wanted)) = self.open_of_gang(pod) else {
            return Some(Vec::new());
        };
        if self.has_seats(pod, budget) {
            return None;
        }
        let has = |it: &Arc<PodFacts>| self.earmarks.find(&it.uid, Cause::Reserve).is_some();
        let (reserved, without): (Vec<_>, Vec<_>) = open.into_iter().partition(has);
        // Those beyond the least number wait alone.
        let rest = wanted.checked_sub(reserved.len() + 1)?;
        let others = without.into_iter().filter(|it| it.uid != pod.uid);
        Some(others.take(rest).collect())
    }

    /// All that is reserved for the pod is free. Are GPUs reserved for enough others of its gang, and some not free yet?
    fn is_awaited_by_gang(&self, pod: &PodFacts) -> bool {
        let Some((open, wanted)) = self.open_of_gang(pod) else {
            return false;
        };
        let are_free = open.iter().filter_map(|pod| {
            let earmark = self.earmarks.find(&pod.uid, Cause::Reserve)?;
            let (name, node) = self.books.named_node(earmark.node())?;
            let charges = node.charges(earmark.cards());
            Some(self.ends(name, node, pod, &charges).are_over())
        });
        let are_free: Vec<bool> = are_free.collect();
        are_free.len() >= wanted && !are_free.iter().all(|it| *it)
    }
}
