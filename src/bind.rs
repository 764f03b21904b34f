//! Binding a pod: one POST that carries node and cards, and the handling of its outcome.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use dashmap::DashSet;
use gpustow_api::intree::Constraints;
use gpustow_api::{Assignment, BadRequest, PodFacts, PodObject, allowances, names};
use gpustow_ledger::{BindRefusal, Outcome};
use gpustow_serve::rate::Backoff;
use k8s_openapi::api::core::v1::{Binding, ObjectReference};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{ObjectMeta, PostParams};
use strum::{IntoStaticStr, VariantNames};
use thiserror::Error;
use tokio::time::{Instant, sleep, timeout};

use crate::app::App;
use crate::ask::{AskError, within};
use crate::decode::Each;
use crate::epoch::{EpochError, annotate};
use crate::failure::{ErrorKind, Failure};
use crate::wire::ExtenderBindingArgs;

/// Bindings sent for one call, resends for a changed pod included.
/// Within this a bind is answered: below kube-scheduler's httpTimeout, and far below the life of a reservation.
pub(crate) const BIND_TIMEOUT: Duration = Duration::from_secs(8);
const ATTEMPTS: u32 = 5;
/// For one request that reads a pod back.
const READ_TIMEOUT: Duration = Duration::from_secs(2);
/// Between two looks for pods that are bound by our own word alone.
const CONFIRM_EVERY: Duration = Duration::from_secs(2);
/// Such pods read at one look.
const CONFIRM_AT_ONCE: usize = 64;

/// Why a pod is not bound, as kube-scheduler shows it to the user; as a string, the `reason` label.
#[derive(Debug, Error, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum BindError {
    /// kube-scheduler gave up waiting and asked again.
    #[error("a bind of this pod is still under way; its outcome will show in the pod")]
    #[strum(serialize = "unknown_outcome")]
    UnderWay,
    /// Its outcome is not known in time.
    #[error("the API server did not say in time whether the pod is bound; this is being looked up")]
    #[strum(serialize = "unknown_outcome")]
    Unknown,
    /// The pod is bound already, not by this call.
    #[error("the pod is bound to node {0} already")]
    #[strum(serialize = "bound_elsewhere")]
    Elsewhere(String),
    /// The pod does not exist any more.
    #[error("the pod is gone")]
    Gone,
    /// The pod is being deleted.
    #[error("the pod is being deleted")]
    #[strum(serialize = "gone")]
    Deleting,
    /// The pod got scheduling gates.
    #[error("the pod has scheduling gates")]
    Gated,
    /// It changed again and again meanwhile, or time ran out.
    #[error("the pod changed while it was being bound")]
    #[strum(serialize = "changed")]
    Changing,
    /// Its request cannot be read.
    #[error(transparent)]
    #[strum(serialize = "bad_pod")]
    Request(#[from] BadRequest),
    /// The node does not do.
    #[error(transparent)]
    #[strum(serialize = "no_fit")]
    Refused(#[from] BindRefusal),
    /// This replica may not decide.
    #[error(transparent)]
    Epoch(#[from] EpochError),
    /// The API server refused, or could not be reached before anything was sent.
    #[error(transparent)]
    #[strum(serialize = "api")]
    Ask(#[from] AskError),
}

impl From<BindError> for Failure {
    fn from(error: BindError) -> Self {
        let kind = match &error {
            BindError::UnderWay | BindError::Unknown => Some(ErrorKind::Timeout),
            BindError::Epoch(error) => Some(error.into()),
            BindError::Ask(error) => Some(error.into()),
            BindError::Elsewhere(_)
            | BindError::Gone
            | BindError::Deleting
            | BindError::Gated
            | BindError::Changing
            | BindError::Request(_)
            | BindError::Refused(_) => None,
        };
        let text = format!("gpustow: {error}");
        Self { kind, text }
    }
}

/// Binds under way by pod UID.
#[derive(Default)]
pub(crate) struct Binds(DashSet<Arc<str>>);

impl Binds {
    /// How many there are.
    #[must_use]
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }
}

struct UnderWay(Arc<App>, Arc<str>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.binds.0.remove(&self.1);
    }
}

/// Binds the pod of `args`; answers within the deadline, and sees an unknown outcome through
/// beyond it.
///
/// # Errors
/// With the text for the user. The ledger is right in every case.
pub(crate) async fn bind(app: &Arc<App>, args: ExtenderBindingArgs) -> Result<(), Failure> {
    let uid: Arc<str> = args.pod_uid.as_str().into();
    if !app.binds.0.insert(uid.clone()) {
        return tell(app, &args, Err(BindError::UnderWay));
    }
    let under_way = UnderWay(app.clone(), uid.clone());
    let deadline = Instant::now() + BIND_TIMEOUT;
    // Its own task: kube-scheduler hanging up must not end a bind in the middle.
    let task = tokio::spawn(async move {
        let attempt = Attempt {
            app: &under_way.0,
            args: &args,
            uid: &uid,
            deadline,
        };
        tell(attempt.app, &args, attempt.run().await)
    });
    match timeout(BIND_TIMEOUT, task).await {
        Ok(Ok(told)) => told,
        Ok(Err(_)) | Err(_) => Err(BindError::Unknown.into()),
    }
}

/// Reports the result of a bind in log, Events and metrics. The error is as kube-scheduler gets it.
fn tell(app: &App, args: &ExtenderBindingArgs, outcome: Done) -> Result<(), Failure> {
    let ExtenderBindingArgs {
        pod_name: pod,
        pod_namespace: namespace,
        node,
        ..
    } = args;
    match outcome {
        Ok((_, None)) => tracing::info!(%namespace, %pod, %node, "bound without GPU memory"),
        Ok((facts, Some((assignment, because)))) => {
            let gpus = assignment.charges.iter();
            let gpus = gpus.map(|(uuid, mib)| format!("{mib} on {uuid}"));
            let gpus = gpus.collect::<Vec<_>>().join(", ");
            tracing::info!(%namespace, %pod, %node, %gpus, because, "bound");
            let view = app.ledger.lock().node_view(node, app.ledger.now());
            app.events
                .assigned(&facts, &assignment, node, view.as_ref());
        }
        Err(error) => {
            app.metrics.calls.not_bound(&error);
            tracing::warn!(%namespace, %pod, %node, %error, "not bound");
            return Err(error.into());
        }
    }
    Ok(())
}

/// The bound pod, and its assignment unless it asks for nothing.
type Done = Result<(Arc<PodFacts>, Option<Assigned>), BindError>;

/// A pod, and how many copies of pods came from the watch before this one.
type PodCopy = (Arc<PodFacts>, u64);

/// The number of a copy that did not come from the watch: newer than any look at the Lease.
const NEW: u64 = u64::MAX;

/// The assignment of a pod, and a sentence on why; empty if another writer assigned it.
type Assigned = (Arc<Assignment>, String);

struct Attempt<'a> {
    app: &'a Arc<App>,
    args: &'a ExtenderBindingArgs,
    uid: &'a Arc<str>,
    deadline: Instant,
}

impl Attempt<'_> {
    fn pods(&self) -> Api<PodObject> {
        Api::namespaced(self.app.client.clone(), &self.args.pod_namespace)
    }

    async fn run(&self) -> Done {
        let known = self.app.ledger.lock().copy(self.uid);
        let mut copy = match known {
            Some(copy) if copy.0.node.is_none() && !copy.0.queued => copy,
            // Only the API server knows that a pod is bound: it can be restored to an older state. kube-scheduler may
            // ask for an ungated pod before our watch shows the change.
            known => {
                let asked = self.app.ledger.lock().copies();
                let Some(pod) = self.read().await? else {
                    // Filter may have reserved after the watch had shown the pod's deletion.
                    self.app.ledger.lock().delete_pod(self.uid);
                    self.app.ledger.wake.notify_one();
                    return Err(BindError::Gone);
                };
                let was_bound = known.map(|(known, _)| known.node.is_some());
                if pod.node.is_none() && was_bound == Some(true) {
                    self.unbound_again(&pod, asked);
                } else if was_bound == Some(false) {
                    let now = self.app.ledger.now();
                    let copy = PodFacts::clone(&pod);
                    self.app.ledger.lock().read_back(copy, asked, now);
                }
                (pod, NEW)
            }
        };
        let done = self.attempts(&mut copy).await;
        let (pod, _) = copy;
        if let Err(error) = &done {
            let outcome = match error {
                BindError::Ask(error) if error.is_final() => Outcome::Refused,
                _ => Outcome::Failed,
            };
            self.end(&pod, outcome);
        }
        done.map(|assigned| (pod, assigned))
    }

    /// The pod is bound in the ledger and unbound in the API server. Other state of the ledger may be missing there
    /// too.
    fn unbound_again(&self, pod: &PodFacts, asked: u64) {
        tracing::warn!(
            namespace = %pod.namespace, pod = %pod.name,
            "a bound pod is not bound any more: the API server was restored; reading everything again"
        );
        let now = self.app.ledger.now();
        self.app.ledger.lock().read_back(pod.clone(), asked, now);
        self.app.lists.renew_all();
    }

    async fn attempts(&self, copy: &mut PodCopy) -> Result<Option<Assigned>, BindError> {
        for _ in 0..ATTEMPTS {
            let (pod, number) = &*copy;
            if pod.node.is_some() || Instant::now() >= self.deadline {
                break;
            }
            let assigned = self.prepare(pod, *number).await?;
            let assignment = assigned.as_ref().map(|(assignment, _)| assignment.clone());
            let error = match self.send(pod, assignment.as_deref()).await {
                Ok(()) => {
                    self.end(pod, Outcome::Bound);
                    return Ok(assigned);
                }
                Err(error) => error,
            };
            let refused = match error.status() {
                // Its state forbids it. That it was us who bound it is possible, too.
                Some(404 | 409) => true,
                Some(status @ 400..500) if status != 408 => return Err(error.into()),
                _ => {
                    tracing::warn!(pod = %self.args.pod_name, %error, "bind: outcome unknown");
                    false
                }
            };
            let asked = self.app.ledger.lock().copies();
            let seen = self.settle(!refused).await.ok_or(BindError::Gone)?;
            let bound = seen.node.as_deref() == Some(&self.args.node)
                && seen.assignment == assignment.map(Ok);
            if seen.node.is_some() {
                let now = self.app.ledger.now();
                self.app
                    .ledger
                    .lock()
                    .read_back(PodFacts::clone(&seen), asked, now);
            }
            let changed = seen.resource_version != pod.resource_version;
            self.end(
                pod,
                match (bound, refused && changed || seen.node.is_some()) {
                    (true, _) => Outcome::Bound,
                    (false, true) => Outcome::Conflict,
                    // It was not the pod that stood in the way.
                    (false, false) => Outcome::Refused,
                },
            );
            *copy = (seen, NEW);
        }
        self.already(&copy.0)
    }

    /// The assignment to send for this copy of the pod: none if it does not ask for GPU memory. From here on its memory
    /// is held.
    async fn prepare(&self, pod: &PodFacts, copy: u64) -> Result<Option<Assigned>, BindError> {
        if pod.deleting {
            return Err(BindError::Deleting);
        }
        if pod.gated || pod.queued || pod.stands_for.is_some() {
            return Err(BindError::Gated);
        }
        if pod.asks.readable().map_err(BadRequest::clone)?.is_empty() {
            self.may_go_there().await?;
            return Ok(None);
        }
        let epoch = self.app.epoch().await?;
        if pod.epoch.is_some_and(|other| other > epoch) {
            // Of a successor, or of an earlier Lease that was deleted.
            self.app.epoch.confirm(epoch).await?;
        }
        let assigned = self.begin(pod)?;
        let copies = self.app.ledger.lock().copies();
        self.app.epoch.confirm_for(epoch, copy, copies).await?;
        Ok(Some(assigned))
    }

    /// The pod cannot be bound any more. A success if it is where it should be.
    fn already(&self, pod: &PodFacts) -> Result<Option<Assigned>, BindError> {
        let Some(node) = pod.node.as_deref() else {
            return Err(BindError::Changing);
        };
        match &pod.assignment {
            Some(Ok(assignment)) if node == self.args.node => {
                Ok(Some((assignment.clone(), String::new())))
            }
            None if node == self.args.node && pod.asks.is_nothing() => Ok(None),
            _ => Err(BindError::Elsewhere(node.to_owned())),
        }
    }

    /// Of a pod that asks for nothing the ledger keeps no constraints.
    async fn may_go_there(&self) -> Result<(), BindError> {
        let pods = self.pods();
        let pod = within(READ_TIMEOUT, pods.get_opt(&self.args.pod_name)).await?;
        let spec = pod.and_then(|pod| pod.pod.spec).ok_or(BindError::Gone)?;
        let (node, constraints) = (self.args.node.clone(), Constraints::of(&spec));
        match self.app.ledger.lock().excluded(&node, &constraints) {
            Some(reason) => Err(BindRefusal::Excluded { node, reason }.into()),
            None => Ok(()),
        }
    }

    fn begin(&self, pod: &PodFacts) -> Result<Assigned, BindError> {
        let now = self.app.ledger.now();
        let mut ledger = self.app.ledger.lock();
        let assignment = ledger.begin_bind(pod, &self.args.node, now)?;
        let because = ledger.reserved_because(&pod.uid).unwrap_or_default();
        Ok((assignment, because.to_owned()))
    }

    fn end(&self, pod: &PodFacts, outcome: Outcome) {
        let now = self.app.ledger.now();
        self.app.ledger.lock().end_bind(pod, outcome, now);
        self.app.ledger.wake.notify_one();
    }

    async fn send(&self, pod: &PodFacts, assignment: Option<&Assignment>) -> Result<(), AskError> {
        let binding = Binding {
            metadata: ObjectMeta {
                name: Some(self.args.pod_name.clone()),
                namespace: Some(self.args.pod_namespace.clone()),
                uid: Some(self.uid.to_string()),
                resource_version: assignment.map(|_| pod.resource_version.to_string()),
                annotations: assignment.map(|assignment| self.notes(pod, assignment)),
                ..ObjectMeta::default()
            },
            target: ObjectReference {
                kind: Some("Node".to_owned()),
                name: Some(self.args.node.clone()),
                ..ObjectReference::default()
            },
        };
        let left = self.deadline.saturating_duration_since(Instant::now());
        let (pods, params) = (self.pods(), PostParams::default());
        let post = pods.create_subresource::<_, serde_json::Value>(
            "binding",
            &self.args.pod_name,
            &params,
            &binding,
        );
        within(left, post).await.map(drop)
    }

    /// The annotations that the Binding writes into the pod.
    fn notes(&self, pod: &PodFacts, assignment: &Assignment) -> BTreeMap<String, String> {
        let mut notes = assignment.annotations(&pod.uid);
        if let Some(request) = pod.asks.request() {
            let ledger = self.app.ledger.lock();
            let size = |uuid: &str| ledger.card_size(&self.args.node, uuid);
            notes.extend(allowances(request, &pod.containers, assignment, size));
        }
        notes
    }

    /// The pod as the API server has it, unless it is gone.
    async fn read(&self) -> Result<Option<Arc<PodFacts>>, AskError> {
        let (namespace, name) = (&self.args.pod_namespace, &self.args.pod_name);
        read(self.app, namespace, name, self.uid).await
    }

    /// Reads the pod back until its state is certain, however long that takes. With `fence`, an
    /// unbound pod is patched, so that the Binding that may still be under way fails.
    async fn settle(&self, fence: bool) -> Option<Arc<PodFacts>> {
        let mut pauses = Backoff::new(Duration::from_millis(50), READ_TIMEOUT);
        loop {
            let seen = match self.read().await {
                Ok(Some(pod)) if fence && pod.node.is_none() => self.fence(&pod).await,
                other => other,
            };
            match seen {
                Ok(seen) => return seen,
                Err(error) => {
                    tracing::debug!(pod = %self.args.pod_name, %error, "cannot read the pod back");
                    sleep(pauses.pause()).await;
                }
            }
        }
    }

    async fn fence(&self, pod: &PodFacts) -> Result<Option<Arc<PodFacts>>, AskError> {
        let mark = format!("{} at {}", self.app.identity, Timestamp::now());
        let pods = self.pods();
        let patched = annotate(&pods, pod, names::FENCE, &mark);
        let pod = within(READ_TIMEOUT, patched).await?;
        Ok(facts(self.app, &Each::Whole(pod), self.uid))
    }
}

/// The pod as the API server has it, unless it is gone.
async fn read(
    app: &App,
    namespace: &str,
    name: &str,
    uid: &str,
) -> Result<Option<Arc<PodFacts>>, AskError> {
    let pods = Api::<Each<PodObject>>::namespaced(app.client.clone(), namespace);
    let pod = within(READ_TIMEOUT, pods.get_opt(name)).await?;
    Ok(pod.and_then(|pod| facts(app, &pod, uid)))
}

/// Another pod under the same name is none of ours.
fn facts(app: &App, pod: &Each<PodObject>, uid: &str) -> Option<Arc<PodFacts>> {
    let facts = pod.facts(&app.args.resource_name);
    facts.filter(|facts| *facts.uid == *uid).map(Arc::new)
}

/// Reads again, for as long as the process runs, the pods that are bound by our own word alone and that
/// no watch shows.
pub(crate) async fn confirm(app: Arc<App>) {
    loop {
        sleep(CONFIRM_EVERY).await;
        let pods = app.ledger.lock().unconfirmed(app.ledger.now());
        for pod in pods.into_iter().take(CONFIRM_AT_ONCE) {
            if let Err(error) = reread(&app, &pod).await {
                tracing::debug!(pod = %pod.name, %error, "cannot read a bound pod again");
                break;
            }
        }
    }
}

/// Reads a pod again and updates the ledger.
pub(crate) async fn reread(app: &App, pod: &PodFacts) -> Result<(), AskError> {
    let asked = app.ledger.lock().copies();
    match read(app, &pod.namespace, &pod.name, &pod.uid).await? {
        Some(seen) => {
            let now = app.ledger.now();
            let seen = PodFacts::clone(&seen);
            app.ledger.lock().read_back(seen, asked, now);
        }
        None => app.ledger.lock().delete_pod(&pod.uid),
    }
    app.ledger.wake.notify_one();
    Ok(())
}
