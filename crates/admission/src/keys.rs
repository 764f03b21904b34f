//! Annotations of pods that look like gpustow's and do nothing: misspelt, unknown, a later version's, or on a pod that
//! requests nothing.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use gpustow_api::version::{VERSION, is_later};
use gpustow_api::{BadRequest, names};
use serde_json::Value;

use crate::containers::{bad, notes};

/// The keys that users write, in the order in which they are tried.
pub(crate) const OF_USERS: [&str; 19] = [
    names::GPU_COUNT,
    names::EXCLUSIVE,
    names::POLICY,
    names::MADE_FOR,
    names::GPU_MEM_PERCENTAGE,
    names::MEM_LIMIT,
    names::ENFORCE,
    names::RECLAIM_ACTION,
    names::EVICTABLE,
    names::ASLEEP,
    names::GPU_MODELS,
    names::NOT_GPU_MODELS,
    names::GPU_UUIDS,
    names::NOT_GPU_UUIDS,
    names::GPU_AFFINITY,
    names::GPU_ANTI_AFFINITY,
    names::COMPUTE_PERCENT,
    names::ISOLATION,
    names::START,
];
/// The keys that may be about one container, and the prefix that its name then follows.
pub(crate) const OF_CONTAINERS: [(&str, &str); 3] = [
    (names::GPU_COUNT, names::GPU_COUNT_OF),
    (names::GPU_MEM_PERCENTAGE, names::GPU_MEM_PERCENTAGE_OF),
    (names::MEM_LIMIT, names::MEM_LIMIT_OF),
];

/// Checks the annotations of a pod that requests `resource`.
///
/// # Errors
/// [`BadRequest`] names the first key that is none of gpustow's, and the fix.
pub fn known(annotations: &BTreeMap<String, String>, resource: &str) -> Result<(), BadRequest> {
    if is_ahead(annotations) {
        return Ok(());
    }
    let near = strange(annotations).find_map(|key| {
        let known = nearly(key)?;
        let group = names::GROUP;
        let fix = match (key == resource, key.starts_with(group)) {
            (true, _) => {
                "this is no annotation: write it into resources.limits of a container".to_owned()
            }
            (_, true) => format!("there is no such annotation: write {group}/{known}"),
            (_, false) => {
                format!("there is no such annotation: write {known}.{group}/<container>")
            }
        };
        Some((key, fix))
    });
    let unknown = || {
        let key = strange(annotations).next()?;
        let fix = format!(
            "unknown annotation (gpustow {VERSION}): remove it, or set {} to the release that added it",
            names::MADE_FOR
        );
        Some((key, fix))
    };
    match near.or_else(unknown) {
        None => Ok(()),
        Some((key, problem)) => Err(bad(format!("metadata.annotations[{key}]"), problem)),
    }
}

/// The annotations that a later version may know, by the word of who wrote them.
#[must_use]
pub fn ahead(annotations: &BTreeMap<String, String>) -> Vec<&str> {
    match is_ahead(annotations) {
        true => strange(annotations).collect(),
        false => Vec::new(),
    }
}

/// The error of a pod that has an annotation of gpustow's without a request for `resource`.
#[must_use]
pub fn unasked(annotations: &BTreeMap<String, String>, resource: &str) -> Option<BadRequest> {
    let is_auto = |said: &String| said.starts_with("auto");
    if annotations.get(resource).is_some_and(is_auto) {
        let problem = "admission gave the pod no amount when it was created: see `kubectl gpustow check`, or write an amount";
        return Some(bad(format!("metadata.annotations[{resource}]"), problem));
    }
    let key = annotations.keys().find(|key| is_ours(key))?;
    let problem = format!(
        "no container asks for {resource}, so the pod gets no GPU from gpustow: write the MiB that it needs into \
         resources.limits of a container, as {resource}: 8192"
    );
    Some(bad(format!("metadata.annotations[{key}]"), problem))
}

/// The error of [`unasked`] for the creator of the pod. If a controller made it, its author was warned of the template.
pub(crate) fn idle(pod: &Value, resource: &str) -> Option<String> {
    let owners = pod["metadata"]["ownerReferences"].as_array();
    let mut owners = owners.into_iter().flatten();
    let is_made = owners.any(|it| it["controller"] == true);
    let missing = unasked(&notes(pod), resource).filter(|_| !is_made);
    missing.map(|it| it.to_string())
}

/// Does a key look like one of gpustow's?
pub(crate) fn is_ours(key: &str) -> bool {
    let of_group = key
        .split_once('/')
        .and_then(|(domain, _)| domain.strip_suffix(names::GROUP));
    of_group.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// The annotation that has this key.
pub(crate) fn annotation_of(key: &str) -> Option<&'static str> {
    OF_USERS.into_iter().find(|known| *known == key)
}

fn word(key: &'static str) -> &'static str {
    key.rsplit('/').next().unwrap_or(key)
}

fn is_ahead(annotations: &BTreeMap<String, String>) -> bool {
    annotations
        .get(names::MADE_FOR)
        .is_some_and(|version| is_later(version))
}

fn strange(annotations: &BTreeMap<String, String>) -> impl Iterator<Item = &str> {
    let is_strange = |key: &&str| {
        let begins = |it: &&str| key.starts_with(*it);
        is_ours(key) && !names::POD_KEYS.contains(key) && !names::POD_KEYS_OF.iter().any(begins)
    };
    // Where amounts are called so, a pod has its amount by an annotation.
    let is_auto = |key: &str, value: &str| key == names::GPU_MEM && value.starts_with("auto");
    let all = annotations.iter();
    let all = all.filter(move |(key, value)| !is_auto(key, value));
    all.map(|(key, _)| key.as_str()).filter(is_strange)
}

/// The user's word that is nearly `key`. Their common beginning and end are more than half of the longer one, or, if no
/// word is, of the shorter.
fn nearly(key: &str) -> Option<&'static str> {
    let (domain, name) = key.split_once('/')?;
    let of_container = domain.strip_suffix(names::GROUP)?.strip_suffix('.');
    let word_of = of_container.unwrap_or(name);
    let word_of = word_of.to_ascii_lowercase().replace('_', "-");
    let keys: Vec<&'static str> = match of_container {
        None => OF_USERS.to_vec(),
        Some(_) => OF_CONTAINERS.map(|(key, _)| key).to_vec(),
    };
    let known = || keys.iter().map(|key| word(key));
    let both = |known: &str| 2 * alike(&word_of, known);
    let nearest = known().find(|known| both(known) > word_of.len().max(known.len()));
    nearest.or_else(|| known().find(|known| both(known) > word_of.len().min(known.len())))
}

/// Of these keys the one that `key` is most like, if it is like any.
pub(crate) fn nearest(key: &str, known: &[&'static str]) -> Option<&'static str> {
    let like = known.iter().copied();
    let best = like.max_by_key(|known| (alike(key, known), Reverse(known.len())))?;
    (2 * alike(key, best) > key.len().max(best.len())).then_some(best)
}

/// How many letters two words begin with and end with alike.
fn alike(one: &str, other: &str) -> usize {
    let begins = one.bytes().zip(other.bytes());
    let ends = one.bytes().rev().zip(other.bytes().rev());
    begins.take_while(|(a, b)| a == b).count() + ends.take_while(|(a, b)| a == b).count()
}
