//! Changes that kube-scheduler has already seen, and that this ledger's view may lack.
//!
//! kube-scheduler offers a node only if the node's sum suffices in its own view. If the sum does not suffice
//! here, kube-scheduler has seen pods leave that this ledger still counts. The extender then asks the API server
//! before it lets others be evicted for the pod.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_books::{Cause, Evidence, Uid};

use crate::Ledger;

impl Ledger {
    /// kube-scheduler asked for victims for the pod and got none, because the pod will fit on this node when earlier
    /// victims are gone. kube-scheduler may end the nomination for that; nothing is disrupted for the pod elsewhere
    /// meanwhile.
    pub fn expect_room(&mut self, uid: &Uid, node: &Arc<str>, now: Duration) {
        self.parts
            .change(|earmarks, books| earmarks.expect_room(uid, node, books, now));
    }

    /// Does this ledger lack room in sum, or a fresh report, on a node that kube-scheduler offered for the pod?
    #[must_use]
    pub fn is_behind(&self, pod: &PodFacts, node: &str, now: Duration) -> bool {
        let Some(request) = pod.asks.request() else {
            return false;
        };
        if self.lacks_report(node, now) {
            return true;
        }
        let Some(node) = self.parts.books.node(node) else {
            return false;
        };
        let (asked, view) = (request.in_sum().0, node.view());
        // The free memory is never more than the memory that is left in sum, and much faster to add up.
        let free = view
            .cards
            .iter()
            .fold(0u64, |sum, card| sum.saturating_add(card.free.0));
        asked > free && asked > node.left_in_sum(view, |_| true).0
    }

    /// The node where others terminate, move or give memory back for a pod. After a restart, the pod's condition names
    /// it.
    #[must_use]
    pub fn disrupted_on(&self, uid: &str) -> Option<Arc<str>> {
        let all = &self.parts.earmarks;
        let earmark = all
            .eviction_for(uid)
            .or_else(|| all.find(uid, Cause::Reclaim));
        let told = || self.parts.books.pod(uid)?.reserved_on.clone();
        earmark.map(|it| it.node().clone()).or_else(told)
    }

    /// The node where the pod has room soon, as far as is known.
    #[must_use]
    pub fn expected_on(&self, uid: &str, now: Duration) -> Option<Arc<str>> {
        self.parts.earmarks.expected_on(uid, now).cloned()
    }

    /// Has the node no report, or a stale one?
    #[must_use]
    pub fn lacks_report(&self, node: &str, now: Duration) -> bool {
        self.sight(now).check(node).is_err()
    }

    /// When the agent wrote the node's last report, in seconds since 1970, if that can be read.
    #[must_use]
    pub fn report_written(&self, node: &str) -> Option<i64> {
        self.parts.books.node(node)?.status()?.written()
    }

    /// The pods that are bound to a node and hold something there.
    #[must_use]
    pub fn bound_on(&self, node: &str) -> Vec<Arc<PodFacts>> {
        let node = self.parts.books.node(node);
        let bound = node.into_iter().flat_map(|node| node.bound().keys());
        bound
            .filter_map(|uid| self.parts.books.pod(uid).cloned())
            .collect()
    }

    /// Does the pod fit on the node as soon as the `leaving` pods are gone? With `ended`, the reported memory of pods
    /// that are no longer bound there does not count. Memory of assumed pods of lower priority does not count either.
    /// If kube-scheduler preempts one of these before its bind, the ledger learns it only from the end of the
    /// assumption.
    #[must_use]
    pub fn fits_without(
        &self,
        pod: &PodFacts,
        name: &str,
        leaving: &[Arc<str>],
        ended: bool,
        now: Duration,
    ) -> bool {
        self.sight(now).fits_without(pod, name, leaving, ended)
    }

    /// A node where the pod fits now, and which kube-scheduler has not shown for it lately. kube-scheduler stops its
    /// search once enough nodes pass its own filters. The pod is woken for such a node.
    #[must_use]
    pub fn fits_unshown(&self, pod: &PodFacts, now: Duration) -> Option<Arc<str>> {
        let may_be_unshown = self.parts.queue.may_be_unshown(&pod.uid)?;
        let (sight, mut budget) = (self.sight(now), self.budget());
        let mut nodes = self.parts.books.nodes().map(|(name, _)| name);
        let node = nodes.find(|name| {
            may_be_unshown(name)
                && sight.evidence(pod, name) == Evidence::Unknown
                && sight.may_fit(name, pod)
                && sight
                    .trial()
                    .while_others_start()
                    .choose(pod, name, &mut budget)
                    .is_ok()
        });
        node.cloned()
    }
}
