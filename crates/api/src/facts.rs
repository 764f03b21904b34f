//! The fields of a Pod and of a Node by which gpustow decides. gpustow does not keep other fields.

mod asks;
mod ended;
mod meta;
mod node;
mod nominated;
mod phase;
mod sleep;
mod starts;

pub use asks::Asks;
pub use node::NodeFacts;
pub use phase::Phase;
pub use sleep::{Memory, Sleep};

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Arc, LazyLock};

use gpustow_pack::Mib;
use k8s_openapi::api::core::v1::{
    NodeAffinity, NodeSelectorTerm, Pod, PodAffinity, PodAntiAffinity, PodCondition, PodSpec,
    PodStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use serde_json::Value;

use crate::assignment::{Assignment, BrokenAssignment};
use crate::bad_request::BadRequest;
use crate::config::Action;
use crate::intree::{self, Constraints, Label};
use crate::limit::Enforce;
use crate::pod::pod_group;
use crate::podgroup::Group;
use crate::regards::Regards;
use crate::request::request;
use crate::reserved::Reservation;
use crate::{limit, names};
use ended::{all_terminated, has_ended};
use meta::controller;
pub use meta::gone_by;

/// Most pods of a cluster do not request GPU memory: they share these empty values.
static NO_CONTAINERS: LazyLock<Arc<[Box<str>]>> = LazyLock::new(|| Arc::from([]));
static NO_LIMITS: LazyLock<Arc<[Mib]>> = LazyLock::new(|| Arc::from([]));
static NO_CONSTRAINTS: LazyLock<Arc<Constraints>> = LazyLock::new(Arc::default);
static DEFAULT_SCHEDULER: LazyLock<Arc<str>> = LazyLock::new(|| Arc::from("default-scheduler"));
static OWN_SCHEDULER: LazyLock<Arc<str>> = LazyLock::new(|| Arc::from(names::SCHEDULER));

/// A Pod, reduced to the fields that scheduling needs.
#[derive(Clone, Debug, PartialEq)]
pub struct PodFacts {
    /// `metadata.uid`: the identity; a pod recreated under the same name is another pod.
    pub uid: Arc<str>,
    /// `metadata.namespace`.
    pub namespace: Arc<str>,
    /// `metadata.name`.
    pub name: Arc<str>,
    /// `metadata.resourceVersion` of this copy.
    pub resource_version: Arc<str>,
    /// `metadata.creationTimestamp` in seconds since 1970, the scheduler's order among equals.
    pub created: i64,
    /// `status.startTime` in seconds since 1970, the greatest number before its kubelet has taken it on.
    pub started: i64,
    /// `spec.nodeName`, once bound.
    pub node: Option<Arc<str>>,
    /// Since when it starts there, in seconds since 1970, the greatest number before its kubelet has taken it on. None once
    /// it is Ready, for a pod that asks for no GPU memory, and after too many restarts.
    pub starting_since: Option<i64>,
    /// `spec.schedulerName`.
    pub scheduler: Arc<str>,
    /// `spec.priority`, zero if unset.
    pub priority: i32,
    /// `status.nominatedNodeName`.
    pub nominated: Option<Arc<str>>,
    /// The extender set that, and ends it: kube-scheduler evicts no pod for it.
    pub own_nomination: bool,
    /// The pod's request.
    pub asks: Asks,
    /// Container names, one per claim of the request.
    pub containers: Arc<[Box<str>]>,
    /// The card models, as node labels name them, that its node selector and required affinity
    /// allow; empty for any.
    pub models: Arc<[Box<str>]>,
    /// The constraints that keep it off nodes; empty for a pod without a request for GPU memory.
    pub constraints: Arc<Constraints>,
    /// The pods that its anti-affinity keeps away.
    pub repels: Regards,
    /// The group of pods with which it is scheduled.
    pub group: Option<Group>,
    /// Its labels, in order of their keys, by which disruption budgets and anti-affinity find it; empty for a pod
    /// without an assignment and without a request for GPU memory.
    pub labels: Arc<[Label]>,
    /// The assignment in the annotations, if there is one.
    pub assignment: Option<Result<Arc<Assignment>, BrokenAssignment>>,
    /// The epoch annotation: replicas with an older epoch may not bind this copy.
    pub epoch: Option<u64>,
    /// `metadata.deletionTimestamp` is set.
    pub deleting: bool,
    /// When it should be gone if it is being deleted, in seconds since 1970: `metadata.deletionTimestamp`, but no later
    /// than [`LONGEST_GRACE`] after the request. A pod may set itself a grace period of a year.
    pub gone_by: Option<i64>,
    /// `spec.schedulingGates` has a gate that is not ours: another controller decides when the pod may come.
    pub gated: bool,
    /// It has [`names::GATE`]: it is queued.
    pub queued: bool,
    /// kube-scheduler may evict others for it.
    pub preempts: bool,
    /// It holds nothing any more: Succeeded or Failed, or being deleted with every container
    /// terminated.
    pub released: bool,
    /// kube-scheduler reported the pod as unschedulable, and the pod may be asleep.
    pub waiting: bool,
    /// Seconds that it may take to end.
    pub grace: u32,
    /// The action that reclaims memory that it uses beyond its request, until the pod has given the memory back
    /// ([`names::RECLAIM_CONDITION`]).
    pub asked_back: Option<Action>,
    /// The extender has chosen it to end or to move for another ([`names::PREEMPTED`], [`names::DEFRAGMENTED`]).
    pub preempted: bool,
    /// The strongest such action that its owner allows.
    pub action: Option<Action>,
    /// UID of its controller, if it requests GPU memory. A failure of one pod of the controller repeats with the next.
    pub controller: Option<Arc<str>>,
    /// UID of the controller that recreates it elsewhere, if its owner lets it be moved ([`names::EVICTABLE`]).
    pub evictable: Option<Arc<str>>,
    /// A DaemonSet or a kubelet made it: no autoscaler keeps a node for its sake.
    pub goes_with_node: bool,
    /// The pod's statement whether it needs its requested memory, if there is one.
    pub sleep: Option<Sleep>,
    /// A PersistentVolumeClaim or ResourceClaim that the next pod will use, too, may tie it to its node.
    pub tied: bool,
    /// The limit of each claim of its request on each of its cards; empty if no limit exceeds the request.
    pub limits: Arc<[Mib]>,
    /// How the limits are enforced.
    pub enforce: Enforce,
    /// The node on which the extender that decided last kept room for it ([`names::RESERVATION`]).
    pub reserved_on: Option<Arc<str>>,
    /// The pods for which a placeholder has an autoscaler add a node, its owner first. A placeholder requests nothing
    /// of any node that there is.
    pub stands_for: Option<Arc<[Arc<str>]>>,
    /// A digest of kube-scheduler's reason not to schedule it; zero without a reason. It distinguishes a new refusal
    /// from an earlier one.
    pub refusal: u64,
}

/// For so many seconds at most others wait for a pod that terminates, however long its grace period is.
pub const LONGEST_GRACE: u32 = 600;

/// Keys and values of taints.
pub type Taints = [(Box<str>, Box<str>)];

impl PodFacts {
    /// The facts of `pod` if `resource` is the name of gpu-mem; `None` without a UID, that is, if the pod does not come
    /// from an API server.
    #[must_use]
    pub fn from_pod(pod: &Pod, resource: &str) -> Option<Self> {
        let meta = &pod.metadata;
        let text = |text: &Option<String>| Arc::from(text.as_deref().unwrap_or_default());
        let annotation = |key: &str| meta.annotations.as_ref()?.get(key);
        let (spec, status) = (pod.spec.as_ref(), pod.status.as_ref());
        let stands_for = meta::stands_for(meta);
        let (asks, containers) = match stands_for {
            Some(_) => (Asks::nothing(), NO_CONTAINERS.clone()),
            None => asked(pod, resource),
        };
        let deleting = meta.deletion_timestamp.is_some();
        let is_asking = asks.request().is_some();
        let constraints = spec.filter(|_| is_asking).map(Constraints::of);
        let (enforce, limits) = limits(meta, &asks, &containers);
        let assignment = annotation(names::ASSIGNMENT);
        let labels = meta.labels.iter();
        let labels = labels.filter(|_| is_asking || assignment.is_some());
        let labels = labels.flatten().map(|(key, value)| Label::new(key, value));
        let gates = spec.iter().flat_map(|spec| &spec.scheduling_gates);
        let mut gates = gates.flatten().map(|gate| gate.name.as_str());
        Some(Self {
            uid: Arc::from(meta.uid.as_deref()?),
            namespace: text(&meta.namespace),
            name: text(&meta.name),
            resource_version: text(&meta.resource_version),
            created: seconds(meta.creation_timestamp.as_ref()).unwrap_or(0),
            started: seconds(status.and_then(|it| it.start_time.as_ref())).unwrap_or(i64::MAX),
            node: spec.and_then(|spec| named(&spec.node_name)),
            starting_since: spec
                .filter(|spec| is_asking && named(&spec.node_name).is_some())
                .and_then(|_| starts::starting_since(status)),
            scheduler: scheduler(spec.and_then(|spec| spec.scheduler_name.as_deref())),
            priority: spec.and_then(|spec| spec.priority).unwrap_or(0),
            nominated: status.and_then(|status| named(&status.nominated_node_name)),
            own_nomination: status.is_some_and(nominated::is_own),
            asks,
            containers,
            models: spec.map_or_else(|| NO_CONTAINERS.clone(), models),
            group: Group::of_labels(meta),
            constraints: constraints.map_or_else(|| NO_CONSTRAINTS.clone(), Arc::new),
            repels: spec.map(Regards::repelled_by).unwrap_or_default(),
            labels: labels.collect(),
            assignment: assignment.map(|text| Assignment::decode(text).map(Arc::new)),
            epoch: annotation(names::EPOCH).and_then(|epoch| epoch.parse().ok()),
            deleting,
            gone_by: gone_by(meta),
            gated: gates.clone().any(|gate| gate != names::GATE),
            queued: gates.any(|gate| gate == names::GATE),
            preempts: spec.is_none_or(|spec| spec.preemption_policy.as_deref() != Some("Never")),
            released: has_ended(status) || deleting && all_terminated(spec, status),
            waiting: status.is_some_and(is_waiting),
            grace: spec.map_or(0, grace),
            asked_back: reason(status, names::RECLAIM_CONDITION).map(Action::of_pod),
            preempted: reason(status, names::DISRUPTION_TARGET)
                .is_some_and(|it| it == names::PREEMPTED || it == names::DEFRAGMENTED),
            action: annotation(names::RECLAIM_ACTION).map(|word| Action::of_pod(word)),
            controller: controller(meta).filter(|_| is_asking),
            evictable: meta::evictable(meta),
            goes_with_node: meta::goes_with_node(meta),
            sleep: sleep::sleep(meta, status).filter(|_| is_asking),
            tied: is_asking && spec.is_some_and(is_tied),
            limits,
            enforce,
            reserved_on: reason(status, names::RESERVED_CONDITION)
                .and_then(|_| Reservation::decode(annotation(names::RESERVATION)?))
                .map(|kept| Arc::from(kept.node)),
            stands_for,
            refusal: status.and_then(refused).map_or(0, digest),
        })
    }
}

impl PodFacts {
    /// The pod's limit on one of its cards; none if the pod may not use more than it holds there.
    #[must_use]
    pub fn limit_on(&self, uuid: &str) -> Option<Mib> {
        let assignment = self.assignment.as_ref()?.as_ref().ok()?;
        let sees = |name: &str| {
            let mut containers = assignment.containers.iter();
            containers.any(|(it, uuids)| **it == *name && uuids.iter().any(|it| **it == *uuid))
        };
        let limits = self.containers.iter().zip(&*self.limits);
        let limits = limits.filter(|(name, _)| sees(name));
        (!self.limits.is_empty()).then(|| limits.map(|(_, limit)| *limit).sum())
    }

    /// The facts of a pod of which only metadata and text are readable: its node and its assignment. gpustow cannot
    /// schedule the pod, and does not count it as finished before it is gone.
    #[must_use]
    pub fn from_remains(
        meta: &ObjectMeta,
        pod: &Value,
        error: &str,
        resource: &str,
    ) -> Option<Self> {
        let annotations = &pod["metadata"]["annotations"];
        let assignment = match &annotations[names::ASSIGNMENT] {
            Value::Null if annotations.is_null() || annotations.is_object() => None,
            Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        };
        let readable = Pod {
            metadata: ObjectMeta {
                annotations: assignment.map(|text| [(names::ASSIGNMENT.to_owned(), text)].into()),
                ..meta.clone()
            },
            ..Pod::default()
        };
        let mut facts = Self::from_pod(&readable, resource)?;
        facts.node = pod["spec"]["nodeName"].as_str().and_then(|name| {
            let name = Some(name).filter(|name| !name.is_empty());
            name.map(Arc::from)
        });
        facts.join(pod_group(&pod["spec"]["schedulingGroup"]));
        facts.deleting = !pod["metadata"]["deletionTimestamp"].is_null();
        if pod["spec"].to_string().contains(resource) {
            facts.asks = Asks::Unreadable(BadRequest {
                field: "pod".to_owned(),
                problem: error.to_owned(),
            });
        }
        Some(facts)
    }
}

/// True if `pod` states a preference among the nodes that are legal for it: preferred affinity of
/// any kind, or a topology spread that may be broken.
#[must_use]
pub fn has_soft_preferences(pod: &Pod) -> bool {
    fn any<T>(list: Option<&Vec<T>>) -> bool {
        list.is_some_and(|list| !list.is_empty())
    }
    let Some(spec) = &pod.spec else { return false };
    let affinity = spec.affinity.as_ref();
    let node = |affinity: &NodeAffinity| {
        any(affinity
            .preferred_during_scheduling_ignored_during_execution
            .as_ref())
    };
    let near = |affinity: &PodAffinity| {
        any(affinity
            .preferred_during_scheduling_ignored_during_execution
            .as_ref())
    };
    let away = |affinity: &PodAntiAffinity| {
        any(affinity
            .preferred_during_scheduling_ignored_during_execution
            .as_ref())
    };
    affinity.is_some_and(|affinity| {
        affinity.node_affinity.as_ref().is_some_and(node)
            || affinity.pod_affinity.as_ref().is_some_and(near)
            || affinity.pod_anti_affinity.as_ref().is_some_and(away)
    }) || spec
        .topology_spread_constraints
        .iter()
        .flatten()
        .any(|spread| spread.when_unsatisfiable == "ScheduleAnyway")
}

/// True if `pod` tolerates all of `taints`, keys and values of `PreferNoSchedule` taints.
#[must_use]
pub fn tolerates_prefer_no_schedule(pod: &Pod, taints: &Taints) -> bool {
    let tolerated = |(key, value): &(Box<str>, Box<str>)| intree::tolerates_softly(pod, key, value);
    taints.iter().all(tolerated)
}

/// True if something else than nodes must be found for `pod` between filter and bind: volumes
/// that may have to be provisioned, or resource claims.
#[must_use]
pub fn uses_volumes_or_claims(pod: &Pod) -> bool {
    pod.spec.as_ref().is_some_and(|spec| {
        spec.resource_claims.iter().flatten().next().is_some()
            || spec.volumes.iter().flatten().any(|volume| {
                volume.persistent_volume_claim.is_some() || volume.ephemeral.is_some()
            })
    })
}

/// Does the pod use claims by name, that is, claims which are there before it and after it?
fn is_tied(spec: &PodSpec) -> bool {
    let volumes = spec.volumes.iter().flatten();
    let mut claims = spec.resource_claims.iter().flatten();
    volumes
        .into_iter()
        .any(|volume| volume.persistent_volume_claim.is_some())
        || claims.any(|claim| claim.resource_claim_name.is_some())
}

/// The models that `spec` is bound to, in order.
fn models(spec: &PodSpec) -> Arc<[Box<str>]> {
    let key = names::GPU_PRODUCT;
    let selected = spec
        .node_selector
        .as_ref()
        .and_then(|selector| selector.get(key));
    let required = spec.affinity.as_ref().and_then(|affinity| {
        affinity
            .node_affinity
            .as_ref()?
            .required_during_scheduling_ignored_during_execution
            .as_ref()
    });
    let of_term = |term: &NodeSelectorTerm| {
        let expressions = term.match_expressions.iter().flatten();
        let mut ins = expressions.filter(|e| e.key == key && e.operator == "In");
        ins.next()?.values.clone()
    };
    let models: BTreeSet<Box<str>> = match (selected, required) {
        (Some(model), _) => [model.as_str().into()].into(),
        (None, Some(required)) => {
            let terms: Option<Vec<_>> = required.node_selector_terms.iter().map(of_term).collect();
            terms
                .into_iter()
                .flatten()
                .flatten()
                .map(String::into_boxed_str)
                .collect()
        }
        (None, None) => return NO_CONTAINERS.clone(),
    };
    models.into_iter().collect()
}

fn scheduler(name: Option<&str>) -> Arc<str> {
    match name.unwrap_or_default() {
        name if name == &**DEFAULT_SCHEDULER => DEFAULT_SCHEDULER.clone(),
        name if name == &**OWN_SCHEDULER => OWN_SCHEDULER.clone(),
        name => Arc::from(name),
    }
}

/// The pod's request, and the names of the containers that request GPU memory.
fn asked(pod: &Pod, resource: &str) -> (Asks, Arc<[Box<str>]>) {
    match request(pod, resource) {
        Ok((request, names)) if names.is_empty() => (Asks::of(request), NO_CONTAINERS.clone()),
        Ok((request, names)) => (Asks::of(request), names.into()),
        Err(bad) => (Asks::Unreadable(bad), NO_CONTAINERS.clone()),
    }
}

fn seconds(time: Option<&Time>) -> Option<i64> {
    time.map(|time| time.0.as_second())
}

fn named(name: &Option<String>) -> Option<Arc<str>> {
    name.as_deref()
        .filter(|name| !name.is_empty())
        .map(Arc::from)
}

/// How the limits are enforced, and the limit of each claim on each card, if a limit exceeds its claim.
fn limits(meta: &ObjectMeta, asks: &Asks, containers: &[Box<str>]) -> (Enforce, Arc<[Mib]>) {
    let (Ok(request), Some(notes)) = (asks.readable(), &meta.annotations) else {
        return (Enforce::default(), NO_LIMITS.clone());
    };
    let (enforce, limits) = limit::allowed(notes, request, containers);
    let more = limits
        .iter()
        .zip(&request.claims)
        .any(|(limit, claim)| *limit > claim.mib);
    match more && !request.exclusive {
        true => (enforce, limits.into()),
        false => (enforce, NO_LIMITS.clone()),
    }
}

/// Seconds that a pod may take to terminate; Kubernetes' own default if the field is not set.
fn grace(spec: &PodSpec) -> u32 {
    let seconds = spec.termination_grace_period_seconds.unwrap_or(30).max(0);
    u32::try_from(seconds).unwrap_or(u32::MAX)
}

/// The condition of this type, if it is True.
fn holds<'s>(status: &'s PodStatus, of_type: &str) -> Option<&'s PodCondition> {
    let is_it = |it: &&PodCondition| it.type_ == of_type && it.status == "True";
    status.conditions.iter().flatten().find(is_it)
}

/// The reason of the condition of this type, if it is True.
fn reason<'s>(status: Option<&'s PodStatus>, of_type: &str) -> Option<&'s str> {
    let condition = holds(status?, of_type)?;
    Some(condition.reason.as_deref().unwrap_or_default())
}

fn refused(status: &PodStatus) -> Option<&PodCondition> {
    let is_refusal = |condition: &&PodCondition| {
        condition.type_ == "PodScheduled" && condition.status == "False"
    };
    status.conditions.iter().flatten().find(is_refusal)
}

fn is_waiting(status: &PodStatus) -> bool {
    refused(status).is_some_and(|condition| condition.reason.as_deref() == Some("Unschedulable"))
}

/// Never zero.
fn digest(refusal: &PodCondition) -> u64 {
    let mut hasher = DefaultHasher::new();
    (&refusal.reason, &refusal.message).hash(&mut hasher);
    hasher.finish().max(1)
}

#[cfg(test)]
mod tests;
