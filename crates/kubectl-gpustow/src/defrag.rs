//! `defrag`: which pods would have to move. Some moves make room for pods that wait although enough memory is free, in
//! pieces. Other moves empty a nearly empty node.

use std::cmp::Reverse;
use std::sync::Arc;

use gpustow_inspect::{Cluster, PodInfo, Scope};
use gpustow_ledger::{Move, Moves, NodeView};
use gpustow_pack::{Claim, Mib};

use crate::answer::Answer;
use crate::output::Shown::{Always, Table, Wide};
use crate::output::{Column, Listing, Value, column};

/// A pod that would move, or a pod for which none can.
pub(crate) struct Row {
    /// The first pod of its kind that waits, or the node that would be emptied.
    purpose: String,
    /// How many pods wait with an equal request.
    alike: Option<u64>,
    asks: Option<Mib>,
    gets: Option<Place>,
    moves: Option<Moving>,
}

struct Moving {
    pod: String,
    mib: Mib,
    from: Place,
    to: Place,
}

/// Cards of a node.
struct Place {
    node: Arc<str>,
    uuids: Vec<String>,
    /// For people.
    text: String,
}

/// A plan for the first pod of each kind that waits, each as if it were alone, or for the first node that would be emptied.
pub(crate) fn plans(cluster: &Cluster, scope: &Scope) -> Listing<Row> {
    let mut waiting = cluster.pods_in(scope);
    waiting
        .retain(|pod| pod.waits() && cluster.ledger.waits_for_fragmented(&pod.facts, cluster.now));
    waiting.sort_by_key(|pod| {
        (
            Reverse(pod.facts.priority),
            pod.facts.created,
            pod.full_name(),
        )
    });
    let views = cluster.views();
    let (mut rows, mut answer) = (Vec::new(), Answer::Yes);
    for (pod, alike) in kinds(waiting) {
        let plan = cluster.ledger.moves_for(&pod.facts, cluster.now);
        if plan.is_none() {
            answer = Answer::No;
        }
        rows.extend(rows_of(pod, alike, plan, &views));
    }
    if !cluster.pods.values().any(PodInfo::waits) {
        let plan = cluster.ledger.would_empty(cluster.now);
        let asked_about = cluster.pods_in(scope);
        let has = |it: &&Move| asked_about.iter().any(|pod| pod.facts.uid == it.pod.uid);
        if let Some(plan) = &plan {
            let moves = plan.moves.iter().filter(has);
            rows.extend(moves.map(|it| Row {
                purpose: format!("node/{}", plan.node),
                alike: None,
                asks: None,
                gets: None,
                moves: Some(moving(it, &plan.node, &views)),
            }));
        }
    }
    Listing {
        kind: "Defrag",
        columns: columns(),
        rows,
        total: None,
        name: |row| match &row.moves {
            Some(moves) => format!("pod/{}", moves.pod),
            None => format!("waiting/{}", row.purpose),
        },
        empty: "no pod waits for fragmented memory, and no node would be emptied",
        answer,
    }
}

/// The first pod of each kind, with how many of it there are.
fn kinds(waiting: Vec<&PodInfo>) -> Vec<(&PodInfo, u64)> {
    let mut kinds: Vec<(&PodInfo, u64)> = Vec::new();
    for pod in waiting {
        let key = |pod: &PodInfo| {
            let facts = &pod.facts;
            let asks = (facts.asks.clone(), facts.constraints.clone());
            (asks, facts.priority, facts.preempts)
        };
        match kinds.iter_mut().find(|(first, _)| key(first) == key(pod)) {
            Some((_, alike)) => *alike += 1,
            None => kinds.push((pod, 1)),
        }
    }
    kinds
}

fn rows_of(pod: &PodInfo, alike: u64, plan: Option<Moves>, views: &[NodeView]) -> Vec<Row> {
    let claims = pod.facts.asks.claims().iter();
    let asks = claims.map(Claim::in_sum);
    let row = |gets, moves| Row {
        purpose: pod.full_name(),
        alike: Some(alike),
        asks: Some(asks.clone().sum()),
        gets,
        moves,
    };
    let Some(plan) = plan else {
        return vec![row(None, None)];
    };
    let moving = |it: &Move| moving(it, &plan.node, views);
    let gets = || Some(place(views, &plan.node, &plan.cards));
    let moves = plan.moves.iter();
    moves.map(|it| row(gets(), Some(moving(it)))).collect()
}

fn moving(it: &Move, from: &Arc<str>, views: &[NodeView]) -> Moving {
    Moving {
        pod: format!("{}/{}", it.pod.namespace, it.pod.name),
        mib: it.mib(),
        from: place(views, from, &it.from),
        to: place(views, &it.node, &it.cards),
    }
}

fn place(views: &[NodeView], node: &Arc<str>, cards: &[(Arc<str>, Mib)]) -> Place {
    let uuids: Vec<String> = cards.iter().map(|(uuid, _)| uuid.to_string()).collect();
    let view = views.iter().find(|view| view.name == *node);
    let of_node = view.into_iter().flat_map(|view| &view.cards);
    let indices = of_node.filter(|card| uuids.contains(&card.uuid));
    let indices: Vec<String> = indices.map(|card| card.index.to_string()).collect();
    Place {
        node: node.clone(),
        text: format!("{node} GPU {}", indices.join(",")),
        uuids,
    }
}

fn columns() -> Vec<Column<Row>> {
    vec![
        column("FOR", "for", Always, |row| row.purpose.clone().into()),
        column("ALIKE", "alike", Always, |row| row.alike.into()),
        column("ASKS", "asksBytes", Always, |row| row.asks.into()),
        column("GETS", "", Table, |row| text(row.gets.as_ref())),
        column("NODE", "node", Wide, |row| node(row.gets.as_ref())),
        column("GPUS", "gpuUuids", Wide, |row| gpus(row.gets.as_ref())),
        column("MOVES", "pod", Always, |row| {
            row.moves.as_ref().map(|it| it.pod.clone()).into()
        }),
        column("MEMORY", "memoryBytes", Always, |row| {
            row.moves.as_ref().map(|moves| moves.mib).into()
        }),
        column("FROM", "", Table, |row| text(from(row))),
        column("FROM-GPUS", "fromGpuUuids", Wide, |row| gpus(from(row))),
        column("TO", "", Table, |row| text(to(row))),
        column("TO-NODE", "toNode", Wide, |row| node(to(row))),
        column("TO-GPUS", "toGpuUuids", Wide, |row| gpus(to(row))),
    ]
}

fn from(row: &Row) -> Option<&Place> {
    row.moves.as_ref().map(|moves| &moves.from)
}

fn to(row: &Row) -> Option<&Place> {
    row.moves.as_ref().map(|moves| &moves.to)
}

fn text(place: Option<&Place>) -> Value {
    place.map(|it| it.text.clone()).into()
}

fn node(place: Option<&Place>) -> Value {
    place.map(|it| it.node.to_string()).into()
}

fn gpus(place: Option<&Place>) -> Value {
    place.map(|it| it.uuids.clone()).into()
}
