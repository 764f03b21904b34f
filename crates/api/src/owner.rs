//! The controller of a pod: people name it when they mean one of many equal pods.

use k8s_openapi::api::core::v1::Pod;

/// A workload by kind, as `Deployment`, and name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner {
    /// Its kind.
    pub kind: String,
    /// Its name.
    pub name: String,
}

/// The pod's controller. A Deployment's pods belong to its ReplicaSets, which bear a hash behind its
/// name; a CronJob's Jobs bear their minute. Outermost last.
#[must_use]
pub fn of(pod: &Pod) -> Vec<Owner> {
    let owners = pod.metadata.owner_references.iter().flatten();
    let Some(first) = owners.clone().find(|it| it.controller == Some(true)) else {
        return Vec::new();
    };
    let owner = |kind: &str, name: &str| Owner {
        kind: kind.to_owned(),
        name: name.to_owned(),
    };
    let labels = pod.metadata.labels.as_ref();
    let hash = labels.and_then(|labels| labels.get("pod-template-hash"));
    let outer = match (first.kind.as_str(), hash, first.name.rsplit_once('-')) {
        ("ReplicaSet", Some(hash), Some((name, end))) if end == hash => {
            Some(owner("Deployment", name))
        }
        ("Job", _, Some((name, end)))
            if end.len() >= 8 && end.bytes().all(|it| it.is_ascii_digit()) =>
        {
            Some(owner("CronJob", name))
        }
        _ => None,
    };
    [owner(&first.kind, &first.name)]
        .into_iter()
        .chain(outer)
        .collect()
}

/// Whose history a pod belongs to: its outermost controller, or itself.
#[must_use]
pub fn workload(pod: &Pod) -> Owner {
    of(pod).pop().unwrap_or_else(|| Owner {
        kind: "Pod".to_owned(),
        name: pod.metadata.name.clone().unwrap_or_default(),
    })
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
                "Deployment/web",
            ),
            ("ReplicaSet", "web-by-hand", "", "ReplicaSet/web-by-hand"),
            ("StatefulSet", "db", "", "StatefulSet/db"),
            ("Job", "train", "", "Job/train"),
            ("Job", "train-2", "", "Job/train-2"),
            ("Job", "nightly-29384756", "", "CronJob/nightly"),
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
