//! The extender as a process next to a real API server and a full cluster. It measures the extender's memory, and the
//! time of `/filter`, `/preempt` and a scrape over loopback HTTP. It also measures another replica's takeover time, the
//! cost of the agents' reports, and the time of the plugin's commands.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::Parser;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use gpustow_api::gpunode::{GpuNode, GpuNodeSpec};
use gpustow_api::{Assignment, names};
use gpustow_pack::Mib;
use gpustow_testkit::{
    Build, Case, ControlPlane, Extender, ExtenderOptions, Options, at_once, built, eventually,
    quantiles, sorted,
};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use serde_json::{Map, Value, json};

/// Requests at once.
const WIDTH: usize = 32;
/// MiB of each of a node's eight cards.
const CARD: u64 = 81_920;
/// MiB of each pod.
const SHARE: u64 = 8_192;
/// For the epoch, a patch or a look at every pod included.
const TAKEOVER: Duration = Duration::from_secs(60);
/// Seconds between two reports of an agent while nothing changes.
const BETWEEN_REPORTS: f64 = 60.0;
/// Runs of each of the plugin's commands.
const COMMANDS: usize = 3;

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
    /// Seconds for which each node's report is written once a minute
    #[arg(long, default_value_t = 20)]
    reports: u64,
    /// The plugin of which commands are timed
    #[arg(long, default_value = "target/release/kubectl-gpustow")]
    plugin: PathBuf,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(
        args.nodes > 0 && args.calls > 0 && args.rare > 0,
        "give at least one node and one call of each kind"
    );
    built(
        &args.plugin,
        "cargo build --release --package kubectl-gpustow",
    )?;
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
        "| build | resident, at most | /filter p50 / p99 | /preempt, {} candidates | \
         /preempt that needs more victims | /metrics p50 / p99 | its series |\n|---|---|---|---|---|---|---|",
        args.candidates
    );
    let mut others = Vec::new();
    for build in &args.gpustow {
        eprintln!("measuring {}", build.name);
        others.push(measure(&args, &cluster, &case, build, &first_pods).await?);
    }
    println!(
        "\n{:.0} reports a second for {} s, one a minute and node; CPU in ms a report",
        args.nodes as f64 / BETWEEN_REPORTS,
        args.reports
    );
    println!(
        "| build | seconds from start to ready | from a kill to another replica's answer | bytes of a GpuNode | \
         report written, ms p50 / p99 | CPU of API server | etcd | extender |\n|---|---|---|---|---|---|---|---|"
    );
    others.iter().for_each(|row| println!("{row}"));
    for command in ["check", "gpus", "top"] {
        let took = timed(COMMANDS, async |_| plugin(&args, &cluster, command)).await?;
        println!("kubectl gpustow {command}: {took} ms, p50 / p99 of {COMMANDS} runs");
    }
    Ok(())
}

/// Prints a row of the first table, and gives back one of the second.
async fn measure(
    args: &Args,
    cluster: &ControlPlane,
    case: &Case,
    build: &Build,
    first_pods: &[String],
) -> Result<String> {
    let (extender, ready) = start(cluster, build, "first").await?;
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
        let took = timed(args.rare, async |_| {
            let (_, answer) = extender.call("preempt", body.to_string()).await?;
            let kept = answer["NodeNameToMetaVictims"].as_object();
            ensure!(kept.is_some_and(|kept| !kept.is_empty()), "none: {answer}");
            Ok(())
        });
        preempts.push(took.await?.to_string());
    }
    let scrapes = timed(args.rare, async |_| extender.metrics().await.map(drop));
    let scrapes = scrapes.await?;
    let metrics = extender.metrics().await?;
    let series = metrics.lines().filter(|line| !line.starts_with('#'));
    println!(
        "| {} | {:.0}, {:.0} MiB | {filters} | {} | {scrapes} | {} |",
        build.name,
        extender.process.resident()?,
        extender.process.most_resident()?,
        preempts.join(" | "),
        series.count(),
    );
    eprintln!("writing reports");
    let reports = reports(args, cluster, case, &extender).await?;
    eprintln!("taking over");
    let (standby, _) = start(cluster, build, "second").await?;
    extender.process.kill9();
    let began = Instant::now();
    let other = async || filter(&standby, &nodes, 0).await;
    eventually(TAKEOVER, "the other replica decides", other).await?;
    let takeover = began.elapsed().as_secs_f64();
    Ok(format!(
        "| {} | {ready:.1} | {takeover:.1} | {reports} |",
        build.name
    ))
}

/// An extender that is ready, and the seconds which that took.
async fn start(cluster: &ControlPlane, build: &Build, identity: &str) -> Result<(Extender, f64)> {
    let options = ExtenderOptions {
        args: vec![
            "--log=warn".to_owned(),
            format!("--identity={}-{identity}", build.name),
        ],
        ..ExtenderOptions::default()
    };
    let began = Instant::now();
    let kubeconfig = cluster.admin_kubeconfig();
    let extender = Extender::start(cluster, &build.program, kubeconfig, options).await?;
    Ok((extender, began.elapsed().as_secs_f64()))
}

/// Writes the nodes' reports at the rate of their agents, each in its turn.
async fn reports(
    args: &Args,
    cluster: &ControlPlane,
    case: &Case,
    extender: &Extender,
) -> Result<String> {
    let processes = [&cluster.api_server, &cluster.etcd, &extender.process];
    let rate = args.nodes as f64 / BETWEEN_REPORTS;
    let count = (rate * args.reports as f64).ceil() as usize;
    let before = processes.map(gpustow_testkit::Process::cpu);
    let began = tokio::time::Instant::now();
    let written = stream::iter(0..count).map(|index| async move {
        let due = began + Duration::from_secs_f64(index as f64 / rate);
        tokio::time::sleep_until(due).await;
        report(case, index % args.nodes).await?;
        Ok::<_, anyhow::Error>(due.elapsed().as_secs_f64() * 1e3)
    });
    let took: Vec<f64> = written.buffer_unordered(WIDTH).try_collect().await?;
    let mut spent = Vec::new();
    for (process, before) in processes.into_iter().zip(before) {
        let spent_by = (process.cpu()? - before?) * 1e3 / count as f64;
        spent.push(format!("{spent_by:.2}"));
    }
    let one = Api::<GpuNode>::all(case.client.clone());
    let mut one = one.get(&case.node_name(&name(0))).await?;
    one.managed_fields_mut()
        .retain(|it| it.manager.as_deref() == Some(names::AGENT));
    Ok(format!(
        "{} | {} | {}",
        serde_json::to_vec(&one)?.len(),
        p50_p99(took),
        spent.join(" | "),
    ))
}

/// Writes a node's report as its agent does.
async fn report(case: &Case, node: usize) -> Result<()> {
    let builder = case.node(&name(node), &[CARD; 8]);
    let node = builder.node.name_any();
    let mut object = GpuNode::new(&node, GpuNodeSpec::default());
    let mut status = builder.status;
    status.heartbeat = Some(Timestamp::now().to_string());
    object.status = Some(status);
    let params = PatchParams::apply(names::AGENT).force();
    let api = Api::<GpuNode>::all(case.client.clone());
    api.patch_status(&node, &params, &Patch::Apply(object))
        .await?;
    Ok(())
}

/// Runs a command of the plugin on all namespaces; 1 is its exit status where something is wrong.
fn plugin(args: &Args, cluster: &ControlPlane, command: &str) -> Result<()> {
    let output = Command::new(&args.plugin)
        .env("KUBECONFIG", cluster.admin_kubeconfig())
        .args([command, "--all-namespaces"])
        .output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(
        matches!(output.status.code(), Some(0 | 1)),
        "{command}: {text}"
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
    Ok(p50_p99(took))
}

/// Of these milliseconds.
fn p50_p99(took: Vec<f64>) -> String {
    quantiles(&sorted(took.into_iter()), [0.5, 0.99], 1)
}

fn name(node: usize) -> String {
    format!("n{node:05}")
}

/// Nodes, and pods bound to them; the UID of each node's first pod.
async fn fill(args: &Args, case: &Case) -> Result<Vec<String>> {
    eprintln!("creating {} nodes", args.nodes);
    at_once(WIDTH, 0..args.nodes, async |node| {
        let node = case.node(&name(node), &[CARD; 8]);
        node.create(&case.client).await
    })
    .await?;
    eprintln!("creating {} pods", args.pods);
    let pods = stream::iter(0..args.pods).map(|index| async move {
        let node = name(index % args.nodes);
        let uuid: Arc<str> = case.uuid(&node, index / args.nodes % 8).into();
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

/// One call of /filter for a pod that no scheduler binds.
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
