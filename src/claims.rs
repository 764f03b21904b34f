//! Keeps ResourceClaims off GPUs that pods may get, and pods off GPUs that are left to claims: the fence.
//! kube-scheduler's own allocator chooses the devices of DRA drivers, and it heeds nothing but a DeviceTaintRule.
//!
//! A rule that comes after a pod is too late. So a GPU is closed to pods until its rules have been there for a while.
//! Each rule has a finalizer: a rule that is deleted by hand keeps its effect until another one has taken its place.
//! Each leader writes its epoch into a rule before pods may get the GPU: writes that its predecessor still has under
//! way fail then.

mod plan;
mod release;
mod seen;
mod store;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::{StreamExt as _, stream};
use gpustow_api::claim::{Consumed, Device, Rule};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, ResourceExt as _};
use tokio::time::Instant;

use crate::app::App;
use crate::ask::{AskError, within};
use crate::leading::while_leading;
use plan::{Gpu, Step, World, by_device, free, orphans};
use release::{Releases, Waiting};
use seen::{Claim, Watched, rules};
pub(crate) use store::unfence_all;
use store::{classes, listed, remove_all, served, write};

/// Between two looks.
const LOOK: Duration = Duration::from_millis(250);
/// kube-scheduler heeds a rule after this time, and has written its earlier allocations by then.
const SETTLES: Duration = Duration::from_secs(5);
/// Before the API server is asked again whether it serves DeviceTaintRules.
const ASK_AGAIN: Duration = Duration::from_secs(3);
/// Before the DeviceClasses are read again.
const CLASSES_AGAIN: Duration = Duration::from_secs(30);
/// Before a write that was not seen to have an effect is tried again.
const RETRY: Duration = Duration::from_secs(5);
/// After a failure.
const PAUSE: Duration = Duration::from_secs(1);
/// Between two questions for pods whose claims wait.
const PODS_AGAIN: Duration = Duration::from_millis(500);
/// For one request.
const TIMEOUT: Duration = Duration::from_secs(3);
const LIST_TIMEOUT: Duration = Duration::from_secs(20);
/// Writes under way at once, and writes of one look.
const WIDTH: usize = 16;
const MOST: usize = 512;
/// Nodes that are read from the ledger at a time.
const NODES: usize = 64;
/// As many waiting pods are looked at.
const PODS: u32 = 500;

/// Whether the API server lacks DeviceTaintRules although the fence is on.
#[derive(Debug, Default)]
pub(crate) struct Unserved(AtomicBool);

impl Unserved {
    pub(crate) fn is(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Keeps the fence for as long as the process runs, while this replica leads.
pub(crate) async fn run(app: Arc<App>) {
    while_leading(app, LOOK, async |known: &mut Known, app, epoch| {
        if known.rests.is_some_and(|until| Instant::now() < until) {
            return;
        }
        if let Err(error) = known.look(app, epoch).await {
            known.rests = Some(Instant::now() + PAUSE.max(error.retry_after()));
            tracing::warn!(%error, "cannot look after the fence between pods and ResourceClaims, and tries again");
        }
    })
    .await;
}

/// The state of one leadership.
#[derive(Default)]
struct Known {
    watched: Option<Watched>,
    /// After a failure, until when nothing is tried.
    rests: Option<Instant>,
    /// When the API server is asked again for DeviceTaintRules that it lacked.
    next: Option<Instant>,
    /// The fence is off, and no rule is left.
    cleared: bool,
    /// Since when rules have been seen, by UID.
    since: HashMap<String, Instant>,
    /// Rules that are or may be gone, by UID, and when they were removed last.
    removed: HashMap<String, Instant>,
    /// Writes by their `key`, and when they were made.
    written: HashMap<String, Instant>,
    /// The devices of GPUs as they were known last.
    devices: HashMap<String, Vec<Device>>,
    classes: Option<(Instant, HashMap<String, String>)>,
    /// Pods whose claims waited, and when that was asked.
    waiting: Option<(Instant, Vec<Waiting>)>,
    releases: Releases,
}

impl Known {
    async fn look(&mut self, app: &Arc<App>, epoch: u64) -> Result<(), AskError> {
        let current = app.config.current();
        if !current.known {
            return Ok(());
        }
        if !current.spec.claims.fence {
            app.unserved.0.store(false, Ordering::Relaxed);
            return self.clear(app).await;
        }
        self.cleared = false;
        if self.watched.is_none() {
            if self.next.is_some_and(|next| Instant::now() < next) {
                return Ok(());
            }
            let version = served(&app.client).await?;
            if version.is_none() && !app.unserved.0.swap(true, Ordering::Relaxed) {
                tracing::error!(
                    "spec.claims.fence is on, but this API server serves no DeviceTaintRules: ResourceClaims are not kept off \
                     GPUs. Kubernetes serves them from 1.37 on; 1.36 needs the feature gate DRADeviceTaintRules"
                );
            }
            let Some(version) = version else {
                self.next = Some(Instant::now() + ASK_AGAIN);
                open_all(app);
                return Ok(());
            };
            app.unserved.0.store(false, Ordering::Relaxed);
            self.watched = Some(Watched::start(&app.client, version));
        }
        self.keep(app, epoch).await
    }

    /// Removes every rule, where the fence is off.
    async fn clear(&mut self, app: &App) -> Result<(), AskError> {
        self.watched = None;
        if !self.cleared {
            let left = remove_all(&app.client).await;
            // Without its role it has never made one.
            let forbidden = |error: &AskError| error.status() == Some(403);
            self.cleared = left.as_ref().is_err_and(forbidden) || left? == 0;
        }
        Ok(())
    }

    async fn keep(&mut self, app: &App, epoch: u64) -> Result<(), AskError> {
        let now = Instant::now();
        let Some((mut rules, published, claims)) = self.read() else {
            return Ok(());
        };
        self.forget(&rules, now);
        let is_there = |rule: &Rule| !self.removed.contains_key(&rule.uid);
        let (there, gone): (Vec<Rule>, Vec<Rule>) = rules.drain(..).partition(is_there);
        let mut gpus = gpus(app).await;
        self.name_devices(&mut gpus, &published, &there);
        let settled = self.settled(&there, now);
        let mut world = World {
            rules: by_device(&there),
            claims: consumed(claims.values()),
            released: self.releases.gpus(),
            epoch,
            settled: settled.iter().cloned().collect(),
        };
        // By now, allocations that were under way when the rule came are in the API server.
        if !settled.is_empty() {
            for (device, consumed) in listed(&app.client).await? {
                let sum = world.claims.entry(device).or_insert(consumed);
                if *sum != consumed {
                    *sum = Consumed::Whole;
                }
            }
        }
        let waiting = self.waiting(app, &claims, &gpus).await?;
        let free = free(&world, &gpus);
        self.releases.look(&waiting, &free, now);
        world.released = self.releases.gpus();
        let mut steps = self.judge(app, epoch, &world, &gpus);
        steps.extend(orphans(&there, &gpus).chain(gone).map(Step::Remove));
        self.perform(app, epoch, steps, now).await
    }

    /// The state that the watches have seen, once all are complete.
    #[expect(clippy::type_complexity, reason = "the three are used together once")]
    fn read(
        &self,
    ) -> Option<(
        Vec<Rule>,
        HashMap<Device, Vec<String>>,
        HashMap<String, Claim>,
    )> {
        let seen = self.watched.as_ref()?.seen();
        let published = seen.slices.as_ref()?.values().flatten().cloned().collect();
        let rules = seen.rules.as_ref()?.values().cloned().collect();
        Some((rules, published, seen.claims.clone()?))
    }

    fn forget(&mut self, rules: &[Rule], now: Instant) {
        let uids: HashSet<&str> = rules.iter().map(|rule| &*rule.uid).collect();
        self.since.retain(|uid, _| uids.contains(&**uid));
        self.removed.retain(|uid, _| uids.contains(&**uid));
        self.written.retain(|_, at| now.duration_since(*at) < RETRY);
    }

    /// A GPU has the devices that it had last if drivers publish none for it.
    fn name_devices(
        &mut self,
        gpus: &mut [Gpu],
        published: &HashMap<Device, Vec<String>>,
        rules: &[Rule],
    ) {
        let rules: Vec<&Rule> = rules.iter().collect();
        let mut now = plan::devices(published, &rules);
        let reported: HashSet<&str> = gpus.iter().map(|gpu| &*gpu.is.uuid).collect();
        self.devices.retain(|uuid, _| reported.contains(&**uuid));
        self.devices
            .extend(now.drain().filter(|(uuid, _)| reported.contains(&**uuid)));
        for gpu in gpus {
            if let Some(devices) = self.devices.get(&*gpu.is.uuid) {
                gpu.devices.clone_from(devices);
            }
        }
    }

    /// The UIDs of rules that no leader has stamped and that have been there for long enough.
    fn settled(&mut self, rules: &[Rule], now: Instant) -> Vec<String> {
        let new = rules.iter().filter(|rule| rule.epoch.is_none());
        let settled = new.filter(|rule| {
            let since = *self.since.entry(rule.uid.clone()).or_insert(now);
            now.duration_since(since) >= SETTLES
        });
        settled.map(|rule| rule.uid.clone()).collect()
    }

    /// Pods whose claims wait for devices like ours, in the order of their creation.
    async fn waiting(
        &mut self,
        app: &App,
        claims: &HashMap<String, Claim>,
        gpus: &[Gpu],
    ) -> Result<Vec<Waiting>, AskError> {
        let drivers: HashSet<&str> = gpus
            .iter()
            .flat_map(|gpu| gpu.devices.iter().map(|it| &*it.driver))
            .collect();
        if drivers.is_empty() || claims.values().all(|claim| claim.allocated) {
            return Ok(Vec::new());
        }
        let known = self.waiting.as_ref();
        if let Some((_, pods)) = known.filter(|(at, _)| at.elapsed() < PODS_AGAIN) {
            return Ok(pods.clone());
        }
        let fresh = |(at, _): &(Instant, _)| at.elapsed() < CLASSES_AGAIN;
        if !self.classes.as_ref().is_some_and(fresh) {
            self.classes = Some((Instant::now(), classes(&app.client).await?));
        }
        let classes = self.classes.iter().flat_map(|(_, classes)| classes);
        let ours = classes
            .filter(|(_, text)| text.is_empty() || drivers.iter().any(|it| text.contains(it)));
        let ours: HashSet<&str> = ours.map(|(name, _)| &**name).collect();
        let pods = Api::<Pod>::all(app.client.clone());
        let params = ListParams::default()
            .fields("spec.nodeName=,status.phase=Pending")
            .limit(PODS);
        let mut pods = within(LIST_TIMEOUT, pods.list(&params)).await?.items;
        pods.sort_by_key(|pod| (pod.creation_timestamp().map(|it| it.0), pod.uid()));
        let waiting = pods.iter().filter_map(|pod| {
            let devices = claims_of(pod)
                .filter_map(|name| claims.get(&name))
                .filter(|it| !it.allocated);
            let devices = devices.flat_map(|claim| &claim.requests);
            let devices = devices
                .filter(|(class, _)| ours.contains(&**class))
                .map(|(_, count)| count);
            Some(Waiting {
                uid: pod.uid()?,
                devices: Some(devices.sum()).filter(|count| *count > 0)?,
            })
        });
        let waiting: Vec<Waiting> = waiting.collect();
        self.waiting = Some((Instant::now(), waiting.clone()));
        Ok(waiting)
    }

    /// Sets in the ledger which GPUs pods may get, and returns the writes that the fence needs.
    fn judge(&self, app: &App, epoch: u64, world: &World<'_>, gpus: &[Gpu]) -> Vec<Step> {
        let mut steps = Vec::new();
        let mut open: HashMap<&Arc<str>, Vec<Arc<str>>> = HashMap::new();
        for gpu in gpus {
            let mut verdict = world.of(gpu);
            let open = open.entry(&gpu.node).or_default();
            // No pod may come to it from now on. If one came since this look began, it is the pods'.
            if verdict.close && !app.ledger.lock().close(&gpu.node, &gpu.is.uuid) {
                let mut held = gpu.clone();
                held.is.held = true;
                verdict = world.of(&held);
            }
            if verdict.open {
                open.push(gpu.is.uuid.clone());
            }
            steps.extend(verdict.steps);
        }
        let mut is_new = false;
        for (node, uuids) in open {
            if app.leads() != Some(epoch) {
                return Vec::new();
            }
            is_new |= app.ledger.lock().open(node, uuids);
        }
        if is_new {
            app.ledger.wake.notify_one();
        }
        steps
    }

    async fn perform(
        &mut self,
        app: &App,
        epoch: u64,
        steps: Vec<Step>,
        now: Instant,
    ) -> Result<(), AskError> {
        let Some(version) = self.watched.as_ref().map(|it| it.version) else {
            return Ok(());
        };
        let due: Vec<Step> = steps
            .into_iter()
            .filter(|step| !self.written.contains_key(&key(step)))
            .take(MOST)
            .collect();
        // It begins after every copy that this look rests on.
        if due.is_empty() || app.epoch.confirm(epoch).await.is_err() {
            return Ok(());
        }
        for step in &due {
            self.written.insert(key(step), now);
            if let Step::Remove(rule) = step {
                self.removed.insert(rule.uid.clone(), now);
            }
        }
        let api = &rules(&app.client, version);
        let writes = due.into_iter().map(|step| async move {
            let answer = write(api, version, &step, epoch).await;
            (step, answer)
        });
        let mut writes = stream::iter(writes).buffer_unordered(WIDTH);
        let mut failed = None;
        while let Some((step, answer)) = writes.next().await {
            match answer {
                Ok(()) => tracing::debug!(?step, "changed a rule between pods and ResourceClaims"),
                // The rule has changed: the watch shows the change.
                Err(error) if error.status() == Some(409) => {
                    self.written.remove(&key(&step));
                }
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(()), Err)
    }
}

/// The purpose of a write. A write is not repeated before its effect is seen.
fn key(step: &Step) -> String {
    match step {
        Step::Create(device, _) => format!("{}/{}/{}", device.driver, device.pool, device.name),
        Step::Stamp(rule) => format!("stamp {} {}", rule.uid, rule.version),
        Step::Remove(rule) => format!("remove {}", rule.uid),
    }
}

/// Pods may get every GPU: there is no fence.
fn open_all(app: &App) {
    let mut ledger = app.ledger.lock();
    let mut is_new = false;
    for node in ledger.node_names() {
        let uuids: Vec<_> = ledger.fenced(&node).into_iter().map(|it| it.uuid).collect();
        is_new |= ledger.open(&node, uuids);
    }
    drop(ledger);
    if is_new {
        app.ledger.wake.notify_one();
    }
}

/// The GPUs of all nodes, without their devices.
async fn gpus(app: &App) -> Vec<Gpu> {
    let names = app.ledger.lock().node_names();
    let mut gpus = Vec::new();
    for names in names.chunks(NODES) {
        gpus.extend(gpus_of(app, names));
        tokio::task::yield_now().await;
    }
    gpus
}

fn gpus_of(app: &App, names: &[Arc<str>]) -> Vec<Gpu> {
    let ledger = app.ledger.lock();
    let mut gpus = Vec::new();
    for node in names {
        gpus.extend(ledger.fenced(node).into_iter().map(|is| Gpu {
            node: node.clone(),
            is,
            devices: Vec::new(),
        }));
    }
    gpus
}

fn consumed<'c>(claims: impl Iterator<Item = &'c Claim>) -> HashMap<Device, Consumed> {
    let mut all: HashMap<Device, Consumed> = HashMap::new();
    for (device, consumed) in claims.flat_map(|claim| &claim.consumed) {
        let sum = all.entry(device.clone()).or_insert(Consumed::Nothing);
        *sum = sum.and(*consumed);
    }
    all
}

/// Namespaces and names of a pod's claims, including claims that were made for it.
fn claims_of(pod: &Pod) -> impl Iterator<Item = String> {
    let spec = pod
        .spec
        .iter()
        .filter(|it| it.scheduling_gates.iter().flatten().next().is_none());
    let named = spec.flat_map(|it| it.resource_claims.iter().flatten());
    let named = named.filter_map(|it| it.resource_claim_name.clone());
    let status = pod.status.iter();
    let made = status.flat_map(|it| it.resource_claim_statuses.iter().flatten());
    let made = made.filter_map(|it| it.resource_claim_name.clone());
    let namespace = pod.namespace().unwrap_or_default();
    named
        .chain(made)
        .map(move |name| format!("{namespace}/{name}"))
}
