//! What filter would say of one node, for people: nothing is reserved.

use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_pack::{Choice, Mib, NodeGpus, Refusal, Request, because};

use crate::{Ledger, Reason};

impl Ledger {
    /// Where on one node the pod would go now, or why it would not. Card indices are those of
    /// [`crate::NodeView::cards`]; of two nodes the one with the lower cost is preferred.
    ///
    /// # Errors
    /// The reason that filter would give. A pod whose request is unreadable fits nowhere; its own
    /// error says more than this one.
    pub fn explain(&self, pod: &PodFacts, node: &str, now: Duration) -> Result<Choice, Reason> {
        self.check(node, now)?;
        let request = pod.request.as_ref();
        let request = request.map_err(|_| Reason::Fit(Refusal::TooComplex))?;
        self.choose(node, pod, request)
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
        let request = pod.request.as_ref().ok()?;
        let sentence = self.because(&self.nodes.get(node)?.view, request, charges);
        Some(sentence).filter(|sentence| !sentence.is_empty())
    }

    pub(crate) fn because(
        &self,
        view: &NodeGpus,
        request: &Request,
        charges: &[(usize, Mib)],
    ) -> String {
        because(view, request, charges, self.policy(request), &self.tight)
    }

    /// CPU in thousandths of a core and host memory that the pods on a node leave free.
    #[must_use]
    pub fn left(&self, node: &str) -> Option<(u64, Mib)> {
        let view = &self.nodes.get(node)?.view;
        Some((view.cpu_free_milli, view.ram_free))
    }
}
