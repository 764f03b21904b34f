//! Every state that a protocol can reach, breadth first.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Something with states.
pub(crate) trait Model {
    type State: Clone + Hash;
    type Action: Copy + Debug;
    fn start(&self) -> Self::State;
    /// The possible next actions, and the states to which they lead.
    fn next(&self, state: &Self::State) -> Vec<(Self::Action, Self::State)>;
    fn is_wrong(&self, state: &Self::State) -> bool;
}

/// The extent of the search, and its finding.
#[derive(Debug)]
pub(crate) struct Found<A> {
    pub(crate) states: usize,
    /// Of the longest of the shortest ways.
    pub(crate) depth: usize,
    /// The shortest way to a wrong state.
    pub(crate) wrong: Option<Vec<A>>,
}

fn fingerprint(state: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    state.hash(&mut hasher);
    hasher.finish()
}

/// Looks at every state, or stops at the first wrong one. States with the same 64-bit hash are taken
/// for one.
pub(crate) fn search<M: Model>(model: &M) -> Found<M::Action> {
    let start = model.start();
    let mut from: HashMap<u64, Option<(u64, M::Action)>> = HashMap::new();
    from.insert(fingerprint(&start), None);
    let mut next = VecDeque::from([(start, 0)]);
    let mut depth = 0;
    while let Some((state, steps)) = next.pop_front() {
        depth = steps;
        let here = fingerprint(&state);
        if model.is_wrong(&state) {
            let mut way = Vec::new();
            let mut at = here;
            while let Some(Some((before, action))) = from.get(&at) {
                way.push(*action);
                at = *before;
            }
            way.reverse();
            let wrong = Some(way);
            return Found {
                states: from.len(),
                depth,
                wrong,
            };
        }
        for (action, state) in model.next(&state) {
            if let Entry::Vacant(new) = from.entry(fingerprint(&state)) {
                new.insert(Some((here, action)));
                next.push_back((state, steps + 1));
            }
        }
    }
    Found {
        states: from.len(),
        depth,
        wrong: None,
    }
}
