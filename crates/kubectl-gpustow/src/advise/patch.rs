//! A patch of a workload that gives its next pods the advised request.

use gpustow_api::names;
use gpustow_api::owner::Owner;
use gpustow_pack::Mib;
use serde_json::{Value, json};

/// For `kubectl patch`, with these MiB over all GPUs of the container, instead of whole GPUs. None for an unknown kind,
/// and for an object that cannot be changed after its creation.
pub(super) fn of(
    workload: &Owner,
    resource: &str,
    container: &str,
    request: Mib,
    limit: Mib,
    whole_gpus: u64,
) -> Option<String> {
    let mut amount = json!({ resource: request.0.to_string() });
    let mut annotations = json!({});
    if whole_gpus > 0 {
        amount[names::NVIDIA_GPU] = Value::Null;
    }
    if whole_gpus > 1 {
        annotations[format!("{}{container}", names::GPU_COUNT_OF)] = json!(whole_gpus.to_string());
    }
    let mut template = json!({ "spec": { "containers": [{
        "name": container, "resources": { "limits": amount, "requests": amount },
    }] } });
    if limit > request {
        let key = format!("{}{container}", names::MEM_LIMIT_OF);
        annotations[key] = json!(limit.0.to_string());
    }
    if annotations != json!({}) {
        template["metadata"] = json!({ "annotations": annotations });
    }
    let spec = |spec: Value| json!({ "spec": spec });
    let patch = match workload.kind.as_str() {
        "Deployment" | "StatefulSet" | "DaemonSet" | "ReplicaSet" => {
            spec(json!({ "template": template }))
        }
        "CronJob" => spec(json!({ "jobTemplate": spec(json!({ "template": template })) })),
        _ => return None,
    };
    Some(patch.to_string())
}
