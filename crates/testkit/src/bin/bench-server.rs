//! The extender as a process beside a real API server and a full cluster: its memory, and how long
//! `/filter`, `/preempt` and a scrape take over loopback HTTP.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::Parser;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use gpustow_api::{Assignment, names};
use gpustow_pack::Mib;
use gpustow_testkit::{Build, Case, ControlPlane, Extender, ExtenderOptions, Options, eventually};
use hyper::Request;
use kube::ResourceExt as _;
use serde_json::{Map, Value, json};

/// Requests at once.
const WIDTH: usize = 32;
/// MiB of each of a node's eight cards.
const CARD: u64 = 81_920;
/// MiB of each pod.
const SHARE: u64 = 8_192;
/// For the epoch, a patch or a look at every pod included.
const TAKEOVER: Duration = Duration::from_secs(60);

/// Measure the extender's memory and its answers over loopback HTTP.
#[derive(Parser)]
struct Args {
    /// Nodes with 8 cards each
    #[arg(long, default_value_t = 5_000)]
    nodes: usize,
    /// Pods bound to them, each with an assignment
    #[arg(long, default_value_t = 50_000)]
    pods: usize,
    /// Calls of /filter
    #[arg(long, default_value_t = 1_000)]
    calls: usize,
    /// Candidate nodes of a call of /preempt
    #[arg(long, default_value_t = 500)]
    candidates: usize,
    /// Calls of /preempt of each kind, and scrapes
    #[arg(long, default_value_t = 100)]
    rare: usize,
    /// Builds of the extender: name=binary, comma separated
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "now=target/release/gpustow"
    )]
    gpustow: Vec<Build>,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(
        args.nodes > 0 && args.calls > 0 && args.rare > 0,
        "give at least one node and one call of each kind"
    );
    eprintln!("starting the control plane");
    let cluster = ControlPlane::start(Options::default()).await?;
    cluster.install_bare().await?;
    let case = Case::new(&cluster, "bench").await?;
    let first_pods = fill(&args, &case).await?;
    println!(
        "{} nodes × 8 GPUs, {} pods; ms of {} calls of /filter, {} of the others, client included",
        args.nodes, args.pods, args.calls, args.rare
    );
    println!(
        "| build | resident, at most | /filter p50 / p99 | /preempt, {} candidates | Lists | \
         /preempt that needs more victims | Lists | /metrics p50 / p99 |\n|---|---|---|---|---|---|---|---|",
        args.candidates
    );
    for build in &args.gpustow {
        eprintln!("measuring {}", build.name);
        measure(&args, &cluster, &case, build, &first_pods).await?;
    }
    Ok(())
}

async fn measure(
    args: &Args,
    cluster: &ControlPlane,
    case: &Case,
    build: &Build,
    first_pods: &[String],
) -> Result<()> {
    let options = ExtenderOptions {
        args: vec!["--log=warn".to_owned()],
        config: Some(Vec::new()),
        ..ExtenderOptions::default()
    };
    let kubeconfig = cluster.admin_kubeconfig();
    let extender = Extender::start(cluster, &build.program, kubeconfig, options).await?;
    let nodes: Vec<_> = (0..args.nodes)
        .map(|node| case.node_name(&name(node)))
        .collect();
    // The first call takes the epoch, and reads the cluster for longer than a call waits.
    let first = async || filter(&extender, &nodes, 0).await;
    eventually(TAKEOVER, "the extender decides", first).await?;
    let filters = timed(args.calls, async |index| {
        filter(&extender, &nodes, index + 1).await
    });
    let filters = filters.await?;
    let mut preempts = Vec::new();
    // For one card the victim suffices, for all of a node's cards it does not.
    for (cards, mib) in [(1, CARD - SHARE), (8, 8 * CARD)] {
        let body = preemption(case, first_pods, args.candidates, cards, mib);
        let before = budget_lists(case).await?;
        let took = timed(args.rare, async |_| {
            let (_, answer) = extender.call("preempt", body.to_string()).await?;
            let kept = answer["NodeNameToMetaVictims"].as_object();
            ensure!(kept.is_some_and(|kept| !kept.is_empty()), "none: {answer}");
            Ok(())
        });
        let took = took.await?;
        let lists = budget_lists(case).await? - before;
        preempts.push(format!("{took} | {:.1}", lists / args.rare as f64));
    }
    let scrapes = timed(args.rare, async |_| extender.metrics().await.map(drop));
    println!(
        "| {} | {:.0}, {:.0} MiB | {filters} | {} | {} |",
        build.name,
        extender.process.resident()?,
        extender.process.most_resident()?,
        preempts.join(" | "),
        scrapes.await?,
    );
    Ok(())
}

/// `p50 / p99` of so many calls, in milliseconds.
async fn timed(calls: usize, call: impl AsyncFn(usize) -> Result<()>) -> Result<String> {
    let mut took = Vec::with_capacity(calls);
    for index in 0..calls {
        let began = Instant::now();
        call(index).await?;
        took.push(began.elapsed().as_secs_f64() * 1e3);
    }
    took.sort_by(f64::total_cmp);
    let at = |q: f64| took.get((q * (took.len() - 1) as f64) as usize).copied();
    let (half, most) = (at(0.5).unwrap_or(f64::NAN), at(0.99).unwrap_or(f64::NAN));
    Ok(format!("{half:.1} / {most:.1}"))
}

fn name(node: usize) -> String {
    format!("n{node:05}")
}

/// Nodes, and pods bound to them; the UID of each node's first pod.
async fn fill(args: &Args, case: &Case) -> Result<Vec<String>> {
    eprintln!("creating {} nodes", args.nodes);
    let nodes = stream::iter(0..args.nodes).map(|node| async move {
        case.node(&name(node), &[CARD; 8])
            .create(&case.client)
            .await
            .map(drop)
    });
    nodes.buffer_unordered(WIDTH).try_collect::<()>().await?;
    eprintln!("creating {} pods", args.pods);
    let pods = stream::iter(0..args.pods).map(|index| async move {
        let node = name(index % args.nodes);
        let uuid: Box<str> = case.uuid(&node, index / args.nodes % 8).into();
        let assignment = Assignment {
            charges: vec![(uuid.clone(), Mib(SHARE))],
            containers: vec![("main".into(), vec![uuid])],
            exclusive: None,
            compute: 0,
            instance: None,
        };
        let mut pod = case
            .pod(&format!("pod-{index}"))
            .gpu_mem(SHARE)
            .requests("cpu", "500m");
        for (key, value) in assignment.annotations("") {
            pod = pod.annotation(&key, &value);
        }
        let pod = pod.with(|spec| spec.node_name = Some(case.node_name(&node)));
        pod.create(&case.client).await
    });
    let uids = pods
        .buffered(WIDTH)
        .map_ok(|pod| pod.uid().unwrap_or_default());
    let mut uids: Vec<String> = uids.try_collect().await?;
    uids.truncate(args.nodes);
    Ok(uids)
}

/// A call of /preempt for so much on so many cards, which offers each node's first pod.
fn preemption(
    case: &Case,
    first_pods: &[String],
    candidates: usize,
    cards: u64,
    mib: u64,
) -> Value {
    let nodes = first_pods.iter().enumerate().take(candidates);
    let victims: Map<_, _> = nodes
        .map(|(node, uid)| {
            let victims = json!({"Pods": [{"UID": uid}], "NumPDBViolations": 0});
            (case.node_name(&name(node)), victims)
        })
        .collect();
    json!({
        "Pod": {
            "metadata": {
                "uid": "bench-preempts", "name": "p", "namespace": "bench",
                "annotations": {names::GPU_COUNT: cards.to_string()},
            },
            "spec": {"priority": 1000, "containers": [{
                "name": "main",
                "resources": {"limits": {names::GPU_MEM: mib.to_string()}},
            }]},
        },
        "NodeNameToMetaVictims": victims,
    })
}

/// Lists of disruption budgets that the API server has served.
async fn budget_lists(case: &Case) -> Result<f64> {
    let request = Request::get("/metrics").body(Vec::new())?;
    let metrics = case.client.request_text(request).await?;
    let counts = metrics.lines().filter(|line| {
        line.starts_with("apiserver_request_total{")
            && line.contains("resource=\"poddisruptionbudgets\"")
            && line.contains("verb=\"LIST\"")
    });
    let count = |line: &str| line.rsplit_once(' ')?.1.parse::<f64>().ok();
    Ok(counts.filter_map(count).sum())
}

/// One call of /filter for a pod that nobody binds.
async fn filter(extender: &Extender, nodes: &[String], index: usize) -> Result<()> {
    let mib = [4_096, 8_192, 16_384, 24_576]
        .get(index % 4)
        .copied()
        .unwrap_or(4_096);
    let body = json!({
        "Pod": {
            "metadata": {"uid": format!("bench-{index}"), "name": "p", "namespace": "bench"},
            "spec": {"containers": [{
                "name": "main",
                "resources": {"limits": {names::GPU_MEM: mib.to_string()}},
            }]},
        },
        "NodeNames": nodes,
    });
    let (_, answer) = extender.call("filter", body.to_string()).await?;
    let chosen = answer.get("NodeNames").and_then(|names| names.as_array());
    ensure!(
        chosen.is_some_and(|names| names.len() == 1),
        "not one node: {answer}"
    );
    Ok(())
}
