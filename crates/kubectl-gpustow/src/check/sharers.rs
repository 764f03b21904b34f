//! Other GPU sharers: their pods, their units, and their parts that are still installed.

use std::collections::BTreeMap;

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
    for (class, resource) in &cluster.device_classes {
        if *resource == cluster.resource() {
            findings.add(
                Level::Warning,
                format!("deviceclass/{class}"),
                format!("maps {resource} to its devices: kube-scheduler may claim one of them for a pod of gpustow"),
                "remove spec.extendedResourceName from the DeviceClass",
            );
        }
    }
    super::claims::look(cluster, findings);
    units(cluster, findings);
    for node in cluster.nodes.keys() {
        let gpushares = unit(cluster, node).map(|unit| (names::GPUSHARE_MEM, unit.to_owned()));
        let volcanos = cluster.volcano_unit(node).filter(|unit| *unit > 1);
        let volcanos = volcanos.map(|unit| (names::VOLCANO_MEMORY, format!("{unit}MiB")));
        for (key, unit) in gpushares.into_iter().chain(volcanos) {
            findings.add(
                Level::Info,
                format!("node/{node}"),
                format!("{key} is counted in {unit} here"),
                format!("label its namespaces {}={unit}", names::ADOPT_UNIT_LABEL),
            );
        }
    }
}

/// In which unit the pods of a namespace seem to request gpushare's memory: no GPU has as many GiB as a usual request has
/// MiB.
fn units(cluster: &Cluster, findings: &mut Findings) {
    let mut largest: BTreeMap<&str, u64> = BTreeMap::new();
    for other in cluster.others.values().filter(|other| other.units > 0) {
        let namespace = other.pod.split('/').next().unwrap_or_default();
        let most = largest.entry(namespace).or_default();
        *most = other.units.max(*most);
    }
    let reports = cluster.reports.values();
    let gpus = reports.flat_map(|report| report.gpus.iter().map(|gpu| gpu.total_mib));
    let gib = gpus.max().unwrap_or(0).div_ceil(1024);
    for (namespace, units) in largest.into_iter().filter(|_| gib > 0) {
        let unit = if units > gib { "MiB" } else { "GiB" };
        findings.add(
            Level::Info,
            format!("namespace/{namespace}"),
            format!(
                "its requests of {} seem to be in {unit}: the largest is {units}, and a GPU has {gib} GiB",
                names::GPUSHARE_MEM
            ),
            format!("label it {}={unit}", names::ADOPT_UNIT_LABEL),
        );
    }
}

/// The unit of gpushare, from the node's capacity of it and the size of the node's GPUs.
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
