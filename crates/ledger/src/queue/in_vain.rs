//! What was tried for a pod to no avail: others come before it.

use std::sync::Arc;
use std::time::Duration;

use super::Queue;
use super::kept::CalledBack;
use crate::books::{Books, Uid};
use crate::maps::HashSet;

/// Between two rounds of calling memory back, keeping a place, or having others end, for one pod in vain: at first, and
/// at most.
const REST: Duration = Duration::from_secs(60);
const LONGEST_REST: Duration = Duration::from_secs(960);

/// The pause after so many others.
fn rest(earlier: usize) -> Duration {
    REST.saturating_mul(1 << earlier.min(16)).min(LONGEST_REST)
}

/// Cards whose memory was called back or kept for a pod and did not come.
#[derive(Debug, Default)]
pub(super) struct InVain {
    cards: HashSet<Box<str>>,
    /// How often all had been tried.
    rounds: usize,
    rests_until: Option<Duration>,
}

/// Nodes where others ended for a pod, or should have, to no avail.
#[derive(Debug, Default)]
pub(super) struct PreemptedInVain {
    nodes: HashSet<Arc<str>>,
    rests_until: Duration,
}

impl Queue {
    /// What others were to leave to the pod did not come, or was of no use to it: nobody ends for it on this
    /// node again, nor on another before a pause, which doubles each time.
    pub(crate) fn ended_in_vain(&mut self, uid: &Uid, books: &Books, now: Duration) {
        if let Some((node, _)) = self.scattered(uid) {
            let node = node.clone();
            let it = self.preempted_in_vain.entry(uid.clone()).or_default();
            it.rests_until = now + rest(it.nodes.len());
            it.nodes.insert(node);
        }
        self.end_kept(uid, books);
    }

    /// Did others end, or should have, on this node for the pod in vain?
    pub(crate) fn was_preempted_in_vain(&self, uid: &str, node: &str) -> bool {
        let it = self.preempted_in_vain.get(uid);
        it.is_some_and(|it| it.nodes.contains(node))
    }

    /// Did others end for the pod in vain so lately that nobody ends or moves for it now?
    pub(crate) fn rests_from_ends(&self, uid: &str, now: Duration) -> bool {
        let it = self.preempted_in_vain.get(uid);
        it.is_some_and(|it| it.rests_until > now)
    }

    pub(super) fn note_in_vain(&mut self, uid: &Uid, what: &CalledBack) {
        let cards = what.cards().iter().map(|(card, _)| card.clone());
        let in_vain = self.in_vain.entry(uid.clone()).or_default();
        in_vain.cards.extend(cards);
    }

    /// Was this card's memory called back or kept for the pod in vain?
    pub(crate) fn was_in_vain(&self, uid: &str, card: &str) -> bool {
        let in_vain = self.in_vain.get(uid);
        in_vain.is_some_and(|it| it.cards.contains(card))
    }

    /// No card is left to be tried for the pod: all of them may be again, after a pause in which nothing is kept for
    /// it and others take what there is. The pause doubles with each round.
    pub(crate) fn call_all_again(&mut self, uid: &str, now: Duration) {
        let Some(it) = self.in_vain.get_mut(uid) else {
            return;
        };
        match it.rests_until {
            Some(until) if until > now => {}
            Some(_) => {
                it.rests_until = None;
                it.cards.clear();
            }
            None if it.cards.is_empty() => {}
            None => {
                it.rests_until = Some(now + rest(it.rounds));
                it.rounds += 1;
            }
        }
    }
}
