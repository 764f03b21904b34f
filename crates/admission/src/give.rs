//! The additions to every pod that requests GPU memory: its scheduler, the variables for devices and limits that
//! NVIDIA's container toolkit reads, and the administrator's defaults.

use gpustow_api::limit::{self, Enforce};
use gpustow_api::names;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

use crate::containers::{
    added, all, gpus, has_variable, is_exclusive, limit as limit_of, name, note, note_of, nvidias,
    paths, wants, whole,
};
use crate::{Cluster, Patch, mps};

/// Kubernetes' own scheduler, which pods name that name none.
const DEFAULT_SCHEDULER: &str = "default-scheduler";

/// The containers that request GPU memory, and none of NVIDIA's own GPUs, which are refused later.
pub(crate) fn asking(pod: &Value, resource: &str) -> Vec<String> {
    paths(pod, |it| wants(it, resource) && nvidias(it).is_none())
}

/// Scheduler, label and variables. A container's own variables stay, and are judged later.
pub(crate) fn devices(patch: &mut Patch, resource: &str) {
    patch.set("/metadata/labels", names::MANAGED_LABEL, json!("true"));
    let said = patch.pod["spec"]["schedulerName"].as_str();
    if said.is_none_or(|it| it == DEFAULT_SCHEDULER) {
        patch.set("/spec", "schedulerName", json!(names::SCHEDULER));
    }
    let asking = asking(&patch.pod, resource);
    // First of all variables, so that others can name them.
    for path in &asking {
        patch.tell(path, "0", names::MEM_SHARE, names::SHARE_OF);
        patch.tell(path, "0", names::MEM_BYTES, names::BYTES_OF);
        patch.tell(path, "0", names::MEM_MIB, names::MIB_OF);
        patch.tell(path, "-", names::VISIBLE_DEVICES, names::DEVICES_OF);
    }
    let idle = paths(&patch.pod, |it| {
        !wants(it, resource) && nvidias(it).is_none() && !has_variable(it, names::VISIBLE_DEVICES)
    });
    for path in idle {
        patch.give_void(&path);
    }
    mps::give(patch, &asking);
}

/// Gives no device to ephemeral containers that are added.
pub(crate) fn void(patch: &mut Patch, before: &Value) {
    let new = added(&patch.pod, before).filter(|(_, it)| nvidias(it).is_none());
    let new: Vec<_> = new.map(|(path, _)| path).collect();
    for path in new {
        patch.give_void(&path);
    }
}

/// The administrator's defaults for settings that the pod leaves open, and the limits that follow.
pub(crate) fn defaults(patch: &mut Patch, namespace: &ObjectMeta, cluster: Cluster<'_>) {
    let requests = &cluster.spec.requests;
    let own = namespace.name.as_deref();
    let starts_alone = |it: &String| it == "*" || Some(it.as_str()) == own;
    if note(&patch.pod, names::START).is_none() && requests.start_alone.iter().any(starts_alone) {
        patch.annotate(names::START, "alone");
    }
    if !requests.runtime_class_name.is_empty() && patch.pod["spec"]["runtimeClassName"].is_null() {
        let class = json!(requests.runtime_class_name);
        patch.put("add", "/spec/runtimeClassName", class);
    }
    let silent = note(&patch.pod, names::ENFORCE).is_none();
    if requests.enforce != Enforce::default()
        && silent
        && !is_exclusive(&patch.pod)
        && !is_relative(&patch.pod)
    {
        patch.annotate(names::ENFORCE, requests.enforce.into());
    }
    let asking = asking(&patch.pod, cluster.resource);
    if !requests.driver_capabilities.is_empty() {
        for path in &asking {
            let value = &requests.driver_capabilities;
            patch.give_text(path, names::DRIVER_CAPABILITIES, value);
        }
    }
    if note(&patch.pod, names::ENFORCE) == Some(Enforce::Driver.into()) && !is_exclusive(&patch.pod)
    {
        limits(patch, &asking, cluster.resource);
    }
}

/// Gives each of these containers its limit, in MiB of each of its GPUs.
fn limits(patch: &mut Patch, asking: &[String], resource: &str) {
    for path in asking {
        let it = patch.pod.pointer(path).cloned().unwrap_or_default();
        let asked = limit_of(&it, resource).and_then(whole);
        let own = name(&it);
        let said = note_of(&patch.pod, names::MEM_LIMIT_OF, names::MEM_LIMIT, own);
        if let Some(mib) = limit::literal(said, asked, gpus(&patch.pod, own)) {
            patch.give_text(path, names::MEMORY_LIMIT, &mib);
            patch.give_text(path, names::MEMORY_REQUEST, "0");
        }
    }
}

/// Does a container ask for a part of its GPUs, whatever their size?
pub(crate) fn is_relative(pod: &Value) -> bool {
    let mut own = all(pod).map(|(_, it)| name(it));
    note(pod, names::GPU_MEM_PERCENTAGE).is_some()
        || own.any(|name| note(pod, &format!("{}{name}", names::GPU_MEM_PERCENTAGE_OF)).is_some())
}
