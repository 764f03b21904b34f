//! `/preempt`: which of the scheduler's candidate nodes would do, and who else must go there.

pub(crate) mod asked;
pub(crate) mod late;

use std::collections::BTreeMap;
use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_api::facts::uses_volumes_or_claims;
use gpustow_ledger::Victims;
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};

use crate::app::App;
use crate::failure::{ErrorKind, Failure};
use crate::wire::{ExtenderPreemptionArgs, ExtenderPreemptionResult, MetaPod, MetaVictims};

/// Nodes offered, at most: as many as kube-scheduler itself looks for where there are few.
const ENOUGH: usize = 100;

/// The candidate nodes on which the pod fits once its victims are gone. Never a node without a
/// victim: kube-scheduler takes that for a failure.
///
/// # Errors
/// With a text for the log; the protocol lacks a field for it.
pub(crate) async fn preempt(
    app: &Arc<App>,
    args: ExtenderPreemptionArgs,
) -> Result<ExtenderPreemptionResult, Failure> {
    if args.has_full_victims {
        return Err(Failure::new(
            ErrorKind::Decode,
            "kube-scheduler sends whole pods: set nodeCacheCapable: true",
        ));
    }
    let pod = args
        .pod
        .facts(&app.args.resource_name)
        .ok_or_else(|| Failure::new(ErrorKind::Decode, "the pod lacks a UID"))?;
    let asks = pod.asks.readable();
    let asks = asks.map_err(|bad| Failure::of_pod(bad.to_string()))?;
    if asks.is_empty() {
        return Ok(ExtenderPreemptionResult {
            node_name_to_meta_victims: args.victims,
        });
    }
    let epoch = app.may_decide().await?;
    let disrupted_on = || app.ledger.lock().disrupted_on(&pod.uid);
    let before = disrupted_on();
    if let Some(node) = late::fits_without_victims(app, &pod).await? {
        tracing::info!(
            namespace = %pod.namespace, pod = %pod.name, %node,
            "asked for victims: none, because the node has room now or soon"
        );
        return Ok(ExtenderPreemptionResult::default());
    }
    let candidates: Vec<(String, MetaVictims)> = args.victims.into_iter().collect();
    let waits_for_room_alone = waits_for_room_alone(&args.pod, &app.args.resource_name);
    let choose = || choose(app, &pod, &candidates, waits_for_room_alone);
    let mut answer = choose();
    if !answer.is_empty() {
        // This replica may have been frozen, and another decides.
        let ours = app.epoch.confirm(epoch).await;
        ours.map_err(|error| Failure::new((&error).into(), format!("gpustow: {error}")))?;
        // The confirmation took time: the victims are chosen again from the present state.
        answer = choose();
    }
    if let Some(node) = disrupted_on().filter(|node| before.as_ref() != Some(node)) {
        tracing::info!(
            namespace = %pod.namespace, pod = %pod.name, %node,
            "asked for victims: none, because the extender has begun to disrupt others for the pod"
        );
        return Ok(ExtenderPreemptionResult::default());
    }
    let candidates = candidates.len();
    tracing::info!(
        namespace = %pod.namespace, pod = %pod.name, candidates, nodes = answer.len(),
        "asked which pods to evict"
    );
    Ok(ExtenderPreemptionResult {
        node_name_to_meta_victims: answer,
    })
}

/// The pods that kube-scheduler may evict, by node, as far as is known now.
fn choose(
    app: &App,
    pod: &PodFacts,
    candidates: &[(String, MetaVictims)],
    waits_for_room_alone: bool,
) -> BTreeMap<String, MetaVictims> {
    // Of a node without victims, only fragmented memory keeps the pod off: there the switches decide.
    let asks = candidates.iter().any(|(_, it)| it.pods.is_empty());
    // A later call begins with the nodes that this call cannot afford to look at.
    let (mut steps, copies, may_add) = {
        let (now, mut ledger) = (app.ledger.now(), app.ledger.lock());
        let may_add = asks && ledger.may_preempt_fragmented(pod, now);
        (ledger.budget(), ledger.copies(), may_add)
    };
    let first = usize::try_from(copies).unwrap_or(0) % candidates.len().max(1);
    let (behind, ahead) = candidates.split_at(first);
    let mut answer = BTreeMap::new();
    let mut others = Vec::new();
    // Nodes that do not need more victims are the better ones, and are quick to look at.
    for (node, victims) in ahead.iter().chain(behind) {
        if answer.len() == ENOUGH {
            break;
        }
        let given = uids(victims);
        if given.is_empty() && !may_add {
            continue;
        }
        let now = app.ledger.now();
        let more = (app.ledger.lock()).preempt(pod, node, &given, &mut steps, now);
        match more {
            Some(more) if !more.uids.is_empty() => others.push((node, victims, given, more)),
            Some(_) if !given.is_empty() => drop(answer.insert(node.clone(), victims.clone())),
            _ => {}
        }
    }
    steps = app.ledger.lock().budget();
    let enough = ENOUGH - answer.len();
    for (node, victims, given, more) in others.into_iter().take(enough) {
        let now = app.ledger.now();
        let spared = match waits_for_room_alone {
            true => (app.ledger.lock()).spared(pod, node, &given, &more.uids, &mut steps, now),
            false => Victims::default(),
        };
        let changed = changed(victims.clone(), &more, &spared);
        answer.insert(node.clone(), changed);
    }
    answer
}

fn uids(victims: &MetaVictims) -> Vec<Arc<str>> {
    let pods = victims.pods.iter();
    pods.map(|pod| pod.uid.as_str().into()).collect()
}

/// The victims with those added and without those spared.
fn changed(mut victims: MetaVictims, added: &Victims, spared: &Victims) -> MetaVictims {
    let stays = |pod: &MetaPod| spared.uids.iter().any(|uid| **uid == *pod.uid);
    victims.pods.retain(|pod| !stays(pod));
    victims.pods.extend(added.uids.iter().map(|uid| MetaPod {
        uid: uid.to_string(),
    }));
    let violations = victims.num_pdb_violations.saturating_sub(spared.protected);
    victims.num_pdb_violations = violations.max(0).saturating_add(added.protected);
    victims
}

/// Can CPU, memory and GPU memory alone have made kube-scheduler choose victims for this pod? The extender does not see
/// other reasons for a victim, such as ports or other pods' affinity.
fn waits_for_room_alone(pod: &Pod, resource: &str) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let known = |name: &String| name == "cpu" || name == "memory" || name == resource;
    let amounts = |container: &Container| {
        let resources = container.resources.as_ref();
        let lists = resources.map(|resources| [&resources.requests, &resources.limits]);
        let mut names = lists
            .into_iter()
            .flatten()
            .flatten()
            .flat_map(|list| list.keys());
        names.all(known)
    };
    let ports = |container: &Container| container.ports.iter().flatten().next().is_some();
    let containers = |spec: &PodSpec| {
        let init = spec.init_containers.iter().flatten();
        spec.containers
            .iter()
            .chain(init)
            .cloned()
            .collect::<Vec<_>>()
    };
    let among_pods = spec
        .affinity
        .as_ref()
        .is_some_and(|it| it.pod_affinity.is_some() || it.pod_anti_affinity.is_some());
    let spread = spec.topology_spread_constraints.iter().flatten().next();
    !among_pods
        && spread.is_none()
        && !uses_volumes_or_claims(pod)
        && containers(spec).iter().all(|it| amounts(it) && !ports(it))
}
