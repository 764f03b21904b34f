//! The reasons to refuse a pod that requests GPU memory. `gpustow_api::request` has the refusals that the extender
//! shares. The other refusals close ways around gpustow's assignments.

use std::collections::BTreeMap;

use gpustow_api::config::Action;
use gpustow_api::{BadRequest, names, request};
use gpustow_pack::{Mib, Request};
use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;

use crate::containers::{
    added, all, are_few, asks, bad, env, field, is_bounded, is_exclusive, name, note, notes,
    nvidias, wants, whole,
};
use crate::{Cluster, MAX_ANNOTATIONS, MAX_CONTAINERS, MAX_VARIABLES, keys, mps};

/// The annotations that only gpustow writes, and the component that writes each.
const WRITTEN: [(&str, &str); 5] = [
    (names::ASSIGNMENT, "extender"),
    (names::EPOCH, "extender"),
    (names::FENCE, "extender"),
    (names::RESERVATION, "extender"),
    (names::CONFIRMED, "agent"),
];
/// The prefixes of annotations that only the extender writes on a pod that requests GPU memory.
const WRITTEN_OF: [&str; 6] = [
    names::DEVICES_OF,
    names::MIB_OF,
    names::BYTES_OF,
    names::SHARE_OF,
    names::MPS_OF,
    names::CDI_DOMAIN,
];

/// Refuses annotations that only gpustow writes, of any user.
pub(crate) fn forged(pod: &Value, resource: &str) -> Result<(), BadRequest> {
    let says = |key: &str, who: &str| {
        let problem = format!("only gpustow's {who} may write it: remove it");
        Err(bad(key_field(key), problem))
    };
    for (key, who) in WRITTEN {
        if note(pod, key).is_some() {
            return says(key, who);
        }
    }
    let is_placeholder = !pod["metadata"]["labels"][names::PLACEHOLDER].is_null();
    if note(pod, names::PLACEHOLDER_FOR).is_some() && !is_placeholder {
        return says(names::PLACEHOLDER_FOR, "extender");
    }
    let notes = notes(pod);
    let begins = |key: &&String| WRITTEN_OF.iter().any(|begin| key.starts_with(begin));
    match notes.keys().find(begins).filter(|_| asks(pod, resource)) {
        Some(key) => says(key, "extender"),
        None => Ok(()),
    }
}

fn key_field(key: &str) -> String {
    format!("metadata.annotations[{key}]")
}

/// Refuses pods that are too large to be looked at.
pub(crate) fn bounded(pod: &Value) -> Result<(), BadRequest> {
    if !are_few(pod) {
        let problem =
            format!("more than {MAX_CONTAINERS} of all kinds in a pod: make several pods of it");
        return Err(bad("spec.containers", problem));
    }
    match is_bounded(pod) {
        true => Ok(()),
        false => Err(bad(
            "spec.containers",
            format!(
                "more than {MAX_VARIABLES} environment variables and limits: load them by envFrom or from a file"
            ),
        )),
    }
}

/// Refuses a request that no limit equals. The API server would refuse it, too, but does not name the fix.
pub(crate) fn limited(pod: &Value, resource: &str) -> Result<(), BadRequest> {
    let equals = |it: &Value| {
        let amount = |list: &str| it["resources"][list].get(resource).and_then(whole);
        let request = amount("requests");
        request.is_none() || amount("limits") == request
    };
    match all(pod).find(|(_, it)| !equals(it)) {
        None => Ok(()),
        Some((path, _)) => Err(bad(
            format!("{}.resources.limits[{resource}]", field(&path)),
            "the API server refuses a request without a limit that equals it: write limits alone",
        )),
    }
}

/// The warning for a pod that is to start alone, if no probe shows when its server has started.
pub(crate) fn starts_unseen(pod: &Value, resource: &str) -> Option<String> {
    let is_seen = |it: &Value| !it["readinessProbe"].is_null() || !it["startupProbe"].is_null();
    let mut asking = all(pod).filter(|(_, it)| wants(it, resource));
    let is_alone = note(pod, names::START) == Some("alone");
    (is_alone && !asking.any(|(_, it)| is_seen(it))).then(|| {
        format!(
            "metadata.annotations[{}]: without a readinessProbe the pod is Ready as soon as its container runs, and its start \
             over: give a container that requests {resource} one",
            names::START
        )
    })
}

/// Judges a new pod with all that it was given.
pub(crate) fn created(pod: &Value, user: &str, cluster: Cluster<'_>) -> Result<(), BadRequest> {
    let resource = cluster.resource;
    few(pod, None, resource)?;
    scheduler(pod, cluster)?;
    let node = pod["spec"]["nodeName"].as_str().unwrap_or_default();
    if !node.is_empty() && !user.starts_with("system:node:") {
        let problem = format!(
            "a pod that asks for {resource} gets its node and its GPUs from the scheduler: remove it and require the node by \
             spec.affinity.nodeAffinity with matchFields: metadata.name In [{}]",
            shown(node)
        );
        return Err(bad("spec.nodeName", problem));
    }
    let request = requested(pod, cluster)?;
    for (path, it) in all(pod) {
        container(&path, it, resource)?;
        let own = std::slice::from_ref(&it).iter().copied();
        devices(&path, it, own.filter(|it| wants(it, resource)))?;
    }
    limits(pod, &request, resource)?;
    mps::judge(pod, resource)
}

/// A pod has few annotations, or no more than `before`.
pub(crate) fn few(pod: &Value, before: Option<&Value>, resource: &str) -> Result<(), BadRequest> {
    let count = |pod: &Value| {
        let all = pod["metadata"]["annotations"].as_object();
        all.map_or(0, serde_json::Map::len)
    };
    let (is, was) = (count(pod), before.map_or(0, count));
    match is > MAX_ANNOTATIONS && is > was {
        true => Err(bad(
            "metadata.annotations",
            format!(
                "{is} are more than the {MAX_ANNOTATIONS} that a pod may have that asks for {resource}: remove some"
            ),
        )),
        false => Ok(()),
    }
}

/// The pod's scheduler must call the extender.
fn scheduler(pod: &Value, cluster: Cluster<'_>) -> Result<(), BadRequest> {
    let said = pod["spec"]["schedulerName"].as_str();
    let said = said.unwrap_or(names::SCHEDULER);
    let own = [names::SCHEDULER].into_iter();
    let more = &cluster.spec.scheduling.schedulers;
    let all: Vec<_> = own.chain(more.iter().map(String::as_str)).collect();
    match all.contains(&said) {
        true => Ok(()),
        false => Err(bad(
            "spec.schedulerName",
            format!(
                "{} does not use gpustow: write {}",
                shown(said),
                all.join(" or ")
            ),
        )),
    }
}

/// The request of the pod, as the extender reads it, if its annotations are good in every other way, too.
pub(crate) fn requested(pod: &Value, cluster: Cluster<'_>) -> Result<Request, BadRequest> {
    let typed: Pod = serde_json::from_value(pod.clone())
        .map_err(|error| bad("pod", format!("cannot be read: {error}: correct the field")))?;
    let (request, _) = request(&typed, cluster.resource)?;
    let notes = notes(pod);
    words(&notes)?;
    keys::known(&notes, cluster.resource)?;
    least(pod, &request, cluster)?;
    Ok(request)
}

/// Annotations that have one of a few words.
fn words(notes: &BTreeMap<String, String>) -> Result<(), BadRequest> {
    if let Some(said) = notes.get(names::RECLAIM_ACTION) {
        let actions = Action::OF_PODS.map(Action::word);
        if !actions.contains(&said.as_str()) {
            let problem = format!("{:?} is none of {}", shown(said), actions.join(", "));
            return Err(bad(key_field(names::RECLAIM_ACTION), problem));
        }
    }
    for key in [names::EVICTABLE, names::ASLEEP] {
        let said = notes.get(key).map_or("true", String::as_str);
        if !["true", "false"].contains(&said) {
            let problem = format!("{:?} is neither \"true\" nor \"false\"", shown(said));
            return Err(bad(key_field(key), problem));
        }
    }
    Ok(())
}

/// Quotas, LimitRanges and kube-scheduler's sum of each node count the request of a pod. The request is next to nothing
/// if a few MiB are split over many GPUs. A request for whole GPUs or a percentage states only a least size, which can
/// be as low.
fn least(pod: &Value, request: &Request, cluster: Cluster<'_>) -> Result<(), BadRequest> {
    let requests = &cluster.spec.requests;
    let per_gpu = u64::from(requests.least_mib_per_gpu);
    let whole = u64::from(requests.least_mib_per_exclusive_gpu);
    let asking = all(pod).filter(|(_, it)| wants(it, cluster.resource));
    for ((path, _), claim) in asking.zip(&request.claims) {
        let (gpus, part) = (u64::from(claim.gpus), u64::from(claim.percentage));
        let (of_whole, what, otherwise) = match (request.exclusive, part) {
            (true, _) => (
                whole,
                "whole GPUs",
                format!(", or remove {}", names::EXCLUSIVE),
            ),
            (false, 0) => (0, "GPUs", String::new()),
            (false, part) => (
                (whole * part).div_ceil(100),
                "GPUs",
                format!(", which is its share of {part} %"),
            ),
        };
        let (least, what, otherwise) = match per_gpu >= of_whole {
            true => (per_gpu, "GPUs", String::new()),
            false => (of_whole, what, otherwise),
        };
        if claim.mib < Mib(least) {
            let problem = format!(
                "{} MiB over {gpus} {what} are less than the {least} MiB that this cluster counts for each: ask for {}{otherwise}",
                claim.mib.0.saturating_mul(gpus),
                least.saturating_mul(gpus)
            );
            let resource = cluster.resource;
            let at = format!("{}.resources.limits[{resource}]", field(&path));
            return Err(bad(at, problem));
        }
    }
    Ok(())
}

/// Refuses fields that no container of such a pod may have.
fn container(path: &str, it: &Value, resource: &str) -> Result<(), BadRequest> {
    let at = field(path);
    if let Some(key) = nvidias(it).filter(|_| wants(it, resource)) {
        return Err(bad(
            format!("{at}.resources.limits[{key}]"),
            format!("a container asks either for this or for {resource}: remove one of them"),
        ));
    }
    if it["securityContext"]["privileged"] == true {
        return Err(bad(
            format!("{at}.securityContext.privileged"),
            format!(
                "a privileged container sees every GPU of its node: remove it, or do not ask for {resource}"
            ),
        ));
    }
    Ok(())
}

/// A container reads its devices from the annotations of `from`, or has none.
fn devices<'a>(
    path: &str,
    it: &Value,
    from: impl Iterator<Item = &'a Value>,
) -> Result<(), BadRequest> {
    let own: Vec<_> = env(it)
        .filter(|it| it["name"] == names::VISIBLE_DEVICES)
        .collect();
    if own.is_empty() {
        return Ok(());
    }
    let may: Vec<String> = from
        .map(|it| format!("metadata.annotations['{}{}']", names::DEVICES_OF, name(it)))
        .collect();
    let asks = path.starts_with("/spec/ephemeral").then_some(false);
    let asks = asks.unwrap_or(!may.is_empty());
    let is_good = |variable: &&Value| match variable["valueFrom"].is_null() {
        true => {
            let value = variable["value"].as_str().unwrap_or_default();
            !asks && ["", "void", "none"].contains(&value)
        }
        false => {
            let path = variable["valueFrom"]["fieldRef"]["fieldPath"].as_str();
            path.is_some_and(|it| may.iter().any(|may| may == it))
        }
    };
    match own.iter().all(is_good) {
        true => Ok(()),
        false => Err(bad(
            format!("{}.env", field(path)),
            format!("{} is gpustow's to set: remove it", names::VISIBLE_DEVICES),
        )),
    }
}

/// The literals that limit containers must follow from the request.
fn limits(pod: &Value, request: &Request, resource: &str) -> Result<(), BadRequest> {
    let mut claims = request.claims.iter();
    for (path, it) in all(pod) {
        let claim = match wants(it, resource) {
            true => claims.next(),
            false => None,
        };
        let mib = claim.map_or(0, |claim| claim.driver_limit.0);
        literals(&path, it, (mib > 0).then_some(mib))?;
    }
    Ok(())
}

fn literals(path: &str, it: &Value, limit: Option<u64>) -> Result<(), BadRequest> {
    let [most, least] = [names::MEMORY_LIMIT, names::MEMORY_REQUEST];
    let is_strange = |variable: &&Value| {
        let should = match variable["name"].as_str() {
            Some(names::MEMORY_LIMIT) => limit.map(|mib| mib.to_string()),
            Some(names::MEMORY_REQUEST) => limit.map(|_| "0".to_owned()),
            _ => return false,
        };
        should.is_none() || variable["value"].as_str() != should.as_deref()
    };
    match env(it).find(is_strange) {
        None => Ok(()),
        Some(_) => Err(bad(
            format!("{}.env", field(path)),
            format!(
                "{most} and {least} are gpustow's to set: remove them, and write {}: driver into the annotations",
                names::ENFORCE
            ),
        )),
    }
}

/// Judges ephemeral containers that are added to a pod that requests GPU memory.
pub(crate) fn debugged(pod: &Value, before: &Value, resource: &str) -> Result<(), BadRequest> {
    let shares = note(pod, names::COMPUTE_PERCENT).is_some();
    let by_driver = note(pod, names::ENFORCE) == Some("driver") && !is_exclusive(pod);
    for (path, it) in added(pod, before) {
        let at = field(&path);
        container(&path, it, resource)?;
        literals(&path, it, None)?;
        let mut all_env = env(it);
        let is_mps = |it: &Value| {
            let name = it["name"].as_str().unwrap_or_default();
            name.starts_with("CUDA_MPS_")
        };
        if shares && all_env.any(is_mps) {
            let key = names::COMPUTE_PERCENT;
            let problem = format!(
                "the variables CUDA_MPS_* of a pod with {key} are gpustow's to set: remove them"
            );
            return Err(bad(format!("{at}.env"), problem));
        }
        devices(
            &path,
            it,
            all(pod).map(|(_, it)| it).filter(|it| wants(it, resource)),
        )?;
        let reads = |it: &Value| it["name"] == names::VISIBLE_DEVICES && !it["valueFrom"].is_null();
        if (shares || by_driver) && env(it).any(reads) {
            let problem = format!(
                "{}: a container that is added to a pod whose GPU memory the driver or MPS limits gets no GPU: remove it",
                names::VISIBLE_DEVICES
            );
            return Err(bad(format!("{at}.env"), problem));
        }
        let key = format!("{}{}", names::CDI_OF, name(it));
        if note(pod, &key).is_some() {
            let problem =
                "gives GPUs to a container that is added to the pod: name the container otherwise";
            return Err(bad(key_field(&key), problem));
        }
    }
    Ok(())
}

/// A value as it is quoted.
pub(crate) fn shown(value: &str) -> String {
    match value.chars().count() > 63 {
        true => value.chars().take(60).chain("...".chars()).collect(),
        false => value.to_owned(),
    }
}
