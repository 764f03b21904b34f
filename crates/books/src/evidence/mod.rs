//! Which nodes kube-scheduler offered to a pod that waits: no other pod is disrupted for it on any other node.
//!
//! kube-scheduler's own filters know more than this ledger does: host ports, affinity between pods, volumes, other
//! resources. A node that passed them is among the candidates of the filter call. The memory is filled by the calls
//! that refused the pod, and is as good as they are recent ([`AGE`]).
//!
//! *Calls may be samples.* kube-scheduler stops to look when enough nodes passed, and the next call continues from
//! there. So the calls of the last minute count together. kube-scheduler never stops below
//! [`crate::Config::least_nodes`]. A call that names fewer nodes has named every node that passed, and replaces the
//! results of earlier calls. kube-scheduler asks about the node of a nominated pod alone: such a call is no evidence
//! for other nodes.
//!
//! *A node whose sum does not suffice* is never offered, and its absence is no evidence. Moves make room there: for
//! these, this ledger's knowledge of kube-scheduler's filters decides.
//!
//! *No call is evidence, too.* If no node passed, kube-scheduler does not call the extender, and only the pod's
//! condition shows it. The condition's text changes once for each call. If it changes again, the earlier calls do not
//! count any more.
//!
//! *A verdict on a node may become invalid* once pods have come there or left, or are about to come. kube-scheduler
//! regards other pods for anti-affinity, spread, host ports and volumes ([`gpustow_api::Regards`]). It is then asked
//! again.
//!
//! After a restart the memory is empty, and the next call fills it. A pod whose evidence is too old, or which has none,
//! is woken so that kube-scheduler asks again ([`Shown::is_to_be_asked`]).

mod tried;

use std::time::Duration;

use gpustow_api::PodFacts;

use crate::books::{Books, Event, Uid};
use crate::earmarks::doubled;
use crate::maps::HashMap;
use crate::scores::{Scores, Slot};
pub use tried::Tried;

/// For so long at most a call counts; for half of it at least.
const AGE: Duration = Duration::from_secs(60);
/// A pod is woken for evidence once in this time, then in twice as much, up to [`LONGEST_PAUSE`].
const PAUSE: Duration = Duration::from_secs(60);
/// As [`PAUSE`], if pods have come to the node or left it.
const PAUSE_IF_OUTDATED: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// kube-scheduler's verdict on a node for a pod. Of the open variants, the last is resolved the soonest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Evidence {
    /// The node passed kube-scheduler's own filters in the last minute.
    Offered,
    /// The node's sum does not suffice for the pod: kube-scheduler does not offer it, whatever its other filters
    /// decide.
    Short,
    /// kube-scheduler's own filters refused it.
    Rejected,
    /// It passed them, and a pod is about to come that kube-scheduler has not counted.
    Awaited,
    /// No recent call covers the node.
    Unknown,
    /// It passed them, and pods have come or left since.
    Outdated,
}

impl Evidence {
    /// May kube-scheduler soon come to another verdict?
    pub fn is_open(self) -> bool {
        self >= Self::Awaited
    }
}

/// Of which nodes a call speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scope {
    /// Of all that there are.
    All,
    /// Of some.
    Sample,
    /// Of the one that the pod is nominated to.
    One,
}

/// A set of nodes, by their slots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeSet {
    words: Vec<u64>,
}

impl NodeSet {
    /// Adds a node.
    pub fn insert(&mut self, slot: Slot) {
        let word = slot / 64;
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= 1 << (slot % 64);
    }

    fn has(&self, slot: Slot) -> bool {
        let word = self.words.get(slot / 64);
        word.is_some_and(|word| word >> (slot % 64) & 1 == 1)
    }

    fn remove(&mut self, slot: Slot) {
        if let Some(word) = self.words.get_mut(slot / 64) {
            *word &= !(1 << (slot % 64));
        }
    }

    fn extend(&mut self, other: &Self) {
        if other.words.len() > self.words.len() {
            self.words.resize(other.words.len(), 0);
        }
        for (word, more) in self.words.iter_mut().zip(&other.words) {
            *word |= more;
        }
    }
}

/// The calls of half a minute.
#[derive(Clone, Debug)]
struct Calls {
    since: Duration,
    /// The ledger's clock at the first of them.
    clock: u64,
    nodes: NodeSet,
}

impl Calls {
    fn count(&self, now: Duration) -> bool {
        now.saturating_sub(self.since) < AGE
    }
}

/// The nodes that kube-scheduler offered to one pod.
#[derive(Debug, Default)]
struct Offered {
    latest: Option<Calls>,
    before: Option<Calls>,
    /// The last call alone, if it was added to `latest`.
    last: Option<Calls>,
    /// When a call named every node that passed, unless a sample came after it.
    all_at: Option<Duration>,
    /// How often the condition's text has changed since the last call.
    texts: usize,
    /// When the pod was woken for evidence last, and how often it was.
    woken_at: Duration,
    wakes: u32,
}

impl Offered {
    fn note(&mut self, call: Calls, scope: Scope) {
        self.texts = 0;
        self.last = None;
        match scope {
            Scope::All => {
                self.before = None;
                self.all_at = Some(call.since);
                self.latest = Some(call);
                return;
            }
            Scope::Sample => self.all_at = None,
            Scope::One => {}
        }
        match &mut self.latest {
            Some(latest) if call.since.saturating_sub(latest.since) < AGE / 2 => {
                latest.nodes.extend(&call.nodes);
                self.last = Some(call);
            }
            latest => self.before = latest.replace(call),
        }
    }

    fn calls(&self) -> impl Iterator<Item = &Calls> {
        [&self.last, &self.latest, &self.before]
            .into_iter()
            .flatten()
    }

    /// The verdict on a node. `traffic` is when pods last came there or left, on the ledger's clock.
    fn of(&self, slot: Slot, traffic: u64, now: Duration) -> Evidence {
        let named = || self.calls().filter(|it| it.nodes.has(slot));
        let recent = |at: Duration| now.saturating_sub(at) < AGE;
        match () {
            () if named().any(|it| it.count(now) && traffic <= it.clock) => Evidence::Offered,
            () if named().any(|it| traffic > it.clock) => Evidence::Outdated,
            () if self.all_at.is_some_and(recent) => Evidence::Rejected,
            () => Evidence::Unknown,
        }
    }

    /// The nodes of a call that named every node that passed, and of later calls: kube-scheduler has rejected all other
    /// nodes.
    fn passed(&self, now: Duration) -> Option<NodeSet> {
        let recent = self.all_at.is_some_and(|at| now.saturating_sub(at) < AGE);
        recent.then(|| {
            let mut nodes = NodeSet::default();
            self.calls().for_each(|it| nodes.extend(&it.nodes));
            nodes
        })
    }

    /// kube-scheduler has tried the pod again, and no node passed its own filters.
    fn is_void(&mut self) {
        (self.latest, self.before, self.last) = (None, None, None);
        self.all_at = None;
    }
}

/// The nodes that kube-scheduler offered to pods, and the failures that followed.
#[derive(Debug, Default)]
pub struct Shown {
    /// Nodes that something after us refused for a pod, and how often its bind met a conflict.
    tried: HashMap<Uid, Tried>,
    /// Nodes that kube-scheduler offered to pods that wait.
    offered: HashMap<Uid, Offered>,
}

impl Shown {
    /// Something has changed in the books.
    pub fn follow(&mut self, event: &Event, books: &Books, scores: &Scores) {
        match event {
            Event::Pod { uid, old, new } => {
                if let (Some(old), Some(new)) = (old, new)
                    && old.refusal != new.refusal
                {
                    self.text_changed(uid);
                }
                if (new.as_ref()).is_none_or(|pod| pod.node.is_some() || pod.released) {
                    self.forget(uid);
                }
            }
            Event::NodeGone(name) => {
                if let Some(slot) = scores.slot(name) {
                    self.forget_slot(slot);
                }
            }
            Event::Refused { uid, node } => self.note_refusal(uid, node),
            Event::Expired { uid, node } if books.pod(uid).is_some() => {
                self.note_refusal(uid, node);
            }
            Event::Expired { uid, .. } => self.forget(uid),
            Event::Conflict(uid) if books.pod(uid).is_some() => self.note_conflict(uid),
            Event::Listed => {
                let known = |uid: &Uid| books.pod(uid).is_some() || books.assumed(uid).is_some();
                self.tried.retain(|uid, _| known(uid));
                self.offered.retain(|uid, _| known(uid));
            }
            _ => {}
        }
    }

    /// The pod waits no more.
    pub fn forget(&mut self, uid: &str) {
        self.tried.swap_remove(uid);
        self.offered.swap_remove(uid);
    }

    /// The text of a waiting pod's condition has changed.
    fn text_changed(&mut self, uid: &str) {
        if let Some(offered) = self.offered.get_mut(uid) {
            offered.texts += 1;
            if offered.texts > 1 {
                offered.is_void();
            }
        }
    }

    /// Has kube-scheduler named candidates for the pod lately?
    pub fn was_asked_about(&self, uid: &str) -> bool {
        let offered = self.offered.get(uid);
        offered.is_some_and(|offered| offered.latest.is_some())
    }

    /// kube-scheduler's verdict on a node for the pod. `traffic` is when pods last came there or left, on the ledger's
    /// clock.
    pub fn evidence(&self, uid: &str, slot: Slot, traffic: u64, now: Duration) -> Option<Evidence> {
        Some(self.offered.get(uid)?.of(slot, traffic, now))
    }

    /// The nodes that passed kube-scheduler's own filters for the pod, if it has named all of them lately.
    pub fn passed(&self, uid: &str, now: Duration) -> Option<NodeSet> {
        self.offered.get(uid)?.passed(now)
    }

    /// The slot will be another node's.
    fn forget_slot(&mut self, slot: Slot) {
        for offered in self.offered.values_mut() {
            let calls = [&mut offered.latest, &mut offered.before, &mut offered.last];
            for calls in calls.into_iter().flatten() {
                calls.nodes.remove(slot);
            }
        }
    }

    /// A filter call named so many candidates for a pod, of which these are known, and the pod is refused. kube-scheduler
    /// looks for `least_nodes` at least.
    pub fn note_offered(
        &mut self,
        pod: &PodFacts,
        nodes: NodeSet,
        candidates: usize,
        least_nodes: usize,
        books: &Books,
        now: Duration,
    ) {
        let known = books.pod(&pod.uid);
        let nominated = known.is_some_and(|known| known.nominated.is_some());
        let scope = match candidates {
            1 if nominated || pod.nominated.is_some() => Scope::One,
            few if few < least_nodes => Scope::All,
            _ => Scope::Sample,
        };
        let offered = self.offered.entry(pod.uid.clone()).or_default();
        let call = Calls {
            since: now,
            clock: books.copies(),
            nodes,
        };
        offered.note(call, scope);
    }

    /// Others could be disrupted for the pod where kube-scheduler's calls leave it open like this whether it would place the
    /// pod: is it to try the pod again? Not if that was so lately or is too early.
    pub fn is_to_be_asked(&mut self, uid: &Uid, evidence: Evidence, now: Duration) -> bool {
        let pause = match evidence {
            Evidence::Unknown => PAUSE,
            Evidence::Outdated => PAUSE_IF_OUTDATED,
            _ => return false,
        };
        let offered = self.offered.entry(uid.clone()).or_default();
        let before = offered.wakes.checked_sub(1);
        let pause = before.map(|times| doubled(pause, times, LONGEST_PAUSE));
        if pause.is_some_and(|pause| now < offered.woken_at + pause) {
            return false;
        }
        offered.woken_at = now;
        offered.wakes += 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn set(slots: impl IntoIterator<Item = Slot>) -> NodeSet {
        let mut set = NodeSet::default();
        slots.into_iter().for_each(|slot| set.insert(slot));
        set
    }

    fn call(nodes: NodeSet, second: u64) -> Calls {
        Calls {
            since: at(second),
            clock: second,
            nodes,
        }
    }

    #[test]
    fn a_call_below_the_sample_replaces_what_earlier_calls_said() {
        let mut offered = Offered::default();
        assert_eq!(offered.of(1, 0, at(0)), Evidence::Unknown);
        offered.note(call(set([1, 2]), 0), Scope::All);
        assert_eq!(offered.of(1, 0, at(59)), Evidence::Offered);
        assert_eq!(offered.of(3, 0, at(59)), Evidence::Rejected);
        offered.note(call(set([2]), 1), Scope::All);
        assert_eq!(offered.of(1, 0, at(2)), Evidence::Rejected);
        assert_eq!(offered.of(2, 0, at(60)), Evidence::Offered);
        assert_eq!(offered.of(2, 0, at(61)), Evidence::Unknown);
    }

    #[test]
    fn samples_of_the_last_minute_count_together_and_each_at_least_half_of_it() {
        let mut offered = Offered::default();
        offered.note(call(set(0..100), 0), Scope::Sample);
        offered.note(call(set(100..200), 29), Scope::Sample);
        offered.note(call(set(200..300), 40), Scope::Sample);
        for slot in [0, 150, 250] {
            assert_eq!(offered.of(slot, 0, at(59)), Evidence::Offered, "{slot}");
        }
        assert_eq!(offered.of(300, 0, at(59)), Evidence::Unknown);
        assert_eq!(offered.of(150, 0, at(60)), Evidence::Unknown);
        assert_eq!(offered.of(250, 0, at(99)), Evidence::Offered);
        assert_eq!(offered.of(250, 0, at(100)), Evidence::Unknown);
    }

    #[test]
    fn the_node_of_a_nominated_pod_says_nothing_of_others() {
        let mut offered = Offered::default();
        offered.note(call(set([1, 2]), 0), Scope::All);
        offered.note(call(set([3]), 1), Scope::One);
        for slot in [1, 2, 3] {
            assert_eq!(offered.of(slot, 0, at(2)), Evidence::Offered, "{slot}");
        }
        assert_eq!(offered.of(4, 0, at(2)), Evidence::Rejected);
    }

    #[test]
    fn node_that_pods_came_to_or_left_is_offered_again_by_a_later_call_alone() {
        for scope in [Scope::All, Scope::Sample] {
            let mut offered = Offered::default();
            offered.note(call(set([1, 2]), 5), scope);
            let said = |offered: &Offered, slot, traffic| offered.of(slot, traffic, at(20));
            assert_eq!(said(&offered, 1, 5), Evidence::Offered);
            assert_eq!(said(&offered, 1, 6), Evidence::Outdated);
            offered.note(call(set([1]), 10), scope);
            assert_eq!(said(&offered, 1, 10), Evidence::Offered);
            assert_eq!(said(&offered, 1, 11), Evidence::Outdated);
            let other = match scope {
                Scope::All => Evidence::Rejected,
                _ => Evidence::Outdated,
            };
            assert_eq!(said(&offered, 2, 6), other);
        }
    }
}
