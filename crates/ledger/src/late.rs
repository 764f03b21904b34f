//! What this ledger's view may lack that kube-scheduler has seen already.
//!
//! kube-scheduler offers a node only if the node's sum suffices in its own view. If the sum does not suffice
//! here, kube-scheduler has seen pods leave that this ledger still counts. The extender then asks the API server
//! before it lets others be evicted for the pod.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_api::gpunode::{Gpu, PodUse};

use crate::Ledger;
use crate::books::{Node, Uid};
use crate::budget::Budget;
use crate::maps::HashSet;
use crate::preempt::asked_in_sum;
use crate::queue::{Earmark, Evidence};
use crate::sight::Sight;

impl Ledger {
    /// kube-scheduler asked for victims for the pod and got none, because the pod will fit on this node when earlier
    /// victims are gone. kube-scheduler may end the nomination for that; nothing is disrupted for the pod elsewhere
    /// meanwhile.
    pub fn expect_room(&mut self, uid: &Uid, node: &Arc<str>, now: Duration) {
        self.queue.expect_room(uid, node, &self.books, now);
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
        let Some(node) = self.books.node(node) else {
            return false;
        };
        let (asked, view) = (asked_in_sum(request), node.view());
        // What is free is never more than what is left in sum, and much faster to add up.
        let free = view
            .cards
            .iter()
            .fold(0u64, |sum, card| sum.saturating_add(card.free.0));
        asked > free && asked > node.left_in_sum(view, |_| true).0
    }

    /// The node where others terminate, move or give memory back for a pod. After a restart the pod's condition says so.
    #[must_use]
    pub fn disrupted_on(&self, uid: &str) -> Option<Arc<str>> {
        let queue = &self.queue;
        let earmark = queue.eviction_for(uid).or_else(|| queue.reclaim_for(uid));
        let told = || self.books.pod(uid)?.reserved_on.clone();
        earmark.map(|it| it.node().clone()).or_else(told)
    }

    /// The node where the pod has room soon, as far as is known.
    #[must_use]
    pub fn expected_on(&self, uid: &str, now: Duration) -> Option<Arc<str>> {
        self.queue.expected_on(uid, now).cloned()
    }

    /// Has the node no report, or a stale one?
    #[must_use]
    pub fn lacks_report(&self, node: &str, now: Duration) -> bool {
        self.sight(now).check(node).is_err()
    }

    /// When the agent wrote the node's last report, in seconds since 1970, if that can be read.
    #[must_use]
    pub fn report_written(&self, node: &str) -> Option<i64> {
        self.books.node(node)?.status()?.written()
    }

    /// The pods that are bound to a node and hold something there.
    #[must_use]
    pub fn bound_on(&self, node: &str) -> Vec<Arc<PodFacts>> {
        let node = self.books.node(node);
        let bound = node.into_iter().flat_map(|node| node.bound().keys());
        bound
            .filter_map(|uid| self.books.pod(uid).cloned())
            .collect()
    }

    /// Does the pod fit on the node as soon as the `leaving` pods are gone? With `ended`, memory does not count
    /// that GPUs report of pods that are bound there no more, nor memory of assumed pods of lower priority: if
    /// kube-scheduler preempts one of these before its bind, only the end of the assumption tells the ledger.
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

    /// A node where the pod fits now, among those that kube-scheduler has not shown for it lately: it stops to look once
    /// enough nodes pass its own filters. The pod is woken for such a node.
    #[must_use]
    pub fn fits_unshown(&self, pod: &PodFacts, now: Duration) -> Option<Arc<str>> {
        let request = pod.asks.request()?;
        let may_be_unshown = self.queue.may_be_unshown(&pod.uid)?;
        let mut budget = self.budget();
        let mut nodes = self.books.nodes().filter(|(name, _)| {
            may_be_unshown(name)
                && self.sight(now).evidence(pod, name) == Evidence::Unknown
                && self.sight(now).may_fit(name, pod)
        });
        let node = nodes.find(|(name, _)| {
            let choice = self
                .sight(now)
                .choose_within(name, pod, request, &mut budget);
            choice.is_ok()
        });
        node.map(|(name, _)| name.clone())
    }
}

impl Sight<'_> {
    fn fits_without(&self, pod: &PodFacts, name: &str, leaving: &[Uid], ended: bool) -> bool {
        let Some(node) = self.books.node(name) else {
            return false;
        };
        if self.check(name).is_err() || self.books.is_unfenced(&pod.uid) {
            return false;
        }
        let mut gone: HashSet<Arc<str>> = leaving.iter().cloned().collect();
        // A pod that was woken for the room may not come. That is no reason to evict pods elsewhere.
        gone.extend(self.queue.woken_for(name, self.now).cloned());
        if ended {
            gone.extend(ended_on(node));
            gone.extend(self.assumed_below(node, pod.priority));
            // Victims of the extender's own plan leave too, though the caller's list may be older than their eviction.
            let own = self.queue.eviction_for(&pod.uid);
            let own = own.filter(|it| **it.node() == *name);
            gone.extend(own.into_iter().flat_map(Earmark::waits_for).cloned());
        }
        let mut budget = Budget::of(self.config);
        let after = self.fits_after(name, node, pod, &gone, &mut budget);
        after.is_some_and(|view| view.is_some())
    }

    /// Will the pod fit where kube-scheduler had others evicted for it, when all of these are gone?
    pub(crate) fn expects_room(&self, pod: &PodFacts) -> bool {
        let node = self.queue.expected_on(&pod.uid, self.now);
        node.is_some_and(|node| {
            let leaving: Vec<Uid> = self.leaving(node).into_iter().collect();
            self.fits_without(pod, node, &leaving, true)
        })
    }

    /// The pods of lower priority that are assumed on a node.
    fn assumed_below(&self, node: &Node, priority: i32) -> impl Iterator<Item = Arc<str>> {
        let lower = move |uid: &&Arc<str>| {
            let pod = self.books.pod(uid);
            pod.is_none_or(|pod| pod.priority < priority)
        };
        node.assumed().filter(lower).cloned()
    }
}

/// Pods whose memory the last report shows and that are bound to the node no more.
pub(crate) fn ended_on(node: &Node) -> impl Iterator<Item = Arc<str>> {
    let all = node.gpus().iter().flat_map(|gpu| ended_in(node, gpu));
    all.map(|shown| Arc::from(shown.uid.as_str()))
}

/// What the last report shows of a GPU that pods use which are bound to the node no more.
pub(crate) fn ended_in<'n>(node: &'n Node, gpu: &'n Gpu) -> impl Iterator<Item = &'n PodUse> {
    let shown = gpu.pods.iter();
    shown.filter(|shown| !node.bound().contains_key(shown.uid.as_str()))
}
