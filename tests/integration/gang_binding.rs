//! Gangs of Kubernetes' own PodGroups, which kube-scheduler schedules from 1.37 on.

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use axum::http::Request;
use gpustow_testkit::builders::delete;
use gpustow_testkit::{
    Case, ControlPlane, Options, POD_GROUPS, eventually, kubernetes_minor, refusal, wait_bound,
    wait_gone, wait_refused,
};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde_json::{Value, json};

use crate::support::{Rig, SOON, Setup, bound};

/// A cluster that serves PodGroups. `make test-cluster` leaves these cases out before Kubernetes 1.37.
pub(crate) async fn cluster() -> Result<ControlPlane> {
    ensure!(
        kubernetes_minor().await? >= 37,
        "PodGroups need Kubernetes 1.37: make test-versions ARGS=1.37"
    );
    let cluster = ControlPlane::start(Options::default()).await?;
    let request = Request::get(format!("{POD_GROUPS}/podgroups")).body(Vec::new())?;
    cluster.admin()?.request::<Value>(request).await?;
    Ok(cluster)
}

/// Creates a PodGroup with this policy.
pub(crate) async fn group(case: &Case, name: &str, policy: Value) -> Result<Value> {
    let spec = json!({"schedulingPolicy": policy});
    case.pod_group(name, spec).await
}

/// Creates a gang of as many pods, all of which must be bound.
pub(crate) async fn gang(case: &Case, name: &str, count: usize, mib: u64) -> Result<Vec<Pod>> {
    group(case, name, json!({"gang": {"minCount": count}})).await?;
    let mut pods = Vec::new();
    for index in 0..count {
        let pod = case.pod(&format!("{name}-{index}")).gpu_mem(mib);
        pods.push(case.member(name, pod).await?);
    }
    Ok(pods)
}

/// Waits until kube-scheduler has refused the pod in these words.
pub(crate) async fn refused(case: &Case, pod: &Pod, text: &str) -> Result<()> {
    wait_refused(&case.client, pod, text, SOON).await.map(drop)
}

async fn is_bound(case: &Case, pod: &Pod) -> Result<bool> {
    let pod = case.pods().get(&pod.name_any()).await?;
    Ok(pod.spec.context("no spec")?.node_name.is_some())
}

/// A PodGroup has a finalizer that the controller manager removes, which does not run here.
async fn delete_group(case: &Case, name: &str) -> Result<()> {
    let path = format!(
        "{POD_GROUPS}/namespaces/{}/podgroups/{name}",
        case.namespace
    );
    case.client
        .request::<Value>(Request::delete(&path).body(Vec::new())?)
        .await?;
    case.patch_pod_group(name, json!({"metadata": {"finalizers": null}}))
        .await?;
    eventually(SOON, "the PodGroup is gone", async || {
        let gone = case
            .client
            .request::<Value>(Request::get(&path).body(Vec::new())?)
            .await;
        ensure!(gone.is_err(), "{gone:?}");
        Ok(())
    })
    .await
}

/// gpustow, and a node with two GPUs.
async fn two_gpus(cluster: &ControlPlane) -> Result<(Rig<'_>, Case)> {
    let rig = Rig::start(cluster, Setup::default()).await?;
    let case = Case::new(cluster, "gang").await?;
    case.node("n", &[15_000; 2]).create(&case.client).await?;
    Ok((rig, case))
}

#[tokio::test]
async fn single_pod_is_bound_at_once_beside_a_gang_that_does_not_fit() -> Result<()> {
    let cluster = cluster().await?;
    let (rig, case) = two_gpus(&cluster).await?;
    let pods = gang(&case, "big", 3, 10_000).await?;
    refused(
        &case,
        &pods[0],
        &format!("group {}/big: 2 of 3 fit", case.namespace),
    )
    .await?;
    eventually(SOON, "three pods wait for their group", async || {
        let metrics = rig.extender.metrics().await?;
        let waits = "gpustow_pending_pods{reason=\"group\"} 3";
        ensure!(metrics.contains(waits), "no {waits}: {metrics}");
        Ok(())
    })
    .await?;
    let mut singles = Vec::new();
    for name in ["first", "second"] {
        let began = Instant::now();
        let single = case.pod(name).gpu_mem(10_000).create(&case.client).await?;
        singles.push(wait_bound(&case.client, &single, SOON).await?);
        println!("{name}: created -> bound {:?}", began.elapsed());
    }
    for single in &singles {
        delete(&case.client, single, 0).await?;
        wait_gone(&case.client, single, SOON).await?;
    }
    // With a GPU more all of the gang fits.
    case.node("m", &[15_000]).create(&case.client).await?;
    for pod in &pods {
        wait_bound(&case.client, pod, SOON).await?;
    }
    rig.end(case).await
}

#[tokio::test]
async fn gang_is_bound_once_all_of_it_fits() -> Result<()> {
    let cluster = cluster().await?;
    let (rig, case) = two_gpus(&cluster).await?;
    // Two gangs of which one fits at a time, and one pod that is there before its PodGroup.
    let early = case
        .member("late", case.pod("early").gpu_mem(1_000))
        .await?;
    let first = gang(&case, "a", 2, 10_000).await?;
    let second = gang(&case, "b", 2, 10_000).await?;
    let both = [&first, &second];
    let winner = eventually(SOON, "one gang is bound", async || {
        for (index, gang) in both.iter().enumerate() {
            if is_bound(&case, &gang[0]).await? && is_bound(&case, &gang[1]).await? {
                return Ok(index);
            }
        }
        anyhow::bail!("none is")
    })
    .await?;
    for pod in both[1 - winner] {
        assert!(!is_bound(&case, pod).await?, "{} is bound", pod.name_any());
    }
    group(&case, "late", json!({"gang": {"minCount": 1}})).await?;
    wait_bound(&case.client, &early, SOON).await?;
    for pod in both[winner] {
        delete(&case.client, pod, 0).await?;
    }
    for pod in both[1 - winner] {
        wait_bound(&case.client, pod, SOON).await?;
    }
    rig.end(case).await
}

#[tokio::test]
async fn group_created_again_under_its_name_is_bound() -> Result<()> {
    let cluster = cluster().await?;
    let (rig, case) = two_gpus(&cluster).await?;
    let pods = gang(&case, "g", 3, 10_000).await?;
    refused(&case, &pods[0], "2 of 3 fit").await?;
    for pod in &pods {
        delete(&case.client, pod, 0).await?;
        wait_gone(&case.client, pod, SOON).await?;
    }
    delete_group(&case, "g").await?;
    for pod in gang(&case, "g", 2, 10_000).await? {
        wait_bound(&case.client, &pod, SOON).await?;
    }
    // One pod more than the gang needs waits for room alone.
    let more = case.member("g", case.pod("more").gpu_mem(10_000)).await?;
    refused(&case, &more, "not enough free memory").await?;
    let single = case
        .pod("single")
        .gpu_mem(5_000)
        .create(&case.client)
        .await?;
    wait_bound(&case.client, &single, SOON).await?;
    rig.end(case).await
}

#[tokio::test]
async fn gang_for_two_kinds_of_node_is_bound_once_its_largest_pod_fits() -> Result<()> {
    let cluster = cluster().await?;
    let rig = Rig::start(&cluster, Setup::default()).await?;
    let case = Case::new(&cluster, "gang").await?;
    case.node("large", &[80_000]).create(&case.client).await?;
    let blocks = case.pod("blocks").gpu_mem(70_000);
    let blocks = bound(&case.client, blocks).await?;
    case.node("small", &[24_000; 2])
        .create(&case.client)
        .await?;
    group(&case, "g", json!({"gang": {"minCount": 4}})).await?;
    let mut pods = Vec::new();
    for (name, mib) in [("a", 20_000), ("b", 20_000), ("most", 70_000)] {
        let pod = case.pod(name).gpu_mem(mib);
        pods.push(case.member("g", pod).await?);
    }
    // It requests no GPU memory.
    pods.push(case.member("g", case.pod("driver")).await?);
    // kube-scheduler asks about some pod first.
    eventually(SOON, "the gang is refused", async || {
        let mut said = String::new();
        for pod in &pods {
            let pod = case.pods().get(&pod.name_any()).await?;
            said += refusal(&pod).unwrap_or_default();
        }
        ensure!(!said.is_empty(), "not yet");
        Ok(())
    })
    .await?;
    let single = case.pod("single").gpu_mem(20_000);
    let single = bound(&case.client, single).await?;
    for pod in &pods {
        assert!(!is_bound(&case, pod).await?, "{} is bound", pod.name_any());
    }
    for pod in [&blocks, &single] {
        delete(&case.client, pod, 0).await?;
    }
    for pod in &pods {
        wait_bound(&case.client, pod, SOON).await?;
    }
    rig.end(case).await
}

/// Seconds from its creation until kube-scheduler had a node for the pod.
fn waited(pod: &Pod) -> Option<i64> {
    let mut conditions = pod.status.as_ref()?.conditions.iter().flatten();
    let scheduled = conditions.find(|it| it.type_ == "PodScheduled")?;
    let created = pod.metadata.creation_timestamp.as_ref()?.0.as_second();
    Some(scheduled.last_transition_time.as_ref()?.0.as_second() - created)
}

/// Gangs, and as many single pods as fill the cluster together with them: no pod waits for a gang that does not fit.
#[tokio::test]
async fn fifty_gangs_and_two_hundred_single_pods_are_all_bound_and_no_gang_in_part() -> Result<()> {
    let cluster = cluster().await?;
    let rig = Rig::start(&cluster, Setup::default()).await?;
    let case = Case::new(&cluster, "many").await?;
    for index in 0..20 {
        let node = case.node(&format!("n{index}"), &[40_000; 4]);
        node.create(&case.client).await?;
    }
    // One gang more would fill the cluster: it never fits.
    let mut whole = Vec::new();
    let mut gangs = Vec::new();
    let mut singles = Vec::new();
    for index in 0..50 {
        gangs.push(gang(&case, &format!("g{index}"), 2 + index % 7, 8_000).await?);
        for single in 0..4 {
            let pod = case.pod(&format!("s{index}-{single}")).gpu_mem(5_000);
            singles.push(pod.create(&case.client).await?);
        }
        if index == 25 {
            whole = gang(&case, "whole", 81, 39_000).await?;
        }
    }
    let mut slowest = 0;
    for pod in &singles {
        let pod = wait_bound(&case.client, pod, SOON).await?;
        slowest = slowest.max(waited(&pod).context("no condition PodScheduled")?);
    }
    println!("the slowest of 200 single pods waited {slowest} s");
    for pod in gangs.iter().flatten() {
        wait_bound(&case.client, pod, SOON).await?;
    }
    for pod in &whole {
        assert!(!is_bound(&case, pod).await?, "{} is bound", pod.name_any());
    }
    rig.end(case).await
}
