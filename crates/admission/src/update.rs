//! The request of a pod by its annotations, once the pod has been created.

use gpustow_api::limit::Enforce;
use gpustow_api::{BadRequest, names};
use serde_json::Value;

use crate::containers::{all, asks, bad, name, note, wants};
use crate::{Cluster, judge, keys};

/// The keys that no variable of a container follows.
const PLACING: [&str; 9] = [
    names::POLICY,
    names::RECLAIM_ACTION,
    names::EVICTABLE,
    names::GPU_MODELS,
    names::NOT_GPU_MODELS,
    names::GPU_UUIDS,
    names::NOT_GPU_UUIDS,
    names::GPU_AFFINITY,
    names::GPU_ANTI_AFFINITY,
];

/// Judges a change of annotations.
pub(crate) fn judge(
    pod: &Value,
    before: &Value,
    resizes: bool,
    cluster: Cluster<'_>,
) -> Result<(), BadRequest> {
    if !asks(pod, cluster.resource) {
        return Ok(());
    }
    judge::few(pod, Some(before), cluster.resource)?;
    let changed = changed(pod, before, cluster.resource);
    let node = before["spec"]["nodeName"].as_str();
    let is_bound = node.is_some_and(|node| !node.is_empty());
    let is_limit = |key: &String| key == names::MEM_LIMIT || key.starts_with(names::MEM_LIMIT_OF);
    let limits_alone = is_bound && changed.iter().all(is_limit);
    let resized = limits_alone && resizes;
    if let Some(key) = changed.first().filter(|_| is_bound && !resized) {
        let mut problem = "the pod is bound to its GPUs already: leave it as it was".to_owned();
        if limits_alone {
            let group = names::GROUP;
            problem += &format!(
                ", or, where agents set limits, have an administrator give you the right to resize limits.{group}"
            );
        }
        return Err(bad(format!("metadata.annotations[{key}]"), problem));
    }
    let by_driver = note(before, names::ENFORCE) == Some(Enforce::Driver.into());
    let is_written = |key: &&String| {
        let always = [names::ENFORCE, names::COMPUTE_PERCENT].contains(&key.as_str());
        always || is_limit(key) || by_driver && !PLACING.contains(&key.as_str())
    };
    if let Some(key) = changed.iter().find(is_written).filter(|_| !resized) {
        let problem = "what limits the pod was written into its containers when it was created: leave it as it was, or create \
                       the pod again";
        return Err(bad(format!("metadata.annotations[{key}]"), problem));
    }
    // A pod that is older than a rule keeps its annotations.
    match judge::requested(pod, cluster) {
        Err(problem) if judge::requested(before, cluster).as_ref().err() != Some(&problem) => {
            Err(problem)
        }
        _ => Ok(()),
    }
}

/// The users' annotations that the request changes.
fn changed(pod: &Value, before: &Value, resource: &str) -> Vec<String> {
    let asking = all(pod).filter(|(_, it)| wants(it, resource));
    let asking: Vec<_> = asking.map(|(_, it)| name(it)).collect();
    let of = keys::OF_CONTAINERS
        .iter()
        .flat_map(|(_, of)| asking.iter().map(move |name| format!("{of}{name}")));
    // A model falls asleep while its pod runs, and a version does not concern GPUs.
    let free = [names::ASLEEP, names::MADE_FOR];
    let keys = keys::OF_USERS.iter().filter(|key| !free.contains(key));
    let keys = keys.map(|key| (*key).to_owned());
    keys.chain(of)
        .filter(|key| note(pod, key) != note(before, key))
        .collect()
}
