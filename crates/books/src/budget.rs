//! The steps that one call may spend on searches, so that no pod delays the others.
//!
//! Filter searches a placement for a pod of several containers on every node without a remembered answer. When a call
//! has spent its steps, it answers with the results so far, and with [`Reason::NotYet`] for the other nodes. The
//! extender wakes the pod, so that kube-scheduler asks again. The next call begins where this one stopped: after as
//! many calls as there are nodes, each node has been searched.

use crate::books::Node;
use crate::config::Config;
use crate::reason::Reason;

/// The budget of one periodic look, which holds the lock that filter calls wait for. A fit of a pod of one GPU counts
/// as [`FIT`], and a search adds its steps. Each pod or node that is only looked at counts once.
const LOOK: u64 = 3_500;
/// The budget of one part of a round, in pods of a node for each of its GPUs: some milliseconds.
const ROUND: u64 = 32_000;
/// The cost of a node in a round, whatever the look at it finds: up to a microsecond.
const NODE: usize = 16;
/// The budget of the work at the end of a filter call: some tenths of a millisecond.
const CALL: u64 = 512;
/// The budget of a plan that is made for people: it does not hold a lock.
const PLAN: u64 = 1_600_000;
const FIT: u64 = 8;

/// The search steps that a call has left; see `Ledger::budget`.
#[derive(Debug)]
pub struct Budget {
    whole: u64,
    left: u64,
    /// The cost of each fit in addition to its steps.
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

    /// For one periodic look, which counts every fit. The next look continues with the work that is left.
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

    /// As [`Budget::of_round`], for the end of a filter call, which leaves the rest to a round.
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

    /// A node is looked at.
    pub fn charge_node(&mut self) {
        self.charge(if self.to_end { NODE } else { 1 });
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

    /// The rest of the budget `whole`, for a part of the look.
    pub fn of_rest(whole: &Self) -> Self {
        Self::with(whole.left, whole.fit)
    }

    /// Charges the steps that a part of the look has spent.
    pub fn charge_spent(&mut self, part: &Self) {
        self.take(part.spent);
    }

    fn take(&mut self, units: u64) {
        self.left = self.left.saturating_sub(units);
        self.spent = self.spent.saturating_add(units);
    }

    /// The spent units, with the whole of the last search.
    pub fn spent(&self) -> u64 {
        self.spent
    }

    /// Charges the computation of a node's view, which looks at every pod for each GPU.
    pub fn charge_view(&mut self, node: &Node) {
        if self.to_end {
            let pods = usize::try_from(node.count()).unwrap_or(usize::MAX);
            self.charge(node.gpus().len().saturating_mul(pods.saturating_add(1)));
        }
    }

    /// For one node.
    pub fn all() -> Self {
        Self::with(u64::MAX, 0)
    }

    /// For a look at remembered answers alone.
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
