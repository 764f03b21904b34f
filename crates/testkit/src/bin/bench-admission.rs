//! What the admission policies cost a CREATE: API servers with and without them, asked in turn. Every
//! CREATE is a dry run: it is admitted, and not stored, so that the policies' share is as large as it gets.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use gpustow_api::names;
use gpustow_testkit::{ControlPlane, Options, eventually};
use kube::Client;
use serde_json::{Map, Value, json};

/// For the manifests to be in force.
const SOON: Duration = Duration::from_secs(60);

/// Measure what the admission policies cost pods that ask for gpu-mem and pods that do not.
#[derive(Parser)]
struct Args {
    /// Builds of the manifests: name=kustomization, comma separated
    #[arg(long, value_delimiter = ',', default_value = "now=manifests/base")]
    policies: Vec<String>,
    /// CREATEs of each pod on each API server, in turn
    #[arg(long, default_value_t = 40)]
    rounds: usize,
    /// Seconds after which no further round of a pod begins
    #[arg(long, default_value_t = 60)]
    patience: u64,
    /// Measure only pods whose name in the table holds this text
    #[arg(long, default_value = "")]
    pod: String,
}

/// An API server with the policies of one build, or with none.
struct Side {
    name: String,
    client: Client,
    cluster: ControlPlane,
}

impl Side {
    async fn start(name: &str, kustomization: Option<PathBuf>) -> Result<Side> {
        eprintln!("starting the control plane {name}");
        let cluster = ControlPlane::start(Options::default()).await?;
        let client = cluster.admin()?;
        if let Some(path) = kustomization {
            let path = path.to_str().context("path of the manifests")?;
            cluster
                .kubectl(&["apply", "--server-side", "-k", path])
                .await?;
            let wrong = pod(json!({ names::EPOCH: "1" }), 1, |_| json!({}));
            eventually(SOON, "the policies are in force", async || {
                match create(&client, &serde_json::to_vec(&wrong)?).await? {
                    (_, true) => bail!("somebody may write {}", names::EPOCH),
                    (_, false) => Ok(()),
                }
            })
            .await?;
        }
        Ok(Side {
            name: name.to_owned(),
            client,
            cluster,
        })
    }

    /// What its API server has computed, all threads together, in milliseconds.
    fn cpu(&self) -> Result<f64> {
        let tasks = format!("/proc/{}/task", self.cluster.api_server.id());
        let mut nanos = 0.0;
        for task in std::fs::read_dir(tasks)? {
            // A thread may end meanwhile.
            let stat = std::fs::read_to_string(task?.path().join("schedstat")).unwrap_or_default();
            let first = stat.split_whitespace().next();
            nanos += first.and_then(|it| it.parse::<f64>().ok()).unwrap_or(0.0);
        }
        Ok(nanos / 1e6)
    }

    /// One CREATE: milliseconds, the API server's CPU milliseconds, and whether the pod was admitted.
    async fn create(&self, body: &[u8]) -> Result<(f64, f64, bool)> {
        let before = self.cpu()?;
        let (ms, ok) = create(&self.client, body).await?;
        Ok((ms, self.cpu()? - before, ok))
    }
}

/// What CREATEs of one pod took on one side.
#[derive(Default)]
struct Took {
    ms: Vec<f64>,
    cpu: Vec<f64>,
    refused: bool,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let mut sides = vec![Side::start("without", None).await?];
    for policies in &args.policies {
        let (name, path) = policies.split_once('=').context("--policies NAME=PATH")?;
        sides.push(Side::start(name, Some(path.into())).await?);
    }
    let heads = sides.iter().skip(1);
    let heads = heads.map(|side| format!(" {} | CPU | CPU ratio |", side.name));
    println!(
        "| pod | rounds | without | CPU |{}",
        heads.collect::<String>()
    );
    println!(
        "|---|---|---|---|{}",
        "---|---|---|".repeat(sides.len() - 1)
    );
    for (what, pod) in pods() {
        if !what.contains(&args.pod) {
            continue;
        }
        let body = serde_json::to_vec(&pod)?;
        let mut took: Vec<Took> = sides.iter().map(|_| Took::default()).collect();
        let began = Instant::now();
        for round in 0..=args.rounds {
            // Each goes first as often as the others.
            let first = round % sides.len();
            for index in (first..sides.len()).chain(0..first) {
                let (ms, cpu, ok) = sides[index].create(&body).await?;
                let took = &mut took[index];
                took.refused = !ok;
                // The first round is not counted: expressions and connections are warm then.
                if round > 0 {
                    took.ms.push(ms);
                    took.cpu.push(cpu);
                }
            }
            if round > 0 && began.elapsed() > Duration::from_secs(args.patience) {
                break;
            }
        }
        for took in &mut took {
            took.ms.sort_by(f64::total_cmp);
            took.cpu.sort_by(f64::total_cmp);
        }
        let base = at(&took[0].cpu, 0.5);
        let columns = took.iter().enumerate().map(|(index, took)| {
            let refused = if took.refused { "refused, " } else { "" };
            let mut text = format!(" {refused}{} | {} |", spread(&took.ms), spread(&took.cpu));
            if index > 0 {
                text += &format!(" {:.2} |", at(&took.cpu, 0.5) / base);
            }
            text
        });
        let columns = columns.collect::<String>();
        println!("| {what} | {} |{columns}", took[0].ms.len());
    }
    Ok(())
}

/// Median and quartiles of sorted times.
fn spread(sorted: &[f64]) -> String {
    let [low, median, high] = [0.25, 0.5, 0.75].map(|q| at(sorted, q));
    format!("{median:.1} ({low:.1} to {high:.1})")
}

/// Of sorted times.
fn at(took: &[f64], q: f64) -> f64 {
    let index = (q * took.len().saturating_sub(1) as f64).round() as usize;
    took.get(index).copied().unwrap_or(f64::NAN)
}

/// Milliseconds, and whether the pod was admitted.
async fn create(client: &Client, body: &[u8]) -> Result<(f64, bool)> {
    let request = hyper::Request::post("/api/v1/namespaces/default/pods?dryRun=All")
        .header("content-type", "application/json")
        .body(body.to_vec())?;
    let began = Instant::now();
    let answer = client.request_text(request).await;
    let took = began.elapsed().as_secs_f64() * 1e3;
    match answer {
        Ok(_) => Ok((took, true)),
        Err(kube::Error::Api(_)) => Ok((took, false)),
        Err(error) => Err(error.into()),
    }
}

/// What is created: pods that ask for nothing, then pods that ask.
fn pods() -> Vec<(String, Value)> {
    let plain = |_| json!({});
    let asks = |_| json!({ "resources": { "limits": { names::GPU_MEM: "1" } } });
    let mut pods = Vec::new();
    for count in [0, 1_000, 10_000, 40_000] {
        let what = format!("asks for nothing, {count} annotations");
        pods.push((what, pod(chaff(count), 1, plain)));
    }
    let many = |_| json!({ "env": variables(1_000) });
    pods.push((
        "asks for nothing, 1,000 variables".to_owned(),
        pod(json!({}), 1, many),
    ));
    for count in [200, 2_000] {
        let what = format!("asks for nothing, {count} containers");
        pods.push((what, pod(json!({}), count, plain)));
    }
    for count in [0, 256] {
        let what = format!("asks, {count} annotations");
        pods.push((what, pod(chaff(count), 1, asks)));
    }
    let many =
        |_| json!({ "env": variables(1_000), "resources": { "limits": { names::GPU_MEM: "1" } } });
    pods.push(("asks, 1,000 variables".to_owned(), pod(json!({}), 1, many)));
    let one = |index| if index == 0 { asks(0) } else { json!({}) };
    pods.push((
        "one of 200 containers asks".to_owned(),
        pod(json!({}), 200, one),
    ));
    pods.push(("200 containers ask".to_owned(), pod(json!({}), 200, asks)));
    pods
}

fn pod(annotations: Value, containers: usize, make: impl Fn(usize) -> Value) -> Value {
    let containers = (0..containers).map(|index| {
        let mut container = make(index);
        container["name"] = json!(format!("c{index}"));
        container["image"] = json!("registry.k8s.io/pause:3.10");
        container
    });
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "generateName": "bench-", "annotations": annotations },
        "spec": { "containers": containers.collect::<Vec<_>>() },
    })
}

/// Annotations that mean nothing; 40,000 of them have 180 KB of the 256 KiB that a pod may have.
fn chaff(count: usize) -> Value {
    let all = (0..count).map(|index| (format!("{index:x}"), json!("")));
    Value::Object(all.collect::<Map<_, _>>())
}

fn variables(count: usize) -> Value {
    let one = |index| json!({ "name": format!("V{index}"), "value": "" });
    (0..count).map(one).collect()
}
