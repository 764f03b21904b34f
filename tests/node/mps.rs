//! MPS: its control daemon in a container next to the agent, and pods that share the compute of a GPU. The GPU is
//! simulated or this machine's own. The latter is for `make test-gpu`.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use fake_nvml::{Machine, Process};
use gpustow_api::gpunode::{Gpu, GpuNode};
use gpustow_api::names;
use gpustow_testkit::{PodBuilder, eventually, pod, wait_bound, wait_gone, wait_refused};
use k8s_openapi::api::core::v1::{HostPathVolumeSource, Pod, Volume, VolumeMount};
use kube::api::{Api, DeleteParams};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::Command;

use crate::driver::LIBRARIES;
use crate::kubelet::{IMAGE, output};
use crate::site::{DRIVER, Site, TAGS, on_own_cards, on_site};

/// Bound on waits that take seconds. The report of a pod's usage within its request can wait for the agent's heartbeat,
/// a minute.
const SOON: Duration = Duration::from_secs(120);
/// The GPU memory of a program, and the request of its pod: a context takes about 520 MiB.
const HOLDS: u64 = 1024;
const REQUESTS: u64 = 4096;

#[tokio::test]
async fn pods_with_a_share_of_compute_reach_the_daemon_beside_the_agent() -> Result<()> {
    on_site(async |site| {
        // NVIDIA's toolkit adds the driver's programs to containers.
        let programs = Path::new(DRIVER).join("usr/bin");
        std::fs::create_dir_all(&programs)?;
        std::fs::copy(&site.workload, programs.join("nvidia-cuda-mps-control"))?;
        install(site).await?;
        let share = |name| {
            pod("default", name).gpu_mem(REQUESTS).with(|spec| {
                for container in &mut spec.containers {
                    container.image = Some(IMAGE.to_owned());
                }
            })
        };
        let share = |name| share(name).annotation(names::COMPUTE_PERCENT, "30");
        create(site, share("first")).await?;
        reaches_the_daemon(site, "first").await?;
        kill_daemon(site).await?;
        gpu(site, "the daemon answers again", |gpu| gpu.healthy).await?;
        create(site, share("second")).await?;
        reaches_the_daemon(site, "second").await?;

        // While a process uses the GPUs without MPS, new pods do not get them.
        let wide = share("wide").annotation(names::GPU_COUNT, "4");
        create(site, wide).await?;
        uses(Some(main_process(site, "wide").await?))?;
        gpu(site, "no new pods", |gpu| !gpu.healthy).await?;
        let waits = share("waits").create(&site.client).await?;
        wait_refused(&site.client, &waits, "unhealthy", SOON).await?;
        uses(None)?;
        wait_bound(&site.client, &waits, SOON).await.map(drop)
    })
    .await
}

/// Checks a pod's container: the socket of the daemon, the node's shared memory, and its limits.
async fn reaches_the_daemon(site: &Site, name: &str) -> Result<()> {
    let its = Path::new("/proc").join(main_process(site, name).await?.to_string());
    let control = format!("{}/control", names::MPS_PIPES_DIRECTORY);
    for (inside, outside) in [
        (&*control, &*control),
        ("/dev/shm", names::MPS_SHM_DIRECTORY),
    ] {
        let inside = std::fs::metadata(its.join("root").join(inside.trim_start_matches('/')))?;
        let outside = std::fs::metadata(outside)?;
        assert_eq!((inside.dev(), inside.ino()), (outside.dev(), outside.ino()));
    }
    let environment = std::fs::read_to_string(its.join("environ"))?;
    let mut all = environment
        .split('\0')
        .filter(|it| it.starts_with("CUDA_"))
        .collect::<Vec<_>>();
    all.sort_unstable();
    let [percent, limit, pipes] = all[..] else {
        bail!("{all:?}");
    };
    assert_eq!(percent, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30");
    let limit = limit
        .strip_prefix("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=")
        .context("no limit")?;
    assert!(
        limit.starts_with("GPU-") && limit.ends_with(&format!("={REQUESTS}M")),
        "{limit}"
    );
    assert_eq!(
        pipes,
        format!("CUDA_MPS_PIPE_DIRECTORY={}", names::MPS_PIPES_DIRECTORY)
    );
    Ok(())
}

/// The first process of a pod's only container, once that runs.
async fn main_process(site: &Site, name: &str) -> Result<u32> {
    let wait = format!("kubectl wait pod {name} --for=condition=Ready --timeout=120s");
    site.types(&wait).await?;
    let id = format!("{name} -o jsonpath={{.status.containerStatuses[0].containerID}}");
    pid(site, &id).await
}

/// Has the simulated driver show this process, which is no client of MPS, on every GPU.
fn uses(pid: Option<u32>) -> Result<()> {
    let file = Path::new(DRIVER).join(LIBRARIES).join(fake_nvml::FILE);
    let mut machine = Machine::read(&file)?;
    for gpu in &mut machine.gpus {
        gpu.processes = pid
            .iter()
            .map(|&pid| Process {
                pid,
                used_mib: Some(HOLDS),
                ..Process::default()
            })
            .collect();
    }
    Ok(machine.write(&file)?)
}

/// Installs gpustow with the daemon next to the agents, and waits until the daemon answers.
async fn install(site: &Site) -> Result<()> {
    site.types("kubectl apply --server-side -k manifests/overlays/mps-daemon")
        .await?;
    for what in ["daemonset/gpustow-agent", "deployment/gpustow-scheduler"] {
        let wait = format!("kubectl rollout status -n gpustow-system {what} --timeout=180s");
        site.types(&wait).await?;
    }
    gpu(site, "the daemon answers", |gpu| gpu.mps && gpu.healthy).await
}

#[tokio::test]
async fn pods_share_the_compute_of_this_machines_gpu_by_the_daemon_beside_the_agent() -> Result<()>
{
    on_own_cards(async |site| {
        let program = build(site.kubelet.dir()).await?;
        let whole = processors(&run(&program).await?)?;
        install(site).await?;
        let share = |name, percent, command: &[&str]| pod_with(&program, name, percent, command);

        // The pod's share of compute, its memory request, and the report of its usage.
        let third = create(site, share("third", 30, &["1024"])).await?;
        let seen = processors(&says(site, "third").await?)?;
        println!("30 % of compute: {seen} of {whole} multiprocessors");
        ensure!(seen > 0 && seen * 100 <= whole * 30, "{seen} of {whole}");
        let of = third.metadata.uid.clone().context("no UID")?;
        gpu(site, "what the pod uses", |gpu| {
            let its = gpu.pods.iter().find(|it| it.uid == of);
            its.is_some_and(|it| (HOLDS..REQUESTS).contains(&it.used_mib))
        })
        .await?;
        create(site, share("greedy", 10, &["4096"])).await?;
        let refused = says(site, "greedy").await?;
        ensure!(refused.contains("OUT_OF_MEMORY"), "{refused}");
        end(site, "greedy").await?;

        // All shares together are at most 100 %.
        create(site, share("half", 60, &["1024"])).await?;
        says(site, "half").await?;
        let waits = share("waits", 20, &["1024"]).create(&site.client).await?;
        wait_refused(&site.client, &waits, "compute", SOON).await?;
        ensure!(told(site, "third").await?.is_empty(), "a client of MPS");

        // A program that goes past MPS is found.
        let begun = Instant::now();
        create(site, share("beside", 10, &["1024", "beside"])).await?;
        let seen = processors(&says(site, "beside").await?)?;
        ensure!(seen == whole, "{seen} of {whole}");
        eventually(SOON, "an Event on the pod beside MPS", async || {
            ensure!(!told(site, "beside").await?.is_empty(), "no Event");
            Ok(())
        })
        .await?;
        println!("found beside MPS after {:?}", begun.elapsed());
        gpu(site, "no new pods", |gpu| !gpu.healthy).await?;
        let late = share("late", 10, &["1024"]).create(&site.client).await?;
        wait_refused(&site.client, &late, "unhealthy", SOON).await?;
        end(site, "beside").await?;
        wait_bound(&site.client, &late, SOON).await?;
        processors(&says(site, "late").await?)?;
        for name in ["waits", "late", "half"] {
            end(site, name).await?;
        }

        // The daemon is killed and comes back: the pods that come then have their share.
        let begun = Instant::now();
        kill_daemon(site).await?;
        end(site, "third").await?;
        gpu(site, "the daemon answers again", |gpu| gpu.healthy).await?;
        create(site, share("after", 30, &["1024"])).await?;
        let seen = processors(&says(site, "after").await?)?;
        ensure!(seen > 0 && seen * 100 <= whole * 30, "{seen} of {whole}");
        println!(
            "daemon killed → a new pod has its share: {:?}",
            begun.elapsed()
        );
        end(site, "after").await
    })
    .await
}

/// The program of `tests/gpu`, in a folder of its own that pods can mount.
async fn build(dir: &Path) -> Result<PathBuf> {
    let folder = dir.join("cuda");
    std::fs::create_dir(&folder)?;
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/gpu/gpu.c");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let program = folder.join("gpu");
    let mut command = Command::new(compiler);
    command.args(["-O1", "-o"]).arg(&program);
    command.args([source, "-ldl"]);
    output(command).await?;
    Ok(program)
}

/// The program's output here, outside of all pods.
async fn run(program: &Path) -> Result<String> {
    let mut command = Command::new(program);
    command.args(["hold", "1"]).stdin(Stdio::null());
    output(command).await
}

fn processors(said: &str) -> Result<u64> {
    let words = said.split_whitespace().rev().nth(1);
    let number = words.and_then(|it| it.parse().ok());
    number.with_context(|| said.to_owned())
}

/// A pod whose container runs the program. The agent's image has the C library that it needs, and NVIDIA's runtime adds the rest.
fn pod_with(program: &Path, name: &str, percent: u32, command: &[&str]) -> PodBuilder {
    let folder = program.parent().unwrap_or(program);
    let pod = pod("default", name).gpu_mem(REQUESTS);
    let pod = pod.annotation(names::COMPUTE_PERCENT, &percent.to_string());
    pod.with(|spec| {
        spec.restart_policy = Some("Never".to_owned());
        let volume = Volume {
            name: "cuda".to_owned(),
            host_path: Some(HostPathVolumeSource {
                path: folder.display().to_string(),
                ..HostPathVolumeSource::default()
            }),
            ..Volume::default()
        };
        spec.volumes.get_or_insert_default().push(volume);
        for container in &mut spec.containers {
            let all = ["/cuda/gpu", "hold"].iter().chain(command);
            container.command = Some(all.map(ToString::to_string).collect());
            container.image = Some(format!("ghcr.io/gpustow/gpustow-agent:{}", TAGS[0]));
            container.image_pull_policy = Some("Never".to_owned());
            container.stdin = Some(true);
            let mount = VolumeMount {
                name: "cuda".to_owned(),
                mount_path: "/cuda".to_owned(),
                ..VolumeMount::default()
            };
            container.volume_mounts.get_or_insert_default().push(mount);
        }
    })
}

async fn create(site: &Site, pod: PodBuilder) -> Result<Pod> {
    let pod = pod.create(&site.client).await?;
    wait_bound(&site.client, &pod, SOON).await
}

/// The first output of the pod's program.
async fn says(site: &Site, name: &str) -> Result<String> {
    eventually(SOON, &format!("{name} says something"), async || {
        let log = site.types(&format!("kubectl logs {name}")).await?;
        if log.is_empty() {
            let status = format!("kubectl get pod {name} -o jsonpath={{.status}}");
            bail!("{}", site.types(&status).await?);
        }
        Ok(log)
    })
    .await
}

async fn end(site: &Site, name: &str) -> Result<()> {
    let pods = Api::<Pod>::namespaced(site.client.clone(), "default");
    let pod = pods.get(name).await?;
    pods.delete(name, &DeleteParams::default().grace_period(1))
        .await?;
    wait_gone(&site.client, &pod, SOON).await
}

/// The messages of the Events that report the pod's use of a GPU without MPS.
async fn told(site: &Site, name: &str) -> Result<String> {
    let fields = format!("reason=MpsMissing,involvedObject.name={name}");
    let message = "jsonpath={.items[*].message}";
    site.types(&format!(
        "kubectl get events --field-selector {fields} -o '{message}'"
    ))
    .await
}

/// Waits until `is` accepts the GPU in the report.
async fn gpu(site: &Site, what: &str, is: impl Fn(&Gpu) -> bool) -> Result<()> {
    let reports = Api::<GpuNode>::all(site.client.clone());
    eventually(SOON, what, async || {
        let status = reports.get("gpu-node").await?.status.unwrap_or_default();
        let gpu = status.gpus.first().context("no GPU")?;
        ensure!(is(gpu), "{gpu:?}");
        Ok(())
    })
    .await
}

/// Kills the daemon and waits until the kubelet has started it again.
async fn kill_daemon(site: &Site) -> Result<()> {
    let pods = "-n gpustow-system -l app.kubernetes.io/name=gpustow-agent";
    let status = |field: &str| {
        format!(
            "{pods} -o 'jsonpath={{.items[0].status.containerStatuses[?(@.name==\"mps\")].{field}}}'"
        )
    };
    let pid = Pid::from_raw(pid(site, &status("containerID")).await?.try_into()?);
    kill(pid, Signal::SIGKILL)?;
    eventually(SOON, "the daemon runs again", async || {
        let restarts = site
            .types(&format!("kubectl get pod {}", status("restartCount")))
            .await?;
        ensure!(restarts == "1", "{restarts:?} restarts");
        Ok(())
    })
    .await
}

/// The first process of a container whose id kubectl gets so.
async fn pid(site: &Site, which: &str) -> Result<u32> {
    let id = site.types(&format!("kubectl get pod {which}")).await?;
    site.kubelet
        .pid(id.trim_start_matches("containerd://"))
        .await
}
