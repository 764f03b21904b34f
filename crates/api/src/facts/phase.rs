//! How far a pod is on its way to a node, beginning with one that waits.

use std::sync::Arc;

use super::{Asks, NO_CONSTRAINTS, NO_CONTAINERS, NO_LIMITS, OWN_SCHEDULER, PodFacts};
use crate::Regards;
use crate::limit::Enforce;

/// How far a pod is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase<'a> {
    /// A scheduling gate that is not ours holds it.
    Gated,
    /// Our scheduling gate holds it.
    Queued,
    /// kube-scheduler may bind it.
    Pending,
    /// It is bound to this node.
    Bound(&'a Arc<str>),
    /// It holds nothing any more.
    Released,
}

impl PodFacts {
    /// A pod that waits, is known by its names alone, and requests no GPU memory.
    #[must_use]
    pub fn new(namespace: &str, name: &str, uid: &str) -> Self {
        Self {
            uid: uid.into(),
            namespace: namespace.into(),
            name: name.into(),
            resource_version: Arc::from("1"),
            created: 0,
            started: i64::MAX,
            node: None,
            starting_since: None,
            scheduler: OWN_SCHEDULER.clone(),
            priority: 0,
            nominated: None,
            own_nomination: false,
            asks: Asks::nothing(),
            containers: NO_CONTAINERS.clone(),
            models: NO_CONTAINERS.clone(),
            constraints: NO_CONSTRAINTS.clone(),
            repels: Regards::NoPod,
            group: None,
            labels: Arc::default(),
            assignment: None,
            epoch: None,
            deleting: false,
            gone_by: None,
            gated: false,
            queued: false,
            preempts: true,
            released: false,
            waiting: false,
            grace: 0,
            asked_back: None,
            preempted: false,
            action: None,
            controller: None,
            evictable: None,
            goes_with_node: false,
            sleep: None,
            tied: false,
            limits: NO_LIMITS.clone(),
            enforce: Enforce::default(),
            reserved_on: None,
            stands_for: None,
            refusal: 0,
        }
    }

    /// How far it is on its way.
    #[must_use]
    pub fn phase(&self) -> Phase<'_> {
        match &self.node {
            _ if self.released => Phase::Released,
            Some(node) => Phase::Bound(node),
            None if self.gated => Phase::Gated,
            None if self.queued => Phase::Queued,
            None => Phase::Pending,
        }
    }

    /// Is it on its way to a node, but for a gate of ours?
    #[must_use]
    pub fn may_be_placed(&self) -> bool {
        !self.deleting && matches!(self.phase(), Phase::Queued | Phase::Pending)
    }

    /// The UID of the pod that owns it, if it is a placeholder.
    #[must_use]
    pub fn placeholder_owner(&self) -> Option<&Arc<str>> {
        self.stands_for.as_deref()?.first()
    }

    /// Does it request GPU memory, in a way that can be read?
    #[must_use]
    pub fn requests_memory(&self) -> bool {
        self.asks.request().is_some()
    }
}
