//! The queue: pods that were created with our scheduling gate and wait until it is removed.
//!
//! Gated pods stand in the queue of all waiting pods ([`super::waiting`]). The extender ungates a gated pod where it
//! would wake another pod: it offers room in the order of turns. The room of an ungated pod is kept until its filter
//! call or a deadline ([`gpustow_books::Cause::Ungated`]). This module decides which pods are queued at all, and which
//! are ungated without room. The latter are pods that would wait for nothing, and a few that may preempt.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Excluded, Unbounded};
use std::time::Duration;

use gpustow_api::{Phase, PodFacts};
use gpustow_books::{HashMap, Turn, Uid};
use strum::{IntoStaticStr, VariantArray};

/// A pod whose gate is still there so long after it was let through is let through again.
const AGAIN: Duration = Duration::from_secs(10);

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
    /// There is no queue.
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

/// The pods with our gate and no other.
#[derive(Debug, Default)]
pub struct Gated {
    /// There is a queue; otherwise all pods in it are ungated.
    on: bool,
    order: BTreeSet<Turn>,
    turns: HashMap<Uid, Turn>,
    /// To be let through without room.
    leaving: Leaving,
    /// Let through without room, when and why.
    through: HashMap<Uid, (Duration, Ungate)>,
}

/// Is the pod queued, or must it be ungated?
pub fn is_queued(pod: &PodFacts) -> bool {
    !pod.asks.is_nothing() && !pod.deleting && pod.phase() == Phase::Queued
}

/// Pods that are to be ungated without room. First come the pods that were not ungated yet, in turn. Then come the pods
/// whose gate stayed, the one with the oldest attempt first.
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
    /// No pod is gated yet. Is there to be a queue?
    pub fn new(on: bool) -> Self {
        Self {
            on,
            ..Self::default()
        }
    }

    /// Turns the queue on or off. The pods that are in it must join again.
    pub(crate) fn switch(&mut self, on: bool) -> Vec<Uid> {
        self.on = on;
        self.through.retain(|_, (_, why)| *why != Ungate::Off);
        self.order.iter().map(|turn| turn.uid().clone()).collect()
    }

    /// A pod has come or changed. True if it is to wait for its turn.
    pub(crate) fn join(&mut self, pod: &PodFacts, asks_us: bool) -> bool {
        let turn = Turn::of(pod);
        if self.turns.get(&pod.uid) != Some(&turn) {
            self.leave(&pod.uid);
            self.turns.insert(pod.uid.clone(), turn.clone());
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
    pub fn leave(&mut self, uid: &str) -> bool {
        let Some(turn) = self.turns.swap_remove(uid) else {
            return false;
        };
        self.order.remove(&turn);
        self.leaving.remove(uid);
        true
    }

    /// Is this pod queued?
    pub fn has(&self, uid: &str) -> bool {
        self.turns.contains_key(uid)
    }

    /// Is no pod queued?
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// The pods that are queued, in the order of their turns.
    pub fn uids(&self) -> impl Iterator<Item = &Uid> {
        self.order.iter().map(Turn::uid)
    }

    /// How many are queued, and the oldest.
    pub fn queued(&self) -> Queued {
        Queued {
            pods: self.order.len(),
            oldest: self.order.iter().map(Turn::created).min(),
        }
    }

    /// How many stand before the pod.
    pub fn before(&self, uid: &str) -> Option<usize> {
        let turn = self.turns.get(uid)?;
        Some(self.order.range(..turn).count())
    }

    /// Is a pod queued whose turn is before that of this pod, which is not queued?
    pub(crate) fn is_ahead_of(&self, pod: &PodFacts) -> bool {
        let first = self.order.first();
        first.is_some_and(|first| *first < Turn::of(pod))
    }

    /// The highest priority of a queued pod.
    pub fn highest(&self) -> Option<i32> {
        self.order.first().map(Turn::priority)
    }

    /// The pod is let through without room, unless it was just now.
    pub fn let_go(&mut self, uid: &str, why: Ungate) {
        if let Some(turn) = self.turns.get(uid)
            && !self.through.contains_key(uid)
        {
            self.leaving.put(turn, Duration::ZERO, why);
        }
    }

    /// Is the pod let through, or about to be, without room?
    pub fn is_leaving(&self, uid: &str) -> bool {
        self.through.contains_key(uid) || self.leaving.last.contains_key(uid)
    }

    /// The next pod to let through, and why.
    pub fn next_leaving(&mut self, now: Duration) -> Option<(Uid, Ungate)> {
        let (uid, why) = self.leaving.next()?;
        self.through.insert(uid.clone(), (now, why));
        Some((uid, why))
    }

    /// Why it was let through without room.
    pub fn because(&self, uid: &str) -> Option<Ungate> {
        Some(self.through.get(uid)?.1)
    }

    /// The effect of time: a pod that was ungated long ago and is still queued is ungated again.
    pub fn tick(&mut self, now: Duration) {
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

    /// Are gates taken off in turn?
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// How many were ungated without room and are still queued.
    pub fn stuck(&self) -> usize {
        self.through.keys().filter(|uid| self.has(uid)).count()
    }

    /// Where they stand, in order.
    pub fn turns(&self) -> impl Iterator<Item = &Turn> {
        self.order.iter()
    }

    /// The one that stands after this turn, or the first.
    pub fn after(&self, turn: Option<&Turn>) -> Option<&Turn> {
        let from = turn.map_or(Unbounded, Excluded);
        self.order.range((from, Unbounded)).next()
    }

    /// Does a pod stand there?
    pub fn has_turn(&self, turn: &Turn) -> bool {
        self.turns.get(turn.uid()) == Some(turn)
    }

    /// The pods that are to be ungated without room, and why.
    pub fn leaving(&self) -> impl Iterator<Item = (&Turn, Ungate)> {
        self.leaving.all()
    }
}
