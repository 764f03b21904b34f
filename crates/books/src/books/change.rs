//! The changes that a verb of the books has made.

use std::sync::Arc;

use gpustow_api::PodFacts;

use super::Uid;

/// The events that scores and queue have to follow, in the order in which they happened.
#[must_use = "scores and queue have to follow"]
#[derive(Debug, Default)]
pub struct Change(Vec<Event>);

impl Change {
    pub(super) fn note(&mut self, event: Event) {
        self.0.push(event);
    }

    /// The events, in order.
    pub fn into_events(self) -> impl Iterator<Item = Event> {
        self.0.into_iter()
    }
}

/// One change.
#[derive(Debug)]
pub enum Event {
    /// A pod has come, changed or gone.
    Pod {
        /// Of the pod.
        uid: Uid,
        /// The pod before the change, if it was known.
        old: Option<Arc<PodFacts>>,
        /// The pod after the change, unless it is gone.
        new: Option<Arc<PodFacts>>,
    },
    /// A node has changed, or may have; it may have gained room.
    Node {
        /// Its name.
        name: Arc<str>,
        /// Has it gained room?
        gained: bool,
    },
    /// Nothing is known of the node any more.
    NodeGone(Arc<str>),
    /// A pod has left the node, or facts of the node that filters read have changed. Filters other than ours may decide
    /// differently now.
    Opened(Arc<str>),
    /// Memory is reserved for a pod that had none.
    Reserved {
        /// Of the pod.
        uid: Uid,
        /// Where.
        node: Arc<str>,
    },
    /// A pod's reservation was given back, and it sleeps.
    Released(Uid),
    /// Something after us refused the node that was reserved for the pod.
    Refused {
        /// Of the pod.
        uid: Uid,
        /// Where.
        node: Arc<str>,
    },
    /// No bind came in time: as far as is known, something after us refused the node that was reserved for the pod.
    Expired {
        /// Of the pod.
        uid: Uid,
        /// Where.
        node: Arc<str>,
    },
    /// A bind of the pod came too late.
    Conflict(Uid),
    /// The whole list of pods is in.
    Listed,
}
