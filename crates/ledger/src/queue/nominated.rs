//! Who is to get the room that preemption makes.
//!
//! kube-scheduler may ask for a nominated pod before our watch shows that its victim is gone. It
//! takes the refusal for the end of the preemption and clears the nomination. The pod's claim
//! outlives that for a while, or the room would go to a pod of lower priority as soon as we see it.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;

use super::Queue;
use crate::books::{Books, Uid};

/// A refused pod's claim to room on the node that it is or was nominated to.
#[derive(Debug)]
pub(super) struct Claim {
    node: Arc<str>,
    /// When it ends if the pod is nominated no more.
    until: Duration,
}

impl Queue {
    /// Is room kept on this node?
    pub(super) fn is_kept(&self, node: &str) -> bool {
        self.nominated.contains_key(node)
    }

    /// The pods that are nominated to a node, or have a claim there.
    pub(crate) fn nominated_on(&self, node: &str) -> impl Iterator<Item = &Uid> {
        self.nominated.get(node).into_iter().flatten()
    }

    /// Keeps the index of nominations. Those that hold room no more, or hold less of it because
    /// their victims are leaving, make room for others.
    pub(super) fn index_nomination(&mut self, old: Option<&PodFacts>, new: Option<&PodFacts>) {
        let key = |pod: &PodFacts| (self.holds_room_on(pod), pod.gated, pod.deleting);
        if old.map(key) == new.map(key) && old.is_some() {
            return;
        }
        let from = old.and_then(|pod| self.holds_room_on(pod));
        let to = new.and_then(|pod| self.holds_room_on(pod));
        for node in old
            .into_iter()
            .chain(new)
            .filter_map(|pod| pod.node.as_ref())
        {
            if self.nominated.contains_key(node) {
                self.waiting.room_on(node);
            }
        }
        let Some(uid) = old.or(new).map(|pod| &pod.uid) else {
            return;
        };
        if let Some(node) = from {
            self.unindex(uid, &node);
        }
        if self.claims.get(uid).map(|claim| &claim.node) != to.as_ref() {
            self.claims.remove(uid);
        }
        if let Some(node) = to {
            self.nominated.entry(node).or_default().insert(uid.clone());
        }
    }

    /// A pod reserves: what it was nominated for is free.
    pub(super) fn nomination_changed(&mut self, uid: &str, books: &Books) {
        let pod = books.pod(uid);
        if let Some(node) = pod.and_then(|pod| pod.nominated.as_ref()) {
            self.waiting.room_on(node);
        }
        self.end_claim(uid, books);
    }

    /// A pod is refused: should it be nominated, its claim will outlive that.
    pub(crate) fn claim(&mut self, pod: &PodFacts, books: &Books, until: Duration) {
        let known = books.pod(&pod.uid);
        let Some(known) = known.filter(|known| known.node.is_none() && !known.released) else {
            return;
        };
        let Some(node) = known.nominated.clone().or_else(|| pod.nominated.clone()) else {
            return;
        };
        self.end_claim(&pod.uid, books);
        let pods = self.nominated.entry(node.clone()).or_default();
        pods.insert(pod.uid.clone());
        self.claims.insert(pod.uid.clone(), Claim { node, until });
    }

    /// Ends the claims whose time is over.
    pub(crate) fn expire_claims(&mut self, books: &Books, now: Duration, ttl: Duration) {
        let mut over = Vec::new();
        for (uid, claim) in &mut self.claims {
            let known = books.pod(uid);
            if known.is_some_and(|known| known.nominated.as_ref() == Some(&claim.node)) {
                claim.until = now + ttl;
            } else if claim.until <= now {
                over.push(uid.clone());
            }
        }
        over.iter().for_each(|uid| self.end_claim(uid, books));
    }

    fn end_claim(&mut self, uid: &str, books: &Books) {
        if let Some(Claim { node, .. }) = self.claims.remove(uid) {
            let known = books.pod(uid);
            if known.is_none_or(|known| known.nominated.as_ref() != Some(&node)) {
                self.unindex(uid, &node);
            }
        }
    }

    /// The node where an unbound pod is nominated or has a claim.
    fn holds_room_on(&self, pod: &PodFacts) -> Option<Arc<str>> {
        if pod.node.is_some() || pod.released {
            return None;
        }
        let claim = || Some(self.claims.get(&pod.uid)?.node.clone());
        pod.nominated.clone().or_else(claim)
    }

    fn unindex(&mut self, uid: &str, node: &str) {
        if let Some(pods) = self.nominated.get_mut(node) {
            pods.remove(uid);
            if pods.is_empty() {
                self.nominated.remove(node);
            }
            self.waiting.room_on(node);
        }
    }
}
