//! The activity of each means for a waiting pod, or the reason why it does nothing.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_books::{Budget, Cause, Uid};
use gpustow_means::{Means, NotNow, Sight};

use crate::Ledger;

/// The means by which room is made for a pod that waits, the mildest first.
pub const MEANS: [Cause; 4] = [
    Cause::Reclaim,
    Cause::Defragment,
    Cause::Preempt,
    Cause::Reserve,
];

/// The activity of one means for a waiting pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pursuit {
    /// It is not turned on.
    Off,
    /// It does not act for the pod as things are.
    NotNow(NotNow),
    /// Its attempt was of no use: it pauses until then.
    BackingOff(Duration),
    /// Room on the node is reserved for the pod until then, and these pods must leave it.
    WaitsFor {
        /// The name of the node.
        node: Arc<str>,
        /// By UID.
        pods: Vec<Uid>,
        /// When the reservation ends.
        until: Duration,
    },
    /// It would have these pods leave room on the node.
    Plan {
        /// The name of the node.
        node: Arc<str>,
        /// By UID.
        pods: Vec<Uid>,
    },
    /// Nothing that it may do gives the pod room.
    NoPlan,
    /// The search takes longer than one look.
    BudgetSpent,
}

impl Ledger {
    /// The activity of each means for a pod that fits nowhere, or the reason why it does nothing. A plan does not show
    /// whether kube-scheduler would place the pod there. The report costs as much as a plan that is made for people.
    #[must_use]
    pub fn report(&self, pod: &Arc<PodFacts>, now: Duration) -> [(Cause, Pursuit); 4] {
        let sight = self.sight(now);
        MEANS.map(|means| {
            let by = self.means.find(means);
            (
                means,
                by.map_or(Pursuit::Off, |by| pursuit(&sight, by, pod)),
            )
        })
    }
}

fn pursuit(sight: &Sight<'_>, by: &dyn Means, pod: &Arc<PodFacts>) -> Pursuit {
    let means = by.cause();
    let Some(after) = by.after(sight.config) else {
        return Pursuit::Off;
    };
    if let Some(until) = by.pauses(pod, sight.now) {
        return Pursuit::BackingOff(until);
    }
    if let Some(earmark) = sight.earmarks.earmark(&pod.uid)
        && earmark.cause() == means
    {
        return Pursuit::WaitsFor {
            node: earmark.node().clone(),
            pods: earmark.waits_for().to_vec(),
            until: earmark.until(),
        };
    }
    if let Some(why) = sight.not_now(means, pod) {
        return Pursuit::NotNow(why);
    }
    if !sight.has_waited(pod, after) {
        return Pursuit::NotNow(NotNow::TooYoung(after));
    }
    if let Some(until) = sight.earmarks.backs_off(pod, means, sight.now) {
        return Pursuit::BackingOff(until);
    }
    let budget = &mut Budget::of_plan();
    let found = by.plan(sight, pod, budget);
    match found {
        Some((node, pods)) => Pursuit::Plan { node, pods },
        None if budget.is_spent() => Pursuit::BudgetSpent,
        None => Pursuit::NoPlan,
    }
}
