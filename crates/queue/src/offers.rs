//! Nodes that gained room, who was woken for it, and how many more may be.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use gpustow_books::{HashMap, HashSet, Uid};

/// At most this many pods are offered the same room at once.
const WIDEST: u32 = 1 << 10;
/// The number of wake-ups that may fail: this many at once, and one more in each interval.
const BURST: u32 = 256;
const CREDIT_EVERY: Duration = Duration::from_millis(100);
/// The credit that a wake-up with a reservation gives back.
const SUCCESS: u32 = 2;

/// Nodes that gained room, first come, first served, and the results of their offers.
#[derive(Debug, Default)]
pub struct Offers {
    gained: VecDeque<Arc<str>>,
    queued: HashSet<Arc<str>>,
    rounds: HashMap<Arc<str>, Round>,
    /// When offers end, in order.
    ends: BTreeSet<(Duration, Uid)>,
    credit: Credit,
}

/// The offers of one node's room.
#[derive(Debug, Default)]
struct Round {
    ends: Vec<End>,
    /// How many rounds in a row no pod took it: it is offered to twice as many in the next.
    useless: u32,
}

/// How an offer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The pod has it.
    Taken,
    /// It asked and there was no room any more.
    Refused,
    /// It was not even woken, is gone, or has room elsewhere.
    Open,
    /// It did not ask for this node.
    Useless,
}

/// Bounds wake-ups without result; a wake-up that leads to a reservation pays for itself.
#[derive(Debug)]
struct Credit {
    left: u32,
    since: Duration,
}

impl Default for Credit {
    fn default() -> Self {
        Self {
            left: BURST,
            since: Duration::ZERO,
        }
    }
}

impl Offers {
    /// No pod waits any more.
    pub fn clear(&mut self) {
        let credit = std::mem::take(&mut self.credit);
        *self = Self {
            credit,
            ..Self::default()
        };
    }

    /// A node has room to offer.
    pub fn gain(&mut self, node: &str) {
        if !self.queued.contains(node) {
            let node: Arc<str> = node.into();
            self.queued.insert(node.clone());
            self.gained.push_back(node);
        }
    }

    /// The node that gained room first.
    pub fn next(&mut self) -> Option<Arc<str>> {
        let node = self.gained.pop_front()?;
        self.queued.swap_remove(&node);
        Some(node)
    }

    /// Is the node's room yet to be offered?
    pub fn is_queued(&self, node: &str) -> bool {
        self.queued.contains(node)
    }

    /// How many more pods than fit together are to be offered the node's room.
    pub fn extra(&self, node: &str) -> u32 {
        let useless = self.rounds.get(node).map_or(0, |round| round.useless);
        (1 << useless.min(WIDEST.ilog2())) - 1
    }

    /// Room on a node is offered to a pod.
    pub fn begin(&mut self, uid: &Uid, node: &Arc<str>, until: Duration) {
        self.credit.left = self.credit.left.saturating_sub(1);
        self.lasts(uid, until);
        self.rounds.entry(node.clone()).or_default();
    }

    /// The pod's offer lasts until then.
    pub fn lasts(&mut self, uid: &str, until: Duration) {
        self.ends.insert((until, uid.into()));
    }

    /// An offer ends. After the last offer of a round, the rest of the node's room is offered again.
    pub(crate) fn settle(&mut self, node: &str, end: End, is_last: bool) {
        let Some(round) = self.rounds.get_mut(node) else {
            return;
        };
        round.ends.push(end);
        if !is_last {
            return;
        }
        let ends = std::mem::take(&mut round.ends);
        let useless = ends.contains(&End::Useless);
        round.useless = match useless && !ends.contains(&End::Taken) {
            true => round.useless + 1,
            false => 0,
        };
        // The cards that the pods with offers would take were a guess: there may be more room.
        if useless || ends.contains(&End::Open) || ends.contains(&End::Taken) {
            self.gain(node);
        } else {
            self.rounds.swap_remove(node);
        }
    }

    /// The node's room was offered to all that it is for, and is offered to none of them now.
    pub fn done(&mut self, node: &str) {
        self.rounds.swap_remove(node);
    }

    /// A pod whose offer may have ended by now.
    pub fn ended(&mut self, now: Duration) -> Option<Uid> {
        self.ends.first().filter(|(end, _)| *end <= now)?;
        Some(self.ends.pop_first()?.1)
    }

    /// May a pod be woken now?
    pub fn has_credit(&self) -> bool {
        self.credit.left > 0
    }

    /// Credit grows with time.
    pub(crate) fn grow(&mut self, now: Duration) {
        let grown = now.saturating_sub(self.credit.since).as_millis() / CREDIT_EVERY.as_millis();
        let grown = u32::try_from(grown).unwrap_or(u32::MAX);
        self.earn(grown);
        self.credit.since += CREDIT_EVERY.saturating_mul(grown);
    }

    /// A wake-up led to a reservation.
    pub(crate) fn succeeded(&mut self) {
        self.earn(SUCCESS);
    }

    /// A pod was not woken after all.
    pub fn spared(&mut self) {
        self.earn(1);
    }

    fn earn(&mut self, more: u32) {
        self.credit.left = BURST.min(self.credit.left.saturating_add(more));
    }
}
