//! kube-scheduler alone and with gpustow, by the configuration in scheduler-config.

use anyhow::{Context as _, Result, ensure};
use gpustow_api::{Assignment, names};
use gpustow_testkit::{
    Extender, ExtenderOptions, PodBuilder, Scheduler, SchedulerConfig, Webhook, get,
};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use tokio::task::JoinSet;

use crate::program::Running;
use crate::{CARDS, Site, Size};

pub(crate) async fn install(site: &Site<'_>) -> Result<()> {
    let manifests = site.args.repository.join("manifests/base");
    let manifests = manifests.display().to_string();
    site.cluster.kubectl(&["apply", "-k", &manifests]).await?;
    Ok(())
}

pub(crate) async fn alone(site: &Site<'_>) -> Result<Running> {
    let config = SchedulerConfig::unlimited(&site.args.repository)?.without_extender()?;
    scheduler(site, config).await
}

/// kube-scheduler, and nothing else.
pub(crate) async fn scheduler(site: &Site<'_>, config: SchedulerConfig) -> Result<Running> {
    let kubeconfig = site.cluster.admin_kubeconfig();
    let scheduler = Scheduler::start(&site.cluster, config, kubeconfig).await?;
    Ok(Running {
        processes: vec![("kube-scheduler", scheduler.process)],
        extender: None,
        _players: JoinSet::new(),
    })
}

pub(crate) async fn with_gpustow(site: &Site<'_>) -> Result<Running> {
    let cluster = &site.cluster;
    let kubeconfig = cluster.kubeconfig(names::NAMESPACE, names::SCHEDULER, None);
    let kubeconfig = kubeconfig.await?;
    let options = ExtenderOptions {
        args: vec!["--log=warn".to_owned()],
        config: Some(Vec::new()),
        ..ExtenderOptions::default()
    };
    // Replicas that do not lead admit pods, too.
    let webhook = Webhook::start(cluster, &site.args.gpustow, &[]).await?;
    let extender = Extender::start(cluster, &site.args.gpustow, &kubeconfig, options).await?;
    let config = SchedulerConfig::unlimited(&site.args.repository)?.with_extender(&extender.url)?;
    let scheduler = Scheduler::start(cluster, config, &kubeconfig).await?;
    Ok(Running {
        processes: vec![
            ("kube-scheduler", scheduler.process),
            ("gpustow", extender.process),
            ("webhook", webhook.process),
        ],
        extender: Some(extender.health_url),
        _players: JoinSet::new(),
    })
}

/// How long kube-scheduler's calls took so far: the ends of the histogram's buckets that have p50 and p99.
pub(crate) async fn calls(metrics_url: &str) -> Result<String> {
    let metrics = get(metrics_url, "/metrics").await?;
    let verbs = ["filter", "prioritize", "bind"].map(|verb| {
        let start =
            format!("gpustow_extender_request_duration_seconds_bucket{{verb=\"{verb}\",le=\"");
        let buckets = metrics.lines().filter_map(|line| {
            let (end, count) = line.strip_prefix(&start)?.split_once("\"} ")?;
            Some((end.parse::<f64>().ok()?, count.parse::<f64>().ok()?))
        });
        let buckets: Vec<_> = buckets.collect();
        let all = buckets.last().map_or(0.0, |(_, count)| *count);
        let [half, most] = [0.5, 0.99].map(|share| {
            let bucket = buckets.iter().find(|(_, count)| *count >= all * share);
            bucket.map_or(f64::NAN, |(end, _)| end * 1e3)
        });
        format!("{verb} {half} / {most}")
    });
    Ok(verbs.join(", "))
}

pub(crate) fn resources() -> Vec<(&'static str, u64)> {
    vec![(names::GPU_MEM, CARDS.iter().sum())]
}

pub(crate) fn request(pod: PodBuilder, size: Size) -> PodBuilder {
    let gpus = size.gpus.to_string();
    pod.gpu_mem(size.all_mib())
        .annotation(names::GPU_COUNT, &gpus)
}

pub(crate) fn holds(pod: &Pod, node: &str) -> Result<Vec<(String, u64)>> {
    let text = pod.annotations().get(names::ASSIGNMENT);
    let assignment = Assignment::decode(text.context("bound without an assignment")?)?;
    let of_node = format!("GPU-{node}-");
    let charges = assignment.charges.iter();
    let gpus = charges.map(|(uuid, mib)| (uuid.to_string(), mib.0));
    let gpus: Vec<_> = gpus.collect();
    let strange = gpus.iter().find(|(uuid, _)| !uuid.starts_with(&of_node));
    ensure!(strange.is_none(), "{strange:?} is not of {node}");
    Ok(gpus)
}
