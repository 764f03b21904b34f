//! The amount of a pod that leaves it to the history of its workload. The policies gpustow-auto and
//! gpustow-auto-default give it when the pod is created (`crates/policies/policies/auto.yaml`); this is the same for a
//! pod that does not exist yet.

use std::collections::BTreeMap;

use gpustow_api::workload::GpuWorkload;
use gpustow_api::{BadRequest, names, owner};
use k8s_openapi::api::core::v1::{Container, Namespace, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// The container that kubectl takes if none is named.
const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";
/// Why a pod gets no amount; the policy has the same texts.
pub(crate) const NOT_ALLOWED: &str =
    "the namespace does not allow it: label it {{AUTO_LABEL}}: p95 or p99, or write an amount";
pub(crate) const NO_HISTORY: &str = "the workload has no half day of history with this image, and the namespace has no default: write the MiB of each GPU into its annotation {{AUTO_DEFAULT}}, or write an amount";
pub(crate) const NO_NUMBER: &str = "the namespace's annotation {{AUTO_DEFAULT}} is no number of MiB, or this cluster has no MutatingAdmissionPolicy: write an amount";

/// Where the amount of a pod is from, if the pod did not say it.
#[must_use]
pub fn origin(pod: &Pod, resource: &str) -> Option<&'static str> {
    match note(pod, resource)? {
        "auto-p95" => Some("what its workload exceeds in one minute of twenty"),
        "auto-p99" => Some("what its workload exceeds in one minute of a hundred"),
        "auto-default" => Some("the default of its namespace"),
        _ => None,
    }
}

/// Does the pod leave its amount to the history?
#[must_use]
pub fn wants(pod: &Pod, resource: &str) -> bool {
    note(pod, resource) == Some("auto")
}

/// Gives the pod the amount that it would get at its creation in this namespace.
///
/// # Errors
/// [`BadRequest`] says why the API server would refuse it.
pub fn admit(
    pod: &mut Pod,
    namespace: &Namespace,
    workloads: &[GpuWorkload],
    resource: &str,
) -> Result<(), BadRequest> {
    if !wants(pod, resource) {
        return Ok(());
    }
    let at = main_container(pod);
    let container = pod.spec.as_ref().and_then(|spec| spec.containers.get(at));
    let Some(container) = container.filter(|it| amount(it, resource).is_none()) else {
        return Ok(());
    };
    let label = namespace.metadata.labels.as_ref();
    let label = label.and_then(|labels| labels.get(names::AUTO_LABEL));
    let quantile = label.map(String::as_str);
    let gpus = gpus(pod, &container.name);
    let advice = || {
        let owner = owner::workload(pod);
        let mut histories = workloads.iter().filter(|it| {
            let target = &it.spec.target_ref;
            it.metadata.namespace == namespace.metadata.name
                && (&target.kind, &target.name) == (&owner.kind, &owner.name)
        });
        let containers = &histories.next()?.spec.containers;
        let image = container.image.as_deref().unwrap_or_default();
        let mut containers = containers.iter();
        let advice = &containers
            .find(|it| it.name == container.name && it.image == image)?
            .advice;
        let (mib, from) = match quantile? {
            "p95" => (advice.p95_mib, "auto-p95"),
            "p99" => (advice.p99_mib, "auto-p99"),
            _ => return None,
        };
        (advice.enough && mib > 0).then_some((mib, from, Some(advice.limit_mib)))
    };
    let notes = namespace.metadata.annotations.as_ref();
    let written = notes.and_then(|notes| notes.get(names::AUTO_DEFAULT));
    let default = || {
        let text = written.filter(|text| {
            let digits = text.bytes().all(|it| it.is_ascii_digit());
            digits && text.len() <= 9 && !text.starts_with('0')
        })?;
        Some((text.parse().ok()?, "auto-default", None))
    };
    let allowed = matches!(quantile, Some("p95" | "p99"));
    let found = advice().or_else(default).filter(|_| allowed);
    let Some((mib, from, limit)) = found else {
        let others = pod.spec.iter().flat_map(|spec| {
            let init = spec.init_containers.iter().flatten();
            init.chain(&spec.containers)
        });
        if others.into_iter().any(|it| amount(it, resource).is_some()) {
            return Ok(());
        }
        let problem = match (allowed, written.is_none_or(String::is_empty)) {
            (false, _) => NOT_ALLOWED,
            (true, true) => NO_HISTORY,
            (true, false) => NO_NUMBER,
        };
        return Err(BadRequest {
            field: format!("metadata.annotations[{resource}]"),
            problem: problem
                .replace("{{AUTO_LABEL}}", names::AUTO_LABEL)
                .replace("{{AUTO_DEFAULT}}", names::AUTO_DEFAULT),
        });
    };
    let name = container.name.clone();
    let limit = limit.filter(|limit| *limit > mib);
    let notes = pod.metadata.annotations.get_or_insert_default();
    let own = format!("{}{name}", names::MEM_LIMIT_OF);
    if let Some(limit) = limit
        && !notes.contains_key(names::MEM_LIMIT)
        && !notes.contains_key(&own)
    {
        notes.insert(own, limit.saturating_mul(gpus).to_string());
    }
    notes.insert(resource.to_owned(), from.to_owned());
    let spec = pod.spec.as_mut();
    if let Some(container) = spec.and_then(|spec| spec.containers.get_mut(at)) {
        let amount = Quantity(mib.saturating_mul(gpus).to_string());
        let resources = container.resources.get_or_insert_default();
        for list in [&mut resources.limits, &mut resources.requests] {
            let list: &mut BTreeMap<_, _> = list.get_or_insert_default();
            list.insert(resource.to_owned(), amount.clone());
        }
    }
    Ok(())
}

fn note<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    let notes = pod.metadata.annotations.as_ref()?;
    notes.get(key).map(String::as_str)
}

/// The place of kubectl's default container, else of the first.
fn main_container(pod: &Pod) -> usize {
    let named = note(pod, DEFAULT_CONTAINER).unwrap_or_default();
    let spec = pod.spec.as_ref();
    let found = spec.and_then(|spec| spec.containers.iter().position(|it| it.name == named));
    found.unwrap_or(0)
}

fn amount<'a>(container: &'a Container, resource: &str) -> Option<&'a Quantity> {
    let limits = container.resources.as_ref()?.limits.as_ref()?;
    limits.get(resource).filter(|it| it.0 != "0")
}

/// How many GPUs the container requests; what is no number counts as one and is refused later.
fn gpus(pod: &Pod, container: &str) -> u64 {
    let own = format!("{}{container}", names::GPU_COUNT_OF);
    let said = note(pod, &own).or_else(|| note(pod, names::GPU_COUNT));
    let gpus = said.and_then(|it| it.parse().ok());
    gpus.filter(|gpus| (1..10_000).contains(gpus)).unwrap_or(1)
}
