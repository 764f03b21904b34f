//! Events for people: which GPU a pod got, or why nothing fits, with numbers; nodes whose agent is silent.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use dashmap::{DashMap, Entry};
use gpustow_api::{Assignment, GpustowConfig, PodFacts, config, names};
use gpustow_ledger::{CardView, Lift, NodeView};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Client, Resource as _};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use crate::ask::AskError;
use crate::epoch::Unfenced;

/// Events of one kind that wait to be sent; more are dropped.
const QUEUE: usize = 4096;
/// So many Events are sent at once, then so many a second: an Event costs the API server about as
/// much as a Binding, and binds come first.
const BURST: f64 = 20.0;
const RATE: f64 = 10.0;
/// The same refusal of the same pod is told again after this long.
const AGAIN: Duration = Duration::from_secs(300);
/// Refusals remembered; beyond that all are forgotten.
const MEMORY: usize = 20_000;
/// Bytes of a note that the API server takes.
const NOTE: usize = 1024;

/// An Event and what it is about.
type Message = (Event, ObjectReference);

/// Sends Events without making anybody wait.
pub(crate) struct Events {
    /// Refusals go before assignments: the pod itself shows those.
    refusals: mpsc::Sender<Message>,
    assignments: mpsc::Sender<Message>,
    /// By pod UID: what kind of refusal was told last, and when.
    told: DashMap<Arc<str>, (u64, Instant)>,
}

impl Events {
    /// Starts sending.
    #[must_use]
    pub(crate) fn start(client: Client, identity: &str) -> Self {
        let (refusals, mut refused) = mpsc::channel::<Message>(QUEUE);
        let (assignments, mut assigned) = mpsc::channel::<Message>(QUEUE);
        let reporter = Reporter {
            controller: names::EXTENDER.to_owned(),
            instance: Some(identity.to_owned()),
        };
        let recorder = Recorder::new(client, reporter);
        tokio::spawn(async move {
            let mut pace = Pace::new();
            loop {
                pace.wait().await;
                let next = tokio::select! {
                    biased;
                    next = refused.recv() => next,
                    next = assigned.recv() => next,
                };
                let Some((event, about)) = next else { break };
                pace.taken();
                if let Err(error) = recorder.publish(&event, &about).await {
                    tracing::debug!(%error, "cannot write an Event");
                }
            }
        });
        Self {
            refusals,
            assignments,
            told: DashMap::new(),
        }
    }

    /// The pod got its cards. `view` is its node, the pod in it.
    pub(crate) fn assigned(
        &self,
        pod: &PodFacts,
        assigned: &Assignment,
        node: &str,
        view: Option<&NodeView>,
    ) {
        self.told.remove(&pod.uid);
        let note = placed(assigned, node, view);
        let event = event(EventType::Normal, "GpuAssigned", "Binding", note);
        send(&self.assignments, of_pod(pod), event);
    }

    /// The node's agent has said nothing for `after`.
    pub(crate) fn silent(&self, node: &str, after: Duration) {
        let note = format!(
            "The gpustow agent of this node has said nothing for {} s. No new pod gets GPU memory here until it \
             does; pods that run are left alone. Look at its pod: kubectl get pods -n {} \
             --field-selector spec.nodeName={node}",
            after.as_secs(),
            names::NAMESPACE
        );
        let event = event(EventType::Warning, "GpuAgentSilent", "Watching", note);
        send(&self.refusals, of_node(node), event);
    }

    /// The GpustowConfig cannot be decoded.
    pub(crate) fn config_unreadable(&self, problem: &str) {
        let note = format!(
            "gpustow cannot decode this object and follows the last valid one: {problem}. Correct the field, or apply the \
             CustomResourceDefinition of the extender's version"
        );
        let event = event(
            EventType::Warning,
            "GpuConfigUnreadable",
            "Configuring",
            note,
        );
        let about = ObjectReference {
            api_version: Some(GpustowConfig::api_version(&()).into_owned()),
            kind: Some(GpustowConfig::kind(&()).into_owned()),
            name: Some(config::NAME.to_owned()),
            ..ObjectReference::default()
        };
        send(&self.refusals, about, event);
    }

    /// Autoscalers were told to let the node be, or that they may have it again.
    pub(crate) fn marked(&self, node: &str, keeps: bool) {
        let (reason, note) = match keeps {
            true => (
                "GpuNodeKept",
                "A place is kept here for a pod that has waited for long: autoscalers are told to let this node be",
            ),
            false => (
                "GpuNodeReleased",
                "No place is kept here any more: autoscalers may have this node again",
            ),
        };
        let event = event(EventType::Normal, reason, "Marking", note.to_owned());
        send(&self.refusals, of_node(node), event);
    }

    /// That could not be written.
    pub(crate) fn not_marked(&self, node: &str, error: &AskError) {
        let note = format!(
            "Autoscalers cannot be told whether a place is kept here: {error}. It is tried again. Is the ClusterRole \
             gpustow-disruptions installed?"
        );
        let event = event(EventType::Warning, "GpuNodeMarkRefused", "Marking", note);
        send(&self.refusals, of_node(node), event);
    }

    /// The pod fits nowhere. `kind` tells one refusal from another; the note is only made if it is
    /// to be told.
    pub(crate) fn refused(&self, pod: &PodFacts, kind: u64, note: impl FnOnce() -> String) {
        self.refused_as(pod, kind, "GpuMemoryUnavailable", note);
    }

    fn refused_as(&self, pod: &PodFacts, kind: u64, reason: &str, note: impl FnOnce() -> String) {
        // Only somebody new needs the room.
        if self.told.len() >= MEMORY && !self.told.contains_key(&pod.uid) {
            self.told.clear();
        }
        let now = Instant::now();
        match self.told.entry(pod.uid.clone()) {
            Entry::Occupied(told) if told.get().0 == kind && now < told.get().1 + AGAIN => return,
            Entry::Occupied(mut told) => drop(told.insert((kind, now))),
            Entry::Vacant(first) => drop(first.insert((kind, now))),
        }
        let event = event(EventType::Warning, reason, "Scheduling", note());
        send(&self.refusals, of_pod(pod), event);
    }

    /// The pod is to give memory back.
    pub(crate) fn gives_back(&self, pod: &PodFacts, note: String) {
        let event = event(EventType::Warning, "GpuMemoryCalledBack", "Lending", note);
        send(&self.refusals, of_pod(pod), event);
    }

    /// Others are to give memory back for the pod.
    pub(crate) fn calls_back(&self, pod: &PodFacts, note: String) {
        let event = event(EventType::Normal, "GpuMemoryKept", "Lending", note);
        send(&self.refusals, of_pod(pod), event);
    }

    /// A place is kept for the pod, which has waited for long.
    pub(crate) fn keeps_place(&self, pod: &PodFacts, note: String) {
        let event = event(EventType::Normal, names::PLACE_KEPT, "Queueing", note);
        send(&self.refusals, of_pod(pod), event);
    }

    /// Others use memory that the pod asked for, and are to give it back.
    pub(crate) fn is_short(&self, pod: &PodFacts, note: String) {
        let event = event(EventType::Normal, "GpuMemoryShort", "Lending", note);
        send(&self.refusals, of_pod(pod), event);
    }

    /// A pod that should be evicted is not: told on both.
    pub(crate) fn not_evicted(&self, pod: &PodFacts, note: String) {
        let event = event(EventType::Warning, "GpuEvictionRefused", "Lending", note);
        send(&self.refusals, of_pod(pod), event);
    }

    /// The pod ends for one of higher priority.
    pub(crate) fn preempted(&self, pod: &PodFacts, note: String) {
        let event = event(EventType::Warning, "GpuMemoryPreempted", "Preempting", note);
        send(&self.refusals, of_pod(pod), event);
    }

    /// The pod moves for another.
    pub(crate) fn moved(&self, pod: &PodFacts, note: String) {
        let event = event(EventType::Warning, "GpuMemoryMoved", "Moving", note);
        send(&self.refusals, of_pod(pod), event);
    }

    /// A pod that should move for another does not: told on both.
    pub(crate) fn not_moved(&self, pod: &PodFacts, note: String) {
        let event = event(EventType::Warning, "GpuMoveRefused", "Moving", note);
        send(&self.refusals, of_pod(pod), event);
    }

    /// A pod that should end for another does not: told on both.
    pub(crate) fn not_preempted(&self, pod: &PodFacts, note: String) {
        let event = event(
            EventType::Warning,
            "GpuPreemptionRefused",
            "Preempting",
            note,
        );
        send(&self.refusals, of_pod(pod), event);
    }

    /// The pod stands in line, so many before it.
    pub(crate) fn in_line(&self, pod: &PodFacts, before: usize, size: usize) {
        let (namespace, name) = (&pod.namespace, &pod.name);
        let note = format!(
            "Stands in gpustow's line for GPU memory, {} of {size}. Its scheduling gate {} is taken off when its turn \
             has come and there is room. `kubectl gpustow why {namespace}/{name}` says what would make the room",
            before + 1,
            names::GATE
        );
        let event = event(EventType::Normal, "GpuMemoryInLine", "Queueing", note);
        send(&self.refusals, of_pod(pod), event);
    }

    /// The pod was let out of the line.
    pub(crate) fn lifted(&self, pod: &PodFacts, why: Lift) {
        let note = match why {
            // Its assignment is told soon.
            Lift::Room => return,
            Lift::MayPreempt => {
                "Let out of gpustow's line: pods of lower priority may be evicted for it"
            }
            Lift::Shown => {
                "Let out of gpustow's line: it is among the first, and an autoscaler is to see that it waits"
            }
            Lift::NoNode => {
                "Let out of gpustow's line: no node could hold it if it were empty, so that no turn would come"
            }
            Lift::NotOurs => {
                "Let out of gpustow's line: its request cannot be read, or its scheduler is not known to ask gpustow"
            }
            Lift::Off => "Let go: gpustow has no queue (spec.queue.mode is Off)",
        };
        let event = event(
            EventType::Normal,
            "GpuMemoryLineLeft",
            "Queueing",
            note.to_owned(),
        );
        send(&self.refusals, of_pod(pod), event);
    }

    /// The API server does not let the gate be taken off.
    pub(crate) fn not_lifted(&self, pod: &PodFacts, error: &AskError) {
        let note = format!(
            "Its turn has come, and the API server does not let gpustow take the scheduling gate {} off: {error}. It is \
             tried again. Is the ClusterRole gpustow-queue installed? Users with the verb ungate on \
             queues.gpustow.dev can take the gate off by hand",
            names::GATE
        );
        let mut kind = DefaultHasher::new();
        "lift".hash(&mut kind);
        let event = || note;
        self.refused_as(pod, kind.finish(), "GpuMemoryLineStuck", event);
    }

    /// An earlier extender may still bind the pod, and nobody can prevent it.
    pub(crate) fn unfenced(&self, Unfenced { pod, error }: &Unfenced) {
        tracing::warn!(namespace = %pod.namespace, pod = %pod.name, %error, "cannot fence the pod");
        let note = format!(
            "An earlier extender's Binding of this pod may still arrive, for its status cannot be \
             written: {error}. Until that works or the pod changes, it is not scheduled, and GPU \
             memory is held back for it. Find the policy or webhook that refuses pods/status, or \
             recreate the pod"
        );
        let event = event(EventType::Warning, "GpuFenceFailed", "Scheduling", note);
        send(&self.refusals, of_pod(pod), event);
    }
}

fn event(type_: EventType, reason: &str, action: &str, mut note: String) -> Event {
    note.truncate(note.floor_char_boundary(NOTE));
    Event {
        type_,
        reason: reason.to_owned(),
        note: Some(note),
        action: action.to_owned(),
        secondary: None,
    }
}

/// Where the pod went and what stays free there.
fn placed(assigned: &Assignment, node: &str, view: Option<&NodeView>) -> String {
    let cards = view.map_or(&[][..], |view| &view.cards);
    let shares = assigned.charges.iter().map(|(uuid, mib)| {
        match cards.iter().find(|card| *card.uuid == **uuid) {
            Some(CardView {
                index, model, free, ..
            }) => {
                format!("{mib} on GPU {index} ({model}), {free} stay free there")
            }
            None => format!("{mib} on GPU {uuid}"),
        }
    });
    format!("node {node}: {}", shares.collect::<Vec<_>>().join("; "))
}

fn of_pod(pod: &PodFacts) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(pod.namespace.to_string()),
        name: Some(pod.name.to_string()),
        uid: Some(pod.uid.to_string()),
        ..ObjectReference::default()
    }
}

fn of_node(node: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Node".to_owned()),
        name: Some(node.to_owned()),
        // As the kubelet does it, and kubectl describe looks for it.
        uid: Some(node.to_owned()),
        ..ObjectReference::default()
    }
}

fn send(queue: &mpsc::Sender<Message>, about: ObjectReference, event: Event) {
    if let Err(error) = queue.try_send((event, about)) {
        let (_, about) = error.into_inner();
        tracing::debug!(about = ?about.name, "too many Events: one was dropped");
    }
}

/// A token bucket.
struct Pace {
    tokens: f64,
    since: Instant,
}

impl Pace {
    fn new() -> Self {
        Self {
            tokens: BURST,
            since: Instant::now(),
        }
    }

    /// Waits until there is a token.
    async fn wait(&mut self) {
        let now = Instant::now();
        let new = now.duration_since(self.since).as_secs_f64() * RATE;
        self.tokens = (self.tokens + new).min(BURST);
        self.since = now;
        if self.tokens < 1.0 {
            sleep(Duration::from_secs_f64((1.0 - self.tokens) / RATE)).await;
        }
    }

    fn taken(&mut self) {
        self.tokens -= 1.0;
    }
}
