//! What containers of pods with a share of compute get: the variables of MPS, and its two directories of the node.

use gpustow_api::names;
use serde_json::json;

use super::{Patch, give_literal, has_variable, list, note};

/// Name, directory of the node, and where containers have it.
const VOLUMES: [[&str; 3]; 2] = [
    [
        names::MPS_PIPES_VOLUME,
        names::MPS_PIPES_DIRECTORY,
        names::MPS_PIPES_DIRECTORY,
    ],
    [names::MPS_SHM_VOLUME, names::MPS_SHM_DIRECTORY, "/dev/shm"],
];

/// Gives it to these containers, if the pod has such a share.
pub(super) fn give(patch: &mut Patch, told: &[String]) {
    let share = note(&patch.pod, names::COMPUTE_PERCENT).map(str::to_owned);
    let Some(share) = share.filter(|_| !told.is_empty()) else {
        return;
    };
    for path in told {
        give_literal(patch, path, names::MPS_PIPES, names::MPS_PIPES_DIRECTORY);
    }
    for path in told {
        give_literal(patch, path, names::MPS_THREADS, &share);
    }
    for path in told {
        let it = patch.pod.pointer(path);
        if !it.is_some_and(|it| has_variable(it, names::MPS_MEMORY)) {
            patch.tell(path, "-", names::MPS_MEMORY, names::MPS_OF);
        }
    }
    if !patch.pod["spec"]["volumes"].is_array() {
        patch.put("add", "/spec/volumes", json!([]));
    }
    for [name, directory, _] in VOLUMES {
        if !list(&patch.pod, "volumes")
            .iter()
            .any(|it| it["name"] == name)
        {
            let source = json!({ "path": directory, "type": "Directory" });
            let volume = json!({ "name": name, "hostPath": source });
            patch.put("add", "/spec/volumes/-", volume);
        }
    }
    for path in told {
        let mounts = format!("{path}/volumeMounts");
        if !patch.pod.pointer(&mounts).is_some_and(|it| it.is_array()) {
            patch.put("add", &mounts, json!([]));
        }
        for [name, _, at] in VOLUMES {
            let all = patch.pod.pointer(&mounts).and_then(|it| it.as_array());
            if !all.into_iter().flatten().any(|it| it["mountPath"] == at) {
                let mount = json!({ "name": name, "mountPath": at });
                patch.put("add", &format!("{mounts}/-"), mount);
            }
        }
    }
}
