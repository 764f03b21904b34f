//! Room on a node that is earmarked for a pod: only pods of higher priority may take it.
//!
//! Each [`Cause`] is a reason for the same thing. There is one way to put an earmark ([`Queue::put`]) and one way out
//! ([`Queue::end`]), which counts it, notes what was tried without success, and offers the node again. CPU and memory of the host
//! count for every cause ([`crate::trial`]).
//!
//! Every earmark ends: with its pod, once the pod has memory, or at its deadline.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Group, PodFacts};

use super::Queue;
use super::earmark::{Cause, Earmark, Ended, Holder};
use crate::books::{Books, Uid};
use crate::maps::HashMap;

/// How many earmarks ended, by cause and how.
pub(super) type Counts = HashMap<(Cause, Ended), u64>;

impl Queue {
    /// Is room earmarked on this node?
    pub(super) fn has_earmarks(&self, node: &str) -> bool {
        self.holders.contains_key(node)
    }

    /// Those for which room is earmarked on a node.
    pub(crate) fn holders(&self, node: &str) -> impl Iterator<Item = &Holder> {
        self.holders.get(node).into_iter().flatten()
    }

    /// The same without replacements.
    pub(super) fn pods_with_earmarks(&self, node: &str) -> impl Iterator<Item = &Uid> {
        self.holders(node).filter_map(|holder| match holder {
            Holder::Pod(uid) => Some(uid),
            Holder::Replacement(_) => None,
        })
    }

    /// What is earmarked for one of these; none if only a nomination is.
    pub(crate) fn earmark_of(&self, holder: &Holder) -> Option<&Earmark> {
        match holder {
            Holder::Pod(uid) => self.earmark(uid),
            Holder::Replacement(of) => Some(&self.replacements.get(of)?.earmark),
        }
    }

    /// What is reclaimed for others on a node.
    pub(crate) fn reclaims_on(&self, node: &str) -> impl Iterator<Item = &Earmark> {
        let all = self.holders(node).filter_map(|it| self.earmark_of(it));
        all.filter(|it| it.cause == Cause::Reclaim)
    }

    /// What is earmarked for a pod, unless only a nomination is.
    pub(crate) fn earmark(&self, uid: &str) -> Option<&Earmark> {
        self.earmarks.get(uid)
    }

    pub(super) fn earmark_if(&self, uid: &str, is_it: impl Fn(Cause) -> bool) -> Option<&Earmark> {
        self.earmark(uid).filter(|it| is_it(it.cause))
    }

    /// What is reclaimed for a pod.
    pub(crate) fn reclaim_for(&self, uid: &str) -> Option<&Earmark> {
        self.earmark_if(uid, |cause| cause == Cause::Reclaim)
    }

    /// What is reserved for a pod that has waited long.
    pub(crate) fn reservation_for(&self, uid: &str) -> Option<&Earmark> {
        self.earmark_if(uid, |cause| cause == Cause::Reserve)
    }

    /// What pods that are to be evicted leave to a pod.
    pub(crate) fn eviction_for(&self, uid: &str) -> Option<&Earmark> {
        self.earmark_if(uid, Cause::evicts)
    }

    /// Are others evicted for the pod whose replacements have room elsewhere?
    pub(crate) fn is_defragmented_for(&self, uid: &str) -> bool {
        let defragments = |cause| cause == Cause::Defragment;
        self.earmark_if(uid, defragments).is_some()
    }

    /// Is room earmarked for the pod because it was ungated for it?
    pub(crate) fn is_ungated_for_room(&self, uid: &str) -> bool {
        self.earmark_if(uid, |cause| cause == Cause::Ungated)
            .is_some()
    }

    /// The reservation that is to be compared with others next: each in turn.
    pub(crate) fn next_reservation(&mut self) -> Option<Uid> {
        let all = self.all_reservations();
        let last = self.compared.take();
        let after = |uid: &&Uid| last.as_ref().is_none_or(|last| *uid > last);
        self.compared = all.iter().find(after).or(all.first()).cloned();
        self.compared.clone()
    }

    /// The pods for which memory is reclaimed, by UID.
    pub(crate) fn all_reclaims(&self) -> Vec<Uid> {
        self.all_earmarked(|cause| cause == Cause::Reclaim)
    }

    /// The pods that have a reservation, by UID.
    pub(crate) fn all_reservations(&self) -> Vec<Uid> {
        self.all_earmarked(|cause| cause == Cause::Reserve)
    }

    /// The pods for which others are to be evicted, by UID.
    pub(crate) fn all_evictions(&self) -> Vec<Uid> {
        self.all_earmarked(Cause::evicts)
    }

    /// The same without pods of gangs.
    pub(crate) fn all_evictions_for_pods(&self) -> Vec<Uid> {
        let mut all = self.all_evictions();
        all.retain(|uid| self.earmark(uid).is_some_and(|it| it.gang().is_none()));
        all
    }

    /// The gangs for which others are to be evicted.
    pub(crate) fn gangs_with_evictions(&self) -> BTreeSet<Group> {
        let gangs = self.earmarks.values().filter_map(Earmark::gang);
        gangs.cloned().collect()
    }

    /// The pods of the gang for which others are to be evicted, by UID, and what is earmarked for each.
    pub(crate) fn evictions_for(&self, gang: &Group) -> Vec<(&Uid, &Earmark)> {
        let all = self.earmarks.iter();
        let mut all: Vec<_> = all.filter(|(_, it)| it.gang() == Some(gang)).collect();
        all.sort_unstable_by_key(|(uid, _)| *uid);
        all
    }

    fn all_earmarked(&self, is_it: impl Fn(Cause) -> bool) -> Vec<Uid> {
        let all = self.earmarks.iter().filter(|(_, it)| is_it(it.cause));
        let mut all: Vec<Uid> = all.map(|(uid, _)| uid.clone()).collect();
        all.sort_unstable();
        all
    }

    /// Earmarks room for a pod, instead of what was earmarked for it.
    pub(crate) fn put(&mut self, uid: &Uid, earmark: Earmark, books: &Books) {
        self.end(uid, Ended::Replaced, books);
        self.index(Holder::Pod(uid.clone()), &earmark.node);
        self.earmarks.insert(uid.clone(), earmark);
    }

    /// What was earmarked for the pod ends. A node where the pod is nominated still is not offered to others.
    pub(crate) fn end(&mut self, uid: &str, how: Ended, books: &Books) {
        let Some(earmark) = self.remove(uid, how) else {
            return;
        };
        let known = books.pod(uid);
        if how == Ended::Late {
            self.back_off(uid, known.map(|pod| &**pod), &earmark);
        }
        if known.is_none_or(|known| known.nominated.as_ref() != Some(&earmark.node)) {
            self.unindex(&Holder::Pod(uid.into()), &earmark.node);
        }
    }

    /// The pod that was ungated for room was asked about, or never will be. True if room was earmarked for that.
    pub(crate) fn end_ungated(&mut self, uid: &str, how: Ended, books: &Books) -> bool {
        let is_ungated = self.is_ungated_for_room(uid);
        if is_ungated {
            self.end(uid, how, books);
        }
        is_ungated
    }

    /// Counts the end. The index of nodes is the caller's.
    fn remove(&mut self, uid: &str, how: Ended) -> Option<Earmark> {
        let earmark = self.earmarks.swap_remove(uid)?;
        self.count_end(&earmark, how);
        Some(earmark)
    }

    pub(super) fn count_end(&mut self, earmark: &Earmark, how: Ended) {
        *self.ended.entry((earmark.cause, how)).or_default() += 1;
    }

    /// How many earmarks there are for this cause.
    pub(crate) fn count_earmarks(&self, cause: Cause) -> usize {
        let of_cause = self.earmarks.values().filter(|it| it.cause == cause);
        of_cause.count()
    }

    /// How many earmarks for this cause ended like this.
    pub(crate) fn count_ended(&self, cause: Cause, how: Ended) -> u64 {
        let count = self.ended.get(&(cause, how));
        count.copied().unwrap_or_default()
    }

    /// These pods must finish for a reservation; it lasts until then, if that is another time than before.
    pub(crate) fn reservation_nearer(
        &mut self,
        uid: &str,
        waits_for: Vec<Uid>,
        until: Option<Duration>,
    ) {
        if let Some(earmark) = self.earmarks.get_mut(uid)
            && earmark.cause == Cause::Reserve
        {
            earmark.waits_for = waits_for.into();
            earmark.until = until.unwrap_or(earmark.until);
        }
    }

    /// Others are to give memory back for the same room. What is earmarked of it for third pods may be less.
    pub(crate) fn reclaim_from(&mut self, uid: &str, victims: Vec<Uid>) {
        if let Some(earmark) = self.earmarks.get_mut(uid)
            && earmark.cause == Cause::Reclaim
        {
            earmark.waits_for = victims.into();
            self.waiting.room_on(&earmark.node);
        }
    }

    /// Earmarks the room for which a pod is ungated; none if it is nominated elsewhere.
    pub(super) fn earmark_for_ungated(
        &mut self,
        pod: &PodFacts,
        node: &Arc<str>,
        until: Duration,
        books: &Books,
    ) {
        let here = self.earmarks.get(&pod.uid);
        let elsewhere = pod.nominated.as_ref().is_some_and(|other| other != node);
        if elsewhere || here.is_some_and(|it| it.node == *node) {
            return;
        }
        let earmark = Earmark::of_node(node, Cause::Ungated, until);
        self.put(&pod.uid, earmark, books);
    }

    /// A pod is refused: should it be nominated, its room will outlive that.
    pub(crate) fn earmark_for_nominated(&mut self, pod: &PodFacts, books: &Books, until: Duration) {
        let known = books.pod(&pod.uid);
        let Some(known) = known.filter(|known| known.node.is_none() && !known.released) else {
            return;
        };
        let own = known.own_nomination || pod.own_nomination;
        if own || self.nominations.is_over(&pod.uid) {
            return;
        }
        let Some(node) = known.nominated.clone().or_else(|| pod.nominated.clone()) else {
            return;
        };
        let earmark = Earmark::of_node(&node, Cause::Nominated, until);
        self.put(&pod.uid, earmark, books);
    }

    /// Ends what has lasted long enough.
    pub(crate) fn expire_earmarks(&mut self, books: &Books, now: Duration, ttl: Duration) {
        self.now = now;
        let mut late = Vec::new();
        for (uid, earmark) in &mut self.earmarks {
            let nominated = books.pod(uid).and_then(|pod| pod.nominated.as_ref());
            if earmark.cause == Cause::Nominated && nominated == Some(&earmark.node) {
                earmark.until = now + ttl;
            } else if earmark.until <= now {
                late.push(uid.clone());
            }
        }
        // Those of equal cause end in the order in which they were put.
        late.sort_by_key(|uid| self.earmarks.get(uid).map(|it| it.cause));
        late.iter()
            .for_each(|uid| self.end(uid, Ended::Late, books));
        let replacements = self.replacements.iter();
        let late = replacements.filter(|(_, it)| it.earmark.until <= now);
        let late: Vec<Uid> = late.map(|(of, _)| of.clone()).collect();
        late.iter()
            .for_each(|of| self.end_replacement(of, Ended::Late));
    }

    /// Keeps the index of nominations. Those that hold room no more, or hold less of it because
    /// their victims are leaving, make room for others.
    pub(super) fn index_nomination(&mut self, old: Option<&PodFacts>, new: Option<&PodFacts>) {
        let key = |pod: &PodFacts| (self.holds_room_on(pod), pod.gated, pod.deleting);
        if old.map(key) == new.map(key) && old.is_some() {
            return;
        }
        let from = old.and_then(|pod| self.holds_room_on(pod));
        let to = new.and_then(|pod| self.holds_room_on(pod));
        for node in old
            .into_iter()
            .chain(new)
            .filter_map(|pod| pod.node.as_ref())
        {
            if self.holders.contains_key(node) {
                self.waiting.room_on(node);
            }
        }
        let Some(uid) = old.or(new).map(|pod| &pod.uid) else {
            return;
        };
        if let Some(node) = from {
            self.unindex(&Holder::Pod(uid.clone()), &node);
        }
        // kube-scheduler's preemption makes room for it: nothing need be reclaimed, and no other pod be evicted.
        let preempts = new.is_some_and(|pod| pod.nominated.is_some() && !pod.own_nomination);
        let ends = |earmark: &Earmark| {
            let is_means = earmark.cause.evicts() || earmark.is_awaited();
            Some(&earmark.node) != to.as_ref() || preempts && is_means
        };
        if self.earmarks.get(uid).is_some_and(ends) {
            let how = match new.filter(|pod| !pod.released) {
                None => Ended::Gone,
                Some(pod) if pod.node.is_some() => Ended::Taken,
                Some(_) => Ended::Replaced,
            };
            self.remove(uid, how);
        }
        if let Some(node) = to {
            self.index(Holder::Pod(uid.clone()), &node);
        }
    }

    /// A pod has reserved: what it was nominated for is free.
    pub(super) fn nomination_changed(&mut self, uid: &str, books: &Books) {
        let pod = books.pod(uid);
        if let Some(node) = pod.and_then(|pod| pod.nominated.as_ref()) {
            self.waiting.room_on(node);
        }
        // A gang may be given up after some of its pods have reserved.
        if self.earmark(uid).is_none_or(|it| it.gang().is_none()) {
            self.end(uid, Ended::Taken, books);
        }
    }

    /// The node where room is earmarked for an unbound pod.
    fn holds_room_on(&self, pod: &PodFacts) -> Option<Arc<str>> {
        if pod.node.is_some() || pod.released {
            return None;
        }
        let earmarked = || Some(self.earmarks.get(&pod.uid)?.node.clone());
        let nominated = pod.nominated.clone();
        let nominated = nominated.filter(|_| !self.nominations.is_over(&pod.uid));
        nominated.or_else(earmarked)
    }

    pub(super) fn index(&mut self, holder: Holder, node: &Arc<str>) {
        let holders = self.holders.entry(node.clone()).or_default();
        holders.insert(holder);
    }

    pub(super) fn unindex(&mut self, holder: &Holder, node: &str) {
        if let Some(holders) = self.holders.get_mut(node) {
            holders.swap_remove(holder);
            if holders.is_empty() {
                self.holders.swap_remove(node);
            }
            self.gains.note(&node.into());
            self.waiting.room_on(node);
        }
    }
}
