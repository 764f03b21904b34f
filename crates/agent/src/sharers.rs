//! Pods of the node whose allocation by another GPU sharer cannot be read.

use gpustow_api::gpunode::Condition;

use crate::pods::{NodePod, NodePods};

/// Names the pods whose annotations cannot be read.
pub(crate) fn condition(pods: &NodePods) -> Option<Condition> {
    let unreadable = pods.iter().filter(|pod| {
        let promise = pod.promise.as_ref();
        promise.is_some_and(|promise| !promise.readable)
    });
    let name = |pod: &NodePod| format!("{}/{}", pod.facts.namespace, pod.facts.name);
    let mut names: Vec<String> = unreadable.map(name).collect();
    names.sort_unstable();
    (!names.is_empty()).then(|| Condition {
        r#type: "OtherSharersReadable".to_owned(),
        status: "False".to_owned(),
        reason: "Unreadable".to_owned(),
        message: format!(
            "The allocation of another GPU sharer to these pods cannot be read, so it counts on every GPU: {}",
            names.join(", ")
        ),
    })
}
