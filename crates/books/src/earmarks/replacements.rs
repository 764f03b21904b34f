//! Room for the replacement of a pod that is evicted to defragment memory. Any pod of the same controller with an equal
//! request gets it.

use std::sync::Arc;

use gpustow_api::PodFacts;

use super::{Cause, Earmark, Earmarks, Ended, Holder};
use crate::books::{Books, Uid};
use crate::maps::HashMap;

/// The pod or node for which a pod is evicted while room is kept for its replacement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Beneficiary {
    /// A pod that waits for fragmented memory.
    Pod(Uid),
    /// No pod: this node is emptied.
    Node(Arc<str>),
}

/// A pod that is still to be made.
#[derive(Clone, Debug)]
pub(super) struct Replacement {
    /// The pod that is evicted, as its replacement will be when it waits.
    like: PodFacts,
    beneficiary: Beneficiary,
    pub(super) earmark: Earmark,
}

impl Replacement {
    /// The node that is emptied, if the pod is evicted for that.
    fn empties(&self) -> Option<&Arc<str>> {
        match &self.beneficiary {
            Beneficiary::Pod(_) => None,
            Beneficiary::Node(node) => Some(node),
        }
    }

    fn is(&self, pod: &PodFacts) -> bool {
        let same = pod.asks == self.like.asks && pod.asks.readable().is_ok();
        // A pod of another namespace may name the same owner.
        let same =
            same && pod.namespace == self.like.namespace && pod.priority == self.like.priority;
        same && pod.evictable.is_some() && pod.evictable == self.like.evictable
    }
}

impl Earmarks {
    /// The pod for which room is earmarked, made or not.
    pub fn pod_of<'a>(&'a self, holder: &Holder, books: &'a Books) -> Option<&'a PodFacts> {
        match holder {
            Holder::Pod(uid) => books.pod(uid).map(|pod| &**pod),
            Holder::Replacement(of) => self.replacements.get(of).map(|it| &it.like),
        }
    }

    /// Is the room for a replacement, which that pod is or could be?
    pub(crate) fn is_replaced_by(&self, holder: &Holder, pod: &PodFacts) -> bool {
        match holder {
            Holder::Pod(_) => false,
            Holder::Replacement(of) => self.replacements.get(of).is_some_and(|it| it.is(pod)),
        }
    }

    /// Is room earmarked for any replacement?
    pub fn awaits_replacements(&self) -> bool {
        !self.replacements.is_empty()
    }

    /// The node that is emptied, and the earmarks for the replacements of its pods, by the pods' UIDs.
    pub fn emptied(&self) -> Option<(&Arc<str>, HashMap<&Uid, &Earmark>)> {
        let mut all = self.replacements.values();
        let node = all.find_map(Replacement::empties)?;
        let its = self.replacements.iter();
        let its = its.filter(|(_, it)| it.empties() == Some(node));
        Some((node, its.map(|(of, it)| (of, &it.earmark)).collect()))
    }

    /// Could the pod be the replacement of one that left the node which is emptied?
    pub fn left_emptied(&self, pod: &PodFacts) -> bool {
        let mut all = self.replacements.values();
        all.any(|it| it.empties().is_some() && it.is(pod))
    }

    /// Is it this node that is emptied?
    pub fn empties(&self, node: &str) -> bool {
        let mut emptied = self.replacements.values().filter_map(Replacement::empties);
        emptied.any(|name| **name == *node)
    }

    /// Earmarks room for the replacement of a pod that is evicted.
    pub fn put_replacement(&mut self, of: &PodFacts, beneficiary: Beneficiary, earmark: Earmark) {
        self.end_replacement(&of.uid, Ended::Replaced);
        let like = PodFacts {
            node: None,
            assignment: None,
            deleting: false,
            gone_by: None,
            preempted: false,
            ..of.clone()
        };
        self.index(Holder::Replacement(of.uid.clone()), earmark.node());
        let replacement = Replacement {
            like,
            beneficiary,
            earmark,
        };
        self.replacements.insert(of.uid.clone(), replacement);
    }

    pub(super) fn end_replacement(&mut self, of: &Uid, how: Ended) {
        if let Some(Replacement { earmark, .. }) = self.replacements.swap_remove(of) {
            self.count_end(&earmark, how);
            self.unindex(&Holder::Replacement(of.clone()), earmark.node());
        }
    }

    /// Ends the earmarks for replacements of pods that stay after all. The beneficiary is without an earmark, or no
    /// node is emptied any more.
    pub fn end_needless_replacements(&mut self, empties: bool, books: &Books) {
        let stays = |of: &str| books.pod(of).is_some_and(|pod| !pod.deleting);
        let goes_on = |it: &Replacement| match &it.beneficiary {
            Beneficiary::Pod(uid) => self.find(uid, Cause::Defragment).is_some(),
            Beneficiary::Node(_) => empties,
        };
        let needless = self.replacements.iter();
        let needless = needless
            .filter(|(of, it)| stays(of) && !goes_on(it))
            .map(|(of, _)| of.clone());
        let needless: Vec<Uid> = needless.collect();
        needless
            .iter()
            .for_each(|of| self.end_replacement(of, Ended::Needless));
    }

    /// A pod has been bound: was room earmarked for it as a replacement?
    pub(super) fn replacement_came(&mut self, old: Option<&PodFacts>, new: Option<&PodFacts>) {
        let came = new.filter(|_| old.is_none_or(|old| old.node.is_none()));
        let Some((pod, node)) = came.and_then(|pod| Some((pod, pod.node.as_ref()?))) else {
            return;
        };
        let mine = self.replacements.iter().filter(|(_, it)| it.is(pod));
        let mine = mine.map(|(of, it)| {
            let assigned = pod.assignment.iter().flatten();
            let others = assigned.flat_map(|it| &it.charges);
            let others = others.filter(|(card, _)| !it.earmark.has(card));
            (it.earmark.node() != node, others.count(), of.clone())
        });
        if let Some((.., of)) = mine.min() {
            self.end_replacement(&of, Ended::Taken);
        }
    }
}
