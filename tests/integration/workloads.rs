//! The manifests of docs/workloads.md make pods for our scheduler, whatever kind has them.

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use crate::install::{installed, try_create};
use crate::support::repository;

/// The manifests in the blocks of the page.
fn manifests() -> Result<Vec<(String, Value)>> {
    let page = std::fs::read_to_string(repository("docs/workloads.md"))?;
    let blocks = page.split("```yaml\n").skip(1);
    let blocks = blocks.filter_map(|rest| Some(rest.split_once("\n```")?.0));
    blocks
        .map(|text| Ok((text.to_owned(), serde_yaml::from_str(text)?)))
        .collect()
}

/// The pods of a manifest: every object with containers is the spec of one. KServe makes a container of its model.
fn pods(object: &Value, annotations: &Value, found: &mut Vec<Value>) {
    let Some(fields) = object.as_object() else {
        for item in object.as_array().into_iter().flatten() {
            pods(item, annotations, found);
        }
        return;
    };
    let annotations = match &object["metadata"]["annotations"] {
        Value::Null => annotations,
        own => own,
    };
    let spec = match (fields.contains_key("containers"), &object["model"]) {
        (true, _) => Some(object.clone()),
        (false, Value::Object(model)) => {
            let limits = &model["resources"]["limits"];
            let container = json!({ "name": "kserve-container", "image": "model", "resources": { "limits": limits } });
            Some(json!({ "containers": [container] }))
        }
        _ => None,
    };
    let Some(spec) = spec else {
        fields.values().for_each(|it| pods(it, annotations, found));
        return;
    };
    let metadata = json!({ "name": "from-template", "annotations": annotations });
    found.push(json!({ "metadata": metadata, "spec": spec }));
}

#[tokio::test]
async fn every_kind_of_workload_in_the_documentation_makes_pods_for_our_scheduler() -> Result<()> {
    let cluster = installed().await?;
    let client = cluster.admin()?;
    let manifests = manifests()?;
    ensure!(manifests.len() == 6, "{}", manifests.len());
    let folder = tempfile::tempdir()?;
    for (text, object) in manifests {
        let kind = object["kind"].as_str().context("no kind")?;
        if ["apps/v1", "batch/v1"]
            .map(Some)
            .contains(&object["apiVersion"].as_str())
        {
            let path = folder.path().join("workload.yaml");
            std::fs::write(&path, text)?;
            let path = path.to_str().context("path of a manifest")?;
            let args = ["apply", "--warnings-as-errors", "-f", path];
            cluster.kubectl(&args).await?;
        }
        let mut made = Vec::new();
        pods(&object, &Value::Null, &mut made);
        let mut ours = 0;
        for pod in made {
            let pod: Pod = serde_json::from_value(pod)?;
            let pod = try_create(&client, &pod).await.context(kind.to_owned())?;
            let spec = pod.spec.context("no spec")?;
            let requests = |it: &k8s_openapi::api::core::v1::Container| {
                let limits = it.resources.as_ref().and_then(|it| it.limits.as_ref());
                limits.is_some_and(|it| it.contains_key(names::GPU_MEM))
            };
            if spec.containers.iter().any(requests) {
                ensure!(
                    spec.scheduler_name.as_deref() == Some(names::SCHEDULER),
                    "{kind}"
                );
                ours += 1;
            }
        }
        ensure!(ours == 1, "{kind} makes {ours} pods with GPU memory");
    }
    Ok(())
}
