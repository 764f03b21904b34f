//! The amount of a pod that leaves it to the history of its workload.

use gpustow_api::owner::{self, Owner};
use gpustow_api::workload::{Amounts, Basis, GpuWorkload};
use gpustow_api::{BadRequest, names};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

use crate::Patch;
use crate::adopt::{Sharer, Terms};
use crate::containers::{all, asks, bad, gpus, limit, list, name, note};

/// The container that kubectl takes if none is named.
const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";

/// The origin of a pod's amount, if the pod itself did not state it.
#[must_use]
pub fn origin(pod: &Pod, resource: &str) -> Option<&'static str> {
    match pod.metadata.annotations.as_ref()?.get(resource)?.as_str() {
        "auto-advised" => Some("what its workload exceeds in short peaks alone"),
        "auto-earlier-image" => Some("what its workload needed with an earlier image"),
        "auto-p95" => Some("what its workload exceeds in one minute of twenty"),
        "auto-p99" => Some("what its workload exceeds in one minute of a hundred"),
        "auto-default" => Some("the default of its namespace"),
        _ => None,
    }
}

/// Does the pod leave its amount to the history?
#[must_use]
pub fn wants(pod: &Value, resource: &str) -> bool {
    note(pod, resource) == Some("auto")
}

/// Does the admission of the pod depend on the history of its workload?
#[must_use]
pub fn reads_history(pod: &Value, namespace: &ObjectMeta, resource: &str) -> bool {
    let terms = Terms::of(namespace).ok().flatten();
    let shares = terms.is_some_and(|it| it.sharer == Sharer::TimeSlicing);
    wants(pod, resource) || shares && rule(namespace).is_some()
}

/// Whose history that is.
#[must_use]
pub fn workload(pod: &Value) -> Owner {
    let metadata = serde_json::from_value(pod["metadata"].clone());
    owner::workload(&Pod {
        metadata: metadata.unwrap_or_default(),
        ..Pod::default()
    })
}

/// Gives the pod the amount that it leaves open.
///
/// # Errors
/// [`BadRequest`] gives the reason why there is no amount, and the fix.
pub(crate) fn admit(
    patch: &mut Patch,
    namespace: &ObjectMeta,
    history: Option<&GpuWorkload>,
    resource: &str,
) -> Result<(), BadRequest> {
    if !wants(&patch.pod, resource) {
        return Ok(());
    }
    let at = main_container(&patch.pod);
    let container = list(&patch.pod, "containers").get(at);
    let Some(container) = container.filter(|it| limit(it, resource).is_none()) else {
        return Ok(());
    };
    let own = name(container).to_owned();
    let advice = advice(namespace, history, container);
    let notes = namespace.annotations.as_ref();
    let written = notes.and_then(|notes| notes.get(names::AUTO_DEFAULT));
    let default = || Some((default(written?)?, "auto-default", 0));
    let allowed = rule(namespace).is_some();
    let found = advice.or_else(default).filter(|_| allowed);
    let Some((mib, from, limit)) = found else {
        return match asks(&patch.pod, resource) {
            true => Ok(()),
            false => Err(none(allowed, written, resource)),
        };
    };
    let gpus = gpus(&patch.pod, &own);
    let key = format!("{}{own}", names::MEM_LIMIT_OF);
    let is_said = [names::MEM_LIMIT, &key].into_iter();
    if limit > mib
        && !is_said
            .into_iter()
            .any(|key| note(&patch.pod, key).is_some())
    {
        patch.annotate(&key, &limit.saturating_mul(gpus).to_string());
    }
    let path = format!("/spec/containers/{at}");
    patch.request(&path, resource, mib.saturating_mul(gpus));
    patch.set("/metadata/annotations", resource, json!(from));
    Ok(())
}

/// Leaves the amount of a translated pod to the history of its workload, if that advises one and the namespace allows it.
pub(crate) fn leave(
    patch: &mut Patch,
    namespace: &ObjectMeta,
    history: Option<&GpuWorkload>,
    resource: &str,
) {
    let at = main_container(&patch.pod);
    let container = list(&patch.pod, "containers").get(at);
    let Some(container) = container.filter(|it| limit(it, resource).is_some()) else {
        return;
    };
    let asking = all(&patch.pod).filter(|(_, it)| limit(it, resource).is_some());
    let is_own = note(&patch.pod, names::ADOPTED).is_none();
    if is_own || asking.count() > 1 || advice(namespace, history, container).is_none() {
        return;
    }
    let part = format!("{}{}", names::GPU_MEM_PERCENTAGE_OF, name(container));
    patch.take("/metadata/annotations", &part);
    for list in ["limits", "requests"] {
        patch.take(&format!("/spec/containers/{at}/resources/{list}"), resource);
    }
    patch.annotate(resource, "auto");
}

type Amount = fn(&Amounts) -> u64;

/// Which of a history's amounts the namespace allows, and how that is written.
fn rule(namespace: &ObjectMeta) -> Option<(Amount, &'static str)> {
    match namespace.labels.as_ref()?.get(names::AUTO_LABEL)?.as_str() {
        "advised" => Some((|it| it.request_mib, "auto-advised")),
        "p95" => Some((|it| it.p95_mib, "auto-p95")),
        "p99" => Some((|it| it.p99_mib, "auto-p99")),
        _ => None,
    }
}

/// The advice of this container's histories for its image: MiB of each GPU, the rule, and the limit.
fn advice(
    namespace: &ObjectMeta,
    history: Option<&GpuWorkload>,
    container: &Value,
) -> Option<(u64, &'static str, u64)> {
    let image = container["image"].as_str().unwrap_or_default();
    let own = history?.spec.containers.iter();
    let own = own.filter(|it| it.name == name(container));
    let (basis, (amount, from)) = (Basis::new(own, image), rule(namespace)?);
    let from = match basis.earlier {
        true => "auto-earlier-image",
        false => from,
    };
    Some((
        basis.follow(amount)?,
        from,
        basis.follow(|it| it.limit_mib)?,
    ))
}

/// A namespace's default as a number of MiB.
fn default(text: &str) -> Option<u64> {
    let is_number = text.bytes().all(|it| it.is_ascii_digit());
    let is_number = is_number && text.len() <= 9 && !text.starts_with('0');
    text.parse().ok().filter(|_| is_number)
}

fn none(allowed: bool, written: Option<&String>, resource: &str) -> BadRequest {
    let problem = match (allowed, written.is_none_or(String::is_empty)) {
        (false, _) => format!(
            "the namespace does not allow it: label it {}: advised, or write an amount",
            names::AUTO_LABEL
        ),
        (true, true) => format!(
            "the workload has no advice to follow (kubectl gpustow advise says why), and the namespace has no default: write \
             the MiB of each GPU into its annotation {}, or write an amount",
            names::AUTO_DEFAULT
        ),
        (true, false) => format!(
            "the namespace's annotation {} is no number of MiB: correct it, or write an amount",
            names::AUTO_DEFAULT
        ),
    };
    bad(format!("metadata.annotations[{resource}]"), problem)
}

/// The place of kubectl's default container, else of the first.
fn main_container(pod: &Value) -> usize {
    let named = note(pod, DEFAULT_CONTAINER).unwrap_or_default();
    let found = list(pod, "containers").iter();
    let found = found.enumerate().find(|(_, it)| name(it) == named);
    found.map_or(0, |(at, _)| at)
}
