//! Pods hold memory while they end slowly, come back, or were bound without gpustow; nodes come back with other cards.
//!
//! Nodes advertise more memory than their cards have where kube-scheduler's own sum would hide gpustow's decisions.

use anyhow::{Context as _, Result};
use gpustow_api::GpuNode;
use gpustow_testkit::builders::{delete, set_containers, set_phase, set_running};
use gpustow_testkit::{BY_HAND, Case, eventually, wait_bound, wait_gone};
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, DeleteParams};
use serde_json::json;

use crate::support::{SOON, bound, charges, placed, refused, rig, rounds};

/// gpustow's message when other pods hold a card.
const NO_ROOM: &str = "not enough free memory on any one GPU";

#[tokio::test]
async fn a_pod_bound_by_hand_holds_no_card_and_is_reported() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "by-hand").await?;
    case.node("n", &[10000])
        .advertise(100_000)
        .create(&case.client)
        .await?;
    let by_hand = case.pod("by-hand").gpu_mem(8000).label(BY_HAND, "true");
    let node = case.node_name("n");
    // As a kubelet shows its static pods.
    let kubelet = rig.cluster.kubelet(&node)?;
    by_hand
        .with(|spec| spec.node_name = Some(node))
        .create(&kubelet)
        .await?;

    eventually(SOON, "the pod is reported", async || {
        let metrics = rig.extender.metrics().await?;
        let count = metrics.lines().find(|line| line.starts_with(UNASSIGNED));
        let count = count.context("no such series")?.to_owned();
        anyhow::ensure!(!count.ends_with(" 0"), "{count}");
        Ok(())
    })
    .await?;
    // All of the card is there for a pod that came through the scheduler.
    let pod = case.pod("assigned").gpu_mem(10000);
    assert_eq!(
        placed(&case.client, pod).await?,
        [(case.uuid("n", 0), 10000)]
    );
    rig.end(case).await
}

/// The series that counts pods which were bound around us.
const UNASSIGNED: &str = "gpustow_problems{kind=\"unassigned\"}";

#[tokio::test]
async fn a_terminating_pod_holds_its_memory_until_its_containers_end() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "terminating").await?;
    case.node("n", &[10000])
        .advertise(100_000)
        .create(&case.client)
        .await?;
    let pod = case.pod("ending").gpu_mem(10000).container("second", None);
    let ending = bound(&case.client, pod).await?;
    set_running(&case.client, &ending).await?;
    delete(&case.client, &ending, 3600).await?;

    let next = refused(&case.client, case.pod("next").gpu_mem(10000), NO_ROOM).await?;

    let ended = json!({"terminated": {"exitCode": 0}});
    set_containers(&case.client, &ending, "Running", ended).await?;
    wait_bound(&case.client, &next, SOON).await?;
    rig.end(case).await
}

#[tokio::test]
async fn a_crash_looping_pod_holds_its_memory_and_one_that_has_ended_does_not() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "crashing").await?;
    case.node("n", &[10000])
        .advertise(100_000)
        .create(&case.client)
        .await?;
    let crashing = bound(&case.client, case.pod("crashing").gpu_mem(10000)).await?;
    let waiting = json!({"waiting": {"reason": "CrashLoopBackOff"}});
    set_containers(&case.client, &crashing, "Running", waiting).await?;

    let next = refused(&case.client, case.pod("next").gpu_mem(10000), NO_ROOM).await?;

    set_phase(&case.client, &crashing, "Failed").await?;
    wait_bound(&case.client, &next, SOON).await?;
    rig.end(case).await
}

#[tokio::test]
async fn a_pod_recreated_under_its_name_is_another_pod() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "recreate").await?;
    case.node("n", &[10000, 10000]).create(&case.client).await?;
    let pod = |mib| case.pod("p").gpu_mem(mib);
    let mut last = bound(&case.client, pod(6000)).await?;
    let neighbour = placed(&case.client, case.pod("neighbour").gpu_mem(10000)).await?;
    assert_ne!(neighbour[0].0, charges(&last)?[0].0);

    for round in 0..rounds()? {
        // It asks for something else each time, too.
        let mib = if round % 2 == 0 { 10000 } else { 6000 };
        delete(&case.client, &last, 0).await?;
        let next = bound(&case.client, pod(mib)).await?;
        assert_ne!(next.metadata.uid, last.metadata.uid);
        assert_eq!(charges(&next)?, [(case.uuid("n", 0), mib)]);
        case.check().await?;
        last = next;
    }
    rig.end(case).await
}

#[tokio::test]
async fn a_node_may_come_back_with_other_cards() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "new-cards").await?;
    case.node("n", &[10000]).create(&case.client).await?;
    let old = bound(&case.client, case.pod("old").gpu_mem(10000)).await?;
    let name = case.node_name("n");
    let now = DeleteParams::default().grace_period(0);
    Api::<Node>::all(case.client.clone())
        .delete(&name, &now)
        .await?;
    let reports = Api::<GpuNode>::all(case.client.clone());
    eventually(SOON, "the GpuNode goes with its owner", async || {
        let report = reports.get_opt(&name).await?;
        anyhow::ensure!(report.is_none(), "it is still there");
        Ok(())
    })
    .await?;
    let next = case.pod("next").gpu_mem(10000).create(&case.client).await?;

    let cards = case.node("n", &[4000, 12000, 8000]).with_status(|status| {
        for gpu in &mut status.gpus {
            gpu.uuid.push_str("-new");
        }
    });
    cards.create(&case.client).await?;

    let card = |card, mib| [(format!("{}-new", case.uuid("n", card)), mib)];
    assert_eq!(
        charges(&wait_bound(&case.client, &next, SOON).await?)?,
        card(1, 10000)
    );
    // The old pod holds nothing of the new cards, though kube-scheduler still counts it.
    assert_eq!(
        placed(&case.client, case.pod("small").gpu_mem(4000)).await?,
        card(0, 4000)
    );
    let last = case.pod("last").gpu_mem(8000);
    let last = refused(&case.client, last, "Insufficient").await?;
    delete(&case.client, &old, 0).await?;
    wait_gone(&case.client, &old, SOON).await?;
    assert_eq!(
        charges(&wait_bound(&case.client, &last, SOON).await?)?,
        card(2, 8000)
    );
    rig.end(case).await
}
