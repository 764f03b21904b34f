//! Pods that stand in gpustow's line though nobody would let them out.

use gpustow_api::names;
use gpustow_inspect::{
    Cluster,
    system::{self, EXTENDER},
};
use k8s_openapi::api::core::v1::Pod;

use super::{Findings, Level};

pub(super) fn look(cluster: &Cluster, findings: &mut Findings) {
    let extenders = cluster.system.pods_with(EXTENDER);
    if extenders.iter().any(|pod| lets_out(pod)) {
        return;
    }
    for pod in cluster.pods.values().filter(|pod| pod.facts.in_line) {
        findings.add(
            Level::Error,
            format!("pod/{}", pod.full_name()),
            format!(
                "its gate {} keeps it in gpustow's line, and no extender with --line runs in {}",
                names::GATE,
                names::NAMESPACE
            ),
            format!(
                r#"kubectl patch pod -n {} {} --type=strategic --patch '{{"spec": {{"schedulingGates": [{{"$patch": "delete", "name": "{}"}}]}}}}'"#,
                pod.facts.namespace,
                pod.facts.name,
                names::GATE
            ),
        );
    }
}

/// Is it one of the extenders that take pods out of the line?
fn lets_out(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|it| it.phase.as_deref());
    let line = system::container(pod, EXTENDER).and_then(|it| system::setting(it, "line"));
    !matches!(phase, Some("Failed" | "Succeeded")) && line.is_some_and(|line| line != "off")
}
