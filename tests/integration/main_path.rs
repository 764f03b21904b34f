//! A pod that asks for GPU memory goes through the real kube-scheduler onto a GPU.

use anyhow::Result;
use gpustow_api::{Assignment, names};
use gpustow_testkit::{Case, wait_bound};

use crate::support::{SOON, rig};

#[tokio::test]
async fn one_pod_is_bound_with_its_gpu_in_the_same_write() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "one").await?;
    case.node("n", &[24576, 16384]).create(&case.client).await?;
    let pod = case.pod("p").gpu_mem(8192).create(&case.client).await?;

    let bound = wait_bound(&case.client, &pod, SOON).await?;

    let annotations = bound.metadata.annotations.unwrap_or_default();
    let assignment = Assignment::decode(&annotations[names::ASSIGNMENT])?;
    // Best fit: the smaller card.
    assert_eq!(*assignment.charges[0].0, *case.uuid("n", 1));
    assert_eq!(assignment.charges[0].1.0, 8192);
    rig.end(case).await
}
