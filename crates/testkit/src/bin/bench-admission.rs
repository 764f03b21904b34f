//! The cost of admission for a CREATE. It asks API servers in turn: without gpustow, with an earlier build's policies,
//! with the webhook alone, and with all that is installed now. Every CREATE is a dry run: it is admitted and not
//! stored, so that the share of admission is as large as it gets.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser;
use gpustow_api::names;
use gpustow_testkit::{
    ControlPlane, Options, Process, Webhook, configure, eventually, quantile, quantiles,
};
use kube::Client;
use serde_json::{Value, json};

/// For the manifests to be in force.
const SOON: Duration = Duration::from_secs(60);

/// Measure what admission costs pods that request GPU memory and pods that do not.
#[derive(Parser)]
struct Args {
    /// Kustomization of an earlier build, whose policies change pods
    #[arg(long)]
    earlier: Option<PathBuf>,
    /// Kustomization of this build
    #[arg(long, default_value = "manifests/base")]
    now: PathBuf,
    /// The gpustow binary that serves the webhook
    #[arg(long, default_value = "target/release/gpustow")]
    program: PathBuf,
    /// CREATEs of each pod on each API server, in turn
    #[arg(long, default_value_t = 300)]
    rounds: usize,
    /// Seconds after which no further round of a pod begins
    #[arg(long, default_value_t = 120)]
    patience: u64,
}

/// An API server with one way of admission, or with none.
struct Side {
    name: &'static str,
    client: Client,
    cluster: ControlPlane,
    webhook: Option<Webhook>,
}

impl Side {
    async fn start(name: &'static str, kustomization: Option<&PathBuf>) -> Result<Side> {
        eprintln!("starting the control plane {name}");
        let cluster = ControlPlane::start(Options::default()).await?;
        let client = cluster.admin()?;
        if let Some(path) = kustomization {
            let path = path.to_str().context("path of the manifests")?;
            cluster
                .kubectl(&["apply", "--server-side", "-k", path])
                .await?;
            // As Helm installs it.
            configure(&client, &[]).await?;
        }
        Ok(Side {
            name,
            client,
            cluster,
            webhook: None,
        })
    }

    /// Has the extender serve its API server.
    async fn served(mut self, program: &Path) -> Result<Side> {
        self.webhook = Some(Webhook::start(&self.cluster, program, &[]).await?);
        Ok(self)
    }

    /// Without the policies that protect the fields that gpustow writes.
    async fn alone(self) -> Result<Side> {
        let kinds = "validatingadmissionpolicies,validatingadmissionpolicybindings";
        self.cluster.kubectl(&["delete", kinds, "--all"]).await?;
        Ok(self)
    }

    /// Waits until admission changes pods for gpustow.
    async fn ready(&self) -> Result<()> {
        let asking = serde_json::to_vec(&usual(true))?;
        eventually(SOON, "pods are admitted", async || {
            let made = post(&self.client, &asking).await?;
            let made: Value = serde_json::from_str(&made)?;
            ensure!(
                made["spec"]["schedulerName"] == names::SCHEDULER,
                "not changed"
            );
            Ok(())
        })
        .await
    }

    /// One CREATE: milliseconds, CPU milliseconds of the API server and the extender, and whether the pod was admitted.
    async fn create(&self, body: &[u8]) -> Result<([f64; 3], bool)> {
        let extender = || self.webhook.as_ref().map_or(Ok(0.0), |it| cpu(&it.process));
        let before = (cpu(&self.cluster.api_server)?, extender()?);
        let (ms, ok) = create(&self.client, body).await?;
        let after = (cpu(&self.cluster.api_server)?, extender()?);
        Ok(([ms, after.0 - before.0, after.1 - before.1], ok))
    }
}

/// The CPU time of a process, all threads together, in milliseconds.
fn cpu(process: &Process) -> Result<f64> {
    let mut nanos = 0.0;
    for task in std::fs::read_dir(format!("/proc/{}/task", process.id()))? {
        // A thread may end meanwhile.
        let stat = std::fs::read_to_string(task?.path().join("schedstat")).unwrap_or_default();
        let first = stat.split_whitespace().next();
        nanos += first.and_then(|it| it.parse::<f64>().ok()).unwrap_or(0.0);
    }
    Ok(nanos / 1e6)
}

/// The cost of one pod's CREATEs on one side: milliseconds, and CPU of API server and extender.
#[derive(Default)]
struct Took {
    columns: [Vec<f64>; 3],
    refused: bool,
}

async fn sides(args: &Args) -> Result<Vec<Side>> {
    let mut sides = vec![Side::start("nothing", None).await?];
    if let Some(earlier) = &args.earlier {
        sides.push(Side::start("earlier policies", Some(earlier)).await?);
    }
    let now = Some(&args.now);
    let alone = Side::start("webhook alone", now).await?.alone().await?;
    sides.push(alone.served(&args.program).await?);
    let all = Side::start("webhook and policies", now).await?;
    sides.push(all.served(&args.program).await?);
    for side in &sides[1..] {
        side.ready().await?;
    }
    Ok(sides)
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let sides = sides(&args).await?;
    println!(
        "| pod | installed | rounds | wall p50 / p99 | CPU of the API server | ÷ nothing | CPU of the extender |"
    );
    println!("|---|---|---|---|---|---|---|");
    for (what, requests) in [("nothing", false), ("GPU memory", true)] {
        let body = serde_json::to_vec(&usual(requests))?;
        let took = measure(&args, &sides, &body).await?;
        let base = quantile(&took[0].columns[1], 0.5);
        for (side, took) in sides.iter().zip(&took) {
            let [wall, api_server, extender] = &took.columns;
            let refused = if took.refused { "refused, " } else { "" };
            println!(
                "| requests {what} | {} | {} | {refused}{} | {} | {:.2} | {} |",
                side.name,
                wall.len(),
                quantiles(wall, [0.5, 0.99], 1),
                spread(api_server),
                quantile(api_server, 0.5) / base,
                match side.webhook {
                    Some(_) => spread(extender),
                    None => String::new(),
                }
            );
        }
    }
    Ok(())
}

/// Asks each side in turn.
async fn measure(args: &Args, sides: &[Side], body: &[u8]) -> Result<Vec<Took>> {
    let mut took: Vec<Took> = sides.iter().map(|_| Took::default()).collect();
    let began = Instant::now();
    for round in 0..=args.rounds {
        // Each goes first as often as the others.
        let first = round % sides.len();
        for index in (first..sides.len()).chain(0..first) {
            let (measured, ok) = sides[index].create(body).await?;
            let took = &mut took[index];
            took.refused = !ok;
            // The first round is not counted: expressions and connections are warm then.
            if round > 0 {
                let columns = took.columns.iter_mut().zip(measured);
                columns.for_each(|(column, it)| column.push(it));
            }
        }
        if round > 0 && began.elapsed() > Duration::from_secs(args.patience) {
            break;
        }
    }
    let columns = took.iter_mut().flat_map(|took| &mut took.columns);
    columns.for_each(|column| column.sort_by(f64::total_cmp));
    Ok(took)
}

/// Median and quartiles of sorted times.
fn spread(sorted: &[f64]) -> String {
    let [low, median, high] = [0.25, 0.5, 0.75].map(|q| quantile(sorted, q));
    format!("{median:.1} ({low:.1} to {high:.1})")
}

/// Milliseconds, and whether the pod was admitted.
async fn create(client: &Client, body: &[u8]) -> Result<(f64, bool)> {
    let began = Instant::now();
    let answer = post(client, body).await;
    let took = began.elapsed().as_secs_f64() * 1e3;
    match answer {
        Ok(_) => Ok((took, true)),
        Err(kube::Error::Api(_)) => Ok((took, false)),
        Err(error) => bail!(error),
    }
}

async fn post(client: &Client, body: &[u8]) -> kube::Result<String> {
    let request = hyper::Request::post("/api/v1/namespaces/default/pods?dryRun=All")
        .header("content-type", "application/json")
        .body(body.to_vec())
        .map_err(kube::Error::HttpError)?;
    client.request_text(request).await
}

/// A pod with two containers, of which the first requests GPU memory or none does.
fn usual(requests: bool) -> Value {
    let probe = json!({ "httpGet": { "path": "/healthz", "port": 8080 } });
    let variables: Value = (0..10)
        .map(|index| json!({ "name": format!("V{index}"), "value": "" }))
        .collect();
    let containers = [requests, false].into_iter().zip(0..);
    let containers = containers.map(|(requests, index)| {
        let mut limits = json!({ "cpu": "1", "memory": "1Gi" });
        if requests {
            limits[names::GPU_MEM] = json!("1");
        }
        json!({
            "name": format!("c{index}"), "image": "registry.k8s.io/pause:3.10", "env": variables,
            "readinessProbe": probe, "livenessProbe": probe, "resources": { "limits": limits },
        })
    });
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "generateName": "bench-", "annotations": { "team": "a" } },
        "spec": { "containers": containers.collect::<Vec<_>>() },
    })
}
