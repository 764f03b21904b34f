//! What one call may spend on searches, so that no pod keeps the others waiting.
//!
//! A pod of several containers is searched for on every node that is not remembered. When a call has
//! spent its steps it answers with what it has found; the nodes that it has not looked at it calls
//! [`Reason::NotYet`]. The pod is woken to be asked for again, and that call begins where this one
//! stopped: after as many calls as there are nodes each has been looked at.

use crate::{Config, Ledger, Reason};

/// The search steps that a call has left; see [`Ledger::budget`].
#[derive(Debug)]
pub struct Budget {
    left: u64,
}

impl Budget {
    /// For one call.
    pub(crate) fn of(config: &Config) -> Self {
        Self {
            left: config.search_steps,
        }
    }

    /// For one node.
    pub(crate) fn all() -> Self {
        Self { left: u64::MAX }
    }

    /// For looking at what is remembered.
    pub(crate) fn none() -> Self {
        Self { left: 0 }
    }

    /// Is nothing left?
    pub(crate) fn is_spent(&self) -> bool {
        self.left == 0
    }

    /// Runs a search that counts its steps, the last one to its end.
    ///
    /// # Errors
    /// [`Reason::NotYet`] if nothing is left.
    pub(crate) fn spend<T>(&mut self, search: impl FnOnce(&mut u64) -> T) -> Result<T, Reason> {
        if self.left == 0 {
            return Err(Reason::NotYet);
        }
        let mut steps = 0;
        let found = search(&mut steps);
        self.left = self.left.saturating_sub(steps);
        Ok(found)
    }
}

impl Ledger {
    /// What one call may spend on searches, for [`Ledger::preempt`] and [`Ledger::spared`].
    #[must_use]
    pub fn budget(&self) -> Budget {
        Budget::of(&self.config)
    }
}
