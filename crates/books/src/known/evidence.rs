//! kube-scheduler's verdict on a node for a pod, and whether it is still valid.

use gpustow_api::{PodFacts, Regards};

use super::Known;
use crate::earmarks::Cause;
use crate::evidence::{Evidence, NodeSet};

impl Known<'_> {
    /// kube-scheduler's verdict on this node for the pod.
    pub fn evidence(&self, pod: &PodFacts, node: &str) -> Evidence {
        if self.is_short_in_sum(pod, node) {
            return Evidence::Short;
        }
        let traffic = self.books.last_traffic(node, pod);
        let slot = self.scores.slot(node);
        let said = slot.and_then(|slot| self.shown.evidence(&pod.uid, slot, traffic, self.now));
        match said.unwrap_or(Evidence::Unknown) {
            Evidence::Offered if self.awaits_others(pod, node) => Evidence::Awaited,
            evidence => evidence,
        }
    }

    /// Is a pod about to come that kube-scheduler has not counted, and that may decide whether this pod fits the node?
    /// kube-scheduler counts the pods that it nominated.
    pub fn awaits_others(&self, pod: &PodFacts, node: &str) -> bool {
        let regards = pod.constraints.regards;
        let counts = |other: &PodFacts, cause: Cause| {
            other.uid != pod.uid
                && !matches!(cause, Cause::Nominated | Cause::Reserve)
                && self.books.assumed(&other.uid).is_none()
                && !self.is_of_gang(pod, other)
        };
        let here = self.earmarks.holders(node);
        let here = here.filter(|holder| !self.earmarks.is_replaced_by(holder, pod));
        let here = here.filter_map(|holder| {
            let earmark = self.earmarks.earmark_of(holder)?;
            Some((self.earmarks.pod_of(holder, self.books)?, earmark.cause()))
        });
        let mut here = here.filter(|(other, cause)| counts(other, *cause));
        let mut all = self.earmarks.iter().filter_map(|(uid, earmark)| {
            let other = self.books.pod(uid)?;
            Some((other, earmark.cause()))
        });
        here.any(|(it, _)| it.repels.max(regards) > Regards::NoPod)
            || regards == Regards::AllPods
                && all.any(|(it, cause)| it.namespace == pod.namespace && counts(it, cause))
    }

    /// Must kube-scheduler be asked again before another pod on this node is disrupted for the pod? If so, its verdict
    /// so far.
    pub fn outdated(&self, pod: &PodFacts, node: &str) -> Option<Evidence> {
        let evidence = self.evidence(pod, node);
        let is_old = match evidence {
            Evidence::Outdated | Evidence::Awaited => true,
            Evidence::Unknown | Evidence::Short => pod.constraints.regards > Regards::NoPod,
            Evidence::Offered | Evidence::Rejected => false,
        };
        is_old.then_some(evidence)
    }

    /// The nodes that passed kube-scheduler's own filters for the pod, if it has named all of them lately.
    pub fn passed(&self, pod: &PodFacts) -> Option<NodeSet> {
        self.shown.passed(&pod.uid, self.now)
    }

    /// Does the node's sum not suffice for the pod?
    fn is_short_in_sum(&self, pod: &PodFacts, node: &str) -> bool {
        let known = self.books.node(node).zip(pod.asks.request());
        known.is_some_and(|(node, request)| {
            node.left_in_sum(node.view(), |_| true).0 < request.in_sum().0
        })
    }

    /// Did kube-scheduler lately offer this node for the pod, or can it not offer it, so that others may be disrupted
    /// there? Not if something after this extender refused the pod there. Nor if other pods decide and no call of
    /// kube-scheduler shows the result.
    pub fn was_offered(&self, pod: &PodFacts, node: &str) -> bool {
        let tried = self.shown.tried(&pod.uid);
        let refused = tried.is_some_and(|tried| tried.has(node));
        let offered = match self.evidence(pod, node) {
            Evidence::Offered => true,
            Evidence::Short => pod.constraints.regards == Regards::NoPod,
            _ => false,
        };
        offered && !refused
    }
}
