//! Servers that start one after the other on each GPU, with a real kube-scheduler. No kubelet runs: the test writes in
//! its place.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use gpustow_testkit::{Case, eventually, wait_bound};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::json;

use crate::fault_rig::{Replica, turn};
use crate::support::{SOON, assignment, event_saying, refused};

const CARD: u64 = 40_000;

/// Reports a pod as Ready, as kubelet does once its server answers.
async fn say_ready(case: &Case, pod: &str) -> Result<()> {
    let ready = json!([{ "type": "Ready", "status": "True" }]);
    let status = json!({ "status": { "phase": "Running", "conditions": ready } });
    let params = PatchParams::default();
    case.pods()
        .patch_status(pod, &params, &Patch::Strategic(status))
        .await?;
    Ok(())
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod
        .status
        .iter()
        .flat_map(|it| it.conditions.iter().flatten());
    conditions
        .clone()
        .any(|it| it.type_ == "Ready" && it.status == "True")
}

/// The pods that are bound and not Ready, by GPU.
async fn starting(case: &Case) -> Result<BTreeMap<String, Vec<String>>> {
    let mut by_gpu: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for pod in case.pods().list(&ListParams::default()).await? {
        if pod.annotations().contains_key(names::ASSIGNMENT) && !is_ready(&pod) {
            let gpu = assignment(&pod)?.charges[0].0.to_string();
            by_gpu.entry(gpu).or_default().push(pod.name_any());
        }
    }
    Ok(by_gpu)
}

#[tokio::test]
async fn twelve_servers_start_one_by_one_on_each_gpu_though_the_extender_is_killed_meanwhile()
-> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "starts", &[]).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "starts").await?;
    for node in ["n", "m"] {
        case.node(node, &[CARD; 2]).create(&case.client).await?;
    }
    for number in 0..12 {
        let pod = case.pod(&format!("server-{number}")).gpu_mem(CARD / 4);
        pod.annotation(names::START, "alone")
            .create(&case.client)
            .await?;
    }
    let (mut started, mut on_gpu) = (0, BTreeMap::<String, usize>::new());
    while started < 12 {
        let by_gpu = eventually(SOON, "a server starts", async || {
            let by_gpu = starting(&case).await?;
            // As many as there are GPUs and servers left.
            ensure!(by_gpu.len() == 4.min(12 - started), "{by_gpu:?}");
            Ok(by_gpu)
        })
        .await?;
        let crowded = by_gpu.values().find(|pods| pods.len() > 1);
        ensure!(crowded.is_none(), "two start on one GPU: {by_gpu:?}");
        let least = |gpu: &&String| on_gpu.get(*gpu).copied().unwrap_or(0);
        let gpu = by_gpu
            .keys()
            .min_by_key(least)
            .context("none starts")?
            .clone();
        let pods = &by_gpu[&gpu];
        *on_gpu.entry(gpu).or_default() += 1;
        say_ready(&case, &pods[0]).await?;
        started += 1;
        if started == 5 {
            replica.restart().await?;
        }
    }
    replica.settled(&case).await?;
    case.end().await
}

#[tokio::test]
async fn pod_that_waits_for_a_start_is_told_who_starts_and_a_start_that_takes_too_long_ends_the_wait()
-> Result<()> {
    let turn = turn().await?;
    let settings = ["scheduling: {startTimeout: 8s}"];
    let replica = Replica::start(turn.cluster, "turns", &settings).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "turns").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    let alone = |name: &str| {
        case.pod(name)
            .gpu_mem(CARD / 4)
            .annotation(names::START, "alone")
    };
    let first = alone("first").create(&case.client).await?;
    wait_bound(&case.client, &first, SOON).await?;
    let reason = "another pod starts on the GPUs it would fit on";
    let second = refused(&case.client, case.pod("second").gpu_mem(CARD / 4), reason).await?;
    event_saying(
        &case.client,
        &second,
        "GpuMemoryUnavailable",
        "1 pod starts there, since",
    )
    .await?;
    wait_bound(&case.client, &second, SOON).await?;
    event_saying(
        &case.client,
        &first,
        "GpuStartTimedOut",
        "Not Ready 8 s after its start",
    )
    .await?;
    let metrics = replica.extender.metrics().await?;
    let waited = metrics
        .lines()
        .find(|line| line.starts_with("gpustow_start_wait_seconds_count"));
    ensure!(
        waited.is_some_and(|line| line.ends_with(" 1")),
        "{waited:?}"
    );
    case.end().await
}
