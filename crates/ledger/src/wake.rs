//! Who waits and who is queued, and who of them is to be woken or ungated.

mod gangs;
mod left;
mod offering;
mod preemptors;
mod stalled;
mod waking;

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Group, PodFacts, QueueFrom};
use gpustow_books::{Ended, Event, HashMap, Uid};
use gpustow_pack::Request;
use gpustow_queue::{KindId, Queue, Queued, Ungate, is_sample};

use crate::Ledger;
use gangs::Gangs;
use offering::Offering;
use preemptors::Preemptors;
use waking::Look;

impl Ledger {
    /// The pods to wake now, at most `limit`; a gang that is ungated as a whole counts as one. Queued pods are to be
    /// ungated instead. For room that appeared, the pods that would fit in it together are woken, in the scheduler's
    /// order. Pods that have waited since their last wake-up though they would fit are woken, too.
    pub fn wake(&mut self, limit: usize, now: Duration) -> Vec<Arc<PodFacts>> {
        self.expire(now);
        self.wakes.wake(&mut self.parts, limit)
    }

    /// This pod, which [`Ledger::wake`] named, could not be woken.
    pub fn wake_failed(&mut self, uid: &str) {
        self.parts.queue.wake_failed(uid);
        self.parts
            .change(|earmarks, books| earmarks.end_ungated(uid, Ended::Failed, books));
    }

    /// This pod, which [`Ledger::wake`] named, could not be ungated. Its room goes to another pod, and the ledger tries
    /// again after a pause.
    pub fn ungate_failed(&mut self, uid: &str) {
        self.parts.queue.ungate_failed(uid);
        self.parts
            .change(|earmarks, books| earmarks.end_ungated(uid, Ended::Failed, books));
    }

    /// Did the last [`Ledger::wake`] stop because of its cost?
    #[must_use]
    pub fn wakes_on(&self) -> bool {
        self.wakes.go_on()
    }

    /// Number of pods that were refused, or lost their reservation, and still wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.parts.queue.waiting().len()
    }

    /// The requests of the waiting pods, one entry per pod, and whether the pod waits for others of its gang.
    pub fn waiting_requests(&self) -> impl Iterator<Item = (Arc<Request>, bool)> {
        let mut waits: HashMap<&Group, bool> = HashMap::default();
        self.parts
            .queue
            .waiting()
            .requests()
            .map(move |(uid, request)| {
                let pod = self.parts.books.pod(uid);
                let gang = pod.and_then(|pod| self.parts.books.gang(pod));
                let of_gang = gang.is_some_and(|gang| {
                    let waits = waits.entry(gang);
                    *waits.or_insert_with(|| self.sight(Duration::ZERO).waits_for_others(gang))
                });
                (request, of_gang)
            })
    }

    /// The creation time of the oldest waiting pod, in seconds since 1970.
    #[must_use]
    pub fn oldest_waiting(&self) -> Option<i64> {
        self.parts.queue.waiting().oldest()
    }

    /// Does this pod wait for room?
    #[must_use]
    pub fn is_waiting(&self, uid: &str) -> bool {
        self.parts.queue.waiting().contains(uid)
    }

    /// Which new pods must be queued, because pods wait for room that a node could have.
    #[must_use]
    pub fn queue_from(&self) -> Vec<QueueFrom> {
        self.parts.queue.waiting().queue_from()
    }

    /// The pods that are queued, in the order of their turns.
    pub fn queue_order(&self) -> impl Iterator<Item = &Uid> {
        self.parts.queue.gated().uids()
    }

    /// The queue in sum.
    #[must_use]
    pub fn queued(&self) -> Queued {
        self.parts.queue.gated().queued()
    }

    /// Is the pod queued?
    #[must_use]
    pub fn is_queued(&self, uid: &str) -> bool {
        self.parts.queue.gated().has(uid)
    }

    /// How many pods are queued before the pod; none if it is not queued.
    #[must_use]
    pub fn queued_before(&self, uid: &str) -> Option<usize> {
        self.parts.queue.gated().before(uid)
    }

    /// Queued pods that the leader should have ungated: the first pods that fit, and the first that can go without
    /// room. Only the leader knows the reserved memory: a pod that it may keep from that memory does not count.
    #[must_use]
    pub fn stalled(&self, now: Duration) -> Vec<Arc<PodFacts>> {
        stalled::stalled(&self.sight(now))
    }

    /// Why the pod that [`Ledger::wake`] named is ungated.
    #[must_use]
    pub fn ungated_because(&self, uid: &str) -> Ungate {
        self.parts
            .queue
            .gated()
            .because(uid)
            .unwrap_or(Ungate::Room)
    }

    /// The cost so far of all looks for queued pods that may preempt. Each pod or node looked at counts as one, and a
    /// fit of a pod of one container as eight.
    #[must_use]
    pub fn spent_on_preemptors(&self) -> u64 {
        self.wakes.spent_on_preemptors()
    }

    /// May a filter call with this number of candidates lack nodes that passed kube-scheduler's own filters?
    #[must_use]
    pub fn is_sample(&self, candidates: usize) -> bool {
        is_sample(candidates, self.parts.config.least_nodes, &self.parts.books)
    }

    /// The node to which the pod is nominated in the write that wakes it. [`Ledger::wake`] named the pod, and
    /// kube-scheduler showed other nodes when it was refused.
    #[must_use]
    pub fn nomination(&self, uid: &str) -> Option<Arc<str>> {
        self.parts
            .queue
            .nomination(uid, &self.parts.earmarks, &self.parts.books)
    }

    /// Pods that the extender nominated to nodes whose room is promised to them no more: the nomination must end.
    #[must_use]
    pub fn void_nominations(&self) -> Vec<Arc<PodFacts>> {
        self.parts
            .queue
            .void_nominations(&self.parts.earmarks, &self.parts.books)
    }
}

/// The state between two calls.
#[derive(Debug, Default)]
pub(crate) struct Wakes {
    offering: Option<Offering>,
    look: Option<Look>,
    /// Room was found for these kinds since it was last offered.
    found: Vec<KindId>,
    /// The last call stopped because of its cost.
    unfinished: bool,
    gangs: Gangs,
    preemptors: Preemptors,
}

impl Wakes {
    /// No pod waits.
    fn rest(&mut self) {
        (self.offering, self.look, self.unfinished) = (None, None, false);
        self.found.clear();
    }

    /// Did the last call stop because of its cost?
    pub(crate) fn go_on(&self) -> bool {
        self.unfinished
    }

    /// Something has changed in the books.
    pub(crate) fn follow(&mut self, event: &Event) {
        self.preemptors.follow(event);
    }

    /// The cost of all looks for queued pods that may preempt.
    pub(crate) fn spent_on_preemptors(&self) -> u64 {
        self.preemptors.spent
    }

    /// Must the room of this node still be offered to a queued pod, before another?
    pub(crate) fn is_for_queued(&self, name: &str, queue: &Queue) -> bool {
        // Kinds that are to be looked for after this one may want any node.
        self.look.is_some()
            || !queue.waiting().is_noted()
            || queue.waiting().is_queued(name)
            || (self.offering.as_ref()).is_some_and(|offering| *offering.node == *name)
    }
}
