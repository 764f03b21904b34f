//! The agent as a process on the library without a GPU, next to a real control plane. It measures the agent's cost for
//! its node and the API server, and the time until its report decides where pods go.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use fake_nvml::{Gpu, Machine, Process};
use gpustow_api::{GpuNode, names};
use gpustow_testkit::builders::delete;
use gpustow_testkit::{
    Agent, Case, ControlPlane, Extender, ExtenderOptions, Options, Scheduler, Webhook, built,
    eventually, gpu_node, pod, quantiles, sorted, wait_bound, wait_refused,
};
use k8s_openapi::api::core::v1::Node;
use kube::Client;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::json;
use tokio::time::{interval, sleep};

/// Cards of the node, and processes on each.
const CARDS: u32 = 8;
const PROCESSES: u32 = 8;
/// MiB of a card.
const TOTAL: u64 = 81_920;
/// A stranger's memory on every card, and a pod's request that fits only without the stranger.
const STRANGER: u64 = 40_000;
const WISH: u64 = 60_000;
const NODE: &str = "bench-node";
const SOON: Duration = Duration::from_secs(60);

/// Measure the agent's cost and how soon its report counts.
#[derive(Parser)]
struct Args {
    /// Seconds of each phase in which the cost is measured
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Trials of each latency
    #[arg(long, default_value_t = 100)]
    trials: usize,
    /// Pods that fit nowhere and wait beside the one that is woken
    #[arg(long, default_value_t = 0)]
    waiting: usize,
    /// Folder of the agent's and the extender's binaries and of libnvidia_ml.so
    #[arg(long, default_value = "target/release")]
    programs: PathBuf,
    /// Folder of manifests and scheduler-config
    #[arg(long, default_value = ".")]
    repository: PathBuf,
}

/// A machine without a GPU: the library, the file that drives it, and a `/proc`.
struct Host {
    dir: PathBuf,
    machine: Machine,
}

impl Host {
    fn new(dir: PathBuf, library: &Path) -> Result<Self> {
        std::fs::create_dir(&dir)?;
        let processes = |card: u32| (1..=PROCESSES).map(move |n| card * 100 + n);
        let gpus = (0..CARDS).map(|card| Gpu {
            uuid: format!("GPU-{card}"),
            name: "NVIDIA H100 80GB HBM3".to_owned(),
            total_mib: TOTAL,
            utilization: Some(50),
            nvlinks: 18,
            processes: processes(card).map(|pid| process(pid, 100)).collect(),
            ..Gpu::default()
        });
        let machine = Machine {
            driver: "580.105.08".to_owned(),
            gpus: gpus.collect(),
            ..Machine::default()
        };
        let host = Self { dir, machine };
        for pid in (0..CARDS).flat_map(processes) {
            let uid = format!("{pid:08x}-0000-4000-8000-000000000000");
            let id = format!("{pid:064x}");
            host.process(pid, &format!("0::/kubepods/besteffort/pod{uid}/{id}\n"))?;
        }
        host.process(1, "0::/system.slice/stranger.service\n")?;
        fake_nvml::install(library, &host.dir, &host.machine)?;
        Ok(host)
    }

    fn process(&self, pid: u32, cgroup: &str) -> Result<()> {
        let dir = self.dir.join("proc").join(pid.to_string());
        std::fs::create_dir_all(&dir)?;
        std::fs::write(
            dir.join("stat"),
            format!("{pid} (x) S {}7 0", "0 ".repeat(18)),
        )?;
        std::fs::write(dir.join("cgroup"), cgroup)?;
        Ok(())
    }

    fn show(&self) -> Result<()> {
        Ok(self.machine.write(&self.dir.join(fake_nvml::FILE))?)
    }

    /// A process of no pod holds this much of every card.
    fn stranger(&mut self, mib: u64) -> Result<()> {
        for gpu in &mut self.machine.gpus {
            gpu.processes.retain(|process| process.pid != 1);
            gpu.processes.extend((mib > 0).then(|| process(1, mib)));
        }
        self.show()
    }

    async fn agent(&self, cluster: &ControlPlane, program: &Path, period: &str) -> Result<Agent> {
        let args = [
            format!("--nvml-path={}", self.dir.display()),
            format!("--proc={}", self.dir.join("proc").display()),
            format!("--period={period}"),
        ];
        let agent = Agent::start(cluster, program, NODE, &args).await?;
        agent.wait_ready().await?;
        Ok(agent)
    }
}

fn process(pid: u32, mib: u64) -> Process {
    Process {
        pid,
        used_mib: Some(mib),
        ..Process::default()
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(
        args.seconds > 0 && args.trials > 0,
        "give more than nothing"
    );
    let program = |name: &str| {
        let path = args.programs.join(name);
        built(&path, "make bench-agent builds it").map(|()| path)
    };
    let (agent, gpustow) = (program("gpustow-agent")?, program("gpustow")?);
    let library = program("libnvidia_ml.so")?;
    eprintln!("starting the control plane");
    let cluster = ControlPlane::start(Options::default()).await?;
    let base = args.repository.join("manifests/base");
    let base = base.to_str().context("path of the repository")?;
    cluster
        .kubectl(&["apply", "--server-side", "-k", base])
        .await?;
    Webhook::keep(&cluster, &gpustow).await?;
    cluster.install_bare().await?;
    let client = cluster.admin()?;
    let mut host = Host::new(cluster.dir().join("host"), &library)?;
    let node = gpu_node(NODE, "64", "1Ti", &[]).node;
    let nodes = Api::<Node>::all(client.clone());
    nodes.create(&PostParams::default(), &node).await?;

    let running = host.agent(&cluster, &agent, "1").await?;
    allocatable(&nodes).await?;
    let meter = Meter {
        seconds: args.seconds,
        client,
        agent: running,
    };
    meter.costs(&mut host).await?;
    drop(meter);

    let kubeconfig = cluster
        .kubeconfig(names::NAMESPACE, names::SCHEDULER, None)
        .await?;
    let options = ExtenderOptions::default();
    let extender = Extender::start(&cluster, &gpustow, &kubeconfig, options).await?;
    let running = host.agent(&cluster, &agent, "0.02").await?;
    let seen = seen_by_filter(&args, &extender, &mut host).await?;
    report(
        "changed in NVML → /filter answers by it, a look every 20 ms",
        seen,
    );
    drop(running);

    let _running = host.agent(&cluster, &agent, "1").await?;
    let _scheduler = Scheduler::calling(&cluster, &args.repository, &extender).await?;
    let case = Case::new(&cluster, "bench").await?;
    let woken = wake_ups(&args, &case, &mut host).await?;
    let what = format!(
        "memory freed on a card → waiting pod bound, a look every second, {} other pods wait",
        args.waiting
    );
    report(&what, woken);
    Ok(())
}

/// The kubelet: copies the node's capacity into its allocatable resources.
async fn allocatable(nodes: &Api<Node>) -> Result<()> {
    let capacity = eventually(SOON, "the node's capacity", async || {
        let status = nodes.get(NODE).await?.status.unwrap_or_default();
        let capacity = status.capacity.unwrap_or_default();
        ensure!(capacity.contains_key(names::GPU_MEM), "{capacity:?}");
        Ok(capacity)
    })
    .await?;
    let patch = Patch::Merge(json!({ "status": { "allocatable": capacity } }));
    nodes
        .patch_status(NODE, &PatchParams::default(), &patch)
        .await?;
    Ok(())
}

/// Measures an agent's cost.
struct Meter {
    seconds: u64,
    client: Client,
    agent: Agent,
}

impl Meter {
    async fn costs(&self, host: &mut Host) -> Result<()> {
        println!(
            "{CARDS} cards, {} processes, a look every second, {} s each; the library's reading of its own \
             file counts as the agent's work",
            CARDS * PROCESSES,
            self.seconds
        );
        self.cost("nothing changes", host, |_, _| Ok(())).await?;
        let little = |host: &mut Host, second: u64| {
            for gpu in &mut host.machine.gpus {
                gpu.utilization = u32::try_from(second % 100).ok();
                for process in &mut gpu.processes {
                    process.used_mib = Some(100 + second % 20);
                }
            }
            host.show()
        };
        self.cost("memory and use change a little", host, little)
            .await?;
        let much = |host: &mut Host, second: u64| host.stranger(1000 + second % 2 * 1000);
        self.cost("strangers' memory changes every second", host, much)
            .await
    }

    /// The cost while `change` happens every second.
    async fn cost(
        &self,
        what: &str,
        host: &mut Host,
        mut change: impl FnMut(&mut Host, u64) -> Result<()>,
    ) -> Result<()> {
        // The effects of the previous change end first.
        sleep(Duration::from_secs(3)).await;
        let program = &self.agent.process;
        let (cpu, writes, began) = (program.cpu()?, self.writes().await?, Instant::now());
        let mut second = interval(Duration::from_secs(1));
        for number in 0..self.seconds {
            second.tick().await;
            change(host, number)?;
        }
        second.tick().await;
        let took = began.elapsed().as_secs_f64();
        let (cpu, writes) = (program.cpu()? - cpu, self.writes().await? - writes);
        println!(
            "  {what}: {:.2} % of a core, {:.1} MiB resident, {writes:.0} writes to the API server, {:.0} an hour",
            cpu / took * 100.0,
            program.resident()?,
            writes / took * 3600.0
        );
        Ok(())
    }

    /// Write requests for the kinds that an agent writes, by any client: no other client writes them here.
    async fn writes(&self) -> Result<f64> {
        let request = hyper::Request::get("/metrics").body(Vec::new())?;
        let metrics = self.client.request_text(request).await?;
        let series = metrics
            .lines()
            .filter_map(|line| line.strip_prefix("apiserver_request_total{"));
        let is_write = |labels: &str| {
            let has = |name: &str, values: &[&str]| {
                let mut values = values.iter();
                values.any(|value| labels.contains(&format!("{name}=\"{value}\"")))
            };
            has("verb", &["APPLY", "PATCH", "POST", "PUT"])
                && has("resource", &["gpunodes", "nodes", "pods", "events"])
        };
        let counts = series.filter_map(|line| line.rsplit_once("} "));
        let counts = counts.filter(|(labels, _)| is_write(labels));
        Ok(counts
            .filter_map(|(_, count)| count.parse::<f64>().ok())
            .sum())
    }
}

/// From the change of the file to the extender's answer, the agent's pause included.
async fn seen_by_filter(args: &Args, extender: &Extender, host: &mut Host) -> Result<Vec<f64>> {
    let mut took = Vec::new();
    for _ in 0..args.trials {
        for (stranger, fits) in [(STRANGER, false), (0, true)] {
            host.stranger(stranger)?;
            let changed = Instant::now();
            while answers(extender).await? != fits {
                ensure!(changed.elapsed() < SOON, "/filter never answered otherwise");
                sleep(Duration::from_millis(1)).await;
            }
            took.push(changed.elapsed().as_secs_f64());
        }
    }
    Ok(took)
}

/// True if /filter lets a pod of [`WISH`] onto the node. It is always one and the same pod: each call ends the
/// reservation of the call before.
async fn answers(extender: &Extender) -> Result<bool> {
    let body = json!({
        "Pod": {
            "metadata": { "uid": "trial", "name": "p", "namespace": "bench" },
            "spec": { "containers": [{
                "name": "main",
                "resources": { "limits": { names::GPU_MEM: WISH.to_string() } },
            }] },
        },
        "NodeNames": [NODE],
    });
    let (_, answer) = extender.call("filter", body.to_string()).await?;
    let chosen = answer.get("NodeNames").and_then(|names| names.as_array());
    Ok(chosen.is_some_and(|names| !names.is_empty()))
}

/// Nothing of Kubernetes changes when the stranger goes: only the agent sees it.
async fn wake_ups(args: &Args, case: &Case, host: &mut Host) -> Result<Vec<f64>> {
    let reports = Api::<GpuNode>::all(case.client.clone());
    for number in 0..args.waiting {
        let pod = pod(&case.namespace, &format!("never{number}")).gpu_mem(TOTAL + 1);
        pod.create(&case.client).await?;
    }
    let mut took = Vec::new();
    for trial in 0..args.trials {
        host.stranger(STRANGER)?;
        eventually(SOON, "the stranger is reported", async || {
            let status = reports.get(NODE).await?.status.unwrap_or_default();
            let strangers = |gpu: &gpustow_api::gpunode::Gpu| gpu.unmanaged_mib >= STRANGER;
            ensure!(status.gpus.iter().all(strangers), "not yet");
            Ok(())
        })
        .await?;
        let pod = pod(&case.namespace, &format!("p{trial}")).gpu_mem(WISH);
        let pod = pod.create(&case.client).await?;
        wait_refused(&case.client, &pod, "any one GPU", SOON).await?;
        host.stranger(0)?;
        let freed = Instant::now();
        wait_bound(&case.client, &pod, SOON).await?;
        took.push(freed.elapsed().as_secs_f64());
        delete(&case.client, &pod, 0).await?;
    }
    Ok(took)
}

fn report(what: &str, seconds: Vec<f64>) {
    let took = sorted(seconds.iter().map(|it| it * 1e3));
    println!(
        "{what}, {} trials: p50 / p99 / worst, ms: {}",
        took.len(),
        quantiles(&took, [0.5, 0.99, 1.0], 0)
    );
}
