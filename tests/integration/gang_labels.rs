//! Groups that the labels of the coscheduling plugin name. The tests are a scheduler with that plugin: it asks about the pods
//! of a group one by one, and binds them when all have passed.

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names::POD_GROUP_LABELS;
use gpustow_testkit::{Case, ControlPlane, Options, wait_bound};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde_json::{Value, json};

use crate::fault_rig::Replica;
use crate::install::install;
use crate::support::SOON;

const CARD: u64 = 15_000;
const MIB: u64 = 10_000;

/// Creates a pod of the group.
async fn member(case: &Case, label: &str, name: &str) -> Result<Pod> {
    let pod = case.pod(name).label(label, "g").gpu_mem(MIB);
    pod.create(&case.client).await
}

async fn call(replica: &Replica, verb: &str, body: Value) -> Result<Value> {
    let (status, answer) = replica.extender.call(verb, body.to_string()).await?;
    ensure!(status == 200, "{verb}: {status} {answer}");
    Ok(answer)
}

/// Does the extender let the pod pass on the case's node?
async fn passes(replica: &Replica, case: &Case, pod: &Pod) -> Result<bool> {
    let body = json!({"Pod": pod, "NodeNames": [case.node_name("n")]});
    let answer = call(replica, "filter", body).await?;
    let names = answer["NodeNames"].as_array().context("no NodeNames")?;
    Ok(!names.is_empty())
}

async fn bind(replica: &Replica, case: &Case, pod: &Pod) -> Result<()> {
    let body = json!({
        "PodName": pod.name_any(), "PodNamespace": case.namespace, "PodUID": pod.uid(),
        "Node": case.node_name("n"),
    });
    let answer = call(replica, "bind", body).await?;
    ensure!(answer["Error"] == "", "{answer}");
    wait_bound(&case.client, pod, SOON).await?;
    Ok(())
}

#[tokio::test]
async fn labelled_group_that_does_not_fit_leaves_its_memory_to_a_single_pod() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    install(&cluster, "manifests/base").await?;
    let replica = Replica::start(&cluster, "labels", &[]).await?;
    for label in POD_GROUP_LABELS {
        let case = Case::new(&cluster, "labels").await?;
        case.node("n", &[CARD; 2]).create(&case.client).await?;
        for name in ["first", "second"] {
            let pod = member(&case, label, name).await?;
            assert!(passes(&replica, &case, &pod).await?);
        }
        let single = case.pod("single").gpu_mem(MIB).create(&case.client).await?;
        assert!(!passes(&replica, &case, &single).await?);
        let third = member(&case, label, "third").await?;
        assert!(!passes(&replica, &case, &third).await?);
        assert!(passes(&replica, &case, &single).await?);
        bind(&replica, &case, &single).await?;
        replica.settled(&case).await?;
        case.end().await?;
    }
    Ok(())
}

#[tokio::test]
async fn labelled_group_that_fits_is_bound() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    install(&cluster, "manifests/base").await?;
    let replica = Replica::start(&cluster, "labels", &[]).await?;
    let case = Case::new(&cluster, "labels").await?;
    case.node("n", &[CARD; 3]).create(&case.client).await?;
    let mut pods = Vec::new();
    for name in ["first", "second", "third"] {
        let pod = member(&case, POD_GROUP_LABELS[0], name).await?;
        assert!(passes(&replica, &case, &pod).await?);
        pods.push(pod);
    }
    let single = case.pod("single").gpu_mem(MIB).create(&case.client).await?;
    assert!(!passes(&replica, &case, &single).await?);
    for pod in &pods {
        bind(&replica, &case, pod).await?;
    }
    replica.settled(&case).await?;
    case.end().await
}
