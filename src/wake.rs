//! Notifies kube-scheduler that room appeared for a pod that sleeps: a condition on that very pod. A queued pod is
//! ungated instead. The write also nominates a pod to a node if the pod was refused on the nodes that kube-scheduler
//! showed, and fits on another. A nomination that is not useful any more is ended.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};
use gpustow_api::{PodFacts, names};
use k8s_openapi::jiff::Timestamp;
use kube::api::Patch;
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use crate::app::App;
use crate::ask::{AskError, patch_status, within};
use crate::epoch::EpochError;
use crate::queue;

/// Between two looks at the ledger, at least.
const PAUSE: Duration = Duration::from_millis(20);
/// Pods that are woken between two pauses at most: 500 a second.
const AT_ONCE: usize = 10;
/// Between two looks when nothing happens.
const IDLE: Duration = Duration::from_millis(500);
/// The mix of requests is learnt again after this long, in case it changed at constant numbers.
const LEARN_EVERY: Duration = Duration::from_secs(60);
/// Patches under way at once.
const WIDTH: usize = 16;
/// For one patch.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Wakes the pods that the ledger wants woken.
pub(crate) struct Waker {
    app: Arc<App>,
}

impl Waker {
    /// Wakes pods for as long as the process runs.
    pub(crate) async fn run(app: Arc<App>) {
        let this = Self { app: app.clone() };
        let mut learnt = app.ledger.now();
        let mut ended = HashMap::new();
        loop {
            if app.ledger.now().saturating_sub(learnt) > LEARN_EVERY {
                learnt = app.ledger.now();
                app.ledger.lock().learn();
            }
            // Something happened, or reservations and pauses may have run out.
            let _ = timeout(IDLE, app.ledger.wake.notified()).await;
            let now = app.ledger.now();
            match app.leads() {
                Some(epoch) => {
                    let mut pods = app.ledger.lock().wake(AT_ONCE, now);
                    let count = pods.len();
                    let ungates = pods.extract_if(.., |pod| pod.queued).collect();
                    this.ungate_all(ungates, epoch).await;
                    if !pods.is_empty() {
                        this.wake_all(&pods, epoch).await;
                    }
                    this.end_nominations(&mut ended, epoch).await;
                    if count == AT_ONCE || app.ledger.lock().wakes_on() {
                        app.ledger.wake.notify_one();
                    }
                }
                None => app.ledger.lock().expire(now),
            }
            sleep(PAUSE).await;
        }
    }

    /// Wakes pods that `epoch` found room for. If a successor decides by now, these are its last: the kube-scheduler
    /// next to us may have put them to sleep because of our answers. If it still leads, we decide again as soon as it
    /// asks.
    async fn wake_all(&self, pods: &[Arc<PodFacts>], epoch: u64) {
        if let Err(EpochError::Ask(error)) = self.app.epoch.confirm(epoch).await {
            tracing::debug!(%error, "cannot find out which replica leads: no pod is woken yet");
            let mut ledger = self.app.ledger.lock();
            pods.iter().for_each(|pod| ledger.wake_failed(&pod.uid));
            return;
        }
        let patches: Vec<_> = {
            let ledger = self.app.ledger.lock();
            pods.iter()
                .map(|pod| self.wake(pod, ledger.nomination(&pod.uid)))
                .collect()
        };
        stream::iter(patches)
            .buffer_unordered(WIDTH)
            .collect::<()>()
            .await;
    }

    /// Ungates these, if this replica still leads.
    async fn ungate_all(&self, pods: Vec<Arc<PodFacts>>, epoch: u64) {
        if pods.is_empty() {
            return;
        }
        if self.app.epoch.confirm(epoch).await.is_err() {
            let mut ledger = self.app.ledger.lock();
            pods.iter().for_each(|pod| ledger.wake_failed(&pod.uid));
            return;
        }
        let ungates: Vec<_> = {
            let ledger = self.app.ledger.lock();
            let ungate = |pod: Arc<PodFacts>| {
                let why = ledger.ungated_because(&pod.uid);
                queue::ungate(self.app.clone(), epoch, pod, why)
            };
            pods.into_iter().map(ungate).collect()
        };
        // One that is tried again holds up no other pod that must be woken.
        tokio::spawn(
            stream::iter(ungates)
                .buffer_unordered(WIDTH)
                .collect::<()>(),
        );
    }

    /// Ends the nominations that are of no use any more. `ended` are the copies of pods for which that was written.
    async fn end_nominations(&self, ended: &mut HashMap<Arc<str>, Arc<str>>, epoch: u64) {
        let void = self.app.ledger.lock().void_nominations();
        ended.retain(|uid, _| void.iter().any(|pod| pod.uid == *uid));
        let is_new = |pod: &Arc<PodFacts>| ended.get(&pod.uid) != Some(&pod.resource_version);
        let void: Vec<_> = void.into_iter().filter(is_new).collect();
        if void.is_empty() || self.app.epoch.confirm(epoch).await.is_err() {
            return;
        }
        for pod in void {
            match self.patch(&pod, None).await {
                Ok(()) => {}
                // The pod has changed, or is gone: the watch will show it.
                Err(error) if matches!(error.status(), Some(404 | 409)) => {}
                Err(error) => tracing::warn!(
                    namespace = %pod.namespace, pod = %pod.name, %error, "cannot end the nomination"
                ),
            }
            ended.insert(pod.uid.clone(), pod.resource_version.clone());
        }
    }

    async fn wake(&self, pod: &PodFacts, node: Option<Arc<str>>) {
        match self.patch(pod, node.as_deref()).await {
            Ok(()) => {
                if node.is_some() {
                    self.app.metrics.nominations.inc();
                }
                let node = node.as_deref().unwrap_or_default();
                tracing::info!(
                    namespace = %pod.namespace, pod = %pod.name, nominated = node, "woke a waiting pod"
                );
            }
            // The pod has changed since: the ledger offers the room again.
            Err(error) if error.status() == Some(409) && node.is_some() => {
                self.app.ledger.lock().wake_failed(&pod.uid);
            }
            Err(error) if matches!(error.status(), Some(404 | 409)) => {}
            Err(error) => {
                self.app.ledger.lock().wake_failed(&pod.uid);
                tracing::warn!(namespace = %pod.namespace, pod = %pod.name, %error, "cannot wake");
            }
        }
    }

    /// Writes the condition that wakes the pod, and the extender's own nomination.
    async fn patch(&self, pod: &PodFacts, node: Option<&str>) -> Result<(), AskError> {
        let patch = Patch::Strategic(wake_up(pod, node, &self.app.identity, Timestamp::now()));
        let patched = patch_status(&self.app.client, pod, &patch);
        within(TIMEOUT, patched).await.map(drop)
    }
}

/// The extender's nomination is set to `node`, or ended; such a write names the copy of the pod that it is about. A
/// nomination by kube-scheduler is left alone.
fn wake_up(pod: &PodFacts, node: Option<&str>, identity: &str, now: Timestamp) -> Value {
    let mut metadata = json!({"uid": &*pod.uid});
    let mut status = json!({"conditions": [{
        "type": names::AVAILABLE_CONDITION,
        "status": "True",
        "reason": node.map_or("MemoryAvailable", |_| names::NOMINATED),
        // Must differ from the last wake-up's, or nothing is written and no pod wakes.
        "message": format!("GPU memory became free ({identity} at {now})"),
        "lastTransitionTime": now.to_string(),
    }]});
    if node.is_some() || pod.own_nomination {
        metadata["resourceVersion"] = json!(&*pod.resource_version);
        status["nominatedNodeName"] = json!(node);
    }
    json!({"metadata": metadata, "status": status})
}

#[cfg(test)]
mod tests {
    use serde_json::from_value;

    use super::*;

    fn pod(nominated: Option<&str>, reason: &str) -> PodFacts {
        let pod = from_value(json!({
            "metadata": {"namespace": "n", "name": "p", "uid": "u", "resourceVersion": "7"},
            "status": {"nominatedNodeName": nominated, "conditions": [
                {"type": names::AVAILABLE_CONDITION, "status": "True", "reason": reason},
            ]},
        }));
        PodFacts::from_pod(&pod.unwrap(), names::GPU_MEM).unwrap()
    }

    fn patch(pod: &PodFacts, node: Option<&str>) -> (Value, Value, Value) {
        let patch = wake_up(pod, node, "e", Timestamp::UNIX_EPOCH);
        let status = &patch["status"];
        let written = status
            .as_object()
            .unwrap()
            .contains_key("nominatedNodeName");
        let node = if written {
            status["nominatedNodeName"].clone()
        } else {
            json!("untouched")
        };
        let reason = status["conditions"][0]["reason"].clone();
        (node, reason, patch["metadata"]["resourceVersion"].clone())
    }

    #[test]
    fn wake_up_sets_and_ends_the_extenders_nomination_alone() {
        let (free, by_scheduler) = (pod(None, ""), pod(Some("m"), "MemoryAvailable"));
        let own = pod(Some("m"), names::NOMINATED);
        let left = (json!("untouched"), json!("MemoryAvailable"), Value::Null);
        assert_eq!(patch(&free, None), left);
        assert_eq!(patch(&by_scheduler, None), left);
        let set = (json!("n"), json!(names::NOMINATED), json!("7"));
        assert_eq!(patch(&free, Some("n")), set);
        assert_eq!(patch(&own, Some("n")), set);
        assert_eq!(
            patch(&own, None),
            (Value::Null, json!("MemoryAvailable"), json!("7"))
        );
    }
}
