//! Would a node do once its victims are gone, and who else would have to go?

use std::cmp::Reverse;
use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_books::{Budget, HashSet, Host};

use crate::preempt::Rank;
use crate::sight::Sight;

/// Pods to evict in addition to kube-scheduler's victims, or victims to spare.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Victims {
    /// Their UIDs, in the order in which they were chosen.
    pub uids: Vec<Arc<str>>,
    /// How many of them a disruption budget protects.
    pub protected: i64,
}

impl Sight<'_> {
    /// The pods to evict in addition to `victims` so that the pod fits on the node: see `Ledger::preempt`.
    pub fn preempt(
        &self,
        pod: &PodFacts,
        name: &str,
        victims: &[Arc<str>],
        budget: &mut Budget,
    ) -> Option<Victims> {
        let node = self.books.node(name)?;
        self.check(name).ok()?;
        // kube-scheduler would nominate the pod here, and wait for ever for a victim that does not terminate.
        let mut known = victims.iter().filter_map(|uid| self.books.pod(uid));
        if self.books.is_unfenced(&pod.uid) || known.any(|pod| self.is_late(pod)) {
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
        while added.is_empty() || !trial.fits(pod, name, Host::Beside, budget)? {
            let other = others.next()?;
            trial.leave([other.uid.clone()]);
            added.push(other);
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
        let needed = added.into_iter().filter(|pod| !spared.contains(&pod.uid));
        let needed: Vec<_> = needed.cloned().collect();
        let broken = needed.iter().filter(|pod| is_protected(pod)).count();
        let rank = Rank::of(&needed, broken);
        let plan = || self.plan_preempt(pod, name, budget);
        let (uids, rank) = match victims.is_empty().then(plan).flatten() {
            // Pods that leave make the room.
            Some(plan) if plan.waits_for.is_empty() => return None,
            Some(plan) if plan.rank < rank => (plan.waits_for, plan.rank),
            _ => (needed.iter().map(|pod| pod.uid.clone()).collect(), rank),
        };
        let protected = rank.broken();
        Some(Victims { uids, protected })
    }
}
