//! The means by which room is made for a pod that waits: reclaim, reserve, preempt and defragment.
//!
//! Each looks for plans in its own way and compares them by a rank of its own. A plan is of one kind, is compared in one
//! written order, and is pursued in one way: an earmark.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;

use crate::Ledger;
use crate::books::Uid;
use crate::queue::{Cards, Cause, Earmark, Ended};
use crate::sight::Sight;

/// Where others could leave a pod what it requests. Of two plans the lesser is better: by rank, then by name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Plan<R> {
    /// What it asks of others.
    pub(super) rank: R,
    pub(super) node: Arc<str>,
    /// The GPUs that the pod gets, by UUID, and what it will hold of each.
    pub(super) cards: Cards,
    /// The pods that give memory back, are evicted, or must finish.
    pub(super) waits_for: Vec<Uid>,
    /// Pods of lower priority that lose their reservations.
    pub(super) overtakes: Vec<Uid>,
}

/// A way to make room.
pub(crate) trait Means {
    /// How its plans are compared.
    type Rank: Ord;
    const CAUSE: Cause;

    /// How long the room of a plan is awaited.
    fn lasts(sight: &Sight<'_>, plan: &Plan<Self::Rank>) -> Duration;
}

impl Ledger {
    /// Earmarks the room of a plan for the pod.
    pub(super) fn pursue<M: Means>(&mut self, pod: &PodFacts, plan: Plan<M::Rank>, now: Duration) {
        let Ok(request) = &pod.request else {
            return;
        };
        for other in &plan.overtakes {
            self.queue.end(other, Ended::Overtaken, &self.books);
        }
        let until = now + M::lasts(&self.sight(now), &plan);
        let Plan {
            node,
            cards,
            waits_for,
            ..
        } = plan;
        let earmark = Earmark::of_cards(&node, M::CAUSE, request, cards, waits_for, until);
        self.queue.put(&pod.uid, earmark, &self.books);
    }
}
