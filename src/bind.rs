//! Binding a pod: one POST that carries node and cards, and what to make of its outcome.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dashmap::DashMap;
use gpustow_api::{Assignment, BadRequest, PodFacts, names};
use gpustow_ledger::{Ask, BindRefusal, Outcome};
use k8s_openapi::api::core::v1::{Binding, ObjectReference, Pod};
use kube::Api;
use kube::api::{ObjectMeta, PostParams};
use thiserror::Error;
use tokio::time::{sleep, timeout};

use crate::App;
use crate::epoch::{EpochError, annotate};
use crate::wire::ExtenderBindingArgs;

/// Bindings sent for one call, resends for a changed pod included.
const ATTEMPTS: u32 = 5;
/// For one request that reads a pod back.
const READ_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a pod is not bound, as kube-scheduler shows it to the user.
#[derive(Debug, Error)]
pub(crate) enum BindError {
    /// kube-scheduler gave up waiting and asked again.
    #[error("a bind of this pod is still under way; its outcome will show in the pod")]
    UnderWay,
    /// Its outcome is not known in time.
    #[error("the API server did not say in time whether the pod is bound; this is being looked up")]
    Unknown,
    /// The pod is bound already, not by this call.
    #[error("the pod is bound to node {0} already")]
    Elsewhere(String),
    /// The pod does not exist any more.
    #[error("the pod is gone")]
    Gone,
    /// The pod is being deleted.
    #[error("the pod is being deleted")]
    Deleting,
    /// The pod got scheduling gates.
    #[error("the pod has scheduling gates")]
    Gated,
    /// It changed again and again meanwhile.
    #[error("the pod changed during every attempt to bind it")]
    Changing,
    /// Its request cannot be read.
    #[error(transparent)]
    Request(#[from] BadRequest),
    /// The node does not do.
    #[error(transparent)]
    Refused(#[from] BindRefusal),
    /// This replica may not decide.
    #[error(transparent)]
    Epoch(#[from] EpochError),
    /// The API server refused.
    #[error("the API server refused: {0}")]
    Api(#[source] Box<kube::Error>),
}

impl BindError {
    /// The value of the `reason` label.
    #[must_use]
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::UnderWay | Self::Unknown => "unknown_outcome",
            Self::Elsewhere(_) => "bound_elsewhere",
            Self::Gone | Self::Deleting => "gone",
            Self::Gated => "gated",
            Self::Changing => "changed",
            Self::Request(_) => "bad_pod",
            Self::Refused(_) => "no_fit",
            Self::Epoch(_) => "epoch",
            Self::Api(_) => "api",
        }
    }
}

/// Binds under way by pod UID.
#[derive(Default)]
pub(crate) struct Binds(DashMap<Arc<str>, ()>);

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
/// beyond it. `Ok` holds the pod and its assignment, none if it asks for no GPU memory.
///
/// # Errors
/// With the text for the user. The ledger is right in every case.
pub(crate) async fn bind(
    app: &Arc<App>,
    args: ExtenderBindingArgs,
) -> Result<(Arc<PodFacts>, Option<Arc<Assignment>>), BindError> {
    let uid: Arc<str> = args.pod_uid.as_str().into();
    if app.binds.0.insert(uid.clone(), ()).is_some() {
        return Err(BindError::UnderWay);
    }
    let under_way = UnderWay(app.clone(), uid.clone());
    let deadline = Instant::now() + app.args.bind_timeout;
    // Its own task: kube-scheduler hanging up must not end a bind in the middle.
    let task = tokio::spawn(async move {
        let attempt = Attempt {
            app: &under_way.0,
            args: &args,
            uid: &uid,
            deadline,
        };
        attempt.run().await
    });
    match timeout(app.args.bind_timeout, task).await {
        Ok(done) => done.unwrap_or(Err(BindError::Unknown)),
        Err(_) => Err(BindError::Unknown),
    }
}

struct Attempt<'a> {
    app: &'a Arc<App>,
    args: &'a ExtenderBindingArgs,
    uid: &'a Arc<str>,
    deadline: Instant,
}

/// What a pod looks like when it is read back.
enum Seen {
    Unbound(Arc<PodFacts>),
    Bound(Arc<PodFacts>),
    Gone,
}

impl Attempt<'_> {
    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.app.client.clone(), &self.args.pod_namespace)
    }

    async fn run(&self) -> Result<(Arc<PodFacts>, Option<Arc<Assignment>>), BindError> {
        let known = self.app.ledger().pod(self.uid);
        let mut pod = match known {
            Some(pod) => pod,
            None => match self.read().await.map_err(api)? {
                Seen::Unbound(pod) | Seen::Bound(pod) => pod,
                Seen::Gone => return Err(BindError::Gone),
            },
        };
        let request = pod.request.clone()?;
        if request.is_empty() {
            self.send(&pod, None).await.map_err(api)?;
            return Ok((pod, None));
        }
        let epoch = self.app.epoch().await?;
        for _ in 0..ATTEMPTS {
            self.bindable(&pod)?;
            if pod.node.is_some() {
                return self.already(pod);
            }
            if let Some(newer) = pod.epoch.filter(|newer| *newer > epoch) {
                self.app.epoch.lost(epoch);
                let holder = "a successor".to_owned();
                return Err(EpochError::NotOurs {
                    holder,
                    epoch: newer,
                }
                .into());
            }
            let assignment = self.begin(&pod)?;
            if let Err(lost) = self.app.epoch.confirm(epoch).await {
                self.end(&pod, Outcome::Failed);
                return Err(lost.into());
            }
            let sent = self.send(&pod, Some(&assignment)).await;
            let seen = match sent {
                Ok(()) => {
                    self.end(&pod, Outcome::Bound);
                    return Ok((pod, Some(assignment)));
                }
                Err(error) if refused_for_good(&error) => {
                    self.end(&pod, Outcome::Failed);
                    return Err(api(error));
                }
                Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {
                    self.settle(false).await
                }
                Err(error) => {
                    tracing::warn!(pod = %self.args.pod_name, %error, "bind: outcome unknown");
                    self.settle(true).await
                }
            };
            match seen {
                Seen::Bound(bound) => {
                    let ours = bound.node.as_deref() == Some(&self.args.node)
                        && bound.assignment == Some(Ok(assignment.clone()));
                    let outcome = if ours {
                        Outcome::Bound
                    } else {
                        Outcome::Conflict
                    };
                    let now = self.app.now();
                    self.app.ledger().read_back(PodFacts::clone(&bound), now);
                    self.end(&pod, outcome);
                    return self.already(bound);
                }
                Seen::Gone => {
                    self.end(&pod, Outcome::Failed);
                    return Err(BindError::Gone);
                }
                Seen::Unbound(fresh) => {
                    self.end(&pod, Outcome::Conflict);
                    pod = fresh;
                }
            }
            if Instant::now() >= self.deadline {
                return Err(BindError::Unknown);
            }
        }
        Err(BindError::Changing)
    }

    fn begin(&self, pod: &PodFacts) -> Result<Arc<Assignment>, BindError> {
        let ask = Ask {
            pod,
            cooperative: false,
            slow: false,
            tolerates: &|_| true,
        };
        let now = self.app.now();
        Ok(self.app.ledger().begin_bind(&ask, &self.args.node, now)?)
    }

    fn end(&self, pod: &PodFacts, outcome: Outcome) {
        let now = self.app.now();
        self.app.ledger().end_bind(pod, outcome, now);
        self.app.wake.notify_one();
    }

    /// Is this still a pod that may be bound?
    fn bindable(&self, pod: &PodFacts) -> Result<(), BindError> {
        match pod {
            PodFacts { node: Some(_), .. } => Ok(()),
            PodFacts { deleting: true, .. } => Err(BindError::Deleting),
            PodFacts { gated: true, .. } => Err(BindError::Gated),
            _ => Ok(()),
        }
        .inspect_err(|_| self.end(pod, Outcome::Failed))
    }

    /// The pod is bound: success if it is where it should be, with an assignment.
    fn already(
        &self,
        pod: Arc<PodFacts>,
    ) -> Result<(Arc<PodFacts>, Option<Arc<Assignment>>), BindError> {
        let node = pod.node.as_deref().unwrap_or_default();
        match &pod.assignment {
            Some(Ok(assignment)) if node == self.args.node => {
                let assignment = assignment.clone();
                Ok((pod, Some(assignment)))
            }
            _ => Err(BindError::Elsewhere(node.to_owned())),
        }
    }

    async fn send(
        &self,
        pod: &PodFacts,
        assignment: Option<&Assignment>,
    ) -> Result<(), kube::Error> {
        let binding = Binding {
            metadata: ObjectMeta {
                name: Some(self.args.pod_name.clone()),
                namespace: Some(self.args.pod_namespace.clone()),
                uid: Some(self.uid.to_string()),
                resource_version: assignment.map(|_| pod.resource_version.to_string()),
                annotations: assignment.map(Assignment::annotations),
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
        match timeout(left, post).await {
            Ok(answer) => answer.map(drop),
            Err(_) => Err(kube::Error::Service("no answer in time".into())),
        }
    }

    async fn read(&self) -> Result<Seen, kube::Error> {
        let pods = self.pods();
        match timeout(READ_TIMEOUT, pods.get_opt(&self.args.pod_name)).await {
            Ok(pod) => Ok(self.seen(pod?)),
            Err(_) => Err(kube::Error::Service("no answer in time".into())),
        }
    }

    fn seen(&self, pod: Option<Pod>) -> Seen {
        let facts = pod.and_then(|pod| PodFacts::from_pod(&pod, &self.app.args.resource_name));
        match facts.filter(|facts| facts.uid == *self.uid) {
            None => Seen::Gone,
            Some(facts) if facts.node.is_some() => Seen::Bound(Arc::new(facts)),
            Some(facts) => Seen::Unbound(Arc::new(facts)),
        }
    }

    /// Reads the pod back until its state is certain, however long that takes. With `fence`, an
    /// unbound pod is patched, so that the Binding that may still be under way fails.
    async fn settle(&self, fence: bool) -> Seen {
        let mut pause = Duration::from_millis(50);
        loop {
            let seen = match self.read().await {
                Ok(Seen::Unbound(pod)) if fence => self.fence(&pod).await,
                other => other,
            };
            match seen {
                Ok(seen) => return seen,
                Err(error) => {
                    tracing::debug!(pod = %self.args.pod_name, %error, "cannot read the pod back");
                    sleep(pause).await;
                    pause = (pause * 2).min(READ_TIMEOUT);
                }
            }
        }
    }

    async fn fence(&self, pod: &PodFacts) -> Result<Seen, kube::Error> {
        let mark = format!("{}-{}", self.app.identity, self.app.now().as_micros());
        let pods = self.pods();
        match timeout(READ_TIMEOUT, annotate(&pods, pod, names::FENCE, &mark)).await {
            Ok(Ok(pod)) => Ok(self.seen(Some(pod))),
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => {
                self.read().await
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(kube::Error::Service("no answer in time".into())),
        }
    }
}

/// True if the API server refused the Binding for a reason that lies not in the pod's state.
fn refused_for_good(error: &kube::Error) -> bool {
    let kube::Error::Api(status) = error else {
        return false;
    };
    (400..500).contains(&status.code) && !matches!(status.code, 404 | 408 | 409)
}

fn api(error: kube::Error) -> BindError {
    BindError::Api(Box::new(error))
}
