//! The costs of nodes for requests: the remembered answers of filter, and the lessons of policies.
//!
//! All of it follows from the books and could be computed from them at any time. It does not know
//! pods' names, reservations or who waits.

mod answers;
mod learn;
mod slots;

use std::sync::Arc;

use gpustow_pack::{
    Choice, Cost, Mib, NodeGpus, Policy, PolicyKind, Request, Tight, Traits, because, cost,
    fit_among, fit_counting,
};

use crate::books::{Books, Event, Gate, may_come};
use crate::budget::Budget;
use crate::reason::Reason;
use answers::Answers;
pub use answers::ClassId;
use learn::Demand;
pub use slots::Slot;

/// Remembered answers and lessons. See the module's documentation.
#[derive(Debug, Default)]
pub struct Scores {
    /// The policy for pods that name none.
    policy: PolicyKind,
    answers: Answers,
    tight: Tight,
    demand: Demand,
    /// Pods that asked for GPU memory when `tight` was learnt.
    learnt: usize,
    /// Decisions since scarcity was looked at.
    since_look: usize,
}

impl Scores {
    /// Nothing is known yet.
    pub fn new(policy: PolicyKind) -> Self {
        Self {
            policy,
            ..Self::default()
        }
    }

    /// Pods that name no policy get this one from now on.
    pub fn set_policy(&mut self, policy: PolicyKind) {
        self.policy = policy;
    }

    /// The policy that applies to a request.
    pub fn policy(&self, request: &Request) -> PolicyKind {
        request.policy.unwrap_or(self.policy)
    }

    fn rule(&self, request: &Request) -> &dyn Policy {
        self.policy(request).with(&self.tight)
    }

    /// Something has changed in the books. Nodes with equal views are made to share one.
    pub fn follow(&mut self, event: &Event, books: &mut Books) {
        match event {
            Event::Pod { old, new, .. } => {
                self.demand.moved(old.as_deref(), new.as_deref());
                if let Some(pod) = new.as_ref().filter(|pod| may_come(pod))
                    && let Some(request) = pod.asks.request()
                    && request.rules.is_none()
                {
                    self.answers.expect(request, self.policy(request));
                }
            }
            Event::Node { name, .. } => {
                if let Some((gate, view)) = books.shared_view(name) {
                    self.answers.changed(name, gate, view);
                }
            }
            Event::NodeGone(name) => self.answers.gone(name),
            _ => {}
        }
    }

    /// Where a node's answers are; none if there is no such node.
    #[inline]
    pub fn slot(&self, name: &str) -> Option<Slot> {
        self.answers.slot(name)
    }

    /// The gate of the node in this slot, which every question checks first.
    pub fn gate(&self, slot: Slot) -> Gate {
        self.answers.gate(slot)
    }

    /// The request as the answers know it, of which so many nodes are asked next; good until the next is looked up.
    pub fn class(&mut self, request: &Arc<Request>, nodes: usize) -> ClassId {
        let policy = self.policy(request);
        self.answers.class(request, policy, nodes)
    }

    /// The cost of the node for the request, which is of this class. It comes from memory if an equal node was
    /// evaluated before.
    pub fn cost(
        &mut self,
        class: ClassId,
        slot: Slot,
        request: &Request,
        budget: &mut Budget,
    ) -> Result<Cost, Reason> {
        let found = match self.answers.known(class, slot) {
            Some(found) => found,
            None => {
                let policy = self.policy(request).with(&self.tight);
                let find =
                    |view: &NodeGpus| budget.spend(|steps| cost(view, request, policy, steps));
                self.answers.find(class, slot, find)?
            }
        };
        found.map_err(Reason::Fit)
    }

    /// The best placement on a view within the budget of the call, whatever the rules of the request.
    pub(crate) fn fit_within(
        &self,
        view: &NodeGpus,
        request: &Request,
        budget: &mut Budget,
    ) -> Result<Choice, Reason> {
        let policy = self.rule(request);
        let found = budget.spend(|steps| fit_counting(view, request, policy, steps))?;
        found.map_err(Reason::Fit)
    }

    /// The best placement among the cards that the rules of the request allow.
    pub(crate) fn fit_among(
        &self,
        view: &NodeGpus,
        traits: &[Traits<'_>],
        request: &Request,
        budget: &mut Budget,
    ) -> Result<Choice, Reason> {
        let policy = self.rule(request);
        let found = budget.spend(|steps| fit_among(view, traits, request, policy, steps))?;
        found.map_err(Reason::Fit)
    }

    /// One sentence with the reasons for these charges.
    pub fn because(&self, view: &NodeGpus, request: &Request, charges: &[(usize, Mib)]) -> String {
        because(view, request, charges, self.policy(request), &self.tight)
    }
}
