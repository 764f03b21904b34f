//! Who nominated a pod.

use k8s_openapi::api::core::v1::PodStatus;

use super::holds;
use crate::names;

/// Did the extender nominate the pod, by its last wake-up? kube-scheduler may have nominated it elsewhere since.
pub(super) fn is_own(status: &PodStatus) -> bool {
    let woken = holds(status, names::AVAILABLE_CONDITION);
    let reason = woken.and_then(|woken| woken.reason.as_deref());
    status.nominated_node_name.is_some() && reason == Some(names::NOMINATED)
}
