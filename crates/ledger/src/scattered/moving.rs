//! Has pods move for one that waits for memory which is free in pieces ([`super::moves`]): room is kept for it and for the
//! successor of each, until they have come or the time is over. One pod is moved for at a time.

use std::cmp::Reverse;
use std::mem::take;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;

use super::{Broken, KINDS};
use crate::Ledger;
use crate::books::Uid;
use crate::maps::{HashMap, HashSet};
use crate::queue::CalledBack;

/// So long a pod must have waited: what is free may be joined up by itself.
const CHANCE: Duration = Duration::from_secs(5);
/// Between two searches for the same pod.
const REST: Duration = Duration::from_secs(30);
/// Looks at a node that one search may take.
const LOOKS: usize = 20_000;
/// How often a plan is made anew because disruption budgets forbid the one before.
const PLANS: usize = 8;

/// When moves are looked for next, for pods that wait.
#[derive(Debug, Default)]
pub(crate) struct Tries(HashMap<Uid, Duration>);

impl Ledger {
    /// The pod for which it is to be decided now who moves, if there is one: the first in turn. To be called every second
    /// or so.
    pub fn due_to_move(&mut self, now: Duration) -> Option<Arc<PodFacts>> {
        let moving = |uid: &Uid| self.queue.is_moved_for(uid);
        if !self.config.moves || self.queue.all_scattered().iter().any(moving) {
            return None;
        }
        let may = |uid: &str| {
            self.books
                .pod(uid)
                .is_some_and(|pod| self.may_be_moved_for(pod, now))
        };
        let waiting = self.queue.without_more(KINDS, may).into_iter();
        let waiting: Vec<_> = waiting.filter_map(|uid| self.asleep(&uid)).collect();
        let before = take(&mut self.moving.0);
        let next = |uid: &Uid| before.get(uid).copied().unwrap_or(now + CHANCE);
        self.moving.0 = waiting
            .iter()
            .map(|pod| (pod.uid.clone(), next(&pod.uid)))
            .collect();
        let turn = |pod: &Arc<PodFacts>| (Reverse(pod.priority), pod.created, pod.name.clone());
        let due = waiting.into_iter().filter(|pod| next(&pod.uid) <= now);
        let mut due: Vec<_> = due.collect();
        due.sort_by_cached_key(turn);
        due.into_iter().find(|pod| self.waits_for_pieces(pod, now))
    }

    /// Chooses who moves for the pod that [`Ledger::due_to_move`] named, `most` at most and nobody whose end would break
    /// a disruption budget, and keeps the room for it and for their successors. False if there is no such plan.
    pub fn move_for(&mut self, uid: &str, broken: Broken<'_>, most: usize, now: Duration) -> bool {
        if let Some(next) = self.moving.0.get_mut(uid) {
            *next = now + REST;
        }
        let pod = self.books.pod(uid).cloned();
        let may =
            |pod: &Arc<PodFacts>| self.may_be_moved_for(pod, now) && !self.queue.has_kept(uid);
        let Some(pod) = pod.filter(may) else {
            return false;
        };
        let Ok(request) = &pod.request else {
            return false;
        };
        let (mut spared, mut looks) = (HashSet::default(), LOOKS);
        for _ in 0..PLANS {
            let Some(plan) = self.least_moves(&pod, &spared, &mut looks, now) else {
                return false;
            };
            if plan.moves.is_empty() || plan.moves.len() > most {
                return false;
            }
            let pods: Vec<_> = plan.moves.iter().map(|it| it.pod.clone()).collect();
            let forbidden = broken(&pods);
            if !forbidden.is_empty() {
                spared.extend(forbidden);
                continue;
            }
            let victims: Vec<Uid> = pods.iter().map(|pod| pod.uid.clone()).collect();
            let until = now + self.config.call_back_for + self.grace(&victims);
            let what = CalledBack::new(request.clone(), plan.cards, victims);
            self.queue
                .keep_scattered(&pod.uid, &plan.node, what, true, until, &self.books);
            // One may come when the one before it has gone.
            let until = until + self.config.call_back_for;
            for it in plan.moves {
                self.queue
                    .keep_successor(&it.pod, &pod.uid, &it.node, it.cards, until);
            }
            return true;
        }
        false
    }

    /// May others move for this pod at all?
    fn may_be_moved_for(&self, pod: &PodFacts, now: Duration) -> bool {
        (pod.waiting || pod.in_line) && self.may_be_given_room(pod, now)
    }
}
