//! The rig: one extender and one kube-scheduler on the shared control plane, each with the
//! ServiceAccount and RBAC of `manifests/`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use gpustow_testkit::{ControlPlane, Extender, ExtenderOptions, Scheduler, SchedulerConfig, shared};
use tokio::sync::OnceCell;

/// Bound on waits that end at once when all is well.
pub(crate) const SOON: Duration = Duration::from_secs(30);

/// Namespace of gpustow's own objects.
pub(crate) const SYSTEM: &str = "gpustow-system";
/// ServiceAccount of scheduler and extender.
pub(crate) const ACCOUNT: &str = "gpustow-scheduler";

/// The built extender.
pub(crate) fn gpustow() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_gpustow"))
}

/// A file of the repository.
pub(crate) fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// A control plane with an extender and a scheduler of name `gpustow-scheduler`.
pub(crate) struct Rig {
    pub(crate) cluster: &'static ControlPlane,
    pub(crate) extender: Extender,
    pub(crate) scheduler: Scheduler,
}

/// The rig that cases share which leave extender, scheduler and API server alone.
pub(crate) async fn rig() -> Result<&'static Rig> {
    static RIG: OnceCell<Rig> = OnceCell::const_new();
    RIG.get_or_try_init(async || {
        let cluster = shared().await?;
        let base = repository("manifests/base");
        cluster.kubectl(&["apply", "-k", &base.display().to_string()]).await?;
        let kubeconfig = cluster.kubeconfig(SYSTEM, ACCOUNT, None).await?;
        let extender =
            Extender::start(cluster, gpustow(), &kubeconfig, ExtenderOptions::default()).await?;
        let config = SchedulerConfig::load(&repository("scheduler-config/gpustow-scheduler.yaml"))?
            .with_extender(&extender.url)?;
        let scheduler = Scheduler::start(cluster, config, &kubeconfig).await?;
        Ok(Rig { cluster, extender, scheduler })
    })
    .await
}
