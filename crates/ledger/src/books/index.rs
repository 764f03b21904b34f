//! Nodes by what a periodic look asks of them, so that it looks at no others.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gpustow_pack::Mib;

/// What the index knows of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Marks {
    /// The largest piece of memory that is free on one card which takes pods.
    pub(super) largest: Mib,
    /// A pod uses more of a card than it asked for.
    pub(super) lends: bool,
    /// A card may have less free than a pod or the headroom is to have.
    pub(super) may_be_short: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Index {
    by_room: BTreeSet<(Mib, Arc<str>)>,
    lending: BTreeSet<Arc<str>>,
    short: BTreeSet<Arc<str>>,
    known: BTreeMap<Arc<str>, Marks>,
}

impl Index {
    /// The node has changed.
    pub(super) fn put(&mut self, name: &Arc<str>, marks: Marks) {
        if self.known.get(name) == Some(&marks) {
            return;
        }
        self.forget(name);
        self.by_room.insert((marks.largest, name.clone()));
        if marks.lends {
            self.lending.insert(name.clone());
        }
        if marks.may_be_short {
            self.short.insert(name.clone());
        }
        self.known.insert(name.clone(), marks);
    }

    /// The node is gone.
    pub(super) fn forget(&mut self, name: &str) {
        let Some((name, marks)) = self.known.remove_entry(name) else {
            return;
        };
        self.lending.remove(&name);
        self.short.remove(&name);
        self.by_room.remove(&(marks.largest, name));
    }

    /// Nodes with so much free on one card.
    pub(super) fn with_room(&self, least: Mib) -> impl DoubleEndedIterator<Item = &Arc<str>> {
        let nodes = self.by_room.range((least, Arc::from(""))..);
        nodes.map(|(_, name)| name)
    }

    pub(super) fn lending(&self) -> &BTreeSet<Arc<str>> {
        &self.lending
    }

    pub(super) fn short(&self) -> &BTreeSet<Arc<str>> {
        &self.short
    }
}
