//! Annotations of pods that look like gpustow's and do nothing: misspelt, unknown, a later version's, or on a
//! pod that does not ask. The policies judge them by the same rules
//! (`crates/policies/policies/rules-variables.yaml`, `hints.yaml`).

use std::collections::BTreeMap;

use crate::admission::{VERSION, is_later};
use gpustow_api::{BadRequest, names};

/// What is wrong with the annotations of a pod that asks for `resource`, as the policies refuse it.
///
/// # Errors
/// [`BadRequest`] names the first key that is none of gpustow's, and the fix.
pub fn known(annotations: &BTreeMap<String, String>, resource: &str) -> Result<(), BadRequest> {
    if is_ahead(annotations) {
        return Ok(());
    }
    let near = strange(annotations).find_map(|key| {
        let known = nearly(key)?;
        let fix = match (key == resource, key.strip_prefix(names::GROUP)) {
            (true, _) => {
                "this is no annotation: write it into resources.limits of a container".to_owned()
            }
            (_, Some(_)) => {
                format!(
                    "there is no such annotation: write {}/{known}",
                    names::GROUP
                )
            }
            (_, None) => format!(
                "there is no such annotation: write {known}.{}/<container>",
                names::GROUP
            ),
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
        Some((key, problem)) => Err(BadRequest {
            field: format!("metadata.annotations[{key}]"),
            problem,
        }),
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

/// What is missing from a pod that asks for no `resource` and bears an annotation of gpustow's all the same.
#[must_use]
pub fn unasked(annotations: &BTreeMap<String, String>, resource: &str) -> Option<BadRequest> {
    let is_auto = annotations
        .get(resource)
        .is_some_and(|it| it.starts_with("auto"));
    let (key, problem) = if is_auto {
        let problem = "no policy gave the pod an amount when it was created: see `kubectl gpustow check`, or write an amount";
        (resource, problem.to_owned())
    } else {
        let key = annotations.keys().find(|key| is_ours(key))?;
        (key.as_str(), unasked_says(resource))
    };
    Some(BadRequest {
        field: format!("metadata.annotations[{key}]"),
        problem,
    })
}

/// The same for the policies, which name the key themselves.
pub(crate) fn unasked_says(resource: &str) -> String {
    format!(
        "no container asks for {resource}, so the pod gets no GPU from gpustow: write the MiB that it needs \
         into resources.limits of a container, as {resource}: 8192"
    )
}

/// The words of the keys that users write, in the order in which they are tried.
pub(crate) fn of_users() -> [&'static str; 18] {
    let keys = [
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
    ];
    keys.map(word)
}

/// Those that may be about one container.
pub(crate) fn of_containers() -> [&'static str; 3] {
    [
        names::GPU_COUNT,
        names::GPU_MEM_PERCENTAGE,
        names::MEM_LIMIT,
    ]
    .map(word)
}

fn word(key: &'static str) -> &'static str {
    key.rsplit('/').next().unwrap_or(key)
}

fn is_ahead(annotations: &BTreeMap<String, String>) -> bool {
    annotations
        .get(names::MADE_FOR)
        .is_some_and(|version| is_later(version))
}

/// Does an annotation's key look like one of gpustow's?
fn is_ours(key: &str) -> bool {
    let of_group = key
        .split_once('/')
        .and_then(|(domain, _)| domain.strip_suffix(names::GROUP));
    of_group.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
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

/// The user's word that `key` is nearly: what both begin with and what both end with is more than half of
/// the longer, or, where there is none such, of the shorter.
fn nearly(key: &str) -> Option<&'static str> {
    let (domain, name) = key.split_once('/')?;
    let of_container = domain.strip_suffix(names::GROUP)?.strip_suffix('.');
    let word = of_container.unwrap_or(name);
    let word = word.to_ascii_lowercase().replace('_', "-");
    let same =
        |pairs: &mut dyn Iterator<Item = (u8, u8)>| pairs.take_while(|(a, b)| a == b).count();
    let both = |known: &str| {
        let begins = same(&mut word.bytes().zip(known.bytes()));
        let ends = same(&mut word.bytes().rev().zip(known.bytes().rev()));
        2 * (begins + ends)
    };
    let may = |known: &&str| of_container.is_none() || of_containers().contains(known);
    let known = || of_users().into_iter().filter(may);
    let nearest = known().find(|known| both(known) > word.len().max(known.len()));
    nearest.or_else(|| known().find(|known| both(known) > word.len().min(known.len())))
}
