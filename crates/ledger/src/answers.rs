//! What filter found out per node and request class, laid out for a scan over thousands of nodes:
//! a call touches a few bytes per node, next to each other, and computes only what has changed.

use std::sync::Arc;
use std::time::Duration;

use gpustow_pack::{Cost, PolicyKind, Refusal, Request};
use hashbrown::HashMap;

/// Request classes remembered; beyond that all are forgotten and learnt anew.
const MAX_CLASSES: usize = 256;

/// A node's place in the tables.
pub(crate) type Slot = usize;
/// A request under a policy.
pub(crate) type Class = usize;

/// What every question needs to know of a node first.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Gate {
    /// When its report was seen to change last.
    pub(crate) seen: Option<Duration>,
    /// It has `PreferNoSchedule` taints.
    pub(crate) tainted: bool,
}

/// The tables.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    slots: HashMap<Arc<str>, Slot>,
    gates: Vec<Gate>,
    vacant: Vec<Slot>,
    classes: HashMap<(Arc<Request>, PolicyKind), Class>,
    /// By class, then by slot.
    answers: Vec<Vec<Option<Result<Cost, Refusal>>>>,
}

impl Answers {
    /// The node has changed: what was found out about it is void.
    pub(crate) fn changed(&mut self, name: &str, gate: Gate) {
        let slot = self.slots.get(name).copied().unwrap_or_else(|| {
            let slot = self.vacant.pop().unwrap_or(self.gates.len());
            self.slots.insert(name.into(), slot);
            slot
        });
        if slot == self.gates.len() {
            self.gates.push(gate);
            self.answers
                .iter_mut()
                .for_each(|answers| answers.push(None));
        } else {
            self.gates[slot] = gate;
            self.answers
                .iter_mut()
                .for_each(|answers| answers[slot] = None);
        }
    }

    /// The node is gone.
    pub(crate) fn gone(&mut self, name: &str) {
        if let Some(slot) = self.slots.remove(name) {
            self.vacant.push(slot);
        }
    }

    /// Where a node's answers are, and its gate.
    pub(crate) fn node(&self, name: &str) -> Option<(Slot, Gate)> {
        let slot = *self.slots.get(name)?;
        Some((slot, self.gates[slot]))
    }

    pub(crate) fn class(&mut self, request: &Arc<Request>, policy: PolicyKind) -> Class {
        let key = (request.clone(), policy);
        if let Some(&class) = self.classes.get(&key) {
            return class;
        }
        if self.classes.len() == MAX_CLASSES {
            self.forget();
        }
        let class = self.classes.len();
        self.classes.insert(key, class);
        self.answers.push(vec![None; self.gates.len()]);
        class
    }

    /// Forgets every answer.
    pub(crate) fn forget(&mut self) {
        self.classes.clear();
        self.answers.clear();
    }

    /// The remembered answer, or else the one that `find` finds.
    pub(crate) fn get_or(
        &mut self,
        class: Class,
        slot: Slot,
        find: impl FnOnce() -> Result<Cost, Refusal>,
    ) -> Result<Cost, Refusal> {
        match self
            .answers
            .get_mut(class)
            .and_then(|answers| answers.get_mut(slot))
        {
            Some(answer) => *answer.get_or_insert_with(find),
            None => find(),
        }
    }
}
