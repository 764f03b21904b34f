//! Events on pods for people: which GPU was chosen, or why nothing fits, with numbers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dashmap::DashMap;
use gpustow_api::{PodFacts, names};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::sync::mpsc;

/// Events that wait to be sent; more are dropped.
const QUEUE: usize = 1024;
/// The same refusal of the same pod is told again after this long.
const AGAIN: Duration = Duration::from_secs(300);
/// Refusals remembered; beyond that all are forgotten.
const MEMORY: usize = 20_000;
/// Bytes of a note that the API server takes.
const NOTE: usize = 1024;

/// Sends Events without making anybody wait.
pub(crate) struct Events {
    queue: mpsc::Sender<(Event, ObjectReference)>,
    /// By pod UID: what kind of refusal was told last, and when.
    told: DashMap<Arc<str>, (u64, Instant)>,
}

impl Events {
    /// Starts sending.
    #[must_use]
    pub(crate) fn start(client: Client, identity: &str) -> Self {
        let (queue, mut queued) = mpsc::channel::<(Event, ObjectReference)>(QUEUE);
        let reporter = Reporter {
            controller: names::EXTENDER.to_owned(),
            instance: Some(identity.to_owned()),
        };
        let recorder = Recorder::new(client, reporter);
        tokio::spawn(async move {
            while let Some((event, pod)) = queued.recv().await {
                if let Err(error) = recorder.publish(&event, &pod).await {
                    tracing::debug!(%error, "cannot write an Event");
                }
            }
        });
        Self {
            queue,
            told: DashMap::new(),
        }
    }

    /// The pod got its cards.
    pub(crate) fn assigned(&self, pod: &PodFacts, note: String) {
        self.told.remove(&pod.uid);
        self.send(pod, EventType::Normal, "GpuAssigned", "Binding", note);
    }

    /// The pod fits nowhere. `kind` tells one refusal from another; the note is only made if it is
    /// to be told.
    pub(crate) fn refused(&self, pod: &PodFacts, kind: u64, note: impl FnOnce() -> String) {
        let told = self.told.get(&pod.uid).map(|told| *told);
        if told.is_some_and(|(last, when)| last == kind && when.elapsed() < AGAIN) {
            return;
        }
        if self.told.len() >= MEMORY {
            self.told.clear();
        }
        self.told.insert(pod.uid.clone(), (kind, Instant::now()));
        self.send(
            pod,
            EventType::Warning,
            "GpuMemoryUnavailable",
            "Scheduling",
            note(),
        );
    }

    fn send(&self, pod: &PodFacts, type_: EventType, reason: &str, action: &str, mut note: String) {
        note.truncate(note.floor_char_boundary(NOTE));
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note),
            action: action.to_owned(),
            secondary: None,
        };
        let reference = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: Some(pod.namespace.to_string()),
            name: Some(pod.name.to_string()),
            uid: Some(pod.uid.to_string()),
            ..ObjectReference::default()
        };
        if self.queue.try_send((event, reference)).is_err() {
            tracing::debug!(pod = %pod.name, "too many Events: one was dropped");
        }
    }
}
