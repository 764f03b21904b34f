//! From the reservation to the bound pod.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Assignment, PodFacts};
use gpustow_books::{AssumedPod, Node, Outcome, Reason};
use gpustow_pack::{Choice, Request};
use thiserror::Error;

use crate::Ledger;

/// Why a bind is not even tried.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum BindRefusal {
    /// The node does not do any more.
    #[error("node {node} does not fit any more: {}", .reason.text())]
    NoFit {
        /// The node that kube-scheduler chose.
        node: String,
        /// Why it does not do.
        reason: Reason,
    },
    /// A Binding of the same pod to another node is under way.
    #[error("a bind of this pod to node {0} is still under way")]
    UnderWay(String),
    /// The pod is bound already.
    #[error("the pod is already bound to node {0}")]
    Bound(String),
    /// The pod's own constraints keep it off the node: kube-scheduler would not have asked.
    #[error("node {node} is not for this pod: {reason}")]
    Excluded {
        /// The node that was asked for.
        node: String,
        /// The reason why the node is not for the pod.
        reason: &'static str,
    },
}

impl Ledger {
    /// The assignment to send for this pod on this node; from here on its memory is held until
    /// [`Ledger::end_bind`], to be called once for every success.
    ///
    /// # Errors
    /// If the node cannot take the pod any more (a reservation without a bind under way is then
    /// gone), if a bind to another node is under way, or if the pod is bound.
    pub fn begin_bind(
        &mut self,
        pod: &PodFacts,
        node: &str,
        now: Duration,
    ) -> Result<Arc<Assignment>, BindRefusal> {
        let begun = self.begin(pod, node, now);
        if matches!(begun, Err(BindRefusal::NoFit { .. })) {
            let change = self.parts.books.conflict(&pod.uid);
            self.follow(change);
        }
        begun
    }

    fn begin(
        &mut self,
        pod: &PodFacts,
        node: &str,
        now: Duration,
    ) -> Result<Arc<Assignment>, BindRefusal> {
        let uid = &pod.uid;
        let refusal = |reason| BindRefusal::NoFit {
            node: node.to_owned(),
            reason,
        };
        let Ok(request) = pod.asks.readable() else {
            return Err(refusal(Reason::Fit(gpustow_pack::Refusal::TooComplex)));
        };
        let known = self.parts.books.pod(uid);
        if let Some(bound) = known.and_then(|known| known.node.as_ref()) {
            return Err(BindRefusal::Bound(bound.to_string()));
        }
        if let Some(reason) = self.parts.books.excluded(node, &pod.constraints) {
            self.release(uid);
            let node = node.to_owned();
            return Err(BindRefusal::Excluded { node, reason });
        }
        if self.parts.books.is_unfenced(uid) {
            return Err(refusal(Reason::Unfenced));
        }
        match self.parts.books.assumed(uid) {
            // Annotations may have changed the pod's request since filter saw it.
            Some(held) if held.is_for(node, request) => {}
            Some(held) if held.is_binding() => {
                return Err(BindRefusal::UnderWay(held.node().to_string()));
            }
            _ => {
                self.release(uid);
                self.sight(now).check(node).map_err(refusal)?;
                let choice = self.sight(now).choose(node, pod).map_err(refusal)?;
                let deadline = now + self.parts.config.reservation_ttl;
                self.reserve(pod, node, request, &choice, deadline);
            }
        }
        let begun = self.parts.books.begin_bind(uid, node).map_err(|reason| {
            self.release(uid);
            refusal(reason)
        });
        if begun.is_ok() {
            self.gang_binds(pod, now);
        }
        begun
    }

    /// Ends the bind that [`Ledger::begin_bind`] began. `pod` is the pod as it was sent.
    pub fn end_bind(&mut self, pod: &PodFacts, outcome: Outcome, now: Duration) {
        let change = self.parts.books.end_bind(pod, &outcome, now);
        self.follow(change);
    }

    /// One sentence on why this pod's reservation is where it is.
    #[must_use]
    pub fn reserved_because(&self, uid: &str) -> Option<&str> {
        Some(self.parts.books.assumed(uid)?.because())
    }

    /// True while the outcome of a sent bind of this pod is unknown.
    #[must_use]
    pub fn is_binding(&self, uid: &str) -> bool {
        let held = self.parts.books.assumed(uid);
        held.is_some_and(AssumedPod::is_binding)
    }

    /// Ends reservations whose bind never came, because a check after the extender refused their nodes. Also ends
    /// earmarks whose time is over.
    pub fn expire(&mut self, now: Duration) {
        self.parts.now = now;
        let ttl = self.parts.config.claim_ttl;
        self.parts.note_late_borrowers();
        self.parts
            .change(|earmarks, books| earmarks.expire(books, now, ttl));
        let change = self.parts.books.expire(now);
        self.follow(change);
    }

    /// Pods that started alone for the longest time since the last call: others wait for them no more.
    pub fn take_late_starts(&mut self) -> Vec<Arc<PodFacts>> {
        let late = self.parts.books.take_late_starts();
        let pods = late.iter().filter_map(|uid| self.parts.books.pod(uid));
        pods.cloned().collect()
    }

    /// Writes a choice into the books.
    pub(crate) fn reserve(
        &mut self,
        pod: &PodFacts,
        name: &str,
        request: &Arc<Request>,
        choice: &Choice,
        deadline: Duration,
    ) {
        let placement = &choice.placement;
        let Some(view) = self.parts.books.node(name).map(Node::view) else {
            return;
        };
        let because = self.parts.scores.because(view, request, &placement.charges);
        let change = self
            .parts
            .books
            .reserve(pod, name, request, placement, because, deadline);
        self.follow(change);
    }

    /// Gives a reservation back, unless a bind of it is under way.
    fn release(&mut self, uid: &str) {
        let change = self.parts.books.release(uid);
        self.follow(change);
    }
}
