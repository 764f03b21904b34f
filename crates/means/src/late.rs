//! Room that comes when pods that leave are gone.

use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_books::{Budget, Earmark, Host, Node, Uid};

use crate::sight::Sight;

impl Sight<'_> {
    /// See `Ledger::fits_without`.
    pub fn fits_without(&self, pod: &PodFacts, name: &str, leaving: &[Uid], ended: bool) -> bool {
        let may = self.check(name).is_ok() && !self.books.is_unfenced(&pod.uid);
        let Some(node) = self.books.node(name).filter(|_| may) else {
            return false;
        };
        let mut trial = self.trial().without_ended(ended);
        if ended {
            trial.leave(self.assumed_below(node, pod.priority));
            // Victims of the extender's own plan leave too, though the caller's list may be older than their eviction.
            let own = self.earmarks.eviction_for(&pod.uid);
            let own = own.filter(|it| **it.node() == *name);
            trial.leave(own.into_iter().flat_map(Earmark::waits_for).cloned());
        }
        trial.leave(leaving.iter().chain([&pod.uid]).cloned());
        // A pod that was woken for the room may not come. That is no reason to evict pods elsewhere.
        trial.leave(self.woken_for(name).cloned());
        let budget = &mut Budget::of(self.config);
        trial.fits(pod, name, Host::Beside, budget) == Some(true)
    }

    /// Will the pod fit where kube-scheduler had others evicted for it, when all of these are gone?
    pub fn expects_room(&self, pod: &PodFacts) -> bool {
        let node = self.earmarks.expected_on(&pod.uid, self.now);
        node.is_some_and(|node| {
            let leaving: Vec<Uid> = self.leaving(node).into_iter().collect();
            self.fits_without(pod, node, &leaving, true)
        })
    }

    /// The pods of lower priority that are assumed on a node.
    fn assumed_below(&self, node: &Node, priority: i32) -> impl Iterator<Item = Arc<str>> {
        let lower = move |uid: &&Arc<str>| {
            let pod = self.books.pod(uid);
            pod.is_none_or(|pod| pod.priority < priority)
        };
        node.assumed().filter(lower).cloned()
    }
}
