//! One control plane for all tests of a test binary.

use anyhow::Result;
use tokio::sync::OnceCell;

use crate::control_plane::{ControlPlane, Options};

/// The control plane that a test binary's cases share by namespace and node labels. It has the GpuNode resource and
/// kube-controller-manager. The first case that asks starts it. It ends with the process, and does not need a runtime
/// of its own: it consists of processes.
pub async fn shared() -> Result<&'static ControlPlane> {
    static SHARED: OnceCell<ControlPlane> = OnceCell::const_new();
    SHARED
        .get_or_try_init(async || {
            let cluster = ControlPlane::start(Options {
                controllers: true,
                ..Options::default()
            })
            .await?;
            cluster.install_bare().await?;
            Ok(cluster)
        })
        .await
}
