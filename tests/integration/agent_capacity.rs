//! The node's capacity that an agent writes, and its effects on kube-scheduler.

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use gpustow_testkit::builders::{delete, set_accepted};
use gpustow_testkit::{Action, ApiProxy, Case, eventually, wait_bound};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;

use crate::agent::AgentNode;
use crate::agent_token::agent_config;
use crate::support::{SOON, charges, event, rig};

/// A pod of these MiB on a node of two cards, one of which it is on.
async fn on_one_of_two(node: &mut AgentNode, case: &Case, mib: u64) -> Result<Pod> {
    node.capacity(79_000).await?;
    node.gets_a_second_card(case).await?;
    node.kubelet_writes("allocatable", 158_000).await?;
    let pod = case.pod("p").gpu_mem(mib).create(&case.client).await?;
    wait_bound(&case.client, &pod, SOON).await
}

/// The driver does not show the pod's card any more.
fn loses_the_card_of(node: &mut AgentNode, pod: &Pod) -> Result<()> {
    let held = charges(pod)?;
    let (uuid, _) = held.first().context("a pod without a card")?;
    node.machine.gpus.retain(|gpu| gpu.uuid != *uuid);
    node.shows()
}

#[tokio::test]
async fn a_card_that_vanishes_under_a_pod_takes_no_room_of_the_others() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "vanished").await?;
    let mut node = AgentNode::start(rig.cluster, &case).await?;
    let pod = on_one_of_two(&mut node, &case, 60_000).await?;
    node.restart(rig.cluster, &["--shrink-after=1"]).await?;
    loses_the_card_of(&mut node, &pod)?;
    node.capacity(79_000 + 60_000).await?;
    node.kubelet_writes("allocatable", 139_000).await?;
    let other = case.pod("q").gpu_mem(79_000).create(&case.client).await?;
    wait_bound(&case.client, &other, SOON).await?;
    delete(&case.client, &pod, 0).await?;
    node.capacity(79_000).await?;
    node.end().await;
    rig.end(case).await
}

#[tokio::test]
async fn a_bind_that_the_agents_watch_has_not_shown_counts_when_it_shrinks() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "unseen").await?;
    let mut node = AgentNode::start(rig.cluster, &case).await?;
    node.capacity(79_000).await?;
    let proxy = ApiProxy::start(rig.cluster).await?;
    let held = proxy.on_pod_watch(Action::Hold);
    let mut config = agent_config(rig.cluster, &node.name).await?;
    config.cluster_url = proxy.url().parse()?;
    let client = Client::try_from(config)?;
    node.restart_with(client, &["--shrink-after=1"]).await?;
    held.seen(1, SOON).await?;
    let pod = on_one_of_two(&mut node, &case, 60_000).await?;
    let whole = node.machine.clone();
    loses_the_card_of(&mut node, &pod)?;
    node.capacity(79_000 + 60_000).await?;
    node.machine = whole;
    node.shows()?;
    node.capacity(158_000).await?;
    node.end().await;
    rig.end(case).await
}

#[tokio::test]
async fn a_pod_without_an_assignment_counts_once_its_kubelet_has_accepted_it() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "inflate").await?;
    let node = AgentNode::start(rig.cluster, &case).await?;
    node.capacity(79_000).await?;
    let by_hand = async |name: &str, mib: u64| {
        let pod = case.pod(name).gpu_mem(mib);
        let pod = pod.bind_by_hand(&case.client, &node.name).await?;
        // The agent checks the capacity before it reports the pod.
        event(&case.client, &pod, "NoGpuAssignment").await?;
        anyhow::Ok(pod)
    };
    by_hand("large", 1_000_000).await?;
    let small = by_hand("small", 5000).await?;
    node.capacity(79_000).await?;
    set_accepted(&case.client, &small).await?;
    node.capacity(84_000).await?;
    delete(&case.client, &small, 0).await?;
    node.capacity(79_000).await?;
    node.end().await;
    rig.end(case).await
}

#[tokio::test]
async fn the_startup_taint_goes_once_pods_find_the_capacity_and_others_stay() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "startup").await?;
    let node = AgentNode::start(rig.cluster, &case).await?;
    let key = names::STARTUP_TAINT;
    let taints = json!([
        { "key": "testkit/before", "effect": "NoSchedule" },
        { "key": key, "effect": "NoSchedule" },
        { "key": key, "effect": "NoExecute" },
    ]);
    let patch = Patch::Merge(json!({ "spec": { "taints": taints } }));
    let nodes = Api::<Node>::all(case.client.clone());
    let params = PatchParams::default();
    nodes.patch(&node.name, &params, &patch).await?;
    node.capacity(79_000).await?;
    node.card("the report", |gpu| gpu.healthy).await?;
    let left = async || {
        let node = nodes.get(&node.name).await?;
        let taints = node.spec.and_then(|spec| spec.taints).unwrap_or_default();
        let taints = taints.into_iter().map(|it| (it.key, it.effect));
        anyhow::Ok(taints.collect::<Vec<_>>())
    };
    // The kubelet has not reported the capacity yet.
    assert_eq!(left().await?.len(), 3);

    node.kubelet_writes("allocatable", 79_000).await?;

    let stay = [("testkit/before", "NoSchedule"), (key, "NoExecute")];
    let stay = stay.map(|(key, effect)| (key.to_owned(), effect.to_owned()));
    eventually(SOON, "the startup taint is gone", async || {
        let left = left().await?;
        ensure!(left == stay, "{left:?}");
        Ok(())
    })
    .await?;
    node.end().await;
    rig.end(case).await
}
