//! Placeholders with the real Karpenter: it adds a node for each, and no more.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use gpustow_testkit::builders::delete;
use gpustow_testkit::{eventually, wait_bound};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt as _;
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::json;

use crate::karpenter::{Machine, claims, join, karpenter, no_node_is_left};
use crate::site::{CARD, SOON, Site, gates, is_bound};

const ON: &str = "provision: {max: 2}";

async fn placeholders(site: &Site) -> Result<Vec<Pod>> {
    let marked = ListParams::default().labels(names::PLACEHOLDER);
    Ok(site.case.pods().list(&marked).await?.items)
}

/// Waits until there are so many.
async fn there_are(site: &Site, count: usize) -> Result<Vec<Pod>> {
    eventually(SOON, "the placeholders are right", async || {
        let all = placeholders(site).await?;
        ensure!(all.len() == count, "{} placeholders", all.len());
        Ok(all)
    })
    .await
}

async fn there_are_claims(site: &Site, count: usize) -> Result<()> {
    eventually(SOON, "Karpenter asks for so many nodes", async || {
        let claims = claims(site).await?;
        ensure!(claims == count, "{claims}");
        Ok(())
    })
    .await
}

/// The new nodes join, until all pods are bound and no placeholder is left. The names of these nodes.
async fn all_are_bound(site: &Site, machines: &[Machine]) -> Result<BTreeSet<String>> {
    let mut joined = BTreeSet::new();
    eventually(SOON * 3, "all are bound", async || {
        join(site, machines, &mut joined).await?;
        let pods = site.case.pods().list(&ListParams::default()).await?;
        let waits: Vec<_> = pods.iter().filter(|pod| !is_bound(pod)).collect();
        ensure!(waits.is_empty(), "{} of {joined:?}", waits.len());
        Ok(())
    })
    .await?;
    Ok(joined)
}

/// As above, and Karpenter asked for only one node.
async fn one_node_suffices(site: &Site, machines: &[Machine]) -> Result<()> {
    let joined = all_are_bound(site, machines).await?;
    ensure!(joined.len() == 1, "{joined:?}");
    ensure!(claims(site).await? == 1, "it asked for another node");
    Ok(())
}

#[tokio::test]
async fn placeholders_of_queued_pods_add_nodes_until_all_are_bound() -> Result<()> {
    let (site, _) = Site::with_queue(1, &["provision: {max: 2}"]).await?;
    let (case, client) = (&site.case, &site.case.client);
    let machines = [Machine::of(1)];
    let _karpenter = karpenter(&site, &machines).await?;
    for name in ["first", "second", "third"] {
        case.pod(name).gpu_mem(CARD).create(client).await?;
    }
    there_are_claims(&site, 2).await?;
    let third = case.pods().get("third").await?;
    ensure!(gates(&third) == [names::GATE], "{:?}", gates(&third));

    let joined = all_are_bound(&site, &machines).await?;
    ensure!(joined.len() == 3, "{joined:?}");
    site.case.end().await
}

#[tokio::test]
async fn a_pod_that_waits_for_fragmented_memory_has_one_node_added() -> Result<()> {
    let site = Site::start("manifests/base", 1, &[ON]).await?;
    let (case, client) = (&site.case, &site.case.client);
    let machines = [Machine::of(1)];
    let _karpenter = karpenter(&site, &machines).await?;
    let name = case.node_name("pieces");
    let pieces = case.node("pieces", &[CARD, CARD]);
    let pieces = pieces.label(names::HOSTNAME, &name);
    let pieces = pieces.label(names::KNOWN_LABEL, "true");
    let pieces = pieces.label(names::GPU_MEMORY_LABEL, &CARD.to_string());
    pieces.create(client).await?;
    for name in ["a", "b", "c"] {
        let pod = case.pod(name).gpu_mem(5000).create(client).await?;
        wait_bound(client, &pod, SOON).await?;
    }
    case.pod("large").gpu_mem(6000).create(client).await?;
    one_node_suffices(&site, &machines).await?;
    site.case.end().await
}

#[tokio::test]
async fn a_kind_whose_gpus_are_too_small_is_not_added() -> Result<()> {
    let (site, _) = Site::with_queue(1, &[ON]).await?;
    let (case, client) = (&site.case, &site.case.client);
    // It comes first by its name, and has enough memory in sum.
    let small = Machine {
        name: "a-small",
        cards: 2,
        mib: CARD / 2,
        ..Machine::of(1)
    };
    let machines = [small, Machine::of(1)];
    let _karpenter = karpenter(&site, &machines).await?;
    case.pod("large").gpu_mem(6000).create(client).await?;
    one_node_suffices(&site, &machines).await?;
    site.case.end().await
}

/// In sum the present nodes have enough free memory.
#[tokio::test]
async fn a_pod_larger_than_any_present_gpu_has_one_node_added() -> Result<()> {
    let site = Site::start("manifests/base", 3, &[ON]).await?;
    let (case, client) = (&site.case, &site.case.client);
    let large = Machine {
        name: "large",
        mib: 2 * CARD,
        ..Machine::of(1)
    };
    let machines = [Machine::of(2), large];
    let _karpenter = karpenter(&site, &machines).await?;
    let pod = case.pod("large").gpu_mem(2 * CARD).create(client).await?;
    one_node_suffices(&site, &machines).await?;
    delete(client, &pod, 0).await?;
    no_node_is_left(&site, &machines, &mut BTreeSet::new()).await?;
    site.case.end().await
}

#[tokio::test]
async fn gang_has_one_node_added() -> Result<()> {
    let site = Site::start("manifests/base", 1, &[ON]).await?;
    let (case, client) = (&site.case, &site.case.client);
    let machines = [Machine::of(2)];
    let _karpenter = karpenter(&site, &machines).await?;
    let occupant = case.pod("occupant").gpu_mem(CARD).create(client).await?;
    wait_bound(client, &occupant, SOON).await?;
    let policy = json!({ "schedulingPolicy": { "gang": { "minCount": 2 } } });
    case.pod_group("gang", policy).await?;
    for name in ["first", "second"] {
        let pod = case.pod(name).gpu_mem(CARD);
        case.member("gang", pod).await?;
    }
    one_node_suffices(&site, &machines).await?;
    site.case.end().await
}

/// 64 of them fit on one node. How large the first node will be is not known before it has come, so that each placeholder may
/// bring one too many.
#[tokio::test]
async fn queue_of_500_pods_has_hardly_more_nodes_added_than_it_needs() -> Result<()> {
    let (site, _) = Site::with_queue(1, &["provision: {max: 4}"]).await?;
    let (case, client) = (&site.case, &site.case.client);
    let machines = [Machine::of(8)];
    let _karpenter = karpenter(&site, &machines).await?;
    for index in 0..500 {
        let pod = case.pod(&format!("p{index}")).gpu_mem(CARD / 8);
        pod.create(client).await?;
    }
    let joined = all_are_bound(&site, &machines).await?;
    ensure!((8..=8 + 4).contains(&joined.len()), "{}", joined.len());
    there_are(&site, 0).await?;
    site.case.end().await
}

#[tokio::test]
async fn a_node_with_the_startup_taint_is_the_only_one() -> Result<()> {
    let (site, _) = Site::with_queue(1, &[ON]).await?;
    let (case, client) = (&site.case, &site.case.client);
    let machines = [Machine {
        is_tainted: true,
        ..Machine::of(1)
    }];
    let _karpenter = karpenter(&site, &machines).await?;
    let waits = case.pod("waits").gpu_mem(CARD).create(client).await?;
    let mut joined = BTreeSet::new();
    eventually(SOON, "the node has come", async || {
        join(&site, &machines, &mut joined).await?;
        ensure!(joined.len() == 1, "{joined:?}");
        Ok(())
    })
    .await?;
    there_are(&site, 0).await?;
    let waits = case.pods().get(&waits.name_any()).await?;
    ensure!(!is_bound(&waits), "it is bound in spite of the taint");
    // Its agent removes the taint.
    let nodes = Api::<Node>::all(client.clone());
    let name = joined.first().context("a node")?;
    let node = nodes.get(name).await?;
    let mut taints = node.spec.and_then(|spec| spec.taints).unwrap_or_default();
    ensure!(
        taints.iter().any(|it| it.key == names::STARTUP_TAINT),
        "{taints:?}"
    );
    taints.retain(|it| it.key != names::STARTUP_TAINT);
    let patch = Patch::Merge(json!({ "spec": { "taints": taints } }));
    nodes.patch(name, &PatchParams::default(), &patch).await?;
    wait_bound(client, &waits, SOON).await?;
    ensure!(claims(&site).await? == 1, "it asked for another node");
    site.case.end().await
}

#[tokio::test]
async fn two_pods_that_fit_on_one_node_have_one_node_added() -> Result<()> {
    let (site, _) = Site::with_queue(1, &[ON]).await?;
    let (case, client) = (&site.case, &site.case.client);
    let machines = [Machine::of(1)];
    let _karpenter = karpenter(&site, &machines).await?;
    for name in ["first", "second"] {
        case.pod(name).gpu_mem(CARD / 2).create(client).await?;
    }
    one_node_suffices(&site, &machines).await?;
    site.case.end().await
}

#[tokio::test]
async fn the_node_of_a_pod_that_is_deleted_meanwhile_is_scaled_away() -> Result<()> {
    let (site, _) = Site::with_queue(1, &[ON]).await?;
    let (case, client) = (&site.case, &site.case.client);
    let machines = [Machine::of(1)];
    let _karpenter = karpenter(&site, &machines).await?;
    let waits = case.pod("waits").gpu_mem(CARD).create(client).await?;
    there_are_claims(&site, 1).await?;
    delete(client, &waits, 0).await?;
    there_are(&site, 0).await?;
    no_node_is_left(&site, &machines, &mut BTreeSet::new()).await?;
    site.case.end().await
}

#[tokio::test]
async fn a_takeover_in_the_middle_adds_no_second_node() -> Result<()> {
    let (site, _) = Site::with_queue(1, &[ON]).await?;
    let (case, client) = (&site.case, &site.case.client);
    let machines = [Machine::of(1)];
    let _karpenter = karpenter(&site, &machines).await?;
    case.pod("waits").gpu_mem(CARD).create(client).await?;
    let before = there_are(&site, 1).await?;
    site.extender.process.kill9();
    there_are_claims(&site, 1).await?;
    site.extender.process.restart()?;
    site.extender.wait_ready().await?;
    let after = there_are(&site, 1).await?;
    ensure!(before[0].uid() == after[0].uid(), "it is another one");
    one_node_suffices(&site, &machines).await?;
    site.case.end().await
}
