//! A burst on an idle queue: how many pods are created without the gate before it is on, on a full cluster and on one that fills up, and how many
//! are ungated for nothing while it drains.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use gpustow_testkit::{Case, Extender, PodBuilder, at_once, eventually, node_of, wait_pods};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{DeleteParams, ListParams};
use tokio::time::{MissedTickBehavior, interval};

use crate::queue::{fill, is_held, remove, whole};
use crate::{Args, CARDS, SETTLED, WIDTH, site, start, sum_of};

/// Pods that end in a second while the cluster drains.
const ENDS: u64 = 20;

pub(crate) async fn bench(args: &Args, nodes: usize, began: Instant) -> Result<()> {
    let (cluster, case, kubeconfig) = site(args, nodes, "overlays/queue", 1, began).await?;
    let queue = ["queue: {mode: Auto}"];
    let (extender, _scheduler) = start(args, &cluster, &kubeconfig, &queue).await?;
    println!(
        "\n{nodes} nodes × {} GPUs, {} pods at once\n",
        CARDS.len(),
        args.burst
    );

    fill(&case, nodes).await?;
    idle(&extender).await?;
    let waits = |index| whole(&case, &format!("whole-{index}"));
    let (took, free) = create(args, waits, &case).await?;
    println!(
        "full: created in {:.1} s, {free} of them without the gate",
        took.as_secs_f64()
    );
    for part in ["waits", "small"] {
        remove(&case, part).await?;
    }
    idle(&extender).await?;

    let card = |index| case.pod(&format!("card-{index}")).gpu_mem(CARDS[0]);
    let began = Instant::now();
    let (took, free) = create(args, card, &case).await?;
    let fit = (nodes * CARDS.len()).min(args.burst);
    bound(&case, fit).await?;
    println!(
        "fills up: created in {:.1} s, {free} of them without the gate; the {fit} that fit were bound after {:.1} s",
        took.as_secs_f64(),
        began.elapsed().as_secs_f64(),
    );
    let ungates = ungates(&extender).await?;
    let took = drain(args, &case).await?;
    let ungated = self::ungates(&extender).await? - ungates;
    let bound = args.burst - fit;
    println!(
        "drains, {ENDS} pods a second: the other {bound} bound in {:.1} s, {ungated} ungated for room, {:.2} each",
        took.as_secs_f64(),
        ungated / bound as f64
    );
    case.check().await
}

/// Creates the burst; how long that took, and how many were created without the gate.
async fn create(
    args: &Args,
    pod: impl Fn(usize) -> PodBuilder,
    case: &Case,
) -> Result<(Duration, usize)> {
    let at = Instant::now();
    let created: Vec<Pod> = stream::iter(0..args.burst)
        .map(|index| pod(index).create(&case.client))
        .buffer_unordered(WIDTH)
        .try_collect()
        .await?;
    let took = at.elapsed();
    Ok((took, created.iter().filter(|pod| !is_held(pod)).count()))
}

/// Waits until new pods are not queued.
async fn idle(extender: &Extender) -> Result<()> {
    eventually(SETTLED, "the queue is idle", async || {
        let on = sum_of(&extender.metrics().await?, "gpustow_queue_on");
        ensure!(on == 0.0, "it is on");
        Ok(())
    })
    .await
}

async fn ungates(extender: &Extender) -> Result<f64> {
    let series = r#"gpustow_ungated_pods_total{cause="room",result="done"}"#;
    Ok(sum_of(&extender.metrics().await?, series))
}

async fn bound(case: &Case, count: usize) -> Result<()> {
    let what = format!("{count} are bound");
    let pods = wait_pods(&case.client, &case.namespace, &what, SETTLED, |pods| {
        pods.iter().filter(|pod| node_of(pod).is_some()).count() >= count
    });
    pods.await.map(drop)
}

/// Ends pods in turn until all have been bound; how long that took.
async fn drain(args: &Args, case: &Case) -> Result<Duration> {
    let at = Instant::now();
    let mut pace = interval(Duration::from_secs(1));
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut seen: HashSet<String> = HashSet::new();
    let now = DeleteParams::default().grace_period(0);
    loop {
        pace.tick().await;
        let pods = case.pods().list(&ListParams::default()).await?;
        let here: Vec<String> = pods
            .iter()
            .filter(|pod| node_of(pod).is_some())
            .map(|pod| pod.name_any())
            .collect();
        seen.extend(here.iter().cloned());
        if seen.len() >= args.burst {
            return Ok(at.elapsed());
        }
        ensure!(
            at.elapsed() < SETTLED,
            "{} of {} were bound",
            seen.len(),
            args.burst
        );
        let ends = usize::try_from(ENDS).context("a rate")?;
        at_once(WIDTH, here.iter().take(ends), async |name| {
            Ok(case.pods().delete(name, &now).await?)
        })
        .await?;
    }
}
