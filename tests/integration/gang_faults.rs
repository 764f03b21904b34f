//! Faults between the first filter of a gang and its last bind.

use anyhow::Result;
use gpustow_testkit::builders::delete;
use gpustow_testkit::{Action, ApiProxy, Case, wait_bound, wait_gone};
use kube::ResourceExt as _;

use crate::fault_rig::Replica;
use crate::gang_binding::{cluster, gang};
use crate::install::install;
use crate::support::{Rig, SOON, Setup};

const CARD: u64 = 15_000;
const MIB: u64 = 10_000;

#[tokio::test]
async fn gang_goes_on_with_another_pod_if_one_is_deleted_before_its_bind() -> Result<()> {
    let cluster = cluster().await?;
    let proxy = ApiProxy::start(&cluster).await?;
    let setup = Setup {
        proxy: Some(&proxy),
        ..Setup::default()
    };
    let rig = Rig::start(&cluster, setup).await?;
    let case = Case::new(&cluster, "gang").await?;
    case.node("n", &[CARD; 2]).create(&case.client).await?;
    let binds = ["g-0", "g-1"].map(|name| proxy.on_bind(&case.namespace, name, Action::Hold));
    let pods = gang(&case, "g", 2, MIB).await?;
    for bind in &binds {
        bind.seen(1, SOON).await?;
    }
    delete(&case.client, &pods[0], 0).await?;
    wait_gone(&case.client, &pods[0], SOON).await?;
    for bind in &binds {
        bind.release();
    }
    wait_bound(&case.client, &pods[1], SOON).await?;
    let other = case.member("g", case.pod("other").gpu_mem(MIB)).await?;
    wait_bound(&case.client, &other, SOON).await?;
    rig.end(case).await
}

#[tokio::test]
async fn successor_binds_the_rest_of_a_gang() -> Result<()> {
    let cluster = cluster().await?;
    install(&cluster, "manifests/base").await?;
    let replica = Replica::start(&cluster, "first", &[]).await?;
    let case = Case::new(&cluster, "gang").await?;
    case.node("n", &[CARD; 3]).create(&case.client).await?;
    let late = replica.proxy.on_bind(&case.namespace, "g-1", Action::Hold);
    let scheduler = replica.scheduler(&cluster).await?;
    let pods = gang(&case, "g", 3, MIB).await?;
    late.seen(1, SOON).await?;
    for pod in [&pods[0], &pods[2]] {
        wait_bound(&case.client, pod, SOON).await?;
    }
    replica.extender.process.kill9();
    drop(scheduler);
    let successor = Replica::start(&cluster, "successor", &[]).await?;
    let _scheduler = successor.scheduler(&cluster).await?;
    let node = wait_bound(&case.client, &pods[1], SOON).await?;
    late.release();
    let now = case.pods().get(&pods[1].name_any()).await?;
    assert_eq!(
        now.metadata.resource_version,
        node.metadata.resource_version
    );
    successor.settled(&case).await?;
    case.end().await
}
