//! Pods that move for one that waits for memory which is free in pieces. No controllers run here: the successors are
//! made by the cases.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use gpustow_testkit::builders::{delete, set_accepted};
use gpustow_testkit::{
    Action, Case, PodBuilder, Scheduler, eventually, wait_bound, wait_gone, wait_refused,
};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::ResourceExt as _;
use kube::api::{ListParams, PostParams};

use crate::fault_rig::{Replica, Turn, now, on_eviction, turn};
use crate::fragmented::{bound, condition, holds, nothing_is_left, slow, staying};
use crate::support::{SOON, charges, event, event_saying};

const CARD: u64 = 10_000;
const MOVES: &str = "defragment: {evictionsPerHour: 10}";
/// A replica that kube-scheduler does not call leads half a minute after it finds no leader.
const LATE: Duration = Duration::from_secs(90);

/// A pod that its controller recreates, and that may be moved.
pub(crate) fn evictable(pod: PodBuilder, mib: u64) -> Pod {
    let pod = pod.gpu_mem(mib).annotation(names::EVICTABLE, "true");
    let mut pod = slow(pod, 600).build();
    pod.metadata.owner_references = Some(vec![OwnerReference {
        api_version: "apps/v1".into(),
        kind: "ReplicaSet".into(),
        name: "web".into(),
        uid: "5b5c3a52-0d3e-4f0c-9a30-0f9b9f3a1c11".into(),
        controller: Some(true),
        ..OwnerReference::default()
    }]);
    pod
}

pub(crate) async fn create(case: &Case, pod: Pod) -> Result<Pod> {
    Ok(case.pods().create(&PostParams::default(), &pod).await?)
}

/// A replica that has pods move, its kube-scheduler, and a case with two nodes of one card; 6000 MiB are free on the first
/// of them, where x is, and 6000 on the second, where y and z are.
async fn rig(turn: &Turn, name: &str, args: &[&str]) -> Result<(Replica, Scheduler, Case)> {
    let replica = Replica::start(turn.cluster, name, args).await?;
    let scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, name).await?;
    let pods = [
        ("a", vec![evictable(case.pod("x").label("app", "x"), 4000)]),
        (
            "b",
            vec![
                evictable(case.pod("y").label("app", "y"), 3000),
                case.pod("z").gpu_mem(1000).build(),
            ],
        ),
    ];
    // Each node takes its pods before the next is there.
    for (node, pods) in pods {
        case.node(node, &[CARD]).create(&case.client).await?;
        for pod in pods {
            let fill = case.pod("fill").gpu_mem(6000);
            let pod = create(&case, pod).await?;
            wait_bound(&case.client, &pod, SOON).await?;
            if node == "a" {
                bound(&case, fill).await?;
            }
        }
    }
    let fill = case.pods().get("fill").await?;
    delete(&case.client, &fill, 0).await?;
    wait_gone(&case.client, &fill, SOON).await?;
    Ok((replica, scheduler, case))
}

/// Waits until the pod's deletion is under way; the pod.
pub(crate) async fn ends(case: &Case, name: &str) -> Result<Pod> {
    ends_within(case, name, SOON).await
}

async fn ends_within(case: &Case, name: &str, deadline: Duration) -> Result<Pod> {
    eventually(deadline, &format!("{name} ends"), async || {
        let pod = case.pods().get(name).await?;
        ensure!(pod.metadata.deletion_timestamp.is_some());
        Ok(pod)
    })
    .await
}

/// The successor of a pod that ends is made, gets the other node, and that one goes.
async fn succeeded(case: &Case, gone: &Pod, name: &str, mib: u64, node: &str) -> Result<()> {
    let successor = create(case, evictable(case.pod(name), mib)).await?;
    let successor = wait_bound(&case.client, &successor, SOON).await?;
    let on = successor.spec.and_then(|spec| spec.node_name);
    assert_eq!(on.as_deref(), Some(&*case.node_name(node)));
    delete(&case.client, gone, 0).await
}

/// A pod with a reservation gets a new message before pods are evicted for it.
#[tokio::test]
async fn defragment_says_on_a_pod_with_a_reservation_what_is_reserved_before_it_evicts()
-> Result<()> {
    let turn = turn().await?;
    let features = [MOVES, "reserve: {after: 1s}"];
    let (replica, _scheduler, case) = rig(&turn, "reserved-first", &features).await?;
    let waits = case.pod("waits").gpu_mem(8000);
    let waits = waits.create(&case.client).await?;
    let gone = eventually(SOON, "a pod is evicted", async || {
        let pods = case.pods().list(&ListParams::default()).await?;
        let mut pods = pods.items.into_iter();
        let gone = pods.find(|pod| pod.metadata.deletion_timestamp.is_some());
        gone.context("none is evicted")
    })
    .await?;
    let told = now(&case, &waits).await?;
    let reserved = condition(&told, names::RESERVED_CONDITION).context("it has no condition")?;
    assert_eq!(reserved.reason.as_deref(), Some("Defragmenting"));
    let reservation = told.annotations().get(names::RESERVATION);
    let node = gone.spec.as_ref().and_then(|spec| spec.node_name.clone());
    let node = node.context("the victim has no node")?;
    ensure!(
        reservation.is_some_and(|it| it.contains(&node)),
        "{reservation:?} does not name {node}"
    );
    delete(&case.client, &waits, 0).await?;
    delete(&case.client, &gone, 0).await?;
    nothing_is_left(&replica, &case).await?;
    case.end().await
}

#[tokio::test]
async fn a_marked_pod_moves_and_it_and_who_waits_get_the_room_that_is_kept() -> Result<()> {
    let turn = turn().await?;
    let (replica, _scheduler, case) = rig(&turn, "moves", &[MOVES]).await?;
    let waits = case.pod("waits").gpu_mem(8000);
    let waits = waits.create(&case.client).await?;

    // The smaller one.
    let gone = ends(&case, "y").await?;
    let told = event(&case.client, &gone, "GpuPodDisrupted").await?;
    ensure!(
        told.contains(&format!("{}/waits", case.namespace)),
        "{told}"
    );
    let evicts = format!("Evicting {}/y, which can run elsewhere", case.namespace);
    event_saying(&case.client, &waits, "GpuMemoryReserved", &evicts).await?;
    ensure!(holds(&now(&case, &waits).await?, names::RESERVED_CONDITION));
    // The pod is larger than the unreserved memory of each node.
    let late = case.pod("late").gpu_mem(4000).create(&case.client).await?;
    wait_refused(&case.client, &late, "reserved", SOON).await?;

    succeeded(&case, &gone, "y2", 3000, "a").await?;
    let waits = wait_bound(&case.client, &waits, SOON).await?;
    assert_eq!(charges(&waits)?[0].1, 8000);
    assert_eq!(replica.disruptions("evict", "defragment").await?, "1");
    delete(&case.client, &late, 0).await?;
    wait_gone(&case.client, &late, SOON).await?;
    assert_eq!(staying(&case).await?, ["waits", "x", "y2", "z"]);
    nothing_is_left(&replica, &case).await?;
    case.end().await
}

/// No pod waits. The node with less on it is emptied into the other, on which a pod stays.
#[tokio::test]
async fn defragment_empties_a_nearly_empty_node() -> Result<()> {
    let turn = turn().await?;
    let empties = "defragment: {evictionsPerHour: 10, emptyNodes: true}";
    let (replica, _scheduler, case) = rig(&turn, "empties", &[empties]).await?;
    let x = case.pods().get("x").await?;
    // It has run for long.
    set_accepted(&case.client, &x).await?;
    let gone = ends_within(&case, "x", LATE).await?;
    let told = event(&case.client, &gone, "GpuPodDisrupted").await?;
    ensure!(told.contains("which is nearly empty"), "{told}");
    succeeded(&case, &gone, "x2", 4000, "b").await?;
    assert_eq!(replica.disruptions("evict", "defragment").await?, "1");
    wait_gone(&case.client, &gone, SOON).await?;
    assert_eq!(staying(&case).await?, ["x2", "y", "z"]);
    nothing_is_left(&replica, &case).await?;
    case.end().await
}

#[tokio::test]
async fn a_pod_that_a_budget_protects_stays_and_another_moves() -> Result<()> {
    let turn = turn().await?;
    let (replica, _scheduler, case) = rig(&turn, "moves-budget", &[MOVES]).await?;
    case.budget("y", ("minAvailable", 1)).await?;
    let waits = case.pod("waits").gpu_mem(8000);
    let waits = waits.create(&case.client).await?;
    let gone = ends(&case, "x").await?;
    succeeded(&case, &gone, "x2", 4000, "b").await?;
    wait_bound(&case.client, &waits, SOON).await?;
    assert_eq!(staying(&case).await?, ["waits", "x2", "y", "z"]);
    assert_eq!(replica.disruptions("evict", "defragment").await?, "1");
    nothing_is_left(&replica, &case).await?;
    case.end().await
}

#[tokio::test]
async fn a_successor_goes_on_where_the_eviction_was_not_sent() -> Result<()> {
    let turn = turn().await?;
    let (killed, scheduler, case) = rig(&turn, "moves-killed", &[MOVES]).await?;
    let first = on_eviction(&killed, 0, Action::Hold);
    let waits = case.pod("waits").gpu_mem(8000);
    let waits = waits.create(&case.client).await?;
    first.seen(1, SOON).await?;
    scheduler.process.kill9();
    killed.extender.process.kill9();
    drop(killed);

    let successor = Replica::start(turn.cluster, "moves-heir", &[MOVES]).await?;
    let _scheduler = successor.scheduler(turn.cluster).await?;
    // The sum of no node is enough for the other: kube-scheduler does not ask about it.
    bound(&case, case.pod("asked").gpu_mem(1000)).await?;
    let gone = ends(&case, "y").await?;
    succeeded(&case, &gone, "y2", 3000, "a").await?;
    wait_bound(&case.client, &waits, SOON).await?;
    assert_eq!(successor.disruptions("evict", "defragment").await?, "1");
    assert_eq!(staying(&case).await?, ["asked", "waits", "x", "y2", "z"]);
    nothing_is_left(&successor, &case).await?;
    case.end().await
}

#[tokio::test]
async fn an_eviction_that_arrives_after_a_takeover_fails() -> Result<()> {
    let turn = turn().await?;
    let (frozen, scheduler, case) = rig(&turn, "moves-icy", &[MOVES]).await?;
    let late = on_eviction(&frozen, 0, Action::Hold);
    let waits = case.pod("waits").gpu_mem(8000);
    let waits = waits.create(&case.client).await?;
    late.seen(1, SOON).await?;
    scheduler.process.kill9();
    frozen.extender.process.stop()?;

    // The successor does not move pods, and ends the move that the other replica began.
    let successor = Replica::start(
        turn.cluster,
        "moves-heir-icy",
        &["reclaim: {action: Event}"],
    )
    .await?;
    let small = case.pod("small").gpu_mem(1000).create(&case.client).await?;
    successor.place(&small, &case.node_name("a")).await?;
    eventually(SOON, "the successor wrote into the pod", async || {
        let pod = case.pods().get("y").await?;
        let target = condition(&pod, names::DISRUPTION_TARGET).context("no condition")?;
        ensure!(target.status == "False", "{target:?}");
        Ok(())
    })
    .await?;
    frozen
        .thaws(&late, &waits, &case.node_name("b"), "moves-heir-icy")
        .await?;
    assert_eq!(staying(&case).await?, ["small", "waits", "x", "y", "z"]);
    nothing_is_left(&successor, &case).await?;
    case.end().await
}

/// The sum of no node is enough: kube-scheduler asks about no pod, and no call makes the extender the leader.
#[tokio::test]
async fn move_needs_no_call_of_kube_scheduler_where_there_is_no_leader() -> Result<()> {
    let turn = turn().await?;
    let (first, scheduler, case) = rig(&turn, "moves-unasked", &[]).await?;
    let waits = case.pod("waits").gpu_mem(8000);
    let waits = waits.create(&case.client).await?;
    wait_refused(&case.client, &waits, "Insufficient", SOON).await?;
    scheduler.process.kill9();
    first.extender.process.term()?;
    first.extender.process.wait_exit(SOON).await?;

    let replica = Replica::start(turn.cluster, "moves-first", &[MOVES]).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    let gone = ends_within(&case, "y", LATE).await?;
    succeeded(&case, &gone, "y2", 3000, "a").await?;
    wait_bound(&case.client, &waits, SOON).await?;
    assert_eq!(replica.disruptions("evict", "defragment").await?, "1");
    nothing_is_left(&replica, &case).await?;
    case.end().await
}
