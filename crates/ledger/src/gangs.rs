//! Gangs: pods of a PodGroup of which kube-scheduler binds `minCount` at the same time, or none.
//!
//! kube-scheduler asks about the pods of a gang one after the other, in one *cycle*, and no call says that it has given
//! the gang up. So a cycle ends here when a pod is asked about that this cycle has had, or when too few of the gang are
//! left to reach `minCount`: then nothing is held for any of them, nor for those that it still asks about. The first call
//! of a cycle plans for all pods that are known ([`plan`]); if too few fit, it is refused, and nothing is held at all.
//!
//! kube-scheduler's preemption for a gang calls no extender. So the victims are chosen here, for the whole gang at once
//! ([`victims`]): they finish together or not at all. The room of each of its pods is earmarked, all of it with one deadline.

mod cycle;
mod plan;
mod preempt;
mod roll;
mod rules;
mod search;
mod shortfall;
mod victims;
mod view;
mod waits;

use std::iter;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Group, PodFacts};

use crate::books::Uid;
use crate::budget::Budget;
use crate::decide::refuse_all;
use crate::earmarks::{Cause, Earmark, Ended};
use crate::evidence::NodeSet;
use crate::fragmented::Broken;
use crate::turn::Turn;
use crate::{Ask, Filtered, Ledger, Reason, Reserved};
pub(crate) use cycle::Cycles;
use plan::Member;
pub(crate) use plan::{Seat, Seats};
use roll::Roll;
pub use shortfall::{Extent, MOST_PODS, Shortfall};
use victims::{Found, Hunt, Plan, is_too_large};
pub use view::{GangView, Standing};
use waits::Wait;
pub(crate) use waits::Waits;

/// A cycle is forgotten when nothing was heard of its gang for so long, and a gang that was not seen to wait.
const FORGOTTEN: Duration = Duration::from_secs(60);
/// So long a gang must have waited: kube-scheduler had its chance.
const CHANCE: Duration = Duration::from_secs(1);
/// A gang for which disruption budgets allow no plan rests for so long.
const REST: Duration = Duration::from_secs(5);
/// A search that is not gone on with for so long is forgotten.
const IDLE: Duration = Duration::from_secs(10);
/// Groups that one look sees.
const GROUPS: usize = 256;

impl Ledger {
    /// A filter call about a pod begins, and so perhaps a cycle of its gang.
    pub(crate) fn begin_member(&mut self, pod: &PodFacts, now: Duration) {
        let Some(gang) = self.parts.books.gang(pod).filter(|gang| gang.is_in_tree()) else {
            return;
        };
        if self.gangs.ask(gang, &pod.uid, now) {
            let change = self.parts.books.release_group(gang);
            self.follow(change);
        }
    }

    /// Where the pod of a gang is to go among these nodes, so that enough of the others fit; none if that does not matter.
    ///
    /// # Errors
    /// If too few fit.
    pub(crate) fn seat(
        &mut self,
        ask: &Ask<'_>,
        candidates: &[&str],
        now: Duration,
    ) -> Result<Option<Seat>, Shortfall> {
        let pod = ask.pod;
        let Some(gang) = self.parts.books.gang(pod).filter(|gang| gang.is_in_tree()) else {
            return Ok(None);
        };
        let Some(roll) = self
            .sight(now)
            .roll(gang, Some(pod), self.gangs.asked(gang))
        else {
            return Ok(None);
        };
        if let Some(shortfall) = self.gangs.given_up(gang) {
            return Err(shortfall.clone());
        }
        let wanted = roll.wanted().min(roll.open.len());
        if wanted == 0 {
            return Ok(None);
        }
        let tried = self.parts.shown.tried(&pod.uid);
        if let Some(seat) = self.gangs.take_seat(gang, &pod.uid)
            && candidates.contains(&&*seat.node)
            && tried.is_none_or(|tried| !tried.has(&seat.node))
            && self.sight(now).is_free(&seat, pod)
        {
            return Ok(Some(seat));
        }
        let nodes = self.best_nodes(ask, candidates, now);
        let sight = self.sight(now);
        let others = || roll.open.iter().filter(|it| it.uid != pod.uid);
        let plan_for = |nodes: Vec<Arc<str>>, heeds: bool| {
            let others = others().map(|it| Member::anywhere(it).heeding(heeds));
            let members = iter::once(Member::among(pod, nodes)).chain(others);
            sight.seats(members.collect(), wanted, &mut Budget::all())
        };
        let plan = |nodes: Vec<Arc<str>>| {
            let heeding = plan_for(nodes.clone(), true);
            let rejects = || others().any(|it| sight.passed(it).is_some());
            // What kube-scheduler has rejected may have changed: a plan that does not heed it is better than none.
            match heeding.count >= wanted || !rejects() {
                true => heeding,
                false => plan_for(nodes, false),
            }
        };
        // A node where the pod's bind was refused is for when no other will do.
        let untried = self.parts.shown.tried(&pod.uid).map(|tried| {
            let untried = nodes.iter().filter(|name| !tried.has(name));
            untried.cloned().collect::<Vec<_>>()
        });
        let untried = untried.filter(|it| !it.is_empty() && it.len() < nodes.len());
        let first = untried
            .map(&plan)
            .filter(|it| it.count >= wanted && it.seats.contains_key(&pod.uid));
        let found = first.unwrap_or_else(|| plan(nodes));
        let shortfall = roll.shortfall_of(gang, &found);
        let Seats {
            mut seats,
            count,
            is_cut,
            ..
        } = found;
        if count < wanted {
            self.end_cycle(gang, Some(shortfall.clone()));
            return Err(shortfall);
        }
        let own = seats.swap_remove(&pod.uid);
        self.gangs.keep_seats(gang, seats);
        let sight = self.sight(now);
        let fits = |name: &&str| sight.may_fit(name, pod) && sight.choose(name, pod).is_ok();
        // The others need the room, unless the search did not come to this one.
        match own.is_none() && !is_cut && candidates.iter().any(fits) {
            true => Err(shortfall),
            false => Ok(own),
        }
    }

    /// The gang of a pod that has no node, if it is in one that a PodGroup describes or should.
    #[must_use]
    pub fn gang(&self, pod: &PodFacts, now: Duration) -> Option<GangView> {
        self.sight(now).gang_view(pod)
    }

    /// The candidates that would do, best first.
    fn best_nodes(&mut self, ask: &Ask<'_>, candidates: &[&str], now: Duration) -> Vec<Arc<str>> {
        let pod = ask.pod;
        let Some(request) = pod.asks.request() else {
            return Vec::new();
        };
        let class = self.parts.scores.class(request, candidates.len());
        let mut budget = Budget::of(&self.parts.config);
        let tried = self.parts.shown.tried(&pod.uid).cloned();
        let behind = self.parts.queue.is_behind_queued(pod);
        let mut found = Vec::new();
        for &name in candidates {
            let first = self.sight(now).goes_first(pod, name);
            if behind && self.wakes.is_for_queued(name, &self.parts.queue) && !first {
                continue;
            }
            let Some(slot) = self.parts.scores.slot(name) else {
                continue;
            };
            if let Ok((cost, tainted)) = self.cost(slot, name, pod, class, now, &mut budget) {
                let averse = self.sight(now).is_averse(name, tainted, ask.tolerates);
                let tried = tried.as_ref().is_some_and(|tried| tried.has(name));
                found.push((!first, tried, averse, cost, name));
            }
        }
        found.sort_unstable();
        let names = found.into_iter().map(|(.., name)| name);
        let known = names.filter_map(|name| self.parts.books.named_node(name));
        known.map(|(name, _)| name.clone()).collect()
    }

    /// The gang is given up for this cycle: it holds nothing.
    fn end_cycle(&mut self, gang: &Group, shortfall: Option<Shortfall>) {
        self.gangs.give_up(gang, shortfall);
        let change = self.parts.books.release_group(gang);
        self.follow(change);
    }

    /// Refuses a pod because too few of its gang fit.
    pub(crate) fn refuse_gang<'a>(
        &mut self,
        pod: &PodFacts,
        candidates: &[&'a str],
        shortfall: Shortfall,
        now: Duration,
    ) -> Filtered<'a> {
        let mut offered = NodeSet::default();
        let slots = candidates
            .iter()
            .filter_map(|name| self.parts.scores.slot(name));
        slots.for_each(|slot| offered.insert(slot));
        self.note_offered(pod, offered, candidates.len(), now);
        self.wait_refused(pod, candidates, now);
        self.parts.queue.is_short(&pod.uid);
        Filtered {
            shortfall: Some(shortfall),
            ..refuse_all(candidates, Reason::Gang)
        }
    }

    /// A pod was refused. The others of its group are not scheduled without it, unless enough of them are left.
    pub(crate) fn member_refused(&mut self, pod: &PodFacts) {
        let Some(gang) = self.parts.books.gang(pod).cloned() else {
            return;
        };
        let roll = self
            .sight(Duration::ZERO)
            .roll(&gang, None, self.gangs.asked(&gang));
        match roll {
            Some(roll) if gang.is_in_tree() && roll.wanted() <= roll.open.len() => {}
            roll => self.end_cycle(&gang, roll.map(|it| it.shortfall(&gang, it.open.len()))),
        }
    }

    /// How long a pod that is given room holds it. What the rest of its gang holds lasts as long.
    pub(crate) fn hold_gang(&mut self, pod: &PodFacts, now: Duration) -> Duration {
        let Some(gang) = self.parts.books.gang(pod).filter(|gang| gang.is_in_tree()) else {
            return self.parts.config.reservation_ttl;
        };
        let hold = self.gangs.hold(gang);
        for uid in self.parts.books.assumed_of(gang) {
            self.parts.books.hold_until(&uid, now + hold);
        }
        hold
    }

    /// kube-scheduler binds a pod of a gang: all of them have passed, and their binds are coming.
    pub(crate) fn gang_binds(&mut self, pod: &PodFacts, now: Duration) {
        let Some(gang) = self.parts.books.gang(pod).filter(|gang| gang.is_in_tree()) else {
            return;
        };
        if self.gangs.bind(gang) {
            for uid in self.parts.books.assumed_of(gang) {
                let until = now + self.parts.config.reservation_ttl;
                self.parts.books.hold_until(&uid, until);
            }
        }
    }
}

/// Preemption for gangs.
impl Ledger {
    /// A pod of the gang for which it is to be decided now who finishes. One gang is looked at, each in turn.
    pub(crate) fn gang_that_may_preempt(&mut self, now: Duration) -> Option<Arc<PodFacts>> {
        let mut budget = Budget::of_look();
        let due = self.goes_on_to_preempt(&mut budget, now);
        self.parts.count_spent(budget.spent());
        due
    }

    fn goes_on_to_preempt(&mut self, budget: &mut Budget, now: Duration) -> Option<Arc<PodFacts>> {
        let second = self.waits.second.take();
        let second = second.filter(|(_, at)| now.saturating_sub(*at) < IDLE);
        if let Some((hunt, at)) = second
            && let Some(roll) = self.sight(now).waiting_gang(&hunt.gang, budget)
        {
            self.waits.second = Some((hunt, at));
            return roll.open.first().cloned();
        }
        let under_way = self.waits.first.take().and_then(|hunt| {
            let roll = self.sight(now).waiting_gang(&hunt.gang, budget)?;
            Some((hunt, roll))
        });
        let (mut hunt, roll) = match under_way {
            Some(under_way) => under_way,
            None => {
                let (gang, roll) = self.next_waiting_gang(budget, now)?;
                (Hunt::of(&gang, &self.sight(now)), roll)
            }
        };
        if is_too_large(&roll) {
            let first = roll.open.first();
            self.waits.cut.extend(first.map(|pod| pod.uid.clone()));
            return None;
        }
        let none: Broken<'_> = &|_| Vec::new();
        let found = self.sight(now).victims_for(&mut hunt, &roll, none, budget);
        let first = roll.open.first()?;
        match found {
            Found::Plan(_) => {
                let second = Hunt::of(&hunt.gang, &self.sight(now));
                self.waits.second = Some((second, now));
                return Some(first.clone());
            }
            Found::GoesOn => self.waits.first = Some(hunt),
            Found::Open(open) => self.parts.ask_for_evidence(&first.uid, open, now),
            Found::Nothing => {
                self.waits
                    .cut
                    .extend(hunt.is_cut(&roll).then(|| first.uid.clone()));
                for pod in &roll.open {
                    self.parts.earmarks.all_tried(pod, Cause::Preempt, now);
                }
            }
        }
        None
    }

    /// The gang that was tried the longest time ago, of those that have waited for long enough.
    fn next_waiting_gang(&mut self, budget: &mut Budget, now: Duration) -> Option<(Group, Roll)> {
        let sight = self.sight(now);
        let from = match self.waits.next < sight.books.count_groups() {
            true => self.waits.next,
            false => 0,
        };
        let (mut waits, mut looked_at, mut walk) = (Vec::new(), 0, Budget::of_look());
        for gang in sight.books.gangs_from(from).take(GROUPS) {
            if walk.is_spent() {
                break;
            }
            looked_at += 1;
            waits.extend(Some(gang.clone()).zip(sight.waiting_gang(gang, &mut walk)));
        }
        self.waits.next = from + looked_at.max(1);
        self.parts.count_spent(walk.spent());
        let known = &mut self.waits.gangs;
        known.retain(|_, wait| now.saturating_sub(wait.seen) < FORGOTTEN);
        let mut may: Vec<_> = Vec::new();
        for (gang, roll) in waits {
            let wait = known.entry(gang.clone()).or_insert(Wait {
                since: now,
                seen: now,
                tried: None,
                rests: Duration::ZERO,
            });
            wait.seen = now;
            if now.saturating_sub(wait.since) >= CHANCE && wait.rests <= now {
                let turn = roll.open.first().map(|pod| Turn::of(pod));
                may.push((wait.tried, turn, gang, roll));
            }
        }
        let (.., gang, roll) = may.into_iter().min_by(|one, other| {
            let key = |it: &(Option<Duration>, Option<Turn>, Group, Roll)| (it.0, it.1.clone());
            key(one).cmp(&key(other))
        })?;
        known.get_mut(&gang)?.tried = Some(now);
        // Not one that fits: it is woken.
        let first = roll.open.first();
        let fits = first.map(|pod| self.sight(now).has_seats(pod, budget));
        (fits == Some(false)).then_some((gang, roll))
    }

    /// Chooses who is to finish for the pod's gang, and earmarks the room of all of its pods. None if it is of no gang, or
    /// beyond `minCount`; false if there is no plan.
    pub(crate) fn preempt_for_gang(
        &mut self,
        uid: &str,
        broken: Broken<'_>,
        now: Duration,
    ) -> Option<bool> {
        let pod = self.parts.books.pod(uid);
        let pod = pod.filter(|pod| !self.parts.books.comes_alone(pod))?;
        let gang = self
            .parts
            .books
            .gang(pod)
            .filter(|gang| gang.is_in_tree())?;
        let gang = gang.clone();
        let mut budget = Budget::of_look();
        let Some(roll) = self.sight(now).waiting_gang(&gang, &mut budget) else {
            return Some(false);
        };
        let second = self.waits.second.take().map(|(hunt, _)| hunt);
        let second = second.filter(|hunt| hunt.gang == gang);
        let mut hunt = second.unwrap_or_else(|| Hunt::of(&gang, &self.sight(now)));
        let sight = self.sight(now);
        let found = sight.victims_for(&mut hunt, &roll, broken, &mut budget);
        self.parts.count_spent(budget.spent());
        match found {
            Found::Plan(plan) => {
                self.earmark_for_gang(&gang, &roll, plan, now);
                return Some(true);
            }
            Found::GoesOn => self.waits.second = Some((hunt, now)),
            Found::Open(_) | Found::Nothing => {
                self.waits
                    .cut
                    .extend(hunt.is_cut(&roll).then(|| uid.into()));
                if let Some(wait) = self.waits.gangs.get_mut(&gang) {
                    wait.rests = now + REST;
                }
            }
        }
        Some(false)
    }

    fn earmark_for_gang(&mut self, gang: &Group, roll: &Roll, plan: Plan, now: Duration) {
        let victims = plan.victims.iter().map(|pod| pod.uid.clone());
        let ends = plan.leaving.iter().cloned().chain(victims);
        let ends: Vec<Uid> = ends.collect();
        let until = now + self.parts.config.reclaim_for + self.sight(now).grace(&ends);
        let Plan {
            seats, mut victims, ..
        } = plan;
        let mut seats = seats.seats;
        let mut earmarks = Vec::new();
        for pod in &roll.open {
            let seat = seats.swap_remove(&pod.uid);
            let (Some(Seat { node, choice }), Some(request)) = (seat, pod.asks.request()) else {
                continue;
            };
            let Some(known) = self.parts.books.node(&node) else {
                continue;
            };
            let cards = known.by_uuid(&choice.placement.charges);
            let here = victims.extract_if(.., |it| it.node.as_ref() == Some(&node));
            let here: Vec<Uid> = here.map(|it| it.uid.clone()).collect();
            earmarks.push((&pod.uid, node, request, cards, here));
        }
        // Those that finish beside others on nodes where no pod of the gang goes.
        if let Some((.., first)) = earmarks.first_mut() {
            first.extend(victims.iter().map(|pod| pod.uid.clone()));
        }
        for (uid, node, request, cards, victims) in earmarks {
            let earmark = Earmark::of_cards(&node, Cause::Preempt, request, cards, victims, until);
            self.parts
                .change(|it, books| it.put(uid, earmark.of_gang(gang), books));
        }
    }

    /// Who is to finish for the gang now: for each of its pods that is not assumed. All of them finish, or none.
    #[must_use]
    pub fn preemptions_of(&self, gang: &Group, now: Duration) -> Vec<Reserved> {
        let sight = self.sight(now);
        let mut budget = Budget::of_look();
        let mut victims = match sight.outdated_for(gang) {
            Some(_) => Vec::new(),
            None => sight.needed_by(gang, &mut budget).unwrap_or_default(),
        };
        self.parts.count_spent(budget.spent());
        let all = self.parts.earmarks.evictions_for(gang).into_iter();
        let all = all.filter(|(uid, _)| self.parts.books.assumed(uid).is_none());
        let all = all.filter_map(|(uid, earmark)| {
            let its = |pod: &mut Arc<PodFacts>| earmark.waits_for().contains(&pod.uid);
            let pod = self.parts.books.pod(uid)?;
            let victims = victims.extract_if(.., its).collect();
            Some(Reserved::of(pod, earmark, victims))
        });
        let mut all: Vec<Reserved> = all.collect();
        if let Some(first) = all.first_mut() {
            first.victims.extend(victims);
        }
        all
    }

    /// Gives up what is earmarked for a gang: its victims cannot all finish.
    pub fn spare_for_gang(&mut self, gang: &Group) {
        self.end_gang(gang, Ended::Late);
    }

    /// What is earmarked for gangs goes on, or ends for all pods of a gang together.
    pub(crate) fn look_after_gangs(&mut self, now: Duration) {
        for gang in self.parts.earmarks.gangs_with_evictions() {
            for (uid, how) in self.sight(now).left_gang(&gang) {
                self.parts.end(&uid, how);
            }
            let mut budget = Budget::of_look();
            let how = self.sight(now).gang_ends(&gang, &mut budget);
            self.parts.count_spent(budget.spent());
            if let Some(how) = how {
                self.end_gang(&gang, how);
            } else if let Some((uid, open)) = self.sight(now).outdated_for(&gang) {
                self.parts.ask_for_evidence(&uid, open, now);
            }
        }
    }

    fn end_gang(&mut self, gang: &Group, how: Ended) {
        let all = self.parts.earmarks.evictions_for(gang).into_iter();
        let all: Vec<Uid> = all.map(|(uid, _)| uid.clone()).collect();
        for uid in all {
            self.parts.end(&uid, how);
        }
    }
}
