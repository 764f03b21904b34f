//! The books: the nodes and pods that exist, and the resources that each pod holds.
//!
//! Every verb that changes the books returns a [`Change`], which scores and queue follow. The hard bound has one door:
//! an assignment leaves the books only through [`Books::begin_bind`]. The books do not know the costs of nodes or the
//! waiting pods.

mod assumed;
mod budgets;
mod change;
mod gate;
mod gone;
mod groups;
mod hold;
mod index;
mod instances;
mod intree;
mod lending;
mod models;
mod node;
mod nodes;
mod pods;
mod sharing;
mod starts;
mod traffic;
mod twins;
mod unfenced;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{DisruptionBudget, PodFacts};
use gpustow_pack::{Mib, NodeGpus};

pub use change::{Change, Event};
pub(crate) use gate::Gate;
use gone::Gone;
use groups::Groups;
pub use hold::Hold;
use index::Index;
pub(crate) use models::Models;
pub(crate) use node::Settings;
pub use node::{Node, Share, Uid};
use pods::Known;
use sharing::Sharing;
use starts::Starting;
use traffic::Traffic;
use twins::Reporters;

use crate::maps::HashMap;
pub use assumed::AssumedPod;
pub use assumed::Outcome;
pub use pods::{asks, may_come};

/// The known facts. See the module's documentation.
#[derive(Debug, Default)]
pub struct Books {
    nodes: HashMap<Arc<str>, Node>,
    index: Index,
    reporters: Reporters,
    pods: HashMap<Uid, Known>,
    groups: Groups,
    /// By namespace and name.
    budgets: HashMap<Arc<str>, HashMap<Arc<str>, DisruptionBudget>>,
    sharing: Sharing,
    starting: Starting,
    traffic: Traffic,
    /// The pods with a condition that the extender wrote.
    marked: BTreeSet<Uid>,
    /// The pods with a statement whether they sleep.
    sleepers: BTreeSet<Uid>,
    gone: Gone,
    /// See [`Books::copies`].
    copies: u64,
    assumed: HashMap<Uid, AssumedPod>,
    /// The earliest deadline of a reservation whose bind has not started.
    earliest: Duration,
    /// Reservations that ended because no bind came in time.
    expirations: u64,
    /// Pods that an earlier extender may still bind, as they were when no extender could prevent it.
    unfenced: HashMap<Uid, Arc<PodFacts>>,
    models: Models,
    /// A report that has not changed for longer is stale.
    stale_after: Duration,
    settings: Settings,
}

impl Books {
    /// Empty books. A report is stale after so long, and a start ends after so long at most.
    pub fn new(stale_after: Duration, start_timeout: Duration, settings: Settings) -> Self {
        Self {
            stale_after,
            starting: Starting::new(start_timeout),
            settings,
            ..Self::default()
        }
    }

    /// Judges every node by these settings from now on.
    pub fn configure(
        &mut self,
        stale_after: Duration,
        start_timeout: Duration,
        settings: Settings,
    ) -> Change {
        let mut change = Change::default();
        self.stale_after = stale_after;
        self.set_start_timeout(start_timeout, &mut change);
        if self.settings != settings {
            self.settings = settings;
            let names: Vec<Arc<str>> = self.nodes.keys().cloned().collect();
            for name in names {
                self.touch(&name, &mut change);
            }
        }
        change
    }

    /// How many copies of pods, ends of pods and reservations were noted.
    pub fn copies(&self) -> u64 {
        self.copies
    }

    fn tick(&mut self) -> u64 {
        self.copies += 1;
        self.copies - 1
    }

    /// The names of GPU models, and their numbers.
    pub fn models(&self) -> &Models {
        &self.models
    }

    /// The node of this name, if it is known.
    pub fn node(&self, name: &str) -> Option<&Node> {
        self.nodes.get(name)
    }

    /// Does Kubernetes have the node, and not only its report? It deletes the report some time after the node.
    pub fn is_there(&self, name: &str) -> bool {
        self.node(name).is_some_and(|node| node.facts().is_some())
    }

    /// The node of this name, with the stored name.
    pub fn named_node(&self, name: &str) -> Option<(&Arc<str>, &Node)> {
        self.nodes.get_key_value(name)
    }

    /// Every node that is known, by its name.
    pub fn nodes(&self) -> impl ExactSizeIterator<Item = (&Arc<str>, &Node)> {
        self.nodes.iter()
    }

    /// The node at this place in the order of [`Books::nodes`]. A node that goes away moves the last one there: going from the
    /// last to the first misses none.
    pub fn nth_node(&self, place: usize) -> Option<(&Arc<str>, &Node)> {
        self.nodes.get_index(place)
    }

    /// A node's view, to be replaced by an equal one that it shares with others.
    pub(crate) fn shared_view(&mut self, name: &str) -> Option<(Gate, &mut Arc<NodeGpus>)> {
        let node = self.nodes.get_mut(name)?;
        Some((node.gate(), node.shared_view()))
    }

    /// Nodes with at least this much memory free on one card, in ascending order of that amount.
    pub fn with_room(&self, least: Mib) -> impl DoubleEndedIterator<Item = &Arc<str>> {
        self.index.with_room(least)
    }

    /// As [`Books::with_room`], from the end and one by one: the node before this one, and its free memory on one card.
    pub fn room_before(
        &self,
        before: Option<&(Mib, Arc<str>)>,
        least: Mib,
    ) -> Option<&(Mib, Arc<str>)> {
        self.index.room_before(before, least)
    }

    /// Nodes with at least this much memory free in sum, as kube-scheduler sees it, and the amount, in ascending order.
    pub fn with_sum(&self, least: Mib) -> impl Iterator<Item = (Mib, &Arc<str>)> {
        self.index.with_sum(least)
    }

    /// Nodes that exist and do not accept pods yet.
    pub fn arriving(&self) -> &BTreeSet<Arc<str>> {
        self.index.arriving()
    }

    /// Nodes where a pod uses more of a card than it asked for.
    pub fn lending(&self) -> &BTreeSet<Arc<str>> {
        self.index.lending()
    }

    /// Lending nodes where a card may be short of the lent memory.
    pub fn short(&self) -> &BTreeSet<Arc<str>> {
        self.index.short()
    }

    /// Recomputes the data that follow from a node's facts, report and pods.
    fn refresh(&mut self, name: &Arc<str>, change: &mut Change) {
        let Some(node) = self.nodes.get_mut(name) else {
            return;
        };
        let gained = node.refresh(self.settings);
        self.index.put(name, node.marks());
        self.sharing.put(name, node.affinities());
        let name = name.clone();
        change.note(Event::Node { name, gained });
    }

    /// Recomputes a node after a change.
    fn touch(&mut self, name: &str, change: &mut Change) {
        let Some((_, name, node)) = self.nodes.get_full_mut(name) else {
            return;
        };
        let name = name.clone();
        if node.is_empty() {
            self.nodes.swap_remove(&name);
            self.index.forget(&name);
            self.sharing.put(&name, BTreeSet::new());
            self.traffic.forget(&name);
            change.note(Event::NodeGone(name));
        } else {
            self.refresh(&name, change);
            self.touch_others(&name, change);
        }
    }
}
