//! Nodes where pods will soon have room, because kube-scheduler had others evicted there. A restart loses this record:
//! kube-scheduler's next question for victims restores it.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;

use super::{Cause, Earmark, Earmarks};
use crate::books::{Books, Uid};
use crate::maps::HashMap;

/// For so long a pod waits for that room.
const PATIENCE: Duration = Duration::from_secs(60);

/// The node of each pod, and since when the pod waits for its room.
#[derive(Debug, Default)]
pub(super) struct Expected(HashMap<Uid, (Arc<str>, Duration)>);

impl Expected {
    /// The pod waits on this node from now on. Pods that have waited long enough are forgotten.
    fn note(&mut self, uid: &Uid, node: &Arc<str>, now: Duration) {
        self.0.retain(|_, (_, since)| now < *since + PATIENCE);
        self.0.insert(uid.clone(), (node.clone(), now));
    }
}

impl Earmarks {
    /// The room is earmarked meanwhile, for kube-scheduler may end the nomination.
    pub fn expect_room(&mut self, uid: &Uid, node: &Arc<str>, books: &Books, now: Duration) {
        let since = match self.expected.0.get(uid) {
            Some((known, since)) if known == node && now < *since + PATIENCE => *since,
            _ => {
                self.expected.note(uid, node, now);
                now
            }
        };
        if self.earmark(uid).is_none() && !self.nominations.is_over(uid) {
            let earmark = Earmark::of_node(node, Cause::Nominated, since + PATIENCE);
            self.put(uid, earmark, books);
        }
    }

    /// kube-scheduler ended a nomination. Its victims may be on their way out, and another replica may have ended it that
    /// knows nothing of them.
    pub(super) fn nomination_ended(
        &mut self,
        uid: &Uid,
        old: Option<&PodFacts>,
        new: Option<&PodFacts>,
    ) {
        let before = old.filter(|pod| !pod.own_nomination);
        let waits = new.is_some_and(|pod| pod.node.is_none() && pod.nominated.is_none());
        if let Some(node) = before.and_then(|pod| pod.nominated.as_ref())
            && waits
        {
            self.expected.note(uid, node, self.now);
        }
    }

    /// The node on which room is expected for the pod.
    pub fn expected_on(&self, uid: &str, now: Duration) -> Option<&Arc<str>> {
        let expected = self.expected.0.get(uid);
        let expected = expected.filter(|(_, since)| now < *since + PATIENCE);
        expected.map(|(node, _)| node)
    }
}
