//! Where a pod is, or would go.

use gpustow_ledger::NodeView;
use gpustow_pack::{Choice, Mib};
use serde::Serialize;

use super::bytes;

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Location {
    pub(super) node: String,
    pub(super) gpus: Vec<LocationGpu>,
    /// Since the node's last report, by the clocks of two machines.
    pub(super) agent_age_seconds: Option<u64>,
    /// Why no new pod goes there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) refuses: Option<&'static str>,
    /// Nodes that would do, and the place of this one among them, 1 for the best.
    pub(super) feasible_nodes: usize,
    pub(super) rank: usize,
    /// Why these GPUs are the best ones, by the books as they are now, without the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) because: Option<String>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct LocationGpu {
    pub(super) gpu: String,
    #[serde(rename = "requestedBytes", serialize_with = "bytes")]
    pub(super) requested: Mib,
    /// Room on the card once the pod is there.
    #[serde(rename = "availableBytes", serialize_with = "bytes")]
    pub(super) room: Mib,
}

impl Location {
    /// The best of so many nodes, on which the pod would go so.
    pub(super) fn best(view: &NodeView, choice: &Choice, feasible_nodes: usize) -> Self {
        let gpus = choice.placement.charges.iter().filter_map(|&(index, mib)| {
            let card = view.cards.get(index)?;
            Some(LocationGpu {
                gpu: card.index.to_string(),
                requested: mib,
                room: card.free.minus(mib),
            })
        });
        Self {
            node: view.name.to_string(),
            agent_age_seconds: None,
            refuses: None,
            gpus: gpus.collect(),
            feasible_nodes,
            rank: 1,
            because: None,
        }
    }
}
