//! GPUs that pods share with ResourceClaims: where the fence is on, pods get only GPUs that were opened for them.

use std::sync::Arc;

use gpustow_books::HashSet;
use gpustow_pack::Mib;

use crate::Ledger;

/// A GPU, as the fence sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fenced {
    /// Its UUID.
    pub uuid: Arc<str>,
    /// A pod holds something of it.
    pub held: bool,
    /// Something of its node is kept for a pod.
    pub kept: bool,
    /// The memory of it that claims hold by the agent's report.
    pub claimed: Mib,
}

impl Ledger {
    /// The GPUs of a node, reported or held.
    #[must_use]
    pub fn fenced(&self, node: &str) -> Vec<Fenced> {
        let Some((name, node)) = self.parts.books.named_node(node) else {
            return Vec::new();
        };
        let reported = node.gpus().iter().map(|gpu| &*gpu.uuid);
        let held = node.shares().flat_map(|(_, hold, _)| hold.cards());
        let kept = self.parts.earmarks.has_earmarks(name);
        let uuids: HashSet<&str> = reported.chain(held).collect();
        let all = uuids.into_iter().map(|uuid| {
            let gpu = node.gpus().iter().find(|gpu| *gpu.uuid == *uuid);
            let claims = gpu.iter().flat_map(|gpu| &gpu.claims);
            Fenced {
                uuid: uuid.into(),
                held: node.promised(uuid) > Mib::ZERO,
                kept,
                claimed: claims.map(|it| Mib(it.held_mib)).sum(),
            }
        });
        all.collect()
    }

    /// Pods may have these GPUs of the node, and no others where [`Config::fence`](crate::Config::fence) is set. Pods
    /// keep the memory that they hold of other GPUs. True if the set is new.
    pub fn open(&mut self, node: &str, uuids: impl IntoIterator<Item = Arc<str>>) -> bool {
        let change = self.parts.books.open(node, uuids.into_iter().collect());
        let is_new = change.is_some();
        change.into_iter().for_each(|it| self.follow(it));
        is_new
    }

    /// Pods may have none of the GPUs that were opened so far.
    pub(crate) fn close_all(&mut self) {
        for node in self.node_names() {
            self.open(&node, []);
        }
    }

    /// Pods may not have this GPU of the node any more, unless one holds something of it: then nothing changes. True if they
    /// may not.
    pub fn close(&mut self, node: &str, uuid: &str) -> bool {
        let holds = self.parts.books.node(node);
        if holds.is_some_and(|node| node.promised(uuid) > Mib::ZERO) {
            return false;
        }
        let change = self.parts.books.close(node, uuid);
        self.follow(change);
        true
    }
}
