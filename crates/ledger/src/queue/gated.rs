//! The queue: pods that were created with our scheduling gate and wait until it is removed.
//!
//! They stand in the queue of all that wait ([`super::waiting`]), and what would wake others takes the gate off
//! theirs: room is offered in the order of turns, and the room that a pod is let out for is kept for it until
//! its filter call or a deadline ([`crate::Cause::Ungated`]). Here is which pods are queued at all, and which are let
//! through without room: whoever would wait in vain, and a few that may preempt.

mod preemptors;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Phase, PodFacts};
use strum::{IntoStaticStr, VariantArray};

use super::turn::Turn;
use crate::books::{Event, Uid, asks};
use crate::budget::Budget;
use crate::maps::{HashMap, HashSet};
use crate::sight::{Sight, Waking};
use crate::trial::Host;
use preemptors::Preemptors;

/// A pod whose gate is still there so long after it was let through is let through again.
const AGAIN: Duration = Duration::from_secs(10);
/// So many are let through without room before the first of them is seen to have gone.
const STUCK: usize = 256;
/// Pods that are looked at to see whether the leader stalls.
const LOOK_AT: usize = 16;
/// Of pods that request the same and may go to the same nodes one is looked at, of so many kinds.
const KINDS: usize = 64;

/// Why a gate is taken off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum Ungate {
    /// Its turn has come, and room is kept for it.
    Room,
    /// Its turn has come, and kube-scheduler may evict others for it.
    MayPreempt,
    /// No node could hold it if it were empty.
    NoNode,
    /// Its request cannot be read, or its scheduler is not known to ask us.
    NotOurs,
    /// There is no line.
    Off,
}

impl Ungate {
    /// The value of metric labels.
    #[must_use]
    pub fn label(self) -> &'static str {
        self.into()
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
pub(crate) struct Gated {
    /// There is a line; otherwise everybody in it is let through.
    on: bool,
    order: BTreeSet<Turn>,
    turns: HashMap<Uid, Turn>,
    /// To be let through without room.
    leaving: Leaving,
    /// Let through without room, when and why.
    through: HashMap<Uid, (Duration, Ungate)>,
    preemptors: Preemptors,
}

/// Is the pod queued, or must it be ungated?
pub(super) fn is_queued(pod: &PodFacts) -> bool {
    !pod.asks.is_nothing() && !pod.deleting && pod.phase() == Phase::Queued
}

/// Pods that are to be let through without room: first those that were not yet, in turn; then those whose gate stayed, the
/// one first that was let through the longest time ago.
#[derive(Debug, Default)]
struct Leaving {
    order: BTreeMap<(Duration, Turn), Ungate>,
    /// When each was let through last.
    last: HashMap<Uid, (Duration, Turn)>,
}

impl Leaving {
    fn put(&mut self, turn: &Turn, last: Duration, why: Ungate) {
        self.remove(turn.uid());
        let key = (last, turn.clone());
        self.last.insert(turn.uid().clone(), key.clone());
        self.order.insert(key, why);
    }

    fn remove(&mut self, uid: &str) {
        if let Some(key) = self.last.swap_remove(uid) {
            self.order.remove(&key);
        }
    }

    fn next(&mut self) -> Option<(Uid, Ungate)> {
        let ((_, turn), why) = self.order.pop_first()?;
        self.last.swap_remove(turn.uid());
        Some((turn.uid().clone(), why))
    }

    fn all(&self) -> impl Iterator<Item = (&Turn, Ungate)> {
        self.order.iter().map(|((_, turn), why)| (turn, *why))
    }
}

impl Gated {
    pub(super) fn new(on: bool) -> Self {
        Self {
            on,
            ..Self::default()
        }
    }

    /// Turns the queue on or off. The pods that are in it must join again.
    pub(super) fn switch(&mut self, on: bool) -> Vec<Uid> {
        self.on = on;
        self.through.retain(|_, (_, why)| *why != Ungate::Off);
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
            () if !self.on => Ungate::Off,
            () if pod.asks.readable().is_err() || !asks_us => Ungate::NotOurs,
            () => return true,
        };
        self.let_go(&pod.uid, why);
        false
    }

    /// A pod is queued no more. True if it was.
    pub(super) fn leave(&mut self, uid: &str) -> bool {
        let Some(turn) = self.turns.swap_remove(uid) else {
            return false;
        };
        self.order.remove(&turn);
        self.leaving.remove(uid);
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

    /// Is a pod queued whose turn is before that of this pod, which is not queued?
    pub(super) fn is_ahead_of(&self, pod: &PodFacts) -> bool {
        let first = self.order.first();
        first.is_some_and(|first| *first < Turn::of(pod))
    }

    /// Is a queued pod's priority higher than this?
    pub(crate) fn has_higher(&self, priority: i32) -> bool {
        let first = self.order.first();
        first.is_some_and(|first| first.priority() > priority)
    }

    /// The pod is let through without room, unless it was just now.
    pub(super) fn let_go(&mut self, uid: &str, why: Ungate) {
        if let Some(turn) = self.turns.get(uid)
            && !self.through.contains_key(uid)
        {
            self.leaving.put(turn, Duration::ZERO, why);
        }
    }

    /// Is the pod let through, or about to be, without room?
    pub(super) fn is_leaving(&self, uid: &str) -> bool {
        self.through.contains_key(uid) || self.leaving.last.contains_key(uid)
    }

    /// The next pod to let through, and why.
    fn next_leaving(&mut self, now: Duration) -> Option<(Uid, Ungate)> {
        let (uid, why) = self.leaving.next()?;
        self.through.insert(uid.clone(), (now, why));
        Some((uid, why))
    }

    /// Something has changed in the books.
    pub(super) fn follow(&mut self, event: &Event) {
        self.preemptors.follow(event);
    }

    /// Why it was let through without room.
    pub(crate) fn because(&self, uid: &str) -> Option<Ungate> {
        Some(self.through.get(uid)?.1)
    }

    /// What time does: a pod that was ungated long ago and is still queued is ungated again.
    pub(super) fn tick(&mut self, now: Duration) {
        let over = |(since, _): &(Duration, Ungate)| now.saturating_sub(*since) >= AGAIN;
        let turns = &self.turns;
        let leaving = &mut self.leaving;
        self.through.retain(|uid, let_go| {
            if over(let_go)
                && let Some(turn) = turns.get(uid)
            {
                leaving.put(turn, let_go.0, let_go.1);
            }
            !over(let_go)
        });
    }

    /// What all looks for pods that may preempt have cost.
    pub(crate) fn spent_on_preemptors(&self) -> u64 {
        self.preemptors.spent
    }

    /// Are gates taken off in turn?
    pub(super) fn is_on(&self) -> bool {
        self.on
    }

    /// How many were ungated without room and are still queued.
    fn stuck(&self) -> usize {
        self.through.keys().filter(|uid| self.has(uid)).count()
    }
}

impl Waking<'_> {
    /// At most `limit` pods in all that are let through without room.
    pub(super) fn let_go(&mut self, limit: usize, woken: &mut Vec<Arc<PodFacts>>) {
        self.queue.wakes.unfinished |= self.find_preemptors();
        let mut free = STUCK.saturating_sub(self.queue.gated.stuck());
        while free > 0
            && woken.len() < limit
            && let Some((uid, why)) = self.queue.gated.next_leaving(self.now)
        {
            free -= 1;
            if why == Ungate::MayPreempt {
                self.goes_out(&uid);
            }
            let waits = |pod: &&Arc<PodFacts>| pod.queued && self.books.assumed(&uid).is_none();
            woken.extend(self.books.pod(&uid).filter(waits).cloned());
        }
    }
}

impl Sight<'_> {
    /// Queued pods that the leader should have ungated: see [`crate::Ledger::stalled`].
    pub(crate) fn stalled(&self) -> Vec<Arc<PodFacts>> {
        let gated = &self.queue.gated;
        let fits = |turn: &Turn| {
            let pod = self.books.pod(turn.uid());
            pod.is_some_and(|pod| {
                self.may_fit_now(pod)
                    && self.has_seats(pod, &mut Budget::of_look())
                    && !self.may_be_reserved_from(pod)
                    && !self.may_be_assumed_instead(pod)
            })
        };
        let waiting = gated.order.iter();
        let kinds = self.one_of_each(waiting.filter_map(|turn| self.books.pod(turn.uid())));
        let first = kinds.take(KINDS).map(|pod| Turn::of(pod)).filter(fits);
        let first: Vec<Turn> = first.take(LOOK_AT).collect();
        // What this replica chose by itself when it led is not the new leader's choice.
        let needs_no_room = |why| matches!(why, Ungate::NotOurs | Ungate::Off);
        let leaving = gated.leaving.all().filter(|(_, why)| needs_no_room(*why));
        let leaving = leaving.map(|(turn, _)| turn).take(LOOK_AT);
        let turns: BTreeSet<&Turn> = leaving.chain(&first).collect();
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
                marked.any(|other| other.reserved_on.is_some() && waits_before(other))
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
            may && called && !other.gated && !other.queued && other.uid != pod.uid
        };
        let mut others = self.one_of_each(self.books.pods().filter(asked));
        let fits = |other: &Arc<PodFacts>| self.may_fit_now(other);
        others.by_ref().take(KINDS).any(fits) || others.next().is_some()
    }

    /// The first of those that request the same and may go to the same nodes, without those for which no GPU has enough
    /// memory free.
    fn one_of_each<'p>(
        &self,
        pods: impl Iterator<Item = &'p Arc<PodFacts>>,
    ) -> impl Iterator<Item = &'p Arc<PodFacts>> {
        let mut seen = HashSet::default();
        pods.filter(move |pod| {
            let hardest = pod.asks.request().and_then(|it| it.hardest());
            let least = hardest.map(|claim| claim.mib).unwrap_or_default();
            let kind = (pod.asks.request(), &pod.constraints, &pod.group);
            self.books.with_room(least).next().is_some() && seen.insert(kind)
        })
    }

    /// Could the node hold the pod if it were empty?
    pub(crate) fn could_hold(&self, name: &str, pod: &PodFacts, budget: &mut Budget) -> bool {
        self.books.excluded(name, &pod.constraints).is_none()
            && self.trial().empty().fits(pod, name, Host::Whole, budget) == Some(true)
    }
}
