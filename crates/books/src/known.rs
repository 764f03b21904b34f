//! The state of the ledger at one moment, for questions: a question changes nothing. The queue of waiting pods is not
//! part of it.

mod evidence;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gpustow_api::{Group, PodFacts};

use crate::asked::Asked;
use crate::books::{Books, Gate, Uid};
use crate::config::Config;
use crate::earmarks::{Cause, Earmarks};
use crate::evidence::Shown;
use crate::maps::HashSet;
use crate::offered::Offered;
use crate::reason::Reason;
use crate::scores::{Scores, Slot};
use crate::turn::Turn;

/// A pod that terminates is late when it should have been gone for so long: its kubelet and the watch take time, too.
const LATE: i64 = 60;

/// See the module's documentation. Its questions are where their answers are used.
#[derive(Clone, Copy)]
pub struct Known<'a> {
    /// The facts: nodes, pods and reservations.
    pub books: &'a Books,
    /// The remembered answers of filter.
    pub scores: &'a Scores,
    /// Which pod room is kept for.
    pub earmarks: &'a Earmarks,
    /// The evidence of kube-scheduler's calls.
    pub shown: &'a Shown,
    /// Pods that were woken for room.
    pub offered: &'a Offered,
    /// The highest priority of a queued pod.
    pub queued: Option<i32>,
    /// The administrator's settings.
    pub config: &'a Config,
    /// Pods that were asked to give memory back.
    pub asked: &'a Asked,
    /// The cost of all looks so far.
    pub work: &'a AtomicU64,
    /// The moment, on the caller's clock.
    pub now: Duration,
    /// That moment in seconds since 1970, if it is known.
    pub unix: Option<i64>,
}

impl<'a> Known<'a> {
    /// A look has spent so much.
    pub fn count_spent(&self, spent: u64) {
        self.work.fetch_add(spent, Ordering::Relaxed);
    }

    /// Is the node in a state to be asked at all?
    pub fn check(&self, name: &str) -> Result<(), Reason> {
        let slot = self.scores.slot(name).ok_or(Reason::NoReport)?;
        self.enter(slot).map(drop)
    }

    /// As [`Known::check`], and returns the node's gate.
    #[inline]
    pub fn enter(&self, slot: Slot) -> Result<Gate, Reason> {
        let gate = self.scores.gate(slot);
        match self.books.is_stale(gate, self.now) {
            None => Err(Reason::NoReport),
            Some(true) => Err(Reason::Stale),
            Some(false) => Ok(gate),
        }
    }

    /// Has the pod waited for so long since it was created? Yes if the time is unknown (`Ledger::tell_time`).
    pub fn has_waited(&self, pod: &PodFacts, after: Duration) -> bool {
        let after = i64::try_from(after.as_secs()).unwrap_or(i64::MAX);
        self.unix
            .is_none_or(|unix| unix.saturating_sub(pod.created) >= after)
    }

    /// Are both of one gang whose pods are placed together?
    pub fn is_of_gang(&self, pod: &PodFacts, other: &PodFacts) -> bool {
        pod.group == other.group && self.books.gang(pod).is_some_and(Group::is_in_tree)
    }

    /// May this pod take the other pod's reservation? Both have a reservation and equal requests, and this pod's turn
    /// comes first.
    pub(crate) fn may_take_reservation(&self, pod: &PodFacts, other: &PodFacts) -> bool {
        let both = || {
            [pod, other]
                .iter()
                .all(|pod| self.earmarks.find(&pod.uid, Cause::Reserve).is_some())
        };
        both() && pod.asks == other.asks && Turn::of(pod) < Turn::of(other)
    }

    /// A cheap estimate: false if filter, or kube-scheduler before it, would refuse the pod even if no pod started.
    pub fn may_fit(&self, name: &str, pod: &PodFacts) -> bool {
        self.check(name).is_ok()
            && self
                .books
                .node(name)
                .zip(pod.asks.request())
                .is_some_and(|(node, request)| {
                    node.view().has_starts() || request.may_fit(node.view())
                })
            && self.books.refused_in_tree(name, pod).is_none()
    }

    /// The node where room is earmarked for the pod, and more than a reservation, so that no queued pod goes before it there. One
    /// of higher priority does, unless the pod was ungated for the room.
    pub fn goes_first(&self, pod: &PodFacts) -> Option<&'a Arc<str>> {
        let earmark = self.earmarks.earmark(&pod.uid)?;
        let is_first = match earmark.cause() {
            Cause::Reserve => false,
            Cause::Ungated => true,
            _ => self.queued.is_none_or(|highest| highest <= pod.priority),
        };
        is_first.then(|| earmark.node())
    }

    /// The names of all nodes.
    pub fn node_names(&self) -> Vec<Arc<str>> {
        self.books.nodes().map(|(name, _)| name.clone()).collect()
    }

    /// The nodes that kube-scheduler's own filters do not refuse for the pod, as far as that is known here.
    pub fn open_to(&self, pod: &PodFacts) -> impl Iterator<Item = &Arc<str>> {
        let nodes = self.books.nodes().map(|(name, _)| name);
        nodes.filter(|name| self.books.refused_in_tree(name, pod).is_none())
    }

    /// Pods that were woken for room on this node and may still ask for it, without those for which it is earmarked.
    pub fn woken_for(&self, node: &str) -> impl Iterator<Item = &Uid> {
        let offered = self.offered.on(node).iter();
        offered.filter(move |uid| {
            self.offered.may_come(uid, self.now) && !self.earmarks.is_for(uid, node)
        })
    }
}

/// Pods that terminate, and until when others wait for them.
///
/// A terminating pod soon releases its memory, so that the extender does nothing on its node. The pod may hang for
/// ever: a process in an uninterruptible sleep, or a grace period of a year. A late pod does not count as a leaving pod
/// any more: its memory stays held.
impl Known<'_> {
    /// Is the pod being deleted, and about to release its memory?
    pub fn leaves(&self, pod: &PodFacts) -> bool {
        pod.deleting && !self.is_late(pod)
    }

    /// Should the pod have been gone for a while?
    pub fn is_late(&self, pod: &PodFacts) -> bool {
        let known = self.unix.zip(pod.gone_by);
        known.is_some_and(|(unix, by)| unix.saturating_sub(by) >= LATE)
    }

    /// The pods bound to a node that are about to leave it.
    pub fn leaving(&self, node: &str) -> HashSet<Uid> {
        let bound = self.books.node(node).into_iter();
        let bound = bound.flat_map(|node| node.bound().keys());
        let known = |uid: &&Uid| self.books.pod(uid).is_some_and(|pod| self.leaves(pod));
        bound.filter(known).cloned().collect()
    }
}
