//! Events for people: which GPU a pod got, or why nothing fits, with numbers; nodes whose agent is silent.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use dashmap::{DashMap, Entry};
use gpustow_api::{Assignment, GpustowConfig, PodFacts, config, names};
use gpustow_ledger::{CardView, NodeView, Ungate};
use gpustow_serve::rate::Window;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Client, Resource as _};
use strum::IntoStaticStr;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use crate::ask::AskError;
use crate::epoch::Unfenced;

/// Events of one kind that wait to be sent; more are dropped.
const QUEUE: usize = 4096;
/// So many Events are sent in any period: an Event costs the API server about as much as a Binding, and binds come first.
const BURST: usize = 20;
const PERIOD: Duration = Duration::from_secs(2);
/// The same refusal of the same pod is reported again after this long.
const AGAIN: Duration = Duration::from_secs(300);
/// Refusals remembered; beyond that all are forgotten.
const MEMORY: usize = 20_000;
/// Bytes of a note that the API server takes.
const NOTE: usize = 1024;

/// An Event and the object that it is about.
type Message = (Event, ObjectReference);

/// Distinguishes one kind of refusal from another.
fn hash_of(kind: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    kind.hash(&mut hasher);
    hasher.finish()
}

/// Sends Events without making anybody wait.
pub(crate) struct Events {
    /// Refusals go before assignments: the pod itself shows its assignment.
    refusals: mpsc::Sender<Message>,
    assignments: mpsc::Sender<Message>,
    /// By pod UID: the kind of refusal that was reported last, and when.
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
            let mut lately = Window::new(PERIOD);
            let began = Instant::now();
            loop {
                sleep(lately.wait(BURST, began.elapsed())).await;
                let next = tokio::select! {
                    biased;
                    next = refused.recv() => next,
                    next = assigned.recv() => next,
                };
                let Some((event, about)) = next else { break };
                lately.note((), began.elapsed());
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

    /// Writes an Event of type Normal.
    pub(crate) fn tell(&self, kind: Kind, about: &(impl About + ?Sized), note: String) {
        self.send(EventType::Normal, kind, about, note);
    }

    /// Writes an Event of type Warning, which people should look at.
    pub(crate) fn warn(&self, kind: Kind, about: &(impl About + ?Sized), note: String) {
        self.send(EventType::Warning, kind, about, note);
    }

    fn send(&self, of: EventType, kind: Kind, about: &(impl About + ?Sized), note: String) {
        let queue = match kind {
            Kind::Assigned => &self.assignments,
            _ => &self.refusals,
        };
        send(queue, about.about(), event(of, kind, note));
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
        self.tell(Kind::Assigned, pod, placed(assigned, node, view));
    }

    /// The node's agent has not reported for `after`.
    pub(crate) fn silent(&self, node: &str, after: Duration) {
        let note = format!(
            "The gpustow agent on this node has not reported for {} s. No new GPU pods are scheduled here until it does. \
             Running pods are not affected. Look at the agent's pod: kubectl get pods -n {} \
             --field-selector spec.nodeName={node}",
            after.as_secs(),
            names::NAMESPACE
        );
        self.warn(Kind::AgentSilent, node, note);
    }

    /// The GpustowConfig cannot be decoded.
    pub(crate) fn config_unreadable(&self, problem: &str) {
        let note = format!(
            "gpustow cannot decode this object and follows the last valid one: {problem}. Correct the field, or apply the \
             CustomResourceDefinition of the extender's version"
        );
        self.warn(Kind::ConfigUnreadable, &TheConfig, note);
    }

    /// The pod fits nowhere. `kind` distinguishes one refusal from another. The note is only made if it is reported.
    pub(crate) fn refused(&self, pod: &PodFacts, kind: u64, note: impl FnOnce() -> String) {
        self.refused_as(pod, kind, Kind::MemoryUnavailable, note);
    }

    fn refused_as(&self, pod: &PodFacts, kind: u64, as_: Kind, note: impl FnOnce() -> String) {
        // Only a new pod needs the room.
        if self.told.len() >= MEMORY && !self.told.contains_key(&pod.uid) {
            self.told.clear();
        }
        let now = Instant::now();
        match self.told.entry(pod.uid.clone()) {
            Entry::Occupied(told) if told.get().0 == kind && now < told.get().1 + AGAIN => return,
            Entry::Occupied(mut told) => drop(told.insert((kind, now))),
            Entry::Vacant(first) => drop(first.insert((kind, now))),
        }
        self.warn(as_, pod, note());
    }

    /// No node could hold the pod if it were empty. A refusal by filter, which has the reasons, is not repeated in this
    /// form.
    pub(crate) fn hopeless(&self, pod: &PodFacts) {
        let told = self.told.get(&pod.uid).map(|told| told.0);
        self.refused(pod, told.unwrap_or_else(|| hash_of("hopeless")), || {
            let claims = pod.asks.claims().iter().map(ToString::to_string);
            format!(
                "No node can hold this pod as it is, which asks for {}, even if all other pods finish. To see the necessary changes: \
                 kubectl gpustow why {}/{}",
                claims.collect::<Vec<_>>().join(" and "),
                pod.namespace,
                pod.name
            )
        });
    }

    /// Pods that are to be disrupted for the pod wait.
    pub(crate) fn limited(&self, pod: &PodFacts) {
        let note = "Disruptions for this pod wait: the limits in spec.disruptions of the GpustowConfig are reached. The extender                     goes on within a minute.";
        self.refused_as(pod, hash_of("limits"), Kind::DisruptionRefused, || {
            note.to_owned()
        });
    }

    /// No pods were found that could be preempted for the pod, as far as one search may go.
    pub(crate) fn search_cut(&self, pod: &PodFacts) {
        let note = "The search for pods to preempt for this pod ended at its bound and found none: too many sets of pods are \
                    possible. The extender searches again when pods come or leave. Fewer pods, or equal requests, make \
                    the search shorter.";
        self.refused_as(pod, hash_of("search"), Kind::DisruptionRefused, || {
            note.to_owned()
        });
    }

    /// The pod has not finished its start within this time, and others wait for it no more.
    pub(crate) fn start_late(&self, pod: &PodFacts, timeout: Duration) {
        let note = format!(
            "Not Ready {} s after its start. Other pods no longer wait for it (spec.scheduling.startTimeout of the \
             GpustowConfig), and may start on its GPUs. To see why it is not Ready: kubectl describe pod -n {} {}",
            timeout.as_secs(),
            pod.namespace,
            pod.name
        );
        self.warn(Kind::StartTimedOut, pod, note);
    }

    /// The pod is queued, so many before it.
    pub(crate) fn queued(&self, pod: &PodFacts, before: usize, size: usize) {
        let (namespace, name) = (&pod.namespace, &pod.name);
        let note = format!(
            "Queued for GPU memory, position {} of {size}. The extender removes the scheduling gate {} when it is this pod's \
             turn and memory is free. To see which pods must finish first: kubectl gpustow why {namespace}/{name}",
            before + 1,
            names::GATE
        );
        self.tell(Kind::PodQueued, pod, note);
    }

    /// The pod was ungated.
    pub(crate) fn ungated(&self, pod: &PodFacts, why: Ungate) {
        let why = match why {
            // An Event about its assignment follows soon.
            Ungate::Room => return,
            Ungate::MayPreempt => "pods of lower priority can be preempted for it",
            Ungate::NoNode => "it does not fit on any node, even an empty one",
            Ungate::NotOurs => "its request cannot be read, or its scheduler does not use gpustow",
            Ungate::Off => "the queue is off (spec.queue.mode of the GpustowConfig)",
        };
        let note = format!("Removed from the queue: {why}.");
        self.tell(Kind::PodUngated, pod, note);
    }

    /// The API server does not let the gate be removed.
    pub(crate) fn not_ungated(&self, pod: &PodFacts, error: &AskError) {
        let note = format!(
            "It is this pod's turn, but the API server does not let gpustow remove the scheduling gate {}: {error}. Retrying. \
             If the ClusterRole gpustow-queue is missing, apply it. Users with the verb ungate on queues.gpustow.dev can \
             remove the gate by hand.",
            names::GATE
        );
        self.refused_as(pod, hash_of("ungate"), Kind::PodQueued, || note);
    }

    /// No node has come for the pod's placeholder.
    pub(crate) fn unanswered(&self, pod: &PodFacts, placeholder: &PodFacts) {
        let (namespace, name) = (&placeholder.namespace, &placeholder.name);
        tracing::warn!(%namespace, placeholder = %name, pod = %pod.name, "no node has come for a placeholder");
        let note = format!(
            "No node has come for this pod in the 15 minutes since its placeholder was created. Read the autoscaler's log, and \
             check its limits and the GPUs and labels of its node groups. To see the autoscaler's answer: \
             kubectl describe pod -n {namespace} {name}"
        );
        self.warn(Kind::PlaceholderUnanswered, pod, note);
    }

    /// An earlier leader may still bind the pod, and that cannot be prevented.
    pub(crate) fn unfenced(&self, Unfenced { pod, error }: &Unfenced) {
        tracing::warn!(namespace = %pod.namespace, pod = %pod.name, %error, "cannot fence the pod");
        let note = format!(
            "A previous extender may still bind this pod, and updating its status to prevent that failed: {error}. The pod is \
             not scheduled until the update succeeds or the pod changes, and GPU memory is withheld for it. Find the policy \
             or webhook that refuses pods/status, or recreate the pod."
        );
        self.warn(Kind::FenceFailed, pod, note);
    }
}

/// Every Event of the extender; people see the name after `Gpu` as the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(prefix = "Gpu")]
pub(crate) enum Kind {
    /// A pod got its GPUs.
    Assigned,
    /// A pod fits on no node.
    MemoryUnavailable,
    /// A node's agent does not report.
    AgentSilent,
    /// The GpustowConfig cannot be decoded.
    ConfigUnreadable,
    /// A previous leader may still bind a pod.
    FenceFailed,
    /// Memory is reserved for a pod, or on a node.
    MemoryReserved,
    /// That ended before the pod had it, or on a node.
    ReservationEnded,
    /// A pod was disrupted for another.
    PodDisrupted,
    /// The API server refuses that.
    DisruptionRefused,
    /// A pod is queued.
    PodQueued,
    /// A pod was ungated without room for it.
    PodUngated,
    /// A pod's start takes too long.
    StartTimedOut,
    /// An autoscaler must add a node for a pod.
    PlaceholderCreated,
    /// The API server refuses to create that placeholder.
    PlaceholderRefused,
    /// No node has come for that placeholder.
    PlaceholderUnanswered,
}

impl Kind {
    /// The extender's action that the Event reports.
    fn action(self) -> &'static str {
        match self {
            Self::Assigned => "Binding",
            Self::MemoryUnavailable | Self::FenceFailed => "Scheduling",
            Self::AgentSilent | Self::StartTimedOut => "Watching",
            Self::ConfigUnreadable => "Configuring",
            Self::MemoryReserved | Self::ReservationEnded => "Reserving",
            Self::PodDisrupted | Self::DisruptionRefused => "Disrupting",
            Self::PlaceholderCreated | Self::PlaceholderRefused | Self::PlaceholderUnanswered => {
                "Provisioning"
            }
            Self::PodQueued | Self::PodUngated => "Queueing",
        }
    }
}

/// An object that an Event can be about.
pub(crate) trait About {
    fn about(&self) -> ObjectReference;
}

impl About for PodFacts {
    fn about(&self) -> ObjectReference {
        ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: Some(self.namespace.to_string()),
            name: Some(self.name.to_string()),
            uid: Some(self.uid.to_string()),
            ..ObjectReference::default()
        }
    }
}

impl<T: About + ?Sized> About for Arc<T> {
    fn about(&self) -> ObjectReference {
        (**self).about()
    }
}

/// A node by its name.
impl About for str {
    fn about(&self) -> ObjectReference {
        ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(self.to_owned()),
            // As the kubelet does it, and kubectl describe looks for it.
            uid: Some(self.to_owned()),
            ..ObjectReference::default()
        }
    }
}

/// The GpustowConfig that is read.
struct TheConfig;

impl About for TheConfig {
    fn about(&self) -> ObjectReference {
        ObjectReference {
            api_version: Some(GpustowConfig::api_version(&()).into_owned()),
            kind: Some(GpustowConfig::kind(&()).into_owned()),
            name: Some(config::NAME.to_owned()),
            ..ObjectReference::default()
        }
    }
}

fn event(type_: EventType, kind: Kind, mut note: String) -> Event {
    note.truncate(note.floor_char_boundary(NOTE));
    Event {
        type_,
        reason: <&str>::from(kind).to_owned(),
        note: Some(note),
        action: kind.action().to_owned(),
        secondary: None,
    }
}

/// The pod's place, and the memory that stays free there.
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

fn send(queue: &mpsc::Sender<Message>, about: ObjectReference, event: Event) {
    if let Err(error) = queue.try_send((event, about)) {
        let (_, about) = error.into_inner();
        tracing::debug!(about = ?about.name, "too many Events: one was dropped");
    }
}
