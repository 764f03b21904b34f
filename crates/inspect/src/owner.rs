//! Who made a pod: what people name when they mean one of many equal pods.

use gpustow_ledger::CardView;
use gpustow_pack::Mib;
use k8s_openapi::api::core::v1::Pod;

use crate::{Cluster, memory};

/// A workload by kind, in lower case, and name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Owner {
    /// As `deployment`.
    pub kind: String,
    /// Its name.
    pub name: String,
}

/// The kind of workload that a word means, as kubectl takes it.
pub fn kind(word: &str) -> Option<&'static str> {
    Some(match word.split('.').next().unwrap_or_default() {
        "deploy" | "deployment" | "deployments" => "deployment",
        "rs" | "replicaset" | "replicasets" => "replicaset",
        "sts" | "statefulset" | "statefulsets" => "statefulset",
        "ds" | "daemonset" | "daemonsets" => "daemonset",
        "job" | "jobs" => "job",
        "cj" | "cronjob" | "cronjobs" => "cronjob",
        _ => return None,
    })
}

/// The pod's controller. A Deployment's pods belong to its ReplicaSets, which bear a hash behind its
/// name; a CronJob's Jobs bear their minute. Outermost last.
pub fn of(pod: &Pod) -> Vec<Owner> {
    let owners = pod.metadata.owner_references.iter().flatten();
    let Some(first) = owners.clone().find(|it| it.controller == Some(true)) else {
        return Vec::new();
    };
    let owner = |kind: &str, name: &str| Owner {
        kind: kind.to_lowercase(),
        name: name.to_owned(),
    };
    let labels = pod.metadata.labels.as_ref();
    let hash = labels.and_then(|labels| labels.get("pod-template-hash"));
    let outer = match (first.kind.as_str(), hash, first.name.rsplit_once('-')) {
        ("ReplicaSet", Some(hash), Some((name, end))) if end == hash => {
            Some(owner("deployment", name))
        }
        ("Job", _, Some((name, end)))
            if end.len() >= 8 && end.bytes().all(|it| it.is_ascii_digit()) =>
        {
            Some(owner("cronjob", name))
        }
        _ => None,
    };
    [owner(&first.kind, &first.name)]
        .into_iter()
        .chain(outer)
        .collect()
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_deployment_and_a_cronjob_are_found_behind_what_they_made() -> anyhow::Result<()> {
        for (kind, name, hash, outermost) in [
            (
                "ReplicaSet",
                "web-5f9474c99c",
                "5f9474c99c",
                "deployment/web",
            ),
            ("ReplicaSet", "web-by-hand", "", "replicaset/web-by-hand"),
            ("StatefulSet", "db", "", "statefulset/db"),
            ("Job", "train", "", "job/train"),
            ("Job", "train-2", "", "job/train-2"),
            ("Job", "nightly-29384756", "", "cronjob/nightly"),
        ] {
            let pod: Pod = serde_json::from_value(json!({ "metadata": {
                "labels": { "pod-template-hash": hash },
                "ownerReferences": [{
                    "apiVersion": "apps/v1", "kind": kind, "name": name, "uid": "u", "controller": true,
                }],
            }}))?;
            let found = of(&pod).pop();
            let found = found.map(|it| format!("{}/{}", it.kind, it.name));
            assert_eq!(found.as_deref(), Some(outermost));
        }
        Ok(())
    }
}
