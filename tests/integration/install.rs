//! The manifests of the repository on a control plane.

use anyhow::{Context as _, Result, bail};
use gpustow_api::names;
use gpustow_testkit::{ControlPlane, Options, eventually, pod};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, PostParams};
use tokio::sync::OnceCell;

use crate::support::{SOON, repository};
use crate::webhook::Webhook;

/// A control plane with the second scheduler's manifests, for tests of admission; no controllers.
pub(crate) async fn installed() -> Result<&'static ControlPlane> {
    static INSTALLED: OnceCell<ControlPlane> = OnceCell::const_new();
    INSTALLED
        .get_or_try_init(async || {
            let cluster = ControlPlane::start(Options::default()).await?;
            install(&cluster, "manifests/base").await?;
            Ok(cluster)
        })
        .await
}

/// Applies a kustomization of the repository, warnings forbidden, and waits until it is [`in_force`].
/// `manifests/base` and `manifests/overlays/queue` stand for what is installed instead of them on this Kubernetes.
pub(crate) async fn install(cluster: &ControlPlane, kustomization: &str) -> Result<()> {
    let flags = ["--server-side", "--warnings-as-errors"];
    apply(cluster, kustomization, &flags).await
}

/// The same with flags of `kubectl apply`.
pub(crate) async fn apply(
    cluster: &ControlPlane,
    kustomization: &str,
    flags: &[&str],
) -> Result<()> {
    let kustomization = match (kustomization, cluster.minor()) {
        ("manifests/base", 34 | 35) => "manifests/overlays/v1beta1",
        ("manifests/base", ..34) => "manifests/overlays/webhook",
        ("manifests/overlays/queue", 34 | 35) => "manifests/overlays/queue-v1beta1",
        ("manifests/overlays/queue", ..34) => "manifests/overlays/queue-webhook",
        _ => kustomization,
    };
    let path = repository(kustomization);
    let path = path.to_str().context("path of the repository")?;
    let args = ["apply", "-k", path];
    let flags = heard(kustomization, flags);
    cluster.kubectl(&[&args[..], &flags].concat()).await?;
    if kustomization.ends_with("webhook") {
        let webhook = Webhook::start(cluster).await?;
        cluster.keep(webhook.process);
    }
    in_force(cluster).await
}

/// `flags` without that which forbids warnings, where the API server warns of every beta policy.
pub(crate) fn heard<'a>(kustomization: &str, flags: &[&'a str]) -> Vec<&'a str> {
    let flags = flags.iter().copied();
    flags
        .filter(|flag| !(kustomization.ends_with("v1beta1") && *flag == "--warnings-as-errors"))
        .collect()
}

/// Waits until GpuNodes are served and the policies in force.
pub(crate) async fn in_force(cluster: &ControlPlane) -> Result<()> {
    let client = cluster.admin()?;
    let kinds = match cluster.minor() {
        ..34 => "mutatingwebhookconfigurations",
        34.. => "mutatingadmissionpolicies,mutatingwebhookconfigurations",
    };
    let mutating = cluster.kubectl(&["get", kinds, "--output=name"]).await?;
    let served = async || cluster.kubectl(&["get", "gpunodes"]).await;
    eventually(SOON, "GpuNodes are served", served).await?;
    let probe = || {
        pod("default", "probe")
            .gpu_mem(1)
            .scheduler("default-scheduler")
    };
    eventually(SOON, "the policies are in force", async || {
        for (key, value) in [(names::EPOCH, "1"), (names::GPU_COUNT, "0")] {
            let pod = probe().annotation(key, value).build();
            if try_create(&client, &pod).await.is_ok() {
                bail!("a pod with {key} {value} is admitted");
            }
        }
        if !mutating.is_empty() {
            // Admitted only with what both policies change.
            try_create(&client, &probe().build()).await?;
        }
        Ok(())
    })
    .await
}

/// Applies the opt-in guard and waits until it is in force.
pub(crate) async fn installed_guard(cluster: &ControlPlane) -> Result<()> {
    let guard = match cluster.minor() {
        34 | 35 => "manifests/overlays/guard-v1beta1",
        _ => "manifests/guard",
    };
    let path = repository(guard);
    let path = path.to_str().context("path of the repository")?;
    let flags = heard(guard, &["--server-side", "--warnings-as-errors"]);
    cluster
        .kubectl(&[&["apply", "-k", path], &flags[..]].concat())
        .await?;
    let client = cluster.admin()?;
    let plain = pod("default", "probe").scheduler("default-scheduler");
    let plain = plain.container("idle", None).build();
    let mut helps_itself = plain.clone();
    let containers = helps_itself
        .spec
        .iter_mut()
        .flat_map(|spec| &mut spec.containers);
    for container in containers {
        let all = serde_json::json!([{ "name": names::VISIBLE_DEVICES, "value": "all" }]);
        container.env = serde_json::from_value(all)?;
    }
    eventually(SOON, "the guard is in force", async || {
        let made = try_create(&client, &plain).await?;
        let void = made.spec.iter().flat_map(|spec| &spec.containers);
        let void = void.flat_map(|container| container.env.iter().flatten());
        anyhow::ensure!(void.count() > 0, "nothing is changed");
        anyhow::ensure!(
            try_create(&client, &helps_itself).await.is_err(),
            "admitted"
        );
        Ok(())
    })
    .await
}

/// The pod as the API server would store it, without storing it.
pub(crate) async fn try_create(client: &Client, pod: &Pod) -> kube::Result<Pod> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
    let params = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    Api::namespaced(client.clone(), namespace)
        .create(&params, pod)
        .await
}
