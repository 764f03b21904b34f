//! `nodes`, `gpus`, `pods` and `report`: rows from the ledger's views.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use gpustow_inspect::{
    Borrowed, Borrowings, Cluster, PodInfo, Scope,
    owner::{Holder, Owners},
    state::{self, room},
};
use gpustow_ledger::{CardView, NodeView};
use gpustow_pack::{Compute, Mib};
use kube::ResourceExt as _;
use serde_json::json;

use crate::answer::Answer;
use crate::output::Shown::{Always, Table, Terminal, Wide};
use crate::output::{Column, Listing, Value, column};

/// The memory that the card's pods use of it, if the agent reports that.
pub(crate) fn used(card: &CardView) -> Mib {
    card.pods.iter().filter_map(|pod| pod.used).sum()
}

/// The time in which a kernel ran on the card, in percent, from its agent's last report.
pub(crate) fn busy(cluster: &Cluster, node: &str, card: &CardView) -> Option<u32> {
    cluster.gpu(node, &card.uuid)?.utilization
}

/// A part of a GPU's memory or of a node's, in percent of it.
fn percent(part: Mib, of: Mib) -> Value {
    (part.0 * 100).checked_div(of.0).into()
}

pub(crate) struct NodeRow {
    name: String,
    models: Vec<String>,
    gpus: u64,
    room: Mib,
    largest: Mib,
    whole: u64,
    memory: Mib,
    requested: Mib,
    used: Mib,
    unmanaged: Mib,
    state: Value,
    age: Option<u64>,
    driver: Option<String>,
}

fn models<'a>(cards: impl Iterator<Item = &'a CardView>) -> Vec<String> {
    let mut models: Vec<_> = cards.map(|card| card.model.clone()).collect();
    models.sort();
    models.dedup();
    models
}

fn node_row(cluster: &Cluster, view: &NodeView) -> NodeRow {
    let cards = &view.cards;
    let cordoned = cards.iter().filter(|card| card.cordoned).count();
    let unhealthy = |card: &&CardView| !card.healthy && !card.cordoned && !card.claimed;
    let unhealthy = cards.iter().filter(unhealthy).count();
    let age = cluster.report_age(&view.name);
    let state = if let Some(refuses) = state::node_refuses(cluster, view) {
        Value::Bad(refuses.to_owned())
    } else if unhealthy > 0 {
        Value::Bad(format!("{unhealthy} unhealthy"))
    } else if cordoned > 0 {
        Value::Bad(format!("{cordoned} cordoned"))
    } else if !view.problems.is_empty() {
        Value::Bad("see check".to_owned())
    } else {
        Value::Good("ready".to_owned())
    };
    let report = cluster.reports.get(&*view.name);
    NodeRow {
        name: view.name.to_string(),
        models: models(cards.iter()),
        gpus: cards.len() as u64,
        room: cards.iter().map(|card| room(view, card)).sum(),
        largest: cards
            .iter()
            .map(|card| room(view, card))
            .max()
            .unwrap_or_default(),
        whole: cards.iter().filter(|card| is_whole(view, card)).count() as u64,
        memory: cards.iter().map(|card| card.capacity).sum(),
        requested: cards.iter().map(|card| card.held).sum(),
        used: cards.iter().map(used).sum(),
        unmanaged: cards.iter().map(|card| card.unmanaged).sum(),
        state,
        age,
        driver: report.and_then(|report| report.driver.clone()),
    }
}

fn is_whole(view: &NodeView, card: &CardView) -> bool {
    room(view, card) == card.capacity && card.capacity > Mib::ZERO
}

/// Nodes with GPUs, the sum first.
pub(crate) fn nodes(cluster: &Cluster) -> Listing<NodeRow> {
    let views = cluster.views();
    let rows: Vec<_> = views.iter().map(|view| node_row(cluster, view)).collect();
    let sum = |of: fn(&NodeRow) -> Mib| rows.iter().map(of).sum();
    let not_ready = rows
        .iter()
        .filter(|row| matches!(row.state, Value::Bad(_)))
        .count();
    let total = NodeRow {
        name: "*".to_owned(),
        models: models(views.iter().flat_map(|view| &view.cards)),
        gpus: rows.iter().map(|row| row.gpus).sum(),
        room: sum(|row| row.room),
        largest: rows.iter().map(|row| row.largest).max().unwrap_or_default(),
        whole: rows.iter().map(|row| row.whole).sum(),
        memory: sum(|row| row.memory),
        requested: sum(|row| row.requested),
        used: sum(|row| row.used),
        unmanaged: sum(|row| row.unmanaged),
        state: match not_ready {
            0 => Value::Good("ready".to_owned()),
            _ => Value::Bad(format!("{not_ready} not ready")),
        },
        age: rows.iter().filter_map(|row| row.age).max(),
        driver: None,
    };
    Listing {
        kind: "GpuNodeList",
        columns: vec![
            column("NODE", "node", Always, |row| row.name.clone().into()),
            column("MODEL", "models", Always, |row| row.models.clone().into()),
            column("GPUS", "gpus", Always, |row| row.gpus.into()),
            column("AVAILABLE", "availableBytes", Always, |row| row.room.into()),
            column("LARGEST", "largestBytes", Always, |row| row.largest.into()),
            column("WHOLE", "wholeGpus", Always, |row| row.whole.into()),
            column("REQUESTED", "requestedBytes", Always, |row| {
                row.requested.into()
            }),
            column("USED", "usedBytes", Always, |row| row.used.into()),
            column("UNMANAGED", "unmanagedBytes", Always, |row| {
                row.unmanaged.into()
            }),
            column("STATE", "state", Always, |row| row.state.clone()),
            column("MEMORY", "memoryBytes", Wide, |row| row.memory.into()),
            column("REQUESTED%", "requestedPercent", Wide, |row| {
                percent(row.requested, row.memory)
            }),
            column("USED%", "usedPercent", Wide, |row| {
                percent(row.used + row.unmanaged, row.memory)
            }),
            column("AGENT-AGE", "agentAgeSeconds", Wide, |row| {
                row.age.map_or(Value::Nothing, Value::Age)
            }),
            column("DRIVER", "driver", Wide, |row| row.driver.clone().into()),
        ],
        total: (rows.len() > 1).then_some(total),
        rows,
        name: |row| format!("gpunode/{}", row.name),
        empty: "No node reports GPUs: are gpustow's agents running?",
        answer: Answer::Yes,
    }
}

pub(crate) struct GpuRow {
    pub(crate) node: String,
    pub(crate) card: CardView,
    pub(crate) room: Mib,
    /// Per cent of the time in which a kernel ran, as its agent reported last.
    busy: Option<u32>,
    /// Why it does not accept pods.
    refuses: Option<String>,
    /// Why the driver holds no limit there.
    no_limit: Option<&'static str>,
    /// Who holds something of it.
    pub(crate) owners: Vec<String>,
    /// The holders that did not get it from gpustow.
    others: Vec<Holder>,
    borrowed: Borrowed,
}

/// GPUs, of one node or of all.
pub(crate) fn gpus(cluster: &Cluster, node: Option<&str>) -> Result<Listing<GpuRow>> {
    let views = cluster.views();
    if let Some(name) = node {
        ensure!(
            views.iter().any(|view| *view.name == *name),
            "no GPU node {name}"
        );
    }
    let views = views
        .into_iter()
        .filter(|view| node.is_none_or(|name| *view.name == *name));
    let (borrowings, owners) = (Borrowings::of(cluster), Owners::of(cluster));
    let rows = views.flat_map(|view| {
        let row = |card: &CardView| GpuRow {
            borrowed: borrowings.on(cluster, &view.name, card),
            node: view.name.to_string(),
            room: room(&view, card),
            busy: busy(cluster, &view.name, card),
            refuses: state::refuses(cluster, &view, card),
            no_limit: state::no_limit(cluster, &view, card),
            owners: owners.on(&view.name, card),
            others: owners.others(&view.name, card),
            card: card.clone(),
        };
        view.cards.iter().map(row).collect::<Vec<_>>()
    });
    Ok(Listing {
        kind: "GpuList",
        columns: gpu_columns(),
        rows: rows.collect(),
        total: None,
        name: |row| format!("gpu/{}", row.card.uuid),
        empty: "No node reports GPUs: are gpustow's agents running?",
        answer: Answer::Yes,
    })
}

fn gpu_columns() -> Vec<Column<GpuRow>> {
    vec![
        column("NODE", "node", Always, |row| row.node.clone().into()),
        column("GPU", "gpu", Always, |row| row.card.index.into()),
        column("MODEL", "model", Always, |row| {
            row.card.model.clone().into()
        }),
        column("", "", Terminal, |row| {
            Value::Bar(
                row.card.held,
                used(&row.card) + row.card.unmanaged,
                row.card.free,
            )
        }),
        column("REQUESTED", "requestedBytes", Always, |row| {
            row.card.held.into()
        }),
        column("USED", "usedBytes", Always, |row| used(&row.card).into()),
        column("UNMANAGED", "unmanagedBytes", Always, |row| {
            row.card.unmanaged.into()
        }),
        column("AVAILABLE", "availableBytes", Always, |row| row.room.into()),
        column("BUSY%", "utilizationPercent", Always, |row| row.busy.into()),
        column("HEALTH", "health", Always, |row| match &row.refuses {
            None => Value::Good("healthy".to_owned()),
            Some(why) => Value::Bad(why.clone()),
        }),
        column("PODS", "owners", Table, |row| Value::things(&row.owners)),
        column("PODS", "pods", Wide, |row| {
            let pods = row.card.pods.iter();
            let pods = pods.map(|pod| Holder::of(pod, pod.charged));
            Value::things(&pods.collect::<Vec<_>>())
        }),
        column("OTHERS", "others", Wide, |row| Value::things(&row.others)),
        column("MEMORY", "memoryBytes", Wide, |row| {
            row.card.capacity.into()
        }),
        column("REQUESTED%", "requestedPercent", Wide, |row| {
            percent(row.card.held, row.card.capacity)
        }),
        column("USED%", "usedPercent", Wide, |row| {
            percent(used(&row.card) + row.card.unmanaged, row.card.capacity)
        }),
        column("UUID", "gpuUuid", Wide, |row| row.card.uuid.clone().into()),
        column("RESERVED", "reservedBytes", Wide, |row| {
            row.card.total.minus(row.card.capacity).into()
        }),
        column("LIMITS", "memoryLimits", Wide, |row| {
            let words = row.no_limit.map(|why| format!("no: {why}"));
            let json = json!({ "hold": words.is_none(), "reason": row.no_limit });
            Value::Both(words.unwrap_or("hold".to_owned()), json)
        }),
        // Of GPUs with MPS.
        column("COMPUTE%", "availableComputePercent", Wide, |row| {
            let Compute { capacity, free } = row.card.compute;
            (capacity > 0).then_some(u32::from(free)).into()
        }),
        column("BORROWED", "borrowedBytes", Wide, |row| {
            row.borrowed.memory.into()
        }),
        column("RECLAIMED-FROM", "reclaimedFrom", Wide, |row| {
            row.borrowed.reclaimed_from.clone().into()
        }),
        column("RESERVATIONS", "reservations", Wide, |row| {
            Value::things(&row.borrowed.reservations)
        }),
    ]
}

pub(crate) struct PodRow {
    namespace: String,
    pod: String,
    container: String,
    node: Option<String>,
    uuids: Vec<String>,
    indices: Vec<String>,
    requested: Option<Mib>,
    /// The memory that the pod holds on all its GPUs: more than its request if it takes them whole.
    charged: Option<Mib>,
    used: Option<Mib>,
    confirmed: Value,
    age: u64,
}

/// Pods that ask for GPU memory, a row per container that asks.
pub(crate) fn pods(cluster: &Cluster, scope: &Scope) -> Listing<PodRow> {
    let pods = cluster.pods_in(scope);
    let rows = pods.into_iter().filter(|pod| !pod.facts.released);
    Listing {
        kind: "GpuPodList",
        columns: vec![
            column("NAMESPACE", "namespace", Always, |row| {
                row.namespace.clone().into()
            }),
            column("POD", "pod", Always, |row| row.pod.clone().into()),
            column("CONTAINER", "container", Always, |row| {
                row.container.clone().into()
            }),
            column("NODE", "node", Always, |row| row.node.clone().into()),
            column("GPU", "gpus", Always, |row| row.indices.clone().into()),
            column("REQUESTED", "requestedBytes", Always, |row| {
                row.requested.into()
            }),
            column("CHARGED", "podChargedBytes", Always, |row| {
                row.charged.into()
            }),
            column("USED", "podUsedBytes", Always, |row| row.used.into()),
            column("CONFIRMED", "confirmed", Always, |row| {
                row.confirmed.clone()
            }),
            column("AGE", "ageSeconds", Wide, |row| Value::Age(row.age)),
            column("UUID", "gpuUuids", Wide, |row| row.uuids.clone().into()),
        ],
        rows: rows.flat_map(|pod| pod_rows(cluster, pod)).collect(),
        total: None,
        name: |row| format!("pod/{}", row.pod),
        empty: "No pod asks for GPU memory here: try -A for all namespaces.",
        answer: Answer::Yes,
    }
}

/// MiB in use by the pod over all cards of its node; None while its agent does not name it.
pub(crate) fn pod_use(cluster: &Cluster, pod: &PodInfo) -> Option<Mib> {
    let report = cluster.reports.get(&**pod.facts.node.as_ref()?)?;
    let uses = report.gpus.iter().flat_map(|gpu| &gpu.pods);
    let uses = uses
        .filter(|used| *used.uid == *pod.facts.uid)
        .map(|used| Mib(used.used_mib));
    uses.fold(None, |sum: Option<Mib>, used| {
        Some(sum.unwrap_or_default() + used)
    })
}

/// GPU UUIDs as the indices that people know, a UUID that the node lacks as it is.
pub(crate) fn indices<'a>(
    cluster: &Cluster,
    node: Option<&str>,
    uuids: impl Iterator<Item = &'a str>,
) -> Vec<String> {
    let index = |uuid: &str| Some(cluster.gpu(node?, uuid)?.index.to_string());
    uuids
        .map(|uuid| index(uuid).unwrap_or_else(|| uuid.to_owned()))
        .collect()
}

fn pod_rows(cluster: &Cluster, pod: &PodInfo) -> Vec<PodRow> {
    let facts = &pod.facts;
    let assignment = facts.assignment.as_ref().and_then(|it| it.as_ref().ok());
    let charged = assignment.map(|it| it.charges.iter().map(|&(_, mib)| mib).sum());
    let confirmed = match (pod.confirmed(), &facts.node) {
        (_, None) => Value::Nothing,
        (Some(_), _) => Value::Good("yes".to_owned()),
        (None, _) => Value::Text("no".to_owned()),
    };
    let row = |container: &str, requested: Option<Mib>, first: bool| {
        let of =
            assignment.and_then(|it| it.containers.iter().find(|(name, _)| **name == *container));
        let uuids: Vec<_> = of
            .iter()
            .flat_map(|(_, uuids)| uuids.iter().map(|it| &**it))
            .collect();
        PodRow {
            namespace: facts.namespace.to_string(),
            pod: facts.name.to_string(),
            container: container.to_owned(),
            node: facts.node.as_ref().map(ToString::to_string),
            indices: indices(cluster, facts.node.as_deref(), uuids.iter().copied()),
            uuids: uuids.into_iter().map(str::to_owned).collect(),
            requested,
            // GPUs and the agent know pods, not containers.
            charged: charged.filter(|_| first),
            used: pod_use(cluster, pod).filter(|_| first),
            confirmed: confirmed.clone(),
            age: pod.age(cluster.wall),
        }
    };
    if facts.asks.readable().is_err() {
        return vec![row("?", None, true)];
    }
    let claims = facts.containers.iter().zip(facts.asks.claims());
    let claims = claims.enumerate();
    claims
        .map(|(index, (container, claim))| row(container, Some(claim.in_sum()), index == 0))
        .collect()
}

/// The pods and the memory of a group.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReportRow {
    pub(crate) group: String,
    pub(crate) pods: u64,
    pub(crate) waiting: u64,
    pub(crate) requested: Mib,
    pub(crate) used: Mib,
    pub(crate) idle: Mib,
    pub(crate) gib_hours: f64,
}

/// The memory that each namespace, or each value of a label, holds and uses now.
pub(crate) fn groups(cluster: &Cluster, scope: &Scope, by: &str) -> Vec<ReportRow> {
    let mut groups: BTreeMap<String, ReportRow> = BTreeMap::new();
    for pod in cluster.pods_in(scope) {
        let facts = &pod.facts;
        if facts.released {
            continue;
        }
        let group = match by {
            "namespace" => facts.namespace.to_string(),
            label => pod.object.labels().get(label).cloned().unwrap_or_default(),
        };
        let row = groups.entry(group.clone()).or_default();
        row.group = group;
        if facts.node.is_none() {
            row.waiting += 1;
            continue;
        }
        let assigned = facts.assignment.as_ref().and_then(|it| it.as_ref().ok());
        let held: Mib = assigned
            .iter()
            .flat_map(|it| it.charges.iter().map(|&(_, mib)| mib))
            .sum();
        let used = pod_use(cluster, pod).unwrap_or_default();
        row.pods += 1;
        row.requested = row.requested + held;
        row.used = row.used + used;
        row.idle = row.idle + held.minus(used);
        row.gib_hours += gib_hours(held, pod.age(cluster.wall));
    }
    groups.into_values().collect()
}

#[allow(clippy::cast_precision_loss, reason = "a sum for people")]
fn gib_hours(Mib(mib): Mib, seconds: u64) -> f64 {
    mib as f64 / 1024.0 * seconds as f64 / 3600.0
}

/// The held, used and idle memory of each team.
pub(crate) fn report(cluster: &Cluster, scope: &Scope, by: &str) -> Listing<ReportRow> {
    let rows = groups(cluster, scope, by);
    let sum = |of: fn(&ReportRow) -> Mib| rows.iter().map(of).sum();
    let total = ReportRow {
        group: "*".to_owned(),
        pods: rows.iter().map(|row| row.pods).sum(),
        waiting: rows.iter().map(|row| row.waiting).sum(),
        requested: sum(|row| row.requested),
        used: sum(|row| row.used),
        idle: sum(|row| row.idle),
        gib_hours: rows.iter().map(|row| row.gib_hours).sum(),
    };
    Listing {
        kind: "GpuReport",
        columns: vec![
            column("GROUP", "group", Always, |row| {
                (!row.group.is_empty()).then_some(&*row.group).into()
            }),
            column("PODS", "pods", Always, |row| row.pods.into()),
            column("WAITING", "waitingPods", Always, |row| row.waiting.into()),
            column("REQUESTED", "requestedBytes", Always, |row| {
                row.requested.into()
            }),
            column("USED", "usedBytes", Always, |row| row.used.into()),
            column("IDLE", "idleBytes", Always, |row| row.idle.into()),
            column("GIB-HOURS", "gibHours", Always, |row| row.gib_hours.into()),
        ],
        total: (rows.len() > 1).then_some(total),
        rows,
        name: |row| row.group.clone(),
        empty: "No pod holds or awaits GPU memory here: try -A for all namespaces.",
        answer: Answer::Yes,
    }
}
