//! The content of the page, as JSON that is built once for all pages. Each node has a text, so that comparing texts
//! finds the changes. Memory is in MiB.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpustow_inspect::{
    Borrowings, Cluster, Scope,
    owner::Owners,
    state::{self, room},
};
use gpustow_ledger::NodeView;
use gpustow_pack::{Claim, Mib};
use serde_json::{Value, json};

use crate::lists::{busy, groups, used};

/// The cluster at one moment.
pub(crate) struct Picture {
    nodes: BTreeMap<String, Arc<str>>,
    /// Waiting pods and teams.
    rest: Arc<str>,
}

/// The picture that one page received last.
#[derive(Default)]
pub(crate) struct Seen {
    last: Option<Arc<Picture>>,
}

impl Picture {
    /// The picture of `cluster`.
    pub(crate) fn of(cluster: &Cluster) -> Self {
        let (views, borrowings) = (cluster.views(), Borrowings::of(cluster));
        let owners = Owners::of(cluster);
        let nodes = views.iter().map(|view| {
            let text: Arc<str> = node(cluster, &borrowings, &owners, view).to_string().into();
            (view.name.to_string(), text)
        });
        let waiting: Vec<_> = cluster
            .waiting()
            .into_iter()
            .map(|pod| {
                let claims = pod.facts.asks.claims().iter();
                let mib: Mib = claims.map(Claim::in_sum).sum();
                let owner = gpustow_api::owner::of(&pod.object).pop();
                let queued = cluster.ledger.is_queued(&pod.facts.uid);
                let reason = match queued {
                    true => "queued".to_owned(),
                    false => state::plainly(pod.scheduler_said()),
                };
                json!({
                    "pod": pod.full_name(),
                    "mib": mib.0,
                    "created": pod.facts.created,
                    "said": pod.scheduler_said(),
                    "reason": reason,
                    "queued": queued,
                    "group": pod.facts.group.as_ref().map(ToString::to_string),
                    "owner": owner.map(|it| format!("{}/{} {}", pod.facts.namespace, it.name, it.kind.to_lowercase())),
                })
            })
            .collect();
        let everybody = Scope {
            namespace: None,
            selector: None,
        };
        let teams: Vec<_> = groups(cluster, &everybody, "namespace")
            .into_iter()
            .map(|row| {
                json!({
                    "team": row.group, "pods": row.pods, "waiting": row.waiting,
                    "requested": row.requested.0, "used": row.used.0, "idle": row.idle.0,
                })
            })
            .collect();
        let rest = json!({ "waiting": waiting, "teams": teams })
            .to_string()
            .into();
        Self {
            nodes: nodes.collect(),
            rest,
        }
    }
}

fn texts(all: &[impl ToString]) -> Vec<String> {
    all.iter().map(ToString::to_string).collect()
}

fn node(
    cluster: &Cluster,
    borrowings: &Borrowings<'_>,
    owners: &Owners<'_>,
    view: &NodeView,
) -> Value {
    let state = match state::node_refuses(cluster, view) {
        Some(refuses) => refuses,
        None if !view.problems.is_empty() => "see kubectl gpustow check",
        None => "",
    };
    let cards: Vec<_> = view
        .cards
        .iter()
        .map(|card| {
            let borrowed = borrowings.on(cluster, &view.name, card);
            let pods: Vec<_> = card
                .pods
                .iter()
                .map(|pod| {
                    let info = cluster.pods.get(&pod.uid);
                    let advised = info.and_then(|it| cluster.advised.on(it, &card.uuid));
                    let owner = info.and_then(|it| gpustow_api::owner::of(&it.object).pop());
                    json!([
                        format!("{}/{}", pod.namespace, pod.name),
                        pod.charged.0,
                        pod.used.map(|it| it.0),
                        advised.map(|it| it.0),
                        owner.map(|it| it.name)
                    ])
                })
                .collect();
            json!({
                "gpu": card.index, "model": card.model, "total": card.total.0,
                "capacity": card.capacity.0, "held": card.held.0, "used": used(card).0, "busy": busy(cluster, &view.name, card),
                "available": room(view, card).0, "unmanaged": card.unmanaged.0, "pods": pods,
                "others": texts(&owners.others(&view.name, card)),
                "starting": state::starting(card).into_iter().map(|(pod, _)| pod).collect::<Vec<_>>(),
                "sick": state::refuses(cluster, view, card),
                "noLimit": state::no_limit(cluster, view, card),
                "borrowed": borrowed.memory.0, "reclaimedFrom": borrowed.reclaimed_from, "reservations": texts(&borrowed.reservations),
            })
        })
        .collect();
    json!({ "state": state, "gpus": cards })
}

impl Seen {
    /// The parts of `picture` that were not sent yet; everything at first.
    pub(crate) fn changes(&mut self, picture: &Arc<Picture>) -> Option<String> {
        let old = self.last.replace(picture.clone());
        let is_new = |name: &String, text: &Arc<str>| {
            old.as_ref()
                .is_none_or(|old| old.nodes.get(name) != Some(text))
        };
        let changed = picture
            .nodes
            .iter()
            .filter(|(name, text)| is_new(name, text));
        let gone = old.iter().flat_map(|old| old.nodes.keys());
        let gone = gone.filter(|name| !picture.nodes.contains_key(*name));
        let null: Arc<str> = "null".into();
        let nodes: Vec<String> = changed
            .chain(gone.map(|name| (name, &null)))
            .map(|(name, text)| format!("{}:{text}", Value::from(name.as_str())))
            .collect();
        let rest_is_new = old.as_ref().is_none_or(|old| old.rest != picture.rest);
        if nodes.is_empty() && !rest_is_new {
            return None;
        }
        let rest = if rest_is_new { &*picture.rest } else { "null" };
        let (full, nodes) = (old.is_none(), nodes.join(","));
        Some(format!(
            "{{\"full\":{full},\"rest\":{rest},\"nodes\":{{{nodes}}}}}"
        ))
    }
}
