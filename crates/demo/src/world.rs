//! One simulated cluster under one policy: API server, agents, extender, scheduler, and a hand that
//! creates pods, runs them as kubelets would, and removes them when their time is over.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::future::pending;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use axum::http::Request;
use clap::Parser as _;
use gpustow_api::{config, names};
use gpustow_pack::PolicyKind;
use kube::{Client, Config};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::time::{sleep, sleep_until, timeout};

use super::api_server::router;
use super::picture::Picture;
use super::scheduler::{Latencies, Scheduler};
use super::store::{Change, Key, Refused, Store};
use super::workload::{NAMESPACE, RAMP, SPAN, Workload};

/// Bound on the start of the agents, and on the extender's.
const START: Duration = Duration::from_secs(20);

/// Virtual time: runs `speed` times as fast as real time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    pub(crate) start: Instant,
    pub(crate) speed: f64,
}

impl Clock {
    /// Virtual time since the start, at most [`SPAN`].
    pub(crate) fn now(&self) -> Duration {
        self.start.elapsed().mul_f64(self.speed).min(SPAN)
    }

    fn real(&self, at: Duration) -> tokio::time::Instant {
        (self.start + at.div_f64(self.speed)).into()
    }
}

/// What is counted. Every pod that arrived is waiting, running or finished.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) arrived: usize,
    pub(crate) finished: usize,
    /// Cards found over-committed, and bound pods found without cards, over all looks.
    pub(crate) broken: usize,
    /// Virtual time that the pods waited which are bound.
    waited: Duration,
    /// When those came that wait.
    waiting: HashMap<String, Duration>,
    /// Σ allocated share × virtual seconds, and the seconds, since the ramp.
    allocated: (f64, f64),
    /// Virtual time up to which that is summed.
    until: Duration,
}

impl Tally {
    /// Mean virtual time from arrival to bind, those that still wait at `now` included.
    pub(crate) fn mean_wait(&self, now: Duration) -> Duration {
        let still = self.waiting.values().map(|at| now.saturating_sub(*at));
        let all = self.waited + still.sum::<Duration>();
        all.div_f64(self.arrived.max(1) as f64)
    }

    /// Mean share of the cluster's GPU memory that pods held since the ramp, 0 to 1; none before
    /// it is over.
    pub(crate) fn mean_allocated(&self) -> Option<f64> {
        let (sum, seconds) = self.allocated;
        (seconds > 0.0).then(|| sum / seconds)
    }

    fn pass(&mut self, now: Duration, allocated: f64) {
        let passed = now.saturating_sub(self.until.max(RAMP)).as_secs_f64();
        self.allocated.0 += allocated * passed;
        self.allocated.1 += passed;
        self.until = now;
    }
}

/// A cluster under a policy. What it shows may be looked at while it runs.
pub(crate) struct World {
    pub(crate) policy: PolicyKind,
    pub(crate) store: Arc<Store>,
    pub(crate) latencies: Arc<Mutex<Latencies>>,
    tally: Mutex<Tally>,
    workload: Arc<Workload>,
    folder: PathBuf,
}

impl World {
    /// The nodes, and no pods yet. Its files are below `folder`.
    ///
    /// # Errors
    /// If two nodes have one name, which is a mistake in the workload.
    pub(crate) fn new(policy: PolicyKind, workload: Arc<Workload>, folder: &Path) -> Result<Self> {
        let store = Store::new();
        let config = json!({
            "apiVersion": format!("{}/{}", names::GROUP, names::VERSION), "kind": "GpustowConfig",
            "metadata": {"name": config::NAME},
            "spec": {"scheduling": {"policy": policy.name()}},
        });
        store.create("gpustowconfigs", config).map_err(error)?;
        for (node, _) in &workload.nodes {
            store.create("nodes", node.clone()).map_err(error)?;
        }
        Ok(Self {
            policy,
            store: Arc::new(store),
            latencies: Arc::default(),
            tally: Mutex::default(),
            workload,
            folder: folder.to_owned(),
        })
    }

    /// A file with which kubectl's plugins can look at the cluster once it is started.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.folder.join(format!("{}.kubeconfig", self.policy))
    }

    pub(crate) fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the API server, the agents with their cards in files, and the extender, and returns
    /// when all are ready: a scheduler to run.
    ///
    /// # Errors
    /// If they do not start.
    pub(crate) async fn start(&self) -> Result<Scheduler> {
        let (api, api_address) = listen().await?;
        tokio::spawn(axum::serve(api, router(self.store.clone())).into_future());
        std::fs::write(self.kubeconfig(), kubeconfig(api_address).to_string())?;
        let api = client(api_address)?;
        self.start_agents(&api).await?;
        let (verbs, address) = listen().await?;
        let (health, health_address) = listen().await?;
        let args = gpustow::Args::try_parse_from(["gpustow"])?;
        // If it ends, the scheduler's next call fails.
        tokio::spawn(gpustow::serve(args, api, verbs, health, pending()));
        let health = client(health_address)?;
        let ready = async {
            while health
                .request_text(Request::get("/readyz").body(Vec::new())?)
                .await
                .is_err()
            {
                sleep(Duration::from_millis(10)).await;
            }
            anyhow::Ok(())
        };
        let ready = timeout(START, ready).await;
        ready.context("the extender does not become ready")??;
        Scheduler::new(self.store.clone(), client(address)?, self.latencies.clone())
    }

    /// An agent per node; returns when each has reported and its node has that capacity.
    async fn start_agents(&self, api: &Client) -> Result<()> {
        for (node, machine) in &self.workload.nodes {
            let name = node["metadata"]["name"].as_str().context("no name")?;
            let file = self.folder.join(format!("{}-{name}.yaml", self.policy));
            machine.write(&file)?;
            let args = gpustow_agent::Args::try_parse_from([
                "gpustow-agent",
                &format!("--node-name={name}"),
                &format!("--devices=fake:{}", file.display()),
                &format!(
                    "--pod-resources={}",
                    self.folder.join("no-kubelet").display()
                ),
            ])?;
            let (health, _) = listen().await?;
            let agent = gpustow_agent::serve(args, api.clone(), health, pending());
            tokio::spawn(agent);
        }
        let mut changed = self.store.subscribe();
        let reported = async {
            while !self.has_cards() {
                changed.changed().await?;
            }
            anyhow::Ok(())
        };
        let reported = timeout(START, reported).await;
        reported.context("the agents do not report")?
    }

    fn has_cards(&self) -> bool {
        let reports = self.store.list("gpunodes").1;
        let has_report = |report: &Arc<Value>| report.get("status").is_some();
        let nodes = self.store.list("nodes").1;
        let has_memory = |node: &Arc<Value>| {
            let allocatable = node.pointer("/status/allocatable");
            allocatable.is_some_and(|list| list.get(names::GPU_MEM).is_some())
        };
        reports.len() == nodes.len()
            && reports.iter().all(has_report)
            && nodes.iter().all(has_memory)
    }

    /// Lets the workload happen, to its end.
    ///
    /// # Errors
    /// If the extender cannot be reached.
    pub(crate) async fn live(&self, scheduler: Scheduler, clock: Clock) -> Result<()> {
        tokio::select! {
            ended = scheduler.run() => ended,
            ended = self.happen(clock) => ended,
        }
    }

    async fn happen(&self, clock: Clock) -> Result<()> {
        let pods = self.workload.pods.iter();
        let runs_for: HashMap<&str, Duration> =
            pods.clone().map(|pod| (&*pod.name, pod.runs_for)).collect();
        let mut arrivals = pods.peekable();
        let mut departures = BinaryHeap::new();
        let mut changed = self.store.subscribe();
        let mut seen = *changed.borrow_and_update();
        let mut allocated = 0.0;
        loop {
            let now = clock.now();
            let mut moved = false;
            self.tally().pass(now, allocated);
            while let Some(pod) = arrivals.next_if(|pod| pod.at <= now) {
                self.store.create("pods", pod.pod.clone()).map_err(error)?;
                let mut tally = self.tally();
                tally.arrived += 1;
                tally.waiting.insert(pod.name.clone(), now);
            }
            while departures.peek().is_some_and(|Reverse((at, _))| *at <= now) {
                if let Some(Reverse((_, name))) = departures.pop() {
                    self.store.delete(key(name)).map_err(error)?;
                    self.tally().finished += 1;
                    moved = true;
                }
            }
            changed.borrow_and_update();
            for change in self.store.since(seen).map_err(error)? {
                seen = change.version;
                let Some(name) = newly_bound(&change) else {
                    continue;
                };
                let Some((name, run)) = runs_for.get_key_value(name) else {
                    continue;
                };
                departures.push(Reverse((now + *run, *name)));
                let running = json!({"status": {"phase": "Running"}});
                self.store
                    .patch_status(key(name), &running, false)
                    .map_err(error)?;
                let mut tally = self.tally();
                moved = true;
                let came = tally.waiting.remove(*name).unwrap_or(now);
                tally.waited += now.saturating_sub(came);
            }
            if moved {
                let picture = Picture::of(&self.store);
                allocated = picture.allocated();
                self.tally().broken += picture.over_committed() + picture.lost;
            }
            if now >= SPAN {
                return Ok(());
            }
            let arrival = arrivals.peek().map(|pod| pod.at);
            let departure = departures.peek().map(|Reverse((at, _))| *at);
            let next = arrival
                .into_iter()
                .chain(departure)
                .fold(SPAN, Duration::min);
            tokio::select! {
                () = sleep_until(clock.real(next)) => {}
                _ = changed.changed() => {}
            }
        }
    }
}

/// The name of the pod that this change bound.
fn newly_bound(change: &Change) -> Option<&str> {
    let (old, new) = (change.old.as_ref()?, change.new.as_ref()?);
    let node = |pod: &Value| pod.pointer("/spec/nodeName").is_some();
    let bound = change.resource == "pods" && !node(old) && node(new);
    bound
        .then(|| new.pointer("/metadata/name")?.as_str())
        .flatten()
}

fn key(pod: &str) -> Key {
    ("pods".to_owned(), NAMESPACE.to_owned(), pod.to_owned())
}

async fn listen() -> Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

fn client(server: SocketAddr) -> Result<Client> {
    let mut config = Config::new(format!("http://{server}").parse()?);
    config.default_retry = false;
    Ok(Client::try_from(config)?)
}

fn kubeconfig(server: SocketAddr) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "demo",
        "clusters": [{"name": "demo", "cluster": {"server": format!("http://{server}")}}],
        "contexts": [{"name": "demo", "context": {"cluster": "demo", "user": "demo"}}],
        "users": [{"name": "demo", "user": {}}],
    })
}

fn error(refused: Refused) -> anyhow::Error {
    anyhow!(refused.message)
}
