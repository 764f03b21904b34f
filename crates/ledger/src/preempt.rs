//! Would a node do once its victims are gone, and who else would have to go?

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_books::{Budget, Cause, Host};
use gpustow_means::Victims;

use crate::Ledger;

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

    /// Do pods that are leaving make room for the pod on one of these nodes?
    pub fn room_comes<'a>(
        &self,
        pod: &PodFacts,
        mut nodes: impl Iterator<Item = &'a str>,
        now: Duration,
    ) -> bool {
        let (sight, mut budget) = (self.sight(now), Budget::of_look());
        nodes.any(|name| {
            let leaving = sight.leaving(name);
            if leaving.is_empty() {
                return false;
            }
            let mut trial = sight.trial();
            trial.leave(leaving);
            trial.fits(pod, name, Host::Whole, &mut budget) == Some(true)
        })
    }

    /// The pods of lower priority that hold GPU memory on a node and are not leaving already: [`Ledger::preempt`] may
    /// add them.
    #[must_use]
    pub fn evictable(&self, node: &str, priority: i32) -> Vec<Arc<PodFacts>> {
        self.parts.books.evictable(node, priority)
    }

    /// The pods to evict in addition to `victims` so that the pod fits on the node: none if it then fits anyway. `None`
    /// if no eviction of pods of lower priority would do, or if the budget is spent before the answer. No pod must be
    /// evicted for nothing.
    ///
    /// Pods that no disruption budget protects go first, then low priority, then the youngest. Pods that turn out not
    /// to be needed are spared.
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

    /// The pods of `victims`, the most precious first, that need not go in addition to `added`. Without their end the
    /// pod fits, as far as the budget allows the check. The sums by which kube-scheduler chose them suffice, too: CPU,
    /// host memory, GPU memory and the number of pods.
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
        let asked = request.in_sum();
        let mut trial = self.sight(now).trial();
        trial.leave(victims.iter().chain(added).chain([&pod.uid]).cloned());
        let here = |uid: &&Arc<str>| node.bound().contains_key(*uid) && !added.contains(uid);
        let given = victims.iter().filter_map(|uid| self.parts.books.pod(uid));
        let protected = self.parts.books.protected(given);
        let mut spared = Victims::default();
        for uid in victims.iter().filter(here) {
            trial.stay(uid);
            let in_sum = node.left_in_sum(node.view(), |uid| !trial.has_left(uid));
            if asked <= in_sum && trial.fits(pod, name, Host::Whole, budget) == Some(true) {
                spared.uids.push(uid.clone());
                spared.protected += i64::from(protected.contains(uid));
            } else {
                trial.leave([uid.clone()]);
            }
        }
        spared
    }
}
