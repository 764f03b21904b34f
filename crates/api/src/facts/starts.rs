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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::{PodFacts, names};

    #[test]
    fn pod_starts_until_it_is_ready_and_again_after_each_of_three_restarts() {
        let since = |status: Value| {
            let pod = json!({
                "metadata": { "uid": "u" },
                "spec": { "nodeName": "n", "containers": [
                    { "name": "a", "resources": { "limits": { names::GPU_MEM: "1" } } },
                ] },
                "status": status,
            });
            let pod = serde_json::from_value(pod).unwrap();
            PodFacts::from_pod(&pod, names::GPU_MEM)
                .unwrap()
                .starting_since
        };
        let time = |second: u32| format!("1970-01-01T00:00:{second:02}Z");
        let bound =
            json!({ "type": "PodScheduled", "status": "True", "lastTransitionTime": time(1) });
        let ready = |is: &str| json!([bound, { "type": "Ready", "status": is }]);
        let container = |restarts: u32, began: u32, ended: u32| {
            json!([{ "name": "a", "image": "", "imageID": "", "ready": false, "restartCount": restarts,
                "state": { "running": { "startedAt": time(began) } },
                "lastState": { "terminated": { "exitCode": 1, "finishedAt": time(ended) } } }])
        };
        for (status, expected) in [
            (json!({}), Some(i64::MAX)),
            (json!({ "conditions": [bound] }), Some(1)),
            (
                json!({ "conditions": ready("False"), "containerStatuses": container(0, 5, 0) }),
                Some(5),
            ),
            (
                json!({ "conditions": ready("True"), "containerStatuses": container(0, 5, 0) }),
                None,
            ),
            (
                json!({ "conditions": ready("False"), "containerStatuses": container(3, 5, 9) }),
                Some(9),
            ),
            (
                json!({ "conditions": ready("False"), "containerStatuses": container(4, 5, 9) }),
                None,
            ),
        ] {
            assert_eq!(since(status.clone()), expected, "{status}");
        }
    }
}
