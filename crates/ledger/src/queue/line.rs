//! The line: pods that were created with our scheduling gate and wait until it is taken off.
//!
//! They stand in the queue of all that wait ([`super::waiting`]), and what would wake others takes the gate off
//! theirs: room is offered in the order of turns, and the room that a pod is let out for is kept for it until
//! its filter call or a deadline ([`super::earmark::Cause::Ungated`]). Here is who stands in line at all, and who is let
//! through without room: whoever would wait in vain, and a few that may preempt.

mod preemptors;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Phase, PodFacts};

use super::turn::Turn;
use super::wake::Waking;
use crate::books::{Event, Uid, asks};
use crate::budget::Budget;
use crate::maps::HashMap;
use crate::sight::Sight;
use preemptors::Preemptors;

/// A pod whose gate is still there so long after it was let through is let through again.
const AGAIN: Duration = Duration::from_secs(10);
/// So many are let through without room before the first of them is seen to have gone.
const STUCK: usize = 256;
/// Pods that are looked at to see whether the line stands still.
const LOOK_AT: usize = 16;
/// A pod that was shown to an autoscaler and is not helped gives its slot to the next after so long.
const SHOWN_FOR: Duration = Duration::from_secs(600);

/// Why a gate is taken off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lift {
    /// Its turn has come, and room is kept for it.
    Room,
    /// Its turn has come, and kube-scheduler may evict others for it.
    MayPreempt,
    /// It is among the first, and an autoscaler is to see it.
    Shown,
    /// No node could hold it if it were empty.
    NoNode,
    /// Its request cannot be read, or its scheduler is not known to ask us.
    NotOurs,
    /// There is no line.
    Off,
}

impl Lift {
    /// Every cause.
    pub const ALL: [Self; 6] = [
        Self::Room,
        Self::MayPreempt,
        Self::Shown,
        Self::NoNode,
        Self::NotOurs,
        Self::Off,
    ];

    /// The value of metric labels.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Room => "room",
            Self::MayPreempt => "may_preempt",
            Self::Shown => "shown",
            Self::NoNode => "no_node",
            Self::NotOurs => "not_ours",
            Self::Off => "off",
        }
    }
}

/// The queue in sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Queued {
    /// So many pods are queued.
    pub pods: usize,
    /// The first of them was created then, in seconds since 1970.
    pub oldest: Option<i64>,
}

/// The pods that bear our gate and nobody else's.
#[derive(Debug, Default)]
pub(crate) struct Line {
    /// There is a line; otherwise everybody in it is let through.
    on: bool,
    order: BTreeSet<Turn>,
    turns: HashMap<Uid, Turn>,
    /// To be let through without room.
    leaving: BTreeMap<Turn, Lift>,
    /// Let through without room, when and why.
    through: HashMap<Uid, (Duration, Lift)>,
    preemptors: Preemptors,
    /// Let through so that an autoscaler sees them, and since when; those that are bound, or had their time, are gone.
    shown: HashMap<Uid, Duration>,
}

/// Does the pod stand in line, or is it to be let out of it?
pub(super) fn is_in_line(pod: &PodFacts) -> bool {
    let asks = !pod.request.as_ref().is_ok_and(|request| request.is_empty());
    asks && !pod.deleting && pod.phase() == Phase::Queued
}

impl Line {
    pub(super) fn new(on: bool) -> Self {
        Self {
            on,
            ..Self::default()
        }
    }

    /// Turns the queue on or off. The pods that are in it must join again.
    pub(super) fn switch(&mut self, on: bool) -> Vec<Uid> {
        self.on = on;
        self.through.retain(|_, (_, why)| *why != Lift::Off);
        self.order.iter().map(|turn| turn.uid().clone()).collect()
    }

    /// A pod has come or changed. True if it is to wait for its turn.
    pub(super) fn join(&mut self, pod: &PodFacts, asks_us: bool) -> bool {
        let turn = Turn::of(pod);
        if self.turns.get(&pod.uid) != Some(&turn) {
            self.leave(&pod.uid);
            self.turns.insert(pod.uid.clone(), turn.clone());
            self.preemptors.joined(&turn);
            self.order.insert(turn);
        }
        let why = match () {
            () if !self.on => Lift::Off,
            () if pod.request.is_err() || !asks_us => Lift::NotOurs,
            () => return true,
        };
        self.let_through(&pod.uid, why);
        false
    }

    /// A pod stands in line no more. True if it did.
    pub(super) fn leave(&mut self, uid: &str) -> bool {
        let Some(turn) = self.turns.swap_remove(uid) else {
            return false;
        };
        self.order.remove(&turn);
        self.leaving.remove(&turn);
        true
    }

    pub(crate) fn has(&self, uid: &str) -> bool {
        self.turns.contains_key(uid)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// The pods that are queued, in the order of their turns.
    pub(crate) fn uids(&self) -> impl Iterator<Item = &Uid> {
        self.order.iter().map(Turn::uid)
    }

    pub(crate) fn queued(&self) -> Queued {
        Queued {
            pods: self.order.len(),
            oldest: self.order.iter().map(Turn::created).min(),
        }
    }

    /// How many stand before the pod.
    pub(crate) fn before(&self, uid: &str) -> Option<usize> {
        let turn = self.turns.get(uid)?;
        Some(self.order.range(..turn).count())
    }

    /// Does somebody stand in line whose turn is before that of the pod, which does not?
    pub(super) fn is_ahead_of(&self, pod: &PodFacts) -> bool {
        let first = self.order.first();
        first.is_some_and(|first| *first < Turn::of(pod))
    }

    /// Is a queued pod's priority higher than this?
    pub(super) fn has_higher(&self, priority: i32) -> bool {
        let first = self.order.first();
        first.is_some_and(|first| first.priority() > priority)
    }

    /// The pod is let through without room, unless it was just now.
    pub(super) fn let_through(&mut self, uid: &str, why: Lift) {
        if let Some(turn) = self.turns.get(uid)
            && !self.through.contains_key(uid)
        {
            self.leaving.insert(turn.clone(), why);
        }
    }

    /// Is the pod let through, or about to be, without room?
    pub(super) fn is_leaving(&self, uid: &str) -> bool {
        let leaving = |turn| self.leaving.contains_key(turn);
        self.through.contains_key(uid) || self.turns.get(uid).is_some_and(leaving)
    }

    /// The next pod to let through, and why.
    fn next_leaving(&mut self, now: Duration) -> Option<(Uid, Lift)> {
        let (turn, why) = self.leaving.pop_first()?;
        let uid = turn.uid().clone();
        if why == Lift::Shown {
            self.shown.entry(uid.clone()).or_insert(now);
        }
        self.through.insert(uid.clone(), (now, why));
        Some((uid, why))
    }

    /// Something has changed in the books.
    pub(super) fn follow(&mut self, event: &Event) {
        self.preemptors.follow(event);
    }

    /// It is bound, or gone.
    pub(super) fn ended(&mut self, uid: &str) {
        self.shown.swap_remove(uid);
    }

    /// Why it was let through without room.
    pub(crate) fn because(&self, uid: &str) -> Option<Lift> {
        Some(self.through.get(uid)?.1)
    }

    /// What time does: whoever was let through long ago and is in line still is let through again.
    pub(super) fn tick(&mut self, now: Duration) {
        let over = |(since, _): &(Duration, Lift)| now.saturating_sub(*since) >= AGAIN;
        self.shown
            .retain(|_, since| now.saturating_sub(*since) < SHOWN_FOR);
        let turns = &self.turns;
        let leaving = &mut self.leaving;
        self.through.retain(|uid, let_go| {
            if over(let_go)
                && let Some(turn) = turns.get(uid)
            {
                leaving.insert(turn.clone(), let_go.1);
            }
            !over(let_go)
        });
    }

    /// What all looks for pods that may preempt have cost.
    pub(crate) fn spent_on_preemptors(&self) -> u64 {
        self.preemptors.spent()
    }

    /// Are gates taken off in turn?
    pub(super) fn is_on(&self) -> bool {
        self.on
    }

    /// How many were let through without room and are in line still.
    fn stuck(&self) -> usize {
        self.through.keys().filter(|uid| self.has(uid)).count()
    }
}

impl Waking<'_> {
    /// At most `limit` pods in all that are let through without room.
    pub(super) fn let_through(&mut self, limit: usize, woken: &mut Vec<Arc<PodFacts>>) {
        self.queue.wakes.unfinished |= self.find_preemptors();
        self.show_first();
        let mut free = STUCK.saturating_sub(self.queue.line.stuck());
        while free > 0
            && woken.len() < limit
            && let Some((uid, why)) = self.queue.line.next_leaving(self.now)
        {
            free -= 1;
            if why == Lift::MayPreempt {
                self.goes_out(&uid);
            }
            let waits =
                |pod: &&Arc<PodFacts>| pod.in_line && self.books.reservation(&uid).is_none();
            woken.extend(self.books.pod(&uid).filter(waits).cloned());
        }
    }

    /// Lets the first few through for whom there is no room, as an autoscaler sees no pod that is gated.
    fn show_first(&mut self) {
        let line = &self.queue.line;
        let leaving = line.leaving.values().filter(|why| **why == Lift::Shown);
        let most = self.config.line_show;
        let free = most.saturating_sub(line.shown.len() + leaving.count());
        if !line.on || free == 0 {
            return;
        }
        let first = line.order.iter().map(Turn::uid).filter(|uid| {
            let promised = || self.queue.waiting.is_promised(uid);
            !line.is_leaving(uid) && !promised()
        });
        let first: Vec<Uid> = first.take(free).cloned().collect();
        for uid in first {
            self.queue.line.let_through(&uid, Lift::Shown);
        }
    }
}

impl Sight<'_> {
    /// Queued pods that the leader should have ungated: see [`crate::Ledger::stalled_in_line`].
    pub(crate) fn stalled_in_line(&self) -> Vec<Arc<PodFacts>> {
        let line = &self.queue.line;
        let fits = |turn: &&Turn| {
            let pod = self.books.pod(turn.uid());
            pod.is_some_and(|pod| {
                self.may_fit_now(pod)
                    && self.has_seats(pod)
                    && !self.may_be_reserved_from(pod)
                    && !self.may_be_assumed_instead(pod)
            })
        };
        let first = line.order.iter().take(LOOK_AT).filter(fits);
        let leaving = line.leaving.keys().take(LOOK_AT);
        let turns: BTreeSet<&Turn> = leaving.chain(first).collect();
        let pods = turns
            .into_iter()
            .filter_map(|turn| self.books.pod(turn.uid()));
        pods.cloned().collect()
    }

    /// May the leader have reserved memory for another pod that this one does not get? It writes a condition on the other
    /// pod, but for reservations of pods that have waited long.
    fn may_be_reserved_from(&self, pod: &PodFacts) -> bool {
        let waits_before = |other: &Arc<PodFacts>| {
            let waits = asks(other) && other.node.is_none() && !other.deleting;
            waits && other.uid != pod.uid && other.priority >= pod.priority
        };
        match self.config.keep {
            Some(_) => self.books.pods().any(waits_before),
            None => {
                let mut marked = self.books.marked();
                marked.any(|other| other.kept_on.is_some() && waits_before(other))
            }
        }
    }

    /// May the leader have assumed another pod where this one fits? That is in its memory alone, and one member of a gang
    /// after the other may be assumed for as long as the gang waits. kube-scheduler asks about a pod without a gate, so that
    /// the extender that it calls leads.
    fn may_be_assumed_instead(&self, pod: &PodFacts) -> bool {
        let asked = |other: &&Arc<PodFacts>| {
            let may = asks(other) && other.node.is_none() && !other.released && !other.deleting;
            let called = self.queue.waiting.is_asker(&other.scheduler);
            may && called && !other.gated && !other.in_line && other.uid != pod.uid
        };
        let mut others = self.books.pods().filter(asked);
        let fits = |other: &Arc<PodFacts>| self.may_fit_now(other);
        others.by_ref().take(LOOK_AT).any(fits) || others.next().is_some()
    }

    /// Could the node hold the pod if it were empty?
    pub(super) fn could_hold(&self, name: &str, pod: &PodFacts) -> bool {
        let (Some(node), Ok(request)) = (self.books.node(name), &pod.request) else {
            return false;
        };
        let enough = node
            .facts()
            .is_none_or(|facts| facts.cpu_milli >= request.cpu_milli && facts.ram >= request.ram);
        enough && self.books.excluded(name, &pod.constraints).is_none() && {
            let (empty, all) = (node.view_of(|_| false), &mut Budget::all());
            self.fit_on(name, node, &empty, pod, |_| true, all).is_ok()
        }
    }
}
