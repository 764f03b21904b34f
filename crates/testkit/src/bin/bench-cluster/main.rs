//! Pods per second through the real kube-scheduler, without and with gpustow, in turn in one run.
//!
//! A round creates its pods while no scheduler runs, and starts one. It times the binds of the backlog from the first
//! to the last. Then it creates pods at a steady pace and takes the time from creation to bound. With `--waiting`,
//! other pods fit nowhere, and kube-scheduler tries them again and again. The backlog is then timed from its creation
//! on. With `--queue`, see [`mod@queue`], with `--burst`, see [`mod@burst`].

mod burst;
mod queue;
mod report;

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use gpustow_api::names;
use gpustow_testkit::{
    Binds, Case, ControlPlane, Extender, ExtenderOptions, Options, PodBuilder, Scheduler,
    SchedulerConfig, Webhook, at_once, built, paced, quantile, since,
};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use serde_json::json;
use tokio::time::timeout;

use report::report;

/// The limit of waits that grow with the cluster.
const SETTLED: Duration = Duration::from_secs(900);
/// Without a bind for so long, no more is awaited.
const QUIET: Duration = Duration::from_secs(120);
/// Requests at once.
const WIDTH: usize = 32;
/// Names a node to its pods.
const NODE: &str = "bench/node";
/// Cards of a node and their size in MiB.
const CARDS: [u64; 8] = [81_920; 8];
/// A priority below that of pods that name none.
const LOW: i32 = -10;
/// Of the profile in scheduler-config/gpustow-scheduler.yaml.
const PERCENTAGE: &str = "profiles.0.percentageOfNodesToScore";
/// The requests of the pods, in turn.
const REQUESTS: [u64; 6] = [4_096, 8_192, 10_240, 16_384, 24_576, 40_960];

/// Time the real kube-scheduler without and with gpustow.
#[derive(Parser)]
struct Args {
    /// Nodes with 8 cards each; several sizes are run one after the other
    #[arg(long, value_delimiter = ',', default_value = "1000,5000")]
    nodes: Vec<usize>,
    /// Pods of a round's backlog
    #[arg(long, default_value_t = 600)]
    pods: usize,
    /// Pods of a round's steady part, ten a second
    #[arg(long, default_value_t = 50)]
    paced: usize,
    /// Rounds of each way
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Measure what so many pods cost that wait because they fit on no card
    #[arg(long, default_value_t = 0)]
    waiting: usize,
    /// Values of podMaxBackoffSeconds to compare with --waiting
    #[arg(long, value_delimiter = ',', default_value = "2,10")]
    backoffs: Vec<u32>,
    /// Measure the queue: what others pay for so many pods that wait in it, and how soon freed memory goes to its head
    #[arg(long, value_delimiter = ',', conflicts_with = "waiting")]
    queue: Vec<usize>,
    /// With --queue, also each of these numbers of pods without a queue
    #[arg(long, requires = "queue")]
    refused: bool,
    /// Create so many pods at once on an idle queue: how many are created without the gate before it is on, and are ungated for nothing while it drains
    #[arg(long, default_value_t = 0, conflicts_with_all = ["queue", "waiting"])]
    burst: usize,
    /// Values of percentageOfNodesToScore to compare with gpustow, 0 for adaptive; without it the shipped one. Other
    /// measurements take the first
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(..=100))]
    percentage: Vec<u32>,
    /// The extender's binary
    #[arg(long, default_value = "target/release/gpustow")]
    gpustow: PathBuf,
    /// Folder of manifests and scheduler-config
    #[arg(long, default_value = ".")]
    repository: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Way {
    /// Without the extender, at kube-scheduler's own default.
    Alone,
    /// With the extender, at this percentage of nodes to score or at the shipped one.
    With(Option<u32>),
    /// With the extender and so many pods that wait, at this podMaxBackoffSeconds and this priority.
    Beside(usize, u32, i32),
}

impl Way {
    fn name(self) -> String {
        match self {
            Self::Alone => "kube-scheduler alone, adaptive".to_owned(),
            Self::With(None) => "with gpustow, as shipped".to_owned(),
            Self::With(Some(0)) => "with gpustow, adaptive".to_owned(),
            Self::With(Some(percentage)) => format!("with gpustow, {percentage} % of nodes"),
            Self::Beside(waiting, backoff, priority) => {
                format!("{waiting} wait, backoff {backoff} s, priority {priority}")
            }
        }
    }

    /// kube-scheduler's.
    fn config(self, args: &Args, extender: Option<&Extender>) -> Result<SchedulerConfig> {
        let config = match extender {
            Some(extender) => config(args)?.with_extender(&extender.url)?,
            None => config(args)?.without_extender()?,
        };
        match self {
            Self::Alone => config.with(PERCENTAGE, 0),
            Self::With(Some(percentage)) => config.with(PERCENTAGE, percentage),
            Self::Beside(_, backoff, _) => config.with("podMaxBackoffSeconds", backoff),
            Self::With(None) => Ok(config),
        }
    }

    /// Those to run, the one that others are compared with first.
    fn all(args: &Args) -> Vec<Self> {
        match args.waiting {
            0 if args.percentage.is_empty() => vec![Self::Alone, Self::With(None)],
            0 => {
                let percentages = args.percentage.iter().copied();
                let with = percentages.map(|percentage| Self::With(Some(percentage)));
                std::iter::once(Self::Alone).chain(with).collect()
            }
            waiting => {
                let first = args.backoffs.first().copied().unwrap_or(2);
                let beside = args.backoffs.iter().map(|&b| Self::Beside(waiting, b, 0));
                let ends = [Self::Beside(0, first, 0), Self::Beside(waiting, first, LOW)];
                ends.into_iter().chain(beside).collect()
            }
        }
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    built(&args.gpustow, "cargo build --release --bin gpustow")?;
    let began = Instant::now();
    for &nodes in &args.nodes {
        if !args.queue.is_empty() {
            queue::bench(&args, nodes, began).await?;
        } else if args.burst > 0 {
            burst::bench(&args, nodes, began).await?;
        } else {
            bench(&args, nodes, began).await?;
        }
    }
    Ok(())
}

/// A control plane with an overlay of the manifests, with nodes, and with kube-scheduler's kubeconfig. Nodes advertise so many
/// times the memory of their cards: of twice as much, only gpustow refuses a part.
async fn site(
    args: &Args,
    nodes: usize,
    overlay: &str,
    times: u64,
    began: Instant,
) -> Result<(ControlPlane, Case, PathBuf)> {
    eprintln!("{} {nodes} nodes: starting the control plane", since(began));
    let cluster = ControlPlane::start(Options::default()).await?;
    let overlay = args.repository.join("manifests").join(overlay);
    let overlay = overlay.display().to_string();
    cluster.kubectl(&["apply", "-k", &overlay]).await?;
    Webhook::keep(&cluster, &args.gpustow).await?;
    let case = Case::new(&cluster, "bench").await?;
    at_once(WIDTH, 0..nodes, |node| {
        let name = format!("n{node:05}");
        let node = case.node(&name, &CARDS).label(NODE, &name);
        let node = node.advertise(CARDS.iter().sum::<u64>() * times);
        let client = &case.client;
        async move { node.create(client).await }
    })
    .await?;
    let kubeconfig = cluster.kubeconfig(names::NAMESPACE, names::SCHEDULER, None);
    let kubeconfig = kubeconfig.await?;
    Ok((cluster, case, kubeconfig))
}

/// Runs each way in turn, round after round.
async fn rounds<W: Copy + Eq + Hash, R>(
    args: &Args,
    place: (usize, Instant),
    mut ways: Vec<W>,
    name: fn(W) -> String,
    run: impl AsyncFn(W) -> Result<R>,
    figures: fn(&R) -> (f64, f64),
) -> Result<HashMap<W, Vec<R>>> {
    let (nodes, began) = place;
    let mut results: HashMap<W, Vec<R>> = HashMap::new();
    for round in 0..args.rounds {
        // Not always the same one first.
        ways.rotate_left(usize::from(round > 0));
        for &way in &ways {
            let result = run(way).await.with_context(|| name(way))?;
            let (rate, half) = figures(&result);
            eprintln!(
                "{} {nodes} nodes, round {} of {}, {}: {rate:.1} pods/s, bound after {half:.0} ms (p50)",
                since(began),
                round + 1,
                args.rounds,
                name(way),
            );
            results.entry(way).or_default().push(result);
        }
    }
    Ok(results)
}

async fn bench(args: &Args, nodes: usize, began: Instant) -> Result<()> {
    let (cluster, case, kubeconfig) = site(args, nodes, "base", 1, began).await?;
    let run = async |way| run(args, &cluster, &case, &kubeconfig, way).await;
    let figures = |round: &Round| (round.rate, quantile(&round.waits, 0.5));
    let ways = Way::all(args);
    let results = rounds(args, (nodes, began), ways, Way::name, run, figures).await?;
    report(nodes, args, &results);
    Ok(())
}

/// One round's figures.
struct Round {
    /// Pods per second.
    rate: f64,
    /// Milliseconds from creation to bound, ascending.
    waits: Vec<f64>,
    /// Bind calls that the extender refused.
    conflicts: f64,
    /// Nodes with pods of the backlog.
    nodes: f64,
    /// Percentage of those nodes' GPU memory that the backlog asks for.
    allocated: f64,
    /// Calls of /filter per pod.
    calls: f64,
    /// Mean milliseconds of a call of /filter and of /bind in the extender.
    verbs: [f64; 2],
    /// CPU per pod of the backlog in ms: scheduler, API server and etcd, extender.
    cpu: [f64; 3],
}

/// CPU used so far, as in [`Round::cpu`], in seconds.
fn cpu(
    cluster: &ControlPlane,
    scheduler: &Scheduler,
    extender: Option<&Extender>,
) -> Result<[f64; 3]> {
    Ok([
        scheduler.process.cpu()?,
        cluster.api_server.cpu()? + cluster.etcd.cpu()?,
        extender.map_or(Ok(0.0), |extender| extender.process.cpu())?,
    ])
}

/// Calls of /filter and of /bind so far, each with the seconds that they took together.
async fn calls(extender: Option<&Extender>) -> Result<[[f64; 2]; 2]> {
    let Some(extender) = extender else {
        return Ok([[0.0; 2]; 2]);
    };
    let metrics = extender.metrics().await?;
    let of = |verb: &str, what: &str| {
        let series = "gpustow_extender_request_duration_seconds";
        sum_of(&metrics, &format!(r#"{series}_{what}{{verb="{verb}"}}"#))
    };
    Ok(["filter", "bind"].map(|verb| [of(verb, "count"), of(verb, "sum")]))
}

/// An extender that decides already: the measurement does not include its takeover.
async fn extender(
    args: &Args,
    cluster: &ControlPlane,
    kubeconfig: &Path,
    fields: &[&str],
) -> Result<Extender> {
    let options = ExtenderOptions {
        args: vec!["--log=warn".to_owned()],
        config: Some(fields.iter().map(ToString::to_string).collect()),
        ..ExtenderOptions::default()
    };
    let extender = Extender::start(cluster, &args.gpustow, kubeconfig, options).await?;
    let limits = json!({"limits": {names::GPU_MEM: "1"}});
    let pod = json!({
        "metadata": {"uid": "none", "name": "none", "namespace": "none"},
        "spec": {"containers": [{"name": "main", "resources": limits}]},
    });
    let call = json!({"Pod": pod, "NodeNames": []});
    extender.call("prioritize", call.to_string()).await?;
    let takeovers = sum_of(&extender.metrics().await?, "gpustow_takeovers_total");
    ensure!(takeovers > 0.0, "the extender did not take over");
    Ok(extender)
}

/// Such an extender with these fields of the GpustowConfig, and a kube-scheduler that calls it.
async fn start(
    args: &Args,
    cluster: &ControlPlane,
    kubeconfig: &Path,
    fields: &[&str],
) -> Result<(Extender, Scheduler)> {
    let extender = extender(args, cluster, kubeconfig, fields).await?;
    let config = config(args)?.with_extender(&extender.url)?;
    let scheduler = Scheduler::start(cluster, config, kubeconfig).await?;
    Ok((extender, scheduler))
}

/// kube-scheduler's, without a limit on its client.
fn config(args: &Args) -> Result<SchedulerConfig> {
    let config = SchedulerConfig::unlimited(&args.repository)?;
    match args.percentage.first() {
        Some(&percentage) => config.with(PERCENTAGE, percentage),
        None => Ok(config),
    }
}

async fn run(
    args: &Args,
    cluster: &ControlPlane,
    case: &Case,
    kubeconfig: &Path,
    way: Way,
) -> Result<Round> {
    let extender = match way {
        Way::With(_) | Way::Beside(..) => Some(extender(args, cluster, kubeconfig, &[]).await?),
        Way::Alone => None,
    };
    let config = way.config(args, extender.as_ref())?;
    let mut binds = Binds::of(case.pods(), None).await?;
    if !matches!(way, Way::Beside(..)) {
        backlog(case, args.pods).await?;
    }
    let scheduler = Scheduler::start(cluster, config, kubeconfig).await?;
    let mut first = None;
    if let Way::Beside(waiting, _, priority) = way {
        wait_unbound(cluster, case, waiting, priority).await?;
        first = Some(Instant::now());
    }
    let before = cpu(cluster, &scheduler, extender.as_ref())?;
    let called = calls(extender.as_ref()).await?;
    if let Way::Beside(..) = way {
        backlog(case, args.pods).await?;
    }
    let mut places = HashMap::new();
    let mut last = Instant::now();
    while places.len() < args.pods {
        let (pod, node) = next_bound(&mut binds).await?;
        last = Instant::now();
        first.get_or_insert(last);
        places.insert(pod, node);
    }
    let took = last.duration_since(first.unwrap_or(last));
    let rate = (args.pods - 1) as f64 / took.as_secs_f64();
    let after = cpu(cluster, &scheduler, extender.as_ref())?;
    let calls = calls(extender.as_ref()).await?;
    let per_pod = |at: usize| (after[at] - before[at]) * 1e3 / args.pods as f64;

    let make = async |name: &str, index| create(case, pod(case, name, index)).await;
    let waits = paced(args.paced, &mut binds, QUIET, make).await?;
    let conflicts = match &extender {
        Some(extender) => sum_of(&extender.metrics().await?, "gpustow_bind_failures_total"),
        None => 0.0,
    };
    scheduler.process.kill9();
    if matches!(way, Way::With(_)) {
        case.check().await?;
    }
    case.clear(None, SETTLED).await?;
    let nodes = places.values().collect::<HashSet<_>>().len() as f64;
    let asked: u64 = (0..args.pods).map(request).sum();
    let mean = |verb: usize| {
        let [count, seconds] = [0, 1].map(|at| calls[verb][at] - called[verb][at]);
        seconds * 1e3 / count
    };
    Ok(Round {
        rate,
        waits,
        conflicts,
        nodes,
        allocated: asked as f64 * 100.0 / (nodes * CARDS.iter().sum::<u64>() as f64),
        calls: (calls[0][0] - called[0][0]) / args.pods as f64,
        verbs: [mean(0), mean(1)],
        cpu: [per_pod(0), per_pod(1), per_pod(2)],
    })
}

/// Creates pods that fit on no card and waits until kube-scheduler has refused each.
async fn wait_unbound(
    cluster: &ControlPlane,
    case: &Case,
    count: usize,
    priority: i32,
) -> Result<()> {
    let class = format!("priority-{}", priority.unsigned_abs());
    let object = json!({
        "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
        "metadata": {"name": class}, "value": priority,
    });
    cluster.apply(&object.to_string()).await?;
    // A node's cards together have as much: only the extender refuses it.
    let mib = CARDS[0] + 1_024;
    at_once(WIDTH, 0..count, |index| {
        let pod = case.pod(&format!("large-{index}")).gpu_mem(mib);
        create(case, pod.priority_class(&class))
    })
    .await?;
    refused(case, count).await
}

/// Waits until so many pods have been refused, or held back by a gate.
async fn refused(case: &Case, count: usize) -> Result<()> {
    loop {
        let pods = case.pods().list(&ListParams::default()).await?;
        let refused = |pod: &&Pod| {
            let status = pod.status.as_ref();
            status.is_some_and(|status| status.conditions.iter().flatten().next().is_some())
        };
        if pods.items.iter().filter(refused).count() >= count {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

async fn create(case: &Case, pod: PodBuilder) -> Result<()> {
    pod.create(&case.client).await.map(drop)
}

async fn backlog(case: &Case, count: usize) -> Result<()> {
    let pod = |index| pod(case, &format!("backlog-{index}"), index);
    at_once(WIDTH, 0..count, |index| create(case, pod(index))).await
}

fn pod(case: &Case, name: &str, index: usize) -> PodBuilder {
    case.pod(name)
        .gpu_mem(request(index))
        .requests("cpu", "100m")
}

fn request(index: usize) -> u64 {
    let request = REQUESTS.get(index % REQUESTS.len());
    request.copied().unwrap_or_default()
}

/// The next pod that is bound, and its node.
async fn next_bound(binds: &mut Binds) -> Result<(String, String)> {
    let next = timeout(QUIET, binds.next("")).await;
    next.context("no pod was bound for two minutes")?
}

fn sum_of(exposition: &str, series: &str) -> f64 {
    let lines = exposition.lines().filter(|line| line.starts_with(series));
    lines
        .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .fold(0.0, |sum, value| sum + value)
}
