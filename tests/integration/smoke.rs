use anyhow::Result;
use gpustow_testkit::{Case, eventually, shared};

use crate::support::SOON;

#[tokio::test]
async fn a_gpu_node_is_listed() -> Result<()> {
    let cluster = shared().await?;
    let case = Case::new(cluster, "smoke").await?;
    case.node("n", &[24576, 24576]).create(&case.client).await?;
    let listed = eventually(SOON, "kubectl lists it", async || {
        cluster
            .kubectl(&["get", "gpunodes", &case.node_name("n")])
            .await
    })
    .await?;
    assert!(listed.contains("49152"), "{listed}");
    case.end().await
}
