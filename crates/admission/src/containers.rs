//! The containers of a pod that may be anything, as far as admission reads them.

use std::collections::BTreeMap;

use gpustow_api::{BadRequest, names, quantity};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Map, Value};

use crate::{MAX_CONTAINERS, MAX_VARIABLES};

/// Init containers first, as the API's types have them.
const KINDS: [&str; 2] = ["initContainers", "containers"];

/// The containers of a kind, or another list of `spec`.
pub(crate) fn list<'a>(pod: &'a Value, kind: &str) -> &'a [Value] {
    pod["spec"][kind].as_array().map_or(&[], Vec::as_slice)
}

/// Every container but ephemeral ones, with its path in a patch.
pub(crate) fn all(pod: &Value) -> impl Iterator<Item = (String, &Value)> {
    KINDS.into_iter().flat_map(move |kind| of_kind(pod, kind))
}

/// Every container of one kind, with its path in a patch.
pub(crate) fn of_kind<'a>(
    pod: &'a Value,
    kind: &'static str,
) -> impl Iterator<Item = (String, &'a Value)> {
    let all = list(pod, kind).iter().enumerate();
    all.map(move |(index, it)| (format!("/spec/{kind}/{index}"), it))
}

/// The paths of those for which `is` is true.
pub(crate) fn paths(pod: &Value, is: impl Fn(&Value) -> bool) -> Vec<String> {
    let found = all(pod).filter(|(_, it)| is(it));
    found.map(|(path, _)| path).collect()
}

/// Ephemeral containers that `before` does not have.
pub(crate) fn added<'a>(
    pod: &'a Value,
    before: &Value,
) -> impl Iterator<Item = (String, &'a Value)> {
    let old: Vec<Value> = list(before, "ephemeralContainers").to_vec();
    of_kind(pod, "ephemeralContainers")
        .filter(move |(_, it)| !old.iter().any(|old| old["name"] == it["name"]))
}

/// A path as people write it: `spec.containers[0]`.
pub(crate) fn field(path: &str) -> String {
    let mut parts = path.trim_start_matches('/').splitn(3, '/');
    let mut next = || parts.next().unwrap_or_default();
    let (spec, kind, index) = (next(), next(), next());
    format!("{spec}.{kind}[{index}]")
}

pub(crate) fn bad(field: impl Into<String>, problem: impl Into<String>) -> BadRequest {
    BadRequest {
        field: field.into(),
        problem: problem.into(),
    }
}

pub(crate) fn name(container: &Value) -> &str {
    container["name"].as_str().unwrap_or_default()
}

pub(crate) fn limits(container: &Value) -> Option<&Map<String, Value>> {
    container["resources"]["limits"].as_object()
}

/// A limit that is not zero.
pub(crate) fn limit<'a>(container: &'a Value, key: &str) -> Option<&'a Value> {
    let limit = limits(container)?.get(key)?;
    (limit != "0" && *limit != 0).then_some(limit)
}

/// A limit as the whole number that it is.
pub(crate) fn whole(limit: &Value) -> Option<u64> {
    match limit {
        Value::String(text) => quantity::whole(&Quantity(text.clone())),
        other => other.as_u64(),
    }
}

pub(crate) fn wants(container: &Value, resource: &str) -> bool {
    limit(container, resource).is_some()
}

/// Does a container of the pod request GPU memory?
pub(crate) fn asks(pod: &Value, resource: &str) -> bool {
    all(pod).any(|(_, it)| wants(it, resource))
}

/// The first of NVIDIA's GPUs among a container's limits, which the device plugin gives.
pub(crate) fn nvidias(container: &Value) -> Option<&str> {
    let limits = limits(container).into_iter().flatten();
    let mut asked = limits.filter(|(_, amount)| **amount != "0" && **amount != 0);
    let found = asked.find(|(key, _)| names::is_nvidia_gpu(key));
    found.map(|(key, _)| key.as_str())
}

pub(crate) fn env(container: &Value) -> impl Iterator<Item = &Value> {
    container["env"].as_array().into_iter().flatten()
}

pub(crate) fn has_variable(container: &Value, name: &str) -> bool {
    env(container).any(|it| it["name"] == name)
}

/// The value of an annotation.
pub(crate) fn note<'a>(pod: &'a Value, key: &str) -> Option<&'a str> {
    pod["metadata"]["annotations"][key].as_str()
}

/// That of one container, or of all.
pub(crate) fn note_of<'a>(
    pod: &'a Value,
    own: &str,
    all: &str,
    container: &str,
) -> Option<&'a str> {
    note(pod, &format!("{own}{container}")).or_else(|| note(pod, all))
}

/// Annotations that are texts.
pub(crate) fn notes(pod: &Value) -> BTreeMap<String, String> {
    texts(&pod["metadata"]["annotations"])
}

/// The entries of an object that are texts.
pub(crate) fn texts(object: &Value) -> BTreeMap<String, String> {
    let all = object.as_object().into_iter().flatten();
    let all = all.filter_map(|(key, it)| Some((key.clone(), it.as_str()?.to_owned())));
    all.collect()
}

/// The number of GPUs over which a container's memory is split. An unreadable number counts as one and is refused
/// later.
pub(crate) fn gpus(pod: &Value, container: &str) -> u64 {
    let said = note_of(pod, names::GPU_COUNT_OF, names::GPU_COUNT, container);
    let gpus = said.and_then(|it| it.parse().ok());
    gpus.filter(|gpus| (1..10_000).contains(gpus)).unwrap_or(1)
}

pub(crate) fn is_exclusive(pod: &Value) -> bool {
    note(pod, names::EXCLUSIVE) == Some("true")
}

/// Are there few enough containers to look at?
pub(crate) fn are_few(pod: &Value) -> bool {
    let kinds = ["containers", "initContainers", "ephemeralContainers"];
    let count: usize = kinds.iter().map(|kind| list(pod, kind).len()).sum();
    count <= MAX_CONTAINERS
}

/// Is it cheap to look at every container, and at its variables and limits?
pub(crate) fn is_bounded(pod: &Value) -> bool {
    let kinds = ["containers", "initContainers", "ephemeralContainers"];
    let all = kinds.iter().flat_map(|kind| list(pod, kind));
    let brought = all.map(|it| {
        let env = it["env"].as_array().map_or(0, Vec::len);
        env + limits(it).map_or(0, Map::len)
    });
    are_few(pod) && brought.sum::<usize>() <= MAX_VARIABLES
}
