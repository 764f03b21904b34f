//! One extender decides, without trusting a clock.
//!
//! The epoch is `spec.leaseTransitions` of a Lease, moved by compare-and-swap. Whoever is called
//! by kube-scheduler takes the next one. A predecessor that did not leave cleanly may still have a
//! Binding on its way: every unbound pod that asks for GPU memory is patched with the new epoch,
//! which moves its resourceVersion and so makes that Binding fail, before the pods are listed and
//! the first reservation is made.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::{StreamExt, TryStreamExt, stream};
use gpustow_api::{PodFacts, names};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use thiserror::Error;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

/// Patches of pods under way at once while fencing.
const FENCE_WIDTH: usize = 32;
/// Compare-and-swaps of the Lease tried in one takeover.
const SWAPS: u32 = 4;
/// For one look at the Lease.
const LEASE_TIMEOUT: Duration = Duration::from_secs(3);

/// Why this replica may not decide.
#[derive(Debug, Error)]
pub(crate) enum EpochError {
    /// Another replica decides.
    #[error(
        "extender {holder} decides since epoch {epoch}; if two kube-schedulers run side by side, \
         point both at one extender"
    )]
    NotOurs {
        /// Its identity.
        holder: String,
        /// Its epoch.
        epoch: u64,
    },
    /// The API server could not be asked.
    #[error("cannot settle with the API server who decides: {0}")]
    Api(#[source] Box<kube::Error>),
    /// It did not answer in time.
    #[error("cannot settle with the API server who decides: no answer from it in time")]
    Timeout,
}

impl From<kube::Error> for EpochError {
    fn from(error: kube::Error) -> Self {
        Self::Api(Box::new(error))
    }
}

#[derive(Debug, Default)]
struct State {
    /// The epoch that we hold as far as we know.
    held: Option<u64>,
    taken: Option<Instant>,
}

/// This replica's part in the succession of epochs.
pub(crate) struct Epoch {
    leases: Api<Lease>,
    pods: Api<Pod>,
    name: String,
    identity: String,
    resource: String,
    retake_after: Duration,
    state: Mutex<State>,
    /// Guards nothing but the takeover itself: one at a time.
    takeover: tokio::sync::Mutex<()>,
    looks: mpsc::UnboundedSender<oneshot::Sender<Result<(String, u64), EpochError>>>,
}

/// What the flags say about the Lease.
pub(crate) struct Settings {
    /// Its namespace.
    pub(crate) namespace: String,
    /// Its name.
    pub(crate) name: String,
    /// This replica.
    pub(crate) identity: String,
    /// The extended resource of the pods to fence.
    pub(crate) resource: String,
    /// Least time between two takeovers by this replica.
    pub(crate) retake_after: Duration,
}

impl Epoch {
    /// A replica that holds no epoch yet.
    #[must_use]
    pub(crate) fn new(client: Client, settings: Settings) -> Self {
        let Settings {
            namespace,
            name,
            identity,
            resource,
            retake_after,
        } = settings;
        let leases = Api::namespaced(client.clone(), &namespace);
        let (looks, asked) = mpsc::unbounded_channel();
        tokio::spawn(look_for_all(leases.clone(), name.clone(), asked));
        Self {
            leases,
            pods: Api::all(client),
            name,
            identity,
            resource,
            retake_after,
            state: Mutex::default(),
            takeover: tokio::sync::Mutex::default(),
            looks,
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The epoch that this replica holds as far as it knows.
    #[must_use]
    pub(crate) fn held(&self) -> Option<u64> {
        self.state().held
    }

    /// The epoch in which this replica decides; takes the next one if it holds none. `relisted`
    /// gets the pods as they are after a takeover, before anybody may decide by them.
    ///
    /// # Errors
    /// If another replica decides and this one may not relieve it yet, or the API server does not
    /// answer.
    pub(crate) async fn ensure(
        &self,
        relisted: impl FnOnce(Vec<PodFacts>, Instant),
    ) -> Result<u64, EpochError> {
        if let Some(epoch) = self.held() {
            return Ok(epoch);
        }
        let _one = self.takeover.lock().await;
        if let Some(epoch) = self.held() {
            return Ok(epoch);
        }
        let epoch = self.take(relisted).await?;
        let mut state = self.state();
        state.held = Some(epoch);
        state.taken = Some(Instant::now());
        Ok(epoch)
    }

    async fn take(&self, relisted: impl FnOnce(Vec<PodFacts>, Instant)) -> Result<u64, EpochError> {
        let (epoch, clean) = self.swap().await?;
        let fenced = if clean { 0 } else { self.fence(epoch).await? };
        let began = Instant::now();
        let pods = self.pods.list(&ListParams::default()).await?;
        let facts = pods
            .iter()
            .filter_map(|pod| PodFacts::from_pod(pod, &self.resource));
        relisted(facts.filter(|pod| !pod.released).collect(), began);
        tracing::info!(epoch, identity = %self.identity, fenced, clean, "took over");
        Ok(epoch)
    }

    /// Moves the Lease to the next epoch. Also says whether its last holder left cleanly.
    async fn swap(&self) -> Result<(u64, bool), EpochError> {
        let mut last = None;
        for _ in 0..SWAPS {
            let written = match self.leases.get_opt(&self.name).await? {
                None => {
                    let lease = self.lease(None, 1);
                    self.leases
                        .create(&PostParams::default(), &lease)
                        .await
                        .map(|_| (1, false))
                }
                Some(old) => {
                    let clean = left_cleanly(&old);
                    let (holder, epoch) = holder(&old);
                    if !clean && holder != self.identity && self.took_lately() {
                        return Err(EpochError::NotOurs { holder, epoch });
                    }
                    let lease = self.lease(old.metadata.resource_version, epoch + 1);
                    let params = PostParams::default();
                    let written = self.leases.replace(&self.name, &params, &lease).await;
                    written.map(|_| (epoch + 1, clean))
                }
            };
            match written {
                Err(kube::Error::Api(status)) if status.code == 409 => {
                    last = Some(kube::Error::Api(status));
                }
                other => return Ok(other?),
            }
        }
        Err(last.map_or(EpochError::Timeout, EpochError::from))
    }

    fn took_lately(&self) -> bool {
        self.state()
            .taken
            .is_some_and(|taken| taken.elapsed() < self.retake_after)
    }

    fn lease(&self, resource_version: Option<String>, epoch: u64) -> Lease {
        Lease {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                resource_version,
                ..ObjectMeta::default()
            },
            spec: Some(LeaseSpec {
                holder_identity: Some(self.identity.clone()),
                lease_transitions: Some(i32::try_from(epoch).unwrap_or(i32::MAX)),
                ..LeaseSpec::default()
            }),
        }
    }

    /// Makes every Binding fail that an earlier epoch still has under way. Pods of any scheduler
    /// and gated ones too: they could have been anything when that Binding was sent.
    async fn fence(&self, epoch: u64) -> Result<usize, EpochError> {
        let unbound = ListParams::default().fields("spec.nodeName=");
        let pods = self.pods.list(&unbound).await?;
        let asking = pods
            .iter()
            .filter_map(|pod| PodFacts::from_pod(pod, &self.resource));
        let asking = asking.filter(|pod| pod.request.as_ref().map_or(true, |r| !r.is_empty()));
        let patches = asking.map(|pod| async move {
            let (pods, epoch) = (self.pods_of(&pod), epoch.to_string());
            match annotate(&pods, &pod, names::EPOCH, &epoch).await {
                Ok(_) => Ok(1),
                Err(kube::Error::Api(status)) if status.code == 404 => Ok(0),
                Err(error) => Err(EpochError::from(error)),
            }
        });
        let patches: Vec<_> = patches.collect();
        let patched = stream::iter(patches).buffer_unordered(FENCE_WIDTH);
        patched
            .try_fold(0, |sum, one| async move { Ok(sum + one) })
            .await
    }

    fn pods_of(&self, pod: &PodFacts) -> Api<Pod> {
        Api::namespaced(self.pods.clone().into_client(), &pod.namespace)
    }

    /// Asks the API server, from now on, whether `epoch` is still ours. One request answers all
    /// who asked before it began.
    ///
    /// # Errors
    /// If it is not, or nobody could tell.
    pub(crate) async fn confirm(&self, epoch: u64) -> Result<(), EpochError> {
        let (answer, answered) = oneshot::channel();
        self.looks.send(answer).map_err(|_| EpochError::Timeout)?;
        let (holder, current) = answered.await.map_err(|_| EpochError::Timeout)??;
        if holder == self.identity && current == epoch {
            return Ok(());
        }
        self.lost(epoch);
        Err(EpochError::NotOurs {
            holder,
            epoch: current,
        })
    }

    /// Another replica has taken over from `epoch`.
    pub(crate) fn lost(&self, epoch: u64) {
        let mut state = self.state();
        if state.held == Some(epoch) {
            tracing::warn!(epoch, "another extender took over");
            state.held = None;
        }
    }

    /// Marks the epoch as left with every bind done, so that a successor need not fence.
    ///
    /// # Errors
    /// If the API server refuses or does not answer.
    pub(crate) async fn leave(&self) -> Result<(), EpochError> {
        let Some(epoch) = self.state().held.take() else {
            return Ok(());
        };
        let lease = self.leases.get(&self.name).await?;
        if holder(&lease) != (self.identity.clone(), epoch) {
            return Ok(());
        }
        let mut left = lease;
        let annotations = left.metadata.annotations.get_or_insert_default();
        annotations.insert(names::LEFT_CLEANLY.to_owned(), "true".to_owned());
        self.leases
            .replace(&self.name, &PostParams::default(), &left)
            .await?;
        tracing::info!(epoch, "left the epoch cleanly");
        Ok(())
    }
}

fn holder(lease: &Lease) -> (String, u64) {
    let spec = lease.spec.as_ref();
    let holder = spec
        .and_then(|spec| spec.holder_identity.clone())
        .unwrap_or_default();
    let epoch = spec.and_then(|spec| spec.lease_transitions).unwrap_or(0);
    (holder, u64::try_from(epoch).unwrap_or(0))
}

fn left_cleanly(lease: &Lease) -> bool {
    let annotations = lease.metadata.annotations.as_ref();
    annotations.is_some_and(|map| map.get(names::LEFT_CLEANLY).is_some_and(|v| v == "true"))
}

/// Writes an annotation through `pods/status`.
pub(crate) async fn annotate(
    pods: &Api<Pod>,
    pod: &PodFacts,
    key: &str,
    value: &str,
) -> Result<Pod, kube::Error> {
    let patch = json!({"metadata": {"uid": &*pod.uid, "annotations": {key: value}}});
    pods.patch_status(&pod.name, &PatchParams::default(), &Patch::Merge(patch))
        .await
}

/// Looks at the Lease on behalf of all who wait, again and again.
async fn look_for_all(
    leases: Api<Lease>,
    name: String,
    mut asked: mpsc::UnboundedReceiver<oneshot::Sender<Result<(String, u64), EpochError>>>,
) {
    while let Some(first) = asked.recv().await {
        let mut waiting = vec![first];
        while let Ok(next) = asked.try_recv() {
            waiting.push(next);
        }
        let seen = timeout(LEASE_TIMEOUT, leases.get(&name)).await;
        let mut seen = Some(match seen {
            Ok(lease) => lease.map(|lease| holder(&lease)).map_err(EpochError::from),
            Err(_) => Err(EpochError::Timeout),
        });
        for answer in waiting {
            let copy = match &seen {
                Some(Ok(holder)) => Ok(holder.clone()),
                _ => seen.take().unwrap_or(Err(EpochError::Timeout)),
            };
            // Whoever asked may have given up.
            let _ = answer.send(copy);
        }
    }
}
