//! Control planes whose policies or webhook translate requests of other GPU sharers.

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use gpustow_testkit::{ControlPlane, eventually};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::Client;
use kube::api::{Api, PostParams};
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use crate::install::{heard, installed, try_create};
use crate::policies::{pod, refusal};
use crate::support::{SOON, repository};
use crate::webhook::Webhook;

/// The control plane with the policies that translate, in force.
pub(crate) async fn adopting() -> Result<&'static ControlPlane> {
    static ADOPTING: OnceCell<()> = OnceCell::const_new();
    let cluster = installed().await?;
    ADOPTING
        .get_or_try_init(async || {
            let webhook = cluster.minor() < 34;
            adopt(cluster, webhook).await
        })
        .await?;
    Ok(cluster)
}

/// Installs what translates requests, and waits until it does, in a namespace `probe-SHARER` for each.
pub(crate) async fn adopt(cluster: &ControlPlane, webhook: bool) -> Result<()> {
    let manifests = match cluster.minor() {
        _ if webhook => "manifests/adopt-webhook",
        34 | 35 => "manifests/overlays/adopt-v1beta1",
        _ => "manifests/adopt",
    };
    let path = repository(manifests);
    let path = path.to_str().context("path of the repository")?;
    let flags = heard(manifests, &["--server-side", "--warnings-as-errors"]);
    let args = [&["apply", "-k", path], &flags[..]].concat();
    cluster.kubectl(&args).await?;
    if webhook {
        cluster.keep(Webhook::start(cluster).await?.process);
    }
    let client = cluster.admin()?;
    let probes = [
        ("gpushare", json!({names::GPUSHARE_MEM: "1"})),
        ("hami", json!({"nvidia.com/gpumem": "1"})),
        ("volcano", json!({"volcano.sh/vgpu-number": "1"})),
        ("whole", json!({names::NVIDIA_GPU: "1"})),
    ];
    for (source, limits) in probes {
        let name = format!("probe-{source}");
        namespace(&client, &name, json!({names::ADOPT_LABEL: source})).await?;
        let probe = of(&name, json!({}), &[("main", limits)])?;
        eventually(SOON, "requests are translated", async || {
            let made = try_create(&client, &probe).await?;
            ensure!(annotation(&made, names::ADOPTED).is_some(), "{source}");
            Ok(())
        })
        .await?;
    }
    // An API server takes up policies that validate on a clock of their own.
    let too_much = json!({"nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "101"});
    let probe = of("probe-hami", json!({}), &[("main", too_much)])?;
    eventually(SOON, "what cannot be translated is refused", async || {
        let said = refusal(&client, &probe).await?;
        ensure!(said.contains("cannot translate"), "{said}");
        Ok(())
    })
    .await
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
