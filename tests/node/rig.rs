//! The control plane that all cases share, with gpustow as `manifests/base` installs it and an extender that calls
//! memory back.

use std::path::Path;

use anyhow::Result;
use gpustow_api::names;
use gpustow_testkit::{ControlPlane, Extender, ExtenderOptions, Scheduler, Webhook, shared};
use tokio::sync::OnceCell;

const ACCOUNT: &str = "gpustow-scheduler";

pub(crate) struct Rig {
    pub(crate) cluster: &'static ControlPlane,
    _extender: Extender,
    _scheduler: Scheduler,
}

pub(crate) async fn rig() -> Result<&'static Rig> {
    static RIG: OnceCell<Rig> = OnceCell::const_new();
    RIG.get_or_try_init(async || start(shared().await?).await)
        .await
}

async fn start(cluster: &'static ControlPlane) -> Result<Rig> {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR"));
    let base = repository.join("manifests/base").display().to_string();
    cluster.kubectl(&["apply", "-k", &base]).await?;
    // The permissions that a Node authorizer would give to kubelets.
    cluster
        .kubectl(&[
            "create",
            "clusterrolebinding",
            "kubelets",
            "--clusterrole=system:node",
            "--group=system:nodes",
        ])
        .await?;
    let kubeconfig = cluster.kubeconfig(names::NAMESPACE, ACCOUNT, None).await?;
    let gpustow = Path::new(env!("CARGO_BIN_EXE_gpustow"));
    Webhook::keep(cluster, gpustow).await?;
    let options = ExtenderOptions {
        config: Some(vec!["reclaim: {action: KillProcess}".to_owned()]),
        ..ExtenderOptions::default()
    };
    let extender = Extender::start(cluster, gpustow, &kubeconfig, options).await?;
    let scheduler = Scheduler::calling(cluster, repository, &extender).await?;
    Ok(Rig {
        cluster,
        _extender: extender,
        _scheduler: scheduler,
    })
}
