//! A place is kept for a pod that has waited for long, on a real API server and kube-scheduler.

use anyhow::{Result, ensure};
use gpustow_api::names;
use gpustow_testkit::builders::delete;
use gpustow_testkit::{Case, ControlPlane, Options, eventually, wait_bound};

use crate::support::{Rig, SOON, Setup, bound, event, refused};

const CARD: u64 = 8192;
const KEPT: &str = "free GPU memory is kept for a pod that has waited for long";

#[tokio::test]
async fn a_pod_of_all_cards_is_bound_once_those_before_it_have_ended() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    let setup = Setup {
        args: &["--keep=1"],
        ..Setup::default()
    };
    let rig = Rig::start(&cluster, setup).await?;
    let case = Case::new(rig.cluster, "places").await?;
    case.node("n", &[CARD; 3]).create(&case.client).await?;
    let mut small = Vec::new();
    for index in 0..3 {
        let pod = case.pod(&format!("small-{index}")).gpu_mem(CARD);
        small.push(bound(&case.client, pod).await?);
    }
    let large = case.pod("large").gpu_mem(3 * CARD);
    let large = large.annotation(names::GPU_COUNT, "3");
    let large = refused(&case.client, large, names::GPU_MEM).await?;
    let told = event(&case.client, &large, "GpuPlaceKept").await?;
    ensure!(
        told.contains("small-0") && told.contains("small-2"),
        "{told}"
    );
    // Those who come later would take each card as soon as it is free.
    let mut late = Vec::new();
    for (index, ends) in small.iter().enumerate().take(2) {
        delete(&case.client, ends, 0).await?;
        let pod = case.pod(&format!("late-{index}")).gpu_mem(CARD);
        late.push(refused(&case.client, pod, KEPT).await?);
    }
    let metrics = rig.extender.metrics().await?;
    ensure!(metrics.contains("\ngpustow_places_kept 1\n"), "{metrics}");
    delete(&case.client, &small[2], 0).await?;
    wait_bound(&case.client, &large, SOON).await?;
    case.check().await?;
    // They have waited for as long by now.
    delete(&case.client, &large, 0).await?;
    for pod in &late {
        wait_bound(&case.client, pod, SOON).await?;
    }
    rig.end(case).await
}

#[tokio::test]
async fn an_extender_that_starts_anew_keeps_a_place_for_who_waits() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    let setup = Setup {
        args: &["--keep=1"],
        ..Setup::default()
    };
    let rig = Rig::start(&cluster, setup).await?;
    let case = Case::new(rig.cluster, "places-anew").await?;
    case.node("n", &[CARD; 2]).create(&case.client).await?;
    let first = bound(&case.client, case.pod("first").gpu_mem(CARD)).await?;
    let second = bound(&case.client, case.pod("second").gpu_mem(CARD)).await?;
    let large = case.pod("large").gpu_mem(2 * CARD);
    let large = large.annotation(names::GPU_COUNT, "2");
    let large = refused(&case.client, large, names::GPU_MEM).await?;
    event(&case.client, &large, "GpuPlaceKept").await?;

    rig.extender.process.restart()?;
    rig.extender.wait_ready().await?;
    eventually(SOON, "a place is kept again", async || {
        let metrics = rig.extender.metrics().await?;
        ensure!(metrics.contains("\ngpustow_places_kept 1\n"));
        Ok(())
    })
    .await?;

    delete(&case.client, &first, 0).await?;
    refused(&case.client, case.pod("late").gpu_mem(CARD), KEPT).await?;
    delete(&case.client, &second, 0).await?;
    wait_bound(&case.client, &large, SOON).await?;
    rig.end(case).await
}
