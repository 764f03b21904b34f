//! Pods that terminate, and until when others wait for them.
//!
//! A pod that is being deleted soon leaves what it holds, so that nothing need be done where it is. It may hang for
//! ever: a process in an uninterruptible sleep, or a grace period of a year. A pod that is late counts no more as one
//! that leaves: what it holds is held.

use gpustow_api::PodFacts;

use crate::Ledger;
use crate::books::Uid;
use crate::maps::HashSet;
use crate::sight::Sight;

/// A pod that terminates is late when it should have been gone for so long: its kubelet and the watch take time, too.
const LATE: i64 = 60;

impl Ledger {
    /// Says what time it is, in seconds since 1970, so that pods which terminate can be late. To be called before each
    /// look.
    pub fn tell_time(&mut self, unix: i64) {
        self.unix = Some(unix);
    }
}

impl Sight<'_> {
    /// Is the pod being deleted, and about to leave what it holds?
    pub(crate) fn leaves(&self, pod: &PodFacts) -> bool {
        pod.deleting && !self.is_late(pod)
    }

    /// Should the pod have been gone for a while?
    pub(crate) fn is_late(&self, pod: &PodFacts) -> bool {
        let known = self.unix.zip(pod.gone_by);
        known.is_some_and(|(unix, by)| unix.saturating_sub(by) >= LATE)
    }

    /// The pods bound to a node that are about to leave it.
    pub(crate) fn leaving(&self, node: &str) -> HashSet<Uid> {
        let bound = self.books.node(node).into_iter();
        let bound = bound.flat_map(|node| node.bound().keys());
        let known = |uid: &&Uid| self.books.pod(uid).is_some_and(|pod| self.leaves(pod));
        bound.filter(known).cloned().collect()
    }
}
