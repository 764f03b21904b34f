//! The scheduling gate of pods that are queued.

use gpustow_api::{BadRequest, names};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

use crate::containers::{all, bad, limit, list, name, note, wants, whole};
use crate::{Cluster, Patch};

/// Priority classes of pods that a cluster cannot do without.
const CRITICAL: [&str; 2] = ["system-cluster-critical", "system-node-critical"];

pub(crate) fn is_gated(pod: &Value) -> bool {
    list(pod, "schedulingGates")
        .iter()
        .any(|gate| gate["name"] == names::GATE)
}

/// Does the namespace keep its pods out of the queue?
fn is_out(namespace: &ObjectMeta) -> bool {
    let labels = namespace.labels.as_ref();
    labels.is_some_and(|it| it.get(names::QUEUE_LABEL).is_some_and(|it| it == "off"))
}

/// Gives a pod that requests GPU memory the gate, if an entry queues it.
pub(crate) fn give(patch: &mut Patch, namespace: &ObjectMeta, cluster: Cluster<'_>) {
    if is_out(namespace) || is_gated(&patch.pod) || !may_be_queued(&patch.pod) {
        return;
    }
    let priority = patch.pod["spec"]["priority"].as_i64();
    let priority = priority.and_then(|it| it.try_into().ok()).unwrap_or(0);
    let size = size(&patch.pod, cluster.resource);
    let mut from = cluster.queue_from.iter();
    if !from.any(|it| it.queues(priority, size)) {
        return;
    }
    if list(&patch.pod, "schedulingGates").is_empty() {
        patch.put("add", "/spec/schedulingGates", json!([]));
    }
    let gate = json!({ "name": names::GATE });
    patch.put("add", "/spec/schedulingGates/-", gate);
}

/// Refuses the gate on a pod that requests no GPU memory: it would stay for ever.
pub(crate) fn refuse(pod: &Value, namespace: &ObjectMeta) -> Result<(), BadRequest> {
    match is_gated(pod) && !is_out(namespace) {
        true => Err(bad(
            format!("spec.schedulingGates[{}]", names::GATE),
            "the pod requests no GPU memory and is not queued: remove the gate",
        )),
        false => Ok(()),
    }
}

/// False for mirrors of static pods, pods of DaemonSets, pods that a cluster cannot do without, and placeholders.
fn may_be_queued(pod: &Value) -> bool {
    let owners = pod["metadata"]["ownerReferences"].as_array();
    let mut owners = owners.into_iter().flatten();
    let class = pod["spec"]["priorityClassName"].as_str();
    pod["spec"]["nodeName"]
        .as_str()
        .unwrap_or_default()
        .is_empty()
        && !owners.any(|it| it["kind"] == "DaemonSet" && it["controller"] == true)
        && !class.is_some_and(|it| CRITICAL.contains(&it))
        && pod["metadata"]["labels"][names::PLACEHOLDER].is_null()
}

/// MiB per GPU and GPUs of a pod that requests both in numbers and for one container. Others count as larger than any.
fn size(pod: &Value, resource: &str) -> Option<(u64, u64)> {
    let mut asking = all(pod).filter(|(_, it)| wants(it, resource));
    let (Some((_, one)), None) = (asking.next(), asking.next()) else {
        return None;
    };
    let of = [names::GPU_COUNT_OF, names::GPU_MEM_PERCENTAGE_OF];
    let of = of.map(|of| format!("{of}{}", name(one)));
    let others = [names::EXCLUSIVE, names::GPU_MEM_PERCENTAGE].into_iter();
    let mut others = others.chain(of.iter().map(String::as_str));
    if others.any(|key| note(pod, key).is_some()) {
        return None;
    }
    let gpus = note(pod, names::GPU_COUNT).unwrap_or("1");
    let is_number = gpus.len() <= 2 && gpus.bytes().all(|it| it.is_ascii_digit());
    let gpus: u64 = gpus.parse().ok().filter(|_| is_number)?;
    let mib = whole(limit(one, resource)?)?;
    Some((mib.checked_div(gpus)?, gpus))
}
