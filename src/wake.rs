//! Tells kube-scheduler that room appeared for a pod that sleeps: a condition on that very pod. One that stands in
//! line is let out of it instead.

use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};
use gpustow_api::{PodFacts, names};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::time::{sleep, timeout};

use crate::app::App;
use crate::ask::within;
use crate::epoch::{Epoch, EpochError};
use crate::line;
use crate::locked::Locked;
use crate::metrics::Metrics;
use crate::watch::Lists;

/// Between two looks at the ledger, at least.
const PAUSE: Duration = Duration::from_millis(20);
/// Between two looks when nothing happens.
const IDLE: Duration = Duration::from_millis(500);
/// The mix of requests is learnt anew after this long, in case it changed at constant numbers.
const LEARN_EVERY: Duration = Duration::from_secs(60);
/// Patches under way at once.
const WIDTH: usize = 16;
/// For one patch.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Whom the ledger wants woken is woken by it.
pub(crate) struct Waker {
    pub(crate) app: Arc<App>,
    pub(crate) client: Client,
    pub(crate) identity: String,
    pub(crate) ledger: Arc<Locked>,
    pub(crate) lists: Arc<Lists>,
    pub(crate) epoch: Arc<Epoch>,
    pub(crate) metrics: Arc<Metrics>,
}

impl Waker {
    /// Wakes pods for as long as the process runs.
    pub(crate) async fn run(self, wake_rate: u32) {
        let limit = (wake_rate as usize * PAUSE.as_millis() as usize / 1000).max(1);
        let mut learnt = self.ledger.now();
        loop {
            if self.ledger.now().saturating_sub(learnt) > LEARN_EVERY {
                learnt = self.ledger.now();
                self.ledger.lock().learn();
            }
            // Something happened, or reservations and pauses may have run out.
            let _ = timeout(IDLE, self.ledger.wake.notified()).await;
            let now = self.ledger.now();
            match self.epoch.held() {
                Some(epoch) if self.lists.missing().is_empty() => {
                    let mut pods = self.ledger.lock().wake(limit, now);
                    let count = pods.len();
                    let lifts = pods.extract_if(.., |pod| pod.in_line).collect();
                    self.lift_all(lifts, epoch).await;
                    if !pods.is_empty() {
                        self.wake_all(&pods, epoch).await;
                    }
                    if count == limit || self.ledger.lock().wakes_on() {
                        self.ledger.wake.notify_one();
                    }
                }
                _ => self.ledger.lock().expire(now),
            }
            sleep(PAUSE).await;
        }
    }

    /// Wakes those that `epoch` found room for. Where a successor decides by now, these are its last: kube-scheduler
    /// beside us may have put them to sleep on our word, and if it still leads, we decide again as soon as it asks.
    async fn wake_all(&self, pods: &[Arc<PodFacts>], epoch: u64) {
        if let Err(EpochError::Ask(error)) = self.epoch.confirm(epoch).await {
            tracing::debug!(%error, "cannot tell who decides: nobody is woken yet");
            let mut ledger = self.ledger.lock();
            pods.iter().for_each(|pod| ledger.wake_failed(&pod.uid));
            return;
        }
        let patches: Vec<_> = pods.iter().map(|pod| self.wake(pod)).collect();
        stream::iter(patches)
            .buffer_unordered(WIDTH)
            .collect::<()>()
            .await;
    }

    /// Lets these out of the line, if this replica still decides.
    async fn lift_all(&self, pods: Vec<Arc<PodFacts>>, epoch: u64) {
        if pods.is_empty() {
            return;
        }
        if self.epoch.confirm(epoch).await.is_err() {
            let mut ledger = self.ledger.lock();
            pods.iter().for_each(|pod| ledger.wake_failed(&pod.uid));
            return;
        }
        let lifts: Vec<_> = {
            let ledger = self.ledger.lock();
            let lift = |pod: Arc<PodFacts>| {
                let why = ledger.lifted_because(&pod.uid);
                line::lift(self.app.clone(), epoch, pod, why)
            };
            pods.into_iter().map(lift).collect()
        };
        // One that is tried again holds up nobody who is to be woken.
        tokio::spawn(stream::iter(lifts).buffer_unordered(WIDTH).collect::<()>());
    }

    async fn wake(&self, pod: &PodFacts) {
        let pods = Api::<Pod>::namespaced(self.client.clone(), &pod.namespace);
        let now = Timestamp::now();
        let patch = json!({
            "metadata": {"uid": &*pod.uid},
            "status": {"conditions": [{
                "type": names::ROOM_CONDITION,
                "status": "True",
                "reason": "RoomAppeared",
                // Must differ from the last wake-up's, or nothing is written and nobody wakes.
                "message": format!("GPU memory became free ({} at {now})", self.identity),
                "lastTransitionTime": now.to_string(),
            }]},
        });
        let params = PatchParams::default();
        let patch = Patch::Strategic(patch);
        match within(TIMEOUT, pods.patch_status(&pod.name, &params, &patch)).await {
            Ok(_) => {
                self.metrics.woken.inc();
                tracing::info!(namespace = %pod.namespace, pod = %pod.name, "woke a waiting pod");
            }
            Err(error) if matches!(error.status(), Some(404 | 409)) => {}
            Err(error) => {
                self.ledger.lock().wake_failed(&pod.uid);
                tracing::warn!(namespace = %pod.namespace, pod = %pod.name, %error, "cannot wake");
            }
        }
    }
}
