//! Reservations for pods that have waited long, so that later pods do not overtake them for ever.
//!
//! A reservation is on cards of one node. Memory that becomes free there is kept for one waiting pod until its whole
//! request is free together. Pods of equal or lower priority get none of it. The ledger does not know when pods finish,
//! so it takes the cards on which the fewest pods must finish. No pod is made to finish, and the waiting pod may go
//! elsewhere at any time.
//!
//! Reservations are made in the order of turns, a few at a time and over a small part of all cards. A reservation ends
//! for another on which fewer pods must finish, or for a pod of higher priority. It also ends if no pod has finished
//! there in time: then other cards are tried. Of pods with the same request, the pod whose turn is first takes the
//! reservation that is free first. Reservations are not stored: after a restart they follow from the waiting pods.
//!
//! Only a pod for which a node was found counts for the bounds. A reservation of which all is free lasts a minute: a pod
//! that does not come for it cannot, and pods that can are served before it from then on.

mod plan;

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Group, PodFacts};
use gpustow_books::{Budget, Cause, Config, Earmark, Ended, HashMap, Turn, Uid};
use gpustow_pack::Mib;

use crate::demand::{Demands, Reserved};
use crate::means::{Makes, Means, best};
use crate::parts::Parts;
use crate::round::{Candidate, Offer, Round};
use crate::sight::Sight;

/// A reservation of which all is free is kept for so long: its pod was woken, and something else keeps it off.
const FREE_FOR: Duration = Duration::from_secs(60);
/// The longest pause before a pod that did not come gets another reservation. The first pause is `FREE_FOR`, and each
/// further pause is twice as long.
const LONGEST_PAUSE: Duration = Duration::from_secs(960);

/// The state of reservations between looks; its loss at a restart is harmless.
#[derive(Debug, Default)]
pub struct Reserve {
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

/// The order in which pods are to have reservations: last the pods that did not come for one, then by priority. Of
/// equal pods, a pod with a reservation comes first.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    absent: u32,
    priority: Reverse<i32>,
    has_none: bool,
    turn: Turn,
}

impl Means for Reserve {
    fn cause(&self) -> Cause {
        Cause::Reserve
    }

    fn after(&self, config: &Config) -> Option<Duration> {
        config.reserve_after
    }

    /// Reserves GPUs for pods that have waited long, and ends reservations that are over.
    fn look(&mut self, parts: &mut Parts, _: usize) {
        if parts.config.reserve_after.is_some() {
            self.end_unfit_reservations(parts);
            self.forget_absent(parts);
            self.search(parts);
            self.keep_bounds(parts);
            self.compare(parts);
        }
    }

    /// The end of the pause in which a pod that did not come for its reservation does not get another.
    fn pauses(&self, pod: &PodFacts, now: Duration) -> Option<Duration> {
        let absent = self.absent.get(&pod.uid)?;
        (absent.until > now).then_some(absent.until)
    }

    fn plan(&self, known: &Sight<'_>, pod: &Arc<PodFacts>, budget: &mut Budget) -> Option<Makes> {
        known.plan_reserve(pod, budget)
    }

    fn reserved(&self, sight: &Sight<'_>) -> Vec<Reserved> {
        let all = sight.earmarks.all_of(Cause::Reserve).into_iter();
        let all = all.filter_map(|uid| {
            let earmark = sight.reservation(&uid)?;
            let until = earmark.until();
            let free = self.free.get(&uid);
            let victims = earmark.waits_for().iter();
            let victims = victims.filter_map(|uid| sight.books.pod(uid).cloned());
            Some(Reserved {
                until: free.map_or(until, |since| until.min(*since + FREE_FOR)),
                ..Reserved::of(sight.books.pod(&uid)?, earmark, victims.collect())
            })
        });
        all.collect()
    }

    fn demand(&self, sight: &Sight<'_>, all: &mut Demands) {
        all.reserved.extend(self.reserved(sight));
    }
}

impl Reserve {
    /// Goes on with the search for pods that have none.
    fn search(&mut self, parts: &mut Parts) {
        let mut round = std::mem::take(&mut self.round);
        if round.is_over() {
            round = Round::of(self.in_need(&parts.sight()));
        }
        let nodes = |sight: &Sight<'_>, uid: &Uid| self.nodes_for(sight, uid);
        let look = |sight: &Sight<'_>, it: Candidate<'_, _>, budget: &mut Budget| {
            sight.offer_of_node(it.uid, it.node, budget)
        };
        let budget = Budget::of_round();
        round.run(parts, Cause::Reserve, budget, nodes, look, |_| false);
        self.round = round;
    }

    /// One pod of each kind that has waited long enough without a reservation, in the order of their ranks.
    fn in_need(&self, sight: &Sight<'_>) -> Vec<Uid> {
        let in_need = sight.without_room(|uid| self.needs_reservation(sight, uid).is_some());
        let rank = |uid: &Uid| Some(self.standing(sight.books.pod(uid)?, false));
        let mut in_need: Vec<_> = in_need.iter().filter_map(rank).collect();
        in_need.sort_unstable();
        let uids = in_need.iter().map(|rank| rank.turn.uid().clone());
        uids.collect()
    }

    /// The pod, if it is to have a reservation and has none.
    fn needs_reservation(&self, sight: &Sight<'_>, uid: &str) -> Option<Arc<PodFacts>> {
        let pod = sight.asleep(uid)?;
        let long = sight.has_waited(&pod, sight.config.reserve_after?);
        let rests = self.pauses(&pod, sight.now).is_some();
        (long && !rests && sight.not_now(Cause::Reserve, &pod).is_none()).then_some(pod)
    }

    fn standing(&self, pod: &PodFacts, has: bool) -> Rank {
        let absent = self.absent.get(&pod.uid);
        Rank {
            absent: absent.map_or(0, |absent| absent.times),
            priority: Reverse(pod.priority),
            has_none: !has,
            turn: Turn::of(pod),
        }
    }

    /// The pods that have reservations, in their order. A pod that is being ungated counts.
    fn placed(&self, known: &Sight<'_>) -> Vec<(Rank, Arc<PodFacts>)> {
        let placed = known.earmarks.all_of(Cause::Reserve).into_iter();
        let placed = placed.filter_map(|uid| {
            let pod = known.books.pod(&uid)?;
            Some((self.standing(pod, true), pod.clone()))
        });
        let mut placed: Vec<_> = placed.collect();
        placed.sort_unstable_by(|(rank, _), (other, _)| rank.cmp(other));
        placed
    }

    /// The nodes to be looked at for a pod: none if the bound is reached by those before it.
    fn nodes_for(&self, sight: &Sight<'_>, uid: &Uid) -> Option<Vec<Arc<str>>> {
        let pod = self.needs_reservation(sight, uid)?;
        let rank = self.standing(&pod, false);
        let mut bound = Bound::of(sight);
        for (other, pod) in self.placed(sight) {
            if other < rank {
                bound.takes(&pod);
            }
        }
        if !bound.takes(&pod) {
            return None;
        }
        // Last, for it is a search.
        let mut budget = Budget::of_look();
        let rest = sight.reserved_with(&pod, &mut budget);
        sight.count_spent(budget.spent());
        let takes_rest = rest?.iter().all(|pod| bound.takes(pod));
        takes_rest.then(|| sight.node_names())
    }

    /// Gives up reservations beyond the bound.
    fn keep_bounds(&mut self, parts: &mut Parts) {
        let mut bound = Bound::of(&parts.sight());
        for (_, pod) in self.placed(&parts.sight()) {
            if !bound.takes(&pod) {
                parts.end(&pod.uid, Ended::Overtaken);
            }
        }
    }

    /// Pods that are gone or have their room are absent no more.
    fn forget_absent(&mut self, parts: &Parts) {
        let has = |uid: &Uid| parts.earmarks.find(uid, Cause::Reserve).is_some();
        self.free.retain(|uid, _| has(uid));
        let waits = |uid: &Uid| {
            let pod = parts.books.pod(uid);
            pod.is_some_and(|pod| pod.node.is_none() && !pod.released)
        };
        self.absent.retain(|uid, _| waits(uid));
    }

    /// All of the reservation is free: for a minute the pod is waited for, then others come first.
    fn wait_for_pod(&mut self, parts: &mut Parts, uid: &Uid) {
        let since = *self.free.entry(uid.clone()).or_insert(parts.now);
        if parts.now < since + FREE_FOR {
            return;
        }
        let absent = self.absent.entry(uid.clone()).or_default();
        let pause = FREE_FOR.saturating_mul(1 << absent.times.min(16));
        absent.until = parts.now + pause.min(LONGEST_PAUSE);
        absent.times += 1;
        parts.end(uid, Ended::Late);
    }

    /// Ends reservations of pods that changed, or on nodes that take them no more.
    fn end_unfit_reservations(&mut self, parts: &mut Parts) {
        for uid in parts.earmarks.all_of(Cause::Reserve) {
            let sight = parts.sight();
            let Some(earmark) = sight.reservation(&uid) else {
                continue;
            };
            let (name, cards) = (earmark.node(), earmark.cards());
            let Some(pod) = parts.books.pod(&uid).filter(|pod| pod.may_be_placed()) else {
                parts.end(&uid, Ended::Gone);
                continue;
            };
            let fits = || {
                let request = pod.asks.request().filter(|it| earmark.is_for(it))?;
                let node = parts.books.node(name)?;
                sight.check(name).ok()?;
                sight.admits(name, node, pod, request).then_some(())?;
                let charges = node.charges(cards);
                let good = |&(card, mib): &(usize, Mib)| {
                    let card = node.view().cards.get(card);
                    card.is_some_and(|card| card.usable && card.capacity >= mib)
                };
                let all = charges.len() == cards.len() && charges.iter().all(good);
                all.then_some((node, charges))
            };
            let Some((node, charges)) = fits() else {
                parts.end(&uid, Ended::Unfit);
                continue;
            };
            // As it comes nearer it is waited for as long again.
            let ends = sight.ends(name, node, pod, &charges);
            if ends.are_over() && !sight.is_awaited_by_gang(pod) {
                self.wait_for_pod(parts, &uid);
            } else {
                self.free.swap_remove(&uid);
                let nearer = ends.are_over() || ends.pods.len() < earmark.waits_for().len();
                let until = nearer.then_some(parts.now + parts.config.reserve_give_up_after);
                parts.earmarks.reservation_nearer(&uid, ends.pods, until);
            }
        }
    }

    /// Gives up one reservation for a better one; each round is for another pod.
    fn compare(&mut self, parts: &mut Parts) {
        if self.compared.is_over() {
            self.compared = Round::of(parts.earmarks.next_reservation().into_iter().collect());
        }
        let (mut budget, sight) = (Budget::of_round(), parts.sight());
        let found = self.compared.go_on(
            &mut budget,
            |uid| {
                let here = sight.reservation(uid)?.node();
                let mut others = sight.node_names();
                others.retain(|name| name != here);
                Some(others)
            },
            |it, budget| match sight.books.pod(it.uid) {
                Some(pod) => Offer::of(sight.place_on_node(pod, it.node, budget)),
                None => Offer::Nothing,
            },
        );
        sight.count_spent(budget.spent());
        if let Some((uid, Offer::Plan(plan))) = found
            && let Some(earmark) = parts.earmarks.find(&uid, Cause::Reserve)
            && *earmark.node() != plan.node
            && plan.overtakes.is_empty()
            && plan.waits_for.len() < earmark.waits_for().len()
        {
            parts.end(&uid, Ended::Better);
            parts.pursue(&uid, Cause::Reserve, plan);
        }
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
    fn of(known: &Sight<'_>) -> Self {
        let gpus = known.books.nodes().map(|(_, node)| node.gpus().len());
        Self {
            pods: known.config.reserve_max,
            cards: gpus.sum::<usize>() * known.config.reserve_max_percent / 100,
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

impl<'k> Sight<'k> {
    /// The pod's reservation, unless the pod holds memory: then the reservation only outlasts the offer until the bind.
    pub(super) fn reservation(&self, uid: &str) -> Option<&'k Earmark> {
        let open = self.books.assumed(uid).is_none();
        open.then(|| self.earmarks.find(uid, Cause::Reserve))?
    }

    /// The node on which the fewest pods must finish, and these pods.
    pub fn plan_reserve(&self, pod: &PodFacts, budget: &mut Budget) -> Option<Makes> {
        let nodes = self.books.nodes();
        best(nodes.filter_map(|(name, _)| self.place_on_node(pod, name, budget)))
    }

    /// The other pods for which GPUs are to be reserved together with this one; none if its gang fits. Nothing is reserved for
    /// a part of a gang where a bound leaves too little for the rest, or where the rest does not exist.
    fn reserved_with(&self, pod: &PodFacts, budget: &mut Budget) -> Option<Vec<Arc<PodFacts>>> {
        let Some((open, wanted)) = self.open_of_gang(pod) else {
            return Some(Vec::new());
        };
        if open.len() < wanted || self.has_seats(pod, budget) {
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
