//! Which pods room on a node is offered to: they were woken or ungated for it, and have not asked for it since.

use std::sync::Arc;
use std::time::Duration;

use crate::books::Uid;
use crate::maps::HashMap;

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Offered {
    /// The node of each offer, and until when it is the pod's own.
    all: HashMap<Uid, (Arc<str>, Duration)>,
    on: HashMap<Arc<str>, Vec<Uid>>,
    /// The node that was offered to each pod with a reservation: filter's answer for this node stays valid until the
    /// bind.
    kept: HashMap<Uid, Arc<str>>,
    /// The pod that may get an extra offer, beyond the pods that fit together; set while the ledger examines it.
    extra: Option<Uid>,
}

impl Offered {
    /// Offers room on the node to the pod until then, and ends its earlier offer.
    pub fn put(&mut self, uid: &Uid, node: &Arc<str>, until: Duration) {
        self.end(uid);
        self.all.insert(uid.clone(), (node.clone(), until));
        self.on.entry(node.clone()).or_default().push(uid.clone());
    }

    /// The pod's offer lasts until then.
    pub fn lasts(&mut self, uid: &str, until: Duration) {
        if let Some((_, its)) = self.all.get_mut(uid) {
            *its = until;
        }
    }

    /// An offer ends: the node where it was.
    pub fn end(&mut self, uid: &str) -> Option<Arc<str>> {
        let (node, _) = self.all.swap_remove(uid)?;
        if let Some(on) = self.on.get_mut(&node) {
            on.retain(|other| **other != *uid);
            if on.is_empty() {
                self.on.swap_remove(&node);
            }
        }
        Some(node)
    }

    /// The pod has a reservation: filter's answer for the offered node stays valid until the bind.
    pub fn keep(&mut self, uid: &str, node: Arc<str>) {
        self.kept.insert(uid.into(), node);
    }

    /// The pod waits again, or is gone.
    pub fn forget(&mut self, uid: &str) {
        self.kept.swap_remove(uid);
    }

    /// Sets the pod that may get an extra offer, beyond the pods that fit together, while the ledger examines it.
    pub fn set_extra(&mut self, uid: Option<&Uid>) {
        self.extra = uid.cloned();
    }

    /// The node of the pod's offer, and the end of the offer.
    pub fn to(&self, uid: &str) -> Option<&(Arc<str>, Duration)> {
        self.all.get(uid)
    }

    /// The pods that room on the node is offered to.
    pub fn on(&self, node: &str) -> &[Uid] {
        self.on.get(node).map_or(&[], Vec::as_slice)
    }

    /// Is nothing offered?
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Does the pod's offer still last?
    pub fn may_come(&self, uid: &str, now: Duration) -> bool {
        self.to(uid).is_some_and(|(_, end)| *end > now)
    }

    /// Is room on this node offered to the pod, still valid for its bind, or examined for an extra offer?
    pub fn is_for(&self, uid: &str, node: &str) -> bool {
        let is_here = |it: &Arc<str>| **it == *node;
        self.to(uid).is_some_and(|(offered, _)| is_here(offered))
            || self.extra.as_deref() == Some(uid)
            || self.kept.get(uid).is_some_and(is_here)
    }
}
