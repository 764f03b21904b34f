//! Which nodes kube-scheduler offered to a pod that waits: no other pod is disrupted for it on any other node.
//!
//! kube-scheduler's own filters know more than this ledger does: host ports, affinity between pods, volumes, other
//! resources. A node that passed them is among the candidates of the filter call. The memory is filled by the calls
//! that refused the pod, and is as good as they are recent ([`AGE`]).
//!
//! *Calls may be samples.* kube-scheduler stops to look when enough nodes passed, and the next call goes on from
//! there. So the calls of the last minute count together. It never stops below [`crate::Config::least_nodes`]: a call that names
//! fewer has named every node that passed, and replaces what earlier calls said. The one node of a nominated pod is
//! asked about alone, which says nothing of others.
//!
//! *A node whose sum does not suffice* is never offered, and its absence says nothing: moves, which make room there, go by
//! what this ledger knows of kube-scheduler's filters.
//!
//! *No call is evidence, too.* Where no node passed, kube-scheduler asks nothing, and only the pod's condition tells. Its
//! text changes once for each call; if it changes again, the earlier calls count no more.
//!
//! After a restart the memory is empty, and the next call fills it. A pod whose evidence is too old, or which has none,
//! is woken so that kube-scheduler asks again ([`Queue::ask_for_evidence`]).

use std::time::Duration;

use gpustow_api::PodFacts;

use super::Queue;
use super::backoff::doubled;
use crate::books::{Books, Uid};
use crate::preempt::asked_in_sum;
use crate::queue::Ungate;
use crate::scores::Slot;
use crate::sight::Sight;

/// For so long at most a call counts; for half of it at least.
const AGE: Duration = Duration::from_secs(60);
/// A pod is woken for evidence once in this time, then in twice as much, up to [`LONGEST_PAUSE`].
const PAUSE: Duration = Duration::from_secs(60);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// What kube-scheduler said of a node for a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Evidence {
    /// The node passed kube-scheduler's own filters in the last minute.
    Offered,
    /// Its sum does not suffice for the pod: kube-scheduler offers no such node, whatever its other filters say.
    Short,
    /// kube-scheduler's own filters refused it.
    Rejected,
    /// No recent call tells.
    Unknown,
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
pub(crate) struct NodeSet {
    words: Vec<u64>,
}

impl NodeSet {
    pub(crate) fn insert(&mut self, slot: Slot) {
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
#[derive(Debug)]
struct Calls {
    since: Duration,
    nodes: NodeSet,
}

impl Calls {
    fn count(&self, now: Duration) -> bool {
        now.saturating_sub(self.since) < AGE
    }
}

/// What was offered to one pod.
#[derive(Debug, Default)]
pub(super) struct Offered {
    latest: Option<Calls>,
    before: Option<Calls>,
    /// When a call named every node that passed, unless a sample came after it.
    all_at: Option<Duration>,
    /// How often the condition's text has changed since the last call.
    texts: usize,
    /// When the pod may be woken for evidence again, and how often it was.
    wake_at: Duration,
    wakes: u32,
}

impl Offered {
    fn note(&mut self, nodes: NodeSet, scope: Scope, now: Duration) {
        self.texts = 0;
        match scope {
            Scope::All => {
                self.before = None;
                self.all_at = Some(now);
                self.latest = Some(Calls { since: now, nodes });
                return;
            }
            Scope::Sample => self.all_at = None,
            Scope::One => {}
        }
        match &mut self.latest {
            Some(latest) if now.saturating_sub(latest.since) < AGE / 2 => {
                latest.nodes.extend(&nodes);
            }
            latest => self.before = latest.replace(Calls { since: now, nodes }),
        }
    }

    fn of(&self, slot: Slot, now: Duration) -> Evidence {
        let mut calls = [&self.latest, &self.before].into_iter().flatten();
        let recent = |at: Duration| now.saturating_sub(at) < AGE;
        match () {
            () if calls.any(|it| it.count(now) && it.nodes.has(slot)) => Evidence::Offered,
            () if self.all_at.is_some_and(recent) => Evidence::Rejected,
            () => Evidence::Unknown,
        }
    }

    /// The nodes of a call that named every node that passed, and of those since: it has rejected all others.
    fn passed(&self, now: Duration) -> Option<NodeSet> {
        let recent = self.all_at.is_some_and(|at| now.saturating_sub(at) < AGE);
        let calls = [&self.latest, &self.before].into_iter().flatten();
        recent.then(|| {
            let mut nodes = NodeSet::default();
            calls.for_each(|it| nodes.extend(&it.nodes));
            nodes
        })
    }

    /// kube-scheduler has tried the pod again, and no node passed its own filters.
    fn is_void(&mut self) {
        (self.latest, self.before, self.all_at) = (None, None, None);
    }
}

impl Queue {
    /// The text of a waiting pod's condition has changed.
    pub(super) fn text_changed(&mut self, uid: &str) {
        if let Some(offered) = self.offered.get_mut(uid) {
            offered.texts += 1;
            if offered.texts > 1 {
                offered.is_void();
            }
        }
    }

    /// The slot will be another node's.
    pub(crate) fn forget_slot(&mut self, slot: Slot) {
        for offered in self.offered.values_mut() {
            let calls = [&mut offered.latest, &mut offered.before];
            for calls in calls.into_iter().flatten() {
                calls.nodes.remove(slot);
            }
        }
    }

    /// A filter call named so many candidates for a pod, of which these are known, and the pod is refused. kube-scheduler
    /// looks for `least_nodes` at least.
    pub(crate) fn note_offered(
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
        offered.note(nodes, scope, now);
    }

    /// Others could be disrupted for the pod where no recent call tells whether kube-scheduler would place it: has
    /// kube-scheduler try the pod again, unless that was so lately. A gated pod is ungated for it.
    pub(crate) fn ask_for_evidence(&mut self, uid: &Uid, now: Duration) {
        let offered = self.offered.entry(uid.clone()).or_default();
        if now < offered.wake_at {
            return;
        }
        offered.wake_at = now + doubled(PAUSE, offered.wakes, LONGEST_PAUSE);
        offered.wakes += 1;
        match self.gated.has(uid) {
            true => self.gated.let_go(uid, Ungate::MayPreempt),
            false => self.ask_again(uid),
        }
    }
}

impl Sight<'_> {
    /// What kube-scheduler said of this node for the pod.
    pub(crate) fn evidence(&self, pod: &PodFacts, node: &str) -> Evidence {
        if self.is_short_in_sum(pod, node) {
            return Evidence::Short;
        }
        let offered = self.queue.offered.get(&pod.uid);
        let slot = offered.and_then(|offered| Some((offered, self.scores.slot(node)?)));
        slot.map_or(Evidence::Unknown, |(offered, slot)| {
            offered.of(slot, self.now)
        })
    }

    /// The nodes that passed kube-scheduler's own filters for the pod, if it has named all of them lately.
    pub(crate) fn passed(&self, pod: &PodFacts) -> Option<NodeSet> {
        let offered = self.queue.offered.get(&pod.uid)?;
        offered.passed(self.now)
    }

    /// Does the node's sum not suffice for the pod?
    fn is_short_in_sum(&self, pod: &PodFacts, node: &str) -> bool {
        let known = self.books.node(node).zip(pod.asks.request());
        known.is_some_and(|(node, request)| {
            node.left_in_sum(node.view(), |_| true).0 < asked_in_sum(request)
        })
    }

    /// Did kube-scheduler offer this node for the pod lately, or can it not, so that others may be disrupted for it
    /// there? Not where
    /// something after this extender refused the pod.
    pub(crate) fn was_offered(&self, pod: &PodFacts, node: &str) -> bool {
        let tried = self.queue.tried(&pod.uid);
        let refused = tried.is_some_and(|tried| tried.has(node));
        let evidence = self.evidence(pod, node);
        !refused && matches!(evidence, Evidence::Offered | Evidence::Short)
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

    #[test]
    fn a_call_below_the_sample_replaces_what_earlier_calls_said() {
        let mut offered = Offered::default();
        assert_eq!(offered.of(1, at(0)), Evidence::Unknown);
        offered.note(set([1, 2]), Scope::All, at(0));
        assert_eq!(offered.of(1, at(59)), Evidence::Offered);
        assert_eq!(offered.of(3, at(59)), Evidence::Rejected);
        offered.note(set([2]), Scope::All, at(1));
        assert_eq!(offered.of(1, at(2)), Evidence::Rejected);
        assert_eq!(offered.of(2, at(60)), Evidence::Offered);
        assert_eq!(offered.of(2, at(61)), Evidence::Unknown);
    }

    #[test]
    fn samples_of_the_last_minute_count_together_and_each_at_least_half_of_it() {
        let mut offered = Offered::default();
        offered.note(set(0..100), Scope::Sample, at(0));
        offered.note(set(100..200), Scope::Sample, at(29));
        offered.note(set(200..300), Scope::Sample, at(40));
        for slot in [0, 150, 250] {
            assert_eq!(offered.of(slot, at(59)), Evidence::Offered, "{slot}");
        }
        assert_eq!(offered.of(300, at(59)), Evidence::Unknown);
        assert_eq!(offered.of(150, at(60)), Evidence::Unknown);
        assert_eq!(offered.of(250, at(99)), Evidence::Offered);
        assert_eq!(offered.of(250, at(100)), Evidence::Unknown);
    }

    #[test]
    fn the_node_of_a_nominated_pod_says_nothing_of_others() {
        let mut offered = Offered::default();
        offered.note(set([1, 2]), Scope::All, at(0));
        offered.note(set([3]), Scope::One, at(1));
        for slot in [1, 2, 3] {
            assert_eq!(offered.of(slot, at(2)), Evidence::Offered, "{slot}");
        }
        assert_eq!(offered.of(4, at(2)), Evidence::Rejected);
    }
}
