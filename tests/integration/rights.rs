//! A switch whose component was not applied: the extender says so at its start, and `kubectl gpustow check` finds it.

use anyhow::{Result, ensure};
use clap::Parser as _;
use gpustow_api::names;
use gpustow_testkit::{Extender, ExtenderOptions};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, PostParams};
use kubectl_gpustow::{Args, Screen, run};
use serde_json::json;

use crate::fault_rig::control_plane;
use crate::support::{ACCOUNT, SOON, SYSTEM, gpustow};

const SWITCHES: [&str; 7] = [
    "--line=auto",
    "--keep=60",
    "--keep-marks",
    "--call-back",
    "--act=evict",
    "--preempt-scattered",
    "--identity=switches",
];

#[tokio::test]
async fn a_switch_without_its_component_is_named_at_the_start_and_by_check() -> Result<()> {
    let cluster = control_plane().await?;
    let client = cluster.admin()?;
    let kubeconfig = cluster.kubeconfig(SYSTEM, ACCOUNT, None).await?;
    let options = ExtenderOptions {
        args: SWITCHES.map(str::to_owned).to_vec(),
        ..ExtenderOptions::default()
    };
    let extender = Extender::start(&cluster, gpustow(), &kubeconfig, options).await?;
    // A scheduler's account may delete pods as it is.
    let missing = [
        ("--line", "manifests/line/rbac.yaml"),
        ("--keep-marks", "manifests/keep/rbac.yaml"),
        ("--act=evict", "manifests/evict/rbac.yaml"),
    ];
    for (switch, component) in missing {
        let line = format!("{switch} does not work");
        let line = extender.process.wait_for_log_line(&line, SOON).await?;
        ensure!(line.contains(component), "{line}");
    }
    let log = extender.process.read_log()?;
    for (text, count) in [(" does not work", 3), ("--preempt-scattered", 0)] {
        ensure!(log.matches(text).count() == count, "{text}: {log}");
    }

    // The pod that `check` reads the switches from.
    let pod: Pod = serde_json::from_value(json!({
        "metadata": { "name": "extender" },
        "spec": { "serviceAccountName": ACCOUNT, "automountServiceAccountToken": false,
            "containers": [{ "name": "extender", "image": "x", "args": SWITCHES }] },
    }))?;
    let pods = Api::<Pod>::namespaced(client, names::NAMESPACE);
    pods.create(&PostParams::default(), &pod).await?;
    cluster
        .kubectl(&["create", "serviceaccount", "reader", "-n", SYSTEM])
        .await?;
    let account = format!("--serviceaccount={SYSTEM}:reader");
    let viewer = [
        "create",
        "clusterrolebinding",
        "reader",
        "--clusterrole=gpustow-viewer",
        &account,
    ];
    cluster.kubectl(&viewer).await?;
    let reader = cluster.kubeconfig(SYSTEM, "reader", None).await?;
    let reader = reader.display().to_string();
    let words = [
        "kubectl-gpustow",
        "--kubeconfig",
        &reader,
        "check",
        "-o",
        "csv",
    ];
    let mut found = Vec::new();
    run(Args::try_parse_from(words)?, &mut found, Screen::default()).await?;
    let found = String::from_utf8(found)?;
    for (switch, component) in missing {
        let line = found
            .lines()
            .find(|line| line.contains(&format!("{switch} does not work")));
        ensure!(
            line.is_some_and(|line| line.contains(component)),
            "{switch}: {found}"
        );
    }
    ensure!(found.matches("does not work").count() == 3, "{found}");
    Ok(())
}
