//! A pod that waits is bound when another goes, however late the extender hears of it.

use std::time::{Duration, Instant};

use anyhow::Result;
use gpustow_api::names;
use gpustow_testkit::builders::delete;
use gpustow_testkit::{Action, ApiProxy, Case, ControlPlane, Options, wait_bound};

use crate::support::{Rig, SOON, Setup, bound, refused, rounds};

#[tokio::test]
async fn a_waiting_pod_is_bound_though_the_extenders_watch_is_late() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    let proxy = ApiProxy::start(&cluster).await?;
    let delay = Duration::from_millis(500);
    let _late = proxy.on_pod_watch(Action::DelayReply(delay));
    let setup = Setup {
        proxy: Some(&proxy),
        ..Setup::default()
    };
    let rig = Rig::start(&cluster, setup).await?;
    let case = Case::new(rig.cluster, "waiting").await?;
    case.node("n", &[8192]).create(&case.client).await?;
    let mut holder = bound(&case.client, case.pod("p0").gpu_mem(8192)).await?;

    let mut took = Vec::new();
    for round in 1..=rounds()? {
        let next = case.pod(&format!("p{round}")).gpu_mem(8192);
        let next = refused(&case.client, next, names::GPU_MEM).await?;
        delete(&case.client, &holder, 0).await?;
        let deleted = Instant::now();
        holder = wait_bound(&case.client, &next, SOON).await?;
        took.push(deleted.elapsed());
        case.check().await?;
    }

    took.sort_unstable();
    println!(
        "deleted → waiting pod bound, pod watch {delay:?} late, {} rounds: median {:?}, worst {:?}",
        took.len(),
        took[took.len() / 2],
        took[took.len() - 1]
    );
    rig.end(case).await
}
