//! What each means does for a pod that waits, or why it does nothing.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;

use crate::Ledger;
use crate::books::Uid;
use crate::budget::Budget;
use crate::earmarks::Cause;
use crate::known::Known;
use crate::means::{NotNow, Plan};

/// The means by which room is made for a pod that waits, the mildest first.
pub const MEANS: [Cause; 4] = [
    Cause::Reclaim,
    Cause::Defragment,
    Cause::Preempt,
    Cause::Reserve,
];

/// What one means does for a pod that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pursuit {
    /// It is not turned on.
    Off,
    /// It does not act for the pod as things are.
    NotNow(NotNow),
    /// What it tried was of no use: it pauses until then.
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
    /// What each means does for a pod that fits nowhere, or why it does nothing. Whether kube-scheduler would place the
    /// pod where a plan is, the plan does not say. Costs as much as a plan that is made for people.
    #[must_use]
    pub fn report(&self, pod: &Arc<PodFacts>, now: Duration) -> [(Cause, Pursuit); 4] {
        let sight = self.sight(now);
        MEANS.map(|means| {
            let reserves = means == Cause::Reserve && self.parts.config.keep.is_some();
            let absent = self.absent_until(&pod.uid, now).filter(|_| reserves);
            let pursuit = absent.map(Pursuit::BackingOff);
            (means, pursuit.unwrap_or_else(|| sight.pursuit(means, pod)))
        })
    }
}

impl Known<'_> {
    fn pursuit(&self, means: Cause, pod: &Arc<PodFacts>) -> Pursuit {
        let Some(after) = self.acts_after(means) else {
            return Pursuit::Off;
        };
        if let Some(earmark) = self.earmarks.earmark(&pod.uid)
            && earmark.cause() == means
        {
            return Pursuit::WaitsFor {
                node: earmark.node().clone(),
                pods: earmark.waits_for().to_vec(),
                until: earmark.until(),
            };
        }
        if let Some(why) = self.not_now(means, pod) {
            return Pursuit::NotNow(why);
        }
        if !self.has_waited(pod, after) {
            return Pursuit::NotNow(NotNow::TooYoung(after));
        }
        if let Some(until) = self.earmarks.backs_off(pod, means, self.now) {
            return Pursuit::BackingOff(until);
        }
        let budget = &mut Budget::of_plan();
        // Whatever kube-scheduler said of the nodes.
        let nodes = self.books.nodes().map(|(name, _)| name);
        let open = nodes.filter(|name| self.books.refused_in_tree(name, pod).is_none());
        let found = match means {
            Cause::Reclaim => best(open.filter_map(|name| self.plan_reclaim(pod, name, budget))),
            Cause::Defragment => self.plan_defragment(pod, budget),
            Cause::Preempt => best(open.filter_map(|name| self.plan_preempt(pod, name, budget))),
            _ => self.plan_reserve(pod, budget),
        };
        match found {
            Some((node, pods)) => Pursuit::Plan { node, pods },
            None if budget.is_spent() => Pursuit::BudgetSpent,
            None => Pursuit::NoPlan,
        }
    }

    /// How old a pod must be; none if the means is off.
    pub(crate) fn acts_after(&self, means: Cause) -> Option<Duration> {
        let config = self.config;
        match means {
            Cause::Reclaim => config.reclaim.then_some(config.reclaim_after),
            Cause::Defragment => config.moves.then_some(Duration::ZERO),
            Cause::Preempt => config.preempt_fragmented.then_some(config.preempt_after),
            _ => config.keep,
        }
    }

    /// The node on which the fewest pods must finish, and those.
    pub(crate) fn plan_reserve(
        &self,
        pod: &PodFacts,
        budget: &mut Budget,
    ) -> Option<(Arc<str>, Vec<Uid>)> {
        let nodes = self.books.nodes();
        best(nodes.filter_map(|(name, _)| self.place_on_node(pod, name, budget)))
    }

    fn plan_defragment(
        &self,
        pod: &Arc<PodFacts>,
        budget: &mut Budget,
    ) -> Option<(Arc<str>, Vec<Uid>)> {
        let moves = self.moves_within(pod, budget)?;
        let pods = moves.moves.iter().map(|it| it.pod.uid.clone());
        Some((moves.node, pods.collect()))
    }
}

fn best<R: Ord>(plans: impl Iterator<Item = Plan<R>>) -> Option<(Arc<str>, Vec<Uid>)> {
    plans.min().map(|plan| (plan.node, plan.waits_for))
}
