//! The pods of this node, reduced to the facts that the agent needs.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use gpustow_api::config::Action;
use gpustow_api::limit::{self, Enforce};
use gpustow_api::sharers::Promise;
use gpustow_api::{PodFacts, names, request};
use gpustow_pack::Mib;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};
use k8s_openapi::jiff::Timestamp;

/// Annotation by which the kubelet names a static pod's cgroup.
const STATIC_POD_HASH: &str = "kubernetes.io/config.hash";

/// The extender's demand that processes of a pod end which use more of its GPUs than it asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Demand {
    /// Since when: which demand it is.
    pub since: Timestamp,
    /// For which pod, in the extender's words.
    pub message: String,
}

/// A pod of this node.
#[derive(Clone, Debug, PartialEq)]
pub struct NodePod {
    /// Its facts for scheduling.
    pub facts: PodFacts,
    /// The memory that its kubelet counts for it, assigned or not.
    pub requested: Mib,
    /// Its kubelet has taken it in: it has written when. A pod that it rejects is Failed.
    pub accepted: bool,
    /// The devices confirmed last.
    pub confirmed: Option<String>,
    /// The name of its cgroup: its UID, except for static pods.
    pub cgroup: Arc<str>,
    /// Its containers that have an id.
    pub containers: Vec<NodeContainer>,
    /// Who sees to its limits.
    pub enforce: Enforce,
    /// The memory that each claim of its request may use of each of its cards.
    pub limits: Vec<Mib>,
    /// Processes of it are to end.
    pub demand: Option<Demand>,
    /// The promise of another GPU sharer to it.
    pub promise: Option<Promise>,
}

/// A container of a pod of this node.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeContainer {
    /// Its name.
    pub name: Arc<str>,
    /// Its id, without the runtime's name.
    pub id: Arc<str>,
    /// It runs.
    pub running: bool,
}

impl NodePod {
    /// Reduces a pod; `None` for one without UID.
    #[must_use]
    pub fn from_pod(pod: &Pod, resource: &str) -> Option<Self> {
        let facts = PodFacts::from_pod(pod, resource)?;
        let annotation = |key: &str| pod.metadata.annotations.as_ref()?.get(key).cloned();
        let status = pod.status.as_ref();
        let statuses = status.into_iter().flat_map(|status| {
            [
                &status.container_statuses,
                &status.init_container_statuses,
                &status.ephemeral_container_statuses,
            ]
        });
        let spec = pod.spec.as_ref();
        let none = BTreeMap::new();
        let notes = pod.metadata.annotations.as_ref().unwrap_or(&none);
        let asks = facts.asks.readable().ok();
        let allowed = asks.map(|asks| limit::allowed(notes, asks, &facts.containers));
        let (enforce, limits) = allowed.unwrap_or_default();
        Some(Self {
            demand: status.and_then(demand),
            promise: Promise::of(pod),
            enforce,
            limits,
            requested: spec.map_or(Mib::ZERO, |spec| Mib(request::effective(spec, resource, 1))),
            accepted: status.is_some_and(|status| status.start_time.is_some()),
            confirmed: annotation(names::CONFIRMED),
            cgroup: annotation(STATIC_POD_HASH).map_or_else(|| facts.uid.clone(), Arc::from),
            containers: statuses
                .flat_map(|list| list.iter().flatten())
                .filter_map(container)
                .collect(),
            facts,
        })
    }

    /// True if it asks for GPU memory.
    #[must_use]
    pub fn asks(&self) -> bool {
        self.facts.requests_memory()
    }

    /// The memory of a card that it holds.
    #[must_use]
    pub fn assigned(&self, uuid: &str) -> Mib {
        self.charges()
            .find(|(card, _)| *card == uuid)
            .map_or(Mib::ZERO, |(_, mib)| mib)
    }

    /// The memory of a card that it may use: its holding, and the use beyond requests that limits allow its containers
    /// there.
    #[must_use]
    pub fn allowed(&self, uuid: &str) -> Mib {
        let (Some(request), Some(Ok(assignment))) =
            (self.facts.asks.request(), &self.facts.assignment)
        else {
            return self.assigned(uuid);
        };
        let claims = request
            .claims
            .iter()
            .zip(&self.limits)
            .zip(&*self.facts.containers);
        let more = claims.filter_map(|((claim, limit), name)| {
            let mut cards = assignment.containers.iter().filter(|(it, _)| it == name);
            let here = cards.any(|(_, uuids)| uuids.iter().any(|it| **it == *uuid));
            here.then(|| limit.minus(claim.mib))
        });
        self.assigned(uuid) + more.sum()
    }

    /// The cards that it holds, and the memory of each; nothing once it has ended.
    pub fn charges(&self) -> impl Iterator<Item = (&str, Mib)> {
        let assignment = self.facts.assignment.iter().flatten();
        let held = assignment.filter(|_| !self.facts.released);
        held.flat_map(|assignment| assignment.charges.iter().map(|(uuid, mib)| (&**uuid, *mib)))
    }

    /// The name of the container with this id.
    #[must_use]
    pub fn container(&self, id: &str) -> Option<&Arc<str>> {
        self.containers
            .iter()
            .find(|container| *container.id == *id)
            .map(|container| &container.name)
    }
}

fn demand(status: &PodStatus) -> Option<Demand> {
    let mut all = status.conditions.iter().flatten();
    let it = all.find(|it| it.type_ == names::RECLAIM_CONDITION && it.status == "True")?;
    let since = it.last_transition_time.as_ref()?.0;
    let message = it.message.clone().unwrap_or_default();
    let kills = Action::of_pod(it.reason.as_deref()?) == Action::KillProcess;
    kills.then_some(Demand { since, message })
}

fn container(status: &ContainerStatus) -> Option<NodeContainer> {
    let id = status.container_id.as_deref()?;
    let state = status.state.as_ref();
    Some(NodeContainer {
        name: status.name.as_str().into(),
        id: id.rsplit_once("://").map_or(id, |(_, id)| id).into(),
        running: state.is_some_and(|state| state.running.is_some()),
    })
}

/// The node's pods by UID.
#[derive(Clone, Debug, Default)]
pub struct NodePods {
    by_uid: HashMap<Arc<str>, NodePod>,
    /// MiB of a unit of Volcano's here, if that is known.
    pub volcano_unit: Option<u64>,
}

impl NodePods {
    /// These pods.
    #[must_use]
    pub fn new(pods: impl IntoIterator<Item = NodePod>) -> Self {
        Self {
            by_uid: pods
                .into_iter()
                .map(|pod| (pod.facts.uid.clone(), pod))
                .collect(),
            volcano_unit: None,
        }
    }

    /// Bytes of a GPU with `total` that another sharer promised to this pod.
    pub(crate) fn promised(&self, pod: &NodePod, (uuid, index): (&str, u32), total: u64) -> u64 {
        let unit = self.volcano_unit.unwrap_or(1);
        let promise = pod.promise.as_ref();
        promise.map_or(0, |it| it.on(uuid, index, total, unit))
    }

    /// These are all pods.
    pub fn list(&mut self, pods: impl IntoIterator<Item = NodePod>) {
        self.by_uid = Self::new(pods).by_uid;
    }

    /// A pod is new or has changed.
    pub fn apply(&mut self, pod: NodePod) {
        self.by_uid.insert(pod.facts.uid.clone(), pod);
    }

    /// A pod is gone.
    pub fn delete(&mut self, uid: &str) {
        self.by_uid.remove(uid);
    }

    /// The pod of this UID.
    #[must_use]
    pub fn get(&self, uid: &str) -> Option<&NodePod> {
        self.by_uid.get(uid)
    }

    /// The pod whose cgroup has this name.
    #[must_use]
    pub fn of_cgroup(&self, name: &str) -> Option<&NodePod> {
        self.get(name)
            .or_else(|| self.iter().find(|pod| *pod.cgroup == *name))
    }

    /// True if a pod of this card reports whether it sleeps. The memory that it may allocate depends on all use by
    /// others.
    #[must_use]
    pub fn sleeps_on(&self, uuid: &str) -> bool {
        let mut pods = self.iter();
        pods.any(|pod| pod.facts.sleep.is_some() && pod.assigned(uuid) > Mib::ZERO)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &NodePod> {
        self.by_uid.values()
    }
}
