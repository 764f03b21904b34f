//! Would a node do once its victims are gone, and who else would have to go?

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_pack::Request;

use crate::Ledger;
use crate::budget::Budget;
use crate::earmarks::Cause;
use crate::known::Known;
use crate::maps::HashSet;
use crate::trial::Host;

/// Pods to evict beyond those that kube-scheduler chose, or of those to spare.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Victims {
    /// Their UIDs, in the order in which they were chosen.
    pub uids: Vec<Arc<str>>,
    /// How many of them a disruption budget protects.
    pub protected: i64,
}

impl Ledger {
    /// May pods be evicted where only fragmented memory keeps the pod off a node? kube-scheduler of 1.38 or later can ask for
    /// such victims. A pod that is too young for it is woken once it is old enough.
    pub fn may_preempt_fragmented(&mut self, pod: &PodFacts, now: Duration) -> bool {
        let after = self.parts.config.preempt_after;
        let is_on = self.parts.config.preempt_fragmented;
        if is_on && !self.sight(now).has_waited(pod, after) {
            self.parts.queue.ask_again_when(pod, after);
            return false;
        }
        is_on && self.sight(now).may_evict_for(Cause::Preempt, pod)
    }

    /// The pods of lower priority that hold GPU memory on a node and are not leaving already:
    /// those that [`Ledger::preempt`] may add.
    #[must_use]
    pub fn evictable(&self, node: &str, priority: i32) -> Vec<Arc<PodFacts>> {
        self.parts.books.evictable(node, priority)
    }

    /// The pods to evict beside `victims` so that the pod fits on the node: none if it then fits anyway. `None` if no
    /// eviction of pods of lower priority would do, or if that cannot be told within the budget: no pod must be evicted
    /// for nothing.
    ///
    /// Pods that no disruption budget protects go first, then low priority, then the youngest;
    /// those that turn out not to be needed are spared.
    #[must_use]
    pub fn preempt(
        &self,
        pod: &PodFacts,
        name: &str,
        victims: &[Arc<str>],
        budget: &mut Budget,
        now: Duration,
    ) -> Option<Victims> {
        self.sight(now).preempt(pod, name, victims, budget)
    }

    /// Those of `victims`, the most precious first, who need not go beside `added`: without them the
    /// pod fits, and CPU, host memory, GPU memory in sum and the number of pods, by which
    /// kube-scheduler chose them, suffice, as far as that can be told within the budget.
    #[must_use]
    pub fn spared(
        &self,
        pod: &PodFacts,
        name: &str,
        victims: &[Arc<str>],
        added: &[Arc<str>],
        budget: &mut Budget,
        now: Duration,
    ) -> Victims {
        let (Some(request), Some(node)) = (pod.asks.request(), self.parts.books.node(name)) else {
            return Victims::default();
        };
        let asked = asked_in_sum(request);
        let mut trial = self.sight(now).trial();
        trial.leave(victims.iter().chain(added).chain([&pod.uid]).cloned());
        let here = |uid: &&Arc<str>| node.bound().contains_key(*uid) && !added.contains(uid);
        let given = victims.iter().filter_map(|uid| self.parts.books.pod(uid));
        let protected = self.parts.books.protected(given);
        let mut spared = Victims::default();
        for uid in victims.iter().filter(here) {
            trial.stay(uid);
            let in_sum = node.left_in_sum(node.view(), |uid| !trial.has_left(uid));
            if asked <= in_sum.0 && trial.fits(pod, name, Host::Whole, budget) == Some(true) {
                spared.uids.push(uid.clone());
                spared.protected += i64::from(protected.contains(uid));
            } else {
                trial.leave([uid.clone()]);
            }
        }
        spared
    }
}

impl Known<'_> {
    /// See [`Ledger::preempt`].
    pub(crate) fn preempt(
        &self,
        pod: &PodFacts,
        name: &str,
        victims: &[Arc<str>],
        budget: &mut Budget,
    ) -> Option<Victims> {
        let node = self.books.node(name)?;
        self.check(name).ok()?;
        if self.books.is_unfenced(&pod.uid) {
            return None;
        }
        // kube-scheduler would nominate the pod here, and wait for ever for a victim that does not terminate.
        let mut known = victims.iter().filter_map(|uid| self.books.pod(uid));
        if known.any(|pod| self.is_late(pod)) {
            return None;
        }
        budget.charge(node.bound().len());
        let mut trial = self.trial();
        trial.leave(victims.iter().chain([&pod.uid]).cloned());
        if trial.fits(pod, name, Host::Beside, budget)? {
            return Some(Victims::default());
        }
        let mut others = self.books.evictable(name, pod.priority);
        others.retain(|pod| !victims.contains(&pod.uid));
        others.sort_unstable_by_key(|pod| (pod.priority, Reverse(pod.started), pod.uid.clone()));
        let given = victims.iter().filter_map(|uid| self.books.pod(uid));
        let protected = self.books.protected(given.chain(&others));
        let is_protected = |pod: &Arc<PodFacts>| protected.contains(&pod.uid);
        others.sort_by_key(is_protected);
        let mut added: Vec<&Arc<PodFacts>> = Vec::new();
        let mut others = others.iter();
        loop {
            let other = others.next()?;
            trial.leave([other.uid.clone()]);
            added.push(other);
            if trial.fits(pod, name, Host::Beside, budget)? {
                break;
            }
        }
        // Spare the most precious first, as the scheduler does with its own victims.
        let mut spared = HashSet::default();
        for other in added.iter().rev() {
            trial.stay(&other.uid);
            if trial.fits(pod, name, Host::Beside, budget)? {
                spared.insert(other.uid.clone());
            } else {
                trial.leave([other.uid.clone()]);
            }
        }
        let needed = || added.iter().filter(|pod| !spared.contains(&pod.uid));
        let count = needed().filter(|pod| is_protected(pod)).count();
        Some(Victims {
            uids: needed().map(|pod| pod.uid.clone()).collect(),
            protected: i64::try_from(count).unwrap_or(i64::MAX),
        })
    }
}

/// What kube-scheduler compares with the node's sum: MiB on all GPUs together.
pub(crate) fn asked_in_sum(request: &Request) -> u64 {
    request.in_sum().0
}
