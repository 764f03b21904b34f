//! A control plane with namespaces whose requests of other GPU sharers are translated.

use anyhow::Result;
use gpustow_api::names;
use gpustow_testkit::ControlPlane;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::Client;
use kube::api::{Api, PostParams};
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use crate::install::installed;
use crate::policies::pod;

/// The control plane with a namespace `probe-SHARER` for each sharer.
pub(crate) async fn adopting() -> Result<&'static ControlPlane> {
    static ADOPTING: OnceCell<()> = OnceCell::const_new();
    let cluster = installed().await?;
    ADOPTING
        .get_or_try_init(async || {
            let client = cluster.admin()?;
            for sharer in ["gpushare", "hami", "volcano", "whole"] {
                let labels = json!({names::ADOPT_LABEL: sharer});
                namespace(&client, &format!("probe-{sharer}"), labels).await?;
            }
            anyhow::Ok(())
        })
        .await?;
    Ok(cluster)
}

pub(crate) async fn namespace(client: &Client, name: &str, labels: Value) -> Result<()> {
    let namespace = json!({"metadata": {"name": name, "labels": labels}});
    let namespace: Namespace = serde_json::from_value(namespace)?;
    let all = Api::<Namespace>::all(client.clone());
    all.create(&PostParams::default(), &namespace).await?;
    Ok(())
}

/// A pod of containers with these limits.
pub(crate) fn of(namespace: &str, annotations: Value, containers: &[(&str, Value)]) -> Result<Pod> {
    let containers: Vec<_> = containers
        .iter()
        .map(|(name, limits)| json!({"name": name, "resources": {"limits": limits}}))
        .collect();
    let mut pod = pod(annotations, json!({"containers": containers}))?;
    pod.metadata.namespace = Some(namespace.to_owned());
    Ok(pod)
}

pub(crate) fn annotation<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata
        .annotations
        .as_ref()?
        .get(key)
        .map(String::as_str)
}
