//! GPUs that pods share through NVIDIA's MPS, with a share of their compute. A listening socket is the control daemon.

use std::collections::HashMap;
use std::os::unix::net::UnixListener;

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use gpustow_testkit::{Case, wait_bound};
use k8s_openapi::api::core::v1::{Container, PodSchedulingGate};
use kube::ResourceExt as _;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

use crate::agent::AgentNode;
use crate::policies::path_of;
use crate::support::{SOON, assignment, bound, refused, rig};

#[tokio::test]
async fn gpus_with_mps_are_shown_and_take_no_pods_without_a_share() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "mps").await?;
    let mut node = AgentNode::start(rig.cluster, &case).await?;
    node.capacity(79_000).await?;
    node.kubelet_writes("allocatable", 79_000).await?;
    let pipes = tempfile::tempdir()?;
    let flag = format!("--mps-pipes={}", pipes.path().display());
    node.restart(rig.cluster, &["--mps", &flag]).await?;
    node.card("no daemon", |gpu| {
        let reason = gpu.reason.as_deref().unwrap_or_default();
        gpu.mps && !gpu.healthy && reason.contains("control daemon does not answer")
    })
    .await?;
    let daemon = UnixListener::bind(pipes.path().join("control"))?;
    node.card("the daemon", |gpu| gpu.mps && gpu.healthy)
        .await?;
    let plain = case.pod("plain").gpu_mem(8000);
    let plain = refused(
        &case.client,
        plain,
        "GPUs with MPS take only pods with compute-percent",
    );
    plain.await?;
    drop(daemon);
    node.card("the daemon is gone", |gpu| gpu.mps && !gpu.healthy)
        .await?;
    node.end().await;
    rig.end(case).await
}

/// The variables of a container, by name.
fn environment(container: &Container) -> HashMap<&str, String> {
    let all = container.env.iter().flatten().map(|env| {
        let source = env.value_from.as_ref();
        let field = source.and_then(|source| source.field_ref.as_ref());
        let value = field.map(|field| field.field_path.clone());
        (
            env.name.as_str(),
            value.or(env.value.clone()).unwrap_or_default(),
        )
    });
    all.collect()
}

#[tokio::test]
async fn pods_share_compute_of_gpus_with_mps_up_to_a_hundred_percent() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "shares").await?;
    let sharing = case.node("n", &[80_000]);
    let sharing = sharing.with_status(|status| status.gpus[0].mps = true);
    sharing.create(&case.client).await?;
    let share = |name: &str, percent: &str| {
        let pod = case.pod(name).gpu_mem(8000);
        pod.annotation(names::COMPUTE_PERCENT, percent)
    };
    let made = bound(&case.client, share("first", "30")).await?;
    let held = assignment(&made)?;
    assert_eq!(held.compute, 30);
    let uuid = case.uuid("n", 0);
    let says = made.annotations().get("mps.gpustow.dev/main").cloned();
    assert_eq!(says, Some(format!("{uuid}=8000M")));
    let spec = made.spec.as_ref().context("no spec")?;
    let given = environment(&spec.containers[0]);
    for (name, value) in [
        (names::MPS_PIPES, "/run/gpustow/mps/pipe"),
        (names::MPS_THREADS, "30"),
        (
            names::MPS_MEMORY,
            "metadata.annotations['mps.gpustow.dev/main']",
        ),
    ] {
        assert_eq!(given.get(name).map(String::as_str), Some(value));
    }
    let mounts = spec.containers[0].volume_mounts.iter().flatten();
    let mounts = mounts.map(|it| (it.name.as_str(), it.mount_path.as_str()));
    let mounts: HashMap<_, _> = mounts.collect();
    let volumes = spec.volumes.iter().flatten();
    let volumes = volumes.filter_map(|it| Some((it.name.as_str(), it.host_path.as_ref()?)));
    let paths = volumes.filter_map(|(name, host)| Some((*mounts.get(name)?, host.path.as_str())));
    let mut paths: Vec<_> = paths.collect();
    paths.sort_unstable();
    assert_eq!(
        paths,
        [
            ("/dev/shm", "/run/gpustow/mps/shm"),
            ("/run/gpustow/mps/pipe", "/run/gpustow/mps/pipe")
        ]
    );
    assert_eq!(spec.host_ipc, None);

    let plain = case.pod("plain").gpu_mem(8000);
    let only = "GPUs with MPS take only pods with compute-percent";
    refused(&case.client, plain, only).await?;
    let waits = share("waits", "80");
    let waits = refused(
        &case.client,
        waits,
        "not enough free compute on any one GPU",
    )
    .await?;
    bound(&case.client, share("second", "70")).await?;
    // Memory is free all the time; the pod waits for compute.
    let at_once = DeleteParams::default().grace_period(0);
    for name in ["first", "second"] {
        case.pods().delete(name, &at_once).await?;
    }
    wait_bound(&case.client, &waits, SOON).await?;
    rig.end(case).await
}

#[tokio::test]
async fn share_of_a_pod_that_is_there_neither_changes_nor_gets_other_containers() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "shares-kept").await?;
    let gated = |name: &str| {
        let gates = vec![PodSchedulingGate {
            name: "example.com/hold".to_owned(),
        }];
        let pod = case.pod(name).gpu_mem(8000);
        pod.with(|spec| spec.scheduling_gates = Some(gates))
    };
    let share = gated("share").annotation(names::COMPUTE_PERCENT, "30");
    share.create(&case.client).await?;
    gated("plain").create(&case.client).await?;
    let pods = case.pods();
    let change = async |name: &str, value: Option<&str>| {
        let note = json!({ "metadata": { "annotations": { names::COMPUTE_PERCENT: value } } });
        let answer = pods
            .patch(name, &PatchParams::default(), &Patch::Merge(note))
            .await;
        let text = answer.err().map(|error| error.to_string());
        let text = text.unwrap_or_default();
        ensure!(text.contains("was written into its containers"), "{text}");
        Ok(())
    };
    change("share", Some("60")).await?;
    change("share", None).await?;
    change("plain", Some("30")).await?;
    let devices = json!([{ "name": names::VISIBLE_DEVICES,
        "valueFrom": { "fieldRef": { "fieldPath": path_of("main") } } }]);
    let debug = json!({ "name": "debug", "image": "i", "env": devices });
    let debug = json!({ "spec": { "ephemeralContainers": [debug] } });
    let answer = pods
        .patch_ephemeral_containers("share", &PatchParams::default(), &Patch::Strategic(debug))
        .await;
    let text = answer.err().map(|error| error.to_string());
    let text = text.unwrap_or_default();
    ensure!(text.contains("driver or MPS limits gets no GPU"), "{text}");
    rig.end(case).await
}
