//! The manifests of the repository on a control plane.

use anyhow::{Context as _, Result, bail, ensure};
use gpustow_api::names;
use gpustow_testkit::{ControlPlane, Options, Webhook, eventually, pod};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, PostParams};
use tokio::sync::OnceCell;

use crate::support::{SOON, gpustow, repository};

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
pub(crate) async fn install(cluster: &ControlPlane, kustomization: &str) -> Result<()> {
    let flags = ["--server-side", "--warnings-as-errors"];
    apply(cluster, kustomization, &flags).await
}

/// As above, with flags of `kubectl apply`.
pub(crate) async fn apply(
    cluster: &ControlPlane,
    kustomization: &str,
    flags: &[&str],
) -> Result<()> {
    let path = repository(kustomization);
    let path = path.to_str().context("path of the repository")?;
    forget(cluster).await?;
    let args = ["apply", "-k", path];
    cluster.kubectl(&[&args[..], flags].concat()).await?;
    Webhook::keep(cluster, gpustow()).await?;
    in_force(cluster).await
}

/// Takes away the configuration of the webhook of an earlier installation, which a test has changed.
pub(crate) async fn forget(cluster: &ControlPlane) -> Result<()> {
    let kind = "mutatingwebhookconfiguration";
    let name = names::WEBHOOK_CONFIGURATION;
    let delete = ["delete", kind, name, "--ignore-not-found"];
    cluster.kubectl(&delete).await.map(drop)
}

/// Waits until GpuNodes are served, the policies in force and the webhook called.
pub(crate) async fn in_force(cluster: &ControlPlane) -> Result<()> {
    let client = cluster.admin()?;
    let served = async || cluster.kubectl(&["get", "gpunodes"]).await;
    eventually(SOON, "GpuNodes are served", served).await?;
    let probe = || {
        pod("default", "probe")
            .gpu_mem(1)
            .scheduler("default-scheduler")
    };
    eventually(SOON, "pods are admitted", async || {
        for (key, value) in [(names::EPOCH, "1"), (names::GPU_COUNT, "0")] {
            let pod = probe().annotation(key, value).build();
            if try_create(&client, &pod).await.is_ok() {
                bail!("a pod with {key} {value} is admitted");
            }
        }
        let made = try_create(&client, &probe().build()).await?;
        let scheduler = made.spec.and_then(|spec| spec.scheduler_name);
        ensure!(
            scheduler.as_deref() == Some(names::SCHEDULER),
            "not admitted by gpustow"
        );
        Ok(())
    })
    .await?;
    // An API server takes up policies later.
    let mut placeholder = probe().build();
    placeholder.metadata.labels = Some([(names::PLACEHOLDER.to_owned(), String::new())].into());
    eventually(SOON, "the policies are in force", async || {
        let made = try_create(&client, &placeholder).await;
        ensure!(made.is_err(), "anyone creates placeholders");
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
    // The API server warns of every beta policy.
    let strict = ["--warnings-as-errors"].into_iter();
    let strict = strict.filter(|_| guard == "manifests/guard");
    let apply = ["apply", "--server-side", "-k", path];
    let apply: Vec<_> = apply.into_iter().chain(strict).collect();
    cluster.kubectl(&apply).await?;
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
        ensure!(void.count() > 0, "nothing is changed");
        ensure!(
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
