//! Every manifest, example and scheduler configuration is taken by the real programs.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use gpustow_testkit::{Case, ControlPlane, Options, Scheduler, SchedulerConfig, eventually};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::Api;
use serde::Deserialize as _;
use serde_json::Value;

use crate::install::{install, installed, try_create};
use crate::support::{SOON, repository};

#[tokio::test]
async fn the_extended_default_scheduler_is_installed() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    for overlay in ["default-scheduler", "default-scheduler-tls"] {
        install(&cluster, &format!("manifests/overlays/{overlay}")).await?;
    }
    Ok(())
}

#[tokio::test]
async fn every_example_is_applied_and_makes_pods_for_our_scheduler() -> Result<()> {
    let cluster = installed().await?;
    let client = cluster.admin()?;
    let examples = files("manifests/examples")?;
    ensure!(examples.len() == 6, "{examples:?}");
    for example in examples {
        let path = example.to_str().context("path of an example")?;
        let args = ["apply", "--warnings-as-errors", "--output=json", "-f", path];
        let applied: Value = serde_json::from_str(&cluster.kubectl(&args).await?)?;
        let objects = applied["items"]
            .as_array()
            .cloned()
            .unwrap_or_else(|| vec![applied]);
        let mut pods = 0;
        for object in objects {
            let pod = match object["kind"].as_str() {
                Some("Service") => continue,
                Some("Pod") => object,
                _ => object["spec"]["template"].clone(),
            };
            let mut pod: Pod = serde_json::from_value(pod)?;
            pod.metadata.name = Some("from-template".to_owned());
            pod.metadata.resource_version = None;
            pod.metadata.uid = None;
            let made = try_create(&client, &pod)
                .await
                .context(example.display().to_string())?;
            let scheduler = made.spec.and_then(|spec| spec.scheduler_name);
            assert_eq!(
                scheduler.as_deref(),
                Some(names::SCHEDULER),
                "{}",
                example.display()
            );
            pods += 1;
        }
        ensure!(pods > 0, "{} makes no pods", example.display());
    }
    Ok(())
}

#[tokio::test]
async fn every_scheduler_configuration_is_loaded() -> Result<()> {
    let cluster = installed().await?;
    let kubeconfig = cluster
        .kubeconfig(names::NAMESPACE, names::SCHEDULER, None)
        .await?;
    for file in ["gpustow-scheduler.yaml", "default-scheduler.yaml"] {
        let config = SchedulerConfig::load(&repository("scheduler-config").join(file))?;
        Scheduler::start(cluster, config, &kubeconfig)
            .await
            .context(file)?;
    }
    Ok(())
}

#[tokio::test]
async fn the_second_scheduler_leads_by_a_lease_of_its_own() -> Result<()> {
    let cluster = installed().await?;
    let kubeconfig = cluster
        .kubeconfig(names::NAMESPACE, names::SCHEDULER, None)
        .await?;
    let config = SchedulerConfig::load(&repository("scheduler-config/gpustow-scheduler.yaml"))?
        .with("leaderElection.leaderElect", true)?;
    let _scheduler = Scheduler::start(cluster, config, &kubeconfig).await?;
    let leases = Api::<Lease>::namespaced(cluster.admin()?, names::NAMESPACE);
    eventually(SOON, "the scheduler leads", async || {
        let lease = leases.get(names::SCHEDULER).await?;
        lease
            .spec
            .and_then(|spec| spec.holder_identity)
            .context("no holder")
    })
    .await?;
    Ok(())
}

/// Runs the commands of docs/uninstall.md as they stand there.
#[tokio::test]
async fn the_uninstall_page_leaves_nothing_behind_and_pods_alone() -> Result<()> {
    let cluster = ControlPlane::start(Options {
        controllers: true,
        ..Options::default()
    })
    .await?;
    install(&cluster, "manifests/base").await?;
    // With the rights of every component.
    for entry in std::fs::read_dir(repository("manifests"))? {
        let rights = entry?.path().join("rbac.yaml");
        if rights.exists() {
            let rights = rights.to_str().context("path of the repository")?;
            cluster
                .kubectl(&["apply", "--server-side", "--force-conflicts", "-f", rights])
                .await?;
        }
    }
    let case = Case::new(&cluster, "uninstall").await?;
    case.node("n", &[24576]).create(&case.client).await?;
    let pod = case.pod("p").gpu_mem(8192).create(&case.client).await?;

    let page = std::fs::read_to_string(repository("docs/uninstall.md"))?;
    let script = page
        .split("For the second scheduler")
        .nth(1)
        .and_then(|rest| rest.split("```sh\n").nth(1))
        .and_then(|rest| rest.split("```").next());
    let path = std::env::var("PATH")?;
    let output = tokio::process::Command::new("bash")
        .args([
            "-euo",
            "pipefail",
            "-c",
            script.context("no commands on the page")?,
        ])
        .current_dir(repository(""))
        .env("PATH", format!("{}:{path}", cluster.bin().display()))
        .env("KUBECONFIG", cluster.admin_kubeconfig())
        .output()
        .await?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );

    let kinds = "customresourcedefinitions,namespaces,priorityclasses,clusterroles,\
                 clusterrolebindings,mutatingwebhookconfigurations,\
                 validatingadmissionpolicies,validatingadmissionpolicybindings";
    let left = cluster.kubectl(&["get", kinds, "--output=name"]).await?;
    ensure!(!left.contains("gpustow"), "{left}");
    let node = Api::<Node>::all(case.client.clone())
        .get(&case.node_name("n"))
        .await?;
    let capacity = node
        .status
        .and_then(|status| status.capacity)
        .context("no capacity")?;
    ensure!(capacity.contains_key("cpu") && !capacity.contains_key(names::GPU_MEM));
    let still = case.pods().get("p").await?;
    assert_eq!(still.metadata.uid, pod.metadata.uid);
    Ok(())
}

/// Hand-written files spell names of ours, too: each must be one that the code knows.
#[test]
fn no_file_invents_a_name() -> Result<()> {
    let known = [
        names::GROUP,
        names::GPU_MEM,
        names::GPU_COUNT,
        names::GPU_COUNT_OF,
        names::GPU_MEM_PERCENTAGE,
        names::GPU_MEM_PERCENTAGE_OF,
        names::EXCLUSIVE,
        names::MEM_LIMIT,
        names::MEM_LIMIT_OF,
        names::ENFORCE,
        names::RECLAIM_ACTION,
        names::EVICTABLE,
        names::GPU_MODELS,
        names::NOT_GPU_MODELS,
        names::GPU_UUIDS,
        names::NOT_GPU_UUIDS,
        names::GPU_AFFINITY,
        names::GPU_ANTI_AFFINITY,
        names::COMPUTE_PERCENT,
        names::ISOLATION,
        names::START,
        names::MPS_OF,
        names::POLICY,
        names::ASSIGNMENT,
        names::DEVICES_OF,
        names::MIB_OF,
        names::BYTES_OF,
        names::SHARE_OF,
        names::CONFIRMED,
        names::EPOCH,
        names::CLAIMS_FENCE,
        names::FENCE,
        names::RESERVATION,
        names::GPU_COUNT_LABEL,
        names::GPU_MEMORY_LABEL,
        names::GPU_MODEL_LABEL,
        names::KNOWN_LABEL,
        names::STARTUP_TAINT,
        names::PLACEHOLDER,
        names::PLACEHOLDER_FOR,
        names::GUARD_LABEL,
        names::ADOPTED,
        names::ADOPT_LABEL,
        names::ADOPT_MIB_LABEL,
        names::ADOPT_UNIT_LABEL,
        names::ASLEEP,
        names::AUTO_LABEL,
        names::AUTO_DEFAULT,
        names::MANAGED_LABEL,
        names::MADE_FOR,
        names::RENEW_AFTER,
        names::AVAILABLE_CONDITION,
        names::RESERVED_CONDITION,
        names::RECLAIM_CONDITION,
        "gpunodes.gpustow.dev",
        "gpustowconfigs.gpustow.dev",
        "gpuworkloads.gpustow.dev",
        "gpustow.dev/v1alpha1",
        "gpustow.dev/v1alpha1/GpustowConfig",
        // No objects: the verb resize on it is a right.
        "limits.gpustow.dev",
        "queues.gpustow.dev",
        names::GATE,
        names::QUEUE_LABEL,
        names::RESERVED_LABEL,
        // The parts that distinguish unknown keys from others.
        "gpustow.dev/",
        ".gpustow.dev/",
        // The webhooks.
        "pods.gpustow.dev",
        "adopt.gpustow.dev",
        "annotations.gpustow.dev",
        "templates.gpustow.dev",
    ];
    let is_part = |c: char| c.is_ascii_alphanumeric() || "./-".contains(c);
    let mut seen = 0;
    for folder in ["manifests", "scheduler-config"] {
        for file in files(folder)? {
            let text = std::fs::read_to_string(&file)?;
            for word in text
                .split(|c| !is_part(c))
                .filter(|word| word.contains(names::GROUP))
            {
                let word = word.trim_end_matches('.');
                ensure!(known.contains(&word), "{}: {word}", file.display());
                seen += 1;
            }
        }
    }
    ensure!(seen > 20, "only {seen} names seen");
    Ok(())
}

/// All files below a folder of the repository.
fn files(folder: &str) -> Result<Vec<PathBuf>> {
    let (mut folders, mut files) = (vec![repository(folder)], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path)
            } else {
                files.push(path)
            }
        }
    }
    files.sort();
    Ok(files)
}

/// Switches that give frameworks a share of the card, and switches that give an amount in bytes.
const SHARES: [&str; 3] = [
    "--gpu-memory-utilization=",
    "XLA_PYTHON_CLIENT_MEM_FRACTION=",
    "TF_GPU_MEMORY_FRACTION=",
];
const BYTES: [&str; 2] = ["--kv-cache-memory-bytes=", "--cuda-memory-pool-byte-size="];

#[test]
fn no_example_uses_more_than_it_asks_for() -> Result<()> {
    let mut told = 0;
    for example in files("manifests/examples")? {
        let text = std::fs::read_to_string(&example)?;
        for document in serde_yaml::Deserializer::from_str(&text) {
            let object = Value::deserialize(document)?;
            let spec = match object["kind"].as_str() {
                Some("Pod") => &object["spec"],
                _ => &object["spec"]["template"]["spec"],
            };
            for container in spec["containers"].as_array().into_iter().flatten() {
                let asked = container["resources"]["limits"][names::GPU_MEM].as_u64();
                let asked = asked.context("every example asks")?;
                for word in words(container) {
                    if let Some(share) = SHARES.iter().find_map(|it| word.strip_prefix(it)) {
                        ensure!(share == format!("$({})", names::MEM_SHARE), "{word}");
                        told += 1;
                    }
                    if let Some(bytes) = BYTES.iter().find_map(|it| word.strip_prefix(it)) {
                        let bytes: u64 = bytes.rsplit(':').next().unwrap_or(bytes).parse()?;
                        ensure!(bytes >> 20 < asked, "{word} of {asked} MiB");
                    }
                }
            }
        }
    }
    ensure!(told >= 2, "only {told} examples obey their share");
    Ok(())
}

/// The arguments and variables of a container.
fn words(container: &Value) -> Vec<String> {
    let args = ["command", "args"].map(|key| container[key].as_array());
    let args = args.into_iter().flatten().flatten();
    let args = args.filter_map(|it| it.as_str().map(str::to_owned));
    let env = container["env"].as_array().into_iter().flatten();
    let env = env.filter_map(|it| {
        Some(format!(
            "{}={}",
            it["name"].as_str()?,
            it["value"].as_str()?
        ))
    });
    args.chain(env).collect()
}
