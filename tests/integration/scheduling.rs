//! kube-scheduler's own weights and prohibitions still count, together with gpustow's choice.

use anyhow::Result;
use gpustow_api::names;
use gpustow_testkit::{Case, GpuNodeBuilder, PodBuilder};
use k8s_openapi::api::core::v1::{Affinity, Node, Taint, Toleration, TopologySpreadConstraint};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Value, json};

use crate::support::{bound, node_of, refused, rig};

const HOST: &str = "kubernetes.io/hostname";

/// Where the pod ends up, as the case calls the node.
async fn lands(case: &Case, pod: PodBuilder) -> Result<String> {
    let pod = bound(&case.client, pod).await?;
    let prefix = format!("{}-", case.namespace);
    Ok(node_of(&pod).trim_start_matches(&prefix).to_owned())
}

fn host(case: &Case, name: &str, cards: &[u64]) -> GpuNodeBuilder {
    case.node(name, cards).label(HOST, name)
}

fn taint(node: &mut Node, key: &str, effect: &str) {
    let taint = Taint {
        key: key.to_owned(),
        effect: effect.to_owned(),
        ..Taint::default()
    };
    node.spec.get_or_insert_default().taints = Some(vec![taint]);
}

fn tainted(node: GpuNodeBuilder, effect: &str) -> GpuNodeBuilder {
    node.with_node(|node| taint(node, "testkit/taint", effect))
}

fn tolerating(pod: PodBuilder) -> PodBuilder {
    let toleration = Toleration {
        operator: Some("Exists".to_owned()),
        ..Toleration::default()
    };
    pod.with(|spec| spec.tolerations = Some(vec![toleration]))
}

fn affine(pod: PodBuilder, affinity: Value) -> Result<PodBuilder> {
    let affinity: Affinity = serde_json::from_value(affinity)?;
    Ok(pod.with(|spec| spec.affinity = Some(affinity)))
}

/// A pod of an app that is to be spread over hosts.
fn spread(pod: PodBuilder, when_unsatisfiable: &str) -> Result<PodBuilder> {
    let constraint: TopologySpreadConstraint = serde_json::from_value(json!({
        "maxSkew": 1,
        "topologyKey": HOST,
        "whenUnsatisfiable": when_unsatisfiable,
        "labelSelector": {"matchLabels": {"app": "spread"}},
    }))?;
    let pod = pod.label("app", "spread");
    Ok(pod.with(|spec| spec.topology_spread_constraints = Some(vec![constraint])))
}

fn on_host(name: &str) -> Value {
    json!({"matchExpressions": [{"key": HOST, "operator": "In", "values": [name]}]})
}

fn only_on(name: &str) -> Value {
    json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [on_host(name)],
    }}})
}

#[tokio::test]
async fn preferred_node_affinity_outweighs_packing() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "preferred").await?;
    host(&case, "tight", &[8000]).create(&case.client).await?;
    host(&case, "wide", &[16000]).create(&case.client).await?;
    let preferred = json!({"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
        {"weight": 100, "preference": on_host("wide")},
    ]}});
    let pod = |name: &str| affine(case.pod(name).gpu_mem(8000), preferred.clone());

    assert_eq!(lands(&case, pod("a")?).await?, "wide");
    assert_eq!(lands(&case, pod("b")?).await?, "wide");
    // Its preferred node is full.
    assert_eq!(lands(&case, pod("c")?).await?, "tight");
    rig.end(case).await
}

#[tokio::test]
async fn a_soft_spread_is_kept_while_there_is_room() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "soft-spread").await?;
    host(&case, "a", &[16000]).create(&case.client).await?;
    host(&case, "b", &[8000]).create(&case.client).await?;

    let mut on = Vec::new();
    for name in ["p1", "p2", "p3", "p4", "p5", "p6"] {
        on.push(
            lands(
                &case,
                spread(case.pod(name).gpu_mem(4000), "ScheduleAnyway")?,
            )
            .await?,
        );
    }

    // In turn, until b is full.
    on[..2].sort_unstable();
    on[2..4].sort_unstable();
    assert_eq!(on, ["a", "b", "a", "b", "a", "a"]);
    rig.end(case).await
}

#[tokio::test]
async fn a_hard_spread_makes_a_pod_wait() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "hard-spread").await?;
    host(&case, "a", &[16000]).create(&case.client).await?;
    host(&case, "b", &[4000]).create(&case.client).await?;
    let pod = |name: &str| spread(case.pod(name).gpu_mem(4000), "DoNotSchedule");

    let mut on = [
        lands(&case, pod("p1")?).await?,
        lands(&case, pod("p2")?).await?,
    ];
    on.sort_unstable();
    assert_eq!(on, ["a", "b"]);
    assert_eq!(lands(&case, pod("p3")?).await?, "a");
    refused(
        &case.client,
        pod("p4")?,
        "didn't match pod topology spread constraints",
    )
    .await?;
    rig.end(case).await
}

#[tokio::test]
async fn hard_affinity_and_anti_affinity_hold() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "hard").await?;
    host(&case, "tight", &[8000]).create(&case.client).await?;
    host(&case, "wide", &[16000]).create(&case.client).await?;
    let pod = |name: &str| case.pod(name).gpu_mem(4000);

    assert_eq!(
        lands(&case, affine(pod("only-wide"), only_on("wide"))?).await?,
        "wide"
    );
    let lonely = |name: &str| {
        let apart = json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey": HOST, "labelSelector": {"matchLabels": {"app": "lonely"}}},
        ]}});
        affine(pod(name).label("app", "lonely"), apart)
    };
    assert_eq!(lands(&case, lonely("first")?).await?, "tight");
    assert_eq!(lands(&case, lonely("second")?).await?, "wide");
    refused(
        &case.client,
        lonely("third")?,
        "didn't match pod anti-affinity rules",
    )
    .await?;
    rig.end(case).await
}

#[tokio::test]
async fn a_hard_taint_keeps_pods_off() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "taint").await?;
    tainted(case.node("tight", &[8000]), "NoSchedule")
        .create(&case.client)
        .await?;
    case.node("wide", &[16000]).create(&case.client).await?;
    let pod = |name: &str| case.pod(name).gpu_mem(8000);

    assert_eq!(lands(&case, pod("a")).await?, "wide");
    assert_eq!(lands(&case, tolerating(pod("b"))).await?, "tight");
    assert_eq!(lands(&case, pod("c")).await?, "wide");
    refused(&case.client, pod("d"), "had untolerated taint").await?;
    rig.end(case).await
}

#[tokio::test]
async fn a_soft_taint_ranks_a_node_last() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "soft-taint").await?;
    tainted(case.node("tight", &[8000, 8000]), "PreferNoSchedule")
        .create(&case.client)
        .await?;
    case.node("wide", &[16000]).create(&case.client).await?;
    let pod = |name: &str| case.pod(name).gpu_mem(8000);

    assert_eq!(lands(&case, tolerating(pod("a"))).await?, "tight");
    assert_eq!(lands(&case, pod("b")).await?, "wide");
    assert_eq!(lands(&case, pod("c")).await?, "wide");
    assert_eq!(lands(&case, pod("d")).await?, "tight");
    rig.end(case).await
}

/// On a node with a card and 64 cores, and one of 8 cores without, where pods of 2 cores that ask for no
/// GPU memory land, one after another.
async fn land_without_gpus(case: &Case, effect: Option<&str>, pods: usize) -> Result<Vec<String>> {
    let gpu = case.node("gpu", &[8000]);
    let gpu = match effect {
        Some(effect) => gpu.with_node(|node| taint(node, names::GPU_MEM, effect)),
        None => gpu,
    };
    gpu.create(&case.client).await?;
    let plain = case.node("plain", &[]).with_node(|node| {
        let status = node.status.get_or_insert_default();
        let capacity = status.capacity.get_or_insert_default();
        capacity.insert("cpu".to_owned(), Quantity("8".to_owned()));
    });
    plain.create(&case.client).await?;
    let mut on = Vec::new();
    for index in 0..pods {
        let pod = case.pod(&format!("p{index}")).requests("cpu", "2");
        on.push(lands(case, pod).await?);
    }
    Ok(on)
}

/// The advice of docs/packing.md about pods without a request for GPU memory.
#[tokio::test]
async fn a_taint_keeps_gpu_nodes_free_of_pods_without_gpus() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "untainted").await?;
    assert_eq!(land_without_gpus(&case, None, 1).await?, ["gpu"]);
    rig.end(case).await?;

    // The node without the taint has room for four; the fifth pod and pods with GPU memory do not need a toleration.
    let case = Case::new(rig.cluster, "soft-gpu").await?;
    let on = land_without_gpus(&case, Some("PreferNoSchedule"), 5).await?;
    assert_eq!(on, ["plain", "plain", "plain", "plain", "gpu"]);
    assert_eq!(lands(&case, case.pod("gpu").gpu_mem(8000)).await?, "gpu");
    rig.end(case).await?;

    let case = Case::new(rig.cluster, "hard-gpu").await?;
    let on = land_without_gpus(&case, Some("NoSchedule"), 4).await?;
    assert_eq!(on, ["plain"; 4]);
    let more = case.pod("more").requests("cpu", "2");
    refused(&case.client, more, "had untolerated taint").await?;
    let gpu = tolerating(case.pod("gpu").gpu_mem(8000));
    assert_eq!(lands(&case, gpu).await?, "gpu");
    rig.end(case).await
}
