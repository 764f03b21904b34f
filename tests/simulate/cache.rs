//! kube-scheduler's memory: pods and nodes as it saw them last, and the place of each waiting pod in its queue.

use std::collections::BTreeMap;
use std::time::Duration;

use gpustow_api::names;
use serde_json::Value;
use tokio::time::Instant;

use crate::check::gated;
use crate::preempt::{nominated, priority};
use crate::scheduler::uid;
use crate::server::Copy;

/// As in scheduler-config.
const BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(2);
/// podMaxInUnschedulablePodsDuration.
const FLUSH: Duration = Duration::from_secs(300);

/// Where a waiting pod is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    /// It is looked at from then on.
    Queued(Instant),
    /// An event, or the flush, must wake it.
    Refused(Instant),
    /// Its bind is under way, there.
    Assumed,
}

impl Place {
    /// When the pod is looked at, if nothing happens before.
    pub(crate) fn due(self) -> Option<Instant> {
        match self {
            Self::Queued(at) => Some(at),
            Self::Refused(since) => Some(since + FLUSH),
            Self::Assumed => None,
        }
    }
}

/// How long a pod rests after its last try.
pub(crate) fn backoff(tries: u32) -> Duration {
    (BACKOFF * 2_u32.pow(tries.clamp(1, 4) - 1)).min(MAX_BACKOFF)
}

/// May it look at the pod, if that waits?
pub(crate) fn is_open(pod: &Value) -> bool {
    !gated(pod) && !pod["metadata"]["deletionTimestamp"].is_string()
}

#[derive(Default)]
pub(crate) struct Cache {
    pub(crate) pods: BTreeMap<String, Copy>,
    pub(crate) nodes: BTreeMap<String, Copy>,
    /// PodGroups by name.
    pub(crate) groups: BTreeMap<String, Copy>,
    pub(crate) places: BTreeMap<String, (Place, u32)>,
    /// Where a pod is assumed to be, by UID.
    pub(crate) assumed: BTreeMap<String, String>,
    /// The node with which it begins to look, by its number.
    pub(crate) next: usize,
}

impl Cache {
    /// The pod has been created or has changed: it is looked at again.
    pub(crate) fn queue(&mut self, uid: &str) {
        let now = Instant::now();
        let first = || (Place::Queued(now), 0);
        let (place, _) = self.places.entry(uid.to_owned()).or_insert_with(first);
        if let Place::Refused(_) = place {
            *place = Place::Queued(now);
        }
    }

    /// An event has happened that may let refused pods in, after their rests, which began when they were refused.
    pub(crate) fn wake(&mut self) {
        for (place, tries) in self.places.values_mut() {
            if let Place::Refused(since) = *place {
                *place = Place::Queued(Instant::now().max(since + backoff(*tries)));
            }
        }
    }

    /// The pods that it may look at, and when.
    pub(crate) fn due(&self) -> impl Iterator<Item = (Instant, &Copy)> {
        let all = self.places.iter();
        let all = all.filter_map(|(uid, (place, _))| Some((place.due()?, self.pods.get(uid)?)));
        all.filter(|(_, pod)| is_open(pod) && self.is_complete(pod))
    }

    /// The pods that are bound to a node or assumed to be on it.
    pub(crate) fn here<'a>(&'a self, node: &'a str) -> impl Iterator<Item = &'a Copy> {
        let here = self.pods.iter().filter(move |(uid, pod)| {
            pod["spec"]["nodeName"] == *node || self.assumed.get(*uid).is_some_and(|it| it == node)
        });
        here.map(|(_, pod)| pod)
    }

    /// The pods that are nominated there and come before this pod.
    pub(crate) fn nominated<'a>(
        &'a self,
        node: &'a str,
        pod: &'a Value,
    ) -> impl Iterator<Item = &'a Copy> {
        let waiting = self.pods.iter().filter(move |(other, it)| {
            nominated(it) == Some(node)
                && !it["spec"]["nodeName"].is_string()
                && !self.assumed.contains_key(*other)
                && **other != uid(pod)
                && priority(it) >= priority(pod)
        });
        waiting.map(|(_, pod)| pod)
    }

    pub(crate) fn allocatable(&self, node: &str) -> u64 {
        let node = self.nodes.get(node);
        let text = node.and_then(|it| it["status"]["allocatable"][names::GPU_MEM].as_str());
        text.and_then(|it| it.parse().ok()).unwrap_or(0)
    }
}
