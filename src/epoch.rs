//! One extender decides, without trusting a clock.
//!
//! Who decides is written in a Lease, moved by compare-and-swap: the holder, the number of its epoch
//! in `spec.leaseTransitions`, and `spec.acquireTime`, by which one tenure differs from every other
//! even if the Lease was deleted and counts from zero again. A replica that kube-scheduler calls
//! takes the next epoch. A predecessor that did not leave cleanly may still have a Binding on its
//! way: [`Fence`] makes it fail before the ledger catches up and the first reservation is made. It does
//! not know how the ledger does.
//!
//! `crates/ledger/tests/ledger/epoch` is this protocol's specification, and searches it for a card that is
//! given away twice.

mod fence;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpustow_api::{PodFacts, PodObject, names};
use gpustow_serve::rate::Backoff;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use thiserror::Error;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};

use crate::ask::{AskError, within};
pub(crate) use fence::{Fence, Unfenced};

/// Compare-and-swaps of the Lease tried in one takeover.
const SWAPS: u32 = 4;
/// For one request about the Lease or one pod.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Before a takeover that failed goes on; twice as long after each failure, up to [`MAX_PAUSE`].
const PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(5);

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
    #[error("cannot claim the right to decide: {0}; kube-scheduler tries again")]
    Ask(#[from] AskError),
    /// A takeover takes its time.
    #[error("taking over from another extender: reading the cluster's state")]
    TakingOver,
    /// This replica is about to end.
    #[error("this extender is shutting down")]
    Leaving,
}

/// Who decides, by the Lease. If the Lease is gone, the default.
#[derive(Clone, Debug, Default, PartialEq)]
struct Tenure {
    holder: String,
    epoch: u64,
    /// UID of the Lease.
    lease: Option<String>,
    since: Option<MicroTime>,
}

impl Tenure {
    fn of(lease: &Lease) -> Self {
        let spec = lease.spec.clone().unwrap_or_default();
        let epoch = spec.lease_transitions.unwrap_or(0);
        Self {
            holder: spec.holder_identity.unwrap_or_default(),
            epoch: u64::try_from(epoch).unwrap_or(0),
            lease: lease.metadata.uid.clone(),
            since: spec.acquire_time,
        }
    }

    /// A mark that no pod has had before.
    fn mark(&self) -> String {
        let since = self.since.as_ref().map(|since| since.0.to_string());
        format!(
            "{} decides since {}: epoch {} of {}",
            self.holder,
            since.unwrap_or_default(),
            self.epoch,
            self.lease.as_deref().unwrap_or_default()
        )
    }
}

#[derive(Debug, Default)]
struct State {
    /// The tenure that is ours as far as we know, everybody fenced and known.
    held: Option<Tenure>,
    /// The last epoch that we wrote into the Lease, and when.
    taken: Option<(u64, Instant)>,
    /// When the last tenure that we tried to write began, in microseconds. It identifies the tenure, whether or not the
    /// write is known to have succeeded.
    tried: Option<i64>,
    /// The epoch that was ours when the Lease was looked at last, and how many copies of pods had
    /// come when that look began.
    confirmed: Option<(u64, u64)>,
    /// This replica does not take an epoch any more.
    closed: bool,
}

type Shared = Arc<Mutex<State>>;

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How far a takeover has come; it goes on there after a failure.
#[derive(Default)]
struct Takeover {
    /// The tenure that was won, whether the predecessor had left cleanly, and the pods that are fenced.
    won: Option<(Tenure, bool, Fence)>,
    /// Not before this.
    again: Option<Instant>,
    pauses: Option<Backoff>,
}

/// Where to send the present tenure.
type Answer = oneshot::Sender<Result<Tenure, AskError>>;

/// This replica's part in the succession of epochs.
pub(crate) struct Epoch {
    leases: Api<Lease>,
    client: Client,
    name: String,
    identity: String,
    resource: Arc<str>,
    retake_after: Duration,
    state: Shared,
    /// One at a time.
    takeover: tokio::sync::Mutex<Takeover>,
    looks: mpsc::UnboundedSender<Answer>,
}

/// The settings of the Lease, from the flags.
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
            client,
            name,
            identity,
            resource: resource.into(),
            retake_after,
            state: Shared::default(),
            takeover: tokio::sync::Mutex::default(),
            looks,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// The epoch that this replica holds as far as it knows.
    #[must_use]
    pub(crate) fn held(&self) -> Option<u64> {
        let state = self.state();
        let held = state.held.as_ref().filter(|_| !state.closed);
        held.map(|tenure| tenure.epoch)
    }

    /// The epoch in which this replica decides; takes the next one if it holds none, above `known`.
    /// `catch_up` ends when the ledger has all that was written to pods before it began, and knows of
    /// the pods that could not be fenced.
    ///
    /// # Errors
    /// If another replica decides and this one may not relieve it yet, or the API server does not
    /// answer. The next call goes on where this one stopped.
    pub(crate) async fn ensure<F: Future<Output = ()>>(
        &self,
        known: impl Fn() -> u64,
        catch_up: impl FnOnce(Fence, Arc<[Unfenced]>) -> F,
    ) -> Result<u64, EpochError> {
        let mut takeover = self.takeover.lock().await;
        if let Some(epoch) = self.held() {
            return Ok(epoch);
        }
        if let Some(again) = takeover.again {
            sleep_until(again).await;
        }
        if self.state().closed {
            return Err(EpochError::Leaving);
        }
        match self.take(&mut takeover, known, catch_up).await {
            Ok(epoch) => {
                *takeover = Takeover::default();
                Ok(epoch)
            }
            Err(error) => {
                let first = Backoff::new(PAUSE, MAX_PAUSE);
                let pause = takeover.pauses.get_or_insert(first).pause();
                let asked = match &error {
                    EpochError::Ask(error) => error.retry_after(),
                    _ => Duration::ZERO,
                };
                takeover.again = Some(Instant::now() + pause.max(asked));
                Err(error)
            }
        }
    }

    async fn take<F: Future<Output = ()>>(
        &self,
        takeover: &mut Takeover,
        known: impl Fn() -> u64,
        catch_up: impl FnOnce(Fence, Arc<[Unfenced]>) -> F,
    ) -> Result<u64, EpochError> {
        if let Some((won, ..)) = &takeover.won
            && *won != self.look().await?
        {
            takeover.won = None;
        }
        let (tenure, clean, fence) = match &mut takeover.won {
            Some(won) => won,
            None => {
                let (tenure, clean) = self.swap(known).await?;
                let (epoch, mark) = (tenure.epoch, tenure.mark());
                let fence = Fence::new(self.client.clone(), self.resource.clone(), epoch, mark);
                takeover.won.insert((tenure, clean, fence))
            }
        };
        let unfenced = match clean {
            true => Vec::new(),
            false => fence.run().await?,
        };
        let (epoch, fenced) = (tenure.epoch, fence.len());
        let unfenced: Arc<[Unfenced]> = unfenced.into();
        // However long it takes: begun again, it would take as long again.
        catch_up(fence.clone(), unfenced.clone()).await;
        {
            let mut state = self.state();
            state.held = Some(tenure.clone());
            // Epochs of a Lease that was deleted may repeat.
            state.confirmed = None;
        }
        let missed = unfenced.len();
        tracing::info!(epoch, identity = %self.identity, fenced, missed, clean, "took over");
        for index in 0..missed {
            let (fence, state, tenure) = (fence.clone(), self.state.clone(), tenure.clone());
            let unfenced = unfenced.clone();
            tokio::spawn(async move {
                let lasts = || lock(&state).held.as_ref() == Some(&tenure);
                if let Some(pod) = unfenced.get(index) {
                    fence.keep_trying(pod, lasts).await;
                }
            });
        }
        Ok(epoch)
    }

    /// Does the Lease name this replica, from an earlier life? Then no other replica will take over.
    ///
    /// # Errors
    /// If the API server refuses or does not answer.
    pub(crate) async fn is_inherited(&self) -> Result<bool, AskError> {
        let lease = within(TIMEOUT, self.leases.get_opt(&self.name)).await?;
        Ok(lease.is_some_and(|lease| Tenure::of(&lease).holder == self.identity))
    }

    /// Is there no leader: has the last one left cleanly, or was there none?
    ///
    /// # Errors
    /// If the API server refuses or does not answer.
    pub(crate) async fn is_free(&self) -> Result<bool, AskError> {
        let lease = within(TIMEOUT, self.leases.get_opt(&self.name)).await?;
        Ok(lease.is_none_or(|lease| left_cleanly(&lease)))
    }

    /// Moves the Lease to the next epoch. Also returns whether its last holder left cleanly.
    async fn swap(&self, known: impl Fn() -> u64) -> Result<(Tenure, bool), EpochError> {
        for _ in 0..SWAPS {
            let old = within(TIMEOUT, self.leases.get_opt(&self.name)).await?;
            let params = PostParams::default();
            let (clean, written) = match old {
                None => {
                    let taken = self.state().taken.map_or(0, |(epoch, _)| epoch);
                    let lease = self.lease(None, known().max(taken));
                    let create = self.leases.create(&params, &lease);
                    (false, within(TIMEOUT, create).await)
                }
                Some(old) => {
                    let clean = left_cleanly(&old);
                    let tenure = Tenure::of(&old);
                    if !clean && self.relieved_lately(&tenure) {
                        let Tenure { holder, epoch, .. } = tenure;
                        return Err(EpochError::NotOurs { holder, epoch });
                    }
                    let lease = self.lease(old.metadata.resource_version, tenure.epoch);
                    let replace = self.leases.replace(&self.name, &params, &lease);
                    (clean, within(TIMEOUT, replace).await)
                }
            };
            match written {
                Ok(lease) => {
                    let tenure = Tenure::of(&lease);
                    self.state().taken = Some((tenure.epoch, Instant::now()));
                    return Ok((tenure, clean));
                }
                Err(error) if error.status() == Some(409) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(EpochError::TakingOver)
    }

    /// Did this replica take over just now, and does the Lease show that it was relieved since?
    fn relieved_lately(&self, current: &Tenure) -> bool {
        let state = self.state();
        let since = current.since.as_ref().map(|since| since.0.as_microsecond());
        let ours = since.is_some() && since == state.tried;
        let lately = |(_, at): (u64, Instant)| at.elapsed() < self.retake_after;
        !ours && state.taken.is_some_and(lately)
    }

    /// The Lease with the epoch after `last`; the last of all is not passed, and stays apart from
    /// itself by its time.
    fn lease(&self, resource_version: Option<String>, last: u64) -> Lease {
        let last = i32::try_from(last).unwrap_or(i32::MAX);
        let now = Timestamp::now();
        self.state().tried = Some(now.as_microsecond());
        Lease {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                resource_version,
                ..ObjectMeta::default()
            },
            spec: Some(LeaseSpec {
                acquire_time: Some(MicroTime(now)),
                holder_identity: Some(self.identity.clone()),
                lease_transitions: Some(last.saturating_add(1)),
                ..LeaseSpec::default()
            }),
        }
    }

    /// Was `epoch` ours after pod copy number `copy` had come? Then a Binding with that copy's resourceVersion fails
    /// once a successor has fenced, whenever it is sent. `copies` is how many have come by now. The API server is asked
    /// unless an earlier look has the answer.
    ///
    /// # Errors
    /// If it was not, or the API server did not answer.
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
    /// If it is not, or the API server did not answer.
    pub(crate) async fn confirm(&self, epoch: u64) -> Result<(), EpochError> {
        let seen = self.look().await?;
        let mut state = self.state();
        let held = state.held.as_ref().filter(|held| held.epoch == epoch);
        if held == Some(&seen) {
            return Ok(());
        }
        if held.is_some() {
            tracing::warn!(epoch, "another extender took over");
            state.held = None;
        }
        let Tenure { holder, epoch, .. } = seen;
        Err(EpochError::NotOurs { holder, epoch })
    }

    /// The tenure that the API server shows from now on.
    async fn look(&self) -> Result<Tenure, AskError> {
        let (answer, answered) = oneshot::channel();
        self.looks.send(answer).map_err(|_| AskError::Timeout)?;
        answered.await.map_err(|_| AskError::Timeout)?
    }

    /// From here on, callers do not see this replica as the holder of an epoch, and it does not take one. A caller that
    /// saw the epoch before may still act on it.
    pub(crate) fn close(&self) {
        self.state().closed = true;
    }

    /// Marks the epoch as left with every bind done and every pod fenced, so that a successor need
    /// not fence.
    ///
    /// # Errors
    /// If the API server refuses or does not answer.
    pub(crate) async fn leave(&self) -> Result<(), AskError> {
        let Some(tenure) = self.state().held.take() else {
            return Ok(());
        };
        let mut lease = within(TIMEOUT, self.leases.get(&self.name)).await?;
        if Tenure::of(&lease) != tenure {
            return Ok(());
        }
        let annotations = lease.metadata.annotations.get_or_insert_default();
        annotations.insert(names::LEFT_CLEANLY.to_owned(), "true".to_owned());
        let params = PostParams::default();
        within(TIMEOUT, self.leases.replace(&self.name, &params, &lease)).await?;
        tracing::info!(epoch = tenure.epoch, "left the epoch cleanly");
        Ok(())
    }
}

fn left_cleanly(lease: &Lease) -> bool {
    let annotations = lease.metadata.annotations.as_ref();
    annotations.is_some_and(|map| map.get(names::LEFT_CLEANLY).is_some_and(|v| v == "true"))
}

/// Writes an annotation through `pods/status`.
pub(crate) async fn annotate(
    pods: &Api<PodObject>,
    pod: &PodFacts,
    key: &str,
    value: &str,
) -> Result<PodObject, kube::Error> {
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
        // A Lease that is gone does not have a holder.
        let seen = seen.map(|lease| lease.as_ref().map(Tenure::of).unwrap_or_default());
        for answer in waiting {
            let copy = match &seen {
                Ok(seen) => Ok(seen.clone()),
                Err(AskError::Refused(status)) => Err(AskError::Refused(status.clone())),
                Err(_) => Err(AskError::Timeout),
            };
            // The caller that asked may have given up.
            let _ = answer.send(copy);
        }
    }
}
