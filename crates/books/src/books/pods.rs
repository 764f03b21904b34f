//! Facts about pods from watches, lists and our own reads.

use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;

use super::hold::Hold;
use super::{Books, Change, Event, Uid};
use crate::maps::HashSet;

/// A bound pod that no watch has shown for this long is to be read again.
const CONFIRMED_AFTER: Duration = Duration::from_secs(10);

/// A pod that a watch, a list, or our own read or successful bind has shown.
#[derive(Clone, Debug)]
pub(super) struct Known {
    facts: Arc<PodFacts>,
    /// A watch has shown the pod, if not this copy of it.
    seen: bool,
    /// This copy is not the watch's: we bound the pod, or read it ourselves, at this time.
    own: Option<Duration>,
    /// The ledger's clock before this copy came.
    copy: u64,
}

/// True if the pod asks for GPU memory and has not released it.
pub fn asks(pod: &PodFacts) -> bool {
    !pod.released && pod.requests_memory()
}

/// True if kube-scheduler may ask for the pod and bind it, now or once it is ungated.
pub fn may_come(pod: &PodFacts) -> bool {
    pod.may_be_placed() && pod.requests_memory()
}

/// Is it asked to give memory back or to end, or is room kept for it?
fn is_marked(pod: &PodFacts) -> bool {
    pod.asked_back.is_some() || pod.preempted || pod.reserved_on.is_some()
}

impl Books {
    /// The pods with a condition that the extender wrote, by UID.
    pub fn marked(&self) -> impl Iterator<Item = &Arc<PodFacts>> {
        self.marked.iter().filter_map(|uid| self.pod(uid))
    }

    /// The pods with a statement whether they sleep, by UID, from the one behind this one on.
    pub fn sleepers(&self, after: Option<&Uid>) -> impl Iterator<Item = &Arc<PodFacts>> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let sleepers = self.sleepers.range::<Uid, _>((from, Bound::Unbounded));
        sleepers.filter_map(|uid| self.pod(uid))
    }

    /// A pod as a watch shows it.
    pub fn apply_pod(&mut self, pod: Arc<PodFacts>) -> Change {
        let mut change = Change::default();
        // Only a list or a read of our own unbinds a pod: a watched copy without a node is outdated.
        if pod.node.is_some() || !self.is_bound(&pod.uid) {
            self.end_given_up(&pod, &mut change);
            self.put_pod(pod, true, None, &mut change);
        }
        change
    }

    /// A pod as a read of our own shows it that was sent at `asked` on the ledger's clock. It counts if
    /// nothing newer came meanwhile: whole, even if the pod was bound before and is not any more.
    pub fn read_back(&mut self, pod: PodFacts, asked: u64, now: Duration) -> Change {
        let mut change = Change::default();
        if self.gone.when(&pod.uid).is_some_and(|when| when >= asked) {
            return change;
        }
        let known = self.pods.get(&pod.uid);
        let is_same = |known: &Known| known.facts.resource_version == pod.resource_version;
        let is_newer =
            |known: &Known| known.copy < asked || pod.node.is_some() && known.facts.node.is_none();
        if known.is_none_or(|known| is_newer(known) && (known.own.is_some() || !is_same(known))) {
            let seen = known.is_some_and(|known| known.seen);
            self.end_given_up(&pod, &mut change);
            self.put_pod(pod.into(), seen, Some(now), &mut change);
        }
        change
    }

    /// Bound pods of which only we know for so long that a watch should have shown them.
    pub fn unconfirmed(&self, now: Duration) -> Vec<Arc<PodFacts>> {
        let late = |own: Duration| now.saturating_sub(own) >= CONFIRMED_AFTER;
        let known = self.pods.values();
        known
            .filter(|known| known.facts.node.is_some() && known.own.is_some_and(late))
            .map(|known| known.facts.clone())
            .collect()
    }

    /// Our own bind of this pod succeeded; the watch has not shown it yet.
    pub(super) fn put_bound(&mut self, pod: PodFacts, now: Duration, change: &mut Change) {
        let known = self.pods.get(&pod.uid);
        if known.is_some_and(|known| known.facts.node.is_some()) {
            self.drop_assumed(&pod.uid, change);
        } else {
            let seen = known.is_some_and(|known| known.seen);
            self.put_pod(pod.into(), seen, Some(now), change);
        }
    }

    fn put_pod(
        &mut self,
        pod: Arc<PodFacts>,
        seen: bool,
        own: Option<Duration>,
        change: &mut Change,
    ) {
        let uid = pod.uid.clone();
        self.gone.is_back(&uid);
        let known = Known {
            facts: pod.clone(),
            seen,
            own,
            copy: self.tick(),
        };
        self.fenced_by(&pod, change);
        self.meet(&pod, change);
        self.note_start(&pod);
        let old = self.pods.insert(uid.clone(), known).map(|old| old.facts);
        self.groups.follow(&uid, old.as_deref(), Some(&pod));
        match is_marked(&pod) {
            true => self.marked.insert(uid.clone()),
            false => self.marked.remove(&uid),
        };
        match pod.sleep.is_some() {
            true => self.sleepers.insert(uid.clone()),
            false => self.sleepers.remove(&uid),
        };
        let was_held = match pod.node.is_some() || pod.released {
            true => self.take_assumed(&uid),
            false => None,
        };
        // kube-scheduler has counted a pod that was assumed there.
        let before = old.as_ref().filter(|old| !old.released);
        let before = before.and_then(|old| old.node.clone());
        let before = before.or_else(|| was_held.clone());
        let after = pod.node.clone().filter(|_| !pod.released);
        if before != after {
            let both = before.iter().chain(&after);
            both.for_each(|node| self.note_traffic(node, &uid));
        }
        let was_bound = old.as_ref().and_then(|old| old.node.clone());
        let mut changed: Vec<_> = was_held.into_iter().collect();
        if let Some(name) = was_bound.filter(|name| pod.released || Some(name) != pod.node.as_ref())
            && let Some(node) = self.nodes.get_mut(&name)
            && node.unbind(&uid)
        {
            change.note(Event::Opened(name.clone()));
            changed.push(name);
        }
        if let Some(name) = pod.node.as_ref().filter(|_| !pod.released) {
            let hold = Hold::of(&pod, self.starts(&pod));
            let node = self.nodes.entry(name.clone()).or_default();
            if node.bind(&uid, hold) {
                changed.push(name.clone());
            }
        }
        changed.dedup();
        changed.iter().for_each(|name| self.touch(name, change));
        let new = Some(pod);
        change.note(Event::Pod { uid, old, new });
    }

    /// A pod is gone. A filter call or a read that is late does not bring it back.
    pub fn delete_pod(&mut self, uid: &str) -> Change {
        let mut change = Change::default();
        let when = self.tick();
        if let Some(pod) = self.pod(uid).cloned() {
            self.forget_start(&pod);
            if let Some(node) = &pod.node {
                self.note_traffic(node, uid);
            }
        }
        let old = self.pods.swap_remove(uid).map(|known| known.facts);
        self.groups.follow(&uid.into(), old.as_deref(), None);
        self.marked.remove(uid);
        self.sleepers.remove(uid);
        let asks = |pod: &Arc<PodFacts>| !pod.asks.is_nothing();
        if old.as_ref().is_none_or(asks) {
            self.gone.note(uid.into(), when);
        }
        if let Some(name) = old.as_ref().and_then(|old| old.node.clone())
            && let Some(node) = self.nodes.get_mut(&name)
            && node.unbind(uid)
        {
            change.note(Event::Opened(name.clone()));
            self.touch(&name, &mut change);
        }
        self.release_unfenced(uid, &mut change);
        self.drop_assumed(uid, &mut change);
        let (uid, new) = (uid.into(), None);
        change.note(Event::Pod { uid, old, new });
        change
    }

    /// The known pods that are missing in a list that was requested at `began` on the ledger's clock.
    pub fn not_among(&self, pods: &[Arc<PodFacts>], began: u64) -> Vec<Uid> {
        let listed: HashSet<Uid> = pods.iter().map(|pod| pod.uid.clone()).collect();
        let gone = self
            .pods
            .iter()
            .filter(|(uid, known)| !listed.contains(*uid) && (known.seen || known.copy < began));
        let known = |uid: &Uid| self.pods.contains_key(uid) || listed.contains(uid);
        let never_seen = self
            .assumed
            .iter()
            .filter(|(uid, held)| !known(uid) && held.is_unused_since(began));
        let gone = gone.map(|(uid, _)| uid.clone());
        gone.chain(never_seen.map(|(uid, _)| uid.clone())).collect()
    }

    /// A pod of such a list.
    pub fn apply_listed(&mut self, pod: Arc<PodFacts>, began: u64) -> Change {
        let mut change = Change::default();
        let keeps = |known: &Known| known.copy >= began && known.facts.node.is_some();
        if pod.node.is_some() || !self.pods.get(&pod.uid).is_some_and(keeps) {
            self.end_given_up(&pod, &mut change);
            self.put_pod(pod, true, None, &mut change);
        }
        change
    }

    /// All of the list is in.
    pub fn listed(&self) -> Change {
        let mut change = Change::default();
        change.note(Event::Listed);
        change
    }

    /// The pod with this UID.
    pub fn pod(&self, uid: &str) -> Option<&Arc<PodFacts>> {
        self.pods.get(uid).map(|known| &known.facts)
    }

    /// Every pod that is known.
    pub fn pods(&self) -> impl Iterator<Item = &Arc<PodFacts>> {
        self.pods.values().map(|known| &known.facts)
    }

    /// A pod with the ledger's clock before this copy of it came.
    pub fn copy(&self, uid: &str) -> Option<(Arc<PodFacts>, u64)> {
        let known = self.pods.get(uid)?;
        Some((known.facts.clone(), known.copy))
    }

    fn is_bound(&self, uid: &str) -> bool {
        self.pod(uid).is_some_and(|pod| pod.node.is_some())
    }

    /// True if the pod has ended, as far as we know.
    pub fn is_gone(&self, uid: &str) -> bool {
        self.gone.when(uid).is_some()
    }
}
