//! Since when does a pod start?

use k8s_openapi::api::core::v1::{ContainerStatus, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::holds;

/// Restarts of containers that count as starts: a crash loop holds up no other pod for ever.
const RESTARTS: i32 = 3;

/// In seconds since 1970, for a pod that is bound and not Ready: when it was bound, or its last container began or ended. None
/// if it starts no more.
pub(super) fn starting_since(status: Option<&PodStatus>) -> Option<i64> {
    let Some(status) = status else {
        return Some(i64::MAX);
    };
    if holds(status, "Ready").is_some() {
        return None;
    }
    let containers = [&status.container_statuses, &status.init_container_statuses];
    let containers = containers.into_iter().flatten().flatten();
    let restarts = containers.clone().map(|it| it.restart_count.max(0));
    if restarts.fold(0, i32::saturating_add) > RESTARTS {
        return None;
    }
    let bound = holds(status, "PodScheduled").and_then(|it| it.last_transition_time.as_ref());
    let times = containers.flat_map(times).chain(bound);
    let since = times.map(|time| time.0.as_second()).max();
    Some(since.unwrap_or(i64::MAX))
}

/// When the container began and ended.
fn times(container: &ContainerStatus) -> impl Iterator<Item = &Time> {
    let states = [&container.state, &container.last_state];
    states.into_iter().flatten().flat_map(|state| {
        let running = state.running.as_ref();
        let ended = state.terminated.as_ref();
        let began = running.and_then(|it| it.started_at.as_ref());
        [began, ended.and_then(|it| it.finished_at.as_ref())]
            .into_iter()
            .flatten()
    })
}
