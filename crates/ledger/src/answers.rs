//! What filter found out, laid out for a scan over thousands of nodes: a call touches a few bytes
//! per node, next to each other, and computes only what it has not seen.
//!
//! An answer is a function of a request under a policy, of what a node's view is, and for `tight`
//! of what that has learnt. Nodes whose views are equal are in the same *state* and share their
//! answers; a node that changes moves to another state.

use std::sync::Arc;
use std::time::Duration;

use gpustow_pack::{Cost, NodeGpus, PolicyKind, Refusal, Request};
use hashbrown::HashMap;

/// Answers remembered, 32 bytes each; beyond that the classes asked for least lately are forgotten.
const MAX_ANSWERS: usize = 1 << 20;
/// Classes that are remembered however many nodes there are.
const MIN_CLASSES: usize = 16;

/// A node's place in the tables.
pub(crate) type Slot = usize;
/// A request under a policy; good until the next is looked up.
pub(crate) type Class = usize;
/// A view that one or more nodes have.
type State = usize;

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
    places: Vec<Place>,
    vacant: Vec<Slot>,
    /// The slot that the last list of names began with.
    first: Slot,
    states: States,
    classes: HashMap<(Arc<Request>, PolicyKind), Class>,
    rows: Vec<Row>,
    /// Lookups of a class so far.
    lookups: u64,
    /// How often `tight` has learnt something that changes costs.
    lessons: u64,
}

#[derive(Debug)]
struct Place {
    /// Empty for a vacant slot.
    name: Arc<str>,
    gate: Gate,
    state: State,
    /// The slot of the name that followed this one last.
    next: Slot,
}

/// The answers for one class, by state.
#[derive(Debug)]
struct Row {
    key: (Arc<Request>, PolicyKind),
    used: u64,
    lessons: u64,
    answers: Vec<Answer>,
}

type Answer = Option<Result<Cost, Refusal>>;

/// The different views there are.
#[derive(Debug, Default)]
struct States {
    ids: HashMap<Arc<NodeGpus>, State>,
    /// Each with the number of nodes that have it, zero for a vacant one.
    views: Vec<(Arc<NodeGpus>, u32)>,
    vacant: Vec<State>,
}

impl States {
    /// The state of a node with this view, and whether it is a new one.
    fn enter(&mut self, view: &mut Arc<NodeGpus>) -> (State, bool) {
        if let Some(&state) = self.ids.get(view) {
            let (known, nodes) = &mut self.views[state];
            *view = known.clone();
            *nodes += 1;
            return (state, false);
        }
        let state = self.vacant.pop().unwrap_or(self.views.len());
        match self.views.get_mut(state) {
            Some(vacant) => *vacant = (view.clone(), 1),
            None => self.views.push((view.clone(), 1)),
        }
        self.ids.insert(view.clone(), state);
        (state, true)
    }

    fn leave(&mut self, state: State) {
        let (view, nodes) = &mut self.views[state];
        *nodes -= 1;
        if *nodes == 0 {
            self.ids.remove(view);
            self.vacant.push(state);
        }
    }
}

impl Answers {
    /// The node has changed, or may have. Nodes with equal views share one.
    pub(crate) fn changed(&mut self, name: &Arc<str>, gate: Gate, view: &mut Arc<NodeGpus>) {
        let known = self.slots.get(name).copied();
        if let Some(place) = known.map(|slot| &mut self.places[slot]) {
            place.gate = gate;
            if Arc::ptr_eq(&self.states.views[place.state].0, view) {
                return;
            }
        }
        let (state, is_new) = self.states.enter(view);
        if is_new {
            let known = self
                .rows
                .iter_mut()
                .filter_map(|row| row.answers.get_mut(state));
            known.for_each(|answer| *answer = None);
        }
        match known {
            Some(slot) => {
                let old = std::mem::replace(&mut self.places[slot].state, state);
                self.states.leave(old);
            }
            None => self.occupy(name, gate, state),
        }
    }

    fn occupy(&mut self, name: &Arc<str>, gate: Gate, state: State) {
        let slot = self.vacant.pop().unwrap_or(self.places.len());
        let place = Place {
            name: name.clone(),
            gate,
            state,
            next: slot + 1,
        };
        self.slots.insert(name.clone(), slot);
        match self.places.get_mut(slot) {
            Some(vacant) => *vacant = place,
            None => self.places.push(place),
        }
    }

    /// The node is gone.
    pub(crate) fn gone(&mut self, name: &str) {
        if let Some(slot) = self.slots.remove(name) {
            let place = &mut self.places[slot];
            place.name = Arc::default();
            self.states.leave(place.state);
            self.vacant.push(slot);
        }
    }

    /// Where a node's answers are.
    pub(crate) fn slot(&self, name: &str) -> Option<Slot> {
        self.slots.get(name).copied()
    }

    /// The same for a list of names. Lists come in much the same order again and again: each name
    /// is first looked for where it was found the last time.
    pub(crate) fn slots_of(&mut self, names: &[&str]) -> Vec<Option<Slot>> {
        let mut last = None;
        let find = |name: &&str| {
            let guess = last.map_or(self.first, |last: Slot| self.places[last].next);
            let place = self.places.get(guess);
            if place.is_none_or(|place| *place.name != **name) {
                let slot = self.slots.get(*name).copied()?;
                match last {
                    Some(last) => self.places[last].next = slot,
                    None => self.first = slot,
                }
                last = Some(slot);
            } else {
                last = Some(guess);
            }
            last
        };
        names.iter().map(find).collect()
    }

    pub(crate) fn gate(&self, slot: Slot) -> Gate {
        self.places[slot].gate
    }

    /// The different views there are, and how many nodes have each.
    pub(crate) fn views(&self) -> impl Iterator<Item = (&NodeGpus, u32)> + Clone {
        let views = self.states.views.iter().filter(|(_, nodes)| *nodes > 0);
        views.map(|(view, nodes)| (&**view, *nodes))
    }

    pub(crate) fn class(&mut self, request: &Arc<Request>, policy: PolicyKind) -> Class {
        self.lookups += 1;
        let key = (request.clone(), policy);
        let class = match self.classes.get(&key) {
            Some(&class) => class,
            None => self.new_class(key),
        };
        let row = &mut self.rows[class];
        row.used = self.lookups;
        if policy == PolicyKind::Tight && row.lessons != self.lessons {
            row.answers.clear();
        }
        row.lessons = self.lessons;
        row.answers.resize(self.states.views.len(), None);
        class
    }

    fn new_class(&mut self, key: (Arc<Request>, PolicyKind)) -> Class {
        let limit = (MAX_ANSWERS / self.states.views.len().max(1)).max(MIN_CLASSES);
        let row = Row {
            key: key.clone(),
            used: 0,
            lessons: self.lessons,
            answers: Vec::new(),
        };
        let oldest = || (0..self.rows.len()).min_by_key(|&class| self.rows[class].used);
        let class = match oldest().filter(|_| self.rows.len() >= limit) {
            Some(class) => {
                self.classes.remove(&self.rows[class].key);
                self.rows[class] = row;
                class
            }
            None => {
                self.rows.push(row);
                self.rows.len() - 1
            }
        };
        self.classes.insert(key, class);
        class
    }

    /// `tight` has learnt: its answers are void.
    pub(crate) fn learnt(&mut self) {
        self.lessons += 1;
    }

    /// The remembered answer, or else the one that `find` finds for the node's view.
    pub(crate) fn get_or(
        &mut self,
        class: Class,
        slot: Slot,
        find: impl FnOnce(&NodeGpus) -> Result<Cost, Refusal>,
    ) -> Result<Cost, Refusal> {
        let state = self.places[slot].state;
        let view = &self.states.views[state].0;
        match self.rows[class].answers.get_mut(state) {
            Some(answer) => *answer.get_or_insert_with(|| find(view)),
            None => find(view),
        }
    }
}
