//! Pods that start: from the reservation until the pod is Ready, its memory has settled, it is gone, or for so long at most.
//! They count from the first pod on that starts alone.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_pack::{Request, Starts};

use super::{Books, Change, Node, Uid};
use crate::maps::HashMap;

/// The known starts of pods, with times in seconds since 1970.
#[derive(Debug, Default)]
pub(super) struct Starting {
    /// Starts are counted.
    is_on: bool,
    /// A start holds others up for so many seconds at most.
    longest: i64,
    /// The current time, if it is known.
    unix: Option<i64>,
    /// Bound pods that are not Ready: since when they start, and when that was first seen, for clocks differ.
    pods: HashMap<Uid, (i64, i64)>,
    /// The pods that started alone for the longest allowed time: the extender is to report them.
    late: BTreeSet<Uid>,
    /// By namespace, how many of its pods ended or took too long while they started alone, and since when that is counted.
    failed: HashMap<Arc<str>, (u32, i64)>,
}

/// With this many failed starts in an hour, a namespace does not close GPUs. Its pods start next to others until the
/// hour is over.
const FAILURES: u32 = 10;
const HOUR: i64 = 3600;

impl Starting {
    pub(super) fn new(longest: Duration) -> Self {
        Self {
            longest: seconds(longest),
            ..Self::default()
        }
    }

    /// A start of the pod failed.
    fn fail(&mut self, pod: &PodFacts) {
        let now = self.unix.unwrap_or(0);
        let known = self.failed.entry(pod.namespace.clone()).or_default();
        if now.saturating_sub(known.1) >= HOUR {
            *known = (0, now);
        }
        known.0 = known.0.saturating_add(1);
    }

    /// How a pod of the namespace starts if it requests to start `alone`, or not.
    fn of(&self, alone: bool, namespace: &str) -> Starts {
        let failed = self.failed.get(namespace).zip(self.unix);
        let fails = failed.is_some_and(|((count, since), unix)| {
            *count >= FAILURES && unix.saturating_sub(*since) < HOUR
        });
        Starts::of(alone && !fails)
    }

    /// How many seconds ago did the pod's start begin?
    fn age(&self, uid: &str) -> i64 {
        let known = self.pods.get(uid).zip(self.unix);
        known.map_or(0, |(&(since, seen), unix)| {
            unix.saturating_sub(since.min(seen)).max(0)
        })
    }
}

fn seconds(time: Duration) -> i64 {
    i64::try_from(time.as_secs()).unwrap_or(i64::MAX)
}

fn starts_alone(pod: &PodFacts) -> bool {
    !pod.released && pod.asks.request().is_some_and(|it| it.alone)
}

impl Node {
    /// Has the pod's memory settled since then?
    fn has_settled(&self, uid: &str, since: i64) -> bool {
        let used = self.gpus().iter().flat_map(|gpu| &gpu.pods);
        let settled = used.filter(|it| it.uid == uid).map(|it| it.settled());
        let mut settled = settled.peekable();
        settled.peek().is_some() && settled.all(|at| at.is_some_and(|at| at >= since))
    }
}

impl Books {
    /// A start holds others up for so many seconds at most.
    pub(super) fn set_start_timeout(&mut self, longest: Duration, change: &mut Change) {
        let longest = seconds(longest);
        if std::mem::replace(&mut self.starting.longest, longest) != longest {
            self.follow_starts(None, change);
        }
    }

    /// Whether starts count.
    pub(crate) fn counts_starts(&self) -> bool {
        self.starting.is_on && self.starting.longest > 0
    }

    /// For how many seconds the pod has been starting.
    pub fn start_age(&self, uid: &str) -> u64 {
        u64::try_from(self.starting.age(uid)).unwrap_or(0)
    }

    /// A pod comes: starts count from the first on that starts alone.
    pub fn meet(&mut self, pod: &PodFacts, change: &mut Change) {
        if !starts_alone(pod) || std::mem::replace(&mut self.starting.is_on, true) {
            return;
        }
        let bound = self.pods().filter(|pod| pod.node.is_some());
        let bound: Vec<_> = bound.cloned().collect();
        bound.iter().for_each(|pod| self.note_start(pod));
        let reserved = self.assumed.iter();
        let reserved = reserved.map(|(uid, held)| (uid.clone(), held.node().clone()));
        for (uid, name) in reserved.collect::<Vec<_>>() {
            let node = self.nodes.get_mut(&name);
            node.and_then(|node| node.set_starts(&uid, Starts::Beside));
            self.touch(&name, change);
        }
        self.follow_starts(None, change);
    }

    /// How a pod starts that is reserved.
    pub(super) fn reserved_starts(&self, pod: &PodFacts, request: &Request) -> Starts {
        match self.counts_starts() {
            true => self.starting.of(request.alone, &pod.namespace),
            false => Starts::None,
        }
    }

    /// A copy of the pod comes.
    pub(super) fn note_start(&mut self, pod: &PodFacts) {
        let since = pod.starting_since.filter(|_| !pod.released);
        let Some(since) = since.filter(|_| self.starting.is_on) else {
            let was = self.starting.pods.swap_remove(&pod.uid);
            if was.is_some() && pod.released {
                self.starting.fail(pod);
            }
            return;
        };
        let unix = self.starting.unix.unwrap_or(since);
        let known = self.starting.pods.get(&pod.uid);
        if known.is_none_or(|(known, _)| *known != since) {
            self.starting.pods.insert(pod.uid.clone(), (since, unix));
        }
    }

    /// The pod, as it was last, is gone.
    pub(super) fn forget_start(&mut self, pod: &PodFacts) {
        if self.starts(pod) == Starts::Alone {
            self.starting.fail(pod);
        }
        self.starting.pods.swap_remove(&pod.uid);
    }

    /// How the bound pod starts there now.
    pub(super) fn starts(&self, pod: &PodFacts) -> Starts {
        let Some((since, _)) = self.starting.pods.get(&pod.uid) else {
            return Starts::None;
        };
        let node = pod.node.as_ref().and_then(|name| self.node(name));
        let has_settled = || node.is_some_and(|node| node.has_settled(&pod.uid, *since));
        match self.starting.age(&pod.uid) >= self.starting.longest || has_settled() {
            true => Starts::None,
            false => self.starting.of(starts_alone(pod), &pod.namespace),
        }
    }

    /// It is so late: starts may be over.
    pub fn tell_time(&mut self, unix: i64) -> Change {
        let mut change = Change::default();
        self.starting.unix = Some(unix);
        let seen = self.starting.pods.values_mut().map(|(_, seen)| seen);
        seen.for_each(|seen| *seen = unix.min(*seen));
        self.follow_starts(None, &mut change);
        change
    }

    /// Takes the pods that started alone for the longest allowed time since the last call. Their starts may go on.
    pub fn take_late_starts(&mut self) -> BTreeSet<Uid> {
        std::mem::take(&mut self.starting.late)
    }

    /// Writes down how pods start now that do so, on one node or on all.
    pub(super) fn follow_starts(&mut self, only: Option<&str>, change: &mut Change) {
        let pods = self.starting.pods.keys().filter_map(|uid| self.pod(uid));
        let is_there = |pod: &&Arc<PodFacts>| only.is_none() || pod.node.as_deref() == only;
        let pods: Vec<Arc<PodFacts>> = pods.filter(is_there).cloned().collect();
        let mut changed = Vec::new();
        for pod in pods {
            let starts = self.starts(&pod);
            let Some(name) = pod.node.clone() else {
                continue;
            };
            let was = self.nodes.get_mut(&name);
            let was = was.and_then(|node| node.set_starts(&pod.uid, starts));
            if was.is_some_and(|was| was != starts) {
                if was == Some(Starts::Alone)
                    && self.starting.age(&pod.uid) >= self.starting.longest
                {
                    self.starting.late.insert(pod.uid.clone());
                    self.starting.fail(&pod);
                }
                changed.push(name);
            }
        }
        changed.sort_unstable();
        changed.dedup();
        changed.iter().for_each(|name| self.touch(name, change));
    }
}
