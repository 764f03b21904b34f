//! The extender's loops: the computation of each under the lock.

use std::cmp::Reverse;
use std::hint::black_box;
use std::time::Duration;

use gpustow_ledger::TURNS;
use gpustow_settings::Feature;

use crate::world::{Due, World, unix};

/// Nodes whose shortages are looked for in one hold of the lock, and the pause after it.
const AT_ONCE: usize = 8;
const TURN: Duration = Duration::from_millis(1);
/// The extender's loops.
pub(crate) const LOOK: Duration = Duration::from_secs(1);
pub(crate) const QUEUE: Duration = Duration::from_millis(250);
pub(crate) const WAKE: Duration = Duration::from_millis(20);
const WARM: Duration = Duration::from_millis(1);
/// Answers computed ahead, and pods woken, in one hold of the lock.
const SLICE: usize = 256;
const LIMIT: usize = 10;

impl World {
    /// Asks whether new pods are queued, and which pods are queued in which order.
    pub(crate) fn queue(&mut self, at: Duration) {
        if self.on == Some(Feature::Queue) {
            self.hold(at, "queue", |ledger, _| {
                black_box(ledger.queue_from());
                black_box(ledger.queue_order().count());
            });
        }
    }

    pub(crate) fn wake(&mut self, at: Duration) {
        let woken = self.hold(at, "wake", |ledger, now| ledger.wake(LIMIT, now));
        for pod in woken.iter().filter(|pod| pod.queued) {
            self.ungated(at, pod);
        }
        self.hold(at, "wake", |ledger, _| {
            black_box(ledger.void_nominations());
        });
    }

    /// Computes answers ahead, and goes on after a pause.
    pub(crate) fn warm(&mut self, at: Duration) {
        self.warms = self.hold(at, "warm", |ledger, _| ledger.warm(SLICE));
        if self.warms {
            self.due
                .push(Reverse((at.max(self.held) + WARM, Due::Warm)));
        }
    }

    /// The extender's work once a second for the means.
    pub(crate) fn look(&mut self, at: Duration) {
        if self.on.is_none_or(|feature| feature == Feature::Queue) {
            return;
        }
        self.hold(at, "look", |ledger, now| ledger.tell_time(unix(now)));
        for means in TURNS {
            self.hold(at, means.into(), |ledger, now| ledger.look(means, 10, now));
        }
        self.hold(at, "look", |ledger, _| {
            black_box(ledger.marked().count());
        });
        let helped = self.hold(at, "demands", |ledger, now| {
            ledger.demands(Vec::new(), now).announced().count()
        });
        assert_eq!(helped, 0, "a waiting pod is helped");
    }

    /// Looks at some nodes, and returns the pause until the next look.
    pub(crate) fn shortages(&mut self, at: Duration) -> Duration {
        if self.on != Some(Feature::Reclaim) {
            return LOOK;
        }
        if self.may_be_short.is_empty() {
            self.may_be_short = self.hold(at, "look", |ledger, _| ledger.may_be_short());
        }
        let left = self.may_be_short.len().saturating_sub(AT_ONCE);
        let few = self.may_be_short.split_off(left);
        self.hold(at, "shortages", |ledger, now| {
            for node in &few {
                black_box(ledger.shortages_on(node, now));
            }
        });
        if left == 0 { LOOK } else { TURN }
    }
}
