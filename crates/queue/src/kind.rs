//! Waiting pods with equal requests and equal constraints, in the order in which they are offered
//! room.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::QueueFrom;
use gpustow_api::intree::Constraints;
use gpustow_books::{Turn, Uid};
use gpustow_pack::{Mib, Request};

/// A kind of pods; never used twice.
pub type KindId = u64;
/// The properties that make pods one kind.
pub(crate) type Key = (Arc<Request>, Arc<Constraints>);

/// Pods with equal requests and constraints.
#[derive(Debug)]
pub struct Kind {
    /// The common properties of the pods.
    pub(super) key: Key,
    /// Its pods, in the order in which they are served.
    pub order: BTreeSet<Turn>,
    /// Every node was looked at for this kind. Until this time only nodes that gain room are looked at.
    pub looked: Duration,
    /// No node could hold one of them if it were empty.
    pub hopeless: bool,
    /// One was refused where only the room was wanting.
    pub short: bool,
}

impl Kind {
    /// A kind without a pod.
    pub fn new(key: Key) -> Self {
        Self {
            key,
            order: BTreeSet::new(),
            looked: Duration::ZERO,
            hopeless: false,
            short: false,
        }
    }

    /// The memory that its pods need on one card at least.
    pub fn least(&self) -> Mib {
        self.key.0.least()
    }

    /// Do its pods wait for room that a node could have?
    pub(crate) fn wants_room(&self) -> bool {
        !self.hopeless && (self.short || self.looked > Duration::ZERO)
    }

    /// The criteria of new pods that would take the room for which the pods of this kind wait.
    pub fn queue_from(&self) -> Option<QueueFrom> {
        let claims = &self.key.0.claims;
        Some(QueueFrom {
            priority: self.firsts(0).map(Turn::priority).max()?,
            mib_per_gpu: claims.iter().map(|claim| claim.mib.0).min()?,
            gpus: claims.iter().map(|claim| claim.gpus).min()?,
        })
    }

    /// Where its pods stand, in order.
    pub fn turns(&self) -> impl Iterator<Item = &Turn> {
        self.order.iter()
    }

    /// The pod that stands after `turn`.
    pub fn after(&self, turn: &Turn) -> Option<&Turn> {
        self.order.range((Excluded(turn), Unbounded)).next()
    }

    /// The first pods of each number of useless wake-ups from `useless` on; none of that number has a
    /// higher priority.
    fn firsts(&self, useless: u32) -> impl Iterator<Item = &Turn> {
        let from = |useless| self.order.range(Turn::first_of(useless)..).next();
        std::iter::successors(from(useless), move |turn| {
            from(turn.useless().checked_add(1)?)
        })
    }

    /// A pod of the highest priority.
    pub fn highest(&self) -> Option<&Uid> {
        let highest = self.firsts(0).min_by_key(|turn| Reverse(turn.priority()));
        highest.map(Turn::uid)
    }

    /// The next pod behind `turn` whose priority is higher.
    pub fn higher(&self, turn: &Turn) -> Option<&Turn> {
        let mut behind = self.firsts(turn.useless().checked_add(1)?);
        behind.find(|behind| behind.priority() > turn.priority())
    }
}
