//! The remembered answers of filter, laid out for a scan over thousands of nodes. A call reads a few bytes per node,
//! next to each other, and computes only new answers.
//!
//! An answer is a function of a request under a policy, of a node's view, and for `tight` of its lessons. Nodes with
//! equal views are in the same *state* and share their answers; a node that changes moves to another state. Policies
//! count whole MiB of host memory, so views that differ within a MiB are equal here. Machines of one make differ by a
//! few KiB.

use std::cmp::Reverse;
use std::hint::black_box;
use std::sync::Arc;

use gpustow_pack::{Cost, NodeGpus, PolicyKind, Refusal, Request};

use super::slots::{Slot, Slots};
use crate::books::Gate;
use crate::maps::HashMap;
use crate::reason::Reason;

/// Answers that there is memory for, 32 bytes each: classes × states. Beyond that the classes asked for
/// least lately are forgotten.
const MAX_ANSWERS: usize = 1 << 20;
/// Classes that are remembered however many states there are.
const MIN_CLASSES: usize = 16;
/// Search steps that take about as long as an answer without a search.
const STEPS_PER_ANSWER: u64 = 256;
/// A row grows by so many answers at once.
const ROW: usize = 256;
/// A class that was not among so many lookups is not answered in advance.
const LATELY: u64 = 256;
/// Answers that are read in order as fast as one in any order.
const READ_AHEAD: usize = 4;

/// A request under a policy; good until the next is looked up.
pub type ClassId = usize;
/// A view that one or more nodes have.
type State = usize;

/// The tables.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    slots: Slots,
    places: Vec<Entry>,
    vacant: Vec<Slot>,
    states: States,
    classes: HashMap<(Arc<Request>, PolicyKind), ClassId>,
    rows: Vec<Row>,
    /// States that appeared since [`Answers::warm`] looked.
    fresh: Vec<State>,
    /// Lookups of a class so far.
    lookups: u64,
    /// How often `tight` has learnt something that changes costs.
    lessons: u64,
}

/// The data of a node that a call reads, and no more.
#[derive(Debug)]
struct Entry {
    gate: Gate,
    state: State,
}

/// The answers for one class, by state.
#[derive(Debug)]
struct Row {
    key: (Arc<Request>, PolicyKind),
    used: u64,
    /// Lookups by calls; expected requests do not count.
    asked: u64,
    lessons: u64,
    answers: Vec<Answer>,
    /// How far [`Answers::warm`] got.
    warm: State,
}

impl Row {
    /// Forgets every answer.
    fn clear(&mut self, states: usize, lessons: u64) {
        self.lessons = lessons;
        self.answers.clear();
        self.grow(states);
        self.warm = 0;
    }

    /// Has room for one answer per state, and hardly more.
    fn grow(&mut self, states: usize) {
        if states > self.answers.capacity() {
            let more = states.next_multiple_of(ROW) - self.answers.len();
            self.answers.reserve_exact(more);
        }
        self.answers.resize(states, None);
    }
}

pub(super) type Answer = Option<Result<Cost, Refusal>>;

// The time of a filter call grows with the size of these types.
const _: () = assert!(size_of::<Answer>() <= 32 && size_of::<Entry>() <= 24);

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
            self.ids.swap_remove(view);
            self.vacant.push(state);
        }
    }
}

impl Answers {
    /// The node has changed, or may have. Nodes with equal views share one if it is in whole MiB.
    pub(super) fn changed(&mut self, name: &Arc<str>, gate: Gate, view: &mut Arc<NodeGpus>) {
        let known = self.slots.get(name);
        if let Some(place) = known.map(|slot| &mut self.places[slot]) {
            place.gate = gate;
            if Arc::ptr_eq(&self.states.views[place.state].0, view) {
                return;
            }
        }
        let (state, is_new) = match view.is_in_mib() {
            true => self.states.enter(view),
            false => self.states.enter(&mut Arc::new(view.in_mib())),
        };
        if is_new {
            self.appeared(state);
        }
        match known {
            Some(slot) => {
                let old = std::mem::replace(&mut self.places[slot].state, state);
                self.states.leave(old);
            }
            None => self.occupy(name, gate, state),
        }
    }

    /// No row has an answer for this state.
    fn appeared(&mut self, state: State) {
        if self.rows.len() > self.limit() {
            self.forget_surplus();
        }
        for row in &mut self.rows {
            if let Some(answer) = row.answers.get_mut(state) {
                *answer = None;
            }
        }
        self.fresh.push(state);
        // Beyond that a look at every state is cheaper.
        if self.fresh.len() > self.states.views.len() {
            self.fresh.clear();
            self.rows.iter_mut().for_each(|row| row.warm = 0);
        }
    }

    fn occupy(&mut self, name: &str, gate: Gate, state: State) {
        let slot = self.vacant.pop().unwrap_or(self.places.len());
        let place = Entry { gate, state };
        self.slots.insert(name, slot);
        match self.places.get_mut(slot) {
            Some(vacant) => *vacant = place,
            None => self.places.push(place),
        }
    }

    /// The node is gone.
    pub(super) fn gone(&mut self, name: &str) {
        if let Some(slot) = self.slots.remove(name) {
            self.states.leave(self.places[slot].state);
            self.vacant.push(slot);
        }
    }

    /// Where a node's answers are.
    pub(super) fn slot(&self, name: &str) -> Option<Slot> {
        self.slots.get(name)
    }

    pub(super) fn gate(&self, slot: Slot) -> Gate {
        self.places[slot].gate
    }

    /// The different views there are, and how many nodes have each.
    pub(super) fn views(&self) -> impl Iterator<Item = (&NodeGpus, u32)> + Clone {
        let views = self.states.views.iter().filter(|(_, nodes)| *nodes > 0);
        views.map(|(view, nodes)| (&**view, *nodes))
    }

    /// The class of a request that so many nodes are asked about next.
    pub(super) fn class(
        &mut self,
        request: &Arc<Request>,
        policy: PolicyKind,
        nodes: usize,
    ) -> ClassId {
        self.lookups += 1;
        let class = self.enter(request, policy);
        self.rows[class].asked += 1;
        self.refresh(class);
        let answers = &self.rows[class].answers;
        // The nodes come in any order. Read in the order of memory, the answers are in the processor's cache much sooner.
        if nodes > answers.len() / READ_AHEAD {
            black_box(answers.iter().filter(|it| it.is_some()).count());
        }
        class
    }

    /// Filter will soon look up this request. Its class does not displace another expected class.
    pub(crate) fn expect(&mut self, request: &Arc<Request>, policy: PolicyKind) {
        let full = self.rows.len() >= self.limit();
        if !full || self.oldest().is_some_and(|old| !self.is_expected(old)) {
            self.enter(request, policy);
        }
    }

    fn enter(&mut self, request: &Arc<Request>, policy: PolicyKind) -> ClassId {
        let key = (request.clone(), policy);
        let class = match self.classes.get(&key) {
            Some(&class) => class,
            None => self.new_class(key),
        };
        self.rows[class].used = self.lookups;
        class
    }

    /// Forgets classes when states have become too many for all of them, and some more, so that this
    /// is seldom.
    fn forget_surplus(&mut self) {
        let keep = self.limit() * 3 / 4;
        let mut order: Vec<ClassId> = (0..self.rows.len()).collect();
        order.sort_by_key(|&class| (!self.is_expected(class), Reverse(self.rows[class].used)));
        let mut kept = vec![false; order.len()];
        for class in order.into_iter().take(keep) {
            kept[class] = true;
        }
        let mut class = 0..;
        self.rows
            .retain(|_| class.next().is_some_and(|class| kept[class]));
        let rows = self.rows.iter().enumerate();
        self.classes = rows.map(|(class, row)| (row.key.clone(), class)).collect();
    }

    /// The class to forget first.
    fn oldest(&self) -> Option<ClassId> {
        let age = |&class: &ClassId| (self.is_expected(class), self.rows[class].used);
        (0..self.rows.len()).min_by_key(age)
    }

    fn is_expected(&self, class: ClassId) -> bool {
        self.rows[class].asked == 0 && self.is_recent(class)
    }

    fn is_recent(&self, class: ClassId) -> bool {
        self.rows[class].used + LATELY > self.lookups
    }

    /// Drops answers that are void and makes room for one per state.
    fn refresh(&mut self, class: ClassId) {
        let (row, states) = (&mut self.rows[class], self.states.views.len());
        if row.key.1 == PolicyKind::Tight && row.lessons != self.lessons {
            row.clear(states, self.lessons);
        }
        row.grow(states);
    }

    /// Finds about `limit` answers, fewer where they take a search, for classes that are expected, or
    /// were asked for again and again, the last one first. True if it found as many.
    pub(super) fn warm(
        &mut self,
        limit: usize,
        find: impl Fn(&NodeGpus, &Request, PolicyKind, &mut u64) -> Result<Cost, Refusal>,
    ) -> bool {
        let pays = |class: &ClassId| self.rows[*class].asked != 1 && self.is_recent(*class);
        let mut classes: Vec<ClassId> = (0..self.rows.len()).filter(pays).collect();
        classes.sort_unstable_by_key(|&class| Reverse(self.rows[class].used));
        let mut found = 0;
        for &class in &classes {
            self.refresh(class);
            while found < limit && self.rows[class].warm < self.states.views.len() {
                let state = self.rows[class].warm;
                self.rows[class].warm += 1;
                found += self.answer(class, state, &find);
            }
        }
        while found < limit
            && let Some(state) = self.fresh.pop()
        {
            let answers = classes.iter();
            let each = answers.map(|&class| self.answer(class, state, &find));
            found += each.fold(0, usize::saturating_add);
        }
        found >= limit
    }

    /// Finds the answer of a class for a state. Returns the cost in answers without a search, or zero if nothing was to
    /// be found.
    fn answer(
        &mut self,
        class: ClassId,
        state: State,
        find: impl Fn(&NodeGpus, &Request, PolicyKind, &mut u64) -> Result<Cost, Refusal>,
    ) -> usize {
        let (view, nodes) = &self.states.views[state];
        let Row { key, answers, .. } = &mut self.rows[class];
        if *nodes == 0 || answers[state].is_some() {
            return 0;
        }
        let mut steps = 0;
        answers[state] = Some(find(view, &key.0, key.1, &mut steps));
        1 + usize::try_from(steps / STEPS_PER_ANSWER).unwrap_or(usize::MAX)
    }

    /// Classes to remember.
    fn limit(&self) -> usize {
        let row = self.states.views.len().max(1).next_multiple_of(ROW);
        (MAX_ANSWERS / row).max(MIN_CLASSES)
    }

    fn new_class(&mut self, key: (Arc<Request>, PolicyKind)) -> ClassId {
        let limit = self.limit();
        let mut row = Row {
            key: key.clone(),
            used: 0,
            asked: 0,
            lessons: 0,
            answers: Vec::new(),
            warm: 0,
        };
        row.clear(self.states.views.len(), self.lessons);
        let oldest = self.oldest().filter(|_| self.rows.len() >= limit);
        let class = match oldest {
            Some(class) => {
                self.classes.swap_remove(&self.rows[class].key);
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

    /// The remembered answer, if there is one.
    pub(super) fn known(&self, class: ClassId, slot: Slot) -> Answer {
        let answers = &self.rows[class].answers;
        answers.get(self.places[slot].state).copied().flatten()
    }

    /// The answer that `find` finds for the node's view, remembered.
    pub(super) fn find(
        &mut self,
        class: ClassId,
        slot: Slot,
        find: impl FnOnce(&NodeGpus) -> Result<Result<Cost, Refusal>, Reason>,
    ) -> Result<Result<Cost, Refusal>, Reason> {
        let state = self.places[slot].state;
        let found = find(&self.states.views[state].0)?;
        if let Some(answer) = self.rows[class].answers.get_mut(state) {
            *answer = Some(found);
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use gpustow_pack::Mib;

    use super::*;

    #[test]
    fn memory_stays_bounded_while_kinds_and_states_appear() {
        let mut answers = Answers::default();
        let request = |kind: u64| {
            Arc::new(Request {
                ram: Mib(kind).into(),
                ..Request::default()
            })
        };
        let held = |answers: &Answers| -> usize {
            let rows = answers.rows.iter();
            rows.map(|row| row.answers.capacity()).sum()
        };
        for kind in 0..4000 {
            answers.expect(&request(kind), PolicyKind::Tight);
        }
        for node in 0..5000 {
            let mut view = Arc::new(NodeGpus {
                cpu_free_milli: node,
                ..NodeGpus::default()
            });
            answers.changed(&node.to_string().into(), Gate::default(), &mut view);
            let class = answers.class(&request(3999), PolicyKind::Tight, 1);
            assert_eq!(answers.rows[class].answers.len(), node as usize + 1);
            if node % 50 == 0 {
                answers.warm(10_000, |_, _, _, _| Err(Refusal::NoRoom));
            }
            assert!(held(&answers) <= MAX_ANSWERS, "{node}: {}", held(&answers));
            assert_eq!(answers.rows.len(), answers.classes.len());
        }
        for kind in 0..4000 {
            let class = answers.class(&request(kind), PolicyKind::Tight, 1);
            assert_eq!(answers.rows[class].key.0, request(kind));
        }
        assert!(held(&answers) <= MAX_ANSWERS, "{}", held(&answers));
    }
}
