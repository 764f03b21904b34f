//! The cluster as Lists or watches show it: the extender's ledger, and beside it what only people
//! want to know.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use gpustow_api::gpunode::GpuNodeStatus;
use gpustow_api::{GpuNode, NodeFacts, PodFacts, names};
use gpustow_ledger::{Config, Ledger, NodeView};
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt as _;
use kube::core::SelectorExt as _;

use crate::args::Scope;

/// Seconds after which an agent counts as silent, by the clocks of two machines: a hint for
/// people. The extender measures on its own clock alone.
pub(crate) const SILENT_AFTER: u64 = 180;

/// A pod that asks for GPU memory or holds some.
#[derive(Clone, Debug)]
pub(crate) struct PodInfo {
    pub(crate) facts: Arc<PodFacts>,
    pub(crate) object: Arc<Pod>,
}

/// Everything known of the cluster.
pub(crate) struct Cluster {
    pub(crate) ledger: Ledger,
    /// The namespace that commands are about unless told otherwise; None for all.
    pub(crate) namespace: Option<String>,
    pub(crate) nodes: BTreeMap<String, Node>,
    pub(crate) reports: BTreeMap<String, GpuNodeStatus>,
    pub(crate) pods: BTreeMap<Arc<str>, PodInfo>,
    /// ConfigMaps of gpustow's namespace; None if they may not be read.
    pub(crate) configs: Option<Vec<ConfigMap>>,
    /// The time on the ledger's clock.
    pub(crate) now: Duration,
    /// The time of day, for ages.
    pub(crate) wall: Timestamp,
    resource: String,
}

impl PodInfo {
    /// Neither bound nor ended nor leaving.
    pub(crate) fn waits(&self) -> bool {
        self.facts.node.is_none() && !self.facts.released && !self.facts.deleting
    }

    /// `namespace/name`.
    pub(crate) fn full_name(&self) -> String {
        format!("{}/{}", self.facts.namespace, self.facts.name)
    }

    /// Seconds since it was created.
    pub(crate) fn age(&self, wall: Timestamp) -> u64 {
        u64::try_from(wall.as_second() - self.facts.created).unwrap_or(0)
    }

    /// What kube-scheduler said last.
    pub(crate) fn scheduler_said(&self) -> Option<&str> {
        let conditions = self.object.status.as_ref()?.conditions.as_ref()?;
        let scheduled = conditions.iter().find(|it| it.type_ == "PodScheduled");
        scheduled?.message.as_deref()
    }

    /// What the agent confirmed.
    pub(crate) fn confirmed(&self) -> Option<&str> {
        let annotations = self.object.metadata.annotations.as_ref()?;
        annotations.get(names::CONFIRMED).map(String::as_str)
    }
}

impl Cluster {
    /// An empty cluster in which gpu-mem is called `resource`.
    pub(crate) fn new(resource: &str) -> Self {
        Self {
            ledger: Ledger::new(Config::default()),
            namespace: None,
            nodes: BTreeMap::new(),
            reports: BTreeMap::new(),
            pods: BTreeMap::new(),
            configs: None,
            now: Duration::ZERO,
            wall: Timestamp::now(),
            resource: resource.to_owned(),
        }
    }

    /// What pods call gpu-mem.
    pub(crate) fn resource(&self) -> &str {
        &self.resource
    }

    /// What the ledger keeps of a pod; `None` if it has no UID.
    pub(crate) fn facts(&self, pod: &Pod) -> Option<PodFacts> {
        PodFacts::from_pod(pod, &self.resource)
    }

    pub(crate) fn apply_pod(&mut self, mut pod: Pod) {
        let Some(facts) = self.facts(&pod) else {
            return;
        };
        let asks = facts
            .request
            .as_ref()
            .is_ok_and(|request| request.is_empty());
        if !asks || facts.assignment.is_some() {
            pod.metadata.managed_fields = None;
            let info = PodInfo {
                facts: Arc::new(facts.clone()),
                object: Arc::new(pod),
            };
            self.pods.insert(facts.uid.clone(), info);
        }
        self.ledger.apply_pod(facts);
    }

    pub(crate) fn delete_pod(&mut self, pod: &Pod) {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        self.pods.remove(uid);
        self.ledger.delete_pod(uid);
    }

    pub(crate) fn reset_pods(&mut self, pods: Vec<Pod>) {
        self.pods.clear();
        let facts = pods.iter().filter_map(|pod| self.facts(pod)).collect();
        let began = self.ledger.copies();
        self.ledger.reset_pods(facts, began);
        pods.into_iter().for_each(|pod| self.apply_pod(pod));
        self.ledger.learn();
    }

    pub(crate) fn apply_node(&mut self, mut node: Node) {
        node.metadata.managed_fields = None;
        if let Some(status) = &mut node.status {
            status.images = None;
        }
        self.ledger.apply_node(NodeFacts::from_node(&node));
        self.nodes.insert(node.name_any(), node);
    }

    pub(crate) fn delete_node(&mut self, node: &Node) {
        self.nodes.remove(&node.name_any());
        self.ledger.delete_node(&node.name_any());
    }

    pub(crate) fn reset_nodes(&mut self, nodes: Vec<Node>) {
        self.nodes.clear();
        self.ledger
            .reset_nodes(nodes.iter().map(NodeFacts::from_node).collect());
        nodes.into_iter().for_each(|node| self.apply_node(node));
    }

    pub(crate) fn apply_gpunode(&mut self, gpunode: GpuNode) {
        let (name, status) = (gpunode.name_any(), gpunode.status.unwrap_or_default());
        self.ledger.apply_gpunode(&name, status.clone(), self.now);
        self.reports.insert(name, status);
    }

    pub(crate) fn delete_gpunode(&mut self, gpunode: &GpuNode) {
        self.reports.remove(&gpunode.name_any());
        self.ledger.delete_gpunode(&gpunode.name_any());
    }

    pub(crate) fn reset_gpunodes(&mut self, gpunodes: Vec<GpuNode>) {
        self.reports.clear();
        let status = |node: &GpuNode| (node.name_any(), node.status.clone().unwrap_or_default());
        self.ledger
            .reset_gpunodes(gpunodes.iter().map(status).collect(), self.now);
        gpunodes
            .into_iter()
            .for_each(|node| self.apply_gpunode(node));
    }

    /// Every node with GPUs or with holders of GPU memory.
    pub(crate) fn views(&self) -> Vec<NodeView> {
        self.ledger.snapshot(self.now)
    }

    /// The pods that wait for GPU memory, oldest first.
    pub(crate) fn waiting(&self) -> Vec<&PodInfo> {
        let mut waiting: Vec<_> = self.pods.values().filter(|pod| pod.waits()).collect();
        waiting.sort_by_key(|pod| (pod.facts.created, pod.full_name()));
        waiting
    }

    /// Seconds since a node's last report, by the clocks of two machines.
    pub(crate) fn report_age(&self, node: &str) -> Option<u64> {
        let heartbeat = self.reports.get(node)?.heartbeat.as_deref()?;
        let heartbeat: Timestamp = heartbeat.parse().ok()?;
        u64::try_from(self.wall.as_second() - heartbeat.as_second()).ok()
    }

    /// The pods in `scope`, by namespace and name.
    pub(crate) fn pods_in(&self, scope: &Scope) -> Vec<&PodInfo> {
        let mut pods: Vec<_> = self.pods.values().filter(|pod| scope.has(pod)).collect();
        pods.sort_by_key(|pod| (pod.facts.namespace.clone(), pod.facts.name.clone()));
        pods
    }

    /// The pod that a person means.
    pub(crate) fn find(&self, scope: &Scope, name: &str) -> Result<&PodInfo> {
        let (namespace, name) = match name.split_once('/') {
            Some(("pod" | "pods", name)) => (scope.namespace.as_deref(), name),
            Some((namespace, name)) => (Some(namespace), name),
            None => (scope.namespace.as_deref(), name),
        };
        let mut found = self.pods.values().filter(|pod| {
            &*pod.facts.name == name && namespace.is_none_or(|it| it == &*pod.facts.namespace)
        });
        match (found.next(), found.next()) {
            (Some(pod), None) => Ok(pod),
            (Some(_), Some(_)) => bail!("pod {name} is in several namespaces: add -n NAMESPACE"),
            (None, _) => {
                let place = namespace.map_or_else(String::new, |it| format!(" in namespace {it}"));
                bail!("no pod {name}{place} that asks for {}", self.resource)
            }
        }
    }
}

impl Scope {
    fn has(&self, pod: &PodInfo) -> bool {
        let namespace = self.namespace.as_deref();
        namespace.is_none_or(|it| it == &*pod.facts.namespace)
            && self
                .selector
                .as_ref()
                .is_none_or(|it| it.matches(pod.object.labels()))
    }
}
