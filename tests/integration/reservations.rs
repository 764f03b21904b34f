//! A place is kept for a pod that has waited for long, on a real API server and kube-scheduler.

use anyhow::{Result, ensure};
use gpustow_api::names;
use gpustow_testkit::builders::delete;
use gpustow_testkit::{Action, Case, ControlPlane, Options, eventually, wait_bound, wait_gone};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, ResourceExt as _};

use crate::fault_rig::{Replica, turn};
use crate::support::{Rig, SOON, Setup, bound, event, node_event, refused, repository};

const CARD: u64 = 8192;
const KEPT: &str = "free GPU memory is reserved for a pod that has waited longer";

#[tokio::test]
async fn a_pod_of_all_cards_is_bound_once_those_before_it_have_ended() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    let setup = Setup {
        config: &["reserve: {after: 1s}"],
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
    let told = event(&case.client, &large, "GpuMemoryReserved").await?;
    ensure!(
        told.contains("small-0") && told.contains("small-2"),
        "{told}"
    );
    // Pods that come later would take each card as soon as it is free.
    let mut late = Vec::new();
    for (index, ends) in small.iter().enumerate().take(2) {
        delete(&case.client, ends, 0).await?;
        let pod = case.pod(&format!("late-{index}")).gpu_mem(CARD);
        late.push(refused(&case.client, pod, KEPT).await?);
    }
    let metrics = rig.extender.metrics().await?;
    ensure!(
        metrics.contains("\ngpustow_earmarks{cause=\"reserve\"} 1\n"),
        "{metrics}"
    );
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
async fn an_extender_that_restarts_keeps_a_place_for_the_pod_that_waits() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    let setup = Setup {
        config: &["reserve: {after: 1s}"],
        ..Setup::default()
    };
    let rig = Rig::start(&cluster, setup).await?;
    let case = Case::new(rig.cluster, "places-restart").await?;
    let [first, second, large] = reserved(&case).await?;
    event(&case.client, &large, "GpuMemoryReserved").await?;

    rig.extender.process.restart()?;
    rig.extender.wait_ready().await?;
    eventually(SOON, "a place is kept again", async || {
        let metrics = rig.extender.metrics().await?;
        ensure!(metrics.contains("\ngpustow_earmarks{cause=\"reserve\"} 1\n"));
        Ok(())
    })
    .await?;

    delete(&case.client, &first, 0).await?;
    refused(&case.client, case.pod("late").gpu_mem(CARD), KEPT).await?;
    delete(&case.client, &second, 0).await?;
    wait_bound(&case.client, &large, SOON).await?;
    rig.end(case).await
}

/// The label and the annotations on the node that inform autoscalers.
async fn marks(case: &Case) -> Result<[Option<String>; 3]> {
    let node = Api::<Node>::all(case.client.clone());
    let node = node.get(&case.node_name("n")).await?;
    let [(_, ca), (_, karpenter)] = names::SPARE_NODE;
    Ok([
        node.labels().get(names::RESERVED_LABEL).cloned(),
        node.annotations().get(ca).cloned(),
        node.annotations().get(karpenter).cloned(),
    ])
}

/// Waits for these.
async fn marked(case: &Case, wanted: [Option<&str>; 3]) -> Result<()> {
    eventually(SOON, "the node's marks are", async || {
        let marks = marks(case).await?;
        let seen = marks.each_ref().map(Option::as_deref);
        ensure!(seen == wanted, "{seen:?}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn autoscalers_are_told_to_let_a_node_be_while_a_place_is_kept_there() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    let right = repository("manifests/disruptions/rbac.yaml")
        .display()
        .to_string();
    let setup = Setup {
        config: &["reserve: {after: 1s, markNodes: true}"],
        ..Setup::default()
    };
    let rig = Rig::start(&cluster, setup).await?;
    cluster.kubectl(&["delete", "-f", &right]).await?;
    let case = Case::new(rig.cluster, "marked").await?;
    let [(who, _), (_, karpenter)] = names::SPARE_NODE;
    // The node's owner has set Karpenter's behaviour.
    let node = case.node("n", &[CARD; 2]).with_node(|node| {
        let theirs = (karpenter.to_owned(), "false".to_owned());
        node.metadata.annotations = Some([theirs].into());
    });
    node.create(&case.client).await?;
    let name = case.node_name("n");
    let first = bound(&case.client, case.pod("first").gpu_mem(CARD)).await?;
    let second = bound(&case.client, case.pod("second").gpu_mem(CARD)).await?;
    let large = case.pod("large").gpu_mem(2 * CARD);
    let large = large.annotation(names::GPU_COUNT, "2");
    let large = refused(&case.client, large, names::GPU_MEM).await?;
    let told = node_event(&case.client, &name, "GpuMemoryReserved").await?;
    ensure!(told.contains("gpustow-disruptions"), "{told}");

    cluster.kubectl(&["apply", "-f", &right]).await?;
    marked(&case, [Some(who), Some("true"), Some("false")]).await?;
    node_event(&case.client, &name, "GpuMemoryReserved").await?;
    for ends in [&first, &second] {
        delete(&case.client, ends, 0).await?;
    }
    wait_bound(&case.client, &large, SOON).await?;
    marked(&case, [None, None, Some("false")]).await?;
    node_event(&case.client, &name, "GpuReservationEnded").await?;

    // The next leader unmarks nodes without a reservation.
    let next = case.pod("next").gpu_mem(2 * CARD);
    let next = next.annotation(names::GPU_COUNT, "2");
    let next = refused(&case.client, next, names::GPU_MEM).await?;
    marked(&case, [Some(who), Some("true"), Some("false")]).await?;
    rig.extender.process.kill9();
    delete(&case.client, &next, 0).await?;
    rig.extender.process.restart()?;
    rig.extender.wait_ready().await?;
    marked(&case, [None, None, Some("false")]).await?;
    rig.end(case).await
}

/// As an extender left it before `reserve.markNodes` was turned off.
#[tokio::test]
async fn marks_are_removed_without_mark_nodes() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    let rig = Rig::start(&cluster, Setup::default()).await?;
    let case = Case::new(rig.cluster, "left").await?;
    let [(_, ca), (who, karpenter)] = names::SPARE_NODE;
    let node = case.node("n", &[CARD]).label(names::RESERVED_LABEL, who);
    let node = node.with_node(|node| {
        let marks = [ca, karpenter].map(|key| (key.to_owned(), "true".to_owned()));
        node.metadata.annotations = Some(marks.into());
    });
    node.create(&case.client).await?;
    bound(&case.client, case.pod("first").gpu_mem(CARD)).await?;
    // The other one is its owner's.
    marked(&case, [None, Some("true"), None]).await?;
    rig.end(case).await
}

/// A pod on each of two cards, and one that waits for both; it has a reservation.
async fn reserved(case: &Case) -> Result<[Pod; 3]> {
    case.node("n", &[CARD; 2]).create(&case.client).await?;
    let first = bound(&case.client, case.pod("first").gpu_mem(CARD)).await?;
    let second = bound(&case.client, case.pod("second").gpu_mem(CARD)).await?;
    let large = case.pod("large").gpu_mem(2 * CARD);
    let large = large.annotation(names::GPU_COUNT, "2");
    let large = refused(&case.client, large, names::GPU_MEM).await?;
    Ok([first, second, large])
}

#[tokio::test]
async fn reservation_goes_on_after_a_takeover_when_half_of_it_is_free() -> Result<()> {
    let turn = turn().await?;
    let killed = Replica::start(turn.cluster, "keeps", &["reserve: {after: 1s}"]).await?;
    let scheduler = killed.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "keeps").await?;
    let [first, second, large] = reserved(&case).await?;
    event(&case.client, &large, "GpuMemoryReserved").await?;
    delete(&case.client, &first, 0).await?;
    wait_gone(&case.client, &first, SOON).await?;
    scheduler.process.kill9();
    killed.extender.process.kill9();
    drop(killed);

    let successor = Replica::start(turn.cluster, "keeps-on", &["reserve: {after: 1s}"]).await?;
    let _scheduler = successor.scheduler(turn.cluster).await?;
    refused(&case.client, case.pod("late").gpu_mem(CARD), KEPT).await?;
    delete(&case.client, &second, 0).await?;
    wait_bound(&case.client, &large, SOON).await?;
    successor.settled(&case).await?;
    case.end().await
}

#[tokio::test]
async fn mark_that_arrives_after_a_takeover_is_taken_off() -> Result<()> {
    let turn = turn().await?;
    let args = ["reserve: {after: 1s, markNodes: true}"];
    let frozen = Replica::start(turn.cluster, "marks-icy", &args).await?;
    let scheduler = frozen.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "marks-late").await?;
    let node = format!("/api/v1/nodes/{}", case.node_name("n"));
    let late = frozen.proxy.rule(
        move |method, uri| method.as_str() == "PATCH" && uri.path() == node,
        Action::Hold,
    );
    let [first, _, large] = reserved(&case).await?;
    late.seen(1, SOON).await?;
    scheduler.process.kill9();
    frozen.extender.process.stop()?;
    for gone in [&first, &large] {
        delete(&case.client, gone, 0).await?;
        wait_gone(&case.client, gone, SOON).await?;
    }

    let successor = Replica::start(turn.cluster, "marks-heir", &args).await?;
    let _scheduler = successor.scheduler(turn.cluster).await?;
    // It leads.
    bound(&case.client, case.pod("small").gpu_mem(CARD)).await?;
    late.release();
    late.answered(1, SOON).await?;
    node_event(&case.client, &case.node_name("n"), "GpuReservationEnded").await?;
    marked(&case, [None, None, None]).await?;
    frozen.extender.process.cont()?;
    successor.settled(&case).await?;
    assert_eq!(marks(&case).await?, [None, None, None]);
    case.end().await
}
