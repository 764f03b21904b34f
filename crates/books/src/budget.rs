//! What one call may spend on searches, so that no pod keeps the others waiting.
//!
//! A pod of several containers is searched for on every node that is not remembered. When a call has
//! spent its steps it answers with what it has found; the nodes that it has not looked at it calls
//! [`Reason::NotYet`]. The pod is woken to be asked for again, and that call begins where this one
//! stopped: after as many calls as there are nodes each has been looked at.

use crate::books::Node;
use crate::config::Config;
use crate::reason::Reason;

/// What one periodic look may cost: it holds the lock that filter calls wait for. A fit of a pod of one GPU counts as
/// [`FIT`], a search adds its steps, and each pod or node that is only looked at counts once.
const LOOK: u64 = 4096;
/// What one part of a round may cost, in nodes and GPUs looked at, each up to a microsecond or two: some milliseconds.
const ROUND: u64 = 8_000;
/// The same for what a filter call does at its end: some tenths of a millisecond.
const CALL: u64 = 512;
/// What a plan may cost that is made for people: it holds no lock.
const PLAN: u64 = 1_600_000;
const FIT: u64 = 8;

/// The search steps that a call has left; see `Ledger::budget`.
#[derive(Debug)]
pub struct Budget {
    whole: u64,
    left: u64,
    /// What each fit costs beside its steps.
    fit: u64,
    spent: u64,
    /// Views count, too; no search is refused, and the caller stops between two nodes.
    to_end: bool,
}

impl Budget {
    fn with(left: u64, fit: u64) -> Self {
        Self {
            whole: left,
            left,
            fit,
            spent: 0,
            to_end: false,
        }
    }

    /// For one call.
    pub fn of(config: &Config) -> Self {
        Self::with(config.search_steps, 0)
    }

    /// For one periodic look, which counts every fit. What it leaves, the next look goes on with.
    pub fn of_look() -> Self {
        Self::with(LOOK, FIT)
    }

    /// For one part of a round of a means, which counts every view of a node as well, and looks at each
    /// node to its end. Before each node ask [`Budget::is_spent`].
    pub fn of_round() -> Self {
        Self {
            to_end: true,
            ..Self::with(ROUND, FIT)
        }
    }

    /// The same for the end of a filter call, which leaves the rest to a round.
    pub fn of_call() -> Self {
        Self {
            to_end: true,
            ..Self::with(CALL, FIT)
        }
    }

    /// For a gang that may be woken or ungated, which is looked at as a whole.
    pub fn of_gang() -> Self {
        Self::with(8 * LOOK, FIT)
    }

    /// For a plan that is made for people.
    pub fn of_plan() -> Self {
        Self::with(PLAN, FIT)
    }

    /// As much again as it had at first.
    pub fn again(&self) -> Self {
        Self {
            to_end: self.to_end,
            ..Self::with(self.whole, self.fit)
        }
    }

    /// Has a look spent nothing so far?
    pub fn is_whole(&self) -> bool {
        self.left == self.whole
    }

    /// So many pods or nodes are looked at, which only a periodic look counts.
    pub fn charge(&mut self, count: usize) {
        if self.fit == 0 {
            return;
        }
        self.take(u64::try_from(count).unwrap_or(u64::MAX));
    }

    /// A search has tried so many fits.
    pub fn charge_fits(&mut self, fits: usize) {
        let fits = u64::try_from(fits).unwrap_or(u64::MAX);
        self.take(fits.saturating_mul(self.fit));
    }

    /// So many fits may be tried still.
    pub fn fits_left(&self) -> usize {
        let left = self.left.checked_div(self.fit);
        left.map_or(usize::MAX, |left| {
            usize::try_from(left).unwrap_or(usize::MAX)
        })
    }

    /// What this one has left, for a part of the look.
    pub fn of_rest(whole: &Self) -> Self {
        Self::with(whole.left, whole.fit)
    }

    /// A part of the look has spent what it did.
    pub fn charge_spent(&mut self, part: &Self) {
        self.take(part.spent);
    }

    fn take(&mut self, units: u64) {
        self.left = self.left.saturating_sub(units);
        self.spent = self.spent.saturating_add(units);
    }

    /// What was spent, the last search to its end.
    pub fn spent(&self) -> u64 {
        self.spent
    }

    /// A view of the node is computed: for each GPU everybody who is there is looked at.
    pub(crate) fn charge_view(&mut self, node: &Node) {
        if self.to_end {
            let pods = usize::try_from(node.count()).unwrap_or(usize::MAX);
            self.charge(node.gpus().len().saturating_mul(pods.saturating_add(1)));
        }
    }

    /// For one node.
    pub fn all() -> Self {
        Self::with(u64::MAX, 0)
    }

    /// For looking at what is remembered.
    pub fn none() -> Self {
        Self::with(0, 0)
    }

    /// Is nothing left?
    pub fn is_spent(&self) -> bool {
        self.left == 0
    }

    /// Runs a search that counts its steps, the last one to its end.
    ///
    /// # Errors
    /// [`Reason::NotYet`] if nothing is left.
    pub(crate) fn spend<T>(&mut self, search: impl FnOnce(&mut u64) -> T) -> Result<T, Reason> {
        if self.left == 0 && !self.to_end {
            return Err(Reason::NotYet);
        }
        let mut steps = 0;
        let found = search(&mut steps);
        self.take(steps.saturating_add(self.fit));
        Ok(found)
    }
}
