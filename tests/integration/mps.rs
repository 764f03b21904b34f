//! GPUs that pods share through NVIDIA's MPS, with a share of their compute. A listening socket is the control daemon.

use std::os::unix::net::UnixListener;

use anyhow::Result;
use gpustow_testkit::Case;

use crate::agent::AgentNode;
use crate::support::{refused, rig};

#[tokio::test]
async fn gpus_with_mps_are_shown_and_take_no_pods_without_a_share() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "mps").await?;
    let mut node = AgentNode::start(rig.cluster, &case).await?;
    node.capacity(79_000).await?;
    node.kubelet_writes("allocatable", 79_000).await?;
    let pipes = tempfile::tempdir()?;
    let flag = format!("--mps-pipes={}", pipes.path().display());
    node.restart(rig.cluster, &["--mps", &flag]).await?;
    node.card("no daemon", |gpu| {
        let reason = gpu.reason.as_deref().unwrap_or_default();
        gpu.mps && !gpu.healthy && reason.contains("control daemon does not answer")
    })
    .await?;
    let daemon = UnixListener::bind(pipes.path().join("control"))?;
    node.card("the daemon", |gpu| gpu.mps && gpu.healthy)
        .await?;
    let plain = case.pod("plain").gpu_mem(8000);
    let plain = refused(
        &case.client,
        plain,
        "GPUs with MPS take only pods with compute-percent",
    );
    plain.await?;
    drop(daemon);
    node.card("the daemon is gone", |gpu| gpu.mps && !gpu.healthy)
        .await?;
    node.end().await;
    rig.end(case).await
}
