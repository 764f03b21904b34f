use std::time::Duration;

use anyhow::{Result, bail};
use gpustow_api::{GpuNode, names};
use gpustow_testkit::{Case, ControlPlane, Options, client, eventually, shared};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, ListParams};

const SOON: Duration = Duration::from_secs(20);

#[tokio::test]
async fn a_service_account_may_do_what_rbac_says() -> Result<()> {
    let cluster = shared().await?;
    let case = Case::new(cluster, "rbac").await?;
    let ns = case.namespace.as_str();
    cluster
        .kubectl(&["-n", ns, "create", "serviceaccount", "reader"])
        .await?;
    cluster
        .kubectl(&[
            "-n",
            ns,
            "create",
            "role",
            "r",
            "--verb=list",
            "--resource=pods",
        ])
        .await?;
    let account = format!("--serviceaccount={ns}:reader");
    cluster
        .kubectl(&["-n", ns, "create", "rolebinding", "r", "--role=r", &account])
        .await?;

    let reader = client(&cluster.kubeconfig(ns, "reader", None).await?).await?;
    let pods = Api::<Pod>::namespaced(reader.clone(), ns);
    eventually(SOON, "the role works", async || {
        Ok(pods.list(&ListParams::default()).await?)
    })
    .await?;
    let nodes = Api::<Node>::all(reader).list(&ListParams::default()).await;
    match nodes {
        Err(kube::Error::Api(status)) => assert_eq!(status.code, 403),
        other => bail!("expected 403, got {other:?}"),
    }
    case.end().await
}

#[tokio::test]
async fn a_node_has_its_cards_as_capacity() -> Result<()> {
    let cluster = shared().await?;
    let case = Case::new(cluster, "node").await?;
    let node = case.node("n", &[16384, 24576]).headroom(1024);
    let created = node.create(&case.client).await?;
    let allocatable = created
        .status
        .and_then(|s| s.allocatable)
        .unwrap_or_default();
    assert_eq!(
        allocatable[names::GPU_MEM].0,
        (16384 + 24576 - 2 * 1024).to_string()
    );
    assert_eq!(created.spec.and_then(|spec| spec.taints), None);

    let reports = Api::<GpuNode>::all(case.client.clone());
    let status = reports
        .get(&case.node_name("n"))
        .await?
        .status
        .unwrap_or_default();
    assert_eq!(status.gpus[1].uuid, case.uuid("n", 1));
    assert_eq!(status.headroom_mib, 1024);
    let listed = cluster
        .kubectl(&["get", "gpunodes", &case.node_name("n")])
        .await?;
    assert!(listed.contains("38912"), "{listed}");

    let name = case.node_name("n");
    case.end().await?;
    // The node owns it.
    eventually(
        SOON,
        "the GpuNode goes with its node",
        async || match reports.get_opt(&name).await? {
            None => Ok(()),
            Some(_) => bail!("still there"),
        },
    )
    .await
}

#[tokio::test]
async fn the_api_server_comes_back_on_the_same_port() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    let case = Case::new(&cluster, "restart").await?;
    cluster.stop_api_server();
    assert!(case.pods().list(&ListParams::default()).await.is_err());
    cluster.start_api_server().await?;
    assert_eq!(case.pods().list(&ListParams::default()).await?.items, []);
    Ok(())
}
