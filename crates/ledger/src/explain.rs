//! The answer that filter would give about one node, for people: nothing is reserved.

use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_api::gpunode::Gpu;
use gpustow_api::intree::{self, Constraints};
use gpustow_books::{Budget, Host, Node, Reason};
use gpustow_means::Sight;
use gpustow_pack::{Choice, Mib, Refusal, Starts};

use crate::Ledger;

impl Ledger {
    /// The place on one node where the pod would go now, or the reason why it would not. Card indices are as in
    /// [`crate::NodeView::cards`]. Of two nodes, the node with the lower cost is preferred.
    ///
    /// # Errors
    /// The reason that filter would give. A pod whose request is unreadable fits nowhere; its own error is more exact
    /// than this one.
    pub fn explain(&self, pod: &PodFacts, node: &str, now: Duration) -> Result<Choice, Reason> {
        let sight = self.sight(now);
        sight.check(node)?;
        let choice = sight.choose(node, pod);
        choice.map_err(|reason| told(&sight, pod, node, reason))
    }

    /// One sentence on the advantages of these charges (card index as in [`crate::NodeView::cards`], MiB) on a node as
    /// it is now. The pod itself must not be in the books. None if the node lacks such cards or the request is
    /// unreadable.
    #[must_use]
    pub fn speaks_for(
        &self,
        pod: &PodFacts,
        node: &str,
        charges: &[(usize, Mib)],
    ) -> Option<String> {
        let request = pod.asks.readable().ok()?;
        let view = self.parts.books.node(node)?.view();
        let sentence = self.parts.scores.because(view, request, charges);
        Some(sentence).filter(|sentence| !sentence.is_empty())
    }

    /// The pods that start on these nodes, and for how many seconds the first has.
    #[must_use]
    pub fn starting_on(&self, nodes: &[&str]) -> (usize, u64) {
        let books = &self.parts.books;
        let nodes = nodes.iter().filter_map(|name| books.node(name));
        let starting = nodes.flat_map(|node| node.shares());
        let starting = starting.filter(|(_, hold, _)| hold.starts() > Starts::None);
        let ages = starting.map(|(uid, ..)| books.start_age(uid));
        ages.fold((0, 0), |(count, first), age| (count + 1, first.max(age)))
    }

    /// Why a pod with these constraints may not go to the node, whatever is free there.
    #[must_use]
    pub fn excluded(&self, node: &str, constraints: &Constraints) -> Option<&'static str> {
        self.parts.books.excluded(node, constraints)
    }

    /// Why kube-scheduler's own filters refuse the node for the pod before they ask the extender, as
    /// far as can be known; see [`gpustow_api::intree`]. The pod itself must not be in the node's books.
    #[must_use]
    pub fn refused_in_tree(&self, node: &str, pod: &PodFacts) -> Option<&'static str> {
        self.parts.books.refused_in_tree(node, pod)
    }

    /// The label or taint of the node that is the cause of that, if it is one.
    #[must_use]
    pub fn cause_in_tree(&self, node: &str, pod: &PodFacts) -> Option<String> {
        intree::cause(self.parts.books.node(node)?.facts()?, &pod.constraints)
    }
}

/// The reason that people see where the node does not take the pod for `reason`.
pub(crate) fn told(sight: &Sight<'_>, pod: &PodFacts, name: &str, reason: Reason) -> Reason {
    match reason {
        Reason::Fit(Refusal::Unhealthy) => barred(sight, pod, name)
            .unwrap_or_else(|| sight.refused_because(&pod.uid, name, reason)),
        other => sight.refused_because(&pod.uid, name, other),
    }
}

/// The obstacle for the pod, if it would fit on the node without GPUs that are cordoned or left to claims.
fn barred(sight: &Sight<'_>, pod: &PodFacts, name: &str) -> Option<Reason> {
    let node = sight.books.node(name)?;
    let any = |bars: fn(&Node, &Gpu) -> bool| node.gpus().iter().any(|gpu| bars(node, gpu));
    let reason = match any(Node::cordons) {
        true => Reason::Cordoned,
        false if any(Node::leaves) => Reason::Claimed,
        false => return None,
    };
    let mut trial = sight.trial().keeping_nothing();
    trial.uncordon(name, pod);
    let all = &mut Budget::all();
    (trial.fits(pod, name, Host::Beside, all) == Some(true)).then_some(reason)
}
