//! Gives containers of pods with a share of compute the variables of MPS, and its two directories of the node.
//! Admission refuses a pod's own values of them.

use gpustow_api::{BadRequest, names};
use serde_json::{Value, json};

use crate::Patch;
use crate::containers::{all, bad, env, field, list, name, note, wants};

/// Name, directory of the node, and where containers have it.
const VOLUMES: [[&str; 3]; 2] = [
    [
        names::MPS_PIPES_VOLUME,
        names::MPS_PIPES_DIRECTORY,
        names::MPS_PIPES_DIRECTORY,
    ],
    [names::MPS_SHM_VOLUME, names::MPS_SHM_DIRECTORY, "/dev/shm"],
];

/// Gives these containers the variables and directories, if the pod has a share of compute.
pub(crate) fn give(patch: &mut Patch, asking: &[String]) {
    let share = note(&patch.pod, names::COMPUTE_PERCENT).map(str::to_owned);
    let Some(share) = share.filter(|_| !asking.is_empty()) else {
        return;
    };
    for path in asking {
        patch.give_text(path, names::MPS_PIPES, names::MPS_PIPES_DIRECTORY);
        patch.give_text(path, names::MPS_THREADS, &share);
        patch.tell(path, "-", names::MPS_MEMORY, names::MPS_OF);
    }
    if !patch.pod["spec"]["volumes"].is_array() {
        patch.put("add", "/spec/volumes", json!([]));
    }
    for [name, directory, _] in VOLUMES {
        let is_there = |it: &Value| it["name"] == name;
        if !list(&patch.pod, "volumes").iter().any(is_there) {
            let source = json!({ "path": directory, "type": "Directory" });
            let volume = json!({ "name": name, "hostPath": source });
            patch.put("add", "/spec/volumes/-", volume);
        }
    }
    for path in asking {
        let mounts = format!("{path}/volumeMounts");
        if !patch.pod.pointer(&mounts).is_some_and(Value::is_array) {
            patch.put("add", &mounts, json!([]));
        }
        for [name, _, at] in VOLUMES {
            let all = patch.pod.pointer(&mounts).and_then(Value::as_array);
            if !all.into_iter().flatten().any(|it| it["mountPath"] == at) {
                let mount = json!({ "name": name, "mountPath": at });
                patch.put("add", &format!("{mounts}/-"), mount);
            }
        }
    }
}

/// Refuses variables, mounts and volumes of MPS that [`give`] would not write. It runs after [`give`].
pub(crate) fn judge(pod: &Value, resource: &str) -> Result<(), BadRequest> {
    let Some(share) = note(pod, names::COMPUTE_PERCENT) else {
        return Ok(());
    };
    for (path, it) in all(pod) {
        let asks = wants(it, resource);
        let mut own = env(it).filter(|variable| {
            let name = variable["name"].as_str().unwrap_or_default();
            name.starts_with("CUDA_MPS_") && !(asks && is_ours(variable, share, it))
        });
        if own.next().is_some() {
            let key = names::COMPUTE_PERCENT;
            let problem = format!(
                "the variables CUDA_MPS_* of a pod with {key} are gpustow's to set: remove them"
            );
            return Err(bad(format!("{}.env", field(&path)), problem));
        }
        let mounts = it["volumeMounts"].as_array();
        let mut mounts = mounts.into_iter().flatten().filter(|_| asks);
        let stray = |mount: &Value, [name, _, at]: [&str; 3]| {
            (mount["name"] == name) != (mount["mountPath"] == at)
        };
        if mounts.any(|mount| VOLUMES.iter().any(|volume| stray(mount, *volume))) {
            let problem = format!(
                "/dev/shm and {} of a pod with {} are gpustow's to mount: remove what is mounted there",
                names::MPS_PIPES_DIRECTORY,
                names::COMPUTE_PERCENT
            );
            return Err(bad(format!("{}.volumeMounts", field(&path)), problem));
        }
    }
    let mut volumes = list(pod, "volumes").iter();
    let strange = volumes.find_map(|it| {
        let [name, directory, _] = VOLUMES.into_iter().find(|ours| it["name"] == ours[0])?;
        (it["hostPath"]["path"] != directory).then_some([name, directory])
    });
    match strange {
        Some([name, directory]) => Err(bad(
            format!("metadata.annotations[{}]", names::COMPUTE_PERCENT),
            format!("the pod's volume {name} must be the hostPath {directory}: rename it"),
        )),
        None => Ok(()),
    }
}

/// Is it a variable as gpustow sets it?
fn is_ours(variable: &Value, share: &str, container: &Value) -> bool {
    let value = &variable["value"];
    match variable["name"].as_str() {
        Some(names::MPS_PIPES) => value == names::MPS_PIPES_DIRECTORY,
        Some(names::MPS_THREADS) => value == share,
        Some(names::MPS_MEMORY) => {
            let path = &variable["valueFrom"]["fieldRef"]["fieldPath"];
            let own = name(container);
            *path == format!("metadata.annotations['{}{own}']", names::MPS_OF)
        }
        _ => false,
    }
}
