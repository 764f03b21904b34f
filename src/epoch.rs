//! One extender decides, without trusting a clock.
//!
//! The epoch is `spec.leaseTransitions` of a Lease, moved by compare-and-swap. Whoever is called
//! by kube-scheduler takes the next one. A predecessor that did not leave cleanly may still have a
//! Binding on its way: every unbound pod that asks for GPU memory is patched with the new epoch,
//! which moves its resourceVersion and so makes that Binding fail, before the pods are listed and
//! the first reservation is made. It does not know how they are listed.

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

use crate::ask::{AskError, within};

/// Patches of pods under way at once while fencing.
const FENCE_WIDTH: usize = 32;
/// Compare-and-swaps of the Lease tried in one takeover.
const SWAPS: u32 = 4;
/// For one request about the Lease or one pod.
const TIMEOUT: Duration = Duration::from_secs(3);
/// For a list of all pods, and for the ledger to take it in.
const LIST_TIMEOUT: Duration = Duration::from_secs(30);

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
    Ask(#[from] AskError),
    /// A takeover takes its time.
    #[error("taking over from another extender: reading the cluster's state")]
    TakingOver,
}

#[derive(Debug, Default)]
struct State {
    /// The epoch that we hold as far as we know.
    held: Option<u64>,
    /// The last epoch that we wrote into the Lease, and when.
    taken: Option<(u64, Instant)>,
    /// The epoch that was ours when the Lease was looked at last, and how many copies of pods had
    /// come when that look began.
    confirmed: Option<(u64, u64)>,
}

/// Where holder and epoch of the Lease are to be told.
type Answer = oneshot::Sender<Result<(String, u64), AskError>>;

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
    looks: mpsc::UnboundedSender<Answer>,
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

    /// The epoch in which this replica decides; takes the next one if it holds none. `relist` ends
    /// when the ledger has the pods of a list that was asked for after it began.
    ///
    /// # Errors
    /// If another replica decides and this one may not relieve it yet, or the API server does not
    /// answer.
    pub(crate) async fn ensure(&self, relist: impl Future<Output = ()>) -> Result<u64, EpochError> {
        let _one = self.takeover.lock().await;
        if let Some(epoch) = self.held() {
            return Ok(epoch);
        }
        let (epoch, clean) = self.swap().await?;
        let fenced = if clean { 0 } else { self.fence(epoch).await? };
        timeout(LIST_TIMEOUT, relist)
            .await
            .map_err(|_| AskError::Timeout)?;
        {
            let mut state = self.state();
            state.held = Some(epoch);
            // A Lease that was deleted counts from one again.
            state.confirmed = None;
        }
        tracing::info!(epoch, identity = %self.identity, fenced, clean, "took over");
        Ok(epoch)
    }

    /// Does the Lease name this replica, from an earlier life? Then nobody else will take over.
    ///
    /// # Errors
    /// If the API server refuses or does not answer.
    pub(crate) async fn is_inherited(&self) -> Result<bool, AskError> {
        let lease = within(TIMEOUT, self.leases.get_opt(&self.name)).await?;
        Ok(lease.is_some_and(|lease| holder(&lease).0 == self.identity))
    }

    /// Moves the Lease to the next epoch. Also says whether its last holder left cleanly.
    async fn swap(&self) -> Result<(u64, bool), EpochError> {
        for _ in 0..SWAPS {
            let old = within(TIMEOUT, self.leases.get_opt(&self.name)).await?;
            let params = PostParams::default();
            let (epoch, clean, written) = match old {
                None => {
                    let lease = self.lease(None, 1);
                    let create = self.leases.create(&params, &lease);
                    (1, false, within(TIMEOUT, create).await)
                }
                Some(old) => {
                    let clean = left_cleanly(&old);
                    let (holder, epoch) = holder(&old);
                    if !clean && self.relieved_lately(epoch) {
                        return Err(EpochError::NotOurs { holder, epoch });
                    }
                    let lease = self.lease(old.metadata.resource_version, epoch + 1);
                    let replace = self.leases.replace(&self.name, &params, &lease);
                    (epoch + 1, clean, within(TIMEOUT, replace).await)
                }
            };
            match written {
                Ok(_) => {
                    self.state().taken = Some((epoch, Instant::now()));
                    return Ok((epoch, clean));
                }
                Err(error) if error.status() == Some(409) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(EpochError::TakingOver)
    }

    /// Did this replica take over just now, and does the Lease show that it was relieved since?
    fn relieved_lately(&self, current: u64) -> bool {
        let taken = self.state().taken;
        taken.is_some_and(|(epoch, at)| epoch != current && at.elapsed() < self.retake_after)
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
        let pods = within(LIST_TIMEOUT, self.pods.list(&unbound)).await?;
        let asking = pods
            .iter()
            .filter_map(|pod| PodFacts::from_pod(pod, &self.resource));
        let asking = asking.filter(|pod| pod.request.as_ref().map_or(true, |r| !r.is_empty()));
        let patches: Vec<_> = asking.map(|pod| self.fence_pod(pod, epoch)).collect();
        let patched = stream::iter(patches).buffer_unordered(FENCE_WIDTH);
        patched
            .try_fold(0, |sum, one| async move { Ok(sum + one) })
            .await
    }

    /// 1 for a pod that was patched, 0 for one that need not be.
    async fn fence_pod(&self, pod: PodFacts, epoch: u64) -> Result<usize, EpochError> {
        let (pods, epoch) = (self.pods_of(&pod), epoch.to_string());
        for _ in 0..SWAPS {
            let patched = within(TIMEOUT, annotate(&pods, &pod, names::EPOCH, &epoch)).await;
            match patched {
                Ok(_) => return Ok(1),
                Err(error) if error.status() == Some(404) => return Ok(0),
                // Full: then a Binding, which brings more of them, cannot be on its way.
                Err(AskError::Refused(status))
                    if status.code == 422 && status.message.contains("metadata.annotations") =>
                {
                    return Ok(0);
                }
                // Another pod of that name is younger than our epoch.
                Err(error) if error.status() == Some(409) => {
                    let now = within(TIMEOUT, pods.get_opt(&pod.name)).await?;
                    if now.and_then(|now| now.metadata.uid).as_deref() != Some(&*pod.uid) {
                        return Ok(0);
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(EpochError::TakingOver)
    }

    fn pods_of(&self, pod: &PodFacts) -> Api<Pod> {
        Api::namespaced(self.pods.clone().into_client(), &pod.namespace)
    }

    /// Was `epoch` ours after pod copy number `copy` had come? Then a Binding with that copy's
    /// resourceVersion fails once a successor has fenced, whenever it is sent. `copies` is how many
    /// have come by now. The API server is asked unless an earlier look tells.
    ///
    /// # Errors
    /// If it was not, or nobody could tell.
    pub(crate) async fn confirm_for(
        &self,
        epoch: u64,
        copy: u64,
        copies: u64,
    ) -> Result<(), EpochError> {
        let confirmed = self.state().confirmed;
        if confirmed.is_some_and(|(ours, seen)| ours == epoch && copy < seen) {
            return Ok(());
        }
        self.confirm(epoch).await?;
        let mut state = self.state();
        let before = state.confirmed.filter(|(ours, _)| *ours == epoch);
        let before = before.map_or(0, |(_, seen)| seen);
        state.confirmed = Some((epoch, before.max(copies)));
        Ok(())
    }

    /// Asks the API server, from now on, whether `epoch` is still ours. One request answers all
    /// who asked before it began.
    ///
    /// # Errors
    /// If it is not, or nobody could tell.
    pub(crate) async fn confirm(&self, epoch: u64) -> Result<(), EpochError> {
        let (answer, answered) = oneshot::channel();
        self.looks.send(answer).map_err(|_| AskError::Timeout)?;
        let (holder, current) = answered.await.map_err(|_| AskError::Timeout)??;
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
    pub(crate) async fn leave(&self) -> Result<(), AskError> {
        let Some(epoch) = self.state().held.take() else {
            return Ok(());
        };
        let mut lease = within(TIMEOUT, self.leases.get(&self.name)).await?;
        if holder(&lease) != (self.identity.clone(), epoch) {
            return Ok(());
        }
        let annotations = lease.metadata.annotations.get_or_insert_default();
        annotations.insert(names::LEFT_CLEANLY.to_owned(), "true".to_owned());
        let params = PostParams::default();
        within(TIMEOUT, self.leases.replace(&self.name, &params, &lease)).await?;
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
    mut asked: mpsc::UnboundedReceiver<Answer>,
) {
    while let Some(first) = asked.recv().await {
        let mut waiting = vec![first];
        while let Ok(next) = asked.try_recv() {
            waiting.push(next);
        }
        let seen = within(TIMEOUT, leases.get_opt(&name)).await;
        // A Lease that is gone is nobody's.
        let seen = seen.map(|lease| lease.as_ref().map(holder).unwrap_or_default());
        for answer in waiting {
            let copy = match &seen {
                Ok(seen) => Ok(seen.clone()),
                Err(AskError::Refused(status)) => Err(AskError::Refused(status.clone())),
                Err(_) => Err(AskError::Timeout),
            };
            // Whoever asked may have given up.
            let _ = answer.send(copy);
        }
    }
}
