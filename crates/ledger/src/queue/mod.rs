//! Who waits, for which room, and what became of earlier attempts.
//!
//! It follows what changes in the books. It does not know what is free or what a node costs: waking
//! (`wake`) asks books and scores.

mod backoff;
mod changes;
mod earmark;
mod earmarks;
mod evidence;
mod expected;
mod gangs;
mod gated;
mod kind;
mod nominations;
mod offers;
mod replacements;
mod tried;
mod turn;
mod waiting;
mod wake;

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;

use crate::Config;
use crate::books::{Books, Event, Uid, may_come};
use crate::maps::{HashMap, HashSet};
use backoff::Backoffs;
pub(crate) use backoff::{Controller, controller, doubled};
use changes::Changes;
pub(crate) use earmark::{Cards, Earmark, Holder};
pub use earmark::{Cause, Ended};
use earmarks::Counts;
use evidence::Offered;
pub(crate) use evidence::{Evidence, NodeSet};
use gated::{Gated, is_queued};
pub use gated::{Queued, Ungate};
use nominations::Nominations;
pub(crate) use nominations::is_sample;
pub(crate) use replacements::Beneficiary;
use replacements::Replacement;
pub(crate) use tried::Tried;
pub(crate) use turn::Turn;
use waiting::{Call, Waiting};
use wake::Wakes;
pub(crate) use wake::Waking;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    /// Nodes that something after us refused for a pod, and how often its bind met a conflict.
    tried: HashMap<Uid, Tried>,
    /// Nodes that kube-scheduler offered to pods that wait.
    offered: HashMap<Uid, Offered>,
    /// By node, for whom room is earmarked there, by a nomination, in `earmarks` or in `replacements`.
    holders: HashMap<Arc<str>, HashSet<Holder>>,
    earmarks: HashMap<Uid, Earmark>,
    ended: Counts,
    /// When what had lasted long enough was ended last: pauses begin then.
    now: Duration,
    /// By the UID of the pod that is evicted.
    replacements: HashMap<Uid, Replacement>,
    backoffs: Backoffs,
    /// The pod whose place was last compared with others.
    compared: Option<Uid>,
    waiting: Waiting,
    /// Nodes that gained room, or where less is kept.
    gains: Changes,
    gated: Gated,
    wakes: Wakes,
    /// Pods that were refused before every node was looked at, and are to ask again.
    unfinished: Vec<Uid>,
    nominations: Nominations,
    expected: expected::Expected,
    gangs: gangs::Gangs,
    /// Pods that have autoscalers add nodes.
    placeholders: HashSet<Uid>,
}

impl Queue {
    /// Nobody waits; is there to be a line?
    pub(crate) fn new(gated: bool) -> Self {
        Self {
            gated: Gated::new(gated),
            ..Self::default()
        }
    }

    /// From now on there is a queue with gates, or there is none: then the pods in it are ungated.
    pub(crate) fn set_queueing(&mut self, on: bool, books: &Books) {
        if self.gated.is_on() == on {
            return;
        }
        for uid in self.gated.switch(on) {
            self.gated.leave(&uid);
            self.waiting.remove(&uid);
            if let Some(pod) = books.pod(&uid) {
                self.pod_changed(&uid, Some(pod), books);
            }
        }
    }

    /// Something has changed in the books.
    pub(crate) fn follow(&mut self, event: &Event, books: &Books) {
        self.gated.follow(event);
        match event {
            Event::Pod { uid, old, new } => {
                self.beneficiary_lost(old.as_deref(), new.as_deref());
                self.nominations.follow(uid, new.as_deref());
                self.nomination_ended(uid, old.as_deref(), new.as_deref());
                self.index_nomination(old.as_deref(), new.as_deref());
                if let (Some(old), Some(new)) = (old, new)
                    && old.refusal != new.refusal
                {
                    self.text_changed(uid);
                }
                self.replacement_came(old.as_deref(), new.as_deref());
                match new.as_ref().is_some_and(|pod| pod.stands_for.is_some()) {
                    true => self.placeholders.insert(uid.clone()),
                    false => self.placeholders.swap_remove(uid),
                };
                self.pod_changed(uid, new.as_deref(), books);
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
                self.nomination_changed(uid, books);
            }
            Event::Released(uid) => self.sleeps(uid, books),
            Event::Refused { uid, node } => self.note_refusal(uid, node),
            Event::Expired { uid, node } => {
                if books.pod(uid).is_some() {
                    self.note_refusal(uid, node);
                    self.sleeps(uid, books);
                } else {
                    self.tried.swap_remove(uid);
                    self.offered.swap_remove(uid);
                }
            }
            Event::Conflict(uid) => {
                if books.pod(uid).is_some() {
                    self.note_conflict(uid);
                }
            }
            Event::Listed => self.forget_tries(books),
        }
    }

    fn pod_changed(&mut self, uid: &Uid, new: Option<&PodFacts>, books: &Books) {
        let ended = new.is_none_or(|pod| pod.node.is_some() || pod.released);
        if ended {
            self.tried.swap_remove(uid);
            self.offered.swap_remove(uid);
            self.backoffs.forget(uid);
        }
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
                if self.end_ungated(uid, Ended::Unfit, books) {
                    self.waiting.in_vain(uid);
                }
                self.wait(pod, books);
            }
            // Whoever was let out without room is asked about before long.
            Some(_) if was_queued && !self.waiting.is_promised(uid) => self.waiting.remove(uid),
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
    pub(crate) fn refused(
        &mut self,
        pod: &PodFacts,
        candidates: &[&str],
        books: &Books,
        config: &Config,
        now: Duration,
    ) {
        self.wait(pod, books);
        self.end_ungated(&pod.uid, Ended::Unfit, books);
        let asked = |node: &str| candidates.contains(&node);
        let call = Call {
            is_sample: nominations::is_sample(candidates.len(), config.least_nodes, books),
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

    /// Only the room was wanting.
    pub(crate) fn is_short(&mut self, uid: &str) {
        self.waiting.is_short(uid);
    }

    /// The pods that wait.
    pub(crate) fn waiting(&self) -> &Waiting {
        &self.waiting
    }

    /// The pods that have autoscalers add nodes.
    pub(crate) fn placeholders(&self) -> &HashSet<Uid> {
        &self.placeholders
    }

    /// Of each kind that waits, up to `limit`, the first such pod for which no room is kept and nobody was woken.
    pub(crate) fn without_room(&self, limit: usize, is_such: impl Fn(&str) -> bool) -> Vec<Uid> {
        let skip = |uid: &str| self.earmark(uid).is_some() || !is_such(uid);
        self.waiting.firsts(&mut None, limit, skip)
    }

    /// The same, and those that have no more than a place to wait for: from the kind on that stands after `from`, which
    /// is moved on, and is none at the end.
    pub(crate) fn without_more(
        &self,
        from: &mut Option<Turn>,
        limit: usize,
        is_such: impl Fn(&str) -> bool,
    ) -> Vec<Uid> {
        let skip = |uid: &str| self.has_more_than_reservation(uid) || !is_such(uid);
        self.waiting.firsts(from, limit, skip)
    }

    /// Nodes that gained room, or where less is kept, since that time on the clock of such gains.
    pub(crate) fn gained_since(&self, time: u64) -> impl Iterator<Item = (u64, &Arc<str>)> {
        self.gains.since(time)
    }

    /// What time it is on that clock.
    pub(crate) fn gains(&self) -> u64 {
        self.gains.last()
    }

    /// Is room earmarked for the pod, and more than a reservation, or than what a nomination leaves that has ended?
    pub(crate) fn has_more_than_reservation(&self, uid: &str) -> bool {
        let is_more = |cause| match cause {
            Cause::Reserve => false,
            Cause::Nominated => self.nominations.has(uid),
            _ => true,
        };
        self.earmark_if(uid, is_more).is_some()
    }

    /// Is room on this node earmarked for the pod, and more than a reservation, so that no queued pod goes before it there?
    /// One of higher priority does, unless the pod was ungated for the room.
    pub(crate) fn goes_first(&self, pod: &PodFacts, node: &str) -> bool {
        let earmark = self.earmark(&pod.uid);
        earmark.is_some_and(|it| **it.node() == *node)
            && self.reservation_for(&pod.uid).is_none()
            && (self.is_ungated_for_room(&pod.uid) || !self.gated.has_higher(pod.priority))
    }

    /// Is room kept for anybody anywhere, earmarked or promised?
    pub(crate) fn keeps_room(&self) -> bool {
        !self.holders.is_empty() || self.waiting.has_promised()
    }

    /// Pods that were woken for room on this node and may still ask for it, without those for which it is earmarked.
    pub(crate) fn woken_for(&self, node: &str, now: Duration) -> impl Iterator<Item = &Uid> {
        let promised = self.waiting.promised_on(node).iter();
        promised.filter(move |uid| {
            let holder = Holder::Pod((*uid).clone());
            let earmarked = || {
                self.holders
                    .get(node)
                    .is_some_and(|it| it.contains(&holder))
            };
            self.waiting.may_come(uid, now) && !earmarked()
        })
    }

    /// A pod that was to be woken could not be.
    pub(crate) fn wake_failed(&mut self, uid: &str) {
        self.waiting.take_back(uid);
    }

    /// The gate of a pod that was to be ungated could not be removed.
    pub(crate) fn ungate_failed(&mut self, uid: &str) {
        self.waiting.ungate_failed(uid);
    }

    /// The pods with our scheduling gate.
    pub(crate) fn gated(&self) -> &Gated {
        &self.gated
    }

    /// Did the last wake stop because of what it cost?
    pub(crate) fn wakes_on(&self) -> bool {
        self.wakes.is_unfinished()
    }
}
