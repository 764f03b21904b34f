//! `why`: the verdict on one pod, refusals by reason, the nearest cards and the pods that would free them.

mod gang;
mod location;
mod nearest;
pub(crate) mod own;
mod print;
mod report;
mod requested;

use std::io::Write;

use anyhow::{Context as _, Result};
use gpustow_admission::{auto, keys};
use gpustow_api::{Asks, Assignment, PodFacts, names};
use gpustow_inspect::{
    Cluster, PodInfo, Trial, memory,
    owner::kind,
    state::{self, room},
    try_pod,
};
use gpustow_ledger::{GangView, NodeView};
use gpustow_pack::Mib;
use k8s_openapi::api::core::v1::Pod;
use serde::{Serialize, Serializer};

use crate::answer::Answer;
use crate::global::Global;
use crate::lists::indices;
use crate::output::{Format, api_version};
use gang::Gang;
use location::{Location, LocationGpu};
use nearest::{Finish, Near, advice, fewest_to_finish, nearest, own_rollout};
use report::Means;
use requested::Requested;

/// Seconds in which a scheduler should have reported on a new pod.
const LOOKED_AT_WITHIN: i64 = 60;

/// The answer about one pod.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Why {
    api_version: String,
    kind: &'static str,
    namespace: String,
    pod: String,
    /// `Waiting`, `Fits`, `Running`, `Gated` or `Invalid`; `Unknown` to a user who sees too little.
    pub(crate) verdict: Verdict,
    /// One sentence.
    pub(crate) summary: String,
    asks: Requested,
    age_seconds: u64,
    /// Where it is, or where it would go now.
    #[serde(skip_serializing_if = "Option::is_none")]
    place: Option<Location>,
    /// Nodes that were looked at, by why they refuse.
    refusals: Vec<Count>,
    nearest: Vec<Near>,
    /// For a pod of a gang that has too few of its pods yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    gang: Option<Gang>,
    /// For a pod of several GPUs: where the fewest pods must finish before it fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    fewest_to_finish: Option<Finish>,
    /// The extender's means that make room for it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    means: Vec<Means>,
    /// The extender's last Event about GPU memory that it reserves for the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    reserved: Option<Said>,
    /// The last Events of gpustow about the pod, for a user who sees no more.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    events: Vec<Said>,
    #[serde(skip_serializing_if = "Option::is_none")]
    scheduler_said: Option<String>,
    /// Annotations of the pod that this version does not know.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) unknown: Vec<String>,
    /// The parts that the user may not see.
    #[serde(skip_serializing_if = "Option::is_none")]
    left_out: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) enum Verdict {
    #[default]
    Waiting,
    Fits,
    Running,
    Gated,
    Invalid,
    Unknown,
}

/// Programs get whole bytes.
fn bytes<S: Serializer>(amount: &Mib, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_u64(amount.bytes())
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Said {
    event: String,
    age_seconds: u64,
    note: String,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Count {
    nodes: usize,
    reason: &'static str,
    /// The labels and taints that are the cause.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    causes: Vec<String>,
}

/// Answers about one pod: a name, namespace/name, or a workload's KIND/NAME.
pub(crate) async fn run(
    global: &Global,
    pod: &str,
    format: &Format,
    out: &mut (dyn Write + Send),
) -> Result<Answer> {
    let named = pod.split_once('/').map(|(word, _)| word);
    let namespace = named.filter(|it| !matches!(*it, "pod" | "pods") && kind(it).is_none());
    let mut cluster = global.cluster_or_own(namespace).await?;
    let found = cluster.find(&global.scope(&cluster), pod)?;
    let why = match cluster.left_out {
        Some(_) => own::why(&global.source, &cluster, found).await?,
        None => {
            let uid = found.facts.uid.clone();
            of(&mut cluster, &uid)?
        }
    };
    why.print(format, out)?;
    Ok(why.answer())
}

/// The answer about the pod with this UID.
pub(crate) fn of(cluster: &mut Cluster, uid: &str) -> Result<Why> {
    let pod = cluster.pods.get(uid).context("the pod is gone")?.clone();
    if pod.facts.node.is_none() {
        return Ok(waiting(cluster, &pod.object, &pod.facts));
    }
    // The question it was when the pod was new: the cards without it.
    let facts = (*pod.facts).clone();
    let unbound = PodFacts {
        node: None,
        assignment: None,
        ..facts.clone()
    };
    cluster.take_out(&facts);
    let views = cluster.views();
    let trial = try_pod(cluster, &views, &unbound);
    let why = running(cluster, &pod, &trial);
    cluster.put_back(facts);
    Ok(why)
}

fn about(cluster: &Cluster, facts: &PodFacts) -> Why {
    Why {
        api_version: api_version(),
        kind: "Why",
        namespace: facts.namespace.to_string(),
        pod: facts.name.to_string(),
        asks: Requested::of(facts),
        age_seconds: u64::try_from(cluster.wall.as_second() - facts.created).unwrap_or(0),
        ..Why::default()
    }
}

/// The answer with the facts that only the object itself has.
fn about_object(cluster: &Cluster, pod: &Pod, facts: &PodFacts) -> Why {
    let mut why = about(cluster, facts);
    why.asks.origin = origin(cluster, pod);
    why.unknown = unknown(cluster, pod);
    why
}

/// Where the amount is from, if admission gave it.
fn origin(cluster: &Cluster, pod: &Pod) -> Option<String> {
    let origin = auto::origin(pod, cluster.resource())?;
    Some(format!("by {}: auto: {origin}", cluster.resource()))
}

/// Annotations that look like gpustow's and are not known. Admission refuses them, except annotations of a later
/// version and annotations that are older than admission.
fn unknown(cluster: &Cluster, pod: &Pod) -> Vec<String> {
    let Some(annotations) = &pod.metadata.annotations else {
        return Vec::new();
    };
    let ahead = keys::ahead(annotations).into_iter().map(|key| {
        format!("metadata.annotations[{key}]: this version of kubectl-gpustow does not know it")
    });
    let known = keys::known(annotations, cluster.resource());
    ahead.chain(known.err().map(|it| it.to_string())).collect()
}

/// The answer for a pod that is nothing to place: it is wrong in itself.
pub(crate) fn refused(cluster: &Cluster, facts: &PodFacts, refusal: String) -> Why {
    Why {
        verdict: Verdict::Invalid,
        summary: refusal,
        ..about(cluster, facts)
    }
}

/// The answer about a pod that is not bound, or not even created.
pub(crate) fn waiting(cluster: &Cluster, pod: &Pod, facts: &PodFacts) -> Why {
    let mut why = about_object(cluster, pod, facts);
    why.scheduler_said = state::said(pod).map(str::to_owned);
    if let Asks::Unreadable(bad) = &facts.asks {
        (why.verdict, why.summary) = (Verdict::Invalid, bad.to_string());
        return why;
    }
    let views = cluster.views();
    let trial = try_pod(cluster, &views, facts);
    why.refusals = counts(&trial);
    let gang = cluster.ledger.gang(facts, cluster.now);
    why.gang = gang
        .as_ref()
        .and_then(|gang| gang::of(cluster, &views, gang));
    if let Some((view, choice)) = trial.fits.first() {
        let nodes = trial.fits.len();
        let of = format!(
            "{nodes} of {} GPU nodes; the best is {}",
            views.len(),
            view.name
        );
        (why.verdict, why.summary) = match held_by(cluster, pod, facts, gang.as_ref()) {
            None => (
                Verdict::Fits,
                format!("It fits now on {of}.{}", sampled(pod)),
            ),
            Some(held) => (
                Verdict::Waiting,
                format!("It would fit now on {of}, but {held}."),
            ),
        };
        why.place = Some(Location {
            agent_age_seconds: cluster.report_age(&view.name),
            because: cluster
                .ledger
                .speaks_for(facts, &view.name, &choice.placement.charges),
            ..Location::best(view, choice, nodes)
        });
    } else {
        why.verdict = Verdict::Waiting;
        why.nearest = nearest(cluster, &trial, facts);
        why.fewest_to_finish = fewest_to_finish(cluster, facts);
        why.summary = verdict(&views, &trial);
        let advice = advice(cluster, &trial, facts);
        // No other pod's memory helps one that no GPU could hold, or that kube-scheduler keeps off all that could.
        let is_short = advice.is_none() && why.nearest.iter().any(Near::is_short);
        if let Some(advice) = advice {
            why.summary += &format!(" {advice}");
        }
        let finish = why.fewest_to_finish.as_ref();
        if let Some(rollout) = own_rollout(cluster, pod, &why.nearest, finish) {
            why.summary += &format!(" {rollout}");
        }
        if let Some(kept) = state::holds(pod, names::RESERVED_CONDITION) {
            why.summary += &format!(" {kept}");
        } else {
            why.reserved = reserved(cluster, facts);
            // One that is not created yet has nothing done for it.
            if is_short && pod.metadata.creation_timestamp.is_some() {
                why.means = report::of(cluster, facts, why.reserved.is_some());
            }
        }
    }
    gates(cluster, facts, &mut why);
    why
}

/// The gates of a pod come before anything that kube-scheduler does.
fn gates(cluster: &Cluster, facts: &PodFacts, why: &mut Why) {
    if let Some(before) = cluster.ledger.queued_before(&facts.uid) {
        let size = cluster.ledger.queued().pods;
        why.verdict = Verdict::Gated;
        why.summary = format!(
            "Queued at position {} of {size}: the extender removes its scheduling gate when it is its turn and memory is \
             free. {}",
            before + 1,
            why.summary
        );
    } else if facts.gated {
        why.verdict = Verdict::Gated;
        why.summary = format!("Its scheduling gates hold it. {}", why.summary);
    }
}

/// A note on kube-scheduler's last refusal, if it looked at a part of the nodes only.
fn sampled(pod: &Pod) -> String {
    let sample = state::said(pod).and_then(state::sample);
    sample.map_or_else(String::new, |(looked, all)| {
        format!(
            " kube-scheduler last looked at {looked} of {all} nodes, and none of them fits. \
             The extender wakes the pod, and kube-scheduler goes on with other nodes."
        )
    })
}

fn verdict(views: &[NodeView], trial: &Trial<'_>) -> String {
    if views.is_empty() {
        return "No node reports GPUs: are gpustow's agents running?".to_owned();
    }
    if trial.asked.is_empty() {
        return format!(
            "None of {} GPU nodes may be used: kube-scheduler's own filters refuse them.",
            views.len()
        );
    }
    let rooms = trial.asked.iter().flat_map(|view| {
        let taking = view.cards.iter().filter(|card| !view.stale && card.healthy);
        taking.map(|card| room(view, card))
    });
    let rooms: Vec<Mib> = rooms.collect();
    if rooms.is_empty() {
        return format!(
            "It fits on none of {} GPU nodes: no GPU that it may use takes pods now.",
            views.len()
        );
    }
    format!(
        "It fits on none of {} GPU nodes. {} is free on {} GPUs there; the largest piece is {}.",
        views.len(),
        memory(rooms.iter().copied().sum()),
        rooms.len(),
        memory(rooms.into_iter().max().unwrap_or_default())
    )
}

/// Why a pod that fits is not placed, if a reason is known.
fn held_by(
    cluster: &Cluster,
    pod: &Pod,
    facts: &PodFacts,
    gang: Option<&GangView>,
) -> Option<String> {
    if cluster.system.extender_is_down() {
        let down = "no pod of gpustow's extender is ready: see `kubectl get pods -n ";
        return Some(format!("{down}{}`", names::NAMESPACE));
    }
    if *facts.scheduler == *names::SCHEDULER
        && let Some(problem) = state::leaderless(cluster)
    {
        return Some(problem);
    }
    if let Some(lacks) = gang.and_then(gang::lacks) {
        return Some(lacks);
    }
    match state::said(pod) {
        Some(said) => state::held_by(said),
        // A pod that is not created yet is without an age.
        None => {
            let created = pod.metadata.creation_timestamp.as_ref()?;
            let old = cluster.wall.as_second() - created.0.as_second() > LOOKED_AT_WITHIN;
            old.then(|| {
                let scheduler = &facts.scheduler;
                format!("no scheduler has looked at it: is {scheduler} running?")
            })
        }
    }
}

/// The extender's last Event about a reservation for the pod.
fn reserved(cluster: &Cluster, facts: &PodFacts) -> Option<Said> {
    let (written, note) = cluster.kept_reservations.get(&*facts.uid)?;
    Some(Said {
        event: names::MEMORY_RESERVED.to_owned(),
        age_seconds: u64::try_from(cluster.wall.as_second() - written.as_second()).unwrap_or(0),
        note: note.clone(),
    })
}

fn counts(trial: &Trial<'_>) -> Vec<Count> {
    let counts = trial.refusals.iter().map(|(reason, nodes)| {
        let causes = trial.causes.get(reason).into_iter().flatten();
        Count {
            nodes: *nodes,
            reason,
            causes: causes.cloned().collect(),
        }
    });
    let mut counts: Vec<_> = counts.collect();
    counts.sort_by(|a, b| (b.nodes, a.reason).cmp(&(a.nodes, b.reason)));
    counts
}

fn running(cluster: &Cluster, pod: &PodInfo, trial: &Trial<'_>) -> Why {
    let facts = &pod.facts;
    let mut why = about_object(cluster, &pod.object, facts);
    why.verdict = Verdict::Running;
    let node = facts.node.as_deref().unwrap_or_default();
    let assignment = match assigned(facts, node) {
        Ok(assignment) => assignment,
        Err(summary) => {
            (why.verdict, why.summary) = (Verdict::Invalid, summary);
            return why;
        }
    };
    let mut fits = trial.fits.iter();
    let rank = fits.position(|(view, _)| *view.name == *node);
    let rank = rank.map(|at| at + 1);
    let views = cluster.views();
    let view = views.iter().find(|view| *view.name == *node);
    let gpus = assignment.charges.iter().map(|(uuid, mib)| {
        let card = view.and_then(|view| view.cards.iter().find(|card| *card.uuid == **uuid));
        LocationGpu {
            gpu: indices(cluster, Some(node), [&**uuid].into_iter()).join(""),
            requested: *mib,
            room: card.map_or(Mib::ZERO, |card| card.free.minus(*mib)),
        }
    });
    why.summary = compared(cluster, facts, node, rank, trial);
    if let Some(asked) = state::holds(&pod.object, names::RECLAIM_CONDITION) {
        why.summary += &format!(" {asked}.");
    }
    let mut uuids = assignment.charges.iter().map(|(uuid, _)| uuid);
    if let Some(uuid) = uuids.find(|uuid| state::is_missing(cluster, node, uuid)) {
        why.summary = format!(
            "It is on {node}, and its GPU {uuid} is no longer there. Delete the pod; its owner makes a new one."
        );
    }
    let index = |uuid: &str| {
        let cards = &view.as_ref()?.cards;
        cards.iter().position(|card| *card.uuid == *uuid)
    };
    let charges = assignment.charges.iter();
    let charges: Option<Vec<_>> = charges
        .map(|(uuid, mib)| Some((index(uuid)?, *mib)))
        .collect();
    let because = charges.and_then(|mut charges| {
        charges.sort_unstable();
        cluster.ledger.speaks_for(facts, node, &charges)
    });
    why.place = Some(Location {
        agent_age_seconds: cluster.report_age(node),
        refuses: view.and_then(|view| state::node_refuses(cluster, view)),
        node: node.to_owned(),
        gpus: gpus.collect(),
        feasible_nodes: trial.fits.len(),
        rank: rank.unwrap_or(0),
        because,
    });
    why.refusals = counts(trial);
    why
}

/// How the node of a bound pod compares with others that would take the pod now.
fn compared(
    cluster: &Cluster,
    facts: &PodFacts,
    node: &str,
    rank: Option<usize>,
    trial: &Trial<'_>,
) -> String {
    let policy = match facts.asks.readable() {
        Ok(request) => cluster.ledger.policy(request).name(),
        Err(_) => "unknown",
    };
    let feasible = trial.fits.len();
    match (rank, trial.fits.first()) {
        (Some(1), _) if feasible == 1 => {
            format!("It is on {node}, now the only node that would take it.")
        }
        (Some(1), _) => format!(
            "It is on {node}: by policy {policy} still the best of {feasible} nodes that would \
             take it now."
        ),
        (Some(rank), Some((best, _))) => format!(
            "It is on {node}, where policy {policy} put it. As things are now that is number \
             {rank} of {feasible} nodes; {} would be the best.",
            best.name
        ),
        _ => format!("It is on {node}, which would not take it now."),
    }
}

/// The GPUs of a bound pod, or its error.
fn assigned<'f>(facts: &'f PodFacts, node: &str) -> std::result::Result<&'f Assignment, String> {
    match &facts.assignment {
        Some(Ok(assignment)) => Ok(assignment),
        Some(Err(broken)) => Err(format!("It is on {node}, on an unknown GPU: {broken}.")),
        None => Err(format!(
            "It is on {node} without a GPU: a scheduler that does not ask gpustow bound it. \
             Delete it and let {} place it.",
            names::SCHEDULER
        )),
    }
}

impl Why {
    /// Exit code of the question.
    pub(crate) fn answer(&self) -> Answer {
        match self.verdict {
            Verdict::Fits | Verdict::Running => Answer::Yes,
            Verdict::Waiting | Verdict::Gated | Verdict::Invalid => Answer::No,
            Verdict::Unknown => Answer::Unknown,
        }
    }

    /// The same about a pod that is not in the cluster.
    pub(crate) fn into_fit(self) -> Self {
        Self {
            kind: "Fit",
            ..self
        }
    }
}
