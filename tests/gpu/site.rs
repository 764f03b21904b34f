//! A control plane with gpustow, and this machine as its node.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use gpustow_api::gpunode::{Gpu, GpuNode};
use gpustow_api::{names, quantity};
use gpustow_testkit::{
    Agent, Case, ControlPlane, Extender, ExtenderOptions, Options, PodBuilder, Scheduler, Webhook,
    built, eventually, wait_bound,
};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt as _;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::json;

use crate::program::{Program, build, container_id};

/// Bound on waits that take seconds. The report of a pod's usage within its request can wait for the agent's heartbeat,
/// a minute.
pub(crate) const SOON: Duration = Duration::from_secs(120);

pub(crate) struct Site {
    pub(crate) case: Case,
    /// The machine's first GPU.
    pub(crate) uuid: String,
    /// Memory of this GPU that pods may request, MiB.
    pub(crate) total: u64,
    node: String,
    program: PathBuf,
    // These end with the site.
    _agent: Agent,
    _extender: Extender,
    _scheduler: Scheduler,
    _cluster: ControlPlane,
    _folder: tempfile::TempDir,
}

impl Site {
    /// With these fields of the GpustowConfig.
    pub(crate) async fn open(config: &[&str]) -> Result<Site> {
        let folder = tempfile::tempdir()?;
        let program = build(folder.path())?;
        let cluster = ControlPlane::start(Options::default()).await?;
        let base = repository("manifests/base").display().to_string();
        cluster.kubectl(&["apply", "-k", &base]).await?;
        let gpustow = Path::new(env!("CARGO_BIN_EXE_gpustow"));
        Webhook::keep(&cluster, gpustow).await?;
        let case = Case::new(&cluster, "gpu").await?;
        let node = case.node_name("n");
        let nodes = Api::<Node>::all(case.client.clone());
        nodes
            .create(&PostParams::default(), &case.node("n", &[]).node)
            .await?;

        let agent = std::env::current_exe()?;
        let agent = agent.parent().and_then(Path::parent).context("no folder")?;
        let agent = agent.join("gpustow-agent");
        built(&agent, "cargo build --package gpustow-agent")?;
        let flags = ["--kill-processes".to_owned()];
        let agent = Agent::start(&cluster, &agent, &node, &flags).await?;
        agent.wait_ready().await?;
        let gpunodes = Api::<GpuNode>::all(case.client.clone());
        let report = eventually(SOON, "the agent's report", async || {
            let report = gpunodes.get(&node).await?;
            report.status.context("no status")
        })
        .await?;
        let gpu = report.gpus.first().context("the agent sees no GPU")?;
        let (uuid, total) = (gpu.uuid.clone(), gpu.total_mib - gpu.reserved_mib);
        let capacity = eventually(SOON, "the node's capacity", async || {
            let status = nodes.get(&node).await?.status.unwrap_or_default();
            let capacity = status.capacity.unwrap_or_default();
            let amount = capacity.get(names::GPU_MEM).context("no GPU memory")?;
            Ok(quantity::rounded_up(amount, 1))
        })
        .await?;
        // As its kubelet would.
        let allocatable =
            json!({ "status": { "allocatable": { names::GPU_MEM: capacity.to_string() } } });
        nodes
            .patch_status(&node, &PatchParams::default(), &Patch::Merge(allocatable))
            .await?;

        let kubeconfig = cluster
            .kubeconfig(names::NAMESPACE, names::SCHEDULER, None)
            .await?;
        let options = ExtenderOptions {
            config: Some(config.iter().map(ToString::to_string).collect()),
            ..ExtenderOptions::default()
        };
        let extender = Extender::start(&cluster, gpustow, &kubeconfig, options).await?;
        let scheduler = Scheduler::calling(&cluster, &repository(""), &extender).await?;
        Ok(Site {
            case,
            uuid,
            total,
            node,
            program,
            _agent: agent,
            _extender: extender,
            _scheduler: scheduler,
            _cluster: cluster,
            _folder: folder,
        })
    }

    /// Creates the pod, and waits until it is bound.
    pub(crate) async fn bound(&self, pod: PodBuilder) -> Result<Pod> {
        let pod = pod.create(&self.case.client).await?;
        wait_bound(&self.case.client, &pod, SOON).await
    }

    /// A bound pod that requests so much.
    pub(crate) async fn pod(&self, name: &str, mib: u64) -> Result<Pod> {
        self.bound(self.case.pod(name).gpu_mem(mib)).await
    }

    /// A bound pod that requests this amount and may use all of the GPU.
    pub(crate) async fn borrower(&self, mib: u64) -> Result<Pod> {
        let pod = self.case.pod("borrower").gpu_mem(mib);
        self.bound(pod.annotation(names::MEM_LIMIT, "max")).await
    }

    /// Starts the program of the pod's container, which allocates this amount of GPU memory, and sets the pod to
    /// Running.
    pub(crate) async fn runs_in(&self, pod: &Pod, mib: u64) -> Result<Program> {
        let uid = pod.uid().context("pod without a UID")?;
        let program = Program::start(&self.program, &self.uuid, mib, Some(&uid))?;
        let status = json!({ "status": { "phase": "Running", "containerStatuses": [{
            "name": "main",
            "containerID": format!("containerd://{}", container_id()),
            "image": "",
            "imageID": "",
            "ready": true,
            "restartCount": 0,
            "state": { "running": {} },
        }] } });
        let (name, patch) = (pod.name_any(), Patch::Merge(status));
        let pods = self.case.pods();
        pods.patch_status(&name, &PatchParams::default(), &patch)
            .await?;
        Ok(program)
    }

    /// Starts a program that belongs to no pod.
    pub(crate) fn runs_outside(&self, mib: u64) -> Result<Program> {
        Program::start(&self.program, &self.uuid, mib, None)
    }

    /// Asks for the memory of a sleeping model, and waits until the pod's condition shows that all of it is free.
    pub(crate) async fn wake(&self, pod: &Pod) -> Result<()> {
        let (pods, name) = (self.case.pods(), pod.name_any());
        let awake = json!({ "metadata": { "annotations": { names::ASLEEP: "false" } } });
        let patch = Patch::Merge(awake);
        pods.patch(&name, &PatchParams::default(), &patch).await?;
        eventually(SOON, "the model's memory is free", async || {
            let status = pods.get(&name).await?.status.unwrap_or_default();
            let mut all = status.conditions.iter().flatten();
            let memory = all.find(|it| it.type_ == names::AVAILABLE_CONDITION);
            let free = memory.is_some_and(|it| it.status == "True");
            free.then_some(()).with_context(|| format!("{memory:?}"))
        })
        .await
    }

    /// Waits until `find` returns a value for the GPU in the report.
    pub(crate) async fn gpu<T>(&self, what: &str, find: impl Fn(&Gpu) -> Option<T>) -> Result<T> {
        let gpunodes = Api::<GpuNode>::all(self.case.client.clone());
        eventually(SOON, what, async || {
            let status = gpunodes.get(&self.node).await?.status.unwrap_or_default();
            let gpu = status.gpus.iter().find(|gpu| gpu.uuid == self.uuid);
            let gpu = gpu.context("the GPU is not in the report")?;
            find(gpu).with_context(|| format!("{gpu:?}"))
        })
        .await
    }

    /// Waits until the report shows that the pod uses at least this amount. Returns the pod's usage, MiB.
    pub(crate) async fn used(&self, pod: &Pod, mib: u64) -> Result<u64> {
        let uid = pod.uid().context("pod without a UID")?;
        self.gpu("what the pod uses", |gpu| {
            let of_pod = gpu.pods.iter().find(|it| it.uid == uid);
            of_pod.map(|it| it.used_mib).filter(|&used| used >= mib)
        })
        .await
    }

    /// Nothing is promised twice.
    pub(crate) async fn end(self) -> Result<()> {
        self.case.check().await
    }
}

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}
