//! Groups that the labels of the coscheduling plugin name. The tests are a scheduler with that plugin: it asks about the pods
//! of a group one by one, and binds them when all have passed.

use anyhow::Result;
use gpustow_api::names::POD_GROUP_LABELS;
use gpustow_testkit::{Case, ControlPlane, Options, wait_bound};
use k8s_openapi::api::core::v1::Pod;

use crate::fault_rig::Replica;
use crate::install::install;
use crate::support::SOON;

const CARD: u64 = 15_000;
const MIB: u64 = 10_000;

async fn start() -> Result<(ControlPlane, Replica)> {
    let cluster = ControlPlane::start(Options::default()).await?;
    install(&cluster, "manifests/base").await?;
    let replica = Replica::start(&cluster, "labels", &[]).await?;
    Ok((cluster, replica))
}

/// Creates a pod of the group.
async fn member(case: &Case, label: &str, name: &str) -> Result<Pod> {
    let pod = case.pod(name).label(label, "g").gpu_mem(MIB);
    pod.create(&case.client).await
}

/// A node with so many GPUs, and pods of the group that pass there.
async fn passing(
    replica: &Replica,
    case: &Case,
    gpus: usize,
    label: &str,
    names: &[&str],
) -> Result<Vec<Pod>> {
    case.node("n", &vec![CARD; gpus])
        .create(&case.client)
        .await?;
    let mut pods = Vec::new();
    for name in names {
        let pod = member(case, label, name).await?;
        replica.until_fits(&pod, &case.node_name("n")).await?;
        pods.push(pod);
    }
    Ok(pods)
}

#[tokio::test]
async fn labelled_group_that_does_not_fit_leaves_its_memory_to_a_single_pod() -> Result<()> {
    let (cluster, replica) = start().await?;
    for label in POD_GROUP_LABELS {
        let case = Case::new(&cluster, "labels").await?;
        let node = case.node_name("n");
        passing(&replica, &case, 2, label, &["first", "second"]).await?;
        let single = case.pod("single").gpu_mem(MIB).create(&case.client).await?;
        replica.refuses(&single, &node).await?;
        let third = member(&case, label, "third").await?;
        replica.refuses(&third, &node).await?;
        replica.filter(&single, &node).await?;
        replica.bind(&single, &node).await?;
        wait_bound(&case.client, &single, SOON).await?;
        replica.settled(&case).await?;
        case.end().await?;
    }
    Ok(())
}

#[tokio::test]
async fn labelled_group_that_fits_is_bound() -> Result<()> {
    let (cluster, replica) = start().await?;
    let case = Case::new(&cluster, "labels").await?;
    let node = case.node_name("n");
    let names = ["first", "second", "third"];
    let pods = passing(&replica, &case, 3, POD_GROUP_LABELS[0], &names).await?;
    let single = case.pod("single").gpu_mem(MIB).create(&case.client).await?;
    replica.refuses(&single, &node).await?;
    for pod in &pods {
        replica.bind(pod, &node).await?;
        wait_bound(&case.client, pod, SOON).await?;
    }
    replica.settled(&case).await?;
    case.end().await
}
