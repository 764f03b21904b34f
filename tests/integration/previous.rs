//! Beside an earlier build of the extender: each reads what the other wrote into the cluster, and
//! each takes over from the other.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use gpustow_api::names;
use gpustow_testkit::Case;
use kube::ResourceExt as _;
use tokio::process::Command;
use tokio::sync::OnceCell;

use crate::fault_rig::{Replica, clear, now, turn};
use crate::support::{SOON, gpustow, node_of, repository};

const CARD: u64 = 8192;

/// The extender of the earlier commit, built if need be.
async fn previous() -> Result<&'static Path> {
    static BUILT: OnceCell<PathBuf> = OnceCell::const_new();
    let built = BUILT.get_or_try_init(async || {
        let script = repository("tests/previous/build.sh");
        let built = Command::new(&script)
            .stderr(std::process::Stdio::inherit())
            .kill_on_drop(true)
            .output()
            .await?;
        ensure!(built.status.success(), "{} failed", script.display());
        Ok(PathBuf::from(String::from_utf8(built.stdout)?.trim_end()))
    });
    Ok(built.await?.as_path())
}

/// The earlier build before this one, and the other way round.
async fn both_ways() -> Result<[[&'static Path; 2]; 2]> {
    let (previous, this) = (previous().await?, gpustow());
    Ok([[previous, this], [this, previous]])
}

#[tokio::test]
async fn each_build_takes_over_from_the_other_that_was_killed() -> Result<()> {
    let ways = both_ways().await?;
    let turn = turn().await?;
    let case = Case::new(turn.cluster, "builds").await?;
    case.node("n", &[CARD, CARD]).create(&case.client).await?;
    let n = case.node_name("n");
    let create = async |name: &str, mib| case.pod(name).gpu_mem(mib).create(&case.client).await;
    for (way, programs) in ways.into_iter().enumerate() {
        // One of the last holder's name takes its place unasked.
        let name = |name: &str| format!("{name}{way}");
        let first = Replica::of(programs[0], turn.cluster, &name("first"), &[]).await?;
        let second = Replica::of(programs[1], turn.cluster, &name("second"), &[]).await?;
        let bound = create("bound", CARD / 2).await?;
        let late = create("late", CARD).await?;
        let other = create("other", CARD).await?;
        let waits = create("waits", CARD).await?;
        first.place(&bound, &n).await?;
        let takeover = async || {
            first.extender.process.kill9();
            second.place(&other, &n).await
        };
        first.bind_late(&case, &late, &n, takeover).await?;
        // What the other build assigned counts.
        assert!(second.filter(&waits, &n).await.is_err());
        second.settled(&case).await?;
        clear(&case).await?;
    }
    case.end().await
}

#[tokio::test]
async fn each_build_knows_that_the_other_left_cleanly_and_when_it_was_relieved() -> Result<()> {
    let ways = both_ways().await?;
    let turn = turn().await?;
    let case = Case::new(turn.cluster, "leaves").await?;
    case.node("n", &[CARD, CARD]).create(&case.client).await?;
    let n = case.node_name("n");
    let create = async |name: &str, mib| case.pod(name).gpu_mem(mib).create(&case.client).await;
    for (way, programs) in ways.into_iter().enumerate() {
        // One of the last holder's name takes its place unasked.
        let name = |name: &str| format!("{name}{way}");
        let first = Replica::of(programs[0], turn.cluster, &name("leaves"), &[]).await?;
        let second = Replica::of(programs[1], turn.cluster, &name("follows"), &[]).await?;
        first.place(&create("bound", CARD).await?, &n).await?;
        let waits = create("waits", CARD / 2).await?;
        first.extender.process.term()?;
        first.extender.process.wait_exit(SOON).await?;
        let next = create("next", CARD / 2).await?;
        second.place(&next, &n).await?;
        let version = now(&case, &waits).await?.resource_version();
        assert_eq!(version, waits.resource_version(), "fenced for nothing");
        second.settled(&case).await?;

        let third = Replica::of(programs[0], turn.cluster, &name("relieves"), &[]).await?;
        third.place(&waits, &n).await?;
        let late = create("late", 1).await?;
        assert!(second.bind(&late, &n).await.is_err());
        assert_eq!(node_of(&now(&case, &late).await?), "");
        third.settled(&case).await?;
        clear(&case).await?;
    }
    case.end().await
}

#[tokio::test]
async fn each_build_counts_whole_cards_and_several_as_the_other_assigned_them() -> Result<()> {
    let ways = both_ways().await?;
    let turn = turn().await?;
    let case = Case::new(turn.cluster, "reads").await?;
    case.node("n", &[CARD; 4]).create(&case.client).await?;
    let n = case.node_name("n");
    for (way, programs) in ways.into_iter().enumerate() {
        // One of the last holder's name takes its place unasked.
        let name = |name: &str| format!("{name}{way}");
        let first = Replica::of(programs[0], turn.cluster, &name("writes"), &[]).await?;
        let second = Replica::of(programs[1], turn.cluster, &name("reads"), &[]).await?;
        let whole = case
            .pod("whole")
            .gpu_mem(1)
            .annotation(names::EXCLUSIVE, "true");
        let pair = case
            .pod("pair")
            .gpu_mem(2 * CARD)
            .annotation(names::GPU_COUNT, "2");
        first.place(&whole.create(&case.client).await?, &n).await?;
        first.place(&pair.create(&case.client).await?, &n).await?;
        let last = case.pod("last").gpu_mem(CARD).create(&case.client).await?;
        second.place(&last, &n).await?;
        let none = case.pod("none").gpu_mem(1).create(&case.client).await?;
        assert!(second.filter(&none, &n).await.is_err());
        second.settled(&case).await?;
        clear(&case).await?;
    }
    case.end().await
}
