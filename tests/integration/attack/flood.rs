//! Attacks by sheer number, from a tenant or a program next to kube-scheduler: neighbours are served meanwhile.

use anyhow::{Context as _, Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use gpustow_testkit::builders::delete;
use gpustow_testkit::{Case, ControlPlane, Options, PodBuilder, wait_bound};
use k8s_openapi::api::core::v1::PodSchedulingGate;
use kube::ResourceExt as _;
use kube::api::{Patch, PatchParams};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::json;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::support::{Rig, SOON, Setup, bound, ledger_agrees};

const CARD: u64 = 8192;
/// Pods of a flood.
const FLOOD: usize = 300;
/// Requests at once.
const WIDTH: usize = 16;
/// The longest name, with room for a number in front.
const LONG: usize = 240;
/// MiB by which no flood here may make the extender grow.
const MOST: f64 = 64.0;

/// A neighbour's pod is placed now.
async fn neighbours_are_served(neighbour: &Case, flood: &str) -> Result<()> {
    let pod = neighbour.pod("neighbour").gpu_mem(1000);
    let pod = bound(&neighbour.client, pod).await;
    let pod = pod.with_context(|| format!("beside {flood}"))?;
    delete(&neighbour.client, &pod, 0).await
}

async fn create(case: &Case, pods: impl IntoIterator<Item = PodBuilder>) -> Result<()> {
    let created = stream::iter(pods).map(|pod| pod.create(&case.client));
    created
        .buffer_unordered(WIDTH)
        .try_collect::<Vec<_>>()
        .await?;
    Ok(())
}

#[tokio::test]
async fn a_tenants_flood_of_pods_keeps_no_neighbour_out() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    let rig = Rig::start(&cluster, Setup::default()).await?;
    let (tenant, neighbour) = (
        Case::new(&cluster, "flood").await?,
        Case::new(&cluster, "beside").await?,
    );
    tenant.node("n", &[CARD; 4]).create(&tenant.client).await?;
    neighbour
        .node("n", &[CARD])
        .create(&neighbour.client)
        .await?;
    neighbours_are_served(&neighbour, "nothing").await?;
    let before = rig.extender.process.resident()?;

    // Each asks for something that no other pod does, that the node's sum has, and no card; under the longest names.
    let tail = "x".repeat(LONG);
    let distinct = (0..FLOOD).map(|index| {
        let pod = tenant.pod(&format!("a{index}-{tail}"));
        pod.gpu_mem(CARD + 1 + index as u64)
    });
    create(&tenant, distinct).await?;
    neighbours_are_served(&neighbour, "as many different requests as pods").await?;

    // Each pod gets annotations of nearly the largest size.
    let large = (0..FLOOD / 10).map(|index| {
        let pod = tenant.pod(&format!("large-{index}")).gpu_mem(CARD + 1);
        pod.annotation("example.com/large", &"y".repeat(200_000))
    });
    create(&tenant, large).await?;
    neighbours_are_served(&neighbour, "the largest annotations").await?;

    let gated = (0..FLOOD).map(|index| {
        let pod = tenant.pod(&format!("gated-{index}")).gpu_mem(CARD);
        pod.with(|spec| {
            let name = "example.com/never".to_owned();
            spec.scheduling_gates = Some(vec![PodSchedulingGate { name }]);
        })
    });
    create(&tenant, gated).await?;
    neighbours_are_served(&neighbour, "pods that are gated for ever").await?;

    let grown = rig.extender.process.resident()? - before;
    ensure!(grown < MOST, "the extender has grown by {grown:.0} MiB");
    ledger_agrees(&rig.extender, &tenant).await?;
    tenant.check().await?;
    neighbour.check().await
}

#[tokio::test]
async fn a_pod_that_never_stops_changing_harms_itself_alone() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    let rig = Rig::start(&cluster, Setup::default()).await?;
    let (tenant, neighbour) = (
        Case::new(&cluster, "changes").await?,
        Case::new(&cluster, "beside").await?,
    );
    tenant.node("n", &[CARD; 2]).create(&tenant.client).await?;
    neighbour
        .node("n", &[CARD])
        .create(&neighbour.client)
        .await?;
    let restless = tenant
        .pod("restless")
        .gpu_mem(CARD)
        .create(&tenant.client)
        .await?;
    let change = async {
        let pods = tenant.pods();
        for turn in 0_u64.. {
            let note =
                json!({ "metadata": { "annotations": { "example.com/turn": turn.to_string() } } });
            let params = PatchParams::default();
            pods.patch(&restless.name_any(), &params, &Patch::Merge(note))
                .await?;
        }
        anyhow::Ok(())
    };
    let served = async {
        for _ in 0..5 {
            neighbours_are_served(&neighbour, "a pod that changes all the time").await?;
        }
        let quiet = tenant.pod("quiet").gpu_mem(CARD);
        bound(&tenant.client, quiet).await.map(drop)
    };
    tokio::select! {
        changed = change => changed?,
        served = served => served?,
    }
    // It is bound by the version that it has when it leaves off, if not before.
    wait_bound(&tenant.client, &restless, SOON).await?;
    ledger_agrees(&rig.extender, &tenant).await?;
    tenant.check().await
}

#[tokio::test]
async fn calls_that_are_begun_and_never_ended_keep_kube_scheduler_out_for_no_time() -> Result<()> {
    // More than the extender takes connections.
    const CALLERS: usize = 1100;
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, soft.max(4096).min(hard), hard)?;
    let cluster = ControlPlane::start(Options::default()).await?;
    let rig = Rig::start(&cluster, Setup::default()).await?;
    let case = Case::new(&cluster, "callers").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    let address = rig.extender.url.trim_start_matches("http://");
    let head = "POST /filter HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{";
    let mut open = Vec::new();
    for _ in 0..CALLERS {
        let mut caller = TcpStream::connect(address).await?;
        // One that is shown the door has its answer.
        let _ = caller.write_all(head.as_bytes()).await;
        open.push(caller);
    }
    // New connections get through too: kube-scheduler's own may be among the ended connections.
    for _ in 0..5 {
        neighbours_are_served(&case, "calls that never end").await?;
        rig.extender.call("filter", "{}").await?;
    }
    ensure!(open.len() == CALLERS);
    case.check().await
}
