//! The cards and their pods, read from the simulated API server's objects alone. The extender's state is not used.

use std::collections::BTreeMap;
use std::time::Duration;

use gpustow_api::{Assignment, GpuNode, names};
use gpustow_simworld::Kind;
use serde::Deserialize as _;
use serde_json::Value;

use super::api_server::{Shared, all};

/// A card and the pods on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CardPicture {
    pub(crate) uuid: String,
    pub(crate) model: String,
    pub(crate) total_mib: u64,
    /// Pod name and the MiB that it holds, in the order of the names.
    pub(crate) pods: Vec<(String, u64)>,
}

impl CardPicture {
    pub(crate) fn held_mib(&self) -> u64 {
        self.pods.iter().map(|(_, mib)| mib).sum()
    }
}

/// A node and its cards by index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodePicture {
    pub(crate) name: String,
    pub(crate) cards: Vec<CardPicture>,
}

/// The cluster at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Picture {
    pub(crate) nodes: Vec<NodePicture>,
    /// Pods without a node.
    pub(crate) waiting: usize,
    /// Pods with a node.
    pub(crate) running: usize,
    /// Bound pods whose cards are not known: there must be none.
    pub(crate) lost: usize,
}

/// A picture of a cluster at a virtual time.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub(crate) at: Duration,
    pub(crate) picture: Picture,
}

impl Picture {
    /// Looks at every GpuNode and pod.
    pub(crate) fn of(server: &Shared) -> Self {
        let mut picture = Self::default();
        let mut places = BTreeMap::new();
        for report in all(server, Kind::GpuNode) {
            let Ok(report) = GpuNode::deserialize(&*report) else {
                continue;
            };
            let name = report.metadata.name.unwrap_or_default();
            let gpus = report.status.unwrap_or_default().gpus;
            for (card, gpu) in gpus.iter().enumerate() {
                places.insert(gpu.uuid.clone(), (picture.nodes.len(), card));
            }
            let cards = gpus.into_iter().map(|gpu| CardPicture {
                uuid: gpu.uuid,
                model: gpu.model,
                total_mib: gpu.total_mib,
                pods: Vec::new(),
            });
            let cards = cards.collect();
            picture.nodes.push(NodePicture { name, cards });
        }
        let mut pods = all(server, Kind::Pod);
        pods.sort_by_cached_key(|pod| text(pod, ["metadata", "uid"]).to_owned());
        for pod in &pods {
            let name = text(pod, ["metadata", "name"]).to_owned();
            let node = text(pod, ["spec", "nodeName"]);
            if node.is_empty() {
                picture.waiting += 1;
                continue;
            }
            picture.running += 1;
            let written = text(pod, ["metadata", "annotations", names::ASSIGNMENT]);
            let assignment = Assignment::decode(written).ok();
            let charges = assignment.map(|assignment| assignment.charges);
            let on_node = |nodes: &[NodePicture], place: &(usize, usize)| {
                nodes.get(place.0).is_some_and(|it| it.name == node)
            };
            let placed = charges.iter().flatten().map(|(uuid, mib)| {
                let place = places.get(&**uuid)?;
                on_node(&picture.nodes, place).then_some((*place, mib.0))
            });
            match placed.collect::<Option<Vec<_>>>() {
                Some(placed) if !placed.is_empty() => {
                    for ((node, card), mib) in placed {
                        let card = picture
                            .nodes
                            .get_mut(node)
                            .and_then(|it| it.cards.get_mut(card));
                        card.into_iter()
                            .for_each(|card| card.pods.push((name.clone(), mib)));
                    }
                }
                _ => picture.lost += 1,
            }
        }
        picture
    }

    pub(crate) fn cards(&self) -> impl Iterator<Item = &CardPicture> {
        self.nodes.iter().flat_map(|node| &node.cards)
    }

    /// Cards that hold more than they have.
    pub(crate) fn over_committed(&self) -> usize {
        let over = |card: &&CardPicture| card.held_mib() > card.total_mib;
        self.cards().filter(over).count()
    }

    /// The share of all memory that pods hold, 0 to 1.
    pub(crate) fn allocated(&self) -> f64 {
        let total: u64 = self.cards().map(|card| card.total_mib).sum();
        let held: u64 = self.cards().map(CardPicture::held_mib).sum();
        held as f64 / total.max(1) as f64
    }
}

/// The text at that path, or an empty one. Unlike a JSON pointer, the path is not parsed: this runs at every change.
fn text<'a, const N: usize>(object: &'a Value, path: [&str; N]) -> &'a str {
    let found = path.iter().try_fold(object, |it, field| it.get(field));
    found.and_then(Value::as_str).unwrap_or_default()
}
