//! What one call may spend on searches, so that no pod keeps the others waiting.
//!
//! A pod of several containers is searched for on every node that is not remembered. When a call has
//! spent its steps it answers with what it has found; the nodes that it has not looked at it calls
//! [`Reason::NotYet`]. The pod is woken to be asked for again, and that call begins where this one
//! stopped: after as many calls as there are nodes each has been looked at.

use std::sync::Arc;

use gpustow_api::PodFacts;

use crate::book::Config;
use crate::node::Uid;
use crate::scores::Slot;
use crate::{Ledger, Reason};

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

/// Pods that were refused before every node was looked at, and are to ask again.
#[derive(Debug, Default)]
pub(crate) struct Unfinished(Vec<Uid>);

impl Ledger {
    /// What one call may spend on searches, for [`Ledger::preempt`] and [`Ledger::spared`].
    #[must_use]
    pub fn budget(&self) -> Budget {
        Budget::of(&self.config)
    }

    /// The nodes that are to be looked at, in the order of their slots from where the last call for
    /// this pod stopped.
    pub(crate) fn in_turn<T>(&self, uid: &str, nodes: &mut [(Slot, T)]) {
        let next = self.tried.get(uid).map_or(0, |tried| tried.next);
        nodes.sort_unstable_by_key(|&(slot, _)| (slot < next, slot));
    }

    /// This call has looked at everything up to here, or at everything there is.
    pub(crate) fn stopped_at(&mut self, pod: &PodFacts, next: Option<Slot>) {
        match next {
            Some(next) => self.tried.entry(pod.uid.clone()).or_default().next = next,
            None => {
                if let Some(tried) = self.tried.get_mut(&pod.uid) {
                    tried.next = 0;
                }
            }
        }
    }

    /// The pod was refused before everything was looked at.
    pub(crate) fn ask_again(&mut self, uid: &Uid) {
        self.unfinished.0.push(uid.clone());
    }

    /// At most `limit` pods that are to ask again at once.
    pub(crate) fn come_again(&mut self, limit: usize) -> Vec<Arc<PodFacts>> {
        let mut again = Vec::new();
        while again.len() < limit
            && let Some(uid) = self.unfinished.0.pop()
        {
            let twice = |pod: &Arc<PodFacts>| pod.uid == uid;
            if self.is_waiting(&uid) && !again.iter().any(twice) {
                again.extend(self.asleep(&uid));
            }
        }
        again
    }
}
