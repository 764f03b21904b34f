//! The GPUs that lack least for a pod, and whose end would make the room.

use gpustow_api::PodFacts;
use gpustow_inspect::{Cluster, Trial, memory, state};
use gpustow_ledger::{CardView, NodeView, PodShare};
use gpustow_pack::Mib;
use serde::Serialize;

/// Cards that are named.
const NEAREST: usize = 5;

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Near {
    pub(super) node: String,
    pub(super) gpu: u32,
    pub(super) gpu_uuid: String,
    pub(super) model: String,
    #[serde(rename = "roomBytes", serialize_with = "super::bytes")]
    pub(super) room: Mib,
    #[serde(rename = "lacksBytes", serialize_with = "super::bytes")]
    pub(super) lacks: Mib,
    pub(super) healthy: bool,
    /// Why it takes no pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) refuses: Option<String>,
    /// Why the driver holds no limit there, if the pod needs one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) no_limit: Option<&'static str>,
    /// Pods whose end would make the room; empty if none would.
    pub(super) freed_by: Vec<String>,
}

/// Why a card takes no pods, or none with a limit; what it lacks; where it is.
type Found<'a> = (
    (Option<String>, Option<&'static str>),
    Mib,
    &'a NodeView,
    &'a CardView,
);

/// The cards that lack least. Memory is counted per card: what the largest asking container wants
/// on one GPU.
pub(super) fn nearest(cluster: &Cluster, trial: &Trial<'_>, facts: &PodFacts) -> Vec<Near> {
    let Ok(request) = &facts.request else {
        return Vec::new();
    };
    let need = request
        .claims
        .iter()
        .map(|claim| claim.mib)
        .max()
        .unwrap_or_default();
    let cards = trial
        .asked
        .iter()
        .flat_map(|view| view.cards.iter().map(|card| (*view, card)));
    let mut near: Vec<Found<'_>> = cards
        .filter(|(_, card)| card.capacity >= need)
        .map(|(view, card)| {
            let target = if request.exclusive {
                card.capacity
            } else {
                need
            };
            let refuses = state::refuses(cluster, view, card);
            let no_limit = state::no_limit(cluster, view, card);
            let no_limit = no_limit.filter(|_| refuses.is_none() && request.limit() > Mib::ZERO);
            ((refuses, no_limit), target.minus(card.free), view, card)
        })
        .collect();
    near.sort_by_key(|((refuses, no_limit), lacks, view, card)| {
        (
            refuses.is_some() || no_limit.is_some(),
            *lacks,
            view.name.clone(),
            card.index,
        )
    });
    near.truncate(NEAREST);
    let near = near
        .into_iter()
        .map(|((refuses, no_limit), lacks, view, card)| Near {
            node: view.name.to_string(),
            gpu: card.index,
            gpu_uuid: card.uuid.clone(),
            model: card.model.clone(),
            room: card.free,
            lacks,
            freed_by: match (&refuses, no_limit) {
                (None, None) => freed_by(&card.pods, lacks),
                _ => Vec::new(),
            },
            healthy: card.healthy,
            refuses,
            no_limit,
        });
    near.collect()
}

/// The fewest pods, and then the smallest, whose end would free `lacks`.
fn freed_by(pods: &[PodShare], lacks: Mib) -> Vec<String> {
    let takes = |pod: &PodShare| pod.charged.max(pod.used.unwrap_or_default());
    let mut by_size: Vec<_> = pods.iter().collect();
    by_size.sort_by_key(|pod| (takes(pod), pod.namespace.clone(), pod.name.clone()));
    let name = |pod: &PodShare| format!("{}/{} ({})", pod.namespace, pod.name, memory(takes(pod)));
    if lacks == Mib::ZERO {
        return Vec::new();
    }
    if let Some(one) = by_size.iter().find(|pod| takes(pod) >= lacks) {
        return vec![name(one)];
    }
    let (mut freed, mut names) = (Mib::ZERO, Vec::new());
    for pod in by_size.iter().rev() {
        freed = freed + takes(pod);
        names.push(name(pod));
        if freed >= lacks {
            return names;
        }
    }
    Vec::new()
}
