//! What was tried for a pod to no avail: others come before it.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;

use super::Queue;
use super::earmarks::{Cause, Earmark};
use crate::books::Uid;
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

impl PreemptedInVain {
    fn note(&mut self, node: Arc<str>, now: Duration) {
        let pause = rest(self.nodes.len());
        if self.nodes.insert(node) {
            self.rests_until = now + pause;
        }
    }
}

/// A controller, by its namespace and UID. It makes a new pod, with a new UID, where one failed: the back-off is its own.
pub(crate) type Controller = (Arc<str>, Uid);

pub(crate) fn controller(pod: &PodFacts) -> Option<Controller> {
    Some((pod.namespace.clone(), pod.controller.clone()?))
}

impl Queue {
    /// What the pod waited for did not come, or was of no use to it. Other GPUs are tried before these. No other pod is
    /// evicted for it on the node again, nor on another before a pause, which doubles each time; the same holds for the
    /// controller's next pod.
    pub(super) fn back_off(&mut self, uid: &str, pod: Option<&PodFacts>, earmark: &Earmark) {
        match earmark.cause() {
            Cause::Reclaim | Cause::Reserve => {
                let cards = earmark.cards().iter();
                let cards = cards.map(|(card, _)| card.clone());
                let in_vain = self.in_vain.entry(uid.into()).or_default();
                in_vain.cards.extend(cards);
            }
            Cause::Preempt | Cause::Defragment => {
                let it = self.preempted_in_vain.entry(uid.into()).or_default();
                it.note(earmark.node().clone(), self.now);
                if let Some(controller) = pod.and_then(controller) {
                    let it = self.controllers_in_vain.entry(controller).or_default();
                    it.note(earmark.node().clone(), self.now);
                }
            }
            Cause::Nominated | Cause::Ungated | Cause::Replacement => {}
        }
    }

    /// A pod is gone, or is being deleted, before it had the room that others were to leave to it: its controller may
    /// make another at once, which would have others end, and so on.
    pub(super) fn beneficiary_lost(&mut self, old: Option<&PodFacts>, new: Option<&PodFacts>) {
        let is_lost = new.is_none_or(|pod| pod.released || pod.deleting);
        let Some(old) = old.filter(|old| is_lost && old.node.is_none()) else {
            return;
        };
        if let Some(earmark) = self.eviction_for(&old.uid)
            && let Some(controller) = controller(old)
        {
            let (node, until) = (earmark.node().clone(), earmark.until());
            let it = self.controllers_in_vain.entry(controller).or_default();
            it.note(node, until);
        }
    }

    /// Forgets controllers whose pauses have been over for as long as a pause may be.
    pub(crate) fn forget_controllers(&mut self, now: Duration) {
        self.controllers_in_vain
            .retain(|_, it| it.rests_until + LONGEST_REST > now);
    }

    fn in_vain_for<'s>(
        &'s self,
        pod: &PodFacts,
    ) -> impl Iterator<Item = &'s PreemptedInVain> + use<'s> {
        let own = self.preempted_in_vain.get(&pod.uid);
        let controller = controller(pod);
        let earlier = controller.and_then(|it| self.controllers_in_vain.get(&it));
        own.into_iter().chain(earlier)
    }

    /// Did others end, or should have, on this node for the pod in vain?
    pub(crate) fn was_preempted_in_vain(&self, pod: &PodFacts, node: &str) -> bool {
        self.in_vain_for(pod).any(|it| it.nodes.contains(node))
    }

    /// Did others end for the pod without use so lately that no other ends or moves for it now?
    pub(crate) fn rests_from_ends(&self, pod: &PodFacts, now: Duration) -> bool {
        self.in_vain_for(pod).any(|it| it.rests_until > now)
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
