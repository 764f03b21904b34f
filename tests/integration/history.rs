//! The usage of workloads: from NVML through agents and the leader to an object that outlives all of them.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gpustow_api::GpuWorkload;
use gpustow_testkit::builders::set_running;
use gpustow_testkit::{Case, eventually};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Api, PostParams};

use crate::agent::{AgentNode, cgroup_of};
use crate::fault_rig::{Replica, clear, turn};

/// A sample is taken once a minute.
const MINUTES: Duration = Duration::from_secs(150);
const PODS: u32 = 10;

/// Pods of the Deployment `web`, each with so many MiB in use, on the node.
async fn run(case: &Case, replica: &Replica, node: &mut AgentNode, mib: u64) -> Result<()> {
    let mut processes = Vec::new();
    for number in 0..PODS {
        let mut pod = case.pod(&format!("web-5f9474c99c-{number}")).gpu_mem(7000);
        pod = pod.label("pod-template-hash", "5f9474c99c");
        let mut pod = pod.build();
        pod.metadata.owner_references = Some(vec![OwnerReference {
            api_version: "apps/v1".to_owned(),
            kind: "ReplicaSet".to_owned(),
            name: "web-5f9474c99c".to_owned(),
            uid: "5f9474c9-0000-0000-0000-000000000000".to_owned(),
            controller: Some(true),
            block_owner_deletion: None,
        }]);
        let pod: Pod = case.pods().create(&PostParams::default(), &pod).await?;
        replica.place(&pod, &node.name).await?;
        let pod = set_running(&case.client, &pod).await?;
        processes.push((100 + number, mib, cgroup_of(&pod)?));
    }
    node.runs(&processes)
}

/// The advised memory of the case's workload in the metrics, MiB.
async fn advised(case: &Case, replica: &Replica) -> Result<f64> {
    let metrics = replica.extender.metrics().await?;
    let ours = format!("namespace=\"{}\"", case.namespace);
    let mut lines = metrics.lines();
    let line =
        lines.find(|it| it.starts_with("gpustow_workload_advised_bytes{") && it.contains(&ours));
    let (_, value) = line
        .and_then(|it| it.rsplit_once(' '))
        .context("no advice yet")?;
    Ok(value.parse::<f64>()? / f64::from(1 << 20))
}

#[tokio::test]
async fn history_of_a_workload_survives_its_pods_the_agent_and_the_extender() -> Result<()> {
    let turn = turn().await?;
    let case = Case::new(turn.cluster, "history").await?;
    let replica = Replica::start(turn.cluster, "history", &[]).await?;
    let mut node = AgentNode::start(turn.cluster, &case).await?;
    node.capacity(79_000).await?;
    node.kubelet_writes("allocatable", 79_000).await?;
    run(&case, &replica, &mut node, 5000).await?;

    let objects = Api::<GpuWorkload>::namespaced(case.client.clone(), &case.namespace);
    let object = eventually(MINUTES, "the history is written", async || {
        Ok(objects.get("deployment-web").await?)
    })
    .await?;
    let target = &object.spec.target_ref;
    assert_eq!((&*target.kind, &*target.name), ("Deployment", "web"));
    let [main] = &object.spec.containers[..] else {
        panic!("{object:?}");
    };
    assert_eq!((&*main.name, main.gpu_mib), ("main", 80_000));
    assert_eq!(main.history.peak_mib, 5000);
    assert!(main.history.samples >= u64::from(PODS));
    assert!((5000..5200).contains(&main.advice.p95_mib), "{main:?}");
    assert!(!main.advice.enough);

    // Pods, agent and extender go; the next leader counts on from the object.
    clear(&case).await?;
    node.runs(&[])?;
    node.restart(turn.cluster, &[]).await?;
    replica.restart().await?;
    run(&case, &replica, &mut node, 3000).await?;
    let both = eventually(MINUTES, "the next leader has the history", async || {
        let advised = advised(&case, &replica).await?;
        ensure!(advised > 0.0, "{advised}");
        Ok(advised)
    })
    .await?;
    // Pods of the second round alone use 3000 MiB.
    assert!((5000.0..5200.0).contains(&both), "{both}");
    node.end().await;
    case.end().await
}
