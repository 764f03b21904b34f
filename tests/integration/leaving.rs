//! The chart's work on queued pods when the queue goes. There is no kubelet: the hook's Job does not run, and the test
//! does its work, by its rights.

use anyhow::{Context as _, Result, ensure};
use gpustow_api::claim::{Device, Rule};
use gpustow_api::names;
use gpustow_testkit::{Case, ControlPlane, Options, eventually};
use k8s_openapi::api::core::v1::PodSchedulingGate;
use serde::Deserialize as _;
use serde_json::{Value, json};
use tokio::process::Command;

use crate::claims::served;
use crate::helm::{chart, helm};
use crate::support::{SOON, SYSTEM, gpustow};

const LIFT: &str = "gpustow-ungate";
const UNFENCE: &str = "gpustow-unfence";

/// The hooks that the release makes when it is removed.
async fn hooks(cluster: &ControlPlane) -> Result<Vec<Value>> {
    hooks_of(cluster, LIFT).await
}

/// The hooks of this name.
async fn hooks_of(cluster: &ControlPlane, name: &str) -> Result<Vec<Value>> {
    let text = helm(
        &["get", "hooks", "gpustow"],
        Some(cluster.admin_kubeconfig()),
    )
    .await?;
    let mut hooks = Vec::new();
    for document in serde_yaml::Deserializer::from_str(&text) {
        let object = Value::deserialize(document)?;
        if object["metadata"]["name"] == name {
            hooks.push(object);
        }
    }
    Ok(hooks)
}

/// When the hooks run, if they are this release's.
fn when(hooks: &[Value]) -> Vec<&str> {
    let notes = hooks.iter().map(|hook| &hook["metadata"]["annotations"]);
    notes
        .filter_map(|notes| notes["helm.sh/hook"].as_str())
        .collect()
}

/// Does the hooks' work, and returns the command's output.
async fn done(cluster: &ControlPlane, hooks: &[Value]) -> Result<String> {
    let mut args = Value::Null;
    let account = hooks.first().context("no hook")?["metadata"]["name"].as_str();
    for hook in hooks {
        if hook["kind"] == "Job" {
            args = hook["spec"]["template"]["spec"]["containers"][0]["args"].clone();
            let dry = ["apply", "--dry-run=server", "-f"];
            let file = cluster.dir().join("job.json");
            std::fs::write(&file, hook.to_string())?;
            let file = file.display().to_string();
            cluster.kubectl(&[&dry[..], &[&file]].concat()).await?;
        } else {
            cluster.apply(&hook.to_string()).await?;
        }
    }
    let args: Vec<String> = serde_json::from_value(args).context("no Job")?;
    let kubeconfig = cluster
        .kubeconfig(SYSTEM, account.context("no name")?, None)
        .await?;
    let mut command = Command::new(gpustow());
    command.args(args).arg("--kubeconfig").arg(kubeconfig);
    let output = command.kill_on_drop(true).output().await?;
    let said = String::from_utf8([output.stdout, output.stderr].concat())?;
    ensure!(output.status.success(), "{said}");
    Ok(said)
}

#[tokio::test]
async fn queued_pods_are_ungated_when_the_chart_switches_the_queue_off_or_goes() -> Result<()> {
    let cluster = ControlPlane::start(Options {
        controllers: true,
        ..Options::default()
    })
    .await?;
    let client = cluster.admin()?;
    let chart = chart();
    let run = async |command: &str, more: &[&str]| {
        let args = [&[command, "gpustow"], more].concat();
        helm(&args, Some(cluster.admin_kubeconfig())).await
    };
    let case = Case::new(&cluster, "leaves").await?;
    let held = |name: &str| {
        case.pod(name).gpu_mem(1).with(|spec| {
            let name = names::GATE.to_owned();
            spec.scheduling_gates = Some(vec![PodSchedulingGate { name }]);
        })
    };
    // Before gpustow is there, so that no webhook has to answer.
    for name in ["a", "b"] {
        held(name).create(&client).await?;
    }
    let gated = async |name: &str| {
        let pod = case.pods().get(name).await?;
        let gates = pod.spec.and_then(|spec| spec.scheduling_gates);
        anyhow::Ok(gates.is_some_and(|gates| !gates.is_empty()))
    };

    run("install", &[&chart, "--create-namespace"]).await?;
    ensure!(hooks(&cluster).await?.is_empty(), "there is no line");
    run("upgrade", &[&chart, "--set=config.queue.mode=Auto"]).await?;
    ensure!(when(&hooks(&cluster).await?) == ["post-delete"; 4]);

    let off = [&*chart, "--set=config.queue.mode=Off", "--no-hooks"];
    run("upgrade", &off).await?;
    let leave = hooks(&cluster).await?;
    ensure!(when(&leave) == ["post-upgrade"; 4]);
    let said = done(&cluster, &leave).await?;
    ensure!(said.contains("from 2 pods"), "{said}");
    ensure!(!gated("a").await? && !gated("b").await?);
    run("upgrade", &off).await?;
    ensure!(hooks(&cluster).await?.is_empty(), "the queue is gone");

    run("upgrade", &[&chart, "--set=config.queue.mode=Always"]).await?;
    let leave = hooks(&cluster).await?;
    ensure!(when(&leave) == ["post-delete"; 4]);
    run("uninstall", &["--no-hooks"]).await?;
    let late = async || held("late").create(&client).await;
    eventually(SOON, "the policies are gone", late).await?;
    let said = done(&cluster, &leave).await?;
    ensure!(said.contains("from 1 pods"), "{said}");
    ensure!(!gated("late").await?);
    Ok(())
}

#[tokio::test]
async fn rules_of_the_fence_go_when_the_chart_switches_it_off_or_goes() -> Result<()> {
    let cluster = ControlPlane::start(Options {
        controllers: true,
        ..Options::default()
    })
    .await?;
    let (chart, version) = (chart(), served(&cluster.admin()?).await?);
    let run = async |command: &str, more: &[&str]| {
        let args = [&[command, "gpustow"], more].concat();
        helm(&args, Some(cluster.admin_kubeconfig())).await
    };
    let rule = |name: &str| {
        let device = Device {
            driver: "gpu.example.com".to_owned(),
            pool: "n".to_owned(),
            name: name.to_owned(),
        };
        let mut rule = Rule::object(version, &device, "n", "GPU-0").context("no rule")?;
        rule["metadata"]["generateName"] = Value::Null;
        rule["metadata"]["name"] = json!(name);
        anyhow::Ok(rule.to_string())
    };
    let left = async || {
        cluster
            .kubectl(&["get", "devicetaintrules", "-o", "name"])
            .await
    };
    let on = [&*chart, "--set=config.claims.fence=true"];
    run("install", &[&on[..], &["--create-namespace"]].concat()).await?;
    ensure!(when(&hooks_of(&cluster, UNFENCE).await?) == ["post-delete"; 4]);
    for name in ["a", "b"] {
        cluster.apply(&rule(name)?).await?;
    }
    run(
        "upgrade",
        &[&chart, "--set=config.claims.fence=false", "--no-hooks"],
    )
    .await?;
    let leave = hooks_of(&cluster, UNFENCE).await?;
    ensure!(when(&leave) == ["post-upgrade"; 4]);
    let said = done(&cluster, &leave).await?;
    ensure!(said.contains("removed 2 DeviceTaintRules"), "{said}");
    ensure!(left().await?.is_empty());

    run("upgrade", &on).await?;
    let leave = hooks_of(&cluster, UNFENCE).await?;
    cluster.apply(&rule("c")?).await?;
    run("uninstall", &["--no-hooks"]).await?;
    let said = done(&cluster, &leave).await?;
    ensure!(said.contains("removed 1 DeviceTaintRules"), "{said}");
    ensure!(left().await?.is_empty());
    Ok(())
}
