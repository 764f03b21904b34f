//! The agent's requests to the API server, and the few fields that it keeps of its own Node.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::time::Duration;

use gpustow_api::claim::{self, Consumed, Device};
use gpustow_api::gpunode::{GpuNode, GpuNodeSpec, GpuNodeStatus};
use gpustow_api::intree::Taint;
use gpustow_api::{names, quantity};
use gpustow_pack::Mib;
use gpustow_serve::status_patch;
use k8s_openapi::api::core::v1::{Node, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Api, GetParams, ListParams, Patch, PatchParams, Request};
use kube::core::PartialObjectMeta;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Client, Resource as _};
use serde::Serialize;
use serde_json::{Value, json};
use thiserror::Error;
use tokio::time::timeout;

use crate::claims::{ClaimName, Slices};
use crate::pods::{NodePod, NodePods};

/// Bound on every request. Whatever failed is tried again with the next sample.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A request to the API server failed.
#[derive(Debug, Error)]
pub enum ClusterError {
    /// It refused, or could not be reached.
    #[error("{0}")]
    Api(#[from] kube::Error),
    /// It did not answer.
    #[error("the API server does not answer")]
    Timeout,
}

impl ClusterError {
    /// The same write may well be taken later.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Api(kube::Error::Api(status)) => status.code == 429 || status.code >= 500,
            Self::Api(_) | Self::Timeout => true,
        }
    }
}

/// The part of the Node object that the agent needs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OwnNode {
    /// Its owner reference for objects of its own.
    pub owner: Option<OwnerReference>,
    /// Its capacity of GPU memory, if it has that at all.
    pub capacity: Option<Mib>,
    /// Its allocatable GPU memory, which the kubelet reports to kube-scheduler.
    pub allocatable: Option<Mib>,
    /// Its capacity of everything.
    pub amounts: BTreeMap<String, Quantity>,
    /// Our labels on it.
    pub labels: BTreeMap<String, String>,
    /// Where in the list of its taints the startup taint is.
    pub startup_taint: Option<usize>,
}

impl OwnNode {
    /// Reduces a node.
    #[must_use]
    pub fn of(node: &Node, resource: &str) -> Self {
        let status = node.status.as_ref();
        let amount = |list: Option<&BTreeMap<String, Quantity>>| {
            let amount = list?.get(resource)?;
            Some(Mib(quantity::rounded_up(amount, 1)))
        };
        let mut taints = node.spec.iter().flat_map(|it| it.taints.iter().flatten());
        let labels = node.metadata.labels.iter().flatten();
        let ours = [
            names::GPU_MODEL_LABEL,
            names::GPU_MEMORY_LABEL,
            names::GPU_COUNT_LABEL,
            names::KNOWN_LABEL,
        ];
        Self {
            owner: node.owner_ref(&()),
            capacity: amount(status.and_then(|it| it.capacity.as_ref())),
            allocatable: amount(status.and_then(|it| it.allocatable.as_ref())),
            amounts: status
                .and_then(|it| it.capacity.clone())
                .unwrap_or_default(),
            startup_taint: taints.position(|taint| Taint::of(taint).is_startup()),
            labels: labels
                .filter(|(key, _)| ours.contains(&key.as_str()))
                .map(|(key, value)| (key.clone(), value.clone()))
                .collect(),
        }
    }
}

/// The labels that the node should have.
#[must_use]
pub fn labels(status: &GpuNodeStatus) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::new();
    let Some(first) = status.gpus.first() else {
        return labels;
    };
    labels.insert(names::KNOWN_LABEL.to_owned(), "true".to_owned());
    labels.insert(
        names::GPU_COUNT_LABEL.to_owned(),
        status.gpus.len().to_string(),
    );
    if status.gpus.iter().all(|gpu| gpu.model == first.model)
        && let Some(model) = label_value(&first.model)
    {
        labels.insert(names::GPU_MODEL_LABEL.to_owned(), model);
    }
    let capacities = status
        .gpus
        .iter()
        .map(|gpu| gpu.capacity(Mib(status.headroom_mib)).0);
    let smallest = capacities.min().unwrap_or_default();
    labels.insert(names::GPU_MEMORY_LABEL.to_owned(), smallest.to_string());
    labels
}

/// `NVIDIA H100 80GB HBM3` → `NVIDIA-H100-80GB-HBM3`.
fn label_value(text: &str) -> Option<String> {
    let plain = |c: char| {
        if c.is_ascii_alphanumeric() || c == '.' {
            c
        } else {
            '-'
        }
    };
    let text: String = text.chars().take(63).map(plain).collect();
    let text = text.trim_matches(|c: char| !c.is_ascii_alphanumeric());
    (!text.is_empty()).then(|| text.to_owned())
}

/// The API server, as one node's agent uses it.
#[derive(Clone)]
pub struct Cluster {
    /// For the watches.
    pub client: Client,
    pub(crate) node: String,
    recorder: Recorder,
}

fn event(type_: EventType, reason: &str, note: &str) -> Event {
    Event {
        type_,
        reason: reason.to_owned(),
        note: Some(note.to_owned()),
        action: "Sampling".to_owned(),
        secondary: None,
    }
}

async fn bounded<T>(
    request: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, ClusterError> {
    Ok(timeout(TIMEOUT, request)
        .await
        .map_err(|_| ClusterError::Timeout)??)
}

impl Cluster {
    /// Writes as the agent of `node`.
    #[must_use]
    pub fn new(client: Client, node: &str) -> Self {
        let reporter = Reporter {
            controller: names::AGENT.to_owned(),
            instance: Some(node.to_owned()),
        };
        let recorder = Recorder::new(client.clone(), reporter);
        Self {
            client,
            node: node.to_owned(),
            recorder,
        }
    }

    /// The report as it is in the cluster.
    ///
    /// # Errors
    /// [`ClusterError`] if it cannot be read; there being none is no error.
    pub async fn reported(&self) -> Result<Option<GpuNodeStatus>, ClusterError> {
        let api = Api::<GpuNode>::all(self.client.clone());
        match bounded(api.get_opt(&self.node)).await {
            Ok(node) => Ok(node.and_then(|node| node.status)),
            // The agent cannot use a report of another schema, and writes it again.
            Err(ClusterError::Api(kube::Error::SerdeError(error))) => {
                tracing::warn!(%error, "this node's GpuNode cannot be read; starting without it");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// The pods of this node as they are now, not as a watch has shown them.
    ///
    /// # Errors
    /// [`ClusterError`] if they cannot be read.
    pub async fn pods(&self, resource: &str) -> Result<NodePods, ClusterError> {
        let api = Api::<Pod>::all(self.client.clone());
        let params = ListParams::default().fields(&format!("spec.nodeName={}", self.node));
        let pods = bounded(api.list(&params)).await?;
        let reduced = pods
            .iter()
            .filter_map(|pod| NodePod::from_pod(pod, resource));
        Ok(NodePods::new(reduced))
    }

    /// The published data of drivers of dynamic resource allocation about this node's devices.
    ///
    /// # Errors
    /// [`ClusterError`] if it cannot be read.
    pub async fn slices(&self) -> Result<Slices, ClusterError> {
        let url = "/apis/resource.k8s.io/v1/resourceslices";
        let params = ListParams::default().fields(&format!("spec.nodeName={}", self.node));
        let request = Request::new(url).list(&params);
        let request = request.map_err(kube::Error::BuildRequest)?;
        let list = bounded(self.client.request::<Value>(request)).await?;
        let slices = list["items"].as_array().map(Vec::as_slice);
        Ok(Slices::of(slices.unwrap_or_default()))
    }

    /// The consumption of a claim on each of its devices.
    ///
    /// # Errors
    /// [`ClusterError`] if it cannot be read.
    pub async fn consumed(
        &self,
        (namespace, name): &ClaimName,
    ) -> Result<HashMap<Device, Consumed>, ClusterError> {
        let url = format!("/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims");
        let request = Request::new(url).get(name, &GetParams::default());
        let request = request.map_err(kube::Error::BuildRequest)?;
        let claim = bounded(self.client.request::<Value>(request)).await?;
        Ok(claim::consumed(&claim))
    }

    async fn patch_status<P: Serialize + Debug>(
        &self,
        url: String,
        name: &str,
        params: &PatchParams,
        patch: &Patch<P>,
    ) -> Result<(), ClusterError> {
        let request = status_patch(url, name, params, patch)?;
        let patched = self.client.request::<PartialObjectMeta>(request);
        bounded(patched).await.map(drop)
    }

    /// Makes the report's object, owned by the node.
    ///
    /// # Errors
    /// [`ClusterError`] if it cannot be written.
    pub async fn own(&self, owner: &OwnerReference) -> Result<(), ClusterError> {
        let mut object = GpuNode::new(&self.node, GpuNodeSpec::default());
        object.metadata.owner_references = Some(vec![owner.clone()]);
        let api = Api::<GpuNode>::all(self.client.clone());
        let params = PatchParams::apply(names::AGENT).force();
        bounded(api.patch_metadata(&self.node, &params, &Patch::Apply(object))).await?;
        Ok(())
    }

    /// Writes the report.
    ///
    /// # Errors
    /// [`ClusterError`] if it cannot be written, for want of its object for example.
    pub async fn report(&self, status: &GpuNodeStatus) -> Result<(), ClusterError> {
        let mut object = GpuNode::new(&self.node, GpuNodeSpec::default());
        object.status = Some(status.clone());
        let params = PatchParams::apply(names::AGENT).force();
        let url = GpuNode::url_path(&(), None);
        self.patch_status(url, &self.node, &params, &Patch::Apply(object))
            .await
    }

    /// Writes the node's capacity, if given, and its labels, and removes the labels in `stale`.
    ///
    /// # Errors
    /// [`ClusterError`] if they cannot be written.
    pub async fn node(
        &self,
        resource: &str,
        capacity: Option<Mib>,
        labels: &BTreeMap<String, String>,
        stale: impl Iterator<Item = &String>,
    ) -> Result<(), ClusterError> {
        let mut labels = json!(labels);
        for key in stale {
            labels[key] = json!(null);
        }
        let mut patch = json!({ "metadata": { "labels": labels } });
        if let Some(Mib(mib)) = capacity {
            patch["status"] = json!({ "capacity": { resource: mib.to_string() } });
        }
        let (url, params) = (Node::url_path(&(), None), PatchParams::default());
        self.patch_status(url, &self.node, &params, &Patch::Merge(patch))
            .await
    }

    /// Removes the startup taint, which is at this position of the node's list, unless the list has changed.
    ///
    /// # Errors
    /// [`ClusterError`] if it cannot be removed.
    pub async fn started(&self, position: usize) -> Result<(), ClusterError> {
        let taint = format!("/spec/taints/{position}");
        let patch = json!([
            { "op": "test", "path": format!("{taint}/key"), "value": names::STARTUP_TAINT },
            { "op": "test", "path": format!("{taint}/effect"), "value": "NoSchedule" },
            { "op": "remove", "path": taint },
        ]);
        let patch = serde_json::from_value(patch).map_err(kube::Error::SerdeError)?;
        let patch = Patch::<()>::Json(patch);
        let nodes = Api::<Node>::all(self.client.clone());
        let params = PatchParams::default();
        let patched = nodes.patch_metadata(&self.node, &params, &patch);
        bounded(patched).await.map(drop)
    }

    /// Writes on which devices the pod was seen.
    ///
    /// # Errors
    /// [`ClusterError`] if it cannot be written, for example because another pod has the name now.
    pub async fn confirm(&self, pod: &NodePod, devices: &str) -> Result<(), ClusterError> {
        let patch = json!({ "metadata": {
            "uid": &*pod.facts.uid,
            "annotations": { names::CONFIRMED: devices },
        } });
        let url = Pod::url_path(&(), Some(&pod.facts.namespace));
        let params = PatchParams::default();
        self.patch_status(url, &pod.facts.name, &params, &Patch::Merge(patch))
            .await
    }

    /// Writes an Event about the pod for its users.
    ///
    /// # Errors
    /// [`ClusterError`] if it cannot be written.
    pub async fn tell(
        &self,
        pod: &NodePod,
        kind: EventType,
        reason: &str,
        note: &str,
    ) -> Result<(), ClusterError> {
        let event = event(kind, reason, note);
        let reference = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: Some(pod.facts.namespace.to_string()),
            name: Some(pod.facts.name.to_string()),
            uid: Some(pod.facts.uid.to_string()),
            ..ObjectReference::default()
        };
        bounded(self.recorder.publish(&event, &reference)).await
    }

    /// Writes a warning Event about the node for its administrators.
    ///
    /// # Errors
    /// [`ClusterError`] if it cannot be written.
    pub async fn warn_node(&self, reason: &str, note: &str) -> Result<(), ClusterError> {
        let reference = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(self.node.clone()),
            // As the kubelet does it, and kubectl describe looks for it.
            uid: Some(self.node.clone()),
            ..ObjectReference::default()
        };
        let event = event(EventType::Warning, reason, note);
        bounded(self.recorder.publish(&event, &reference)).await
    }
}
