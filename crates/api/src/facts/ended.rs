//! Has a pod ended?

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{ContainerStatus, PodSpec, PodStatus};

/// Is its phase final?
pub(super) fn has_ended(status: Option<&PodStatus>) -> bool {
    let phase = status.and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// True if the status reports every container of the spec as terminated. A container without a status may be running.
pub(super) fn all_terminated(spec: Option<&PodSpec>, status: Option<&PodStatus>) -> bool {
    let (Some(spec), Some(status)) = (spec, status) else {
        return false;
    };
    let statuses = [
        &status.container_statuses,
        &status.init_container_statuses,
        &status.ephemeral_container_statuses,
    ];
    let is_terminated = |status: &&ContainerStatus| {
        status
            .state
            .as_ref()
            .is_some_and(|state| state.terminated.is_some())
    };
    let terminated: BTreeSet<&str> = statuses
        .into_iter()
        .flat_map(|list| list.iter().flatten())
        .filter(is_terminated)
        .map(|status| status.name.as_str())
        .collect();
    let init = spec
        .init_containers
        .iter()
        .flatten()
        .map(|container| &container.name);
    let ephemeral = spec
        .ephemeral_containers
        .iter()
        .flatten()
        .map(|container| &container.name);
    let mut all = spec
        .containers
        .iter()
        .map(|container| &container.name)
        .chain(init)
        .chain(ephemeral);
    !spec.containers.is_empty() && all.all(|name| terminated.contains(name.as_str()))
}
