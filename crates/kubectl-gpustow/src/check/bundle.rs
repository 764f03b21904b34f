//! `check --bundle`: a file for people who help from afar. Unpacked, it is a folder that `--from` reads.

use std::fs::File;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use gpustow_inspect::Source;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams, LogParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};
use tar::{Builder, Header};

/// Group, version and kind of each object, and whether only the objects in gpustow's namespace are read.
const KINDS: [(&str, &str, &str, bool); 9] = [
    ("", "v1", "Node", false),
    ("", "v1", "Pod", false),
    ("", "v1", "Namespace", false),
    ("", "v1", "ResourceQuota", false),
    ("", "v1", "ConfigMap", true),
    ("coordination.k8s.io", "v1", "Lease", true),
    (names::GROUP, names::VERSION, "GpuNode", false),
    (names::GROUP, names::VERSION, "GpuWorkload", false),
    (names::GROUP, names::VERSION, "GpustowConfig", false),
];
/// Lines of each container's log, and pods that have theirs in it.
const LINES: i64 = 5000;
const LOGS: usize = 50;

/// Writes objects, Events and logs of gpustow, and these texts, to `file`.
pub(crate) async fn write(source: &Source, file: &Path, texts: &[(&str, Vec<u8>)]) -> Result<()> {
    ensure!(
        source.from.is_none(),
        "--bundle reads a cluster, not the files of --from"
    );
    let (client, _) = source.client().await?;
    let created = File::create_new(file);
    let mut tar =
        Builder::new(created.with_context(|| format!("cannot create {}", file.display()))?);
    let mut left_out = String::new();
    let mut items = Vec::new();
    for (group, version, kind, of_ours) in KINDS {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        let api = match of_ours {
            true => Api::namespaced_with(client.clone(), names::NAMESPACE, &resource),
            false => Api::all_with(client.clone(), &resource),
        };
        match objects(&api, &resource, &ListParams::default()).await {
            Ok(all) => items.extend(all),
            Err(error) => left_out += &format!("{kind}: {error}\n"),
        }
    }
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Event"));
    for writer in [names::EXTENDER, names::AGENT] {
        let ours = ListParams::default().fields(&format!("reportingComponent={writer}"));
        match objects(&Api::all_with(client.clone(), &resource), &resource, &ours).await {
            Ok(all) => items.extend(all),
            Err(error) => left_out += &format!("Event of {writer}: {error}\n"),
        }
    }
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": items });
    add(&mut tar, "objects.json", &serde_json::to_vec(&list)?)?;
    logs(&client, &mut tar, &mut left_out).await?;
    for (name, text) in texts {
        add(&mut tar, name, text)?;
    }
    add(&mut tar, "left-out.txt", left_out.as_bytes())?;
    tar.into_inner()?.sync_all()?;
    Ok(())
}

async fn objects(
    api: &Api<DynamicObject>,
    resource: &ApiResource,
    params: &ListParams,
) -> Result<Vec<Value>> {
    let all = api.list(params).await?.items.into_iter();
    let whole = all.map(|mut object| {
        object.metadata.managed_fields = None;
        let applied = "kubectl.kubernetes.io/last-applied-configuration";
        object.annotations_mut().remove(applied);
        let mut value = serde_json::to_value(object)?;
        value["apiVersion"] = json!(resource.api_version);
        value["kind"] = json!(resource.kind);
        without_environment(&mut value);
        Ok(value)
    });
    whole.collect()
}

/// Takes out the environment of a pod's containers, and the words of other people's programs.
fn without_environment(pod: &mut Value) {
    let is_ours = pod["metadata"]["namespace"] == names::NAMESPACE;
    for list in ["containers", "initContainers", "ephemeralContainers"] {
        let containers = pod.get_mut("spec").and_then(|it| it.get_mut(list));
        let containers = containers.and_then(Value::as_array_mut);
        for container in containers.into_iter().flatten() {
            let Some(fields) = container.as_object_mut() else {
                continue;
            };
            let private = ["env", "envFrom", "command", "args", "lifecycle"];
            let private = &private[..if is_ours { 2 } else { private.len() }];
            fields.retain(|key, _| !private.contains(&key.as_str()));
        }
    }
}

/// Adds the logs of gpustow's own containers, and the logs of their previous runs.
async fn logs(client: &Client, tar: &mut Builder<File>, left_out: &mut String) -> Result<()> {
    let api = Api::<Pod>::namespaced(client.clone(), names::NAMESPACE);
    let pods = match api.list(&ListParams::default()).await {
        Ok(pods) => pods.items,
        Err(error) => {
            *left_out += &format!("logs: {error}\n");
            return Ok(());
        }
    };
    if pods.len() > LOGS {
        *left_out += &format!("logs of {} pods of {}\n", pods.len() - LOGS, pods.len());
    }
    for pod in pods.iter().take(LOGS) {
        let statuses = pod.status.iter();
        for status in statuses.flat_map(|it| it.container_statuses.iter().flatten()) {
            for previous in [false, true] {
                if previous && status.restart_count == 0 {
                    continue;
                }
                let params = LogParams {
                    container: Some(status.name.clone()),
                    previous,
                    tail_lines: Some(LINES),
                    timestamps: true,
                    ..LogParams::default()
                };
                let end = if previous { "-previous" } else { "" };
                let name = format!("logs/{}-{}{end}.txt", pod.name_any(), status.name);
                match api.logs(&pod.name_any(), &params).await {
                    Ok(text) => add(tar, &name, text.as_bytes())?,
                    Err(error) => *left_out += &format!("{name}: {error}\n"),
                }
            }
        }
    }
    Ok(())
}

fn add(tar: &mut Builder<File>, name: &str, text: &[u8]) -> Result<()> {
    let mut header = Header::new_gnu();
    header.set_size(text.len() as u64);
    header.set_mode(0o644);
    Ok(tar.append_data(&mut header, format!("gpustow/{name}"), text)?)
}
