//! The amount of a pod that leaves it to the history of its workload.

use gpustow_api::owner::{self, Owner};
use gpustow_api::workload::{Amounts, GpuWorkload};
use gpustow_api::{BadRequest, names};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

use crate::Patch;
use crate::containers::{asks, bad, gpus, limit, list, name, note};

/// The container that kubectl takes if none is named.
const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";

/// Where the amount of a pod is from, if the pod did not say it.
#[must_use]
pub fn origin(pod: &Pod, resource: &str) -> Option<&'static str> {
    match pod.metadata.annotations.as_ref()?.get(resource)?.as_str() {
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
/// [`BadRequest`] says why there is none, and what to write.
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
    let labels = namespace.labels.as_ref();
    let quantile = labels.and_then(|labels| labels.get(names::AUTO_LABEL));
    let quantile = quantile.map(String::as_str);
    let advice = advice(history, container).and_then(|it| {
        let (mib, from) = match quantile? {
            "p95" => (it.p95_mib, "auto-p95"),
            "p99" => (it.p99_mib, "auto-p99"),
            _ => return None,
        };
        (it.enough && mib > 0).then_some((mib, from, it.limit_mib))
    });
    let notes = namespace.annotations.as_ref();
    let written = notes.and_then(|notes| notes.get(names::AUTO_DEFAULT));
    let default = || Some((default(written?)?, "auto-default", 0));
    let allowed = matches!(quantile, Some("p95" | "p99"));
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

/// What the history of this container and image advises.
fn advice<'a>(history: Option<&'a GpuWorkload>, container: &Value) -> Option<&'a Amounts> {
    let image = container["image"].as_str().unwrap_or_default();
    let mut all = history?.spec.containers.iter();
    let found = all.find(|it| it.name == name(container) && it.image == image)?;
    Some(&found.advice)
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
            "the namespace does not allow it: label it {}: p95 or p99, or write an amount",
            names::AUTO_LABEL
        ),
        (true, true) => format!(
            "the workload has no half day of history with this image, and the namespace has no default: write the MiB of \
             each GPU into its annotation {}, or write an amount",
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
