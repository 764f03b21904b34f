//! SIGTERM: calls under way are finished, and a successor need not be careful.

use anyhow::Result;
use gpustow_testkit::{Action, Case, eventually, wait_bound};

use crate::fault_rig::{Replica, epoch, now, turn};
use crate::support::{SOON, node_of};

const CARD: u64 = 8192;

#[tokio::test]
async fn a_bind_under_way_is_finished_and_the_successor_does_not_fence() -> Result<()> {
    let turn = turn().await?;
    let leaving = Replica::start(turn.cluster, "leaving", &[]).await?;
    let heir = Replica::start(turn.cluster, "heir", &[]).await?;
    let case = Case::new(turn.cluster, "term").await?;
    case.node("n", &[CARD, CARD]).create(&case.client).await?;
    let n = case.node_name("n");
    let pod = case.pod("p").gpu_mem(CARD).create(&case.client).await?;
    let waits = case.pod("waits").gpu_mem(CARD).create(&case.client).await?;
    leaving.until_fits(&pod, &n).await?;
    let fenced = now(&case, &waits).await?;
    assert!(epoch(&fenced).is_some());

    let rule = leaving.on_first_bind(&pod, Action::Hold)?;
    let term = async {
        rule.seen(1, SOON).await?;
        leaving.extender.process.term()?;
        eventually(SOON, "it is not ready any more", async || {
            let ready = leaving.extender.ready().await?;
            anyhow::ensure!(ready == 503, "/readyz: {ready}");
            Ok(())
        })
        .await?;
        rule.release();
        leaving.extender.process.wait_exit(SOON).await
    };
    let (bind, exit) = tokio::join!(leaving.bind(&pod, &n), term);
    bind?;
    assert!(exit?.success());
    assert_eq!(node_of(&now(&case, &pod).await?), n);

    heir.place(&waits, &n).await?;
    let line = heir
        .extender
        .process
        .wait_for_log_line("took over", SOON)
        .await?;
    assert!(
        line.contains("clean=true") && line.contains("fenced=0"),
        "{line}"
    );
    assert_eq!(epoch(&now(&case, &waits).await?), epoch(&fenced));
    heir.settled(&case).await?;
    case.end().await
}

#[tokio::test]
async fn a_rolling_restart_under_load_loses_nothing() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "rolling", &[]).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "rolling").await?;
    case.node("n", &[CARD; 4]).create(&case.client).await?;
    let mut pods = Vec::new();
    for i in 0..32 {
        pods.push(
            case.pod(&format!("p{i}"))
                .gpu_mem(CARD / 8)
                .create(&case.client)
                .await?,
        );
        if i % 16 == 8 {
            replica.extender.process.term()?;
            assert!(replica.extender.process.wait_exit(SOON).await?.success());
            replica.restart().await?;
        }
    }
    for pod in &pods {
        wait_bound(&case.client, pod, SOON).await?;
    }
    replica.settled(&case).await?;
    case.end().await
}
