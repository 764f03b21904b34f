//! Workloads as people name them.

use gpustow_api::owner::of;
use gpustow_ledger::CardView;
use gpustow_pack::Mib;

use crate::{Cluster, memory};

/// The kind of workload that a word means, as kubectl takes it.
pub fn kind(word: &str) -> Option<&'static str> {
    Some(match word.split('.').next().unwrap_or_default() {
        "deploy" | "deployment" | "deployments" => "Deployment",
        "rs" | "replicaset" | "replicasets" => "ReplicaSet",
        "sts" | "statefulset" | "statefulsets" => "StatefulSet",
        "ds" | "daemonset" | "daemonsets" => "DaemonSet",
        "job" | "jobs" => "Job",
        "cj" | "cronjob" | "cronjobs" => "CronJob",
        _ => return None,
    })
}

/// The pods of a card for people: those of one owner together, with their number and what they hold.
pub fn grouped(cluster: &Cluster, card: &CardView) -> Vec<String> {
    let mut groups: Vec<(String, usize, Mib)> = Vec::new();
    for share in &card.pods {
        let pod = cluster.pods.get(&share.uid);
        let owner = pod.and_then(|pod| of(&pod.object).pop());
        let name = owner.map_or_else(|| share.name.to_string(), |owner| owner.name);
        let name = format!("{}/{name}", share.namespace);
        match groups.iter_mut().find(|(known, ..)| *known == name) {
            Some((_, count, held)) => (*count, *held) = (*count + 1, *held + share.charged),
            None => groups.push((name, 1, share.charged)),
        }
    }
    let text = |(name, count, held): &(String, usize, Mib)| match count {
        1 => format!("{name} {}", memory(*held)),
        _ => format!("{name} ({count}) {}", memory(*held)),
    };
    groups.iter().map(text).collect()
}
