//! Pods that stand in gpustow's line though nobody would let them out, or though an autoscaler is to see them.

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
        return unseen(cluster, &extenders, findings);
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

/// An autoscaler sees no pod with a gate.
fn unseen(cluster: &Cluster, extenders: &[&Pod], findings: &mut Findings) {
    let shows = |pod: &&Pod| {
        let shown =
            system::container(pod, EXTENDER).and_then(|it| system::setting(it, "line-show"));
        shown.is_some_and(|shown| shown != "0")
    };
    if let Some(autoscaler) = cluster.system.autoscaler()
        && !extenders.iter().any(shows)
    {
        findings.add(
            Level::Warning,
            format!("pod/{autoscaler}"),
            "it looks like an autoscaler, which sees no pod that stands in gpustow's line and adds no node for it",
            "set the extender's --line-show=20: docs/autoscaling.md",
        );
    }
}

/// Is it one of the extenders that take pods out of the line?
fn lets_out(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|it| it.phase.as_deref());
    let line = system::container(pod, EXTENDER).and_then(|it| system::setting(it, "line"));
    !matches!(phase, Some("Failed" | "Succeeded")) && line.is_some_and(|line| line != "off")
}
