//! Builders for nodes with GPUs and for pods, in as few words as a test needs, and a kubelet's reports about them.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result};
use gpustow_api::gpunode::{Gpu, GpuNode, GpuNodeSpec, GpuNodeStatus, Summary};
use gpustow_api::names;
use k8s_openapi::api::core::v1::{
    Container, ContainerState, ContainerStatus, Node, NodeCondition, NodeStatus, Pod, PodSpec,
    ResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Request};
use kube::{Client, Resource as _, ResourceExt as _};
use serde_json::{Value, json};

/// A node and its GpuNode.
#[derive(Clone, Debug)]
pub struct GpuNodeBuilder {
    /// The node; Ready, with capacity and allocatable.
    pub node: Node,
    /// The report of its agent.
    pub status: GpuNodeStatus,
}

/// A node with cards of these UUIDs and sizes in MiB; `cpu` and `ram` are quantities.
#[must_use]
pub fn gpu_node(name: &str, cpu: &str, ram: &str, cards: &[(&str, u64)]) -> GpuNodeBuilder {
    let gpus = cards
        .iter()
        .zip(0..)
        .map(|(&(uuid, total_mib), index)| Gpu {
            uuid: uuid.to_owned(),
            index,
            model: "Testkit GPU".to_owned(),
            total_mib,
            healthy: true,
            ..Gpu::default()
        });
    let capacity = [("cpu", cpu), ("memory", ram), ("pods", "1000")];
    let capacity = capacity.map(|(key, value)| (key.to_owned(), Quantity(value.to_owned())));
    let ready = NodeCondition {
        type_: "Ready".to_owned(),
        status: "True".to_owned(),
        ..NodeCondition::default()
    };
    let node = Node {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            ..ObjectMeta::default()
        },
        status: Some(NodeStatus {
            capacity: Some(capacity.into()),
            conditions: Some(vec![ready]),
            ..NodeStatus::default()
        }),
        ..Node::default()
    };
    GpuNodeBuilder {
        node,
        status: GpuNodeStatus {
            gpus: gpus.collect(),
            ..Default::default()
        },
    }
}

impl GpuNodeBuilder {
    /// Adds a label.
    #[must_use]
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.node
            .labels_mut()
            .insert(key.to_owned(), value.to_owned());
        self
    }

    /// MiB per card that no pod may hold.
    #[must_use]
    pub fn headroom(mut self, mib: u64) -> Self {
        self.status.headroom_mib = mib;
        self
    }

    /// Changes anything else of the report.
    #[must_use]
    pub fn with_status(mut self, change: impl FnOnce(&mut GpuNodeStatus)) -> Self {
        change(&mut self.status);
        self
    }

    /// Changes anything else of the node.
    #[must_use]
    pub fn with_node(mut self, change: impl FnOnce(&mut Node)) -> Self {
        change(&mut self.node);
        self
    }

    /// Capacity for kube-scheduler other than the sum of the cards: with more than that, gpustow
    /// alone refuses.
    #[must_use]
    pub fn advertise(mut self, mib: u64) -> Self {
        let status = self.node.status.get_or_insert_default();
        let capacity = status.capacity.get_or_insert_default();
        capacity.insert(names::GPU_MEM.to_owned(), Quantity(mib.to_string()));
        self
    }

    /// Creates the node, with the sum of its cards as capacity if no other was advertised, and its
    /// GpuNode.
    pub async fn create(&self, client: &Client) -> Result<Node> {
        let mut node = self.node.clone();
        let status = node.status.get_or_insert_default();
        let capacity = status.capacity.get_or_insert_default();
        let bounds = self.status.gpus.iter().map(|gpu| bound(gpu, &self.status));
        let sum = Quantity(bounds.sum::<u64>().to_string());
        capacity.entry(names::GPU_MEM.to_owned()).or_insert(sum);
        status.allocatable = status.capacity.clone();
        let node = Api::all(client.clone())
            .create(&PostParams::default(), &node)
            .await?;
        self.report_for(client, &node).await?;
        Ok(node)
    }

    /// Reports again, with a new heartbeat.
    pub async fn report(&self, client: &Client) -> Result<()> {
        let node = Api::<Node>::all(client.clone())
            .get(&self.node.name_any())
            .await?;
        self.report_for(client, &node).await
    }

    async fn report_for(&self, client: &Client, node: &Node) -> Result<()> {
        let api = Api::<GpuNode>::all(client.clone());
        let name = node.name_any();
        let mut object = GpuNode::new(&name, GpuNodeSpec::default());
        let owner: Option<OwnerReference> = node.owner_ref(&());
        object.metadata.owner_references = owner.map(|owner| vec![owner]);
        let params = PatchParams::apply("testkit").force();
        api.patch(&name, &params, &Patch::Apply(&object)).await?;

        let healthy = self.status.gpus.iter().filter(|gpu| gpu.healthy);
        let models = self.status.gpus.iter().map(|gpu| gpu.model.as_str());
        let models: Vec<&str> = BTreeSet::from_iter(models).into_iter().collect();
        let count = |n: usize| u32::try_from(n).context("cards on a node");
        let status = GpuNodeStatus {
            heartbeat: Some(Timestamp::now().to_string()),
            summary: Summary {
                gpus: count(self.status.gpus.len())?,
                healthy: count(healthy.clone().count())?,
                models: models.join(", "),
                capacity_mib: healthy.map(|gpu| bound(gpu, &self.status)).sum(),
                ..Summary::default()
            },
            ..self.status.clone()
        };
        let merge = json!({ "status": status });
        api.patch_status(&name, &PatchParams::default(), &Patch::Merge(merge))
            .await?;
        Ok(())
    }
}

/// The MiB that pods may hold of a card: the hard bound.
pub(crate) fn bound(gpu: &Gpu, node: &GpuNodeStatus) -> u64 {
    gpu.total_mib
        .saturating_sub(gpu.reserved_mib)
        .saturating_sub(node.headroom_mib)
}

/// A pod for gpustow's scheduler. Its containers are the first one, `main`, and those added.
#[derive(Clone, Debug)]
pub struct PodBuilder {
    pod: Pod,
    spec: PodSpec,
}

/// A pod with one container, `main`, that asks for nothing. It ends at once when deleted.
#[must_use]
pub fn pod(namespace: &str, name: &str) -> PodBuilder {
    let mut pod = Pod::default();
    pod.metadata.namespace = Some(namespace.to_owned());
    pod.metadata.name = Some(name.to_owned());
    let spec = PodSpec {
        containers: vec![container("main", None)],
        scheduler_name: Some(names::SCHEDULER.to_owned()),
        termination_grace_period_seconds: Some(0),
        automount_service_account_token: Some(false),
        ..PodSpec::default()
    };
    PodBuilder { pod, spec }
}

fn container(name: &str, gpu_mem: Option<u64>) -> Container {
    let limits = gpu_mem.map(|mib| (names::GPU_MEM.to_owned(), Quantity(mib.to_string())));
    Container {
        name: name.to_owned(),
        image: Some("registry.k8s.io/pause:3.10".to_owned()),
        resources: Some(ResourceRequirements {
            limits: limits.map(|limit| BTreeMap::from([limit])),
            ..ResourceRequirements::default()
        }),
        ..Container::default()
    }
}

impl From<PodBuilder> for Pod {
    fn from(builder: PodBuilder) -> Self {
        builder.build()
    }
}

impl PodBuilder {
    /// MiB that `main` asks for; 0 is an ask, too.
    #[must_use]
    pub fn gpu_mem(mut self, mib: u64) -> Self {
        self.spec.containers[0].resources = container("main", Some(mib)).resources;
        self
    }

    /// Adds a container that asks for these MiB, or does not ask.
    #[must_use]
    pub fn container(mut self, name: &str, gpu_mem: impl Into<Option<u64>>) -> Self {
        self.spec.containers.push(container(name, gpu_mem.into()));
        self
    }

    /// Adds an init container.
    #[must_use]
    pub fn init(mut self, name: &str, gpu_mem: impl Into<Option<u64>>) -> Self {
        let init = container(name, gpu_mem.into());
        self.spec.init_containers.get_or_insert_default().push(init);
        self
    }

    /// Adds an init container that keeps running.
    #[must_use]
    pub fn sidecar(mut self, name: &str, gpu_mem: impl Into<Option<u64>>) -> Self {
        let mut sidecar = container(name, gpu_mem.into());
        sidecar.restart_policy = Some("Always".to_owned());
        self.spec
            .init_containers
            .get_or_insert_default()
            .push(sidecar);
        self
    }

    /// The request of `main` for `cpu`, `memory` or another resource.
    #[must_use]
    pub fn requests(mut self, resource: &str, quantity: &str) -> Self {
        let resources = self.spec.containers[0].resources.get_or_insert_default();
        let requests = resources.requests.get_or_insert_default();
        requests.insert(resource.to_owned(), Quantity(quantity.to_owned()));
        self
    }

    /// Adds an annotation.
    #[must_use]
    pub fn annotation(mut self, key: &str, value: &str) -> Self {
        self.pod
            .annotations_mut()
            .insert(key.to_owned(), value.to_owned());
        self
    }

    /// Adds a label.
    #[must_use]
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.pod
            .labels_mut()
            .insert(key.to_owned(), value.to_owned());
        self
    }

    /// Asks for nodes with a label.
    #[must_use]
    pub fn node_selector(mut self, key: &str, value: &str) -> Self {
        let selector = self.spec.node_selector.get_or_insert_default();
        selector.insert(key.to_owned(), value.to_owned());
        self
    }

    /// The name of its PriorityClass, which must exist.
    #[must_use]
    pub fn priority_class(mut self, name: &str) -> Self {
        self.spec.priority_class_name = Some(name.to_owned());
        self
    }

    /// Another scheduler than gpustow's.
    #[must_use]
    pub fn scheduler(mut self, name: &str) -> Self {
        self.spec.scheduler_name = Some(name.to_owned());
        self
    }

    /// Changes anything else of the spec.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut PodSpec)) -> Self {
        change(&mut self.spec);
        self
    }

    /// The pod.
    #[must_use]
    pub fn build(self) -> Pod {
        Pod {
            spec: Some(self.spec),
            ..self.pod
        }
    }

    /// Creates it.
    pub async fn create(self, client: &Client) -> Result<Pod> {
        let pod = self.build();
        Ok(pods(client, &pod)?
            .create(&PostParams::default(), &pod)
            .await?)
    }

    /// Creates it so that no scheduler finds a node for it, and binds it past all of them. It bears
    /// the label [`BY_HAND`](crate::BY_HAND).
    pub async fn bind_by_hand(self, client: &Client, node: &str) -> Result<Pod> {
        // No kubelet looks at this.
        let no_pod = json!({ "podAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": [{
            "labelSelector": { "matchLabels": { "testkit/no-pod": "" } },
            "topologyKey": "kubernetes.io/hostname",
        }] } });
        let affinity = serde_json::from_value(no_pod)?;
        let pod = self
            .label(crate::BY_HAND, "")
            .with(|spec| spec.affinity = Some(affinity))
            .create(client)
            .await?;
        let (namespace, name) = (pod.namespace().context("no namespace")?, pod.name_any());
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding", "metadata": { "name": name },
            "target": { "kind": "Node", "name": node },
        });
        let url = format!("/api/v1/namespaces/{namespace}/pods/{name}/binding");
        let binding =
            Request::new(url).create(&PostParams::default(), binding.to_string().into())?;
        client.request::<Value>(binding).await?;
        Ok(pods(client, &pod)?.get(&name).await?)
    }
}

/// Reports, as a kubelet would, that it has accepted the pod.
pub async fn set_accepted(client: &Client, pod: &Pod) -> Result<Pod> {
    patch_status(client, pod, json!({ "startTime": "2026-01-01T00:00:00Z" })).await
}

/// Reports, as a kubelet would, that the pod and all its containers run.
pub async fn set_running(client: &Client, pod: &Pod) -> Result<Pod> {
    set_containers(client, pod, "Running", json!({ "running": {} })).await
}

/// Sets the pod's phase, and reports nothing about its containers.
pub async fn set_phase(client: &Client, pod: &Pod, phase: &str) -> Result<Pod> {
    patch_status(client, pod, json!({ "phase": phase })).await
}

/// Sets the pod's phase, and the state of every container, such as `{"waiting": {"reason": "CrashLoopBackOff"}}` or
/// `{"terminated": {"exitCode": 0}}`.
pub async fn set_containers(client: &Client, pod: &Pod, phase: &str, state: Value) -> Result<Pod> {
    let state: ContainerState = serde_json::from_value(state)?;
    let spec = pod.spec.as_ref().context("pod without a spec")?;
    let all = |containers: &[Container]| -> Vec<ContainerStatus> {
        let one = |container: &Container| ContainerStatus {
            name: container.name.clone(),
            image: container.image.clone().unwrap_or_default(),
            ready: state.running.is_some(),
            state: Some(state.clone()),
            ..ContainerStatus::default()
        };
        containers.iter().map(one).collect()
    };
    let status = json!({
        "phase": phase,
        "containerStatuses": all(&spec.containers),
        "initContainerStatuses": all(spec.init_containers.as_deref().unwrap_or_default()),
    });
    patch_status(client, pod, status).await
}

/// Deletes the pod; without a kubelet, a grace above zero leaves a bound pod terminating.
pub async fn delete(client: &Client, pod: &Pod, grace_seconds: u32) -> Result<()> {
    let params = DeleteParams::default().grace_period(grace_seconds);
    pods(client, pod)?.delete(&pod.name_any(), &params).await?;
    Ok(())
}

async fn patch_status(client: &Client, pod: &Pod, status: Value) -> Result<Pod> {
    let patch = Patch::Merge(json!({ "status": status }));
    let name = pod.name_any();
    Ok(pods(client, pod)?
        .patch_status(&name, &PatchParams::default(), &patch)
        .await?)
}

fn pods(client: &Client, pod: &Pod) -> Result<Api<Pod>> {
    let namespace = pod.namespace().context("pod without a namespace")?;
    Ok(Api::namespaced(client.clone(), &namespace))
}
