//! Which nodes have changed since a look.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::Arc;

use gpustow_books::HashMap;

/// The last change of each node.
#[derive(Debug, Default)]
pub struct Changes {
    count: u64,
    of: HashMap<Arc<str>, u64>,
    order: BTreeMap<u64, Arc<str>>,
}

impl Changes {
    /// The node has gained room.
    pub fn note(&mut self, node: &Arc<str>) {
        self.forget(node);
        self.count += 1;
        self.of.insert(node.clone(), self.count);
        self.order.insert(self.count, node.clone());
    }

    /// The node is gone.
    pub fn forget(&mut self, node: &str) {
        if let Some(at) = self.of.swap_remove(node) {
            self.order.remove(&at);
        }
    }

    /// The number of the last change.
    pub fn last(&self) -> u64 {
        self.count
    }

    /// Nodes that have changed since that change, each with its last one.
    pub fn since(&self, seen: u64) -> impl Iterator<Item = (u64, &Arc<str>)> {
        let later = self.order.range((Excluded(seen), Unbounded));
        later.map(|(number, node)| (*number, node))
    }
}
