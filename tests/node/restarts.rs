//! Capacity never kills: a kubelet that starts rejects running pods for which the node has too little
//! of a resource. Whatever has become of the cards, there is enough.

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use gpustow_testkit::eventually;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;

use crate::kubelet::SOON;
use crate::node::{RealNode, Running, on_node};

/// Two pods that each hold most of a card.
async fn two_pods(node: &RealNode) -> Result<[Running; 2]> {
    for name in ["a", "b"] {
        node.run(node.pod(name).gpu_mem(60_000)).await?;
    }
    containers(node).await
}

async fn containers(node: &RealNode) -> Result<[Running; 2]> {
    Ok([node.container("a").await?, node.container("b").await?])
}

/// Writes zero, as a kubelet does that finds no trace of device plugins. The agent corrects it.
async fn zero(node: &RealNode) -> Result<()> {
    let none = json!({ names::GPU_MEM: "0" });
    let patch = json!({ "status": { "capacity": none, "allocatable": none } });
    Api::<Node>::all(node.case.client.clone())
        .patch_status(&node.name, &PatchParams::default(), &Patch::Merge(patch))
        .await?;
    Ok(())
}

/// The failure that the other tests exclude.
#[tokio::test]
async fn a_kubelet_that_starts_rejects_running_pods_if_no_agent_corrects_the_capacity() -> Result<()>
{
    on_node("rejects", 2, async |node| {
        two_pods(node).await?;
        node.agent.kill9();
        node.kubelet.process.kill9();
        zero(node).await?;
        let rejected = node.restart_kubelet().await;
        let message = rejected.err().context("none rejected")?.to_string();
        ensure!(message.contains("OutOfExtendedResources"), "{message}");
        // As Failed or, where the kubelet sees its container end first, by how that ended.
        eventually(SOON, "the pod ends", async || {
            let status = node.case.pods().get("a").await?.status;
            let phase = status.and_then(|status| status.phase).unwrap_or_default();
            ensure!(["Failed", "Succeeded"].contains(&&*phase), "{phase}");
            Ok(())
        })
        .await
    })
    .await
}

#[tokio::test]
async fn no_pod_dies_when_its_kubelet_restarts_after_the_capacity_was_zeroed() -> Result<()> {
    on_node("zeroed", 2, async |node| {
        let before = two_pods(node).await?;
        zero(node).await?;
        node.amounts(158_000, 158_000).await?;
        node.restart_kubelet().await?;
        assert_eq!(containers(node).await?, before);
        node.amounts(158_000, 158_000).await
    })
    .await
}

#[tokio::test]
async fn no_pod_dies_when_its_kubelet_restarts_after_a_card_has_vanished() -> Result<()> {
    on_node("vanished", 2, async |node| {
        let before = two_pods(node).await?;
        // A kubelet also counts pods without an assignment.
        let by_hand = node.pod("c").gpu_mem(30_000);
        let by_hand = by_hand.bind_by_hand(&node.case.client, &node.name).await?;
        node.runs(&by_hand).await?;
        node.amounts(188_000, 188_000).await?;
        let card = node.machine.gpus.pop().context("a second card")?;
        node.shows()?;
        // The capacity follows late: all of it at first, then the remaining card and the requests of pods without a
        // present card.
        node.restart_kubelet().await?;
        assert_eq!(containers(node).await?, before);
        node.amounts(169_000, 169_000).await?;
        node.restart_kubelet().await?;
        assert_eq!(containers(node).await?, before);
        // Without a driver nothing is seen at all.
        node.machine.error = 9;
        node.shows()?;
        node.restart_kubelet().await?;
        assert_eq!(containers(node).await?, before);
        // An agent that starts now has never seen that card.
        node.restart_agent().await?;
        node.restart_kubelet().await?;
        assert_eq!(containers(node).await?, before);
        node.machine.error = 0;
        node.machine.gpus.push(card);
        node.shows()?;
        node.amounts(188_000, 188_000).await
    })
    .await
}

/// A pod that comes round the schedulers counts once its kubelet has taken it in, and no sooner.
#[tokio::test]
async fn a_pod_that_its_kubelet_rejects_never_counts() -> Result<()> {
    on_node("inflates", 1, async |node| {
        let by_hand = async |name: &str, mib: u64| {
            let pod = node.pod(name).gpu_mem(mib);
            pod.bind_by_hand(&node.case.client, &node.name).await
        };
        let large = by_hand("large", 79_001).await?;
        node.phase(&large, "Failed").await?;
        node.runs(&by_hand("small", 79_000).await?).await?;
        // As much room as there is on the card: for a pod that asks gpustow.
        node.amounts(158_000, 158_000).await?;
        node.run(node.pod("a").gpu_mem(79_000)).await?;
        let full = by_hand("full", 1).await?;
        node.phase(&full, "Failed").await?;
        node.amounts(158_000, 158_000).await
    })
    .await
}

#[tokio::test]
async fn no_pod_dies_when_its_kubelet_restarts_without_an_agent() -> Result<()> {
    on_node("alone", 2, async |node| {
        let before = two_pods(node).await?;
        node.agent.kill9();
        node.restart_kubelet().await?;
        assert_eq!(containers(node).await?, before);
        node.amounts(158_000, 158_000).await?;
        // Both start at once, as after an upgrade of the node.
        node.kubelet.process.kill9();
        node.agent.restart()?;
        node.restart_kubelet().await?;
        assert_eq!(containers(node).await?, before);
        node.amounts(158_000, 158_000).await
    })
    .await
}
