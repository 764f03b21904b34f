//! Nodes by the properties by which a periodic look selects them, so that it looks at no others.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use gpustow_pack::Mib;

/// The indexed properties of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Marks {
    /// The largest piece of memory that is free on one card which takes pods.
    pub(super) largest: Mib,
    /// A pod uses more of a card than it asked for.
    pub(super) lends: bool,
    /// A card may have less free than a pod or the headroom is to have.
    pub(super) may_be_short: bool,
    /// The free sum that kube-scheduler sees there, if it sees the node.
    pub(super) in_sum: Option<Mib>,
    /// The node exists and does not accept pods yet: it does not report, or has the startup taint.
    pub(super) arrives: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Index {
    by_room: BTreeSet<(Mib, Arc<str>)>,
    by_sum: BTreeSet<(Mib, Arc<str>)>,
    arriving: BTreeSet<Arc<str>>,
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
        if let Some(in_sum) = marks.in_sum {
            self.by_sum.insert((in_sum, name.clone()));
        }
        if marks.arrives {
            self.arriving.insert(name.clone());
        }
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
        self.arriving.remove(&name);
        if let Some(in_sum) = marks.in_sum {
            self.by_sum.remove(&(in_sum, name.clone()));
        }
        self.by_room.remove(&(marks.largest, name));
    }

    /// Nodes with so much free on one card.
    pub(super) fn with_room(&self, least: Mib) -> impl DoubleEndedIterator<Item = &Arc<str>> {
        let nodes = self.by_room.range((least, Arc::from(""))..);
        nodes.map(|(_, name)| name)
    }

    /// The node with most room before this one, if so much is free there on one card.
    pub(super) fn room_before(
        &self,
        before: Option<&(Mib, Arc<str>)>,
        least: Mib,
    ) -> Option<&(Mib, Arc<str>)> {
        let before = before.map_or(Bound::Unbounded, Bound::Excluded);
        let mut nodes = self
            .by_room
            .range::<(Mib, Arc<str>), _>((Bound::Unbounded, before));
        nodes.next_back().filter(|(room, _)| *room >= least)
    }

    /// Nodes with so much free in sum, and how much.
    pub(super) fn with_sum(&self, least: Mib) -> impl Iterator<Item = (Mib, &Arc<str>)> {
        let nodes = self.by_sum.range((least, Arc::from(""))..);
        nodes.map(|(in_sum, name)| (*in_sum, name))
    }

    pub(super) fn arriving(&self) -> &BTreeSet<Arc<str>> {
        &self.arriving
    }

    pub(super) fn lending(&self) -> &BTreeSet<Arc<str>> {
        &self.lending
    }

    pub(super) fn short(&self) -> &BTreeSet<Arc<str>> {
        &self.short
    }
}
