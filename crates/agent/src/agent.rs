//! The loop: samples, the node's pods and the node itself come in; reports, capacity,
//! confirmations and Events go out.

use std::collections::{HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::{Stream, StreamExt};
use gpustow_api::gpunode::GpuNodeStatus;
use gpustow_api::names;
use gpustow_api::sharers;
use gpustow_pack::Mib;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Api;
use kube::runtime::events::EventType;
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, watcher as watch};
use tokio::time::Instant;

use crate::args::Args;
use crate::capacity::{Capacity, Cards};
use crate::claims::{self, ClaimName, Claims, Holding, Slices};
use crate::clock::{Clock, Now};
use crate::cluster::{Cluster, ClusterError, OwnNode, labels};
use crate::devices::{Reading, Wanted};
use crate::giveback::GiveBack;
use crate::instances;
use crate::kill;
use crate::metrics::Metrics;
use crate::mps;
use crate::notices::{Notice, Notices};
use crate::podresources::{self, PodResourcesError};
use crate::pods::{NodePod, NodePods};
use crate::processes::Processes;
use crate::sampler::{Sample, Sampler};
use crate::state::State;

/// The interval between two requests to the kubelet for devices that pods got from device plugins and claims.
const POD_RESOURCES_PERIOD: Duration = Duration::from_secs(2);
/// After this long, a claim's device that was not found is looked up again.
const LOOK_AGAIN: Duration = Duration::from_secs(30);
/// So many claims are read at a time.
const CLAIMS_AT_ONCE: usize = 64;
/// Between two questions to a control daemon of MPS that answers. One that does not is asked at every sample.
const MPS_PERIOD: Duration = Duration::from_secs(5);
/// The node is labelled as known so long after its first report: extenders delete the placeholders that it answers by then,
/// and no autoscaler adds another node for one that its label keeps off.
const KNOWN_AFTER: Duration = Duration::from_secs(5);
/// Longest pause after writes that failed.
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// Events that are kept until the API server takes them.
const MAX_UNTOLD: usize = 256;

/// The state that the health endpoints and the loop share.
pub(crate) struct Shared {
    pub(crate) metrics: Metrics,
    /// A report was written and samples come in.
    pub(crate) ready: AtomicBool,
}

/// The agent of one node.
pub(crate) struct Agent {
    args: Args,
    cluster: Cluster,
    shared: Arc<Shared>,
    state: State,
    processes: Processes,
    wanted: Arc<Wanted>,
    capacity: Capacity,
    clock: Clock,
    notices: Notices,
    give_back: GiveBack,
    /// Notices that the agent could not write. It tries them again.
    untold: VecDeque<Notice>,
    pods: NodePods,
    pods_listed: bool,
    node: Option<OwnNode>,
    holdings: Vec<Holding>,
    slices: Slices,
    claims: Claims,
    next_look: Instant,
    next_mps: Instant,
    owned: bool,
    published: Option<GpuNodeStatus>,
    first_report: Option<Instant>,
    heartbeat: Instant,
    failures: u32,
    next_write: Instant,
}

impl Agent {
    pub(crate) fn new(
        args: Args,
        cluster: Cluster,
        shared: Arc<Shared>,
        wanted: Arc<Wanted>,
        before: Option<&GpuNodeStatus>,
    ) -> Self {
        let clock = Clock::start();
        Self {
            state: State::new(args.settings(), before, clock.now()),
            processes: Processes::new(args.proc.clone()),
            wanted,
            capacity: Capacity::new(args.shrink_after, before.map(cards)),
            clock,
            notices: Notices::new(args.silent_after),
            give_back: GiveBack::new(usize::try_from(args.kill_rate).unwrap_or(usize::MAX)),
            untold: VecDeque::new(),
            pods: NodePods::default(),
            pods_listed: false,
            node: None,
            holdings: Vec::new(),
            slices: Slices::default(),
            claims: Claims::new(),
            next_look: Instant::now(),
            next_mps: Instant::now(),
            owned: false,
            published: None,
            first_report: None,
            heartbeat: Instant::now(),
            failures: 0,
            next_write: Instant::now(),
            args,
            cluster,
            shared,
        }
    }

    /// Runs for good. A watch or write that fails is tried again.
    pub(crate) async fn run(mut self, sampler: &Sampler, node: &str) {
        let client = || self.cluster.client.clone();
        let config = || watcher::Config::default().timeout(gpustow_serve::WATCH_SECONDS);
        let on_node = config().fields(&format!("spec.nodeName={node}"));
        let mut pods = pin(watch(Api::<Pod>::all(client()), on_node).default_backoff());
        let itself = config().fields(&format!("metadata.name={node}"));
        let mut nodes = pin(watch(Api::<Node>::all(client()), itself).default_backoff());
        let mut listed = Vec::new();
        let mut kubelet = tokio::time::interval(POD_RESOURCES_PERIOD);
        loop {
            tokio::select! {
                sample = sampler.next() => self.sampled(sample).await,
                Some(event) = pods.next() => self.pod(event, &mut listed),
                Some(event) = nodes.next() => self.node(event),
                _ = kubelet.tick() => self.ask_kubelet().await,
            }
        }
    }

    fn pod(&mut self, event: Result<Event<Pod>, watcher::Error>, listed: &mut Vec<NodePod>) {
        let reduced = |pod: Pod| NodePod::from_pod(&pod, &self.args.resource_name);
        match event {
            Ok(Event::Apply(pod)) => reduced(pod)
                .into_iter()
                .for_each(|pod| self.pods.apply(pod)),
            Ok(Event::Delete(pod)) => {
                self.pods
                    .delete(pod.metadata.uid.as_deref().unwrap_or_default());
            }
            Ok(Event::Init) => listed.clear(),
            Ok(Event::InitApply(pod)) => listed.extend(reduced(pod)),
            Ok(Event::InitDone) => {
                self.pods.list(std::mem::take(listed));
                self.pods_listed = true;
            }
            Err(error) => {
                tracing::warn!(%error, "the watch of this node's pods failed; it starts again")
            }
        }
        if self.pods_listed {
            self.wanted.order(instances::orders(&self.pods));
        }
    }

    fn node(&mut self, event: Result<Event<Node>, watcher::Error>) {
        match event {
            Ok(Event::Apply(node) | Event::InitApply(node)) => {
                let view = OwnNode::of(&node, &self.args.resource_name);
                // A node that was deleted and came back has another identity.
                let owner = |view: &OwnNode| view.owner.as_ref().map(|owner| owner.uid.clone());
                self.owned &= self.node.as_ref().and_then(owner) == owner(&view);
                self.node = Some(view);
            }
            Ok(Event::Delete(_)) => self.node = None,
            Ok(Event::Init | Event::InitDone) => {}
            Err(error) => tracing::warn!(%error, "the watch of this node failed; it starts again"),
        }
    }

    async fn ask_kubelet(&mut self) {
        match podresources::held(&self.args.pod_resources).await {
            Ok(holdings) => self.took(holdings).await,
            // No kubelet, or a container that does not get its socket: known from the manifest.
            Err(error @ (PodResourcesError::Absent(_) | PodResourcesError::Socket(_))) => {
                tracing::debug!(%error, "cannot reach the kubelet's PodResources socket");
            }
            Err(error) => {
                self.shared
                    .metrics
                    .sample_errors
                    .with_label_values(&["pod_resources"])
                    .inc();
                tracing::warn!(%error, "the kubelet does not report who holds whole GPUs");
            }
        }
    }

    async fn took(&mut self, holdings: Vec<Holding>) {
        let is_due = holdings != self.holdings || Instant::now() >= self.next_look;
        self.holdings = holdings;
        let names = self.holdings.iter().filter_map(|it| it.claimed.as_ref());
        let names: HashSet<&ClaimName> = names.map(|(claim, _)| claim).collect();
        self.claims.retain(|claim, _| names.contains(claim));
        let unknown = names.iter().filter(|it| !self.claims.contains_key(**it));
        let unknown: Vec<ClaimName> = unknown
            .take(CLAIMS_AT_ONCE)
            .map(|it| (*it).clone())
            .collect();
        let knows = self.slices.know(&self.holdings);
        if !is_due || (knows && unknown.is_empty()) {
            return;
        }
        self.next_look = Instant::now() + LOOK_AGAIN;
        if !knows {
            match self.cluster.slices().await {
                Ok(slices) => self.slices = slices,
                Err(error) => tracing::warn!(%error, "cannot read the names of claims' devices"),
            }
        }
        for claim in unknown {
            match self.cluster.consumed(&claim).await {
                Ok(consumed) => {
                    self.claims.insert(claim, consumed);
                }
                Err(error) => {
                    tracing::warn!(%error, namespace = claim.0, claim = claim.1, "cannot read how much a claim consumes: it holds whole GPUs until the next try");
                    break;
                }
            }
        }
    }

    async fn ask_mps(&mut self) {
        if self.args.mps && Instant::now() >= self.next_mps {
            let fails = mps::fails(&self.args.mps_pipes).await;
            if fails.is_none() {
                self.next_mps = Instant::now() + MPS_PERIOD;
            }
            self.state.heard_of_mps(fails);
        }
    }

    async fn sampled(&mut self, sample: Sample) {
        let metrics = &self.shared.metrics;
        metrics.sample_seconds.observe(sample.took.as_secs_f64());
        if let Err(error) = &sample.reading {
            metrics.sample_errors.with_label_values(&["nvml"]).inc();
            if self.state.error() != Some(error) {
                tracing::warn!("{error}");
            }
        } else if self.state.error().is_some() {
            tracing::info!("the cards can be read again");
        }
        // Without the pods, everything would be a stranger's.
        if !self.pods_listed {
            return;
        }
        self.ask_mps().await;
        let now = self.clock.now();
        let reading = sample.reading.as_ref();
        let pids: HashSet<u32> = reading
            .iter()
            .flat_map(|reading| &reading.cards)
            .flat_map(|card| card.processes.iter().flatten().map(|process| process.pid))
            .collect();
        self.processes.keep(&pids);
        let cards = reading.map_or(&[][..], |reading| &reading.cards);
        let held = claims::held(&self.holdings, &self.slices, &self.claims, cards);
        let totals = cards
            .iter()
            .filter_map(|card| Some(card.memory?.total >> 20));
        let amounts = self.node.as_ref().map(|node| &node.amounts);
        let unit = sharers::volcano_unit(amounts, totals.sum());
        // Volcano's unit stays known when its plugin is gone.
        self.pods.volcano_unit = unit.or(self.pods.volcano_unit);
        let processes = &mut self.processes;
        let condemned = self
            .state
            .read(reading, &self.pods, &held, |pid| processes.who(pid), now);
        self.wanted.set(self.state.limits().asks());
        for fault in reading.iter().flat_map(|reading| &reading.faults) {
            self.shared.metrics.fault(fault);
            tracing::warn!(gpu = fault.uuid, kind = ?fault.kind, "the driver reported an error");
        }
        let driver = reading.ok().and_then(|reading| reading.driver.as_deref());
        self.shared.metrics.sampled(driver, &self.state, &self.pods);
        // Schedulers wait for these writes, so they come before the notices to people.
        if Instant::now() >= self.next_write {
            let written = self.write(now).await;
            self.settle(written);
        }
        let mut notices = self
            .notices
            .look(&self.state, &self.pods, &condemned, now.age);
        // The agent ends processes only by a fresh reading: the writes above may have taken a long time.
        let fresh = sample.at.elapsed() < self.args.period * 2;
        if let (true, true, Ok(reading)) = (self.args.kill_processes, fresh, &sample.reading) {
            self.end_processes(reading, now, &mut notices);
        }
        self.tell(notices).await;
    }

    /// Ends the processes that are to end by this reading.
    fn end_processes(&mut self, reading: &Reading, now: Now, notices: &mut Vec<Notice>) {
        let processes = &mut self.processes;
        let who = |pid| (processes.who(pid), processes.started(pid));
        let due = (self.give_back).decide(reading, &self.state, &self.pods, who, now);
        for target in due {
            match kill::begin(&self.args.proc, &target) {
                Ok(Some(ending)) => {
                    self.shared.metrics.killed.inc();
                    let (pid, grace) = (target.pid, self.args.kill_grace);
                    tokio::spawn(async move {
                        if let Err(error) = ending.finish(grace).await {
                            tracing::warn!(%error, pid, "cannot see to it that the process ends");
                        }
                    });
                    notices.push(Notice::Warn {
                        uid: target.uid,
                        reason: "GpuProcessEnded",
                        note: target.note,
                    });
                }
                Ok(None) => tracing::info!(pid = target.pid, "not ended: gone, or another process"),
                Err(error) => {
                    tracing::warn!(%error, pid = target.pid, "cannot end a process that uses memory above its request: has the agent CAP_KILL?");
                    let note = target.not_ended(&error);
                    notices.push(Notice::Warn {
                        uid: target.uid,
                        reason: "GpuProcessNotEnded",
                        note,
                    });
                }
            }
        }
    }

    /// Writes the report, if it is due, and corrects the node's capacity, labels and startup taint, if they are wrong.
    async fn write(&mut self, now: Now) -> Result<(), ClusterError> {
        let Some(node) = self.node.clone() else {
            return Ok(());
        };
        let mut status = self.state.status(&self.pods);
        let is_news = self
            .published
            .as_ref()
            .is_none_or(|published| self.state.is_news(published, &status, &self.pods));
        if is_news || Instant::now() >= self.heartbeat {
            if let (false, Some(owner)) = (self.owned, &node.owner) {
                self.cluster.own(owner).await?;
                self.owned = true;
            }
            status.heartbeat = Some(now.wall.to_string());
            if let Err(error) = self.cluster.report(&status).await {
                self.owned = false;
                return Err(error);
            }
            self.state.reported();
            self.shared.metrics.published(now);
            self.shared.ready.store(true, Ordering::Release);
            self.heartbeat = Instant::now() + about(self.args.heartbeat.0, &self.cluster.node);
            self.published = Some(status.clone());
            self.first_report.get_or_insert_with(Instant::now);
        }
        let mut wanted = labels(&status);
        let is_new = |first: Instant| first.elapsed() < KNOWN_AFTER;
        if !node.labels.contains_key(names::KNOWN_LABEL) && self.first_report.is_none_or(is_new) {
            wanted.remove(names::KNOWN_LABEL);
        }
        let capacity = self.capacity(node.capacity, now).await?;
        if capacity.is_some() || wanted != node.labels {
            let stale = node.labels.keys().filter(|key| !wanted.contains_key(*key));
            self.cluster
                .node(&self.args.resource_name, capacity, &wanted, stale)
                .await?;
            // The agent assumes this until the watch shows it.
            let capacity = capacity.or(node.capacity);
            self.node = Some(OwnNode {
                capacity,
                labels: wanted,
                ..node
            });
        } else if let Some(position) = node.startup_taint
            && node.capacity.is_some()
            && node.capacity == node.allocatable
        {
            self.cluster.started(position).await?;
            tracing::info!(
                taint = names::STARTUP_TAINT,
                "removed the startup taint: the node takes pods"
            );
            self.node = Some(OwnNode {
                startup_taint: None,
                ..node
            });
        }
        Ok(())
    }

    /// The node's capacity, if it is to be written. Extenders know by now which cards have gone: the
    /// report was written before. But they may have bound a pod there that the watch has yet to show.
    async fn capacity(
        &mut self,
        present: Option<Mib>,
        now: Now,
    ) -> Result<Option<Mib>, ClusterError> {
        let cards = self.state.present();
        let wanted = self.capacity.decide(&cards, &self.pods, present, now.age);
        if wanted.is_none() || wanted > present {
            return Ok(wanted);
        }
        let pods = self.cluster.pods(&self.args.resource_name).await?;
        Ok(self.capacity.now(&pods).filter(|mib| Some(*mib) != present))
    }

    fn settle(&mut self, written: Result<(), ClusterError>) {
        match written {
            Ok(()) => self.failures = 0,
            Err(error) => {
                self.shared.metrics.write_errors.inc();
                self.failures += 1;
                let pause = Duration::from_secs(1 << self.failures.min(5)).min(MAX_PAUSE);
                self.next_write = Instant::now() + pause;
                tracing::warn!(%error, ?pause, "cannot write to the API server; trying again");
            }
        }
    }

    /// Writes these notices, after the notices that the API server did not accept the last time.
    async fn tell(&mut self, notices: Vec<Notice>) {
        let mut due = std::mem::take(&mut self.untold);
        due.extend(notices);
        while let Some(notice) = due.pop_front() {
            let Err(error) = self.told(&notice).await else {
                continue;
            };
            self.shared.metrics.write_errors.inc();
            tracing::warn!(%error, "cannot write an Event or a confirmation");
            if error.is_passing() {
                due.push_front(notice);
                // Whose time has come again with the next sample.
                due.retain(|notice| !matches!(notice, Notice::Confirm { .. }));
                due.truncate(MAX_UNTOLD);
                self.untold = due;
                return;
            }
        }
    }

    async fn told(&mut self, notice: &Notice) -> Result<(), ClusterError> {
        match notice {
            Notice::Confirm { uid, devices } => {
                let Some(pod) = self.pods.get(uid) else {
                    return Ok(());
                };
                self.cluster.confirm(pod, devices).await?;
                // The agent assumes this until the watch shows it.
                self.pods.apply(NodePod {
                    confirmed: Some(devices.clone()),
                    ..pod.clone()
                });
                Ok(())
            }
            Notice::WarnNode { reason, note } => {
                tracing::warn!(reason, note);
                self.cluster.warn_node(reason, note).await
            }
            Notice::Tell { uid, reason, note } | Notice::Warn { uid, reason, note } => {
                let Some(pod) = self.pods.get(uid) else {
                    return Ok(());
                };
                tracing::info!(pod = %pod.facts.name, namespace = %pod.facts.namespace, reason, note);
                let kind = match notice {
                    Notice::Tell { .. } => EventType::Normal,
                    _ => EventType::Warning,
                };
                self.cluster.tell(pod, kind, reason, note).await
            }
        }
    }
}

/// As long within a tenth, by the node's name, so that not all agents report at once.
fn about(time: Duration, node: &str) -> Duration {
    let mut draw = DefaultHasher::new();
    node.hash(&mut draw);
    let tenth = time / 10;
    let share = u32::try_from(draw.finish() % 1001).unwrap_or(0);
    time - tenth + tenth * 2 * share / 1000
}

/// The cards that an earlier agent reported.
fn cards(status: &GpuNodeStatus) -> Cards {
    let headroom = Mib(status.headroom_mib);
    let there = status.gpus.iter().filter(|gpu| !gpu.missing);
    there
        .map(|gpu| (gpu.uuid.clone(), gpu.capacity(headroom)))
        .collect()
}

fn pin<S: Stream>(stream: S) -> std::pin::Pin<Box<S>> {
    Box::pin(stream)
}
