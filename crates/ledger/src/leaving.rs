//! Pods that terminate, and until when others wait for them.
//!
//! A pod that is being deleted soon leaves what it holds, so that nothing need be done where it is. It may hang for
//! ever: a process in an uninterruptible sleep, or a grace period of a year. A pod that is late counts no more as one
//! that leaves: what it holds is held.

use std::time::Duration;

use gpustow_api::PodFacts;

use crate::Ledger;
use crate::books::Uid;
use crate::maps::HashSet;

/// A pod that terminates is late when it should have been gone for so long: its kubelet and the watch take time, too.
const LATE: Duration = Duration::from_secs(60);

impl Ledger {
    /// Says what time it is, so that pods which terminate can be late: `unix` in seconds since 1970 when the ledger's
    /// clock shows `now`. To be called before each look.
    pub fn tell_time(&mut self, now: Duration, unix: i64) {
        self.unix_at_start = Some(unix.saturating_sub(seconds(now)));
    }

    /// Is the pod being deleted, and about to leave what it holds?
    pub(crate) fn leaves(&self, pod: &PodFacts, now: Duration) -> bool {
        pod.deleting && !self.is_late(pod, now)
    }

    /// Should the pod have been gone for a while?
    pub(crate) fn is_late(&self, pod: &PodFacts, now: Duration) -> bool {
        let late = |start: i64, by: i64| {
            let after = seconds(now).saturating_add(start).saturating_sub(by);
            after >= seconds(LATE)
        };
        let known = self.unix_at_start.zip(pod.gone_by);
        known.is_some_and(|(start, by)| late(start, by))
    }

    /// The pods bound to a node that are about to leave it.
    pub(crate) fn leaving(&self, node: &str, now: Duration) -> HashSet<Uid> {
        let bound = self.books.node(node).into_iter();
        let bound = bound.flat_map(|node| node.bound().keys());
        let known = |uid: &&Uid| self.books.pod(uid).is_some_and(|pod| self.leaves(pod, now));
        bound.filter(known).cloned().collect()
    }
}

fn seconds(time: Duration) -> i64 {
    i64::try_from(time.as_secs()).unwrap_or(i64::MAX)
}
