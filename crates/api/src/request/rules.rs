//! The rules in annotations for the GPUs that a pod may get. The policies judge by the same rules
//! (`crates/policies/policies/rules-validations.yaml`).

use std::collections::BTreeMap;
use std::sync::Arc;

use gpustow_pack::{Request, Rules};
use k8s_openapi::api::core::v1::PodSpec;

use super::{BadRequest, annotation, field_of};
use crate::names;

/// The longest list of models or UUIDs.
pub const MAX_LIST: usize = 1024;
/// The longest key of a group.
const MAX_KEY: usize = 63;

/// Can this pod get a MIG instance of its own?
///
/// # Errors
/// The field that excludes a MIG instance: another request for GPUs, or a restart policy that does not start the pod
/// again.
pub(super) fn may_be_isolated(request: &Request, spec: &PodSpec) -> Result<(), BadRequest> {
    let bad = |problem: &str| {
        Err(BadRequest {
            field: field_of(names::ISOLATION),
            problem: problem.to_owned(),
        })
    };
    if request.exclusive || request.is_relative() || request.compute > 0 {
        return bad(
            "a MIG instance has a fixed size: remove this, or the request for whole GPUs or a percentage",
        );
    }
    match request.claims.as_slice() {
        [claim] if claim.gpus == 1 => {}
        _ => {
            return bad("a pod gets one MIG instance: let one container request memory of one GPU");
        }
    }
    match spec.restart_policy.as_deref() {
        // The agent makes the instance once the pod is bound, and the kubelet does not wait.
        Some("Never") => Err(BadRequest {
            field: "spec.restartPolicy".to_owned(),
            problem: "the container may start before its MIG instance is there, and the pod would fail: write OnFailure or \
                      Always"
                .to_owned(),
        }),
        _ => Ok(()),
    }
}

/// The rules of a pod of `namespace`, if it has any.
///
/// # Errors
/// The annotation that is wrong, and the fix.
pub(super) fn of(
    annotations: &BTreeMap<String, String>,
    namespace: Option<&str>,
) -> Result<Option<Arc<Rules>>, BadRequest> {
    let list = |key, read: fn(&str) -> Result<Vec<Box<str>>, String>| {
        annotation(annotations, key, read).map(Option::unwrap_or_default)
    };
    let group = |key| {
        let key = annotation(annotations, key, group)?;
        let namespace = namespace.unwrap_or_default();
        Ok(key.map(|key| Arc::from(format!("{namespace}/{key}"))))
    };
    let rules = Rules {
        models: list(names::GPU_MODELS, models)?,
        not_models: list(names::NOT_GPU_MODELS, models)?,
        uuids: list(names::GPU_UUIDS, uuids)?,
        not_uuids: list(names::NOT_GPU_UUIDS, uuids)?,
        affinity: group(names::GPU_AFFINITY)?,
        anti_affinity: group(names::GPU_ANTI_AFFINITY)?,
    };
    Ok((!rules.is_empty()).then(|| Arc::new(rules)))
}

fn models(value: &str) -> Result<Vec<Box<str>>, String> {
    let begins = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'*';
    let goes_on = |byte: u8| begins(byte) || b" ._()/+-".contains(&byte);
    entries(value, begins, goes_on).ok_or_else(|| {
        let value = shortened(value);
        format!("{value:?} is no list of models: write like \"*A100*,*H100*\"")
    })
}

fn uuids(value: &str) -> Result<Vec<Box<str>>, String> {
    let begins = |byte: u8| byte.is_ascii_alphanumeric();
    let goes_on = |byte: u8| begins(byte) || b"._:/-".contains(&byte);
    entries(value, begins, goes_on).ok_or_else(|| {
        let value = shortened(value);
        format!("{value:?} is no list of UUIDs: write like \"GPU-8f2a,GPU-91bc\", with whole UUIDs")
    })
}

/// The entries between the commas, without the blanks around them.
fn entries(
    value: &str,
    begins: impl Fn(u8) -> bool,
    goes_on: impl Fn(u8) -> bool,
) -> Option<Vec<Box<str>>> {
    let entry = |text: &str| {
        let text = text.trim_matches(' ');
        let is_one = text.bytes().next().is_some_and(&begins) && text.bytes().all(&goes_on);
        is_one.then(|| Box::from(text))
    };
    let entries = value.split(',').map(entry);
    entries
        .collect::<Option<_>>()
        .filter(|_| value.len() <= MAX_LIST)
}

fn group(value: &str) -> Result<String, String> {
    let ends = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let is_key = ends(value.bytes().next()) && ends(value.bytes().last());
    match is_key && value.bytes().all(inner) && value.len() <= MAX_KEY {
        true => Ok(value.to_owned()),
        false => Err(format!(
            "{:?} is no name of a group: write at most {MAX_KEY} letters, digits, dashes, dots and underscores",
            shortened(value)
        )),
    }
}

/// `value`, shortened as the policies shorten a quoted value.
fn shortened(value: &str) -> String {
    match value.chars().count() > 63 {
        true => value.chars().take(60).chain("...".chars()).collect(),
        false => value.to_owned(),
    }
}
