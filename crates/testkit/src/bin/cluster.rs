//! A real control plane with gpustow and simulated GPU nodes, to try things on until Ctrl-C.
//!
//! The API server, the controllers, both kube-schedulers, the extender and the nodes' agents are
//! real. Nodes, kubelets and GPUs are not: this program creates the nodes, gives each a library that plays NVML's, writes
//! the files which that reads, and calls bound pods running. No container ever starts.

#[path = "cluster/features.rs"]
mod features;
#[path = "cluster/programs.rs"]
mod programs;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use fake_nvml::{Gpu, Machine};
use features::Feature;
use futures::StreamExt as _;
use gpustow_api::{Assignment, names};
use gpustow_testkit::builders::set_running;
use gpustow_testkit::{
    Agent, ControlPlane, Extender, ExtenderOptions, Options, Scheduler, SchedulerConfig, Webhook,
    built, eventually, gpu_node, pod,
};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Client, ResourceExt as _};
use programs::Programs;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

/// Bound on things that take seconds.
const SOON: Duration = Duration::from_secs(60);

/// Start a real control plane with gpustow and simulated GPU nodes; Ctrl-C ends it.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Nodes, each with an agent: 8 GPUs of 80 GiB, 4 of 24 GiB, 2 of 48 and 2 of 16 GiB, in turn
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=50))]
    nodes: u16,
    /// The extender's binary
    #[arg(long, default_value = "target/debug/gpustow")]
    gpustow: PathBuf,
    /// Where kubectl-gpustow is
    #[arg(long, default_value = "target/debug")]
    plugin: PathBuf,
    /// The agent's binary
    #[arg(long, default_value = "target/debug/gpustow-agent")]
    agent: PathBuf,
    /// Folder of manifests and scheduler-config
    #[arg(long, default_value = ".")]
    repository: PathBuf,
    /// Set a field of the GpustowConfig, as --config 'queue: {mode: Auto}'
    #[arg(long, value_name = "FIELD")]
    config: Vec<String>,
    /// Turn on features that are off by default
    #[arg(long, value_name = "FEATURE", value_delimiter = ',')]
    with: Vec<Feature>,
}

/// Prints each step, and the seconds since the start.
struct Progress(Instant);

impl Progress {
    fn say(&self, what: &str) {
        println!("{:4} s  {what} ...", self.0.elapsed().as_secs());
    }
}

/// The simulated pod of the extender, which runs as a process. `kubectl gpustow` looks for it.
const EXTENDER: &str = "gpustow-scheduler-0";

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    for program in [&args.gpustow, &args.agent] {
        built(
            program,
            "cargo build --package gpustow --package gpustow-agent --bins",
        )?;
    }
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    // Dropped, and so ended, in any case: nothing of it outlives this function.
    tokio::select! {
        ended = run(&args) => ended?,
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    println!("\nThe cluster is gone.");
    Ok(())
}

async fn run(args: &Args) -> Result<()> {
    let progress = Progress(Instant::now());
    progress.say("Starting the control plane");
    let cluster = ControlPlane::start(Options {
        controllers: true,
        ..Options::default()
    })
    .await?;
    let client = cluster.admin()?;
    progress.say("Installing gpustow");
    install(args, &cluster, &client).await?;
    progress.say("Starting nodes and their agents");
    let folder = cluster.dir().join("gpus");
    let mut programs = Programs::new(&folder);
    std::fs::create_dir_all(programs.proc())?;
    let mut agents = Vec::new();
    for number in 0..args.nodes {
        agents.push(node(args, &cluster, &client, &mut programs, number).await?);
    }

    let kubeconfig = cluster
        .kubeconfig(names::NAMESPACE, names::SCHEDULER, None)
        .await?;
    progress.say("Starting the extender and both kube-schedulers");
    // The default: the agents of this cluster report.
    let fresh = std::iter::once("scheduling: {staleAfter: 3m}".to_owned());
    let fields = fresh.chain(args.with.iter().map(|it| it.field().to_owned()));
    let options = ExtenderOptions {
        args: vec![format!("--identity={EXTENDER}")],
        config: Some(fields.chain(args.config.clone()).collect()),
        ..ExtenderOptions::default()
    };
    let extender = Extender::start(&cluster, &args.gpustow, &kubeconfig, options).await?;
    show_extender(&client).await?;
    let _ours = Scheduler::calling(&cluster, &args.repository, &extender).await?;
    let default = SchedulerConfig::parse(
        "{apiVersion: kubescheduler.config.k8s.io/v1, kind: KubeSchedulerConfiguration}",
    )?;
    let _default = Scheduler::start(&cluster, default, cluster.admin_kubeconfig()).await?;

    progress.say("Waiting for the agents' reports");
    let ready = async {
        for agent in &agents {
            agent.wait_ready().await?;
        }
        welcome(args, &cluster, &extender, &folder)
    };
    tokio::try_join!(ready, resources(&client), kubelets(&client, programs))?;
    Ok(())
}

/// Applies the manifests, without the Deployment's pods: there is nothing to run them.
async fn install(args: &Args, cluster: &ControlPlane, client: &Client) -> Result<()> {
    for kustomization in ["manifests/overlays/queue", "manifests/provision"] {
        let path = args.repository.join(kustomization);
        let path = path.to_str().context("path of the repository")?;
        cluster
            .kubectl(&["apply", "--server-side", "-k", path])
            .await?;
    }
    let deployment = format!("deployment/{}", names::SCHEDULER);
    let namespace = format!("--namespace={}", names::NAMESPACE);
    cluster
        .kubectl(&["scale", "--replicas=0", &deployment, &namespace])
        .await?;
    Webhook::keep(cluster, &args.gpustow).await?;
    let served = async || cluster.kubectl(&["get", "gpunodes"]).await;
    eventually(SOON, "GpuNodes are served", served).await?;
    let probe = pod("default", "probe").scheduler("default-scheduler");
    let probe = probe.gpu_mem(1).build();
    let dry_run = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    eventually(SOON, "pods are admitted", async || {
        let pods = Api::<Pod>::namespaced(client.clone(), "default");
        let pod = pods.create(&dry_run, &probe).await?;
        let scheduler = pod.spec.and_then(|spec| spec.scheduler_name);
        ensure!(
            scheduler.as_deref() == Some(names::SCHEDULER),
            "not sent to our scheduler"
        );
        Ok(())
    })
    .await
}

/// A pod with the extender's flags; the kubelets call it ready as any other.
async fn show_extender(client: &Client) -> Result<()> {
    let pods = Api::<Pod>::namespaced(client.clone(), names::NAMESPACE);
    let shown: Pod = serde_json::from_value(json!({
        "metadata": { "name": EXTENDER },
        "spec": {
            "nodeName": "gpu-node-0",
            "serviceAccountName": names::SCHEDULER,
            "automountServiceAccountToken": false,
            "containers": [{ "name": "extender", "image": "simulated" }],
        },
    }))?;
    pods.create(&PostParams::default(), &shown).await?;
    Ok(())
}

/// A node, the file that lists its cards, and its agent.
async fn node(
    args: &Args,
    cluster: &ControlPlane,
    client: &Client,
    programs: &mut Programs,
    number: u16,
) -> Result<Agent> {
    let (l40s, t4) = (("NVIDIA L40S", 49_152), ("Tesla T4", 16_384));
    let (kind, cores, memory, cards) = match number % 3 {
        0 => (
            "8-h100",
            "128",
            "1Ti",
            vec![("NVIDIA H100 80GB HBM3", 81_920); 8],
        ),
        1 => ("4-l4", "48", "256Gi", vec![("NVIDIA L4", 24_576); 4]),
        _ => ("mixed", "64", "384Gi", vec![l40s, l40s, t4, t4]),
    };
    let name = format!("gpu-node-{number}");
    let mut node = gpu_node(&name, cores, memory, &[])
        .label("kubernetes.io/hostname", &name)
        .label("node.kubernetes.io/instance-type", kind)
        .node;
    if let Some(status) = &mut node.status {
        status.allocatable = status.capacity.clone();
    }
    let nodes = Api::<Node>::all(client.clone());
    nodes.create(&PostParams::default(), &node).await?;

    let gpus = cards
        .into_iter()
        .zip(0..)
        .map(|((model, total_mib), index)| Gpu {
            uuid: format!("GPU-{number:04}-{index}"),
            name: model.to_owned(),
            minor: Some(index),
            total_mib,
            ..Gpu::default()
        });
    let mut machine = Machine {
        driver: "simulated".to_owned(),
        gpus: gpus.collect(),
        ..Machine::default()
    };
    if let (0, Some(last)) = (number, machine.gpus.last_mut()) {
        last.processes.push(programs.stranger()?);
    }
    let folder = programs.folder(&name);
    std::fs::create_dir_all(&folder)?;
    fake_nvml::install(&fake_nvml::library()?, &folder, &machine)?;
    let flags = [
        format!("--nvml-path={}", folder.display()),
        format!("--proc={}", programs.proc().display()),
    ];
    Agent::start(cluster, &args.agent, &name, &flags).await
}

fn welcome(args: &Args, cluster: &ControlPlane, extender: &Extender, folder: &Path) -> Result<()> {
    let examples = args.repository.join("manifests/examples").canonicalize()?;
    let examples = examples.display();
    let plugin = args.plugin.canonicalize();
    let plugin = plugin.with_context(|| format!("no folder {}", args.plugin.display()))?;
    println!(
        "
The cluster is ready: {} nodes with simulated GPUs. In another terminal, from any folder:

  export KUBECONFIG={}
  export PATH={}:{}:$PATH

A tour:

  kubectl apply -f {examples}/
      # eleven pods, each on the GPU that leaves the most useful room; this terminal shows where
  kubectl gpustow gpus
      # requested against in use: programs take 60, 100, 35 or 115 % of their request, every fifth none
{}
More to try: kubectl describe pod inference; kubectl gpustow top; curl -s {}/metrics | grep gpustow_cluster

The nodes' agents are real. Each loads a simulated NVML, which reads NODE/{} in {}.
Change a file there, and the cluster sees it within seconds: `error: 15` at a card is one that fell off
the bus.

No container starts: a pod shows as Running as soon as it has a node. Deployments, StatefulSets, DaemonSets, Jobs
and CronJobs work. Logs are in {}. Ctrl-C ends all of it.
",
        args.nodes,
        cluster.admin_kubeconfig().display(),
        plugin.display(),
        cluster.bin().display(),
        features::tour(&args.with, &examples.to_string()),
        extender.health_url,
        fake_nvml::FILE,
        folder.display(),
        cluster.dir().display(),
    );
    Ok(())
}

/// The kubelets: they copy a node's GPU memory from its capacity into its allocatable resources.
async fn resources(client: &Client) -> Result<()> {
    let api = Api::<Node>::all(client.clone());
    let nodes = watcher(api.clone(), watcher::Config::default());
    let mut events = std::pin::pin!(nodes.default_backoff());
    while let Some(event) = events.next().await {
        let node = match event {
            Ok(watcher::Event::Apply(node) | watcher::Event::InitApply(node)) => node,
            Ok(_) => continue,
            Err(error) => {
                println!("! the watch of nodes failed and starts again: {error}");
                continue;
            }
        };
        let status = node.status.clone().unwrap_or_default();
        let capacity = status.capacity.unwrap_or_default();
        let allocatable = status.allocatable.unwrap_or_default();
        if capacity.get(names::GPU_MEM) == allocatable.get(names::GPU_MEM) {
            continue;
        }
        let mib = capacity.get(names::GPU_MEM);
        let patch = json!({ "status": { "allocatable": { names::GPU_MEM: mib } } });
        let patch = Patch::Merge(patch);
        let (name, params) = (node.name_any(), PatchParams::default());
        if let Err(error) = api.patch_status(&name, &params, &patch).await {
            println!("! {name}: {error}");
        }
    }
    Ok(())
}

/// The text that was printed last about a pod, by UID.
type Said = BTreeMap<String, String>;

/// The kubelets: bound pods run, and deleted ones end. Prints every pod's progress.
async fn kubelets(client: &Client, mut programs: Programs) -> Result<()> {
    let pods = watcher(Api::<Pod>::all(client.clone()), watcher::Config::default());
    let mut events = std::pin::pin!(pods.default_backoff());
    let mut said = Said::new();
    let mut started = BTreeSet::new();
    while let Some(event) = events.next().await {
        match event {
            Ok(watcher::Event::Apply(pod) | watcher::Event::InitApply(pod)) => {
                tell(&mut said, &pod);
                if let Err(error) = run_pod(client, &pod, &mut started, &mut programs).await {
                    println!("! {}: {error:#}", full_name(&pod));
                }
            }
            Ok(watcher::Event::Delete(pod)) => {
                let uid = pod.uid().unwrap_or_default();
                started.remove(&uid);
                if let Err(error) = programs.end(&uid) {
                    println!("! {}: {error:#}", full_name(&pod));
                }
                if said.remove(&uid).is_some() {
                    println!("{:40} gone", full_name(&pod));
                }
            }
            Ok(watcher::Event::Init | watcher::Event::InitDone) => {}
            Err(error) => println!("! the watch of pods failed and starts again: {error}"),
        }
    }
    Ok(())
}

async fn run_pod(
    client: &Client,
    pod: &Pod,
    started: &mut BTreeSet<String>,
    programs: &mut Programs,
) -> Result<()> {
    let spec = pod.spec.as_ref().context("pod without a spec")?;
    let Some(node) = &spec.node_name else {
        return Ok(());
    };
    let pods = Api::<Pod>::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
    let name = pod.name_any();
    if pod.metadata.deletion_timestamp.is_some() {
        let now = DeleteParams::default().grace_period(0);
        return match pods.delete(&name, &now).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            other => Ok(other.map(drop)?),
        };
    }
    if !started.insert(pod.uid().unwrap_or_default()) {
        return Ok(());
    }
    set_running(client, pod).await?;
    let assignment = pod.annotations().get(names::ASSIGNMENT);
    if let Some(assignment) = assignment.and_then(|it| Assignment::decode(it).ok()) {
        programs.begin(&pod.uid().unwrap_or_default(), node, &assignment)?;
    }
    let ready = [
        "PodReadyToStartContainers",
        "Initialized",
        "ContainersReady",
        "Ready",
    ];
    let ready = ready.map(|kind| json!({"type": kind, "status": "True"}));
    let status = json!({"status": {
        "startTime": Timestamp::now().to_string(),
        "conditions": ready,
    }});
    let patch = Patch::Strategic(status);
    pods.patch_status(&name, &PatchParams::default(), &patch)
        .await?;
    Ok(())
}

/// One line when a pod gets its place, or the reason why it waits.
fn tell(said: &mut Said, pod: &Pod) {
    let text = match pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref()) {
        Some(node) => match pod.annotations().get(names::ASSIGNMENT) {
            Some(assignment) => match Assignment::decode(assignment) {
                Ok(assignment) => {
                    let gpus = assignment.charges.iter();
                    let gpus = gpus.map(|(uuid, mib)| format!("{mib} on {uuid}"));
                    format!("on {node}: {}", gpus.collect::<Vec<_>>().join(", "))
                }
                Err(broken) => format!("on {node}: {broken}"),
            },
            None => format!("on {node}"),
        },
        None => match waits(pod) {
            Some(reason) => format!("waits: {reason}"),
            None => return,
        },
    };
    let uid = pod.uid().unwrap_or_default();
    if said.get(&uid) != Some(&text) {
        println!("{:40} {text}", full_name(pod));
        said.insert(uid, text);
    }
}

fn waits(pod: &Pod) -> Option<&str> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let scheduled = conditions.iter().find(|it| it.type_ == "PodScheduled")?;
    // The text after the first sentence is about preemption.
    let message = scheduled.message.as_deref().unwrap_or("no reason");
    (scheduled.status == "False").then(|| message.split(". ").next().unwrap_or(message))
}

fn full_name(pod: &Pod) -> String {
    format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any())
}
