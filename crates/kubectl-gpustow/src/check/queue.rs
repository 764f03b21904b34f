//! Pods that are queued although no extender would ungate them, or although an autoscaler must see them.

use gpustow_api::names;
use gpustow_inspect::{Cluster, Feature, system::Seen};

use super::{Findings, Level};

pub(super) fn look(cluster: &Cluster, findings: &mut Findings) {
    if matches!(cluster.config, Seen::Unreadable) {
        return;
    }
    if Feature::Queue.is_on(cluster.spec()) {
        return unseen(cluster, findings);
    }
    if cluster.system.runs_extender() {
        return;
    }
    // One problem, however many pods have it.
    for pod in cluster.pods.values().filter(|pod| pod.facts.queued) {
        findings.add(
            Level::Error,
            format!("pod/{}", pod.full_name()),
            format!(
                "no extender runs in {}: the scheduling gate {} holds the pod for good",
                names::NAMESPACE,
                names::GATE
            ),
            "start the extender, or remove every such gate with gpustow --ungate-all: docs/uninstall.md",
        );
    }
}

/// An autoscaler sees no pod with a gate.
fn unseen(cluster: &Cluster, findings: &mut Findings) {
    if let Some(autoscaler) = cluster.system.autoscaler()
        && cluster.spec().provision.max == 0
    {
        findings.add(
            Level::Warning,
            format!("pod/{autoscaler}"),
            "it looks like an autoscaler, which does not see queued pods or add nodes for them",
            "set spec.provision.max of the GpustowConfig to 10: docs/autoscaling.md",
        );
    }
}
