//! How long a takeover from a killed extender lasts while pods wait and patches fail: builds of the
//! extender beside each other on a real API server.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Parser;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use gpustow_api::names;
use gpustow_testkit::{
    Action, ApiProxy, Build, Case, ControlPlane, Extender, ExtenderOptions, Options, Rule,
};
use hyper::StatusCode;
use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use kube::api::DeleteParams;
use serde_json::json;

/// Pods created at once.
const WIDTH: usize = 32;

/// Measure takeovers with waiting pods and failing patches.
#[derive(Parser)]
struct Args {
    /// Builds of the extender: name=binary, comma separated
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "now=target/release/gpustow"
    )]
    gpustow: Vec<Build>,
    /// Pods that wait
    #[arg(long, value_delimiter = ',', default_values_t = [1_000, 10_000])]
    pods: Vec<usize>,
    /// Patches that fail with status 500, of 1,000
    #[arg(long, value_delimiter = ',', default_values_t = [0, 5, 50])]
    failing: Vec<usize>,
    /// Takeovers of each kind
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Seconds after which one counts as never
    #[arg(long, default_value_t = 60)]
    give_up: u64,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    eprintln!("starting the control plane");
    let cluster = ControlPlane::start(Options::default()).await?;
    cluster.install_bare().await?;
    let case = Case::new(&cluster, "bench").await?;
    case.node("n", &[81_920]).create(&case.client).await?;
    let mut there = 0;
    println!(
        "| waiting pods | failing patches | build | seconds to the first answer | patches | epochs |"
    );
    println!("|---|---|---|---|---|---|");
    for &pods in &args.pods {
        eprintln!("creating pods up to {pods}");
        let new = stream::iter(there..pods).map(|index| {
            let pod = case.pod(&format!("waits-{index}")).gpu_mem(1);
            pod.create(&case.client)
        });
        new.buffer_unordered(WIDTH).try_collect::<Vec<_>>().await?;
        there = there.max(pods);
        for &failing in &args.failing {
            for build in &args.gpustow {
                let Build { name, program } = build;
                let mut runs = Vec::new();
                for round in 0..args.rounds {
                    let run = takeover(&args, &cluster, &case, program, failing, round);
                    runs.push(run.await?);
                }
                let seconds = runs.iter().map(|run| match run.seconds {
                    Some(seconds) => format!("{seconds:.1}"),
                    None => format!("not in {}", args.give_up),
                });
                let counts = |of: fn(&Run) -> i64| {
                    let counts = runs.iter().map(|run| of(run).to_string());
                    counts.collect::<Vec<_>>().join(", ")
                };
                println!(
                    "| {pods} | {:.1} % | {name} | {} | {} | {} |",
                    failing as f64 / 10.0,
                    seconds.collect::<Vec<_>>().join(", "),
                    counts(|run| run.patches),
                    counts(|run| run.epochs),
                );
            }
        }
    }
    Ok(())
}

struct Run {
    seconds: Option<f64>,
    patches: i64,
    epochs: i64,
}

async fn takeover(
    args: &Args,
    cluster: &ControlPlane,
    case: &Case,
    program: &Path,
    failing: usize,
    round: usize,
) -> Result<Run> {
    let proxy = ApiProxy::start(cluster).await?;
    let patches = Arc::new(AtomicUsize::new(0));
    let _fails = fail(&proxy, failing, patches.clone())?;
    let config = cluster.admin_kubeconfig();
    let text = std::fs::read_to_string(config)?.replace(cluster.url(), proxy.url());
    let kubeconfig = cluster.dir().join("through-proxy.kubeconfig");
    std::fs::write(&kubeconfig, text)?;
    let options = ExtenderOptions {
        args: vec![
            "--log=warn".to_owned(),
            format!("--identity=bench-{failing}-{round}"),
        ],
        ..ExtenderOptions::default()
    };
    let extender = Extender::start(cluster, program, &kubeconfig, options).await?;
    let before = epoch(case).await?;
    let body = json!({
        "Pod": {
            "metadata": {"uid": "bench", "name": "p", "namespace": "bench"},
            "spec": {"containers": [{
                "name": "main",
                "resources": {"limits": {names::GPU_MEM: "1"}},
            }]},
        },
        "NodeNames": [case.node_name("n")],
    });
    let began = Instant::now();
    let give_up = Duration::from_secs(args.give_up);
    let seconds = loop {
        let (_, answer) = extender.call("filter", body.to_string()).await?;
        let chosen = answer.get("NodeNames").and_then(|names| names.as_array());
        if chosen.is_some_and(|names| names.len() == 1) {
            break Some(began.elapsed().as_secs_f64());
        }
        if began.elapsed() > give_up {
            break None;
        }
        // As often as a busy kube-scheduler has another pod to ask for.
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    extender.process.kill9();
    let run = Run {
        seconds,
        patches: patches.load(Ordering::SeqCst) as i64,
        epochs: epoch(case).await? - before,
    };
    if seconds.is_none() {
        // The next build starts without what this one left.
        let leases = Api::<Lease>::namespaced(case.client.clone(), names::NAMESPACE);
        leases
            .delete(names::EXTENDER, &DeleteParams::default())
            .await?;
    }
    Ok(run)
}

/// Of every 1,000 patches of a pod's status, `failing` fail.
fn fail(proxy: &ApiProxy, failing: usize, patches: Arc<AtomicUsize>) -> Result<Rule> {
    let matches = move |method: &hyper::Method, uri: &hyper::Uri| {
        let patch = method == hyper::Method::PATCH && uri.path().ends_with("/status");
        // Spread evenly.
        patch && patches.fetch_add(1, Ordering::SeqCst) * failing % 1_000 + failing >= 1_000
    };
    Ok(proxy.rule(matches, Action::Fail(StatusCode::INTERNAL_SERVER_ERROR)))
}

async fn epoch(case: &Case) -> Result<i64> {
    let leases = Api::<Lease>::namespaced(case.client.clone(), names::NAMESPACE);
    let lease = leases.get_opt(names::EXTENDER).await?;
    let spec = lease.and_then(|lease| lease.spec);
    Ok(spec
        .and_then(|spec| spec.lease_transitions)
        .unwrap_or(0)
        .into())
}
