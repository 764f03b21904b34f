//! Recomputes every card from the API server's data alone. It trusts no code of the extender but the reading of the
//! annotation.

use std::collections::BTreeMap;

use anyhow::{Error, Result, ensure};
use gpustow_api::gpunode::GpuNode;
use gpustow_api::{Assignment, names};
use k8s_openapi::api::core::v1::{Container, Node, Pod};
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt as _};

use crate::builders::bound;
use crate::wait::node_of;

/// Label of pods that a test binds by hand: they may lack an assignment.
pub const BY_HAND: &str = "testkit/by-hand";

/// Checks the nodes with the given labels, or all nodes. No card holds more than total − reserved − headroom. Every
/// bound pod that asks for memory has an assignment to cards of its own node. The assignment covers at least the
/// containers' limits, and each asking container sees the assigned cards. The error lists all violations.
pub async fn check_cluster(client: &Client, nodes: Option<&str>) -> Result<()> {
    let labels = ListParams {
        label_selector: nodes.map(str::to_owned),
        ..ListParams::default()
    };
    let nodes = Api::<Node>::all(client.clone()).list(&labels).await?;
    let reports = Api::<GpuNode>::all(client.clone())
        .list(&ListParams::default())
        .await?;
    let pods = Api::<Pod>::all(client.clone())
        .list(&ListParams::default())
        .await?;

    let mut wrong = Vec::new();
    for node in nodes.items.iter().map(Node::name_any) {
        let report = reports
            .items
            .iter()
            .find(|report| report.name_any() == node);
        let status = report
            .and_then(|report| report.status.clone())
            .unwrap_or_default();
        let cards: BTreeMap<&str, u64> = status
            .gpus
            .iter()
            .map(|gpu| (gpu.uuid.as_str(), bound(gpu, &status)))
            .collect();
        let here = pods
            .items
            .iter()
            .filter(|pod| node_of(pod) == Some(&node) && !released(pod));
        check_node(&node, &cards, here, &mut wrong);
    }
    ensure!(
        wrong.is_empty(),
        "the cluster is wrong:\n{}",
        wrong.join("\n")
    );
    Ok(())
}

/// The memory that the pods of a namespace hold of each card, by UUID in MiB, from the API server's data.
pub async fn held(client: &Client, namespace: &str) -> Result<BTreeMap<String, u64>> {
    let pods = Api::<Pod>::namespaced(client.clone(), namespace);
    let mut held = BTreeMap::new();
    for pod in pods.list(&ListParams::default()).await?.items {
        if node_of(&pod).is_none() || released(&pod) {
            continue;
        }
        let assignment = assignment(&pod).map_err(Error::msg)?;
        for (uuid, mib) in assignment
            .into_iter()
            .flat_map(|assignment| assignment.charges)
        {
            *held.entry(uuid.to_string()).or_default() += mib.0;
        }
    }
    Ok(held)
}

fn check_node<'a>(
    node: &str,
    cards: &BTreeMap<&str, u64>,
    pods: impl Iterator<Item = &'a Pod>,
    wrong: &mut Vec<String>,
) {
    let mut held: BTreeMap<String, u64> = BTreeMap::new();
    for pod in pods {
        let who = format!(
            "pod {}/{}",
            pod.namespace().unwrap_or_default(),
            pod.name_any()
        );
        match assignment(pod) {
            Ok(None) => {}
            Ok(Some(assignment)) => {
                for (uuid, mib) in &assignment.charges {
                    *held.entry(uuid.to_string()).or_default() += mib.0;
                    if !cards.contains_key(uuid.as_ref()) {
                        wrong.push(format!("{who}: node {node} has no card {uuid}"));
                    }
                }
            }
            Err(problem) => wrong.push(format!("{who}: {problem}")),
        }
    }
    for (uuid, mib) in held {
        let bound = cards.get(uuid.as_str()).copied().unwrap_or(0);
        if mib > bound {
            wrong.push(format!(
                "node {node}: card {uuid} holds {mib} MiB of {bound}"
            ));
        }
    }
}

/// The pod's assignment, compared with the pod's limits.
fn assignment(pod: &Pod) -> Result<Option<Assignment>, String> {
    let spec = pod.spec.clone().unwrap_or_default();
    let init = spec.init_containers.unwrap_or_default();
    let asking: Vec<&Container> = spec
        .containers
        .iter()
        .chain(&init)
        .filter(|container| asked(container) > 0)
        .collect();
    let Some(text) = pod.annotations().get(names::ASSIGNMENT) else {
        let may_lack = asking.is_empty() || pod.labels().contains_key(BY_HAND);
        return if may_lack {
            Ok(None)
        } else {
            Err("bound without an assignment".to_owned())
        };
    };
    let assignment = Assignment::decode(text).map_err(|problem| problem.to_string())?;
    let charged: u64 = assignment.charges.iter().map(|(_, mib)| mib.0).sum();
    let wanted: u64 = spec.containers.iter().map(asked).sum();
    if charged < wanted {
        return Err(format!("asks for {wanted} MiB and is charged {charged}"));
    }
    for container in asking {
        let name = container.name.as_str();
        let assigned = assignment
            .containers
            .iter()
            .find(|(of, _)| of.as_ref() == name);
        let assigned = match (&assignment.instance, pod.metadata.uid.as_deref()) {
            (Some(_), Some(uid)) => format!("{}={uid}", names::CDI_MIG),
            _ => assigned
                .map(|(_, uuids)| uuids.join(","))
                .unwrap_or_default(),
        };
        let key = format!("{}{name}", names::DEVICES_OF);
        let seen = pod.annotations().get(&key).map_or("", String::as_str);
        if seen.is_empty() || seen != assigned {
            return Err(format!(
                "{name} is assigned {assigned:?} and {key} says {seen:?}"
            ));
        }
    }
    Ok(Some(assignment))
}

/// MiB that the container asks for.
fn asked(container: &Container) -> u64 {
    let limits = container
        .resources
        .as_ref()
        .and_then(|resources| resources.limits.as_ref());
    let limit = limits.and_then(|limits| limits.get(names::GPU_MEM));
    limit
        .and_then(|quantity| quantity.0.parse().ok())
        .unwrap_or(0)
}

/// It holds nothing any more: it has ended, or it is being deleted and each container has.
fn released(pod: &Pod) -> bool {
    let status = pod.status.clone().unwrap_or_default();
    if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return true;
    }
    let init = status.init_container_statuses.unwrap_or_default();
    let mut containers = status.container_statuses.unwrap_or_default();
    containers.extend(init);
    let ended = |state: &k8s_openapi::api::core::v1::ContainerStatus| {
        state
            .state
            .as_ref()
            .is_some_and(|state| state.terminated.is_some())
    };
    pod.metadata.deletion_timestamp.is_some()
        && !containers.is_empty()
        && containers.iter().all(ended)
}
