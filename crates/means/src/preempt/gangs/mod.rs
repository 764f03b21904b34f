//! Preemption for gangs. kube-scheduler's own calls no extender for them, so that the victims are chosen here, for the whole
//! gang at once ([`victims`]): they finish together or not at all. The room of each of its pods is earmarked, all of it with
//! one deadline.

mod holds;
mod victims;
mod waits;

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Group, PodFacts};
use gpustow_books::{Budget, Cause, Earmark, Ended, Turn, Uid};

use super::Preempt;
use crate::demand::Reserved;
use crate::gangs::{FORGOTTEN, Roll};
use crate::parts::Parts;
use crate::sight::Sight;
use victims::{Found, Hunt, Plan, is_too_large};
use waits::Wait;
pub(super) use waits::Waits;

/// So long a gang must have waited: kube-scheduler had its chance.
const CHANCE: Duration = Duration::from_secs(1);
/// Groups that one look sees.
const GROUPS: usize = 256;

impl Preempt {
    /// Goes on with the search for victims for a gang, each in turn, and earmarks the room of all of its pods.
    pub(super) fn search_for_gang(&mut self, parts: &mut Parts) {
        let mut budget = Budget::of_look();
        let under_way = self.gangs.hunt.take().and_then(|hunt| {
            let roll = parts.sight().waiting_gang(&hunt.gang, &mut budget)?;
            Some((hunt, roll))
        });
        let begun = under_way.or_else(|| {
            let (gang, roll) = self.next_waiting_gang(parts, &mut budget)?;
            Some((Hunt::of(&gang, &parts.sight()), roll))
        });
        if let Some((hunt, roll)) = begun {
            self.go_on_for_gang(parts, hunt, &roll, &mut budget);
        }
        parts.count_spent(budget.spent());
    }

    fn go_on_for_gang(
        &mut self,
        parts: &mut Parts,
        mut hunt: Hunt,
        roll: &Roll,
        budget: &mut Budget,
    ) {
        let Some(first) = roll.open().first() else {
            return;
        };
        if is_too_large(roll) {
            return parts.cut.push(first.uid.clone());
        }
        match parts.sight().victims_for(&mut hunt, roll, budget) {
            Found::Plan(plan) => parts.earmark_for_gang(&hunt.gang, roll, plan),
            Found::GoesOn => self.gangs.hunt = Some(hunt),
            Found::Open(open) => parts.ask_for_evidence(&first.uid, open),
            Found::Nothing => {
                parts
                    .cut
                    .extend(hunt.is_cut(roll).then(|| first.uid.clone()));
                for pod in roll.open() {
                    parts.all_tried(&pod.uid, Cause::Preempt);
                }
            }
        }
    }

    /// Of the gangs that have waited for the minimum time, the gang whose last try is the oldest.
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
            });
            wait.seen = parts.now;
            if parts.now.saturating_sub(wait.since) >= CHANCE {
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
        // Victims that finish together with others, on nodes that do not get a pod of the gang.
        if let Some((.., first)) = earmarks.first_mut() {
            first.extend(victims.iter().map(|pod| pod.uid.clone()));
        }
        for (uid, node, request, cards, victims) in earmarks {
            let earmark = Earmark::of_cards(&node, Cause::Preempt, request, cards, victims, until);
            self.change(|it, books| it.put(uid, earmark.of_gang(gang), books));
        }
    }

    /// Continues the earmarks of gangs, or ends them for all pods of a gang together.
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

    /// Ends the earmarks of the gang.
    pub fn end_gang(&mut self, gang: &Group, how: Ended) {
        let all = self.earmarks.evictions_for(gang).into_iter();
        let all: Vec<Uid> = all.map(|(uid, _)| uid.clone()).collect();
        for uid in all {
            self.end(&uid, how);
        }
    }
}

impl Sight<'_> {
    /// Who is to finish for the gang now: for each of its pods that is not assumed. All of them finish, or none.
    pub fn preemptions_of(&self, gang: &Group) -> Vec<Reserved> {
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
