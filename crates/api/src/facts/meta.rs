//! The facts in a pod's metadata about its end, its replacement, and the pods that it stands for.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use super::LONGEST_GRACE;
use crate::names;

/// When the pod should be gone: [`super::PodFacts::gone_by`].
#[must_use]
pub fn gone_by(meta: &ObjectMeta) -> Option<i64> {
    let grace = meta.deletion_grace_period_seconds.unwrap_or(0).max(0);
    let waited_for = grace.min(LONGEST_GRACE.into());
    let at = meta.deletion_timestamp.as_ref()?.0.as_second();
    Some(at.saturating_sub(grace).saturating_add(waited_for))
}

fn controlling(meta: &ObjectMeta) -> Option<&OwnerReference> {
    let mut owners = meta.owner_references.iter().flatten();
    owners.find(|owner| owner.controller == Some(true))
}

/// See [`super::PodFacts::controller`].
pub(super) fn controller(meta: &ObjectMeta) -> Option<Arc<str>> {
    controlling(meta).map(|owner| owner.uid.as_str().into())
}

/// See [`super::PodFacts::goes_with_node`].
pub(super) fn goes_with_node(meta: &ObjectMeta) -> bool {
    controlling(meta).is_some_and(|owner| {
        let of_kind = (owner.api_version.as_str(), owner.kind.as_str());
        matches!(of_kind, ("apps/v1", "DaemonSet") | ("v1", "Node"))
    })
}

/// See [`super::PodFacts::evictable`]: the controller that makes a replacement of the pod on any node. A user may write any
/// owner into a pod. Of Kubernetes' own kinds only those count that do make such pods, and every kind of others' API groups.
pub(super) fn evictable(meta: &ObjectMeta) -> Option<Arc<str>> {
    let said = meta.annotations.as_ref()?.get(names::EVICTABLE)?;
    if said != "true" {
        return None;
    }
    let owner = controlling(meta)?;
    let group = owner
        .api_version
        .split_once('/')
        .map_or("", |(group, _)| group);
    let makes = match group {
        "" => owner.kind == "ReplicationController",
        "apps" => ["ReplicaSet", "StatefulSet"].contains(&owner.kind.as_str()),
        "batch" => owner.kind == "Job",
        others => {
            others.contains('.') && (!others.ends_with(".k8s.io") || others.ends_with(".x-k8s.io"))
        }
    };
    makes.then(|| owner.uid.as_str().into())
}

/// See [`super::PodFacts::stands_for`].
pub(super) fn stands_for(meta: &ObjectMeta) -> Option<Arc<[Arc<str>]>> {
    let is_marked = meta.labels.as_ref()?.contains_key(names::PLACEHOLDER);
    let listed = meta.annotations.as_ref()?.get(names::PLACEHOLDER_FOR)?;
    is_marked.then(|| listed.split(',').map(Arc::from).collect())
}
