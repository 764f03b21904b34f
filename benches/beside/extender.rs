//! The extender's loops: what each computes under the lock.

use std::cmp::Reverse;
use std::hint::black_box;
use std::time::Duration;

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
    /// Reservations for pods that waited long.
    pub(crate) fn reserve(&mut self, at: Duration) {
        if self.on == Some(Feature::Reserve) {
            self.hold(at, "reserve", |ledger, now| {
                ledger.keep_reservations(now, unix(now));
                black_box(ledger.reservations());
            });
        }
    }

    /// Whether new pods are queued, and who is told its position.
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

    /// What the extender does once a second for reclaim, preemption and defragmentation.
    pub(crate) fn look(&mut self, at: Duration) {
        if !matches!(
            self.on,
            Some(Feature::Reclaim | Feature::Preempt | Feature::Defragment)
        ) {
            return;
        }
        let moves = self.on == Some(Feature::Defragment);
        let due = self.hold(at, "look", |ledger, now| {
            ledger.tell_time(unix(now));
            ledger.reclaim(now);
            ledger.fragmented(now)
        });
        let to_move = self.hold(at, "look", |ledger, now| {
            moves.then(|| ledger.due_to_move(now)).flatten()
        });
        self.hold(at, "look", |ledger, _| {
            black_box(ledger.marked().count());
        });
        self.hold(at, "limits", |ledger, now| {
            black_box((ledger.over_limits(now), ledger.reclaims(now)));
        });
        for pod in due {
            self.hold(at, "preempt", |ledger, now| {
                ledger.preempt_fragmented(&pod.uid, &|_| Vec::new(), now)
            });
        }
        if let Some(pod) = to_move {
            self.hold(at, "move", |ledger, now| {
                ledger.move_for(&pod.uid, &|_| Vec::new(), 10, now)
            });
        }
        let helped = self.hold(at, "look", |ledger, now| {
            ledger.preemptions(now).len() + ledger.reclaims(now).len()
        });
        assert_eq!(helped, 0, "a waiting pod is helped");
    }

    /// Looks at some nodes, and says after which pause it goes on.
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
