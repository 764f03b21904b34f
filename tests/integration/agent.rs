//! The node agent on `fake-nvml`, in a cluster: its writes, the writes that are forbidden to it, and kube-scheduler's
//! reactions.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser as _;
use fake_nvml::{self as machine, Machine, Process};
use gpustow_agent::Args;
use gpustow_api::gpunode::{Gpu, GpuNode};
use gpustow_api::{names, quantity};
use gpustow_testkit::builders::set_running;
use gpustow_testkit::{Agent, Case, ControlPlane, eventually, wait_bound};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::{Client, Config, ResourceExt as _};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::agent_token::{agent_client, policy_holds};
use crate::support::{SOON, event, node_event, node_of, refused, rig, rounds};

/// A node of a case with an agent, and a driver whose state the test sets.
pub(crate) struct AgentNode {
    pub(crate) name: String,
    client: Client,
    dir: tempfile::TempDir,
    pub(crate) machine: Machine,
    /// Address of its health and metrics.
    pub(crate) metrics: String,
    agent: JoinHandle<Result<()>>,
}

impl AgentNode {
    /// A node without capacity, one card of 80000 MiB of which 1000 are the driver's, and an agent
    /// with the token that its kubelet would give it.
    pub(crate) async fn start(cluster: &ControlPlane, case: &Case) -> Result<Self> {
        policy_holds(cluster).await?;
        let name = case.node_name("n");
        let node = case.node("n", &[]).node;
        Api::<Node>::all(case.client.clone())
            .create(&PostParams::default(), &node)
            .await?;
        let dir = tempfile::tempdir()?;
        let gpu = machine::Gpu {
            uuid: case.uuid("n", 0),
            name: "NVIDIA H100 80GB HBM3".to_owned(),
            total_mib: 80_000,
            reserved_mib: 1000,
            numa_node: Some(1),
            nvlinks: 18,
            near: vec![machine::Near {
                gpu: 1,
                level: 20,
                nvlinks: None,
            }],
            ..machine::Gpu::default()
        };
        let machine = Machine {
            driver: "580.1".to_owned(),
            gpus: vec![gpu],
            ..Machine::default()
        };
        machine::install(&machine::library()?, dir.path(), &machine)?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let metrics = listener.local_addr()?.to_string();
        let agent = tokio::spawn(async { Ok(()) });
        let client = case.client.clone();
        let mut node = Self {
            name,
            client,
            dir,
            machine,
            metrics,
            agent,
        };
        let client = agent_client(cluster, &node.name).await?;
        node.agent = node.launch(client, listener, &[])?;
        Ok(node)
    }

    /// The agent is restarted with these flags.
    pub(crate) async fn restart(&mut self, cluster: &ControlPlane, flags: &[&str]) -> Result<()> {
        let client = agent_client(cluster, &self.name).await?;
        self.restart_with(client, flags).await
    }

    /// As above, with this way to the API server.
    pub(crate) async fn restart_with(&mut self, client: Client, flags: &[&str]) -> Result<()> {
        self.agent.abort();
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        self.metrics = listener.local_addr()?.to_string();
        self.agent = self.launch(client, listener, flags)?;
        Ok(())
    }

    fn launch(
        &self,
        client: Client,
        listener: TcpListener,
        flags: &[&str],
    ) -> Result<JoinHandle<Result<()>>> {
        let kubelet = self.dir.path().join("kubelet.sock");
        let mut args = vec![
            "gpustow-agent".to_owned(),
            format!("--node-name={}", self.name),
            format!("--pod-resources={}", kubelet.display()),
        ];
        args.extend(self.driver());
        args.extend(flags.iter().map(|&flag| flag.to_owned()));
        let args = Args::try_parse_from(args)?;
        Ok(tokio::spawn(gpustow_agent::serve(
            args,
            client,
            listener,
            std::future::pending(),
        )))
    }

    /// Where an agent finds this machine.
    fn driver(&self) -> [String; 2] {
        let dir = self.dir.path();
        [
            format!("--nvml-path={}", dir.display()),
            format!("--proc={}", dir.join("proc").display()),
        ]
    }

    /// Ends its agent, and starts in its place one of another build, as a process.
    pub(crate) async fn relieved_by(
        &mut self,
        program: &Path,
        cluster: &ControlPlane,
    ) -> Result<Agent> {
        self.agent.abort();
        let agent = Agent::start(cluster, program, &self.name, &self.driver()).await?;
        agent.wait_ready().await?;
        Ok(agent)
    }

    pub(crate) fn shows(&self) -> Result<()> {
        Ok(self.machine.write(&self.dir.path().join(machine::FILE))?)
    }

    /// From now on these processes, with their cgroups, use the card.
    pub(crate) fn runs(&mut self, processes: &[(u32, u64, String)]) -> Result<()> {
        self.machine.gpus[0].processes.clear();
        for (pid, mib, cgroup) in processes {
            let dir = self.dir.path().join("proc").join(pid.to_string());
            std::fs::create_dir_all(&dir)?;
            std::fs::write(
                dir.join("stat"),
                format!("{pid} (x) S {}7 0", "0 ".repeat(18)),
            )?;
            std::fs::write(dir.join("cgroup"), cgroup)?;
            let process = Process {
                pid: *pid,
                used_mib: Some(*mib),
                ..Process::default()
            };
            self.machine.gpus[0].processes.push(process);
        }
        self.shows()
    }

    async fn node(&self) -> Result<Node> {
        Ok(Api::all(self.client.clone()).get(&self.name).await?)
    }

    /// Waits until the node reports this capacity.
    pub(crate) async fn capacity(&self, mib: u64) -> Result<()> {
        let what = format!("capacity of {mib} MiB");
        eventually(SOON, &what, async || {
            let status = self.node().await?.status.unwrap_or_default();
            let capacity = status.capacity.unwrap_or_default();
            let seen = capacity.get(names::GPU_MEM);
            // 79000 is stored as 79k.
            let amount = seen.map(|amount| quantity::rounded_up(amount, 1));
            ensure!(amount == Some(mib), "{seen:?}");
            Ok(())
        })
        .await
    }

    /// A further card of the same size counts at once.
    pub(crate) async fn gets_a_second_card(&mut self, case: &Case) -> Result<()> {
        let second = machine::Gpu {
            uuid: case.uuid("n", 1),
            ..self.machine.gpus[0].clone()
        };
        self.machine.gpus.push(second);
        self.shows()?;
        self.capacity(158_000).await
    }

    /// Writes a resource of the node as its kubelet would.
    pub(crate) async fn kubelet_writes(&self, list: &str, mib: u64) -> Result<()> {
        let patch = json!({ "status": { list: { names::GPU_MEM: mib.to_string() } } });
        let nodes = Api::<Node>::all(self.client.clone());
        nodes
            .patch_status(&self.name, &PatchParams::default(), &Patch::Merge(patch))
            .await?;
        Ok(())
    }

    /// Waits until `is` accepts the card in the report.
    pub(crate) async fn card(&self, what: &str, is: impl Fn(&Gpu) -> bool) -> Result<GpuNode> {
        let api = Api::<GpuNode>::all(self.client.clone());
        eventually(SOON, what, async || {
            let node = api.get(&self.name).await?;
            let gpus = node
                .status
                .as_ref()
                .map(|status| &status.gpus[..])
                .unwrap_or_default();
            ensure!(gpus.first().is_some_and(&is), "{gpus:?}");
            Ok(node)
        })
        .await
    }

    /// A pod on the card that uses more than its request, with a stranger and an error of the driver.
    pub(crate) async fn gets_busy(&mut self, case: &Case) -> Result<Pod> {
        self.capacity(79_000).await?;
        self.kubelet_writes("allocatable", 79_000).await?;
        let pod = case.pod("busy").gpu_mem(8000).create(&case.client).await?;
        let pod = wait_bound(&case.client, &pod, SOON).await?;
        set_running(&case.client, &pod).await?;
        self.runs(&[
            (7, 8500, cgroup_of(&pod)?),
            (8, 100, "0::/init.scope".to_owned()),
        ])?;
        let seen = |gpu: &Gpu| gpu.pods.first().is_some_and(|share| share.used_mib == 8500);
        self.card("the pod's memory", seen).await?;
        let uuid = case.uuid("n", 0);
        self.machine.events.push(machine::Event {
            gpu: uuid.clone(),
            xid: Some(31),
        });
        self.shows()?;
        self.metric("gpustow_gpu_xid_errors_total", &[&uuid], "1")
            .await?;
        Ok(pod)
    }

    /// Its metrics as it gives them.
    pub(crate) async fn exposition(&self) -> Result<String> {
        let config = Config::new(format!("http://{}", self.metrics).parse()?);
        let request = kube::api::Request::new("/metrics").list(&Default::default())?;
        Ok(Client::try_from(config)?.request_text(request).await?)
    }

    async fn metric(&self, name: &str, labels: &[&str], value: &str) -> Result<()> {
        let what = format!("{name} is {value}");
        eventually(SOON, &what, async || {
            let text = self.exposition().await?;
            let lines = text.lines().filter(|line| line.starts_with(name));
            let is = |line: &&str| labels.iter().all(|label| line.contains(label));
            match lines.filter(is).collect::<Vec<_>>()[..] {
                [line] => ensure!(line.ends_with(&format!(" {value}")), "{line}"),
                ref lines => bail!("not one such series but {lines:?} in\n{text}"),
            }
            Ok(())
        })
        .await
    }

    pub(crate) async fn end(self) {
        self.agent.abort();
        // The GpuNode goes with its node, by its owner reference.
        let _ = self.agent.await;
    }
}

/// The cgroup of a container of the pod, in the form of `/proc/PID/cgroup`.
pub(crate) fn cgroup_of(pod: &Pod) -> Result<String> {
    let uid = pod.uid().context("a pod without UID")?;
    Ok(format!(
        "0::/kubepods/besteffort/pod{uid}/{}",
        "ab".repeat(32)
    ))
}

#[tokio::test]
async fn a_pod_is_placed_on_what_the_agent_reports_and_confirmed_there() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "agent").await?;
    let mut node = AgentNode::start(rig.cluster, &case).await?;
    let uuid = case.uuid("n", 0);

    node.capacity(79_000).await?;
    let report = node.card("the report", |gpu| gpu.healthy).await?;
    let owners = report.owner_references();
    assert_eq!(
        (owners[0].kind.as_str(), owners[0].name.as_str()),
        ("Node", node.name.as_str())
    );
    let labels = node.node().await?.labels().clone();
    assert_eq!(labels[names::GPU_MODEL_LABEL], "NVIDIA-H100-80GB-HBM3");
    assert_eq!(
        (
            &*labels[names::GPU_MEMORY_LABEL],
            &*labels[names::GPU_COUNT_LABEL]
        ),
        ("79000", "1")
    );

    node.kubelet_writes("allocatable", 79_000).await?;
    let pod = case.pod("p").gpu_mem(8000).create(&case.client).await?;
    let pod = wait_bound(&case.client, &pod, SOON).await?;
    assert_eq!(node_of(&pod), node.name);
    // For nodes on which the toolkit ignores the environment.
    let cdi = pod.annotations().get("nvidia.cdi.k8s.io/container.main");
    assert_eq!(cdi, Some(&format!("nvidia.com/gpu={uuid}")));
    set_running(&case.client, &pod).await?;
    node.runs(&[
        (7, 8500, cgroup_of(&pod)?),
        (8, 100, "0::/init.scope".to_owned()),
    ])?;

    let pods = case.pods();
    eventually(SOON, "the pod is confirmed", async || {
        let pod = pods.get("p").await?;
        let confirmed = pod.annotations().get(names::CONFIRMED);
        ensure!(confirmed == Some(&uuid), "{confirmed:?}");
        Ok(())
    })
    .await?;
    let uses = |gpu: &Gpu| gpu.pods.first().is_some_and(|share| share.used_mib == 8500);
    let report = node.card("the pod's memory", uses).await?;
    let status = report.status.context("no status")?;
    assert_eq!(
        (status.gpus[0].unmanaged_mib, status.gpus[0].host_mib),
        (100, 100)
    );
    assert_eq!(status.conditions[2].reason, "OverRequest");
    let note = event(&case.client, &pod, "OverGpuMemory").await?;
    ensure!(
        note.contains("Uses 8500 MiB") && note.contains("asked for 8000"),
        "{note}"
    );
    // The container's id is not in the pod's status.
    let labels = |container: &'static str| [&*uuid, &*case.namespace, "pod=\"p\"", container];
    let used = (8500u64 << 20).to_string();
    let unnamed = labels("container=\"\"");
    node.metric("gpustow_pod_gpu_memory_used_bytes", &unnamed, &used)
        .await?;
    let asked = (8000u64 << 20).to_string();
    let main = labels("container=\"main\"");
    node.metric("gpustow_pod_gpu_memory_requested_bytes", &main, &asked)
        .await?;

    // The card fails: the pod gets an Event, and the next pod is not put there.
    node.machine.events.push(machine::Event {
        gpu: uuid.clone(),
        xid: Some(79),
    });
    node.shows()?;
    node.card("the card is condemned", |gpu| !gpu.healthy)
        .await?;
    let note = event(&case.client, &pod, "GpuFailed").await?;
    ensure!(
        note.contains("XID 79 (GPU has fallen off the bus)"),
        "{note}"
    );
    let note = node_event(&case.client, &node.name, "GpuFailed").await?;
    ensure!(
        note.contains(&uuid) && note.contains("XID 79 (GPU has"),
        "{note}"
    );
    node.metric("gpustow_gpu_xid_errors_total", &[&uuid, "xid=\"79\""], "1")
        .await?;
    let waiting = case.pod("q").gpu_mem(1);
    let waiting = refused(&case.client, waiting, "unhealthy").await?;
    // An agent that restarts cures no card; the end of the probation does, and binds who waited.
    node.restart(rig.cluster, &["--probation=3600"]).await?;
    node.metric("gpustow_gpu_healthy", &[&uuid], "0").await?;
    node.restart(rig.cluster, &["--probation=1"]).await?;
    wait_bound(&case.client, &waiting, SOON).await?;
    node.card("it is well again", |gpu| {
        gpu.healthy && gpu.reason.is_none()
    })
    .await?;
    node.end().await;
    rig.end(case).await
}

#[tokio::test]
async fn the_capacity_that_a_kubelet_zeroed_comes_back() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "zeroed").await?;
    let mut node = AgentNode::start(rig.cluster, &case).await?;
    node.capacity(79_000).await?;
    node.kubelet_writes("capacity", 0).await?;
    node.capacity(79_000).await?;
    // Without a driver the hardware is unchanged.
    node.machine.error = 9;
    node.shows()?;
    let report = node.card("no driver", |gpu| !gpu.healthy).await?;
    let conditions = report.status.context("no status")?.conditions;
    assert_eq!(conditions[0].reason, "DriverNotLoaded");
    node.kubelet_writes("capacity", 0).await?;
    node.capacity(79_000).await?;
    node.machine.error = 0;
    node.gets_a_second_card(&case).await?;
    let near = |gpu: &Gpu| {
        gpu.place
            .as_ref()
            .is_some_and(|place| !place.near.is_empty())
    };
    let report = node.card("the way between the cards", near).await?;
    let place = report
        .status
        .and_then(|status| status.gpus[0].place.clone());
    let place = place.context("no place")?;
    assert_eq!((place.near[0].gpu, &*place.near[0].path), (1, "PXB"));
    assert_eq!((place.numa_node, place.nvlinks), (Some(1), Some(18)));
    node.end().await;
    rig.end(case).await
}

/// Nothing of Kubernetes changes when the stranger goes: only the agent sees it.
#[tokio::test]
async fn a_strangers_process_that_ends_binds_a_waiting_pod() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "stranger").await?;
    let mut node = AgentNode::start(rig.cluster, &case).await?;
    node.capacity(79_000).await?;
    node.kubelet_writes("allocatable", 79_000).await?;
    let mut took = Vec::new();
    for round in 0..rounds()? {
        node.runs(&[(9, 40_000, "0::/user.slice".to_owned())])?;
        node.card("the stranger", |gpu| gpu.unmanaged_mib == 40_000)
            .await?;
        let pod = case.pod(&format!("p{round}")).gpu_mem(60_000);
        let pod = refused(&case.client, pod, "any one GPU").await?;
        node.runs(&[])?;
        let gone = Instant::now();
        wait_bound(&case.client, &pod, SOON).await?;
        took.push(gone.elapsed());
        gpustow_testkit::builders::delete(&case.client, &pod, 0).await?;
    }
    took.sort_unstable();
    println!(
        "memory freed → waiting pod bound, 1 s sampling, {} rounds: median {:?}, worst {:?}",
        took.len(),
        took[took.len() / 2],
        took[took.len() - 1]
    );
    node.end().await;
    rig.end(case).await
}

/// Longer than a sample and shorter than a heartbeat.
#[tokio::test]
async fn an_agent_that_has_nothing_to_say_writes_nothing() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "idle").await?;
    let mut node = AgentNode::start(rig.cluster, &case).await?;
    node.capacity(79_000).await?;
    let before = node.card("the report", |gpu| gpu.healthy).await?;
    // Samples go on: utilization and a little memory are no news.
    for step in 0..5 {
        node.machine.gpus[0].utilization = Some(step * 7);
        node.runs(&[(9, u64::from(step) * 20, "0::/user.slice".to_owned())])?;
        let used = (u64::from(step) * 20) << 20;
        let uuid = case.uuid("n", 0);
        node.metric("gpustow_gpu_memory_used_bytes", &[&uuid], &used.to_string())
            .await?;
    }
    let after = node.card("the report", |gpu| gpu.healthy).await?;
    assert_eq!(
        before.metadata.resource_version,
        after.metadata.resource_version
    );
    node.end().await;
    rig.end(case).await
}
