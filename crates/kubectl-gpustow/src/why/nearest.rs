//! The GPUs that lack least for a pod, the pods that must finish before it fits, and advice if none suffices.

use gpustow_api::{PodFacts, names, owner};
use gpustow_inspect::owner::{Holder, Owners};
use gpustow_inspect::{Cluster, PodInfo, Trial, memory, state};
use gpustow_ledger::{CardView, NodeView, PodShare, Reason};
use gpustow_pack::{Mib, Refusal};
use k8s_openapi::api::core::v1::Pod;
use serde::Serialize;

/// Cards that are named.
const NEAREST: usize = 5;

/// The node on which the fewest pods must finish before a pod of several GPUs fits.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Finish {
    pub(super) node: String,
    /// `namespace/name`.
    pub(super) pods: Vec<String>,
}

/// That node. None for a pod of one GPU, which [`nearest`] explains better, and where no pod's end suffices.
pub(super) fn fewest_to_finish(cluster: &Cluster, facts: &PodFacts) -> Option<Finish> {
    if !is_several(facts) {
        return None;
    }
    let (node, pods) = cluster.ledger.fewest_to_finish(facts, cluster.now)?;
    let pods = pods
        .iter()
        .map(|pod| format!("{}/{}", pod.namespace, pod.name));
    Some(Finish {
        node: node.to_string(),
        pods: pods.collect(),
    })
    .filter(|finish| !finish.pods.is_empty())
}

/// Does an earlier pod of its own Deployment hold the memory that it waits for? Then the rollout waits for itself.
pub(super) fn own_rollout(
    cluster: &Cluster,
    pod: &Pod,
    nearest: &[Near],
    finish: Option<&Finish>,
) -> Option<String> {
    let ours = owner::of(pod);
    let deployment = ours.last().filter(|it| it.kind == "Deployment")?;
    let of_one = nearest.iter().flat_map(|it| &it.freed_by);
    let of_one = of_one.filter_map(|it| it.pod.as_ref());
    let of_all = finish.iter().flat_map(|it| &it.pods);
    let names: Vec<&String> = of_one.chain(of_all).collect();
    let is_earlier = |it: &&PodInfo| {
        let theirs = owner::of(&it.object);
        it.object.metadata.namespace == pod.metadata.namespace
            && theirs.last() == ours.last()
            && theirs.first() != ours.first()
            && names.contains(&&it.full_name())
    };
    let earlier = cluster.pods.values().find(is_earlier)?.full_name();
    Some(format!(
        "{earlier}, an earlier pod of its Deployment {}, holds enough. The rollout ends that pod first if its strategy has maxSurge: 0 \
         and maxUnavailable: 1.",
        deployment.name
    ))
}

/// May it need more than one GPU?
fn is_several(facts: &PodFacts) -> bool {
    let claims = facts.asks.claims().iter();
    claims.map(|claim| u64::from(claim.gpus)).sum::<u64>() > 1
}

/// Advice to change a pod that no node could hold, however empty it were.
pub(super) fn advice(cluster: &Cluster, trial: &Trial<'_>, facts: &PodFacts) -> Option<String> {
    let resource = cluster.resource();
    let request = facts.asks.request()?;
    let largest = request.claims.iter().max_by_key(|claim| claim.mib)?;
    let cards = || trial.asked.iter().flat_map(|view| &view.cards);
    let most = cards().map(|card| card.capacity).max()?;
    if most == Mib::ZERO {
        let mut views = trial.asked.iter();
        let why = views.find_map(|it| state::refuses(cluster, it, it.cards.first()?))?;
        return Some(format!(
            "No GPU that it may use has memory for pods: {why}."
        ));
    }
    let widest = request.claims.iter().max_by_key(|claim| claim.gpus)?;
    let in_node = |mib: Mib| {
        let counts = trial.asked.iter().map(|view| {
            let large = view.cards.iter().filter(|card| card.capacity >= mib);
            u64::try_from(large.count()).unwrap_or(u64::MAX)
        });
        counts.max().unwrap_or(0)
    };
    // Fewer GPUs first: a smaller amount for each of too many does not help.
    let there = in_node(widest.mib.min(most));
    if u64::from(widest.gpus) > there {
        let size = match widest.mib > most {
            true => format!(", and request at most {} per GPU", most.0),
            false => String::new(),
        };
        return Some(format!(
            "No node that it may use has {} GPUs of {}; the largest has {there}. Set {} to at most {there}{size}.",
            widest.gpus,
            memory(widest.mib.min(most)),
            names::GPU_COUNT
        ));
    }
    if largest.mib > most {
        let total = largest.in_sum().0;
        let gpus = total.div_ceil(most.0.max(1));
        let of = match largest.gpus {
            1 => String::new(),
            gpus => format!(" on each of {gpus} GPUs"),
        };
        let split = (gpus <= in_node(most)).then(|| {
            let even = total.next_multiple_of(gpus);
            format!(
                "split it with {}: \"{gpus}\" and {resource}: {even}, or ",
                names::GPU_COUNT
            )
        });
        return Some(format!(
            "No GPU that it may use has {}{of}; the largest has {}. To fix it, {}request at most {} per GPU.",
            memory(largest.mib),
            memory(most),
            split.unwrap_or_default(),
            most.0
        ));
    }
    let no_limit = Reason::Fit(Refusal::NoLimit).text();
    // kube-scheduler's own filters keep it off the other nodes, whatever it requests.
    let mut reasons = trial
        .refusals
        .keys()
        .filter(|it| !trial.causes.contains_key(*it));
    let all = trial.refusals.contains_key(no_limit) && reasons.all(|reason| *reason == no_limit);
    all.then(|| {
        format!(
            "No GPU that it may use can hold the pod to its limit. Set {}: watch, unless the driver must hold it.",
            names::ENFORCE
        )
    })
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Near {
    pub(super) node: String,
    pub(super) gpu: u32,
    pub(super) gpu_uuid: String,
    pub(super) model: String,
    #[serde(rename = "availableBytes", serialize_with = "super::bytes")]
    pub(super) room: Mib,
    #[serde(rename = "lacksBytes", serialize_with = "super::bytes")]
    pub(super) lacks: Mib,
    pub(super) healthy: bool,
    /// Why it does not accept pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) refuses: Option<String>,
    /// Why the driver holds no limit there, if the pod needs one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) no_limit: Option<&'static str>,
    /// Pods whose end would make the room; empty if none would.
    pub(super) freed_by: Vec<Holder>,
    /// Who holds something of it that gpustow did not give out.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) others: Vec<Holder>,
}

impl Near {
    /// Would the pod fit there if others left?
    pub(super) fn is_short(&self) -> bool {
        self.refuses.is_none() && self.no_limit.is_none()
    }
}

/// Why a card does not accept pods, or pods with a limit; its shortage; its node; the card.
type Found<'a> = (
    (Option<String>, Option<&'static str>),
    Mib,
    &'a NodeView,
    &'a CardView,
);

/// The cards that lack least. Memory is counted per card: the amount of the largest asking container on one GPU.
pub(super) fn nearest(cluster: &Cluster, trial: &Trial<'_>, facts: &PodFacts) -> Vec<Near> {
    let Some(request) = facts.asks.request() else {
        return Vec::new();
    };
    let need = |card: &CardView| {
        let claims = request.claims.iter().map(|claim| claim.on(card.capacity));
        claims.max().unwrap_or_default()
    };
    let cards = trial
        .asked
        .iter()
        .flat_map(|view| view.cards.iter().map(|card| (*view, card)));
    let mut near: Vec<Found<'_>> = cards
        .filter(|(_, card)| card.capacity >= need(card))
        .map(|(view, card)| {
            let target = if request.exclusive {
                card.capacity
            } else {
                need(card)
            };
            let refuses = state::refuses(cluster, view, card);
            let refuses = refuses.or_else(|| state::no_compute(card, request));
            let refuses = refuses.or_else(|| state::no_instance(card, request));
            let refuses = refuses.or_else(|| waits_for(cluster, view, card, facts));
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
    // Of a pod of several GPUs none of these alone would make it fit.
    let several = is_several(facts);
    let owners = Owners::of(cluster);
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
                (None, None) if !several => freed_by(&card.pods, lacks),
                _ => Vec::new(),
            },
            others: owners.others(&view.name, card),
            healthy: card.healthy,
            refuses,
            no_limit,
        });
    near.collect()
}

/// The pods on the card that are to finish their start first.
fn waits_for(
    cluster: &Cluster,
    view: &NodeView,
    card: &CardView,
    facts: &PodFacts,
) -> Option<String> {
    let starting = state::starting(card).into_iter();
    let starting: Vec<_> = starting
        .map(|(pod, age)| format!("{pod} starts since {age} s"))
        .collect();
    let refuses = || cluster.ledger.explain(facts, &view.name, cluster.now).err();
    let waits = !starting.is_empty() && refuses() == Some(Reason::Fit(Refusal::Starting));
    waits.then(|| starting.join(", "))
}

/// The fewest pods, and then the smallest, whose end would free `lacks`.
fn freed_by(pods: &[PodShare], lacks: Mib) -> Vec<Holder> {
    let takes = |pod: &PodShare| pod.charged.max(pod.used.unwrap_or_default());
    let mut by_size: Vec<_> = pods.iter().collect();
    by_size.sort_by_key(|pod| (takes(pod), pod.namespace.clone(), pod.name.clone()));
    let holder = |pod: &PodShare| Holder::of(pod, takes(pod));
    if lacks == Mib::ZERO {
        return Vec::new();
    }
    if let Some(one) = by_size.iter().find(|pod| takes(pod) >= lacks) {
        return vec![holder(one)];
    }
    let (mut freed, mut holders) = (Mib::ZERO, Vec::new());
    for pod in by_size.iter().rev() {
        freed = freed + takes(pod);
        holders.push(holder(pod));
        if freed >= lacks {
            return holders;
        }
    }
    Vec::new()
}
