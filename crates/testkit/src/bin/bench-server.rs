//! The extender as a process beside a real API server: its memory with a full cluster, and how long
//! `/filter` takes over loopback HTTP.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use gpustow_api::{Assignment, names};
use gpustow_pack::Mib;
use gpustow_testkit::{Case, ControlPlane, Extender, ExtenderOptions, Options, built, eventually};
use serde_json::json;

/// Requests at once.
const WIDTH: usize = 32;
/// MiB of each of a node's eight cards.
const CARD: u64 = 81_920;
/// MiB of each pod.
const SHARE: u64 = 8_192;
/// For the epoch, a patch or a look at every pod included.
const TAKEOVER: Duration = Duration::from_secs(60);

/// Measure the extender's memory and its /filter over loopback HTTP.
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
    /// The extender's binary
    #[arg(long, default_value = "target/release/gpustow")]
    gpustow: PathBuf,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    built(&args.gpustow, "cargo build --release --bin gpustow")?;
    ensure!(
        args.nodes > 0 && args.calls > 0,
        "give at least one node and one call"
    );
    eprintln!("starting the control plane");
    let cluster = ControlPlane::start(Options::default()).await?;
    cluster.install_bare().await?;
    let case = Case::new(&cluster, "bench").await?;
    fill(&args, &case).await?;

    let options = ExtenderOptions {
        args: vec!["--stale-after=86400".to_owned(), "--log=warn".to_owned()],
        ..ExtenderOptions::default()
    };
    let kubeconfig = cluster.admin_kubeconfig();
    let extender = Extender::start(&cluster, &args.gpustow, kubeconfig, options).await?;
    let mut took = Vec::with_capacity(args.calls);
    let nodes: Vec<_> = (0..args.nodes)
        .map(|node| case.node_name(&name(node)))
        .collect();
    // The first call takes the epoch, and reads the cluster for longer than a call waits.
    let first = async || call(&extender, &nodes, 0).await;
    eventually(TAKEOVER, "the extender decides", first).await?;
    for index in 0..args.calls {
        took.push(call(&extender, &nodes, index + 1).await?);
    }
    took.sort_by(f64::total_cmp);
    let at = |q: f64| {
        took.get((q * (took.len() - 1) as f64) as usize)
            .copied()
            .unwrap_or(f64::NAN)
    };
    println!("{} nodes × 8 GPUs, {} pods", args.nodes, args.pods);
    println!(
        "memory: {} resident, {} at most",
        memory(&extender, "VmRSS:")?,
        memory(&extender, "VmHWM:")?
    );
    println!(
        "/filter over loopback HTTP, client included, {} calls: p50 {:.2} ms, p99 {:.2} ms",
        args.calls,
        at(0.5),
        at(0.99)
    );
    Ok(())
}

fn name(node: usize) -> String {
    format!("n{node:05}")
}

async fn fill(args: &Args, case: &Case) -> Result<()> {
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
        };
        let mut pod = case
            .pod(&format!("pod-{index}"))
            .gpu_mem(SHARE)
            .requests("cpu", "500m");
        for (key, value) in assignment.annotations() {
            pod = pod.annotation(&key, &value);
        }
        let pod = pod.with(|spec| spec.node_name = Some(case.node_name(&node)));
        pod.create(&case.client).await.map(drop)
    });
    pods.buffer_unordered(WIDTH).try_collect::<()>().await
}

/// One call of /filter for a pod that nobody binds; milliseconds.
async fn call(extender: &Extender, nodes: &[String], index: usize) -> Result<f64> {
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
    let body = body.to_string();
    let began = Instant::now();
    let (_, answer) = extender.call("filter", body).await?;
    let took = began.elapsed();
    let chosen = answer.get("NodeNames").and_then(|names| names.as_array());
    ensure!(
        chosen.is_some_and(|names| names.len() == 1),
        "not one node: {answer}"
    );
    Ok(took.as_secs_f64() * 1e3)
}

fn memory(extender: &Extender, key: &str) -> Result<String> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", extender.process.id()))?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(key))
        .context("no such line")?;
    let kib: f64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(format!("{:.0} MiB", kib / 1024.0))
}
