//! Of more than a hundred nodes kube-scheduler shows the extender a part: a pod is placed all the same where the only node
//! that fits is outside of it.

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use gpustow_testkit::builders::delete;
use gpustow_testkit::{Case, ControlPlane, Options, wait_bound, wait_gone};

use crate::support::{Rig, SOON, Setup, node_of};

/// kube-scheduler shows 100 of them.
const NODES: usize = 150;
/// The windows rotate: each third one leaves the node out.
const PODS: usize = 60;
const CARD: u64 = 8192;

#[tokio::test]
async fn pod_is_placed_where_the_only_node_that_fits_is_outside_of_the_sample() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    let rig = Rig::start(&cluster, Setup::default()).await?;
    let case = Case::new(&cluster, "sample").await?;
    // Their sums are enough, and half of each GPU is used by programs of others.
    let nodes = (0..NODES).map(|index| {
        let node = case.node(&format!("n{index:03}"), &[CARD, CARD]);
        match index == NODES / 2 {
            true => node,
            false => node.with_status(|status| {
                for gpu in &mut status.gpus {
                    gpu.unmanaged_mib = CARD / 2;
                }
            }),
        }
    });
    stream::iter(nodes.collect::<Vec<_>>())
        .map(async |node| node.create(&case.client).await)
        .buffer_unordered(8)
        .try_collect::<Vec<_>>()
        .await?;
    let only = case.node_name(&format!("n{:03}", NODES / 2));
    let mut times = Vec::new();
    // The room that the pod before left wakes some that would be nominated.
    for index in 0..4 * PODS {
        if index >= PODS && nominations(&rig).await? > 0 {
            break;
        }
        let began = Instant::now();
        let pod = case.pod(&format!("p{index}")).gpu_mem(CARD);
        let pod = pod.create(&case.client).await?;
        let pod = wait_bound(&case.client, &pod, SOON).await?;
        times.push(began.elapsed());
        assert_eq!(node_of(&pod), only);
        delete(&case.client, &pod, 0).await?;
        wait_gone(&case.client, &pod, SOON).await?;
    }
    times.sort_unstable();
    println!(
        "{} pods, created -> bound: p50 {:?}, p99 {:?}",
        times.len(),
        times[times.len() / 2],
        times[times.len() * 99 / 100]
    );
    ensure!(nominations(&rig).await? > 0, "no nomination");
    rig.end(case).await
}

/// How many pods the extender has nominated.
async fn nominations(rig: &Rig<'_>) -> Result<u64> {
    let metrics = rig.extender.metrics().await?;
    let set = metrics
        .lines()
        .find_map(|line| line.strip_prefix("gpustow_nominations_total "));
    Ok(set.context("gpustow_nominations_total")?.parse()?)
}
