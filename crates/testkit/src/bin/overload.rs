//! Floods on a real control plane: ten thousand pods at once, or a thousand reports a second. In further floods the API
//! server answers after two seconds, callers never end, or the extender never answers. Small pods ask throughout. The
//! results are their waits during each flood and after it, and the extender's largest size.

use std::collections::HashMap;
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use futures::future::try_join_all;
use gpustow_api::{GpuNode, names};
use gpustow_testkit::builders::GpuNodeBuilder;
use gpustow_testkit::{
    Action, ApiProxy, Binds, Case, ControlPlane, Extender, ExtenderOptions, Options, Scheduler,
    Webhook, at_once, built, check_cluster, eventually, quantiles,
};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt as _;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::time::{MissedTickBehavior, interval, sleep};

/// Cards of a node and their size in MiB.
const CARDS: [u64; 2] = [16_384; 2];
/// The request of each pod of the flood, and of each small pod, in MiB. A card that the flood has filled has room left
/// for small pods.
const LARGE: u64 = 1_900;
const SMALL: u64 = 256;
/// Small pods per second.
const RATE: u64 = 5;
/// Requests at once.
const WIDTH: usize = 64;
/// Calls of kube-scheduler's that are begun and never ended: more than the extender takes connections.
const CALLERS: usize = 1_100;
/// For all that fits to be bound, or to be gone.
const SETTLED: Duration = Duration::from_secs(600);
const CLASS: &str = "overload";
/// The label of a flood's pods, and of the small pods next to them.
const PART: &str = "overload/part";

/// Flood gpustow on a real control plane.
#[derive(Parser)]
struct Args {
    /// Pods that are created at once, of which those for which the cluster has room are bound
    #[arg(long, default_value_t = 10_000)]
    pods: usize,
    /// Reports of agents per second
    #[arg(long, default_value_t = 1_000)]
    reports: u64,
    /// Seconds of each flood but the first
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Nodes with two cards each
    #[arg(long, default_value_t = 200)]
    nodes: usize,
    /// Further arguments of the extender
    #[arg(long, allow_hyphen_values = true)]
    extender: Vec<String>,
    /// Set a field of the GpustowConfig, as --config 'queue: {mode: Auto}'
    #[arg(long, value_name = "FIELD")]
    config: Vec<String>,
    /// The extender's binary
    #[arg(long, default_value = "target/debug/gpustow")]
    gpustow: PathBuf,
}

/// When pods were bound.
type Bound = Arc<Mutex<HashMap<String, Instant>>>;

struct World {
    case: Case,
    nodes: Vec<GpuNodeBuilder>,
    extender: Extender,
    proxy: ApiProxy,
    bound: Bound,
}

/// The result of a flood.
struct Flood {
    what: String,
    /// Milliseconds from creation to bound of the small pods, ascending: during the flood, and after it.
    waits: [Vec<f64>; 2],
    /// From the flood's end to the first small pod bound that was created after it, in seconds.
    recovered: f64,
    /// The extender's MiB and open descriptors: before, at most, after.
    sizes: [(f64, usize); 3],
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    built(&args.gpustow, "cargo build --bin gpustow")?;
    ensure!(args.nodes > 0 && args.reports > 0, "give nodes and reports");
    eprintln!("starting the control plane and {} nodes", args.nodes);
    let cluster = ControlPlane::start(Options::default()).await?;
    let overlay = "manifests/overlays/queue";
    cluster.kubectl(&["apply", "-k", overlay]).await?;
    Webhook::keep(&cluster, &args.gpustow).await?;
    let proxy = ApiProxy::start(&cluster).await?;
    let through = cluster.kubeconfig(names::NAMESPACE, names::SCHEDULER, Some(proxy.url()));
    let options = ExtenderOptions {
        args: args.extender.clone(),
        config: Some(args.config.clone()),
        ..ExtenderOptions::default()
    };
    let extender = Extender::start(&cluster, &args.gpustow, &through.await?, options).await?;
    let _scheduler = Scheduler::calling(&cluster, ".".as_ref(), &extender).await?;
    let case = Case::new(&cluster, "overload").await?;
    let nodes: Vec<_> = (0..args.nodes)
        .map(|node| case.node(&format!("n{node:04}"), &CARDS))
        .collect();
    at_once(WIDTH, &nodes, |node| node.create(&case.client)).await?;
    // Before all others, and without a victim.
    let class = json!({
        "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
        "metadata": { "name": CLASS }, "value": 1000, "preemptionPolicy": "Never",
    });
    cluster.apply(&class.to_string()).await?;
    let bound = Bound::default();
    let binds = Binds::of(case.pods(), None).await?;
    let watching = tokio::spawn(watch(binds, bound.clone()));
    let world = World {
        case,
        nodes,
        extender,
        proxy,
        bound,
    };
    head(&args);
    let ended = world.floods(&args).await;
    watching.abort();
    ended
}

/// Notes when pods are bound, for as long as it is polled.
async fn watch(mut binds: Binds, bound: Bound) {
    while let Ok((pod, _)) = binds.next("").await {
        let mut bound = bound.lock().unwrap_or_else(PoisonError::into_inner);
        bound.entry(pod).or_insert_with(Instant::now);
    }
}

impl World {
    async fn floods(&self, args: &Args) -> Result<()> {
        let seconds = Duration::from_secs(args.seconds);
        let nothing = async || sleep(seconds).await;
        let none = self.during("nothing", async || {
            nothing().await;
            Ok(())
        });
        row(&none.await?);
        let mut took = (0.0, 0.0);
        let mut pods = self
            .during("pods", async || {
                took = self.pods(args).await?;
                Ok(())
            })
            .await?;
        pods.what = format!(
            "{} pods at once: created in {:.0} s, all that fit bound after {:.0} s",
            args.pods, took.0, took.1
        );
        row(&pods);
        let mut written = 0;
        let mut reports = self
            .during("reports", async || {
                written = self.reports(args.reports, seconds).await?;
                Ok(())
            })
            .await?;
        let rate = written as f64 / args.seconds as f64;
        reports.what = format!("{rate:.0} reports of agents a second");
        row(&reports);
        let slow = async || {
            let late = Action::DelayReply(Duration::from_secs(2));
            let _rule = self.proxy.rule(|_, _| true, late);
            nothing().await;
            Ok(())
        };
        let name = "the API server answers the extender after 2 s";
        row(&self.during(name, slow).await?);
        let callers = async || {
            let address = self.extender.url.trim_start_matches("http://");
            let mut open = Vec::new();
            for _ in 0..CALLERS {
                // A door that is shut is an answer too.
                let Ok(mut caller) = TcpStream::connect(address).await else {
                    continue;
                };
                let head = b"POST /filter HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{";
                if caller.write_all(head).await.is_ok() {
                    open.push(caller);
                }
            }
            nothing().await;
            drop(open);
            Ok(())
        };
        let name = format!("{CALLERS} callers of /filter that never end");
        row(&self.during(&name, callers).await?);
        let frozen = async || {
            self.extender.process.stop()?;
            nothing().await;
            self.extender.process.cont()
        };
        let name = "an extender that never answers";
        row(&self.during(name, frozen).await?);
        Ok(())
    }

    /// Has small pods ask during a flood and after it.
    async fn during(&self, what: &str, flood: impl AsyncFnOnce() -> Result<()>) -> Result<Flood> {
        eprintln!("{what}");
        let before = self.size()?;
        let mut most = before;
        let mut small = HashMap::new();
        {
            let sampled = async {
                loop {
                    let size = self.size()?;
                    most = (most.0.max(size.0), most.1.max(size.1));
                    sleep(Duration::from_millis(200)).await;
                }
            };
            let coming = self.small_pods("during", &mut small);
            tokio::select! {
                ended = flood() => ended?,
                ended = sampled => return ended,
                ended = coming => match ended? {},
            }
        }
        let end = Instant::now();
        let first = self.small("recovered").await?;
        let recovered = self.bound_at("recovered").await?.duration_since(end);
        let waits = self.waits(small).await?;
        let mut after = HashMap::from([("recovered".to_owned(), first)]);
        {
            let coming = self.small_pods("after", &mut after);
            tokio::select! {
                () = sleep(Duration::from_secs(20)) => {}
                ended = coming => match ended? {},
            }
        }
        let after = self.waits(after).await?;
        check_cluster(&self.case.client, None).await?;
        self.clear().await?;
        Ok(Flood {
            what: what.to_owned(),
            waits: [waits, after],
            recovered: recovered.as_secs_f64(),
            sizes: [before, most, self.size()?],
        })
    }

    /// Creates a small pod, and returns the time.
    async fn small(&self, name: &str) -> Result<Instant> {
        let pod = self.case.pod(name).gpu_mem(SMALL);
        let at = Instant::now();
        let pod = pod.label(PART, "small").priority_class(CLASS);
        pod.create(&self.case.client).await?;
        Ok(at)
    }

    /// Creates small pods for as long as it is polled.
    async fn small_pods(
        &self,
        name: &str,
        created: &mut HashMap<String, Instant>,
    ) -> Result<Infallible> {
        let mut pace = interval(Duration::from_secs(1) / u32::try_from(RATE)?);
        pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            pace.tick().await;
            let name = format!("{name}-{}", created.len());
            let at = self.small(&name).await?;
            created.insert(name, at);
        }
    }

    async fn bound_at(&self, name: &str) -> Result<Instant> {
        eventually(SETTLED, &format!("{name} is bound"), async || {
            let bound = self.bound.lock().unwrap_or_else(PoisonError::into_inner);
            bound.get(name).copied().context("it is not")
        })
        .await
    }

    /// Milliseconds until these were bound, ascending.
    async fn waits(&self, created: HashMap<String, Instant>) -> Result<Vec<f64>> {
        let mut waits = Vec::new();
        for (name, at) in created {
            let bound = self.bound_at(&name).await?;
            waits.push(bound.duration_since(at).as_secs_f64() * 1e3);
        }
        waits.sort_by(f64::total_cmp);
        Ok(waits)
    }

    /// Creates so many pods at once; seconds until all were created, and until all that fit were bound.
    async fn pods(&self, args: &Args) -> Result<(f64, f64)> {
        let began = Instant::now();
        at_once(WIDTH, 0..args.pods, async |index| {
            let pod = self.case.pod(&format!("flood-{index}")).gpu_mem(LARGE);
            pod.label(PART, "flood").create(&self.case.client).await
        })
        .await?;
        let made = began.elapsed().as_secs_f64();
        // A place is left for the small ones, on each card if it must be.
        let cards = self.nodes.len() * CARDS.len();
        let fit = (cards * usize::try_from(CARDS[0] / LARGE - 1)?).min(args.pods);
        eventually(SETTLED, "all that fit are bound", async || {
            let bound = self.bound.lock().unwrap_or_else(PoisonError::into_inner);
            let bound = bound.keys().filter(|name| name.starts_with("flood-"));
            let bound = bound.count();
            ensure!(bound >= fit, "{bound} of {fit} are");
            Ok(())
        })
        .await?;
        Ok((made, began.elapsed().as_secs_f64()))
    }

    /// Repeats agents' reports at this rate; how many.
    async fn reports(&self, rate: u64, last: Duration) -> Result<usize> {
        let end = Instant::now() + last;
        let each = Duration::from_secs(WIDTH as u64) / u32::try_from(rate)?;
        let gpunodes = &Api::<GpuNode>::all(self.case.client.clone());
        let writers = (0..WIDTH).map(|writer| async move {
            let mut pace = interval(each);
            pace.set_missed_tick_behavior(MissedTickBehavior::Burst);
            let mut written = 0;
            while Instant::now() < end {
                pace.tick().await;
                let node = &self.nodes[(writer + written * WIDTH) % self.nodes.len()];
                let mut status = node.status.clone();
                status.heartbeat = Some(Timestamp::now().to_string());
                for gpu in &mut status.gpus {
                    gpu.unmanaged_mib = written as u64 % 2 * 128;
                }
                let status = Patch::Merge(json!({ "status": status }));
                let params = PatchParams::default();
                gpunodes
                    .patch_status(&node.node.name_any(), &params, &status)
                    .await?;
                written += 1;
            }
            anyhow::Ok(written)
        });
        Ok(try_join_all(writers).await?.into_iter().sum())
    }

    /// Deletes all pods.
    async fn clear(&self) -> Result<()> {
        self.case.clear(None, SETTLED).await?;
        let mut bound = self.bound.lock().unwrap_or_else(PoisonError::into_inner);
        bound.clear();
        Ok(())
    }

    /// Resident MiB and open descriptors of the extender.
    fn size(&self) -> Result<(f64, usize)> {
        let process = &self.extender.process;
        Ok((process.resident()?, process.open_files()?))
    }
}

fn head(args: &Args) {
    println!(
        "{} nodes, {RATE} small pods a second; milliseconds from creation to bound, p50 / p99 / worst, extender's MiB \
         and open descriptors, before / most / after\n\n\
         | flood | during it | after it | first bound after | MiB | descriptors |\n|---|---|---|---|---|---|",
        args.nodes
    );
}

fn row(flood: &Flood) {
    let waits = flood.waits.each_ref();
    let [during, after] = waits.map(|waits| quantiles(waits, [0.5, 0.99, 1.0], 0));
    let [before, most, left] = flood.sizes;
    println!(
        "| {} | {during} | {after} | {:.1} s | {:.0} / {:.0} / {:.0} | {} / {} / {} |",
        flood.what, flood.recovered, before.0, most.0, left.0, before.1, most.1, left.1
    );
}
