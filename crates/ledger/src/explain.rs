//! What filter would say of one node, for people: nothing is reserved.

use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_pack::{Choice, Mib, Refusal};

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

    /// CPU in thousandths of a core and host memory that the pods on a node leave free.
    #[must_use]
    pub fn left(&self, node: &str) -> Option<(u64, Mib)> {
        let view = &self.nodes.get(node)?.view;
        Some((view.cpu_free_milli, view.ram_free))
    }
}
