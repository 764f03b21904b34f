//! Preemption where free memory is fragmented: how soon a pod has a whole card of which each is half in use by a pod of
//! lower priority, which ends without grace.

use std::time::Instant;

use anyhow::{Context as _, Result};
use gpustow_testkit::builders::delete;
use gpustow_testkit::{Case, at_once, node_of, quantiles, sorted, wait_bound, wait_pods};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde_json::json;

use crate::{Args, CARDS, SETTLED, WIDTH, site, start};

const CLASS: &str = "bench-preempts";
/// Pods of one card's half, by what they are called.
const LOW: &str = "low-";

pub(crate) async fn bench(args: &Args, nodes: usize, began: Instant) -> Result<()> {
    let (cluster, case, kubeconfig) = site(args, nodes, "base", began).await?;
    let class = json!({
        "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
        "metadata": { "name": CLASS }, "value": 1000,
    });
    cluster.apply(&class.to_string()).await?;
    // The pace at which pods are disrupted is an administrator's choice.
    let fields = [
        "preempt: {after: 0s}",
        "disruptions: {perMinute: 10000, perNodePerMinute: 10000}",
    ];
    let _running = start(args, &cluster, &kubeconfig, &fields).await?;
    let cards = nodes * CARDS.len();
    at_once(WIDTH, 0..cards, |index| low(&case, index)).await?;
    all_bound(&case, cards).await?;

    let mut waits = Vec::new();
    for trial in 0..args.fragmented {
        let pod = case.pod(&format!("high-{trial}")).gpu_mem(CARDS[0]);
        let at = Instant::now();
        let pod = pod.priority_class(CLASS).create(&case.client).await?;
        let pod = wait_bound(&case.client, &pod, SETTLED).await?;
        waits.push(at.elapsed().as_secs_f64() * 1e3);
        case.check().await?;
        // The card is half in use again.
        let left = pods(&case, cards).await?;
        delete(&case.client, &pod, 0).await?;
        for index in left..cards {
            low(&case, cards * (trial + 1) + index).await?;
        }
        all_bound(&case, cards).await?;
    }
    let waits = sorted(waits.into_iter());
    println!(
        "\n{nodes} nodes × {} GPUs, {} preemptors one after the other: created → bound p50 / p99 / worst, ms: {}",
        CARDS.len(),
        waits.len(),
        quantiles(&waits, [0.5, 0.99, 1.0], 0)
    );
    Ok(())
}

/// More than half of a card, so that none has two such pods.
async fn low(case: &Case, index: usize) -> Result<()> {
    let pod = case.pod(&format!("{LOW}{index}")).gpu_mem(CARDS[0] / 2 + 1);
    let pod = pod.with(|spec| spec.termination_grace_period_seconds = Some(0));
    pod.create(&case.client).await.map(drop)
}

fn is_low(pod: &&Pod) -> bool {
    pod.name_any().starts_with(LOW)
}

async fn all_bound(case: &Case, count: usize) -> Result<()> {
    wait_pods(
        &case.client,
        &case.namespace,
        "half of each card is in use",
        SETTLED,
        |pods| {
            pods.iter()
                .filter(is_low)
                .filter(|pod| node_of(pod).is_some())
                .count()
                == count
        },
    )
    .await
    .map(drop)
}

/// How many of them are left: some have ended for the one that preempted them.
async fn pods(case: &Case, count: usize) -> Result<usize> {
    let gone = wait_pods(
        &case.client,
        &case.namespace,
        "who was preempted has ended",
        SETTLED,
        |pods| pods.iter().filter(is_low).count() < count,
    );
    let pods = gone.await.context("nobody was preempted")?;
    Ok(pods.iter().filter(is_low).count())
}
