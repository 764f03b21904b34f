//! The result of admission for a pod that is not created. It comes from the function of the extender's webhook, and
//! from the API server's dry run where the user may run it.

use anyhow::Result;
use gpustow_admission::{Act, Ask, Cluster, admit};
use gpustow_api::{BadRequest, GpuWorkload, names};
use gpustow_inspect::Source;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, PostParams};
use serde_json::json;

/// The pod as it would be created, and the warnings for its author.
///
/// # Errors
/// Why it would be refused.
pub(crate) fn admitted(
    pod: &Pod,
    cluster: Cluster<'_>,
    namespace: &ObjectMeta,
    history: Option<&GpuWorkload>,
) -> Result<(Pod, Vec<String>), BadRequest> {
    let unreadable = |error: serde_json::Error| BadRequest {
        field: "pod".to_owned(),
        problem: format!("cannot be read: {error}"),
    };
    let object = serde_json::to_value(pod).map_err(unreadable)?;
    let ask = Ask {
        pod: &object,
        act: Act::Create,
        user: "",
    };
    let admitted = admit(ask, cluster, namespace, history)?;
    let pod = serde_json::from_value(admitted.pod).map_err(unreadable)?;
    Ok((pod, admitted.warnings))
}

/// The API server's answer about a new pod, after its quotas and its admission: the pod, or the refusal. None if the
/// cluster is in files, or the user may not create pods.
pub(crate) async fn asked(
    source: &Source,
    pod: &Pod,
    namespace: &str,
) -> Result<Option<Result<Pod, String>>> {
    if source.from.is_some() {
        return Ok(None);
    }
    let (client, _) = source.client().await?;
    let mut new = pod.clone();
    new.metadata = ObjectMeta {
        generate_name: Some("gpustow-fit-".to_owned()),
        labels: new.metadata.labels,
        annotations: new.metadata.annotations,
        ..ObjectMeta::default()
    };
    let dry_run = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let pods = Api::<Pod>::namespaced(client, namespace);
    match pods.create(&dry_run, &new).await {
        Ok(mut made) => {
            made.metadata.name.clone_from(&pod.metadata.name);
            Ok(Some(Ok(made)))
        }
        Err(kube::Error::Api(status)) if status.message.contains("cannot create resource") => {
            Ok(None)
        }
        Err(kube::Error::Api(status)) => Ok(Some(Err(format!(
            "the API server's answer: {}",
            status.message
        )))),
        Err(error) => Err(error.into()),
    }
}

/// The webhook's problem, found with a pod that is not stored.
///
/// # Errors
/// The API server cannot be asked.
pub(crate) async fn problem(source: &Source) -> Result<Option<String>> {
    let probe = serde_json::from_value(json!({ "metadata": {}, "spec": {
        "containers": [{
            "name": "probe", "image": names::PLACEHOLDER_IMAGE,
            "resources": { "limits": { &source.resource_name: "1" } },
        }],
    } }))?;
    let made = match asked(source, &probe, names::NAMESPACE).await? {
        None => return Ok(None),
        Some(Err(message)) => {
            let is_its = message.contains("failed calling webhook")
                || message.contains(names::WEBHOOK_CONFIGURATION);
            return Ok(is_its.then_some(message));
        }
        Some(Ok(made)) => made,
    };
    let scheduler = made.spec.and_then(|it| it.scheduler_name);
    let changed = scheduler.as_deref() == Some(names::SCHEDULER);
    let problem = "pods that request GPU memory are created unchanged: no webhook admits them";
    Ok((!changed).then(|| problem.to_owned()))
}
