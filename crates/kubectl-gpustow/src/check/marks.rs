//! Nodes that autoscalers leave alone because an extender said so that says so no more.

use gpustow_api::names;
use gpustow_inspect::{
    Cluster,
    system::{self, EXTENDER},
};
use k8s_openapi::api::core::v1::{Container, Pod};

use super::{Findings, Level};

pub(super) fn look(cluster: &Cluster, findings: &mut Findings) {
    let extenders = cluster.system.pods_with(EXTENDER);
    if extenders.iter().any(|pod| marks(pod)) {
        return;
    }
    for (name, node) in &cluster.nodes {
        let labels = node.metadata.labels.as_ref();
        let Some(label) = labels.and_then(|labels| labels.get(names::KEPT_LABEL)) else {
            continue;
        };
        let ours = names::SPARE_NODE
            .into_iter()
            .filter(|(who, _)| label.split('_').any(|it| it == *who));
        let keys: String = ours.map(|(_, key)| format!(" {key}-")).collect();
        findings.add(
            Level::Warning,
            format!("node/{name}"),
            "autoscalers never remove this node: an earlier extender marked it, and no extender runs with --keep-marks",
            format!(
                "kubectl annotate node {name}{keys} && kubectl label node {name} {}-",
                names::KEPT_LABEL
            ),
        );
    }
}

/// Does this extender mark nodes, and unmark them?
fn marks(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|it| it.phase.as_deref());
    let flag = |container: &Container| {
        let words = container.command.iter().chain(&container.args).flatten();
        let mut words = words.map(String::as_str);
        let named = |word| word == "--keep-marks" || word == "--keep-marks=true";
        let variable = container.env.iter().flatten();
        let mut variable = variable.filter(|it| it.name == "GPUSTOW_KEEP_MARKS");
        words.any(named) || variable.any(|it| it.value.as_deref() == Some("true"))
    };
    !matches!(phase, Some("Failed" | "Succeeded"))
        && system::container(pod, EXTENDER).is_some_and(flag)
}
