//! The ledger as people and metrics see it.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_books::{HashMap, Node, Share};
use gpustow_pack::{Compute, Mib, Starts, mig};

use crate::Ledger;
use crate::problems::Problem;

/// A node with GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeView {
    /// Its name.
    pub name: Arc<str>,
    /// Its agent has been silent for too long.
    pub stale: bool,
    /// Its cards in NVML index order.
    pub cards: Vec<CardView>,
    /// Problems that need a person's attention.
    pub problems: Vec<Problem>,
    /// Differences between NVML's view and the assignments.
    pub mismatches: Mismatches,
    /// Cards that pods hold and that no report shows.
    pub unreported: usize,
}

/// Differences between the books and NVML, by kind. A pod that started a moment ago is
/// unconfirmed until its first process is seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mismatches {
    /// Bound pods without a process on any of their cards.
    pub unconfirmed: usize,
    /// Pods with processes on a card that is not theirs, one for each such card.
    pub wrong_gpu: usize,
    /// Processes of pods that are gone, one for each pod and card.
    pub orphan: usize,
}

/// A card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardView {
    /// NVML's UUID.
    pub uuid: String,
    /// NVML's index.
    pub index: u32,
    /// Model name.
    pub model: String,
    /// All of its memory.
    pub total: Mib,
    /// The memory that pods may hold: total − reserved by the driver − headroom.
    pub capacity: Mib,
    /// The memory that is promised to pods, bound and reserving.
    pub held: Mib,
    /// The memory that a new pod may take, live use counted.
    pub free: Mib,
    /// The unmanaged memory: processes outside our pods use it.
    pub unmanaged: Mib,
    /// False while it gets no new pods.
    pub healthy: bool,
    /// That is because an administrator cordoned it ([`gpustow_api::names::CORDONED_GPUS`]).
    pub cordoned: bool,
    /// That is because it is left to ResourceClaims ([`Config::fence`](crate::Config::fence)).
    pub claimed: bool,
    /// The highest limit that the driver would hold a container to here; zero if it holds none.
    pub limit: Mib,
    /// Its compute, if shared.
    pub compute: Compute,
    /// Its memory slices, if MIG instances are made on it.
    pub slices: Option<mig::Slices>,
    /// The shares of pods, by namespace and name.
    pub pods: Vec<PodShare>,
}

/// A pod's share of one card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodShare {
    /// The pod's UID.
    pub uid: Arc<str>,
    /// Its namespace; empty if only its reservation is known yet.
    pub namespace: Arc<str>,
    /// Its name; empty if only its reservation is known yet.
    pub name: Arc<str>,
    /// The memory that is charged on this card.
    pub charged: Mib,
    /// The memory that NVML saw the pod use, if the agent named the pod.
    pub used: Option<Mib>,
    /// How firm the share is.
    pub state: ShareState,
    /// For how many seconds the pod has been starting; none if it has started. Known once a pod has come that starts alone.
    pub starting: Option<u64>,
}

/// How firm a share is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ShareState {
    /// Bound.
    Bound,
    /// Reserved; the bind is to come.
    Reserved,
    /// A bind is under way.
    Binding,
    /// An earlier extender may still bind the pod here.
    Withheld,
}

/// Pods that are assumed: they hold memory between filter and the end of their bind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Assumed {
    /// The number of pods that wait for their bind.
    pub waiting: usize,
    /// The number of pods whose bind is under way.
    pub binding: usize,
}

impl Ledger {
    /// Every node with a GPU report or with holders of GPU memory, by name.
    #[must_use]
    pub fn snapshot(&self, now: Duration) -> Vec<NodeView> {
        let names = self.node_names();
        let views = names.iter().filter_map(|name| {
            let mut view = self.node_view(name, now)?;
            let node = self.parts.books.node(name)?;
            for card in &mut view.cards {
                card.pods = self.pods_on(node, &card.uuid);
            }
            Some(view)
        });
        let mut views = views.collect::<Vec<_>>();
        twice(&mut views);
        views
    }

    /// The names of all nodes, in order, for callers that must not hold the ledger for a whole [`Ledger::snapshot`].
    #[must_use]
    pub fn node_names(&self) -> Vec<Arc<str>> {
        let mut names: Vec<_> = self
            .parts
            .books
            .nodes()
            .map(|(name, _)| name.clone())
            .collect();
        names.sort_unstable();
        names
    }

    /// Is the node's report stale? None if there is none.
    #[must_use]
    pub fn is_stale(&self, node: &str, now: Duration) -> Option<bool> {
        self.parts
            .books
            .is_stale(self.parts.books.node(node)?.gate(), now)
    }

    /// One node, if it has a GPU report or holders of GPU memory; without the pods on its cards.
    #[must_use]
    pub fn node_view(&self, name: &str, now: Duration) -> Option<NodeView> {
        let (name, node) = self.parts.books.named_node(name)?;
        let stale = self.parts.books.is_stale(node.gate(), now);
        let stale = stale.unwrap_or(true);
        let view = NodeView {
            name: name.clone(),
            stale,
            cards: self.cards(node),
            problems: self.problems(node),
            mismatches: match stale {
                true => Mismatches::default(),
                false => self.mismatches(node),
            },
            unreported: unreported(node),
        };
        let known = !view.cards.is_empty() || !view.problems.is_empty() || view.unreported > 0;
        known.then_some(view)
    }

    /// The memory that pods may hold of a card of this node, and all of its memory, if the card is reported.
    #[must_use]
    pub fn card_size(&self, node: &str, uuid: &str) -> Option<(Mib, Mib)> {
        let node = self.parts.books.node(node)?;
        let mut cards = node.gpus().iter().zip(&node.view().cards);
        let (gpu, card) = cards.find(|(gpu, _)| gpu.uuid == uuid)?;
        Some((card.capacity, Mib(gpu.total_mib)))
    }

    fn cards(&self, node: &Node) -> Vec<CardView> {
        node.gpus()
            .iter()
            .zip(&node.view().cards)
            .map(|(gpu, card)| CardView {
                uuid: gpu.uuid.clone(),
                index: gpu.index,
                model: gpu.model.clone(),
                total: Mib(gpu.total_mib),
                capacity: card.capacity,
                held: node.held(&gpu.uuid, |_| true),
                free: card.free,
                unmanaged: Mib(gpu.unmanaged_mib),
                healthy: card.usable,
                cordoned: node.cordons(gpu),
                claimed: node.leaves(gpu) && gpu.healthy && !node.cordons(gpu),
                limit: card.limit,
                compute: card.compute,
                slices: card.slices,
                pods: Vec::new(),
            })
            .collect()
    }

    /// Who holds or uses memory of a card, by namespace and name.
    fn pods_on(&self, node: &Node, uuid: &str) -> Vec<PodShare> {
        let gpu = node.gpus().iter().find(|gpu| *gpu.uuid == *uuid);
        let seen = gpu.map_or(&[][..], |gpu| &gpu.pods);
        let mut pods: Vec<PodShare> = node
            .shares()
            .filter_map(|(uid, hold, share)| {
                let charged = hold.on(uuid);
                let used = seen.iter().find(|used| *used.uid == **uid);
                let used = used.map(|used| Mib(used.used_mib));
                let facts = self.parts.books.pod(uid);
                (charged > Mib::ZERO || used.is_some()).then(|| PodShare {
                    uid: uid.clone(),
                    namespace: facts.map_or_else(|| "".into(), |f| f.namespace.clone()),
                    name: facts.map_or_else(|| "".into(), |f| f.name.clone()),
                    charged,
                    used,
                    state: self.state(uid, share),
                    starting: (hold.starts() > Starts::None)
                        .then(|| self.parts.books.start_age(uid)),
                })
            })
            .collect();
        pods.sort_unstable_by(|a, b| {
            (&a.namespace, &a.name, &a.uid).cmp(&(&b.namespace, &b.name, &b.uid))
        });
        pods
    }

    fn state(&self, uid: &str, share: Share) -> ShareState {
        match share {
            Share::Bound => ShareState::Bound,
            Share::Reserved if self.is_binding(uid) => ShareState::Binding,
            Share::Reserved => ShareState::Reserved,
            Share::Withheld => ShareState::Withheld,
        }
    }

    fn mismatches(&self, node: &Node) -> Mismatches {
        let gpus = || node.gpus().iter();
        let mut found = Mismatches::default();
        for gpu in gpus() {
            for used in &gpu.pods {
                let hold = node.bound().get(used.uid.as_str());
                if hold.is_some_and(|hold| hold.on(&gpu.uuid) > Mib::ZERO) {
                    continue;
                }
                if self.parts.books.pod(&used.uid).is_some() {
                    found.wrong_gpu += 1;
                } else {
                    found.orphan += 1;
                }
            }
        }
        for (uid, hold) in node.bound() {
            let mut mine = gpus()
                .filter(|gpu| hold.on(&gpu.uuid) > Mib::ZERO)
                .peekable();
            let holds = mine.peek().is_some();
            let seen = mine.any(|gpu| gpu.pods.iter().any(|used| *used.uid == **uid));
            found.unconfirmed += usize::from(holds && !seen);
        }
        found
    }

    /// The ledger's copy of a pod.
    #[must_use]
    pub fn pod(&self, uid: &str) -> Option<Arc<PodFacts>> {
        self.parts.books.pod(uid).cloned()
    }

    /// The ledger's copy of a pod, with the ledger's clock before this copy came.
    #[must_use]
    pub fn copy(&self, uid: &str) -> Option<(Arc<PodFacts>, u64)> {
        self.parts.books.copy(uid)
    }

    /// Every pod that the ledger knows.
    pub fn pods(&self) -> impl Iterator<Item = &Arc<PodFacts>> {
        self.parts.books.pods()
    }

    /// The pods that are asked to give memory back or to end, and those for which room is kept, by their conditions.
    pub fn marked(&self) -> impl Iterator<Item = &Arc<PodFacts>> {
        self.parts.books.marked()
    }

    /// How many pods are assumed.
    #[must_use]
    pub fn assumed(&self) -> Assumed {
        let held = self.parts.books.assumed_pods();
        let (binding, waiting): (Vec<_>, Vec<_>) = held.partition(|held| held.is_binding());
        Assumed {
            waiting: waiting.len(),
            binding: binding.len(),
        }
    }

    /// Reservations that ended because no bind came in time, since the start.
    #[must_use]
    pub fn expirations(&self) -> u64 {
        self.parts.books.expirations()
    }
}

/// Different cards that pods hold on the node and that are not in its report.
fn unreported(node: &Node) -> usize {
    let reported = |uuid: &str| node.gpus().iter().any(|gpu| *gpu.uuid == *uuid);
    let mut missing: Vec<&str> = Vec::new();
    for hold in node.bound().values() {
        missing.extend(hold.cards().filter(|uuid| !reported(uuid)));
    }
    missing.sort_unstable();
    missing.dedup();
    missing.len()
}

impl Ledger {
    /// The usable card with the most free memory among the nodes named: node, index, MiB.
    #[must_use]
    pub fn largest_free<'n>(&self, names: &[&'n str]) -> Option<(&'n str, usize, Mib)> {
        let view = |name: &&'n str| Some((*name, self.parts.books.node(name)?.view()));
        let cards = names.iter().filter_map(view).flat_map(|(name, view)| {
            let all = view.cards.iter().enumerate();
            let usable = all.filter(|(_, card)| card.usable);
            usable.map(move |(index, card)| (name, index, card.free))
        });
        cards.max_by(|a, b| (a.2, b.0, b.1).cmp(&(b.2, a.0, a.1)))
    }
}

/// Adds a problem to both nodes for each card that several nodes report.
pub fn twice(nodes: &mut [NodeView]) {
    let mut first: HashMap<&str, usize> = HashMap::default();
    let mut found = Vec::new();
    for (index, node) in nodes.iter().enumerate() {
        for card in &node.cards {
            match first.get(&*card.uuid) {
                Some(&other) => found.push((other, index, card.uuid.clone())),
                None => drop(first.insert(&card.uuid, index)),
            }
        }
    }
    for (one, other, uuid) in found {
        let names = [one, other].map(|index| nodes.get(index).map(|node| node.name.clone()));
        let [Some(first), Some(second)] = names else {
            continue;
        };
        for (index, other) in [(one, second), (other, first)] {
            let (uuid, node) = (uuid.clone(), nodes.get_mut(index));
            node.into_iter().for_each(|node| {
                node.problems.push(Problem::Twice {
                    uuid: uuid.clone(),
                    other: other.clone(),
                })
            });
        }
    }
}
