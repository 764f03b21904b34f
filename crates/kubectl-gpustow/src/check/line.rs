//! Pods that stand in gpustow's line though nobody would let them out, or though an autoscaler is to see them.

use gpustow_api::names;
use gpustow_inspect::{
    Cluster, LineMode,
    system::{self, EXTENDER},
};
use k8s_openapi::api::core::v1::Pod;

use super::{Findings, Level};

pub(super) fn look(cluster: &Cluster, findings: &mut Findings) {
    let extenders = cluster.system.pods_with(EXTENDER);
    if extenders.iter().any(|pod| lets_out(pod)) {
        return unseen(cluster, &extenders, findings);
    }
    // One problem, however many pods have it.
    for pod in cluster.pods.values().filter(|pod| pod.facts.in_line) {
        findings.add(
            Level::Error,
            format!("pod/{}", pod.full_name()),
            format!(
                "no extender with --line runs in {}: the scheduling gate {} holds the pod for good",
                names::NAMESPACE,
                names::GATE
            ),
            "start the extender with --line; without a queue, remove every such gate with gpustow --lift-all: \
             docs/uninstall.md",
        );
    }
}

/// An autoscaler sees no pod with a gate.
fn unseen(cluster: &Cluster, extenders: &[&Pod], findings: &mut Findings) {
    let shows = |pod: &&Pod| system::settings(pod).is_some_and(|settings| settings.line_show > 0);
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
    let settings = system::settings(pod);
    !matches!(phase, Some("Failed" | "Succeeded"))
        && settings.is_some_and(|settings| settings.line != LineMode::Off)
}
