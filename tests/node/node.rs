//! A node: containerd, a kubelet, an agent, and a driver whose state the test sets.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use fake_nvml::{self as machine, Machine};
use gpustow_api::gpunode::{Gpu, GpuNode, GpuNodeStatus};
use gpustow_api::{names, quantity};
use gpustow_testkit::{
    Case, ControlPlane, Launch, PodBuilder, Process, built, eventually, free_port, get,
    wait_condition,
};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt as _;
use kube::api::Api;

use crate::driver::{self, Kernel};
use crate::kubelet::{IMAGE, Kubelet, SOON, Toolkit, image};
use crate::place::Place;
use crate::rig::rig;
use crate::site::{CARDS, uuid};

/// Every card's memory in MiB; the driver keeps 1000 of it.
const CARD: u64 = 80_000;
/// A driver that limits memory.
pub(crate) const LIMITS: &str = "615.71";

/// A node of a case.
pub(crate) struct RealNode {
    pub(crate) case: Case,
    pub(crate) name: String,
    pub(crate) machine: Machine,
    pub(crate) kubelet: Kubelet,
    pub(crate) agent: Process,
    /// Where NVIDIA's own programs are.
    pub(crate) tools: PathBuf,
    /// The folder of the driver's library.
    driver: PathBuf,
    agent_url: String,
    restarts: u32,
}

/// A container that runs, and whose it is.
#[derive(Debug, PartialEq)]
pub(crate) struct Running {
    pod: String,
    container: String,
    restarts: i32,
    /// Its first process, on the host.
    pub(crate) pid: u32,
}

/// Runs a case on a node with so many cards. If it fails, the ends of the logs are shown and the files
/// are left; the processes, mounts and cgroups go in any case.
pub(crate) async fn on_node(
    name: &str,
    cards: usize,
    body: impl AsyncFnOnce(&mut RealNode) -> Result<()>,
) -> Result<()> {
    on(name, cards, None, body).await
}

/// The same on a node that has NVIDIA's container toolkit and cgroups of version 2, to begin with:
/// see [`RealNode::has`].
pub(crate) async fn on_limiting_node(
    name: &str,
    agent: &str,
    body: impl AsyncFnOnce(&mut RealNode) -> Result<()>,
) -> Result<()> {
    on(name, 1, Some(agent), body).await
}

async fn on(
    name: &str,
    cards: usize,
    limiting: Option<&str>,
    body: impl AsyncFnOnce(&mut RealNode) -> Result<()>,
) -> Result<()> {
    let image = image().await?;
    let mut place = Place::take(&image.with_file_name("run"))?;
    let all = async {
        let cluster = rig().await?.cluster;
        let case = Case::new(cluster, name).await?;
        let mut node = RealNode::start(cluster, case, &place, &image, cards, limiting).await?;
        body(&mut node).await?;
        node.end().await
    };
    let done = all.await;
    if done.is_err() {
        place.keep();
    }
    done
}

impl RealNode {
    async fn start(
        cluster: &ControlPlane,
        case: Case,
        place: &Place,
        image: &Path,
        cards: usize,
        limiting: Option<&str>,
    ) -> Result<Self> {
        let name = case.node_name("n");
        let dir = place.dir();
        let labels = case.node("n", &[]).node.labels().clone();
        let labels = labels.iter().map(|(key, value)| format!("{key}={value}"));
        let labels = labels.collect::<Vec<_>>().join(",");
        let mut machine = machine((0..cards).map(|card| case.uuid("n", card)));
        let (mut driver, mut toolkit) = (dir.to_owned(), None);
        if let Some(agent) = limiting {
            machine.driver = LIMITS.to_owned();
            // The toolkit takes nothing else for one.
            for gpu in &mut machine.gpus {
                gpu.uuid = uuid(rand::random_range(CARDS..1_000_000));
            }
            for (file, text) in [("toolkit", "1.20.1"), ("cgroups", "2"), ("flags", agent)] {
                std::fs::write(dir.join(file), text)?;
            }
            driver = dir.join("driver").join(driver::LIBRARIES);
            driver::install(&dir.join("driver"), &machine::library()?, machine.clone()).await?;
            toolkit = Some(simulated_toolkit(dir, image)?);
        } else {
            machine::install(&machine::library()?, dir, &machine)?;
        }
        let kubelet = Kubelet::start(cluster, place, &name, &labels, &[image], toolkit).await?;

        let kubeconfig = cluster.agent_kubeconfig(&name).await?;
        let listen = format!("127.0.0.1:{}", free_port()?);
        let args = vec![
            format!("--node-name={name}"),
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--nvml-path={}", driver.display()),
            format!(
                "--pod-resources={}",
                dir.join("kubelet/pod-resources/kubelet.sock").display()
            ),
            format!("--listen={listen}"),
            "--shrink-after=2".to_owned(),
        ];
        let program = Path::new(env!("CARGO_BIN_EXE_gpustow")).with_file_name("gpustow-agent");
        built(&program, "make test-node builds it")?;
        let (program, args) = match limiting {
            None => (program, args),
            Some(_) => {
                let mut all = vec![dir.join("cgroups").display().to_string()];
                all.extend(["sh", "-euc", r#"exec "$@" $(cat "$0")"#].map(str::to_owned));
                all.push(dir.join("flags").display().to_string());
                all.push(program.display().to_string());
                all.extend(args);
                (script("cgroups.sh"), all)
            }
        };
        let agent = Process::start(Launch {
            program,
            args,
            env: Vec::new(),
            log: dir.join("agent.log"),
        })?;
        let node = RealNode {
            case,
            name,
            machine,
            kubelet,
            agent,
            tools: tools(image)?,
            driver,
            agent_url: format!("http://{listen}"),
            restarts: 0,
        };
        let whole = (CARD - 1000) * u64::try_from(cards)?;
        node.amounts(whole, whole).await?;
        Ok(node)
    }

    /// Ends the case while the kubelet can still see to its pods.
    async fn end(&self) -> Result<()> {
        self.case.clone().end().await
    }

    /// Makes the driver report the state of `machine`.
    pub(crate) fn shows(&self) -> Result<()> {
        Ok(self.machine.write(&self.driver.join(machine::FILE))?)
    }

    /// The driver's present state.
    pub(crate) fn driver_shows(&self) -> Result<Machine> {
        Ok(Machine::read(&self.driver.join(machine::FILE))?)
    }

    /// From now on the node has another version of its `toolkit` or of `cgroups`, or its agent other `flags`.
    pub(crate) fn has(&self, file: &str, text: &str) -> Result<()> {
        Ok(std::fs::write(self.kubelet.dir().join(file), text)?)
    }

    /// From now on it has this driver, which limits memory if it is [`LIMITS`].
    pub(crate) fn has_driver(&mut self, version: &str) -> Result<()> {
        let root = self.kubelet.dir().join("driver");
        driver::replace(&root, &machine::library()?, version, version == LIMITS)?;
        self.machine = self.driver_shows()?;
        self.machine.driver = version.to_owned();
        self.shows()
    }

    /// Starts the kernel's half of its driver; where pods find that.
    pub(crate) fn kernel(&self) -> Result<(Kernel, PathBuf)> {
        let folder = self.kubelet.dir().join("kernel");
        std::fs::create_dir(&folder)?;
        let file = self.driver.join(machine::FILE);
        Ok((Kernel::start(&folder.join("socket"), file)?, folder))
    }

    /// From now on only these processes, with so many MiB, use the first card.
    pub(crate) fn uses(&mut self, processes: &[(u32, u64)]) -> Result<()> {
        let processes = processes.iter().map(|&(pid, mib)| machine::Process {
            pid,
            used_mib: Some(mib),
            ..machine::Process::default()
        });
        self.machine.gpus[0].processes = processes.collect();
        self.shows()
    }

    /// A pod for this node whose process prints its visible GPUs and runs until SIGTERM.
    pub(crate) fn pod(&self, name: &str) -> PodBuilder {
        self.case.pod(name).with(|spec| {
            spec.restart_policy = Some("Never".to_owned());
            for container in &mut spec.containers {
                container.image = Some(IMAGE.to_owned());
                container.image_pull_policy = Some("Never".to_owned());
            }
        })
    }

    /// Creates the pod and waits until its kubelet reports it as running.
    pub(crate) async fn run(&self, pod: PodBuilder) -> Result<Pod> {
        let pod = pod.create(&self.case.client).await?;
        self.runs(&pod).await
    }

    /// Waits until the pod's kubelet reports it as running.
    pub(crate) async fn runs(&self, pod: &Pod) -> Result<Pod> {
        self.phase(pod, "Running").await
    }

    /// Waits until the pod is in this phase.
    pub(crate) async fn phase(&self, pod: &Pod, phase: &str) -> Result<Pod> {
        let is = |pod: Option<&Pod>| pod.is_some_and(|pod| phase_of(pod) == phase);
        wait_condition(&self.case.client, pod, &format!("is {phase}"), SOON, is).await
    }

    /// The pod's only container, as the kubelet and containerd report it.
    pub(crate) async fn container(&self, name: &str) -> Result<Running> {
        let pod = self.case.pods().get(name).await?;
        let status = pod.status.clone().unwrap_or_default();
        ensure!(phase_of(&pod) == "Running", "{name} is {status:?}");
        let containers = status.container_statuses.unwrap_or_default();
        let container = containers.first().context("no container's status")?;
        let id = container.container_id.clone().context("no container")?;
        let id = id.trim_start_matches("containerd://").to_owned();
        Ok(Running {
            pod: pod.uid().context("a pod without UID")?,
            pid: self.kubelet.pid(&id).await?,
            container: id,
            restarts: container.restart_count,
        })
    }

    /// Waits until a container of the pod runs, and returns it.
    pub(crate) async fn runs_again(&self, name: &str) -> Result<Running> {
        eventually(SOON, &format!("{name} runs"), async || {
            self.container(name).await
        })
        .await
    }

    /// The file of the limits that the driver holds.
    pub(crate) fn limits(&self) -> PathBuf {
        self.driver.join("fake-nvml.limits.yaml")
    }

    /// The log of the pod's container.
    pub(crate) fn log(&self, pod: &Pod) -> Result<String> {
        let (namespace, uid) = (&self.case.namespace, pod.uid().context("no UID")?);
        let folder = format!("logs/{namespace}_{}_{uid}", pod.name_any());
        let file = self.kubelet.dir().join(folder).join("main/0.log");
        std::fs::read_to_string(&file).with_context(|| file.display().to_string())
    }

    /// Kills the kubelet and starts it again, and returns when it has decided over every pod that
    /// was here before: it takes them oldest first, and a new one runs. It must have rejected none.
    pub(crate) async fn restart_kubelet(&mut self) -> Result<()> {
        self.kubelet.process.restart()?;
        self.restarts += 1;
        let last = self.pod(&format!("last-{}", self.restarts));
        self.run(last).await?;
        // The kubelet rejects a running pod at once, and reports it as failed seconds later.
        let metrics = get(&self.kubelet.url, "/metrics").await?;
        let rejections = metrics
            .lines()
            .find(|line| line.starts_with("kubelet_admission_rejections_total"));
        ensure!(rejections.is_none(), "{rejections:?}");
        Ok(())
    }

    /// Kills the agent and starts it again, and returns when it has reported.
    pub(crate) async fn restart_agent(&self) -> Result<()> {
        let before = self.report().await?.heartbeat;
        self.agent.restart()?;
        eventually(SOON, "the agent reports again", async || {
            let after = self.report().await?.heartbeat;
            ensure!(after != before, "{after:?}");
            Ok(())
        })
        .await
    }

    /// The agent's report.
    pub(crate) async fn report(&self) -> Result<GpuNodeStatus> {
        let reports = Api::<GpuNode>::all(self.case.client.clone());
        let report = reports.get(&self.name).await?;
        report.status.context("a report without status")
    }

    /// Waits until `is` accepts the first card in the report.
    pub(crate) async fn card(&self, what: &str, is: impl Fn(&Gpu) -> bool) -> Result<()> {
        eventually(SOON, what, async || {
            let gpus = self.report().await?.gpus;
            ensure!(gpus.first().is_some_and(&is), "{gpus:?}");
            Ok(())
        })
        .await
    }

    /// Waits until the agent's metrics have this series with all labels and this value.
    pub(crate) async fn metric(&self, name: &str, labels: &[&str], value: u64) -> Result<()> {
        eventually(SOON, &format!("{name} is {value}"), async || {
            let text = get(&self.agent_url, "/metrics").await?;
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

    /// Waits until the node's capacity, set by the agent, and its allocatable amount, set by the kubelet, are these
    /// MiB.
    pub(crate) async fn amounts(&self, capacity: u64, allocatable: u64) -> Result<()> {
        let what = format!("capacity {capacity} MiB, allocatable {allocatable} MiB");
        eventually(SOON, &what, async || {
            let node = Api::<Node>::all(self.case.client.clone());
            let status = node.get(&self.name).await?.status.unwrap_or_default();
            let seen = [status.capacity, status.allocatable]
                .map(|list| Some(quantity::rounded_up(list?.get(names::GPU_MEM)?, 1)));
            ensure!(seen == [Some(capacity), Some(allocatable)], "{seen:?}");
            Ok(())
        })
        .await
    }
}

/// A machine with a card for each of the UUIDs.
pub(crate) fn machine(uuids: impl Iterator<Item = String>) -> Machine {
    let gpus = uuids.map(|uuid| machine::Gpu {
        uuid,
        name: "NVIDIA H100 80GB HBM3".to_owned(),
        total_mib: CARD,
        reserved_mib: 1000,
        ..machine::Gpu::default()
    });
    Machine {
        driver: "580.1".to_owned(),
        gpus: gpus.collect(),
        ..Machine::default()
    }
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/node")
        .join(name)
}

/// Where `make test-node` builds the required programs of NVIDIA's container toolkit.
fn tools(image: &Path) -> Result<PathBuf> {
    let target = image.parent().and_then(Path::parent);
    Ok(target.context("no target folder")?.join("toolkit/bin"))
}

/// NVIDIA's toolkit, with a hook that follows the folder's files.
fn simulated_toolkit(dir: &Path, image: &Path) -> Result<Toolkit> {
    let bin = tools(image)?;
    let hook = dir.join("hook");
    let (script, real) = (script("hook.sh"), bin.join("nvidia-cdi-hook"));
    built(&real, "make test-node builds it")?;
    let text = format!(
        "#!/bin/sh\nexec {} {} {} \"$@\"\n",
        script.display(),
        dir.display(),
        real.display()
    );
    std::fs::write(&hook, text)?;
    std::fs::set_permissions(&hook, Permissions::from_mode(0o755))?;
    Ok(Toolkit {
        bin,
        driver: dir.join("driver"),
        hook,
    })
}

fn phase_of(pod: &Pod) -> &str {
    let status = pod.status.as_ref();
    status
        .and_then(|status| status.phase.as_deref())
        .unwrap_or_default()
}
