//! What filter would say of one node, for people: nothing is reserved.

use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_api::intree::{self, Constraints};
use gpustow_pack::{Choice, Mib, Refusal};

use crate::sight::Sight;
use crate::{Ledger, Reason};

impl Ledger {
    /// Where on one node the pod would go now, or why it would not. Card indices are those of
    /// [`crate::NodeView::cards`]; of two nodes the one with the lower cost is preferred.
    ///
    /// # Errors
    /// The reason that filter would give. A pod whose request is unreadable fits nowhere; its own
    /// error says more than this one.
    pub fn explain(&self, pod: &PodFacts, node: &str, now: Duration) -> Result<Choice, Reason> {
        self.sight(now).explain(pod, node)
    }

    /// One sentence on what speaks for these charges (card index as in
    /// [`crate::NodeView::cards`], MiB) on a node as it is now; the pod itself must not be in the
    /// books. None if the node has no such cards or the request is unreadable.
    #[must_use]
    pub fn speaks_for(
        &self,
        pod: &PodFacts,
        node: &str,
        charges: &[(usize, Mib)],
    ) -> Option<String> {
        self.sight(Duration::ZERO).speaks_for(pod, node, charges)
    }

    /// Why a pod with these constraints may not go to the node, whatever is free there.
    #[must_use]
    pub fn excluded(&self, node: &str, constraints: &Constraints) -> Option<&'static str> {
        self.sight(Duration::ZERO).excluded(node, constraints)
    }

    /// Why kube-scheduler's own filters refuse the node for the pod before they ask the extender, as
    /// far as can be known; see [`intree`]. The pod itself must not be in the node's books.
    #[must_use]
    pub fn refused_in_tree(&self, node: &str, pod: &PodFacts) -> Option<&'static str> {
        self.sight(Duration::ZERO).refused_in_tree(node, pod)
    }
}

impl Sight<'_> {
    /// Where on one node the pod would go now, or why it would not. Card indices are those of
    /// [`crate::NodeView::cards`]; of two nodes the one with the lower cost is preferred.
    ///
    /// # Errors
    /// The reason that filter would give. A pod whose request is unreadable fits nowhere; its own
    /// error says more than this one.
    pub(crate) fn explain(&self, pod: &PodFacts, node: &str) -> Result<Choice, Reason> {
        self.check(node)?;
        let request = pod.request.as_ref();
        let request = request.map_err(|_| Reason::Fit(Refusal::TooComplex))?;
        self.choose(node, pod, request)
            .map_err(|reason| self.told(pod, node, reason))
    }

    /// What people are told where the node does not take the pod for this reason.
    pub(crate) fn told(&self, pod: &PodFacts, name: &str, reason: Reason) -> Reason {
        match reason {
            Reason::Fit(Refusal::Unhealthy) if self.ends_with_uncordon(pod, name) => {
                Reason::Cordoned
            }
            other => self.refused_because(&pod.uid, name, other),
        }
    }

    /// Would the pod fit if no GPU of the node were cordoned?
    fn ends_with_uncordon(&self, pod: &PodFacts, name: &str) -> bool {
        let (Some(node), Ok(request)) = (self.books.node(name), &pod.request) else {
            return false;
        };
        if !node.gpus().iter().any(|gpu| node.cordons(gpu)) {
            return false;
        }
        let mut view = node.view().clone();
        for (card, gpu) in view.cards.iter_mut().zip(node.gpus()) {
            card.usable = gpu.healthy;
        }
        self.scores.fit(&view, request).is_ok()
    }

    /// One sentence on what speaks for these charges (card index as in
    /// [`crate::NodeView::cards`], MiB) on a node as it is now; the pod itself must not be in the
    /// books. None if the node has no such cards or the request is unreadable.
    pub(crate) fn speaks_for(
        &self,
        pod: &PodFacts,
        node: &str,
        charges: &[(usize, Mib)],
    ) -> Option<String> {
        let request = pod.request.as_ref().ok()?;
        let sentence = self
            .scores
            .because(self.books.node(node)?.view(), request, charges);
        Some(sentence).filter(|sentence| !sentence.is_empty())
    }

    /// Why a pod with these constraints may not go to the node, whatever is free there.
    pub(crate) fn excluded(&self, node: &str, constraints: &Constraints) -> Option<&'static str> {
        intree::refuses(self.books.node(node)?.facts()?, constraints)
    }

    /// May a pod with these constraints go to the node? Not if there is no Node of the name: its report may be left over.
    pub(crate) fn is_open(&self, node: &str, constraints: &Constraints) -> bool {
        let facts = self.books.node(node).and_then(|node| node.facts());
        facts.is_some_and(|facts| intree::refuses(facts, constraints).is_none())
    }

    /// Why kube-scheduler's own filters refuse the node for the pod before they ask the extender, as
    /// far as can be known; see [`intree`]. The pod itself must not be in the node's books.
    pub(crate) fn refused_in_tree(&self, node: &str, pod: &PodFacts) -> Option<&'static str> {
        let excluded = self.excluded(node, &pod.constraints);
        let node = self.books.node(node)?;
        let facts = node.facts()?;
        let request = pod.request.as_ref().ok()?;
        if excluded.is_some() {
            excluded
        } else if request.cpu_milli > node.view().cpu_free_milli {
            Some("not enough CPU")
        } else if request.ram > node.view().ram_free {
            Some("not enough memory of the host")
        } else if facts.pods.is_some_and(|pods| node.count() >= pods) {
            Some("as many pods as the node takes")
        } else {
            None
        }
    }
}
