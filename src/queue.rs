//! The queue: pods wait with our scheduling gate while others wait for room, and cost kube-scheduler nothing.
//!
//! The ledger decides whose turn it is ([`gpustow_ledger::Ledger::wake`]). This module takes the gate off and reports
//! to each queued pod its position. It also writes into the status of the GpustowConfig which new pods are queued.
//! Ungating is fenced like a bind: it rests on a copy of the pod that came before a look at the Lease, and names that
//! copy. An ungating that arrives after a takeover does not give the pod room: at filter, a pod does not get memory
//! that a pod before it in turn would take.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::config::QueueMode;
use gpustow_api::{PodFacts, QueueFrom, names};
use gpustow_ledger::Ungate;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::app::App;
use crate::ask::{AskError, within};
use crate::config::status::write_queue_from;
use crate::leading::while_leading;

/// Between two looks at who waits.
const LOOK: Duration = Duration::from_millis(250);
/// New pods are queued for so long after the last has waited.
const LINGER: Duration = Duration::from_secs(30);
/// The same value is written again after so long if the watch does not show it.
const WRITE_AGAIN: Duration = Duration::from_secs(5);
/// Between two looks for positions to report, and the positions that one look reports: Events go out at such a rate.
const TELL_EVERY: Duration = Duration::from_secs(1);
const TELL: usize = 10;
/// Between two lines of the log about the same failure.
const WARN_EVERY: Duration = Duration::from_secs(60);
/// For one request.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Ungating is tried for so long; room is kept for longer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Before it is tried again, or a newer copy of the pod is looked for.
const PAUSE: Duration = Duration::from_millis(100);
/// A standby takes over when a pod that fits has been queued for so long...
const STALLED: Duration = Duration::from_secs(15);
/// ... and, once it has, not again for so long.
const TAKE_EVERY: Duration = Duration::from_secs(600);

/// The result of ungating; as a string, the `result` label.
pub(crate) const RESULTS: [&str; 2] = ["done", "failed"];

/// Takes the gate off a pod; gives up where that can wait for the ledger's next look.
pub(crate) async fn ungate(app: Arc<App>, epoch: u64, mut pod: Arc<PodFacts>, why: Ungate) {
    let began = Instant::now();
    loop {
        let error = match take_off(&app, &pod, false).await {
            Ok(()) => {
                app.metrics.ungated(why, "done");
                tracing::info!(
                    namespace = %pod.namespace, pod = %pod.name, why = why.label(), "ungated"
                );
                app.events.ungated(&pod, why);
                return;
            }
            Err(error) if error.status() == Some(404) => return,
            Err(error) => error,
        };
        if error.is_final() && error.status() != Some(409) || began.elapsed() > PATIENCE {
            app.metrics.ungated(why, "failed");
            tracing::warn!(
                namespace = %pod.namespace, pod = %pod.name, %error,
                "cannot take the scheduling gate off; it is tried again"
            );
            app.events.not_ungated(&pod, &error);
            app.ledger.lock().ungate_failed(&pod.uid);
            return;
        }
        sleep(PAUSE.max(error.retry_after())).await;
        // Another client has changed the pod, or the answer was lost: the copy from the watch decides.
        let known = app.ledger.lock().pod(&pod.uid);
        match known {
            Some(known) if known.queued && !known.gated && !known.deleting => pod = known,
            _ => return,
        }
        if app.epoch.confirm(epoch).await.is_err() {
            return;
        }
    }
}

/// One write, of this very copy of the pod, or a question whether it would be taken.
async fn take_off(app: &App, pod: &PodFacts, dry_run: bool) -> Result<(), AskError> {
    let pods = Api::<Pod>::namespaced(app.client.clone(), &pod.namespace);
    let patch = json!({
        "metadata": {"uid": &*pod.uid, "resourceVersion": &*pod.resource_version},
        "spec": {"schedulingGates": [{"$patch": "delete", "name": names::GATE}]},
    });
    let params = PatchParams {
        dry_run,
        ..PatchParams::default()
    };
    let patch = Patch::Strategic(patch);
    within(TIMEOUT, pods.patch_metadata(&pod.name, &params, &patch)).await?;
    Ok(())
}

/// Queued pods that the leader should have ungated, and since when this replica sees them so.
#[derive(Default)]
struct Stalled {
    since: HashMap<Arc<str>, Instant>,
}

impl Stalled {
    /// Pods that have stalled for more than `STALLED`.
    fn look(&mut self, app: &App) -> Vec<Arc<PodFacts>> {
        let now = app.ledger.now();
        let mut pods = app.ledger.lock().stalled(now);
        self.since
            .retain(|uid, _| pods.iter().any(|pod| pod.uid == *uid));
        pods.retain(|pod| {
            let since = self.since.entry(pod.uid.clone());
            since.or_insert_with(Instant::now).elapsed() > STALLED
        });
        pods
    }

    /// Could this replica ungate one of them? A pod whose patch some policy or webhook refuses is no reason to take
    /// over: the leader cannot ungate it either.
    async fn may_ungate(&mut self, app: &App, pods: &[Arc<PodFacts>]) -> bool {
        for pod in pods {
            match take_off(app, pod, true).await {
                Ok(()) => return true,
                Err(error) => {
                    tracing::debug!(
                        namespace = %pod.namespace, pod = %pod.name, %error,
                        "cannot take the scheduling gate off either"
                    );
                    if !error.is_final() {
                        sleep(error.retry_after()).await;
                        return false;
                    }
                    self.since.insert(pod.uid.clone(), Instant::now());
                }
            }
        }
        false
    }
}

/// Keeps the flag and reports positions to pods, for as long as the process runs, while this replica leads.
pub(crate) async fn run(app: Arc<App>) {
    while_leading(app, LOOK, async |known: &mut (Flag, Told), app, epoch| {
        let (flag, told) = known;
        told.look(app);
        flag.look(app, epoch).await;
    })
    .await;
}

/// Takes over from a leader that does not ungate a pod, for as long as the process runs, while this replica stands by.
pub(crate) async fn stand_by(app: Arc<App>) {
    let mut stalled = Stalled::default();
    // Does it try to take over, and when did it succeed? A failed try is repeated: the Lease may name this replica
    // already, and where all pods are queued, no call makes another replica lead.
    let (mut tries, mut taken): (bool, Option<Instant>) = (false, None);
    loop {
        sleep(LOOK).await;
        let leads = app.epoch.held().is_some();
        if tries && leads {
            taken = Some(Instant::now());
        }
        let ready = app.lists.missing().is_empty() && !app.is_draining();
        let lately = taken.is_some_and(|taken| taken.elapsed() < TAKE_EVERY);
        if !ready || lately || leads {
            (stalled, tries) = (Stalled::default(), false);
            continue;
        }
        let pods = stalled.look(&app);
        tries &= !pods.is_empty();
        if !pods.is_empty() && stalled.may_ungate(&app, &pods).await {
            tries = true;
            let names: Vec<&str> = pods.iter().map(|pod| &*pod.name).collect();
            let pods = names.join(",");
            tracing::warn!(
                pods,
                "the leader does not ungate queued pods that fit: taking over"
            );
            if let Err(error) = app.epoch().await {
                tracing::warn!(%error, "cannot take over");
            }
        }
    }
}

/// Which new pods are queued, as this leader wants it.
#[derive(Default)]
struct Flag {
    /// For which pods some have waited lately, and when they did last.
    wanted: Vec<(QueueFrom, Instant)>,
    /// It was looked at since this replica leads.
    begun: bool,
    /// The value that was written last, and when: the watch shows it a little later.
    wrote: Option<(Vec<QueueFrom>, Instant)>,
    /// When a failure was logged last.
    warned: Option<Instant>,
}

impl Flag {
    async fn look(&mut self, app: &App, epoch: u64) {
        let current = app.config.current();
        let Some(status) = &current.status else {
            app.metrics.queue_on.set(0);
            return;
        };
        let mut wanting = app.ledger.lock().queue_from();
        // When this replica began to lead, these were there: which pods waited until then is unknown.
        if !self.begun {
            wanting.extend(&status.queue_from);
        }
        self.begun = true;
        self.note(&wanting);
        let from = match current.spec.queue.mode {
            QueueMode::Off => Vec::new(),
            QueueMode::Auto => QueueFrom::fewest(self.wanted.iter().map(|it| it.0).collect()),
            QueueMode::Always => vec![QueueFrom::ALL],
        };
        let queues = !current.queue_from().is_empty();
        app.metrics.queue_on.set(queues.into());
        let written = self
            .wrote
            .as_ref()
            .is_some_and(|(wrote, at)| *wrote == from && at.elapsed() < WRITE_AGAIN);
        if from != status.queue_from && !written {
            self.set(app, epoch, from).await;
        }
    }

    /// Takes in which new pods must be queued because pods wait. A lingering entry is forgotten if a new entry covers
    /// it.
    fn note(&mut self, wanting: &[QueueFrom]) {
        self.wanted.retain(|(from, at)| {
            at.elapsed() < LINGER && !wanting.iter().any(|it| it.covers(from))
        });
        let now = Instant::now();
        self.wanted.extend(wanting.iter().map(|it| (*it, now)));
    }

    async fn set(&mut self, app: &App, epoch: u64, from: Vec<QueueFrom>) {
        if app.epoch.confirm(epoch).await.is_err() {
            return;
        }
        match write_queue_from(app, &from).await {
            Ok(()) => {
                tracing::info!(?from, "which new pods are queued has changed");
                self.wrote = Some((from, Instant::now()));
            }
            Err(error) => {
                if self.warned.is_none_or(|at| at.elapsed() >= WARN_EVERY) {
                    self.warned = Some(Instant::now());
                    tracing::warn!(%error, "cannot write which new pods are queued into the status of the GpustowConfig");
                }
                sleep(PAUSE.max(error.retry_after())).await;
            }
        }
    }
}

/// Pods whose position was reported to them.
#[derive(Default)]
struct Told {
    pods: HashSet<Arc<str>>,
    at: Option<Instant>,
}

impl Told {
    fn look(&mut self, app: &App) {
        if self.at.is_some_and(|at| at.elapsed() < TELL_EVERY) {
            return;
        }
        self.at = Some(Instant::now());
        let (new, size) = {
            let ledger = app.ledger.lock();
            self.pods.retain(|uid| ledger.is_queued(uid));
            let standing = ledger.queue_order().enumerate();
            let new = standing.filter(|(_, uid)| !self.pods.contains(*uid));
            let new = new.filter_map(|(before, uid)| Some((before, ledger.pod(uid)?)));
            (new.take(TELL).collect::<Vec<_>>(), ledger.queued().pods)
        };
        for (before, pod) in new {
            app.events.queued(&pod, before, size);
            self.pods.insert(pod.uid.clone());
        }
    }
}
