//! Where pods have room soon, because kube-scheduler had others evicted there. Lost at a restart: kube-scheduler's next
//! question for victims tells it again.

use std::sync::Arc;
use std::time::Duration;

use super::Queue;
use crate::books::Uid;
use crate::maps::HashMap;

/// For so long a pod waits for that room.
const PATIENCE: Duration = Duration::from_secs(60);

/// The node of each pod, and since when the pod waits for its room.
#[derive(Debug, Default)]
pub(super) struct Expected(HashMap<Uid, (Arc<str>, Duration)>);

impl Queue {
    pub(crate) fn expect_room(&mut self, uid: &Uid, node: &Arc<str>, now: Duration) {
        let expected = &mut self.expected.0;
        expected.retain(|_, (_, since)| now < *since + PATIENCE);
        match expected.get(uid) {
            Some((known, _)) if known == node => {}
            _ => drop(expected.insert(uid.clone(), (node.clone(), now))),
        }
    }

    /// The node on which room is expected for the pod.
    pub(crate) fn expected_on(&self, uid: &str, now: Duration) -> Option<&Arc<str>> {
        let expected = self.expected.0.get(uid);
        let expected = expected.filter(|(_, since)| now < *since + PATIENCE);
        expected.map(|(node, _)| node)
    }
}
