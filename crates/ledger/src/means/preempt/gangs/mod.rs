//! Preemption for gangs. kube-scheduler's own calls no extender for them, so that the victims are chosen here, for the whole
//! gang at once ([`victims`]): they finish together or not at all. The room of each of its pods is earmarked, all of it with
//! one deadline.

mod holds;
mod victims;
mod waits;

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Group, PodFacts};

use super::Preempt;
use crate::books::Uid;
use crate::budget::Budget;
use crate::earmarks::{Cause, Earmark, Ended};
use crate::gangs::{FORGOTTEN, Roll};
use crate::known::Known;
use crate::means::{Broken, Reserved};
use crate::parts::Parts;
use crate::turn::Turn;
use victims::{Found, Hunt, Plan, is_too_large};
use waits::Wait;
pub(super) use waits::Waits;

/// So long a gang must have waited: kube-scheduler had its chance.
const CHANCE: Duration = Duration::from_secs(1);
/// A gang for which disruption budgets allow no plan rests for so long.
const REST: Duration = Duration::from_secs(5);
/// A search that is not gone on with for so long is forgotten.
const IDLE: Duration = Duration::from_secs(10);
/// Groups that one look sees.
const GROUPS: usize = 256;

impl Preempt {
    /// A pod of the gang for which victims are to be chosen now. One gang is looked at, each in turn.
    pub(crate) fn gang_that_may_preempt(&mut self, parts: &mut Parts) -> Option<Arc<PodFacts>> {
        let mut budget = Budget::of_look();
        let due = self.goes_on_to_preempt(parts, &mut budget);
        parts.count_spent(budget.spent());
        due
    }

    fn goes_on_to_preempt(
        &mut self,
        parts: &mut Parts,
        budget: &mut Budget,
    ) -> Option<Arc<PodFacts>> {
        let second = self.gangs.second.take();
        let second = second.filter(|(_, at)| parts.now.saturating_sub(*at) < IDLE);
        if let Some((hunt, at)) = second
            && let Some(roll) = parts.sight().waiting_gang(&hunt.gang, budget)
        {
            self.gangs.second = Some((hunt, at));
            return roll.open().first().cloned();
        }
        let under_way = self.gangs.first.take().and_then(|hunt| {
            let roll = parts.sight().waiting_gang(&hunt.gang, budget)?;
            Some((hunt, roll))
        });
        let (mut hunt, roll) = match under_way {
            Some(under_way) => under_way,
            None => {
                let (gang, roll) = self.next_waiting_gang(parts, budget)?;
                (Hunt::of(&gang, &parts.sight()), roll)
            }
        };
        if is_too_large(&roll) {
            let first = roll.open().first();
            parts.cut.extend(first.map(|pod| pod.uid.clone()));
            return None;
        }
        let none: Broken<'_> = &|_| Vec::new();
        let found = parts.sight().victims_for(&mut hunt, &roll, none, budget);
        let first = roll.open().first()?;
        match found {
            Found::Plan(_) => {
                let second = Hunt::of(&hunt.gang, &parts.sight());
                self.gangs.second = Some((second, parts.now));
                return Some(first.clone());
            }
            Found::GoesOn => self.gangs.first = Some(hunt),
            Found::Open(open) => parts.ask_for_evidence(&first.uid, open),
            Found::Nothing => {
                parts
                    .cut
                    .extend(hunt.is_cut(&roll).then(|| first.uid.clone()));
                for pod in roll.open() {
                    parts.all_tried(&pod.uid, Cause::Preempt);
                }
            }
        }
        None
    }

    /// The gang that was tried the longest time ago, of those that have waited for long enough.
    fn next_waiting_gang(
        &mut self,
        parts: &mut Parts,
        budget: &mut Budget,
    ) -> Option<(Group, Roll)> {
        let sight = parts.sight();
        let from = match self.gangs.next < sight.books.count_groups() {
            true => self.gangs.next,
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
        self.gangs.next = from + looked_at.max(1);
        parts.count_spent(walk.spent());
        let known = &mut self.gangs.gangs;
        known.retain(|_, wait| parts.now.saturating_sub(wait.seen) < FORGOTTEN);
        let mut may: Vec<_> = Vec::new();
        for (gang, roll) in waits {
            let wait = known.entry(gang.clone()).or_insert(Wait {
                since: parts.now,
                seen: parts.now,
                tried: None,
                rests: Duration::ZERO,
            });
            wait.seen = parts.now;
            if parts.now.saturating_sub(wait.since) >= CHANCE && wait.rests <= parts.now {
                let turn = roll.open().first().map(|pod| Turn::of(pod));
                may.push((wait.tried, turn, gang, roll));
            }
        }
        let (.., gang, roll) = may.into_iter().min_by(|one, other| {
            let key = |it: &(Option<Duration>, Option<Turn>, Group, Roll)| (it.0, it.1.clone());
            key(one).cmp(&key(other))
        })?;
        known.get_mut(&gang)?.tried = Some(parts.now);
        // Not one that fits: it is woken.
        let first = roll.open().first();
        let fits = first.map(|pod| parts.sight().has_seats(pod, budget));
        (fits == Some(false)).then_some((gang, roll))
    }

    /// Chooses who is to finish for the pod's gang, and earmarks the room of all of its pods. None if it is of no gang, or
    /// beyond `minCount`; false if there is no plan.
    pub(crate) fn preempt_for_gang(
        &mut self,
        parts: &mut Parts,
        uid: &str,
        broken: Broken<'_>,
    ) -> Option<bool> {
        let pod = parts.books.pod(uid);
        let pod = pod.filter(|pod| !parts.books.comes_alone(pod))?;
        let gang = parts.books.gang(pod).filter(|gang| gang.is_in_tree())?;
        let gang = gang.clone();
        let mut budget = Budget::of_look();
        let Some(roll) = parts.sight().waiting_gang(&gang, &mut budget) else {
            return Some(false);
        };
        let second = self.gangs.second.take().map(|(hunt, _)| hunt);
        let second = second.filter(|hunt| hunt.gang == gang);
        let mut hunt = second.unwrap_or_else(|| Hunt::of(&gang, &parts.sight()));
        let sight = parts.sight();
        let found = sight.victims_for(&mut hunt, &roll, broken, &mut budget);
        parts.count_spent(budget.spent());
        match found {
            Found::Plan(plan) => {
                parts.earmark_for_gang(&gang, &roll, plan);
                return Some(true);
            }
            Found::GoesOn => self.gangs.second = Some((hunt, parts.now)),
            Found::Open(_) | Found::Nothing => {
                parts.cut.extend(hunt.is_cut(&roll).then(|| uid.into()));
                if let Some(wait) = self.gangs.gangs.get_mut(&gang) {
                    wait.rests = parts.now + REST;
                }
            }
        }
        Some(false)
    }
}

impl Parts {
    fn earmark_for_gang(&mut self, gang: &Group, roll: &Roll, plan: Plan) {
        let victims = plan.victims.iter().map(|pod| pod.uid.clone());
        let ends = plan.leaving.iter().cloned().chain(victims);
        let ends: Vec<Uid> = ends.collect();
        let until = self.now + self.config.reclaim_for + self.sight().grace(&ends);
        let Plan {
            mut seats,
            mut victims,
            ..
        } = plan;
        let mut earmarks = Vec::new();
        for pod in roll.open() {
            let seat = seats.take(&pod.uid).zip(pod.asks.request());
            let Some((seat, request)) = seat else {
                continue;
            };
            let node = seat.node().clone();
            let Some(known) = self.books.node(&node) else {
                continue;
            };
            let cards = known.by_uuid(seat.charges());
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
            self.change(|it, books| it.put(uid, earmark.of_gang(gang), books));
        }
    }

    /// What is earmarked for gangs goes on, or ends for all pods of a gang together.
    pub(crate) fn look_after_gangs(&mut self) {
        for gang in self.earmarks.gangs_with_evictions() {
            for (uid, how) in self.sight().left_gang(&gang) {
                self.end(&uid, how);
            }
            let mut budget = Budget::of_look();
            let how = self.sight().gang_ends(&gang, &mut budget);
            self.count_spent(budget.spent());
            if let Some(how) = how {
                self.end_gang(&gang, how);
            } else if let Some((uid, open)) = self.sight().outdated_for(&gang) {
                self.ask_for_evidence(&uid, open);
            }
        }
    }

    pub(crate) fn end_gang(&mut self, gang: &Group, how: Ended) {
        let all = self.earmarks.evictions_for(gang).into_iter();
        let all: Vec<Uid> = all.map(|(uid, _)| uid.clone()).collect();
        for uid in all {
            self.end(&uid, how);
        }
    }
}

impl Known<'_> {
    /// Who is to finish for the gang now: for each of its pods that is not assumed. All of them finish, or none.
    pub(crate) fn preemptions_of(&self, gang: &Group) -> Vec<Reserved> {
        let mut budget = Budget::of_look();
        let mut victims = match self.outdated_for(gang) {
            Some(_) => Vec::new(),
            None => self.needed_by(gang, &mut budget).unwrap_or_default(),
        };
        self.count_spent(budget.spent());
        let all = self.earmarks.evictions_for(gang).into_iter();
        let all = all.filter(|(uid, _)| self.books.assumed(uid).is_none());
        let all = all.filter_map(|(uid, earmark)| {
            let its = |pod: &mut Arc<PodFacts>| earmark.waits_for().contains(&pod.uid);
            let pod = self.books.pod(uid)?;
            let victims = victims.extract_if(.., its).collect();
            Some(Reserved::of(pod, earmark, victims))
        });
        let mut all: Vec<Reserved> = all.collect();
        if let Some(first) = all.first_mut() {
            first.victims.extend(victims);
        }
        all
    }
}
