//! Pods are many and much alike, and so are nodes: this module keeps their common values once.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::Arc;

use gpustow_pack::Request;

use crate::intree::{Constraints, Label};
use crate::{Asks, Assignment, Group, NodeFacts, PodFacts};

/// [`Interned`] drops unused values after this number of new values, or after as many as it holds, if that is more.
const SWEEP: usize = 1024;

/// The values that pods, or nodes, have in common.
#[derive(Debug, Default)]
pub struct Shared {
    texts: Interned<str>,
    lists: Interned<[Box<str>]>,
    requests: Interned<Request>,
    assignments: Interned<Assignment>,
    constraints: Interned<Constraints>,
    labels: Interned<Label>,
    sets: Interned<[Label]>,
}

impl Shared {
    /// Replaces each value that another pod has, too, by that pod's copy.
    pub fn share(&mut self, pod: &mut PodFacts) {
        self.texts.share(&mut pod.namespace);
        let group = pod.group.as_mut().map(Group::name_mut);
        for text in [&mut pod.node, &mut pod.nominated].into_iter().flatten() {
            self.texts.share(text);
        }
        group.into_iter().for_each(|name| self.texts.share(name));
        self.lists.share(&mut pod.containers);
        self.lists.share(&mut pod.models);
        if let Asks::For(request) | Asks::Nothing(request) = &mut pod.asks {
            self.requests.share(request);
        }
        if let Some(Ok(assignment)) = &mut pod.assignment {
            let own = Arc::get_mut(assignment).into_iter();
            own.flat_map(Assignment::uuids_mut)
                .for_each(|uuid| self.texts.share(uuid));
            self.assignments.share(assignment);
        }
        self.constraints.share(&mut pod.constraints);
        self.sets.share(&mut pod.labels);
    }

    /// Replaces each label that another node has, too, by that node's copy.
    pub fn share_node(&mut self, node: &mut NodeFacts) {
        for label in &mut node.labels {
            self.labels.share(label);
        }
    }
}

/// Values of which equal ones are kept once.
#[derive(Debug)]
pub struct Interned<T: ?Sized> {
    values: HashSet<Arc<T>>,
    /// The number of new values until the next search for unused values.
    left: usize,
}

impl<T: ?Sized> Default for Interned<T> {
    fn default() -> Self {
        Self {
            values: HashSet::new(),
            left: SWEEP,
        }
    }
}

impl<T: ?Sized + Eq + Hash> Interned<T> {
    /// Replaces a value by an equal one that is there already.
    pub fn share(&mut self, value: &mut Arc<T>) {
        if let Some(known) = self.values.get(&**value) {
            value.clone_from(known);
            return;
        }
        if self.left == 0 {
            self.values.retain(|value| Arc::strong_count(value) > 1);
            self.left = self.values.len().max(SWEEP);
        }
        self.left -= 1;
        self.values.insert(value.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_are_kept_once_and_unused_ones_are_dropped() {
        let mut known = Interned::<str>::default();
        let (mut a, mut b): (Arc<str>, Arc<str>) = ("node".into(), "node".into());
        known.share(&mut a);
        known.share(&mut b);
        assert!(Arc::ptr_eq(&a, &b));
        for index in 0..10 * SWEEP {
            known.share(&mut index.to_string().into());
        }
        assert!(known.values.len() <= 2 * SWEEP);
        assert!(known.values.contains("node"));
    }
}
