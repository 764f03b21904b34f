//! Other GPU sharers: whose pods run, in which unit they count, and what of theirs is still installed.

use gpustow_api::{names, quantity};
use gpustow_inspect::Cluster;

use super::{Findings, Level};

pub(super) fn look(cluster: &Cluster, findings: &mut Findings) {
    for other in cluster.others.values() {
        let object = format!("pod/{}", other.pod);
        let sharer = other.promise.sharer;
        match other.promise.readable {
            true => findings.add(
                Level::Info,
                object,
                format!("has its GPU memory from {sharer}"),
                "kubectl gpustow adopt --dry-run shows what it becomes: docs/migrate.md",
            ),
            false => findings.add(
                Level::Warning,
                object,
                format!(
                    "what {sharer} gave it cannot be read, so it counts on every GPU of its node"
                ),
                "create it again: docs/migrate.md",
            ),
        }
    }
    for (pod, sharer) in cluster.system.sharers() {
        findings.add(
            Level::Info,
            format!("pod/{pod}"),
            format!("is a part of {sharer}, which does not see gpustow's pods"),
            "keep it off nodes of gpustow, and remove it when the last of its pods has moved: docs/migrate.md",
        );
    }
    for node in cluster.nodes.keys() {
        if let Some(unit) = unit(cluster, node) {
            findings.add(
                Level::Info,
                format!("node/{node}"),
                format!("{} is counted in {unit} here", names::GPUSHARE_MEM),
                format!("label its namespaces {}={unit}", names::ADOPT_UNIT_LABEL),
            );
        }
    }
}

/// The unit of gpushare, by what the node has of it and how large its GPUs are.
fn unit(cluster: &Cluster, node: &str) -> Option<&'static str> {
    let status = cluster.nodes.get(node)?.status.as_ref()?;
    let units = quantity::whole(status.capacity.as_ref()?.get(names::GPUSHARE_MEM)?)?;
    let report = cluster.reports.get(node)?;
    let mib = report.gpus.iter().map(|gpu| gpu.total_mib).sum::<u64>();
    let is_near = |each: u64| units.saturating_mul(each).abs_diff(mib) <= mib / 8;
    let units = [("GiB", 1024), ("MiB", 1)];
    let found = units
        .into_iter()
        .find(|(_, each)| mib > 0 && is_near(*each));
    found.map(|(unit, _)| unit)
}
