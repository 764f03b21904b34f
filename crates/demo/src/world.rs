//! One simulated cluster under one policy: API server, agents, extender, scheduler, and a hand that
//! creates pods, runs them as kubelets would, and removes them when their time is over.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use axum::http::Request;
use clap::Parser as _;
use gpustow::Extender;
use gpustow_agent::Work;
use gpustow_agent::devices::{Card, Memory, Reading};
use gpustow_agent::sampler::Sampler;
use gpustow_api::{config, names};
use gpustow_pack::PolicyKind;
use gpustow_simworld as simworld;
use gpustow_simworld::{Change, Copy, Key, Kind, Refusal, Server, locked};
use kube::Client;
use serde_json::{Value, json};
use tokio::time::{Instant, interval, sleep, sleep_until, timeout};

use super::api_server::{Shared, all, router};
use super::picture::{Frame, Picture};
use super::scheduler::Scheduler;
use super::tally::Tally;
use super::workload::{Host, NAMESPACE, SPAN, Workload};

/// Virtual seconds per second of the paused clock, which extender and agents follow. It is slow enough that their pauses
/// do not show.
const SPEED: f64 = 60.0;
/// Before each look of the scheduler: longer than any pause of the extender between an event and its answer.
const LOOK: Duration = Duration::from_millis(50);
/// Virtual time between two looks that [`World::frames`] keeps.
pub(crate) const FRAME: Duration = Duration::from_secs(15 * 60);
/// How often an agent looks at its GPUs.
const SAMPLE: Duration = Duration::from_secs(5);
/// Bound on the start of the agents, and on the extender's.
const START: Duration = Duration::from_secs(20);

/// Virtual time, from the start of the runtime's paused clock on.
#[derive(Clone, Copy, Debug)]
struct Clock(Instant);

impl Clock {
    /// Virtual time since the start, at most [`SPAN`].
    fn now(self) -> Duration {
        self.0.elapsed().mul_f64(SPEED).min(SPAN)
    }

    fn paused(self, at: Duration) -> Instant {
        self.0 + at.div_f64(SPEED)
    }
}

/// A cluster under a policy.
pub(crate) struct World {
    pub(crate) policy: PolicyKind,
    pub(crate) server: Shared,
    tally: Mutex<Tally>,
    frames: Mutex<Vec<Frame>>,
    workload: Arc<Workload>,
}

impl World {
    /// The nodes, and no pods yet.
    ///
    /// # Errors
    /// If two nodes have one name, which is a mistake in the workload.
    pub(crate) fn new(policy: PolicyKind, workload: Arc<Workload>) -> Result<Self> {
        let mut server = Server::default();
        let config = json!({
            "metadata": {"name": config::NAME},
            // A pod that is preempted does not come back here.
            "spec": {"scheduling": {"policy": policy.name()}, "preempt": {"fragmented": false}},
        });
        server
            .create(Kind::GpustowConfig, "", config)
            .map_err(error)?;
        for Host { node, .. } in &workload.nodes {
            server.create(Kind::Node, "", node.clone()).map_err(error)?;
        }
        Ok(Self {
            policy,
            server: Arc::new(Mutex::new(server)),
            tally: Mutex::default(),
            frames: Mutex::default(),
            workload,
        })
    }

    pub(crate) fn tally(&self) -> MutexGuard<'_, Tally> {
        locked(&self.tally)
    }

    /// Pictures of the cluster, one every [`FRAME`].
    pub(crate) fn frames(&self) -> Vec<Frame> {
        locked(&self.frames).clone()
    }

    /// Starts the agents and the extender, and returns when all are ready: a scheduler to run.
    ///
    /// # Errors
    /// If they do not start.
    pub(crate) async fn start(&self) -> Result<Scheduler> {
        let api = || Client::new(router(self.server.clone()), "default");
        self.start_agents(api).await?;
        let extender = Extender::new(gpustow::Args::try_parse_from(["gpustow"])?, api())?;
        extender.start();
        let health = Client::new(extender.health(), "default");
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
        let extender = simworld::Extender(extender.scheduler());
        Scheduler::new(self.server.clone(), extender, LOOK)
    }

    /// An agent per node; returns when each has reported and its node has that capacity.
    async fn start_agents(&self, api: impl Fn() -> Client) -> Result<()> {
        for Host { node, gpus } in &self.workload.nodes {
            let name = node["metadata"]["name"].as_str().context("no name")?;
            let args = gpustow_agent::Args::try_parse_from([
                "gpustow-agent",
                &format!("--node-name={name}"),
                "--pod-resources=/nowhere",
                "--cgroup=/nowhere",
            ])?;
            let work = Work::new(args, api(), name)?;
            let sampler = Arc::new(Sampler::default());
            let (samples, reading) = (sampler.clone(), reading(name, gpus));
            tokio::spawn(async move {
                let mut due = interval(SAMPLE);
                loop {
                    due.tick().await;
                    samples.put(Ok(reading.clone()), Duration::ZERO);
                }
            });
            tokio::spawn(async move { work.run(&sampler).await });
        }
        let mut changed = locked(&self.server).news();
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
        let reports = all(&self.server, Kind::GpuNode);
        let has_report = |report: &Copy| report.get("status").is_some();
        let nodes = all(&self.server, Kind::Node);
        let has_memory = |node: &Copy| {
            let allocatable = node.pointer("/status/allocatable");
            allocatable.is_some_and(|list| list.get(names::GPU_MEM).is_some())
        };
        reports.len() == nodes.len()
            && reports.iter().all(has_report)
            && nodes.iter().all(has_memory)
    }

    /// Lets the workload happen, to its end. Writes the virtual seconds that have passed to `lived`.
    ///
    /// # Errors
    /// If the extender cannot be reached.
    pub(crate) async fn live(&self, scheduler: Scheduler, lived: &AtomicU64) -> Result<()> {
        tokio::select! {
            ended = scheduler.run() => ended,
            ended = self.happen(Clock(Instant::now()), lived) => ended,
        }
    }

    async fn happen(&self, clock: Clock, lived: &AtomicU64) -> Result<()> {
        let pods = self.workload.pods.iter();
        let runs_for: HashMap<&str, Duration> =
            pods.clone().map(|pod| (&*pod.name, pod.runs_for)).collect();
        let mut arrivals = pods.peekable();
        let mut departures = BinaryHeap::new();
        let mut changed = locked(&self.server).news();
        let mut seen = *changed.borrow_and_update();
        let (mut allocated, mut running) = (0.0, 0);
        let mut frame = FRAME;
        loop {
            let now = clock.now();
            lived.store(now.as_secs(), Ordering::Relaxed);
            let mut moved = false;
            self.tally().pass(now, allocated, running);
            while let Some(pod) = arrivals.next_if(|pod| pod.at <= now) {
                let made = locked(&self.server).create(Kind::Pod, NAMESPACE, pod.pod.clone());
                made.map_err(error)?;
                self.tally().arrive(&pod.name, now);
            }
            while departures.peek().is_some_and(|Reverse((at, _))| *at <= now) {
                if let Some(Reverse((_, name))) = departures.pop() {
                    locked(&self.server).end(key(name));
                    self.tally().finished += 1;
                    moved = true;
                }
            }
            changed.borrow_and_update();
            let changes = locked(&self.server).since(seen).map(<[_]>::to_vec);
            for change in changes.map_err(error)? {
                seen = change.version;
                let Some(name) = newly_bound(&change) else {
                    continue;
                };
                let Some((name, run)) = runs_for.get_key_value(name) else {
                    continue;
                };
                departures.push(Reverse((now + *run, *name)));
                let running = json!({"status": {"phase": "Running"}});
                locked(&self.server)
                    .patch(key(name), &running, false, true)
                    .map_err(error)?;
                self.tally().start(name, now);
                moved = true;
            }
            if moved {
                let picture = Picture::of(&self.server);
                (allocated, running) = (picture.allocated(), picture.running);
                self.tally().broken += picture.over_committed() + picture.lost;
            }
            if now >= frame {
                frame += FRAME;
                let picture = Picture::of(&self.server);
                locked(&self.frames).push(Frame { at: now, picture });
            }
            if now >= SPAN {
                return Ok(());
            }
            let arrival = arrivals.peek().map(|pod| pod.at);
            let departure = departures.peek().map(|Reverse((at, _))| *at);
            let next = arrival
                .into_iter()
                .chain(departure)
                .fold(SPAN.min(frame), Duration::min);
            tokio::select! {
                () = sleep_until(clock.paused(next)) => {}
                _ = changed.changed() => {}
            }
        }
    }
}

/// The name of the pod that this change bound.
fn newly_bound(change: &Change) -> Option<&str> {
    let (old, new) = (change.before.as_ref()?, change.after.as_ref()?);
    let node = |pod: &Value| pod.pointer("/spec/nodeName").is_some();
    let bound = change.kind == Kind::Pod && !node(old) && node(new);
    bound
        .then(|| new.pointer("/metadata/name")?.as_str())
        .flatten()
}

fn key(pod: &str) -> Key {
    (Kind::Pod, NAMESPACE.to_owned(), pod.to_owned())
}

/// The driver's reading on such a node while no program runs.
fn reading(node: &str, gpus: &[(&str, u64)]) -> Reading {
    let cards = gpus.iter().zip(0..).map(|(&(model, mib), index)| Card {
        uuid: format!("GPU-{node}-{index}"),
        index,
        model: model.to_owned(),
        memory: Some(Memory {
            total: mib << 20,
            ..Memory::default()
        }),
        processes: Some(Vec::new()),
        ..Card::default()
    });
    Reading {
        cards: cards.collect(),
        ..Reading::default()
    }
}

fn error(Refusal(_, _, message): Refusal) -> anyhow::Error {
    anyhow!(message)
}
