//! Pods of higher priority: which pods they drive out, and which not.

use anyhow::{Context as _, Result, ensure};
use gpustow_testkit::builders::{delete, set_running};
use gpustow_testkit::{Action, Case, PodBuilder, wait_bound, wait_condition, wait_gone};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::fault_rig::{Replica, turn};
use crate::fragmented::staying;
use crate::support::{SOON, bound, charges, node_of, refused, rig};

/// A pod of a priority that is there from the start: admission sees a new class only after a while.
fn high(case: &Case, name: &str) -> PodBuilder {
    case.pod(name).priority_class("system-cluster-critical")
}

/// Sets an early start time, which makes kube-scheduler spare the pod before younger ones.
async fn make_old(case: &Case, pod: &Pod) -> Result<()> {
    let status = json!({"status": {"startTime": "2026-01-01T00:00:00Z"}});
    let params = PatchParams::default();
    case.pods()
        .patch_status(&pod.name_any(), &params, &Patch::Merge(status))
        .await?;
    Ok(())
}

#[tokio::test]
async fn the_schedulers_own_victim_frees_the_card() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "victim").await?;
    case.node("n", &[10000]).create(&case.client).await?;
    let old = bound(&case.client, case.pod("old").gpu_mem(5000)).await?;
    make_old(&case, &old).await?;
    let young = bound(&case.client, case.pod("young").gpu_mem(5000)).await?;

    let high = bound(&case.client, high(&case, "high").gpu_mem(5000)).await?;

    wait_gone(&case.client, &young, SOON).await?;
    assert_eq!(charges(&high)?, charges(&young)?);
    assert_eq!(staying(&case).await?, ["high", "old"]);
    rig.end(case).await
}

#[tokio::test]
async fn victims_are_added_where_the_schedulers_own_free_no_card() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "added").await?;
    case.node("n", &[10000, 10000]).create(&case.client).await?;
    case.budget("kept", ("minAvailable", 1)).await?;
    // Two on each card. By the node's sum, the two young ones are enough, one from each card.
    let low = |name: &str| case.pod(name).gpu_mem(5000);
    let mut cards = Vec::new();
    for (pod, old) in [
        (low("a-young"), false),
        (low("a-kept").label("app", "kept"), true),
        (low("b-young"), false),
        (low("b-old"), true),
    ] {
        let pod = bound(&case.client, pod).await?;
        cards.extend(charges(&pod)?);
        if old {
            make_old(&case, &pod).await?;
        }
    }
    ensure!(
        cards[0] == cards[1] && cards[2] == cards[3],
        "two on each card: {cards:?}"
    );

    let high = bound(&case.client, high(&case, "high").gpu_mem(10000)).await?;

    assert_eq!(charges(&high)?, [(cards[2].0.clone(), 10000)]);
    // Of kube-scheduler's own two, only one helps; without the other the sum suffices, too.
    assert_eq!(staying(&case).await?, ["a-kept", "a-young", "high"]);
    rig.end(case).await
}

#[tokio::test]
async fn no_pod_is_evicted_if_no_eviction_frees_a_card() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "no-result").await?;
    case.node("n", &[10000, 10000]).create(&case.client).await?;
    // One of each priority on each card: without the low ones, the node's sum is enough.
    let mut cards = Vec::new();
    for name in ["a", "b"] {
        let low = bound(&case.client, case.pod(&format!("{name}-low")).gpu_mem(5000)).await?;
        let high = high(&case, &format!("{name}-high")).gpu_mem(5000);
        let high = bound(&case.client, high).await?;
        cards.extend([charges(&low)?, charges(&high)?]);
    }
    ensure!(
        cards[0] == cards[1] && cards[2] == cards[3],
        "two on each card: {cards:?}"
    );

    let more = high(&case, "more").gpu_mem(10000);
    let more = refused(&case.client, more, "Insufficient").await?;

    let status = case
        .pods()
        .get(&more.name_any())
        .await?
        .status
        .unwrap_or_default();
    assert_eq!(status.nominated_node_name, None);
    assert_eq!(
        staying(&case).await?,
        ["a-high", "a-low", "b-high", "b-low", "more"]
    );
    rig.end(case).await
}

/// kube-scheduler sees room by the node's sum, so that its own dry run finds no victim.
#[tokio::test]
async fn fragmentation_alone_starts_no_preemption() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "fragments").await?;
    case.node("n", &[10000, 10000]).create(&case.client).await?;
    let low = bound(&case.client, case.pod("a").gpu_mem(6000)).await?;
    bound(&case.client, case.pod("b").gpu_mem(6000)).await?;

    let high = high(&case, "high").gpu_mem(6000);
    let high = refused(&case.client, high, "not enough free memory on any one GPU").await?;

    assert_eq!(staying(&case).await?, ["a", "b", "high"]);
    delete(&case.client, &low, 0).await?;
    wait_bound(&case.client, &high, SOON).await?;
    rig.end(case).await
}

#[tokio::test]
async fn room_that_a_victim_leaves_goes_to_the_pod_it_left_for() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "nominated").await?;
    case.node("n", &[10000]).create(&case.client).await?;
    let slow = case.pod("slow").gpu_mem(10000);
    let slow = slow.with(|spec| spec.termination_grace_period_seconds = Some(3600));
    let slow = bound(&case.client, slow).await?;
    set_running(&case.client, &slow).await?;
    let high = high(&case, "high")
        .gpu_mem(10000)
        .create(&case.client)
        .await?;
    let nominated = |pod: Option<&Pod>| {
        let status = pod.and_then(|pod| pod.status.as_ref());
        status.is_some_and(|status| status.nominated_node_name.is_some())
    };
    wait_condition(&case.client, &high, "is nominated", SOON, nominated).await?;
    // Of lower priority, it waits for the same room.
    let rival = refused(&case.client, case.pod("rival").gpu_mem(6000), "").await?;

    delete(&case.client, &slow, 0).await?;

    let high = wait_bound(&case.client, &high, SOON).await?;
    assert_eq!(charges(&high)?, [(case.uuid("n", 0), 10000)]);
    assert_eq!(staying(&case).await?, ["high", "rival"]);
    let rival = case.pods().get(&rival.name_any()).await?;
    assert_eq!(node_of(&rival), "");
    rig.end(case).await
}

/// The calls are ours: kube-scheduler would stop at the first few candidates.
#[tokio::test]
async fn a_call_with_many_candidates_lists_nothing() -> Result<()> {
    const NODES: usize = 8;
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "many", &[]).await?;
    let case = Case::new(turn.cluster, "many").await?;
    let mut victims = serde_json::Map::new();
    for i in 0..NODES {
        let name = format!("n{i}");
        case.node(&name, &[10000, 10000])
            .create(&case.client)
            .await?;
        let node = case.node_name(&name);
        let place = async |pod: &str, mib| {
            let pod = case.pod(&format!("{pod}{i}")).gpu_mem(mib);
            let pod = pod.create(&case.client).await?;
            replica.place(&pod, &node).await?;
            anyhow::Ok(pod.uid().unwrap_or_default())
        };
        // A card with x, and a card with y, where x does not fit.
        let x = place("x", 5000).await?;
        place("y", 6000).await?;
        let given = json!({ "Pods": [{ "UID": x }], "NumPDBViolations": 0 });
        victims.insert(node, given);
    }
    let high = high(&case, "high")
        .gpu_mem(9000)
        .create(&case.client)
        .await?;
    let lists = replica.proxy.rule(
        |method, uri| {
            let watches = uri
                .query()
                .is_some_and(|query| query.contains("watch=true"));
            let listed = ["/pods", "/poddisruptionbudgets"];
            method.as_str() == "GET"
                && !watches
                && listed.iter().any(|path| uri.path().ends_with(path))
        },
        Action::DelayReply(std::time::Duration::ZERO),
    );
    // Each x alone frees a card.
    let body = json!({ "Pod": high, "NodeNameToMetaVictims": victims });
    let answer = replica.call("preempt", &body).await?;
    assert_eq!(answer["NodeNameToMetaVictims"], json!(victims));
    assert_eq!(lists.count(), 0);

    // A victim that is gone frees nothing: another one is added on every node.
    let gone = json!({ "Pods": [{ "UID": "gone" }], "NumPDBViolations": 0 });
    let victims: serde_json::Map<_, _> = victims
        .into_iter()
        .map(|(node, _)| (node, gone.clone()))
        .collect();
    let body = json!({ "Pod": high, "NodeNameToMetaVictims": victims });
    let answer = replica.call("preempt", &body).await?;
    let answer = answer["NodeNameToMetaVictims"].as_object();
    let answer = answer.context("no map")?;
    ensure!(answer.len() == NODES, "{answer:?}");
    for victims in answer.values() {
        let pods = victims["Pods"].as_array().context("no victims")?;
        ensure!(pods.len() == 2, "{pods:?}");
    }
    assert_eq!(lists.count(), 0);
    drop(lists);
    replica.settled(&case).await?;
    case.end().await
}
