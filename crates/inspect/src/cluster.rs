//! The cluster as Lists or watches show it: the extender's ledger, and further data that only people need.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use gpustow_admission::keys;
use gpustow_api::config::GpustowConfigSpec;
use gpustow_api::gpunode::{Gpu, GpuNodeStatus};
use gpustow_api::{
    GpuNode, GpustowConfig, NodeFacts, PodFacts, PodGroup, PodGroupFacts, PodObject, names,
};
use gpustow_ledger::{Ledger, NodeView};
use gpustow_policies::admission::Weakness;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt as _;
use kube::core::{Selector, SelectorExt as _};
use serde_json::Value;

use crate::Error;
use crate::advised::Advised;
use crate::fence;
use crate::owner::{self, Other};
use crate::state;
use crate::system::{Seen, System};

/// Where the ledger's clock begins: reports can be older than this program.
const BEGINNING: Duration = Duration::from_secs(86_400);

/// A pod that asks for GPU memory or holds some.
#[derive(Clone, Debug)]
pub struct PodInfo {
    /// The facts that the ledger keeps of the pod.
    pub facts: Arc<PodFacts>,
    /// The Pod.
    pub object: Arc<Pod>,
}

/// Everything known of the cluster.
pub struct Cluster {
    /// The extender's books, as it would make them from the same objects.
    pub ledger: Ledger,
    /// The default namespace of commands; None for all.
    pub namespace: Option<String>,
    /// The missing objects in words, if `pods` holds that namespace alone. Free memory is unknown then.
    pub left_out: Option<&'static str>,
    /// Nodes by name.
    pub nodes: BTreeMap<String, Node>,
    /// The reports of the agents, by node.
    pub reports: BTreeMap<String, GpuNodeStatus>,
    /// Pods that ask for GPU memory or hold some, by UID.
    pub pods: BTreeMap<Arc<str>, PodInfo>,
    /// Pods with gpustow's annotations and without a request for GPU memory.
    unasking: BTreeMap<Arc<str>, PodInfo>,
    /// Pods that have their GPUs from another sharer, by UID.
    pub others: BTreeMap<Arc<str>, Other>,
    /// DeviceClasses that map an extended resource to devices, with that resource.
    pub device_classes: Vec<(String, String)>,
    /// The advised requests of workloads; empty if histories may not be read.
    pub advised: Advised,
    /// ConfigMaps of gpustow's namespace; None if they may not be read.
    pub configs: Option<Vec<ConfigMap>>,
    /// The GpustowConfig as it was read.
    pub config: Seen<GpustowConfig>,
    /// The spec of `config`, or the defaults.
    spec: GpustowConfigSpec,
    /// gpustow's own parts.
    pub system: System,
    /// The extender's last event about a reservation for a pod, and its time, by the pod's UID.
    pub kept_reservations: BTreeMap<String, (Timestamp, String)>,
    /// The admission policies that do not hold, and why.
    pub policies: Seen<Vec<(&'static str, Weakness)>>,
    /// UUIDs of GPUs that drivers publish and no rule fences: those are left to claims. None if that is not known.
    unfenced: Option<HashSet<String>>,
    /// The time on the ledger's clock.
    pub now: Duration,
    /// The time of day, for ages.
    pub wall: Timestamp,
    resource: String,
}

impl PodInfo {
    /// Neither bound nor ended nor leaving.
    pub fn waits(&self) -> bool {
        self.facts.node.is_none() && !self.facts.released && !self.facts.deleting
    }

    /// `namespace/name`.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.facts.namespace, self.facts.name)
    }

    /// Seconds since it was created.
    pub fn age(&self, wall: Timestamp) -> u64 {
        u64::try_from(wall.as_second() - self.facts.created).unwrap_or(0)
    }

    /// The last message of kube-scheduler about the pod.
    pub fn scheduler_said(&self) -> Option<&str> {
        state::said(&self.object)
    }

    /// The agent's confirmation.
    pub fn confirmed(&self) -> Option<&str> {
        let annotations = self.object.metadata.annotations.as_ref()?;
        annotations.get(names::CONFIRMED).map(String::as_str)
    }
}

impl Cluster {
    /// An empty cluster in which gpu-mem is called `resource`, without a GpustowConfig.
    pub fn new(resource: &str) -> Self {
        let wall = Timestamp::now();
        let spec = GpustowConfigSpec::default();
        let mut ledger = Ledger::new(gpustow_settings::ledger(&spec));
        ledger.tell_time(wall.as_second());
        Self {
            ledger,
            namespace: None,
            left_out: None,
            nodes: BTreeMap::new(),
            reports: BTreeMap::new(),
            pods: BTreeMap::new(),
            unasking: BTreeMap::new(),
            others: BTreeMap::new(),
            device_classes: Vec::new(),
            advised: Advised::default(),
            configs: None,
            config: Seen::NotThere,
            spec,
            kept_reservations: BTreeMap::new(),
            system: System::default(),
            policies: Seen::NotThere,
            unfenced: None,
            now: BEGINNING,
            wall,
            resource: resource.to_owned(),
        }
    }

    /// The name of gpu-mem in pods' requests.
    pub fn resource(&self) -> &str {
        &self.resource
    }

    /// The configuration that the extender follows.
    pub fn spec(&self) -> &GpustowConfigSpec {
        &self.spec
    }

    /// The GpustowConfig is new or has changed. The ledger then decides as the extender does.
    pub fn set_config(&mut self, config: Seen<GpustowConfig>) {
        self.spec = match &config {
            Seen::Read(config) => config.spec.clone(),
            Seen::NotThere | Seen::Unreadable => GpustowConfigSpec::default(),
        };
        self.config = config;
        self.ledger.configure(gpustow_settings::ledger(&self.spec));
        let names: Vec<String> = self.reports.keys().cloned().collect();
        names.iter().for_each(|name| self.open(name));
    }

    /// ResourceSlices and DeviceTaintRules, if they were read.
    pub fn set_fence(&mut self, objects: Option<&[Value]>) {
        self.unfenced = objects.map(fence::unfenced);
    }

    /// This GPU in the report of the node's agent.
    pub fn gpu(&self, node: &str, uuid: &str) -> Option<&Gpu> {
        let gpus = &self.reports.get(node)?.gpus;
        gpus.iter().find(|gpu| gpu.uuid == *uuid)
    }

    /// Pods may get the GPUs of a node that are not left to claims.
    fn open(&mut self, node: &str) {
        if !self.spec.claims.fence {
            return;
        }
        let gpus = self.reports.get(node).into_iter().flat_map(|it| &it.gpus);
        let left = |uuid: &str| self.unfenced.as_ref().is_some_and(|it| it.contains(uuid));
        let open: Vec<Arc<str>> = gpus
            .filter(|gpu| !left(&gpu.uuid))
            .map(|gpu| gpu.uuid.as_str().into())
            .collect();
        self.ledger.open(node, open);
    }

    /// The pod's facts for the ledger; `None` if the pod lacks a UID.
    pub fn facts(&self, pod: &Pod) -> Option<PodFacts> {
        PodFacts::from_pod(pod, &self.resource)
    }

    /// Lets time pass since the program started.
    pub fn pass(&mut self, elapsed: Duration) {
        self.now = BEGINNING + elapsed;
        self.wall = Timestamp::now();
        self.ledger.tell_time(self.wall.as_second());
    }

    /// A pod is new or has changed.
    pub fn apply_pod(&mut self, object: PodObject) {
        if let Some(facts) = self.note_pod(object) {
            self.ledger.apply_pod(facts);
        }
    }

    /// Records the pod everywhere except in the ledger, and returns its facts for the ledger.
    fn note_pod(&mut self, object: PodObject) -> Option<Arc<PodFacts>> {
        self.system.apply(&object);
        let facts = Arc::new(object.facts(&self.resource)?);
        let pod = object.pod;
        let asks_nothing = facts.asks.is_nothing();
        self.unasking.remove(&facts.uid);
        match Other::of(&pod, &facts) {
            Some(other) => drop(self.others.insert(facts.uid.clone(), other)),
            None => drop(self.others.remove(&facts.uid)),
        }
        let counts = !asks_nothing || facts.assignment.is_some();
        let list = match counts {
            true => Some(&mut self.pods),
            false if keys::unasked(pod.annotations(), &self.resource).is_some() => {
                Some(&mut self.unasking)
            }
            false => None,
        };
        if let Some(list) = list {
            let info = PodInfo {
                facts: facts.clone(),
                object: Arc::new(pod),
            };
            list.insert(facts.uid.clone(), info);
        }
        Some(facts)
    }

    /// A pod is gone.
    pub fn delete_pod(&mut self, pod: &Pod) {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        self.system.delete(uid);
        self.pods.remove(uid);
        self.unasking.remove(uid);
        self.others.remove(uid);
        self.ledger.delete_pod(uid);
    }

    /// The whole list of pods.
    pub fn reset_pods(&mut self, pods: Vec<PodObject>) {
        self.pods.clear();
        self.unasking.clear();
        self.others.clear();
        self.system.clear();
        let began = self.ledger.copies();
        let facts = pods.into_iter().filter_map(|pod| self.note_pod(pod));
        let facts = facts.collect();
        self.ledger.reset_pods(facts, began);
        self.ledger.learn();
    }

    /// The whole list of PodGroups.
    pub fn reset_pod_groups(&mut self, pod_groups: &[PodGroup]) {
        let facts = pod_groups.iter();
        let facts = facts.filter_map(PodGroupFacts::from_pod_group);
        self.ledger.reset_pod_groups(facts.collect());
    }

    /// A PodGroup is new or has changed.
    pub fn apply_pod_group(&mut self, pod_group: &PodGroup) {
        if let Some(facts) = PodGroupFacts::from_pod_group(pod_group) {
            self.ledger.apply_pod_group(facts);
        }
    }

    /// A PodGroup is gone.
    pub fn delete_pod_group(&mut self, pod_group: &PodGroup) {
        if let Some(facts) = PodGroupFacts::from_pod_group(pod_group) {
            self.ledger.delete_pod_group(&facts.group);
        }
    }

    /// A node is new or has changed.
    pub fn apply_node(&mut self, mut node: Node) {
        node.metadata.managed_fields = None;
        if let Some(status) = &mut node.status {
            status.images = None;
        }
        self.ledger.apply_node(NodeFacts::from_node(&node));
        self.nodes.insert(node.name_any(), node);
    }

    /// A node is gone.
    pub fn delete_node(&mut self, node: &Node) {
        self.nodes.remove(&node.name_any());
        self.ledger.delete_node(&node.name_any());
    }

    /// The whole list of nodes.
    pub fn reset_nodes(&mut self, nodes: Vec<Node>) {
        self.nodes.clear();
        self.ledger
            .reset_nodes(nodes.iter().map(NodeFacts::from_node).collect());
        nodes.into_iter().for_each(|node| self.apply_node(node));
    }

    /// A report that has just been written.
    pub fn apply_gpunode(&mut self, gpunode: GpuNode) {
        self.report(gpunode, self.now);
    }

    fn report(&mut self, gpunode: GpuNode, seen: Duration) {
        let (name, status) = (gpunode.name_any(), gpunode.status.unwrap_or_default());
        self.ledger.apply_gpunode(&name, status.clone(), seen);
        self.reports.insert(name.clone(), status);
        self.open(&name);
    }

    /// A report is gone.
    pub fn delete_gpunode(&mut self, gpunode: &GpuNode) {
        self.reports.remove(&gpunode.name_any());
        self.ledger.delete_gpunode(&gpunode.name_any());
    }

    /// The whole list of GpuNodes, with ages from their heartbeats: no watch event showed when they were written.
    pub fn reset_gpunodes(&mut self, gpunodes: Vec<GpuNode>) {
        let listed: BTreeSet<_> = gpunodes.iter().map(|gpunode| gpunode.name_any()).collect();
        let gone = std::mem::take(&mut self.reports).into_keys();
        gone.filter(|name| !listed.contains(name))
            .for_each(|name| self.ledger.delete_gpunode(&name));
        for gpunode in gpunodes {
            let heartbeat = gpunode
                .status
                .as_ref()
                .and_then(|it| it.heartbeat.as_deref());
            let age = heartbeat.and_then(|it| self.seconds_since(it));
            let age = Duration::from_secs(age.unwrap_or(0));
            self.report(gpunode, self.now.saturating_sub(age));
        }
    }

    /// Removes a bound pod from the ledger, and its use from its node's report. The ledger would count the memory of an
    /// unknown pod as a stranger's.
    pub fn take_out(&mut self, pod: &PodFacts) {
        self.ledger.delete_pod(&pod.uid);
        self.report_of(pod, |used| *used != *pod.uid);
    }

    /// Puts the pod and its memory use back.
    pub fn put_back(&mut self, pod: PodFacts) {
        self.report_of(&pod, |_| true);
        self.ledger.apply_pod(pod);
    }

    /// Gives the ledger the report of the pod's node, with the use of these pods alone. The report keeps its age.
    fn report_of(&mut self, pod: &PodFacts, keep: impl Fn(&str) -> bool) {
        let node = pod.node.as_deref().unwrap_or_default();
        let Some(mut status) = self.reports.get(node).cloned() else {
            return;
        };
        for gpu in &mut status.gpus {
            gpu.pods.retain(|used| keep(&used.uid));
        }
        let age = Duration::from_secs(self.report_age(node).unwrap_or(0));
        let seen = self.now.saturating_sub(age);
        self.ledger.apply_gpunode(node, status, seen);
    }

    /// Every node with GPUs or with holders of GPU memory.
    pub fn views(&self) -> Vec<NodeView> {
        self.ledger.snapshot(self.now)
    }

    /// The pods that wait for GPU memory, oldest first.
    pub fn waiting(&self) -> Vec<&PodInfo> {
        let mut waiting: Vec<_> = self.pods.values().filter(|pod| pod.waits()).collect();
        waiting.sort_by_key(|pod| (pod.facts.created, pod.full_name()));
        waiting
    }

    /// Seconds since a node's last report, by the clocks of two machines.
    pub fn report_age(&self, node: &str) -> Option<u64> {
        self.seconds_since(self.reports.get(node)?.heartbeat.as_deref()?)
    }

    /// Seconds from a time of day until now.
    pub fn seconds_since(&self, time: &str) -> Option<u64> {
        let time: Timestamp = time.parse().ok()?;
        u64::try_from(self.wall.as_second() - time.as_second()).ok()
    }

    /// The pods in `scope`, by namespace and name.
    pub fn pods_in(&self, scope: &Scope) -> Vec<&PodInfo> {
        let mut pods: Vec<_> = self
            .pods
            .values()
            .filter(|pod| scope.has(&pod.object))
            .collect();
        pods.sort_by_key(|pod| (pod.facts.namespace.clone(), pod.facts.name.clone()));
        pods
    }

    /// The pod that a person means: by name, or a workload's by KIND/NAME: the oldest that waits, or
    /// the oldest.
    ///
    /// # Errors
    /// If there is none, or several of that name.
    pub fn find(&self, scope: &Scope, wanted: &str) -> Result<&PodInfo, Error> {
        let (namespace, name) = match wanted.split_once('/') {
            Some(("pod" | "pods", name)) => (scope.namespace.as_deref(), name),
            Some((word, name)) => match owner::kind(word) {
                Some(kind) => return self.find_of(scope, kind, name),
                None => (Some(word), name),
            },
            None => (scope.namespace.as_deref(), wanted),
        };
        let is = |pod: &&PodInfo| {
            &*pod.facts.name == name && namespace.is_none_or(|it| it == &*pod.facts.namespace)
        };
        let mut found = self.pods.values().filter(is);
        match (found.next(), found.next()) {
            (Some(pod), None) => Ok(pod),
            (Some(_), Some(_)) => Err(Error::Several(name.to_owned())),
            (None, _) => {
                self.asks(self.unasking.values().find(is))?;
                let place = namespace.map_or_else(String::new, |it| format!(" in namespace {it}"));
                Err(Error::NotFound(format!(
                    "no pod {name}{place} asks for {}: `kubectl get pods -A` shows the others",
                    self.resource
                )))
            }
        }
    }

    fn find_of(&self, scope: &Scope, kind: &'static str, name: &str) -> Result<&PodInfo, Error> {
        let owner = gpustow_api::owner::Owner {
            kind: kind.to_owned(),
            name: name.to_owned(),
        };
        let namespace = scope.namespace.as_deref();
        let is = |pod: &&PodInfo| {
            namespace.is_none_or(|it| it == &*pod.facts.namespace)
                && gpustow_api::owner::of(&pod.object).contains(&owner)
        };
        let owned = self.pods.values().filter(is);
        let age = |pod: &&PodInfo| (!pod.waits(), pod.facts.created, pod.full_name());
        let first = owned.min_by_key(age);
        if first.is_none() {
            self.asks(self.unasking.values().find(is))?;
        }
        first.ok_or_else(|| {
            let place = namespace.map_or_else(String::new, |it| format!(" in namespace {it}"));
            Error::NotFound(format!(
                "no pod of {}/{name}{place} asks for {}; pods that were refused at creation are \
                 among the Events: kubectl get events{} --field-selector reason=FailedCreate",
                kind.to_lowercase(),
                self.resource,
                namespace.map_or_else(|| " -A".to_owned(), |it| format!(" -n {it}")),
            ))
        })
    }

    /// Fails for a pod with annotations and without a request, and names the missing part.
    fn asks(&self, unasking: Option<&PodInfo>) -> Result<(), Error> {
        let missing = unasking.and_then(|pod| {
            if pod.facts.stands_for.is_some() {
                let owner = pod.facts.placeholder_owner();
                let owner = owner.and_then(|uid| self.pods.get(uid));
                let owner = owner.map_or("a pod that is gone".to_owned(), PodInfo::full_name);
                return Some(format!(
                    "{} is gpustow's own and runs nowhere: by it an autoscaler sees that {owner} needs a node",
                    pod.full_name()
                ));
            }
            let missing = keys::unasked(pod.object.annotations(), &self.resource)?;
            Some(format!("{}: {missing}", pod.full_name()))
        });
        missing.map_or(Ok(()), |missing| Err(Error::NotFound(missing)))
    }
}

/// The pods that a person asks about.
#[derive(Clone, Debug)]
pub struct Scope {
    /// None: all.
    pub namespace: Option<String>,
    /// Labels that they have.
    pub selector: Option<Selector>,
}

impl Scope {
    /// Is the pod one of these?
    pub fn has(&self, pod: &Pod) -> bool {
        let namespace = self.namespace.as_ref();
        let labels = self.selector.as_ref();
        namespace.is_none_or(|it| pod.metadata.namespace.as_ref() == Some(it))
            && labels.is_none_or(|it| it.matches(pod.labels()))
    }
}
