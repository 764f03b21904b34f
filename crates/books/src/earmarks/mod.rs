//! Room on a node that is earmarked for a pod: only pods of higher priority may take it.
//!
//! Each [`Cause`] is a reason for an earmark. [`Earmarks::put`] puts the earmark of a pod, and [`Earmarks::end`] ends
//! it. The latter counts the end, notes attempts without success, and offers the node again. CPU and memory of the host
//! count for every cause ([`crate::trial`]).
//!
//! Every earmark ends: with its pod, once the pod has memory, or at its deadline.

mod backoff;
mod earmark;
mod expected;
mod nominations;
mod replacements;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Group, PodFacts};

use crate::books::{Books, Uid};
use crate::maps::{HashMap, HashSet};
use backoff::Backoffs;
pub use backoff::{Controller, controller, doubled};
pub use earmark::{Cards, Earmark, Holder};
pub use earmark::{Cause, Ended};
use expected::Expected;
use nominations::Nominations;
pub use replacements::Beneficiary;
use replacements::Replacement;

/// How many earmarks ended, by cause and how.
type Counts = HashMap<(Cause, Ended), u64>;

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Earmarks {
    /// By node, the pods that room is earmarked for there, by a nomination, in `all` or in `replacements`.
    holders: HashMap<Arc<str>, HashSet<Holder>>,
    all: HashMap<Uid, Earmark>,
    ended: Counts,
    /// When [`Earmarks::expire`] ran last: pauses begin then.
    now: Duration,
    /// By the UID of the pod that is evicted.
    replacements: HashMap<Uid, Replacement>,
    backoffs: Backoffs,
    /// The pod whose place was last compared with others.
    compared: Option<Uid>,
    nominations: Nominations,
    expected: Expected,
    /// It is offered to others: see [`Earmarks::take_freed`].
    freed: Vec<Freed>,
}

/// A node where room is kept no more, or less of it, and whether that makes room for pods that others are disrupted for.
pub(crate) type Freed = (Arc<str>, bool);

impl Earmarks {
    /// A pod has come, changed or gone.
    pub fn follow(&mut self, uid: &Uid, old: Option<&PodFacts>, new: Option<&PodFacts>) {
        self.beneficiary_lost(old, new);
        self.nominations.follow(uid, new);
        self.nomination_ended(uid, old, new);
        self.index_nomination(old, new);
        self.replacement_came(old, new);
        if new.is_none_or(|pod| pod.node.is_some() || pod.released) {
            self.backoffs.forget(uid);
        }
    }

    /// Takes the nodes where less room is kept since the last call. The queue follows them after each change.
    pub fn take_freed(&mut self) -> Vec<Freed> {
        std::mem::take(&mut self.freed)
    }

    /// Forgets the failures of pods that are not known.
    pub fn retain_failures(&mut self, is_known: impl Fn(&Uid) -> bool) {
        self.backoffs.retain(is_known);
    }

    /// Is room earmarked for the pod by more than a reservation? An earmark that outlives its nomination does not count
    /// either.
    pub fn has_more_than_reservation(&self, uid: &str) -> bool {
        let is_more = |cause| match cause {
            Cause::Reserve => false,
            Cause::Nominated => self.nominations.has(uid),
            _ => true,
        };
        self.earmark_if(uid, is_more).is_some()
    }

    /// All that is earmarked for pods.
    pub fn iter(&self) -> impl Iterator<Item = (&Uid, &Earmark)> {
        self.all.iter()
    }

    /// Is room of the node earmarked for the pod, if only by a nomination?
    pub fn is_for(&self, uid: &Uid, node: &str) -> bool {
        let holders = self.holders.get(node);
        holders.is_some_and(|it| it.contains(&Holder::Pod(uid.clone())))
    }

    /// Is room earmarked anywhere?
    pub fn is_empty(&self) -> bool {
        self.holders.is_empty()
    }

    /// Is room earmarked on this node?
    pub fn has_earmarks(&self, node: &str) -> bool {
        self.holders.contains_key(node)
    }

    /// The holders of earmarked room on a node.
    pub fn holders(&self, node: &str) -> impl Iterator<Item = &Holder> {
        self.holders.get(node).into_iter().flatten()
    }

    /// The pods with earmarked room on a node, without replacements.
    pub fn pods_with_earmarks(&self, node: &str) -> impl Iterator<Item = &Uid> {
        self.holders(node).filter_map(|holder| match holder {
            Holder::Pod(uid) => Some(uid),
            Holder::Replacement(_) => None,
        })
    }

    /// The earmark of a holder; none if only a nomination keeps its room.
    pub fn earmark_of(&self, holder: &Holder) -> Option<&Earmark> {
        match holder {
            Holder::Pod(uid) => self.earmark(uid),
            Holder::Replacement(of) => Some(&self.replacements.get(of)?.earmark),
        }
    }

    /// The earmarks for memory that is reclaimed on a node.
    pub fn reclaims_on(&self, node: &str) -> impl Iterator<Item = &Earmark> {
        let all = self.holders(node).filter_map(|it| self.earmark_of(it));
        all.filter(|it| it.cause == Cause::Reclaim)
    }

    /// The earmark of a pod; none if only a nomination keeps its room.
    pub fn earmark(&self, uid: &str) -> Option<&Earmark> {
        self.all.get(uid)
    }

    fn earmark_if(&self, uid: &str, is_it: impl Fn(Cause) -> bool) -> Option<&Earmark> {
        self.earmark(uid).filter(|it| is_it(it.cause))
    }

    /// The earmark of a pod, if it has this cause.
    pub fn find(&self, uid: &str, cause: Cause) -> Option<&Earmark> {
        self.earmark_if(uid, |its| its == cause)
    }

    /// The earmark of a pod for which others are to be evicted.
    pub fn eviction_for(&self, uid: &str) -> Option<&Earmark> {
        self.earmark_if(uid, Cause::evicts)
    }

    /// The reservation that is to be compared with others next: each in turn.
    pub fn next_reservation(&mut self) -> Option<Uid> {
        let all = self.all_of(Cause::Reserve);
        let last = self.compared.take();
        let after = |uid: &&Uid| last.as_ref().is_none_or(|last| *uid > last);
        self.compared = all.iter().find(after).or(all.first()).cloned();
        self.compared.clone()
    }

    /// The pods for which room is earmarked for this cause, by UID.
    pub fn all_of(&self, cause: Cause) -> Vec<Uid> {
        self.all_earmarked(|its| its == cause)
    }

    /// The pods for which others are to be evicted, by UID.
    pub fn all_evictions(&self) -> Vec<Uid> {
        self.all_earmarked(Cause::evicts)
    }

    /// The pods for which others are to be evicted by this cause, without pods of gangs, by UID.
    pub fn evictions_for_pods(&self, cause: Cause) -> Vec<Uid> {
        let mut all = self.all_of(cause);
        all.retain(|uid| self.earmark(uid).is_some_and(|it| it.gang().is_none()));
        all
    }

    /// The gangs for which others are to be evicted.
    pub fn gangs_with_evictions(&self) -> BTreeSet<Group> {
        let gangs = self.all.values().filter_map(Earmark::gang);
        gangs.cloned().collect()
    }

    /// The pods of the gang for which others are to be evicted, by UID, and the earmark of each.
    pub fn evictions_for(&self, gang: &Group) -> Vec<(&Uid, &Earmark)> {
        let all = self.all.iter();
        let mut all: Vec<_> = all.filter(|(_, it)| it.gang() == Some(gang)).collect();
        all.sort_unstable_by_key(|(uid, _)| *uid);
        all
    }

    fn all_earmarked(&self, is_it: impl Fn(Cause) -> bool) -> Vec<Uid> {
        let all = self.all.iter().filter(|(_, it)| is_it(it.cause));
        let mut all: Vec<Uid> = all.map(|(uid, _)| uid.clone()).collect();
        all.sort_unstable();
        all
    }

    /// Earmarks room for a pod, and ends its earlier earmark.
    pub fn put(&mut self, uid: &Uid, earmark: Earmark, books: &Books) {
        self.end(uid, Ended::Replaced, books);
        self.index(Holder::Pod(uid.clone()), &earmark.node);
        self.all.insert(uid.clone(), earmark);
    }

    /// Ends the pod's earmark. A node where the pod is still nominated is not offered to others.
    pub fn end(&mut self, uid: &str, how: Ended, books: &Books) {
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
    pub fn end_ungated(&mut self, uid: &str, how: Ended, books: &Books) -> bool {
        let is_ungated = self.find(uid, Cause::Ungated).is_some();
        if is_ungated {
            self.end(uid, how, books);
        }
        is_ungated
    }

    /// Counts the end. The index of nodes is the caller's.
    fn remove(&mut self, uid: &str, how: Ended) -> Option<Earmark> {
        let earmark = self.all.swap_remove(uid)?;
        self.count_end(&earmark, how);
        Some(earmark)
    }

    pub(super) fn count_end(&mut self, earmark: &Earmark, how: Ended) {
        *self.ended.entry((earmark.cause, how)).or_default() += 1;
    }

    /// How many earmarks for this cause ended like this.
    pub fn count_ended(&self, cause: Cause, how: Ended) -> u64 {
        let count = self.ended.get(&(cause, how));
        count.copied().unwrap_or_default()
    }

    /// These pods must finish for a reservation; it lasts until then, if that is another time than before.
    pub fn reservation_nearer(&mut self, uid: &str, waits_for: Vec<Uid>, until: Option<Duration>) {
        if let Some(earmark) = self.all.get_mut(uid)
            && earmark.cause == Cause::Reserve
        {
            earmark.waits_for = waits_for.into();
            earmark.until = until.unwrap_or(earmark.until);
        }
    }

    /// The `victims` are to give memory back for the room from now on. The earmark may then keep less room from third
    /// pods.
    pub fn reclaim_from(&mut self, uid: &str, victims: Vec<Uid>) {
        if let Some(earmark) = self.all.get_mut(uid)
            && earmark.cause == Cause::Reclaim
        {
            earmark.waits_for = victims.into();
            self.freed.push((earmark.node.clone(), false));
        }
    }

    /// Nodes that gained room before this were looked at for the pod.
    pub fn note_looked(&mut self, uid: &str, gains: u64) {
        if let Some(earmark) = self.all.get_mut(uid) {
            earmark.looked = gains;
        }
    }

    /// Earmarks the room for which a pod is ungated; none if it is nominated elsewhere.
    pub fn earmark_for_ungated(
        &mut self,
        pod: &PodFacts,
        node: &Arc<str>,
        until: Duration,
        books: &Books,
    ) {
        let here = self.all.get(&pod.uid);
        let elsewhere = pod.nominated.as_ref().is_some_and(|other| other != node);
        if elsewhere || here.is_some_and(|it| it.node == *node) {
            return;
        }
        let earmark = Earmark::of_node(node, Cause::Ungated, until);
        self.put(&pod.uid, earmark, books);
    }

    /// A pod is refused: should it be nominated, its room will outlive that.
    pub fn earmark_for_nominated(&mut self, pod: &PodFacts, books: &Books, until: Duration) {
        let known = books.pod(&pod.uid);
        let known = known.filter(|known| known.node.is_none() && !known.released);
        let own = |known: &PodFacts| known.own_nomination || pod.own_nomination;
        let known = known.filter(|known| !own(known) && !self.nominations.is_over(&pod.uid));
        let node = known.and_then(|it| it.nominated.clone().or_else(|| pod.nominated.clone()));
        if let Some(node) = node {
            let earmark = Earmark::of_node(&node, Cause::Nominated, until);
            self.put(&pod.uid, earmark, books);
        }
    }

    /// Ends the earmarks and nominations whose time is over.
    pub fn expire(&mut self, books: &Books, now: Duration, ttl: Duration) {
        self.now = now;
        let mut late = Vec::new();
        for (uid, earmark) in &mut self.all {
            let nominated = books.pod(uid).and_then(|pod| pod.nominated.as_ref());
            if earmark.cause == Cause::Nominated && nominated == Some(&earmark.node) {
                earmark.until = now + ttl;
            } else if earmark.until <= now {
                late.push(uid.clone());
            }
        }
        // Earmarks of equal cause keep their order in `all`.
        late.sort_by_key(|uid| self.all.get(uid).map(|it| it.cause));
        late.iter()
            .for_each(|uid| self.end(uid, Ended::Late, books));
        let replacements = self.replacements.iter();
        let late = replacements.filter(|(_, it)| it.earmark.until <= now);
        let late: Vec<Uid> = late.map(|(of, _)| of.clone()).collect();
        late.iter()
            .for_each(|of| self.end_replacement(of, Ended::Late));
        self.end_nominations(books, now);
    }

    /// Updates the index of nominations. A nomination makes room for others when it ends, or when it holds less because
    /// its victims leave.
    fn index_nomination(&mut self, old: Option<&PodFacts>, new: Option<&PodFacts>) {
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
                self.freed.push((node.clone(), false));
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
        if self.all.get(uid).is_some_and(ends) {
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

    /// A pod has a reservation: the room of its nomination becomes free.
    pub fn nomination_changed(&mut self, uid: &str, books: &Books) {
        let pod = books.pod(uid);
        if let Some(node) = pod.and_then(|pod| pod.nominated.as_ref()) {
            self.freed.push((node.clone(), false));
        }
        // A gang may be given up after some of its pods have reserved. A pod that has waited long may not be bound there.
        let outlasts = |it: &Earmark| it.gang().is_some() || it.cause == Cause::Reserve;
        if !self.earmark(uid).is_some_and(outlasts) {
            self.end(uid, Ended::Taken, books);
        }
    }

    /// The node where room is earmarked for an unbound pod.
    fn holds_room_on(&self, pod: &PodFacts) -> Option<Arc<str>> {
        if pod.node.is_some() || pod.released {
            return None;
        }
        let earmarked = || Some(self.all.get(&pod.uid)?.node.clone());
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
            self.freed.push((node.into(), true));
        }
    }
}
