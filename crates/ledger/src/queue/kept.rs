//! Room on a node that is kept for a pod: no other gets it whose priority is not higher.
//!
//! It is kept for one of these causes. *Preempting*: kube-scheduler nominated the pod there. It may ask for
//! the pod before our watch shows that its victim is gone, take the refusal for the end of the preemption
//! and clear the nomination; the claim outlives that for a while, or the room would go to a pod of lower
//! priority as soon as we see it. *Called back*: others use the room beyond their requests and were asked
//! to give it back ([`crate::call_back`]). *Lifted*: the pod was let out of the line for it, and its filter call is
//! awaited. *Waiting*: the pod has waited for long, and what comes free of these cards is kept for it
//! ([`crate::places`]).
//! *Scattered*: pods of lower priority were chosen to end for it ([`crate::scattered`]). *Moving*: others move for it to
//! places that are free, and *Successor*: one of those places, for the pod that comes instead of one that moves.
//!
//! Every kept room ends: with its pod, with a reservation for it, or at its deadline.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_pack::{Mib, Request};

use super::Queue;
use crate::books::{Books, Uid};
use crate::places::GivenUp;

/// Room that is kept for a pod.
#[derive(Clone, Debug)]
pub(crate) struct Kept {
    pub(super) node: Arc<str>,
    cause: Cause,
    /// When it ends; that of a pod which is nominated lasts as long as the nomination, and then so long.
    until: Duration,
}

impl Kept {
    /// Is it waited for, and no pod terminates for it?
    pub(super) fn is_awaited(&self) -> bool {
        matches!(self.cause, Cause::CalledBack(_) | Cause::Waiting(_))
    }
}

/// Why room is kept.
#[derive(Clone, Debug)]
pub(super) enum Cause {
    Preempting,
    CalledBack(Arc<Target>),
    Lifted,
    Waiting(Arc<Target>),
    Scattered(Arc<Target>),
    Moving(Arc<Target>),
    Successor(Arc<Target>),
}

/// What others are to leave to a pod: what they use beyond their requests, whatever comes free, or all that they hold.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    /// What the pod asked for when it began.
    request: Arc<Request>,
    /// The cards that it is to get, by UUID, and what it will hold of each.
    cards: Box<[(Box<str>, Mib)]>,
    /// Who was chosen to give memory back or to end, or is waited for until it ends.
    victims: Box<[Uid]>,
}

impl Target {
    /// For a pod that asks for this.
    pub(crate) fn new(
        request: Arc<Request>,
        cards: Vec<(Box<str>, Mib)>,
        victims: Vec<Uid>,
    ) -> Self {
        Self {
            request,
            cards: cards.into(),
            victims: victims.into(),
        }
    }

    pub(crate) fn is_for(&self, request: &Request) -> bool {
        *self.request == *request
    }

    /// The cards that the pod is to get, by UUID, and what it will hold of each.
    pub(crate) fn cards(&self) -> &[(Box<str>, Mib)] {
        &self.cards
    }

    /// Does the pod want memory of this card?
    pub(crate) fn has(&self, uuid: &str) -> bool {
        self.cards.iter().any(|(card, _)| **card == *uuid)
    }

    /// Who was chosen to give memory back, or is waited for until it ends.
    pub(crate) fn victims(&self) -> &[Uid] {
        &self.victims
    }
}

impl Queue {
    /// Is room kept on this node?
    pub(super) fn is_kept(&self, node: &str) -> bool {
        self.keeping.contains_key(node)
    }

    /// The pods for which room is kept on a node.
    pub(crate) fn kept_on(&self, node: &str) -> impl Iterator<Item = &Uid> {
        self.keeping.get(node).into_iter().flatten()
    }

    /// What is called back for a pod, and on which node.
    pub(crate) fn called_back(&self, uid: &str) -> Option<(&Arc<str>, &Arc<Target>)> {
        let kept = self.kept.get(uid)?;
        match &kept.cause {
            Cause::CalledBack(what) => Some((&kept.node, what)),
            _ => None,
        }
    }

    /// The cards that are kept for a pod as they come free, or for a successor, and on which node.
    pub(crate) fn set_apart(&self, uid: &str) -> Option<(&Arc<str>, &Arc<Target>)> {
        let kept = self.kept.get(uid)?;
        match &kept.cause {
            Cause::Waiting(what) | Cause::Successor(what) => Some((&kept.node, what)),
            _ => None,
        }
    }

    /// The place that is kept for a pod that has waited for long, and on which node.
    pub(crate) fn place(&self, uid: &str) -> Option<(&Arc<str>, &Arc<Target>)> {
        let kept = self.kept.get(uid)?;
        match &kept.cause {
            Cause::Waiting(what) => Some((&kept.node, what)),
            _ => None,
        }
    }

    /// The place that is to be compared with others next: each in turn.
    pub(crate) fn next_place(&mut self) -> Option<Uid> {
        let all = self.all_places();
        let last = self.compared.take();
        let after = |uid: &&Uid| last.as_ref().is_none_or(|last| *uid > last);
        self.compared = all.iter().find(after).or(all.first()).cloned();
        self.compared.clone()
    }

    /// The cards that are kept for a pod, by UUID, and how much of each; none if that is for whoever places it to say.
    pub(crate) fn kept_cards(&self, uid: &str) -> Option<&[(Box<str>, Mib)]> {
        match &self.kept.get(uid)?.cause {
            Cause::CalledBack(what)
            | Cause::Waiting(what)
            | Cause::Scattered(what)
            | Cause::Moving(what)
            | Cause::Successor(what) => Some(what.cards()),
            Cause::Preempting | Cause::Lifted => None,
        }
    }

    /// What pods that are to end or to move leave to a pod, and on which node.
    pub(crate) fn scattered(&self, uid: &str) -> Option<(&Arc<str>, &Arc<Target>)> {
        let kept = self.kept.get(uid)?;
        match &kept.cause {
            Cause::Scattered(what) | Cause::Moving(what) => Some((&kept.node, what)),
            _ => None,
        }
    }

    /// Do others move for the pod?
    pub(crate) fn is_moved_for(&self, uid: &str) -> bool {
        let kept = self.kept.get(uid);
        kept.is_some_and(|kept| matches!(kept.cause, Cause::Moving(_)))
    }

    /// Until when room is kept for a pod.
    pub(crate) fn kept_until(&self, uid: &str) -> Option<Duration> {
        Some(self.kept.get(uid)?.until)
    }

    /// Everything that is called back, in the order of the pods' UIDs.
    pub(crate) fn all_called_back(&self) -> Vec<Uid> {
        self.all_kept(|cause| matches!(cause, Cause::CalledBack(_)))
    }

    /// The pods that have a place, in the order of their UIDs.
    pub(crate) fn all_places(&self) -> Vec<Uid> {
        self.all_kept(|cause| matches!(cause, Cause::Waiting(_)))
    }

    /// The pods for which others are to end or to move, in the order of their UIDs.
    pub(crate) fn all_scattered(&self) -> Vec<Uid> {
        self.all_kept(|cause| matches!(cause, Cause::Scattered(_) | Cause::Moving(_)))
    }

    fn all_kept(&self, is_it: impl Fn(&Cause) -> bool) -> Vec<Uid> {
        let all = self.kept.iter().filter(|(_, kept)| is_it(&kept.cause));
        let mut all: Vec<Uid> = all.map(|(uid, _)| uid.clone()).collect();
        all.sort_unstable();
        all
    }

    /// Keeps room for which memory is called back.
    pub(crate) fn keep(
        &mut self,
        uid: &Uid,
        node: &Arc<str>,
        what: Target,
        until: Duration,
        books: &Books,
    ) {
        self.end_kept(uid, books);
        self.keep_for(uid, node, Cause::CalledBack(what.into()), until);
    }

    /// Keeps a place for a pod that has waited for long.
    pub(crate) fn keep_place(&mut self, uid: &Uid, node: &Arc<str>, what: Target, until: Duration) {
        self.keep_for(uid, node, Cause::Waiting(what.into()), until);
    }

    /// These have to end for a place; it is waited for until then, if that is another time than before.
    pub(crate) fn place_nearer(&mut self, uid: &str, ends: Vec<Uid>, until: Option<Duration>) {
        if let Some(kept) = self.kept.get_mut(uid)
            && let Cause::Waiting(what) = &mut kept.cause
        {
            Arc::make_mut(what).victims = ends.into();
            kept.until = until.unwrap_or(kept.until);
        }
    }

    pub(super) fn keep_for(&mut self, uid: &Uid, node: &Arc<str>, cause: Cause, until: Duration) {
        let pods = self.keeping.entry(node.clone()).or_default();
        pods.insert(uid.clone());
        let node = node.clone();
        self.kept.insert(uid.clone(), Kept { node, cause, until });
    }

    /// A place is given up before its pod had it. After its time other cards are tried first.
    pub(crate) fn give_up(&mut self, uid: &Uid, why: GivenUp, books: &Books) {
        if let Some((_, what)) = self.place(uid) {
            let what = what.clone();
            *self.given_up.entry(why).or_default() += 1;
            if why == GivenUp::Late {
                self.note_in_vain(uid, &what);
            }
            self.end_kept(uid, books);
        }
    }

    /// How many places were given up for this cause.
    pub(crate) fn given_up(&self, why: GivenUp) -> u64 {
        self.given_up.get(&why).copied().unwrap_or_default()
    }

    /// How many for any.
    pub(crate) fn places_given_up(&self) -> u64 {
        self.given_up.values().sum()
    }

    /// Keeps room for which others are to end, or to move.
    pub(crate) fn keep_scattered(
        &mut self,
        uid: &Uid,
        node: &Arc<str>,
        what: Target,
        moving: bool,
        until: Duration,
        books: &Books,
    ) {
        self.end_kept(uid, books);
        let cause = match moving {
            true => Cause::Moving(what.into()),
            false => Cause::Scattered(what.into()),
        };
        self.keep_for(uid, node, cause, until);
    }

    /// Keeps the room for which a pod is let out of the line; none if it is nominated elsewhere.
    pub(super) fn keep_lifted(
        &mut self,
        pod: &PodFacts,
        node: &Arc<str>,
        until: Duration,
        books: &Books,
    ) {
        let here = self.kept.get(&pod.uid);
        let elsewhere = pod.nominated.as_ref().is_some_and(|other| other != node);
        if elsewhere || here.is_some_and(|kept| kept.node == *node) {
            return;
        }
        self.end_kept(&pod.uid, books);
        self.keep_for(&pod.uid, node, Cause::Lifted, until);
    }

    /// The pod that was let out for it has been asked about. True if room was kept for that.
    pub(crate) fn end_lifted(&mut self, uid: &str, books: &Books) -> bool {
        let lifted = self.is_lifted(uid);
        if lifted {
            self.end_kept(uid, books);
        }
        lifted
    }

    /// Is room kept for the pod because it was ungated for it?
    pub(crate) fn is_lifted(&self, uid: &str) -> bool {
        let kept = self.kept.get(uid);
        kept.is_some_and(|kept| matches!(kept.cause, Cause::Lifted))
    }

    /// Is room on this node offered to the pod?
    pub(crate) fn is_offered(&self, uid: &str, node: &str) -> bool {
        self.waiting.is_offered(uid, node)
    }

    /// Others are to give memory back for the same room. What is kept of it from third ones may be less.
    pub(crate) fn call_others(&mut self, uid: &str, victims: Vec<Uid>) {
        if let Some(kept) = self.kept.get_mut(uid)
            && let Cause::CalledBack(what) = &mut kept.cause
        {
            Arc::make_mut(what).victims = victims.into();
            self.waiting.room_on(&kept.node);
        }
    }

    /// Memory that was called back for the pod did not come: its cards are not tried again before all
    /// others were.
    pub(crate) fn called_in_vain(&mut self, uid: &Uid, books: &Books) {
        if let Some((_, what)) = self.called_back(uid) {
            let what = what.clone();
            self.note_in_vain(uid, &what);
        }
        self.end_kept(uid, books);
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
            if self.keeping.contains_key(node) {
                self.waiting.room_on(node);
            }
        }
        let Some(uid) = old.or(new).map(|pod| &pod.uid) else {
            return;
        };
        if let Some(node) = from {
            self.unindex(uid, &node);
        }
        // kube-scheduler's preemption makes room for it: nothing need be called back, and nobody else end.
        let preempts = new.is_some_and(|pod| pod.nominated.is_some() && !pod.own_nomination);
        let ends = |kept: &Kept| {
            let ours = matches!(
                kept.cause,
                Cause::CalledBack(_) | Cause::Waiting(_) | Cause::Scattered(_) | Cause::Moving(_)
            );
            Some(&kept.node) != to.as_ref() || preempts && ours
        };
        if self.kept.get(uid).is_some_and(ends) {
            self.kept.swap_remove(uid);
        }
        if let Some(node) = to {
            self.keeping.entry(node).or_default().insert(uid.clone());
        }
    }

    /// A pod reserves: what it was nominated for is free.
    pub(super) fn nomination_changed(&mut self, uid: &str, books: &Books) {
        let pod = books.pod(uid);
        if let Some(node) = pod.and_then(|pod| pod.nominated.as_ref()) {
            self.waiting.room_on(node);
        }
        self.end_kept(uid, books);
    }

    /// A pod is refused: should it be nominated, its claim will outlive that.
    pub(crate) fn claim(&mut self, pod: &PodFacts, books: &Books, until: Duration) {
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
        self.end_kept(&pod.uid, books);
        self.keep_for(&pod.uid, &node, Cause::Preempting, until);
    }

    /// Ends what has been kept for long enough.
    pub(crate) fn expire_kept(&mut self, books: &Books, now: Duration, ttl: Duration) {
        let (mut over, mut in_vain, mut late) = (Vec::new(), Vec::new(), Vec::new());
        let mut preempted = Vec::new();
        for (uid, kept) in &mut self.kept {
            let known = books.pod(uid);
            match kept.cause {
                Cause::Preempting
                    if known.is_some_and(|known| known.nominated.as_ref() == Some(&kept.node)) =>
                {
                    kept.until = now + ttl;
                }
                _ if kept.until > now => {}
                Cause::Preempting | Cause::Lifted | Cause::Successor(_) => over.push(uid.clone()),
                Cause::CalledBack(_) => in_vain.push(uid.clone()),
                Cause::Waiting(_) => late.push(uid.clone()),
                Cause::Scattered(_) | Cause::Moving(_) => preempted.push(uid.clone()),
            }
        }
        over.iter().for_each(|uid| self.end_kept(uid, books));
        in_vain
            .iter()
            .for_each(|uid| self.called_in_vain(uid, books));
        late.iter()
            .for_each(|uid| self.give_up(uid, GivenUp::Late, books));
        preempted
            .iter()
            .for_each(|uid| self.ended_in_vain(uid, books, now));
    }

    /// Keeps room for the pod no more, unless it is nominated.
    pub(crate) fn end_kept(&mut self, uid: &str, books: &Books) {
        if let Some(Kept { node, .. }) = self.kept.swap_remove(uid) {
            self.successors.swap_remove(uid);
            let known = books.pod(uid);
            if known.is_none_or(|known| known.nominated.as_ref() != Some(&node)) {
                self.unindex(uid, &node);
            }
        }
    }

    /// The node where room is kept for an unbound pod.
    fn holds_room_on(&self, pod: &PodFacts) -> Option<Arc<str>> {
        if pod.node.is_some() || pod.released {
            return None;
        }
        let kept = || Some(self.kept.get(&pod.uid)?.node.clone());
        let nominated = pod.nominated.clone();
        let nominated = nominated.filter(|_| !self.nominations.is_over(&pod.uid));
        nominated.or_else(kept)
    }

    pub(super) fn unindex(&mut self, uid: &str, node: &str) {
        if let Some(pods) = self.keeping.get_mut(node) {
            pods.swap_remove(uid);
            if pods.is_empty() {
                self.keeping.swap_remove(node);
            }
            self.gains.note(&node.into());
            self.waiting.room_on(node);
        }
    }
}
