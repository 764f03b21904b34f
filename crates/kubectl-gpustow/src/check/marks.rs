//! Nodes that autoscalers leave alone because of an extender's mark, although no extender runs.

use gpustow_api::names;
use gpustow_inspect::Cluster;

use super::{Findings, Level};

pub(super) fn look(cluster: &Cluster, findings: &mut Findings) {
    if cluster.system.runs_extender() {
        return;
    }
    for (name, node) in &cluster.nodes {
        let labels = node.metadata.labels.as_ref();
        let Some(label) = labels.and_then(|labels| labels.get(names::RESERVED_LABEL)) else {
            continue;
        };
        let ours = names::SPARE_NODE
            .into_iter()
            .filter(|(who, _)| label.split('_').any(|it| it == *who));
        let keys: String = ours.map(|(_, key)| format!(" {key}-")).collect();
        findings.add(
            Level::Warning,
            format!("node/{name}"),
            "autoscalers never remove this node: an extender marked it, and no extender runs any more",
            format!(
                "kubectl annotate node {name}{keys} && kubectl label node {name} {}-",
                names::RESERVED_LABEL
            ),
        );
    }
}
