//! An earlier build of extender and agent with the present build: each reads the other's writes in the cluster, and
//! each takes over from the other.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::Parser as _;
use fake_nvml::Event;
use gpustow_api::gpunode::Gpu;
use gpustow_api::names;
use gpustow_testkit::builders::set_running;
use gpustow_testkit::{Agent, Case, ControlPlane, eventually};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kubectl_gpustow::{Args, Screen, run};
use serde_json::Value;
use tokio::process::Command;
use tokio::sync::OnceCell;

use crate::agent::{AgentNode, cgroup_of};
use crate::fault_rig::{Replica, clear, now, turn};
use crate::support::{SOON, gpustow, node_of, repository};

const CARD: u64 = 8192;

/// A program of the earlier commit, built if need be.
async fn previous(program: &str) -> Result<PathBuf> {
    static FOLDER: OnceCell<PathBuf> = OnceCell::const_new();
    let folder = FOLDER.get_or_try_init(async || {
        let script = repository("tests/previous/build.sh");
        let built = Command::new(&script)
            .stderr(std::process::Stdio::inherit())
            .kill_on_drop(true)
            .output()
            .await?;
        ensure!(built.status.success(), "{} failed", script.display());
        Ok(PathBuf::from(String::from_utf8(built.stdout)?.trim_end()))
    });
    Ok(folder.await?.join(program))
}

/// The earlier build before this one, and the other way round.
async fn both_ways() -> Result<[[PathBuf; 2]; 2]> {
    let (previous, this) = (previous("gpustow").await?, gpustow().to_owned());
    Ok([[previous.clone(), this.clone()], [this, previous]])
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
        let first = Replica::of(&programs[0], turn.cluster, &name("first"), &[]).await?;
        let second = Replica::of(&programs[1], turn.cluster, &name("second"), &[]).await?;
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
        // Assignments of the other build count.
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
        let first = Replica::of(&programs[0], turn.cluster, &name("leaves"), &[]).await?;
        let second = Replica::of(&programs[1], turn.cluster, &name("follows"), &[]).await?;
        first.place(&create("bound", CARD).await?, &n).await?;
        let waits = create("waits", CARD / 2).await?;
        first.extender.process.term()?;
        first.extender.process.wait_exit(SOON).await?;
        let next = create("next", CARD / 2).await?;
        second.place(&next, &n).await?;
        let version = now(&case, &waits).await?.resource_version();
        assert_eq!(version, waits.resource_version(), "fenced for nothing");
        second.settled(&case).await?;

        let third = Replica::of(&programs[0], turn.cluster, &name("relieves"), &[]).await?;
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
        let first = Replica::of(&programs[0], turn.cluster, &name("writes"), &[]).await?;
        let second = Replica::of(&programs[1], turn.cluster, &name("reads"), &[]).await?;
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

#[tokio::test]
async fn the_earlier_agent_reports_to_this_extender_and_this_agent_goes_on_from_there() -> Result<()>
{
    skewed("new", gpustow().to_owned(), true).await
}

#[tokio::test]
async fn this_agent_reports_to_the_earlier_extender_and_the_earlier_goes_on_from_there()
-> Result<()> {
    skewed("old", previous("gpustow").await?, false).await
}

/// An agent and an extender of different builds. The extender places pods by the agent's report, and the agent sees the
/// users of the card. Its report of a failed card keeps pods away, also after the other build's agent has replaced it.
/// This happens in an upgrade or a way back.
async fn skewed(name: &str, extender: PathBuf, earlier_agent_first: bool) -> Result<()> {
    let turn = turn().await?;
    let case = Case::new(turn.cluster, name).await?;
    let mut node = AgentNode::start(turn.cluster, &case).await?;
    let uuid = case.uuid("n", 0);
    let mut earlier = match earlier_agent_first {
        true => Some(relieved(&mut node, turn.cluster).await?),
        false => None,
    };
    node.capacity(79_000).await?;
    node.kubelet_writes("allocatable", 79_000).await?;
    let extender = Replica::of(&extender, turn.cluster, name, &[]).await?;

    let pod = case.pod("p").gpu_mem(8000).create(&case.client).await?;
    extender.place(&pod, &node.name).await?;
    set_running(&case.client, &pod).await?;
    node.runs(&[
        (7, 6000, cgroup_of(&pod)?),
        (8, 1000, "0::/init.scope".to_owned()),
    ])?;
    uses(&node, &case, &pod, &uuid).await?;
    // 71000 would be free without the stranger.
    let large = case
        .pod("large")
        .gpu_mem(70_500)
        .create(&case.client)
        .await?;
    eventually(
        SOON,
        "the stranger's memory is not given away",
        async || {
            ensure!(
                extender.filter(&large, &node.name).await.is_err(),
                "it fits"
            );
            Ok(())
        },
    )
    .await?;
    let small = case
        .pod("small")
        .gpu_mem(69_000)
        .create(&case.client)
        .await?;
    extender.place(&small, &node.name).await?;
    plugin_shows(turn.cluster, &case).await?;

    node.machine.events.push(Event {
        gpu: uuid.clone(),
        xid: Some(79),
    });
    node.shows()?;
    node.card("the card is condemned", |gpu| !gpu.healthy)
        .await?;
    let next = case.pod("next").gpu_mem(1).create(&case.client).await?;
    eventually(SOON, "a failed card takes no pod", async || {
        ensure!(extender.filter(&next, &node.name).await.is_err(), "it fits");
        Ok(())
    })
    .await?;

    // The driver forgets its events with the process that received them; the report is still true.
    node.machine.events.clear();
    node.shows()?;
    match earlier.take() {
        Some(agent) => {
            agent.process.term()?;
            agent.process.wait_exit(SOON).await?;
            node.restart(turn.cluster, &[]).await?;
        }
        None => earlier = Some(relieved(&mut node, turn.cluster).await?),
    }
    node.runs(&[(7, 7000, cgroup_of(&pod)?)])?;
    node.card("the other build's agent reports", |gpu| {
        !gpu.healthy && share(gpu) == Some(7000)
    })
    .await?;
    uses(&node, &case, &pod, &uuid).await?;
    ensure!(extender.filter(&next, &node.name).await.is_err(), "it fits");
    node.capacity(79_000).await?;
    drop(earlier);
    node.end().await;
    extender.settled(&case).await?;
    case.end().await
}

/// The agent of the earlier commit instead of the node's own.
async fn relieved(node: &mut AgentNode, cluster: &ControlPlane) -> Result<Agent> {
    node.relieved_by(&previous("gpustow-agent").await?, cluster)
        .await
}

/// The usage of the card by the first pod.
fn share(gpu: &Gpu) -> Option<u64> {
    gpu.pods.first().map(|share| share.used_mib)
}

/// Waits until the agent has confirmed the pod on the card and reports its usage.
async fn uses(node: &AgentNode, case: &Case, pod: &Pod, uuid: &str) -> Result<()> {
    node.card("the pod's memory", |gpu| share(gpu).is_some())
        .await?;
    eventually(SOON, "the pod is confirmed", async || {
        let pod = now(case, pod).await?;
        let confirmed = pod.annotations().get(names::CONFIRMED);
        ensure!(confirmed.is_some_and(|it| it == uuid), "{confirmed:?}");
        Ok(())
    })
    .await
}

/// Today's plugin shows the reports and the assignments of either build.
async fn plugin_shows(cluster: &ControlPlane, case: &Case) -> Result<()> {
    let kubeconfig = cluster.admin_kubeconfig().display().to_string();
    let ours = format!("--namespace={}", case.namespace);
    let words = [
        "kubectl-gpustow",
        "--kubeconfig",
        &kubeconfig,
        "pods",
        &ours,
        "-o",
        "json",
    ];
    let mut out = Vec::new();
    run(Args::try_parse_from(words)?, &mut out, Screen::default()).await?;
    let pods: Value = serde_json::from_slice(&out)?;
    let items = pods["items"].as_array().into_iter().flatten();
    let item = items.into_iter().find(|item| item["pod"] == "p");
    ensure!(
        item.is_some_and(|item| item["requestedBytes"] == 8000_u64 << 20
            && item["podUsedBytes"] == 6000_u64 << 20),
        "{pods}"
    );
    Ok(())
}
