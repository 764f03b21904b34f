//! Has pods move for one that waits for memory which is free in pieces ([`super::moves`]): room is kept for it and for the
//! successor of each, until they have come or the time is over. One pod is moved for at a time.

use std::mem::take;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;

use super::pieces::{Asked, Asking};
use super::planning::Planning;
use super::{Broken, KINDS, Moves};
use crate::Ledger;
use crate::books::Uid;
use crate::budget::Budget;
use crate::maps::HashMap;
use crate::queue::{Cause, Earmark, Turn};

/// So long a pod must have waited: what is free may be joined up by itself.
const CHANCE: Duration = Duration::from_secs(5);
/// Between two searches for the same pod.
const REST: Duration = Duration::from_secs(30);
/// How often a plan is made anew because disruption budgets forbid the one before.
const PLANS: usize = 8;

/// So long the pod waits for room that others leave, or could be made to leave: what has not come by then evidently does
/// not help.
const PATIENCE: Duration = Duration::from_secs(60);
/// A plan that is not gone on with for so long is forgotten.
const IDLE: Duration = Duration::from_secs(10);

/// What is under way between two looks.
#[derive(Debug, Default)]
pub(crate) struct Tries {
    /// Since when pods have waited, and when moves are looked for next.
    next: HashMap<Uid, (Duration, Duration)>,
    /// Where the next look goes on among the kinds that wait.
    after: Option<Turn>,
    asking: Option<Asking>,
    /// The pod that waits for pieces, and when its plan was gone on with.
    planning: Option<(Planning, usize, Duration)>,
}

impl Ledger {
    /// The pod for which it is to be decided now who moves, if there is one: the first in turn. To be called every second
    /// or so.
    pub fn due_to_move(&mut self, now: Duration) -> Option<Arc<PodFacts>> {
        let moving = |uid: &Uid| self.queue.is_defragmented_for(uid);
        if !self.config.moves || self.queue.all_evictions().iter().any(moving) {
            return None;
        }
        let mut tries = take(&mut self.moving);
        let may = |uid: &str| {
            let pod = self.books.pod(uid);
            pod.is_some_and(|pod| self.may_be_moved_for(pod, now))
                && !self.queue.has_more_than_reservation(uid)
                && self.asleep(uid).is_some()
        };
        tries.next.retain(|uid, _| may(uid));
        let lasts = |at: Duration| now.saturating_sub(at) < IDLE;
        tries.planning = tries
            .planning
            .filter(|(planning, _, at)| may(&planning.uid) && lasts(*at));
        tries.asking = tries.asking.filter(|asking| may(&asking.uid));
        let mut budget = Budget::of_look();
        let mut kinds = KINDS;
        while tries.planning.is_none()
            && let Some(mut asking) = self.next_asking(&mut tries, &mut kinds, &may, now)
        {
            let Some(pod) = self.books.pod(&asking.uid) else {
                continue;
            };
            match self.ask_on(pod, &mut asking, &mut budget, now) {
                Asked::GoesOn => {
                    tries.asking = Some(asking);
                    break;
                }
                Asked::Yes => {
                    let planning =
                        Planning::new(asking.uid, asking.began, self.nodes_to_see(), true);
                    tries.planning = Some((planning, 0, now));
                }
                Asked::No => {}
            }
        }
        self.count_spent(budget.spent());
        let due = tries.planning.as_ref();
        let due = due.and_then(|(planning, ..)| self.books.pod(&planning.uid).cloned());
        self.moving = tries;
        due
    }

    /// The question that is under way, or one for the next kind that is due.
    fn next_asking(
        &self,
        tries: &mut Tries,
        kinds: &mut usize,
        may: &dyn Fn(&str) -> bool,
        now: Duration,
    ) -> Option<Asking> {
        if let Some(asking) = tries.asking.take() {
            return Some(asking);
        }
        while *kinds > 0 {
            *kinds -= 1;
            // At the last kind the look ends, and the next one begins with the first again.
            let uid = self.queue.without_more(&mut tries.after, 1, may).pop()?;
            let first = (now, now + CHANCE);
            let (since, next) = *tries.next.entry(uid.clone()).or_insert(first);
            if next <= now {
                let patient = now.saturating_sub(since) < PATIENCE;
                let began = self.queue.gains();
                return Some(Asking::new(uid, began, self.nodes_to_see(), patient));
            }
        }
        None
    }

    /// Chooses who moves for the pod that [`Ledger::due_to_move`] named, `most` at most and no pod whose end would break
    /// a disruption budget, and keeps the room for it and for their successors. False if there is no such plan, or if the
    /// search goes on: the next look names the pod again.
    pub fn move_for(&mut self, uid: &str, broken: Broken<'_>, most: usize, now: Duration) -> bool {
        let is_it = |planning: &Planning| *planning.uid == *uid;
        let Some((planning, plans, _)) = self.moving.planning.take_if(|(it, ..)| is_it(it)) else {
            return false;
        };
        let began = planning.began;
        let pod = self.books.pod(uid).cloned();
        let may = |pod: &Arc<PodFacts>| {
            self.may_be_moved_for(pod, now) && !self.queue.has_more_than_reservation(uid)
        };
        let Some(pod) = pod.filter(may) else {
            return false;
        };
        let plan = self.least_moves(&pod, (planning, plans), broken, most, now);
        plan.is_some_and(|plan| self.keep_moves(&pod, plan, began, now))
    }

    /// The least moves that no disruption budget forbids; none if there are none, or if the search goes on.
    fn least_moves(
        &mut self,
        pod: &Arc<PodFacts>,
        (mut planning, mut plans): (Planning, usize),
        broken: Broken<'_>,
        most: usize,
        now: Duration,
    ) -> Option<Moves> {
        let mut budget = Budget::of_look();
        while plans < PLANS {
            let before = budget.spent();
            let is_over = self.plan_on(pod, &mut planning, &mut budget, now);
            self.count_spent(budget.spent() - before);
            if !is_over {
                self.moving.planning = Some((planning, plans, now));
                return None;
            }
            let Some(plan) = planning.best.take() else {
                match planning.unknown {
                    true => self.ask_for_evidence(&pod.uid, now),
                    false => self.queue.all_tried(pod, Cause::Defragment, now),
                }
                break;
            };
            let pods: Vec<_> = plan.moves.iter().map(|it| it.pod.clone()).collect();
            let forbidden = broken(&pods);
            if forbidden.is_empty() {
                let may = !pods.is_empty() && pods.len() <= most;
                // Nodes may have changed since they were looked at.
                let holds = !planning.is_long || self.is_plan_still(pod, &plan, now);
                if may && holds {
                    return Some(plan);
                }
                break;
            }
            plans += 1;
            let spared = planning.spared.into_iter().chain(forbidden).collect();
            planning = Planning::new(pod.uid.clone(), planning.began, self.nodes_to_see(), true);
            planning.spared = spared;
        }
        // kube-scheduler answers soon where it was asked to try the pod again.
        let rest = if planning.unknown { CHANCE } else { REST };
        if let Some((_, next)) = self.moving.next.get_mut(&pod.uid) {
            *next = now + rest;
        }
        None
    }

    fn keep_moves(&mut self, pod: &Arc<PodFacts>, plan: Moves, began: u64, now: Duration) -> bool {
        let Ok(request) = &pod.request else {
            return false;
        };
        let victims: Vec<Uid> = plan.moves.iter().map(|it| it.pod.uid.clone()).collect();
        let until = now + self.config.call_back_for + self.grace(&victims);
        let (node, cards) = (&plan.node, plan.cards);
        let earmark = Earmark::of_cards(node, Cause::Defragment, request, cards, victims, until);
        self.queue.put(&pod.uid, earmark, &self.books);
        self.scattered.note_looked(&pod.uid, began);
        // One may come when the one before it has gone.
        let until = until + self.config.call_back_for;
        for it in plan.moves {
            let books = &self.books;
            self.queue
                .keep_successor(&it.pod, &pod.uid, &it.node, it.cards, until, books);
        }
        true
    }

    /// May others move for this pod at all?
    fn may_be_moved_for(&self, pod: &PodFacts, now: Duration) -> bool {
        (pod.waiting || pod.in_line) && self.may_be_given_room(pod, now)
    }
}
