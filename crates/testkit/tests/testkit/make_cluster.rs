//! `make cluster`, as its users see it: the printed commands work, and Ctrl-C ends all of it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gpustow_api::config::QueueMode;
use gpustow_api::{GpustowConfig, config, names};
use gpustow_testkit::{Launch, Process, client, eventually, wait_bound};
use k8s_openapi::api::core::v1::Pod;
use kube::api::Api;
use kube::{Client, ResourceExt as _};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::Command;

/// Bound on waits that end at once when all is well.
const SOON: Duration = Duration::from_secs(60);
/// The cluster starts a dozen programs.
const START: Duration = Duration::from_secs(180);

/// A program that is built next to the cluster's.
fn beside(cluster: &Path, name: &str) -> Result<PathBuf> {
    let path = cluster.with_file_name(name);
    ensure!(
        path.exists(),
        "no {}: cargo build --package gpustow --package gpustow-agent --package kubectl-gpustow --bins",
        path.display()
    );
    Ok(path)
}

/// Command lines of processes that have `text` in theirs.
fn running(text: &str) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        // It may have ended meanwhile.
        let line = std::fs::read(entry?.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        found.extend(line.contains(text).then_some(line));
    }
    Ok(found)
}

#[tokio::test]
async fn an_example_is_bound_and_ctrl_c_ends_everything() -> Result<()> {
    let program = Path::new(env!("CARGO_BIN_EXE_cluster"));
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let log = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("cluster-{:08x}.log", rand::random::<u32>()));
    let plugin = beside(program, "kubectl-gpustow")?;
    let folder = plugin.parent().context("no folder")?;
    let process = Process::start(Launch {
        program: program.to_owned(),
        args: vec![
            "--nodes=2".to_owned(),
            "--config=reserve: {max: 3}".to_owned(),
            "--with=queue,provision".to_owned(),
            format!("--gpustow={}", beside(program, "gpustow")?.display()),
            format!("--agent={}", beside(program, "gpustow-agent")?.display()),
            format!("--plugin={}", folder.display()),
            format!("--repository={}", repository.display()),
        ],
        env: Vec::new(),
        log: log.clone(),
    })?;
    let line = process
        .wait_for_log_line("export KUBECONFIG=", START)
        .await?;
    let (_, kubeconfig) = line.split_once('=').context("no path")?;
    let line = process.wait_for_log_line("export PATH=", SOON).await?;
    let path = line.trim().trim_start_matches("export PATH=");
    let folders = path.trim_end_matches(":$PATH");
    let (_, bin) = folders.split_once(':').context("one folder")?;

    let example = repository.join("manifests/examples/inference-pod.yaml");
    let mut kubectl = Command::new(Path::new(bin).join("kubectl"));
    kubectl.arg("--kubeconfig").arg(kubeconfig);
    kubectl.arg("apply").arg("-f").arg(&example);
    let applied = kubectl.kill_on_drop(true).output().await?;
    ensure!(
        applied.status.success(),
        "{}",
        String::from_utf8_lossy(&applied.stderr)
    );
    let client: Client = client(Path::new(kubeconfig)).await?;
    let pods = Api::<Pod>::namespaced(client.clone(), "default");
    let pod = wait_bound(&client, &pods.get("inference").await?, SOON).await?;
    ensure!(pod.annotations().contains_key(names::ASSIGNMENT), "{pod:?}");
    eventually(SOON, "the pod is called running", async || {
        let status = pods.get("inference").await?.status.unwrap_or_default();
        ensure!(status.phase.as_deref() == Some("Running"), "{status:?}");
        Ok(())
    })
    .await?;

    // The configuration is there, and the extender follows it.
    let configs = Api::<GpustowConfig>::all(client.clone());
    eventually(SOON, "the configuration is followed", async || {
        let config = configs.get(config::NAME).await?;
        let status = config.status.unwrap_or_default();
        ensure!(status.observed_generation == config.metadata.generation);
        ensure!(config.spec.reserve.max == 3);
        ensure!(config.spec.queue.mode == QueueMode::Auto && config.spec.provision.max == 3);
        Ok(())
    })
    .await?;

    // Every program of the cluster has the folder in its arguments.
    let dir = Path::new(kubeconfig).parent().context("no folder")?;
    let dir = dir.display().to_string();
    let programs = running(&dir)?;
    for name in [
        "server",
        "kube-apiserver",
        "kube-scheduler",
        "gpustow-agent",
    ] {
        ensure!(
            programs.iter().any(|line| line.contains(name)),
            "no {name} among {programs:?}"
        );
    }
    kill(Pid::from_raw(process.id().try_into()?), Signal::SIGINT)?;
    let status = process.wait_exit(SOON).await?;
    ensure!(status.success(), "{status}: {}", process.read_log()?);
    eventually(SOON, "nothing is left running", async || {
        let left = running(&dir)?;
        ensure!(left.is_empty(), "{left:?}");
        Ok(())
    })
    .await?;
    ensure!(!Path::new(&dir).exists(), "{dir} is left");
    Ok(std::fs::remove_file(log)?)
}
