//! The queue on a real API server and kube-scheduler: which pods are ungated, and when. The extender has the rights of
//! `manifests/queue` and no more. Most pods are created with the gate on them. The other parts of the policies have
//! cases of their own.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use axum::http::{Method, StatusCode, Uri};
use gpustow_api::{GpustowConfig, config, names};
use gpustow_testkit::builders::delete;
use gpustow_testkit::{
    Action, ApiProxy, Case, ControlPlane, Extender, ExtenderOptions, Options, PodBuilder,
    Scheduler, SchedulerConfig, eventually, wait_bound, wait_condition, wait_gone, wait_refused,
};
use k8s_openapi::api::core::v1::{Pod, PodSchedulingGate};
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::json;

use crate::fault_rig::Replica;
use crate::install::install;
use crate::moving::{create, ends, evictable};
use crate::support::{ACCOUNT, SOON, SYSTEM, bound, event, gpustow, refused, repository, rounds};

pub(crate) const CARD: u64 = 8192;
/// Bound on waits for the extender's own timers. Its flag goes down after half a minute. A replica that does not decide
/// waits a quarter of a minute.
pub(crate) const LATE: Duration = Duration::from_secs(90);

/// A control plane with gpustow and its line.
pub(crate) async fn open() -> Result<ControlPlane> {
    let cluster = ControlPlane::start(Options::default()).await?;
    install(&cluster, "manifests/overlays/queue").await?;
    Ok(cluster)
}

async fn extender(cluster: &ControlPlane, identity: &str, line: &str) -> Result<Extender> {
    let kubeconfig = cluster.kubeconfig(SYSTEM, ACCOUNT, None).await?;
    extender_by(cluster, &kubeconfig, identity, line, &[]).await
}

async fn extender_by(
    cluster: &ControlPlane,
    kubeconfig: &Path,
    identity: &str,
    line: &str,
    more: &[&str],
) -> Result<Extender> {
    let mode = format!("queue: {{mode: {line}}}");
    let config = [&*mode].into_iter().chain(more.iter().copied());
    let options = ExtenderOptions {
        args: vec![format!("--identity={identity}")],
        config: Some(config.map(str::to_owned).collect()),
        ..ExtenderOptions::default()
    };
    Extender::start(cluster, gpustow(), kubeconfig, options).await
}

async fn scheduler(cluster: &ControlPlane, extender: &Extender) -> Result<Scheduler> {
    let config = SchedulerConfig::load(&repository("scheduler-config/gpustow-scheduler.yaml"))?
        .with_extender(&extender.url)?;
    let kubeconfig = cluster.kubeconfig(SYSTEM, ACCOUNT, None).await?;
    Scheduler::start(cluster, config, &kubeconfig).await
}

/// A control plane with a queue of this mode, its extender and kube-scheduler, and a case with one GPU.
async fn with_a_gpu(mode: &str, name: &str) -> Result<(ControlPlane, Extender, Scheduler, Case)> {
    let cluster = open().await?;
    let extender = extender(&cluster, "one", mode).await?;
    let scheduler = scheduler(&cluster, &extender).await?;
    let case = Case::new(&cluster, name).await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    Ok((cluster, extender, scheduler, case))
}

/// It is queued.
pub(crate) fn held(case: &Case, name: &str) -> PodBuilder {
    case.pod(name).gpu_mem(CARD).with(|spec| {
        let name = names::GATE.to_owned();
        spec.scheduling_gates = Some(vec![PodSchedulingGate { name }]);
    })
}

pub(crate) fn is_held(pod: &Pod) -> bool {
    let gates = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.scheduling_gates.as_ref());
    gates.is_some_and(|gates| gates.iter().any(|gate| gate.name == names::GATE))
}

/// Waits until the status shows whether any new pods are queued.
pub(crate) async fn flag(cluster: &ControlPlane, wanted: bool) -> Result<()> {
    let configs = Api::<GpustowConfig>::all(cluster.admin()?);
    eventually(LATE, &format!("queueing is {wanted}"), async || {
        let config = configs.get(config::NAME).await?;
        let from = config.status.unwrap_or_default().queue_from;
        ensure!(from.is_empty() != wanted, "{from:?}");
        Ok(())
    })
    .await
}

pub(crate) async fn still_held(case: &Case, pods: &[&Pod]) -> Result<()> {
    for pod in pods {
        let name = pod.metadata.name.as_deref().context("it has a name")?;
        ensure!(is_held(&case.pods().get(name).await?), "{name} was let out");
    }
    Ok(())
}

#[tokio::test]
async fn the_next_in_turn_is_bound_when_one_leaves() -> Result<()> {
    let (cluster, extender, _scheduler, case) = with_a_gpu("Auto", "line").await?;
    let mut holder = bound(&case.client, case.pod("holder").gpu_mem(CARD)).await?;
    // The flag goes up with the first that is refused for want of room.
    let older = refused(
        &case.client,
        case.pod("a-older").gpu_mem(CARD),
        names::GPU_MEM,
    )
    .await?;
    flag(&cluster, true).await?;
    let mut line = Vec::new();
    for name in ["b", "c"] {
        line.push(held(&case, name).create(&case.client).await?);
    }
    // The policy has seen the flag before long: a pod gets the gate that did not bring it.
    let by_policy = async || {
        let pod = case.pod("d").gpu_mem(CARD).create(&case.client).await?;
        if !is_held(&pod) {
            delete(&case.client, &pod, 0).await?;
            bail!("not gated yet");
        }
        Ok(pod)
    };
    line.push(eventually(SOON, "the policy gates a pod", by_policy).await?);
    let place = event(&case.client, &line[0], "GpuPodQueued").await?;
    ensure!(place.contains("position 1 of"), "{place}");
    let metrics = extender.metrics().await?;
    ensure!(metrics.contains("\ngpustow_queued_pods 3\n"), "{metrics}");
    // By age, among the pods that have a gate.
    let mut order = vec![older];
    order.extend(line);
    for (index, next) in order.iter().enumerate() {
        let behind: Vec<&Pod> = order[index + 1..]
            .iter()
            .filter(|pod| is_held(pod))
            .collect();
        still_held(&case, &behind).await?;
        delete(&case.client, &holder, 0).await?;
        holder = wait_bound(&case.client, next, SOON).await?;
        still_held(&case, &behind).await?;
        case.check().await?;
    }
    flag(&cluster, false).await?;
    let metrics = extender.metrics().await?;
    let ungates = "gpustow_ungated_pods_total{cause=\"room\",result=\"done\"} 3\n";
    ensure!(metrics.contains(ungates), "{metrics}");
    case.end().await
}

#[tokio::test]
async fn pod_that_requests_less_than_all_that_wait_is_not_queued() -> Result<()> {
    let (_cluster, _extender, _scheduler, case) = with_a_gpu("Auto", "less").await?;
    bound(&case.client, case.pod("holder").gpu_mem(CARD / 2)).await?;
    let whole = case.pod("whole").gpu_mem(CARD);
    refused(&case.client, whole, names::GPU_MEM).await?;
    is_queued(&case, CARD, true).await?;

    // Half of the GPU is free.
    let small = case.pod("small").gpu_mem(CARD / 4);
    let small = small.create(&case.client).await?;
    ensure!(!is_held(&small), "it is queued");
    wait_bound(&case.client, &small, SOON).await?;

    // One that does not fit is refused, and the next like it are queued.
    is_queued(&case, CARD / 2, false).await?;
    let half = case.pod("half").gpu_mem(CARD / 2);
    refused(&case.client, half, names::GPU_MEM).await?;
    is_queued(&case, CARD / 2, true).await?;
    is_queued(&case, CARD / 4, false).await?;
    case.check().await?;
    case.end().await
}

/// Waits until admission queues a pod that requests so much, or does not.
async fn is_queued(case: &Case, mib: u64, wanted: bool) -> Result<()> {
    let dry = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let probe = case.pod("probe").gpu_mem(mib).build();
    eventually(SOON, "admission queues it, or does not", async || {
        let probe = case.pods().create(&dry, &probe).await?;
        ensure!(is_held(&probe) == wanted, "{mib} MiB: {}", !wanted);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn the_next_extender_lets_them_out_when_one_is_dead() -> Result<()> {
    let cluster = open().await?;
    let first = extender(&cluster, "one", "Always").await?;
    let _scheduler = scheduler(&cluster, &first).await?;
    let second = extender(&cluster, "two", "Always").await?;
    let case = Case::new(&cluster, "heir").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    let holder = bound(&case.client, case.pod("holder").gpu_mem(CARD)).await?;
    let next = held(&case, "next").create(&case.client).await?;
    flag(&cluster, true).await?;
    event(&case.client, &next, "GpuPodQueued").await?;

    first.process.kill9();
    delete(&case.client, &holder, 0).await?;

    // kube-scheduler's extender is dead: the other one is not asked, and takes over for the queue alone.
    let free = |pod: Option<&Pod>| pod.is_some_and(|pod| !is_held(pod));
    wait_condition(&case.client, &next, "is let out", LATE, free).await?;
    drop(second);
    first.process.restart()?;
    first.wait_ready().await?;
    wait_bound(&case.client, &next, LATE).await?;
    case.end().await
}

#[tokio::test]
async fn queue_that_is_off_ungates_pods_and_leaves_other_gates() -> Result<()> {
    let cluster = open().await?;
    // Its queue goes with it, though no replica took its flag down.
    let before = extender(&cluster, "before", "Always").await?;
    let case = Case::new(&cluster, "off").await?;
    let mut asks = case.pod("asks").gpu_mem(CARD).build();
    asks.metadata.uid = Some("asks".to_owned());
    let call = json!({"Pod": asks, "NodeNames": []});
    before.call("prioritize", call.to_string()).await?;
    flag(&cluster, true).await?;
    before.process.kill9();
    let extender = extender(&cluster, "one", "\"Off\"").await?;
    let _scheduler = scheduler(&cluster, &extender).await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    bound(&case.client, case.pod("holder").gpu_mem(CARD)).await?;
    let twice = held(&case, "twice").with(|spec| {
        let name = "example.com/other".to_owned();
        let gates = spec.scheduling_gates.get_or_insert_default();
        gates.push(PodSchedulingGate { name });
    });
    let twice = twice.create(&case.client).await?;
    let held = held(&case, "held").create(&case.client).await?;
    let free = |pod: Option<&Pod>| pod.is_some_and(|pod| !is_held(pod));
    wait_condition(&case.client, &held, "is let go", SOON, free).await?;
    event(&case.client, &held, "GpuPodUngated").await?;
    still_held(&case, &[&twice]).await?;
    flag(&cluster, false).await?;
    case.end().await
}

#[tokio::test]
async fn pod_that_no_node_could_hold_is_ungated_and_told() -> Result<()> {
    let (_cluster, _extender, _scheduler, case) = with_a_gpu("Auto", "huge").await?;
    bound(&case.client, case.pod("small").gpu_mem(1)).await?;
    let huge = held(&case, "huge")
        .gpu_mem(2 * CARD)
        .create(&case.client)
        .await?;
    let told = event(&case.client, &huge, "GpuPodUngated").await?;
    ensure!(told.contains("does not fit on any node"), "{told}");
    let free = |pod: Option<&Pod>| pod.is_some_and(|pod| !is_held(pod));
    wait_condition(&case.client, &huge, "is let out", SOON, free).await?;
    case.end().await
}

#[tokio::test]
async fn queued_pod_of_high_priority_preempts() -> Result<()> {
    let (_cluster, _extender, _scheduler, case) = with_a_gpu("Always", "urgent").await?;
    let holder = bound(&case.client, case.pod("holder").gpu_mem(CARD)).await?;
    let first = held(&case, "first").create(&case.client).await?;
    event(&case.client, &first, "GpuPodQueued").await?;

    let urgent = held(&case, "urgent").priority_class("system-cluster-critical");
    let urgent = urgent.create(&case.client).await?;

    wait_bound(&case.client, &urgent, SOON).await?;
    wait_gone(&case.client, &holder, SOON).await?;
    let told = event(&case.client, &urgent, "GpuPodUngated").await?;
    ensure!(told.contains("can be preempted for it"), "{told}");
    still_held(&case, &[&first]).await?;
    case.end().await
}

#[tokio::test]
async fn queued_pod_preempts_for_fragmented_memory() -> Result<()> {
    let cluster = open().await?;
    let kubeconfig = cluster.kubeconfig(SYSTEM, ACCOUNT, None).await?;
    let more = ["preempt: {after: 0s}"];
    let extender = extender_by(&cluster, &kubeconfig, "one", "Always", &more).await?;
    let _scheduler = scheduler(&cluster, &extender).await?;
    let case = Case::new(&cluster, "fragmented").await?;
    let node = case.node("n", &[CARD, CARD]);
    node.create(&case.client).await?;
    let most = CARD / 4 * 3;
    let high = |pod: PodBuilder| pod.priority_class("system-cluster-critical");
    let low = bound(&case.client, case.pod("low").gpu_mem(most)).await?;
    let firm = bound(&case.client, high(case.pod("firm").gpu_mem(most))).await?;

    // A quarter is free on each card.
    let urgent = high(held(&case, "urgent").gpu_mem(CARD / 2));
    let urgent = urgent.create(&case.client).await?;

    wait_bound(&case.client, &urgent, SOON).await?;
    wait_gone(&case.client, &low, SOON).await?;
    let name = firm.metadata.name.as_deref().context("it has a name")?;
    let firm = case.pods().get(name).await?;
    ensure!(firm.metadata.deletion_timestamp.is_none(), "it was needed");
    case.end().await
}

#[tokio::test]
async fn defragment_moves_pods_for_a_queued_one_and_they_come_back_queued() -> Result<()> {
    let cluster = open().await?;
    let kubeconfig = cluster.kubeconfig(SYSTEM, ACCOUNT, None).await?;
    let extender = extender_by(
        &cluster,
        &kubeconfig,
        "one",
        "Always",
        &["defragment: {evictionsPerHour: 10}"],
    )
    .await?;
    let _scheduler = scheduler(&cluster, &extender).await?;
    let case = Case::new(&cluster, "pieces").await?;
    case.node("n", &[CARD, CARD]).create(&case.client).await?;
    // A quarter on each card.
    let small = CARD / 4;
    let moves = create(&case, evictable(case.pod("moves"), small)).await?;
    wait_bound(&case.client, &moves, SOON).await?;
    let fill = bound(&case.client, case.pod("fill").gpu_mem(CARD - small)).await?;
    bound(&case.client, case.pod("stays").gpu_mem(small)).await?;
    delete(&case.client, &fill, 0).await?;
    wait_gone(&case.client, &fill, SOON).await?;
    let whole = held(&case, "whole").create(&case.client).await?;

    let gone = ends(&case, "moves").await?;
    let again = create(&case, evictable(held(&case, "again"), small)).await?;
    wait_bound(&case.client, &again, SOON).await?;
    // The pod was ungated so that kube-scheduler chooses its possible nodes, and does not fit yet.
    let whole_now = case.pods().get("whole").await?;
    let node = whole_now.spec.and_then(|spec| spec.node_name);
    ensure!(node.is_none(), "whole is bound to {node:?}");
    delete(&case.client, &gone, 0).await?;
    wait_bound(&case.client, &whole, SOON).await?;
    case.end().await
}

#[tokio::test]
async fn pod_ungated_by_hand_does_not_overtake() -> Result<()> {
    let (_cluster, _extender, _scheduler, case) = with_a_gpu("Always", "beside").await?;
    let mut holder = bound(&case.client, case.pod("holder").gpu_mem(CARD)).await?;
    for round in 0..rounds()? {
        let first = held(&case, &format!("a{round}"));
        let first = first.create(&case.client).await?;
        let beside = held(&case, &format!("b{round}"));
        let beside = beside.create(&case.client).await?;
        let out = json!({"spec": {"schedulingGates": [{"$patch": "delete", "name": names::GATE}]}});
        let (params, out) = (PatchParams::default(), Patch::Strategic(out));
        case.pods()
            .patch(&format!("b{round}"), &params, &out)
            .await?;
        wait_refused(&case.client, &beside, names::GPU_MEM, SOON).await?;

        delete(&case.client, &holder, 0).await?;

        let first = wait_bound(&case.client, &first, SOON).await?;
        case.check().await?;
        delete(&case.client, &first, 0).await?;
        holder = wait_bound(&case.client, &beside, SOON).await?;
    }
    case.end().await
}

#[tokio::test]
async fn ungating_is_tried_again_that_failed_or_came_after_another_write() -> Result<()> {
    let cluster = open().await?;
    let proxy = ApiProxy::start(&cluster).await?;
    let kubeconfig = cluster.kubeconfig(SYSTEM, ACCOUNT, Some(proxy.url()));
    let extender = extender_by(&cluster, &kubeconfig.await?, "one", "Always", &[]).await?;
    let _scheduler = scheduler(&cluster, &extender).await?;
    let case = Case::new(&cluster, "again").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    let ungates = |name: &str, action| {
        let path = format!("/api/v1/namespaces/{}/pods/{name}", case.namespace);
        let is_ungate =
            move |method: &Method, uri: &Uri| *method == Method::PATCH && uri.path() == path;
        proxy.rule(is_ungate, action)
    };

    let busy = ungates("busy", Action::Answer(StatusCode::TOO_MANY_REQUESTS, ""));
    let pod = held(&case, "busy").create(&case.client).await?;
    busy.seen(2, SOON).await?;
    drop(busy);
    let pod = wait_bound(&case.client, &pod, SOON).await?;
    delete(&case.client, &pod, 0).await?;
    wait_gone(&case.client, &pod, SOON).await?;

    let late = ungates("late", Action::Hold);
    let pod = held(&case, "late").create(&case.client).await?;
    late.seen(1, SOON).await?;
    let note = json!({"metadata": {"annotations": {"example.com/note": "x"}}});
    let (params, note) = (PatchParams::default(), Patch::Merge(note));
    case.pods().patch("late", &params, &note).await?;
    late.release();
    wait_bound(&case.client, &pod, SOON).await?;
    case.end().await
}

#[tokio::test]
async fn ungating_that_arrives_after_a_takeover_gets_no_room_of_others() -> Result<()> {
    let cluster = open().await?;
    let frozen = Replica::start(&cluster, "frozen", &["queue: {mode: Always}"]).await?;
    let its_scheduler = frozen.scheduler(&cluster).await?;
    let case = Case::new(&cluster, "late-ungate").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    let holder = bound(&case.client, case.pod("holder").gpu_mem(CARD)).await?;
    let path = format!("/api/v1/namespaces/{}/pods/first", case.namespace);
    let is_ungate =
        move |method: &Method, uri: &Uri| *method == Method::PATCH && uri.path() == path;
    let ungate = frozen.proxy.rule(is_ungate, Action::Hold);
    let first = held(&case, "first").create(&case.client).await?;
    event(&case.client, &first, "GpuPodQueued").await?;
    delete(&case.client, &holder, 0).await?;
    ungate.seen(1, SOON).await?;
    its_scheduler.process.kill9();
    frozen.extender.process.stop()?;

    let successor = Replica::start(&cluster, "heir", &["queue: {mode: Always}"]).await?;
    let _scheduler = successor.scheduler(&cluster).await?;
    let urgent = held(&case, "urgent").priority_class("system-cluster-critical");
    let urgent = urgent.create(&case.client).await?;
    let urgent = wait_bound(&case.client, &urgent, LATE).await?;
    ungate.release();
    ungate.answered(1, SOON).await?;
    frozen.extender.process.cont()?;
    // It may be ungated now, and has its turn like others.
    case.check().await?;
    delete(&case.client, &urgent, 0).await?;
    wait_bound(&case.client, &first, SOON).await?;
    case.check().await?;
    case.end().await
}
