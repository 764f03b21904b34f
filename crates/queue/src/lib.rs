//! Who waits, and for which room.
//!
//! The queue follows changes in the books and ended earmarks. It does not know free room, fits or the costs of nodes:
//! wake-ups in the ledger do.

mod changes;
mod gated;
mod kind;
mod offers;
mod waiting;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_books::{
    Books, Config, Earmark, Earmarks, Ended, Event, HashSet, Offered, Turn, Uid, may_come,
};

pub use changes::Changes;
pub use gated::{Gated, is_queued};
pub use gated::{Queued, Ungate};
pub use kind::{Kind, KindId};
use waiting::Call;
pub use waiting::FLUSH;
use waiting::Waiting;

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Queue {
    waiting: Waiting,
    /// Nodes that gained room, or where less is kept.
    gains: Changes,
    gated: Gated,
    /// Pods that were refused before every node was looked at, and are to ask again.
    unfinished: Vec<Uid>,
    /// Pods that are to ask again when they are old enough, in seconds since 1970.
    later: BTreeSet<(i64, Uid)>,
    /// Pods that have autoscalers add nodes.
    placeholders: HashSet<Uid>,
}

impl Queue {
    /// No pod waits. Is there to be a queue?
    pub fn new(gated: bool) -> Self {
        Self {
            gated: Gated::new(gated),
            ..Self::default()
        }
    }

    /// From now on there is a queue with gates, or there is none: then the pods in it are ungated.
    pub fn set_queueing(&mut self, on: bool, earmarks: &mut Earmarks, books: &Books) {
        if self.gated.is_on() == on {
            return;
        }
        for uid in self.gated.switch(on) {
            self.gated.leave(&uid);
            self.waiting.remove(&uid);
            if let Some(pod) = books.pod(&uid) {
                self.pod_changed(&uid, Some(pod), earmarks, books);
            }
        }
    }

    /// Less is kept than before.
    pub fn gain(&mut self, earmarks: &mut Earmarks) {
        for (node, gains) in earmarks.take_freed() {
            if gains {
                self.gains.note(&node);
            }
            self.waiting.room_on(&node);
        }
    }

    /// Something has changed in the books.
    pub fn follow(&mut self, event: &Event, earmarks: &mut Earmarks, books: &Books) {
        match event {
            Event::Pod { uid, old, new } => {
                earmarks.follow(uid, old.as_deref(), new.as_deref());
                self.gain(earmarks);
                match new.as_ref().is_some_and(|pod| pod.stands_for.is_some()) {
                    true => self.placeholders.insert(uid.clone()),
                    false => self.placeholders.swap_remove(uid),
                };
                self.pod_changed(uid, new.as_deref(), earmarks, books);
            }
            Event::Node { name, gained } => {
                if *gained {
                    self.gains.note(name);
                    self.waiting.room_on(name);
                }
            }
            Event::NodeGone(name) => self.gains.forget(name),
            Event::Opened(name) => {
                self.gains.note(name);
                self.waiting.opened(name);
            }
            Event::Reserved { uid, node } => {
                self.waiting.reserved(uid, node);
                earmarks.nomination_changed(uid, books);
                self.gain(earmarks);
            }
            Event::Released(uid) | Event::Expired { uid, .. } => self.sleeps(uid, books),
            Event::Listed => {
                let known = |uid: &Uid| books.pod(uid).is_some() || books.assumed(uid).is_some();
                earmarks.retain_failures(known);
            }
            Event::Refused { .. } | Event::Conflict(_) => {}
        }
    }

    fn pod_changed(
        &mut self,
        uid: &Uid,
        new: Option<&PodFacts>,
        earmarks: &mut Earmarks,
        books: &Books,
    ) {
        // It was bound with our help, or we were asked about it before a watch showed it.
        if let Some(pod) = new
            && (matches!(pod.assignment, Some(Ok(_))) || self.waiting.is_unseen(uid))
        {
            self.waiting.asks_us(&pod.scheduler);
        }
        let was_queued = match new.filter(|pod| is_queued(pod)) {
            Some(pod) => {
                let asks_us = self.waiting.is_asker(&pod.scheduler);
                if self.gated.join(pod, asks_us) {
                    self.wait(pod, books);
                }
                return;
            }
            None => self.gated.leave(uid),
        };
        match new.filter(|pod| may_come(pod)) {
            Some(pod) if pod.waiting => {
                // kube-scheduler's own filters refused it, or it would have asked about the room.
                if earmarks.end_ungated(uid, Ended::Unfit, books) {
                    self.gain(earmarks);
                    self.waiting.is_useless(uid);
                }
                self.wait(pod, books);
            }
            // kube-scheduler asks soon about a pod that was let out without room.
            Some(_) if was_queued && !self.waiting.has_offer(uid) => self.waiting.remove(uid),
            // It may ask for something else now.
            Some(pod) if self.waiting.contains(uid) => self.wait(pod, books),
            Some(_) => {}
            None => self.waiting.remove(uid),
        }
    }

    /// A pod that may be asleep, unless it holds a reservation: waking it would move its
    /// resourceVersion under its bind. The copy in the books decides of which kind it is, for that copy is offered room.
    fn wait(&mut self, pod: &PodFacts, books: &Books) {
        if books.assumed(&pod.uid).is_none() {
            let known = books.pod(&pod.uid);
            self.waiting.insert(known.map_or(pod, |known| known));
        }
    }

    fn sleeps(&mut self, uid: &str, books: &Books) {
        if let Some(pod) = books.pod(uid) {
            self.wait(pod, books);
        }
    }

    /// A pod was refused just now on all of these nodes.
    pub fn refused(
        &mut self,
        pod: &PodFacts,
        candidates: &[&str],
        earmarks: &mut Earmarks,
        books: &Books,
        config: &Config,
        now: Duration,
    ) {
        self.wait(pod, books);
        earmarks.end_ungated(&pod.uid, Ended::Unfit, books);
        self.gain(earmarks);
        let asked = |node: &str| candidates.contains(&node);
        let call = Call {
            is_sample: is_sample(candidates.len(), config.least_nodes, books),
            nominated: pod.nominated.as_deref(),
            interval: config.wake_again_after,
        };
        if self.waiting.refused(&pod.uid, asked, &call, now) {
            self.ask_again(&pod.uid);
        }
        match books.pod(&pod.uid) {
            Some(known) => self.waiting.asks_us(&known.scheduler),
            None => self.waiting.unseen(&pod.uid, now),
        }
    }

    /// The pod was refused before everything was looked at.
    pub fn ask_again(&mut self, uid: &Uid) {
        self.unfinished.push(uid.clone());
    }

    /// The pod is to ask again once it has existed for so long.
    pub fn ask_again_when(&mut self, pod: &PodFacts, age: Duration) {
        let age = i64::try_from(age.as_secs()).unwrap_or(i64::MAX);
        let due = pod.created.saturating_add(age);
        self.later.insert((due, pod.uid.clone()));
    }

    /// The pods that are old enough by now are to ask again.
    pub fn grow_old(&mut self, unix: i64) {
        let young = self
            .later
            .split_off(&(unix.saturating_add(1), Uid::default()));
        let old = std::mem::replace(&mut self.later, young);
        self.unfinished.extend(old.into_iter().map(|(_, uid)| uid));
    }

    /// kube-scheduler is to try the pod again. A gated pod is ungated for that.
    pub fn tries_again(&mut self, uid: &Uid) {
        match self.gated.has(uid) {
            true => self.gated.let_go(uid, Ungate::MayPreempt),
            false => self.ask_again(uid),
        }
    }

    /// Only the room was wanting.
    pub fn is_short(&mut self, uid: &str) {
        self.waiting.is_short(uid);
    }

    /// The pods that wait.
    pub fn waiting(&self) -> &Waiting {
        &self.waiting
    }

    /// The pods that have autoscalers add nodes.
    pub fn placeholders(&self) -> &HashSet<Uid> {
        &self.placeholders
    }

    /// Of each kind that waits, up to `limit`, the first pod that is not to be skipped: from the kind on that stands after `from`,
    /// which is moved on, and is none at the end.
    pub fn firsts(
        &self,
        from: &mut Option<Turn>,
        limit: usize,
        skip: impl Fn(&str) -> bool,
    ) -> Vec<Uid> {
        self.waiting.firsts(from, limit, skip)
    }

    /// Nodes that gained room, or where less is kept, since that time on the clock of such gains.
    pub fn gained_since(&self, time: u64) -> impl Iterator<Item = (u64, &Arc<str>)> {
        self.gains.since(time)
    }

    /// The current time on that clock.
    pub fn gains(&self) -> u64 {
        self.gains.last()
    }

    /// Which nodes may kube-scheduler have left out when it refused the pod last? Not nodes for which the pod was woken
    /// without result. None if kube-scheduler showed all.
    pub fn may_be_unshown(&self, uid: &str) -> Option<impl Fn(&str) -> bool> {
        let sampled = self.waiting.is_sampled(uid);
        sampled.then_some(move |node: &str| !self.waiting.is_barred(uid, node))
    }

    /// The node to nominate a pod to in the write that wakes it: kube-scheduler showed other nodes when it was refused.
    pub fn nomination(&self, uid: &str, earmarks: &Earmarks, books: &Books) -> Option<Arc<str>> {
        let node = self.waiting.to_nominate(uid)?;
        let pod = books.pod(uid)?;
        let elsewhere = |other: &Arc<str>| other != node;
        let by_scheduler = pod.nominated.as_ref().filter(|_| !pod.own_nomination);
        // An earmark for awaited room does not count: the pod does not need it where room is free.
        let earmark = earmarks.earmark(uid).filter(|it| !it.is_awaited());
        let earmarked = earmark.map(Earmark::node);
        let is_free = !by_scheduler.is_some_and(elsewhere) && !earmarked.is_some_and(elsewhere);
        is_free.then(|| node.clone())
    }

    /// Pods that the extender nominated to nodes where room is offered to them no more.
    pub fn void_nominations(&self, earmarks: &Earmarks, books: &Books) -> Vec<Arc<PodFacts>> {
        let own = earmarks.own_nominations(books);
        let void = own.filter(|pod| !self.waiting.has_offer(&pod.uid) && !pod.deleting);
        void.cloned().collect()
    }

    /// A pod that was to be woken could not be.
    pub fn wake_failed(&mut self, uid: &str) {
        self.waiting.take_back(uid);
    }

    /// The gate of a pod that was to be ungated could not be removed.
    pub fn ungate_failed(&mut self, uid: &str) {
        self.waiting.ungate_failed(uid);
    }

    /// The pods with our scheduling gate.
    pub fn gated(&self) -> &Gated {
        &self.gated
    }

    /// The effect of time. True if more pods have joined than one call notes.
    pub fn tick(&mut self, now: Duration, interval: Duration) -> bool {
        self.waiting.tick(now, interval, &mut self.gated)
    }

    /// Every node was looked at for this kind, or one that has room was found. If none could hold one of them that are queued
    /// though it were empty, these are ungated.
    pub fn looked(&mut self, kind: KindId, until: Duration, could: bool) {
        self.waiting.looked(kind, until, could);
        if let Some(kind) = self.waiting.kind(kind).filter(|_| !could) {
            let turns = kind.turns();
            turns.for_each(|turn| self.gated.let_go(turn.uid(), Ungate::NoNode));
        }
    }

    /// Looks at every node once more for a pod of this kind. False if there is none.
    pub fn look_on(&mut self, kind: KindId, now: Duration) -> bool {
        self.waiting.look_on(kind, &self.gated, now)
    }

    /// The next pod that is to ask again at once.
    pub fn next_unfinished(&mut self) -> Option<Uid> {
        self.unfinished.pop()
    }

    /// The pods that room is offered to.
    pub fn offered(&self) -> &Offered {
        self.waiting.offered()
    }

    /// A waiting pod that may be bound at all, by a scheduler that asks us.
    pub fn asleep<'b>(&self, uid: &str, books: &'b Books) -> Option<&'b Arc<PodFacts>> {
        let pod = books.pod(uid)?;
        let free = !pod.queued || self.gated.is_on() && !self.gated.is_leaving(uid);
        let able = pod.may_be_placed() && free;
        (able && self.waiting.is_asker(&pod.scheduler)).then_some(pod)
    }

    /// May the pod get only room that no queued pod before it would take? Not where
    /// [`goes_first`](gpustow_books::Known::goes_first) is true.
    pub fn is_behind_queued(&self, pod: &PodFacts) -> bool {
        self.gated.is_on() && self.gated.is_ahead_of(pod)
    }

    /// As [`Queue::waiting`], to be changed.
    pub fn waiting_mut(&mut self) -> &mut Waiting {
        &mut self.waiting
    }

    /// As [`Queue::gated`], to be changed.
    pub fn gated_mut(&mut self) -> &mut Gated {
        &mut self.gated
    }
}

/// May a filter call with so many candidates lack nodes that passed kube-scheduler's own filters, if that stops to look
/// when `least` have passed them, or more (`minFeasibleNodesToFind`)?
pub fn is_sample(candidates: usize, least: usize, books: &Books) -> bool {
    let more = || {
        let mut nodes = books.nodes().filter(|(_, node)| node.status().is_some());
        nodes.nth(candidates).is_some()
    };
    candidates >= least && more()
}
