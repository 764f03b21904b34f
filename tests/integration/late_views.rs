//! kube-scheduler sees objects that the extender's watches do not show yet: a late view does not evict a second pod.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use axum::http::StatusCode;
use gpustow_api::names;
use gpustow_api::reserved::Reservation;
use gpustow_testkit::builders::{delete, set_containers, set_running};
use gpustow_testkit::{Action, Case, PodBuilder, Rule, eventually, wait_bound, wait_gone};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};

use crate::attack::account;
use crate::fault_rig::{Replica, clear, now, turn};
use crate::support::{SOON, bound};

const PODS: &str = "/api/v1/pods";
const NODES: &str = "/api/v1/nodes";
const GPUNODES: &str = "/apis/gpustow.dev/v1alpha1/gpunodes";
const DAY: Duration = Duration::from_secs(86_400);

/// From now on the replica hears of this resource so much later.
async fn delayed(replica: &Replica, path: &'static str, delay: Duration) -> Result<Rule> {
    let rule = replica.proxy.rule(
        move |method, uri| {
            let query = uri.query().unwrap_or_default();
            method.as_str() == "GET" && uri.path() == path && query.contains("watch=true")
        },
        Action::DelayReply(delay),
    );
    replica.proxy.cut_connections();
    rule.answered(1, SOON).await?;
    Ok(rule)
}

fn high(case: &Case, name: &str) -> PodBuilder {
    case.pod(name).priority_class("system-cluster-critical")
}

/// Two nodes of one GPU, each full with a pod of low priority.
async fn full(replica: &Replica, case: &Case) -> Result<[(String, Pod); 2]> {
    let mut full = Vec::new();
    for name in ["a", "b"] {
        case.node(name, &[10000]).create(&case.client).await?;
        let pod = case.pod(name).gpu_mem(10000).create(&case.client).await?;
        let node = case.node_name(name);
        replica.place(&pod, &node).await?;
        full.push((node, pod));
    }
    full.try_into().ok().context("two nodes")
}

async fn status(case: &Case, pod: &Pod, status: Value) -> Result<Pod> {
    let (name, patch) = (pod.name_any(), Patch::Merge(json!({ "status": status })));
    let params = PatchParams::default();
    Ok(case.pods().patch_status(&name, &params, &patch).await?)
}

/// The calls are ours, so that the watch can be as late as we like.
#[tokio::test]
async fn preempt_evicts_no_pod_while_an_offered_node_is_free_already() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "late-free", &[]).await?;
    let case = Case::new(turn.cluster, "late-free").await?;
    let [(a, on_a), (b, on_b)] = full(&replica, &case).await?;
    let late = delayed(&replica, PODS, DAY).await?;
    let pod = high(&case, "p").gpu_mem(10000).create(&case.client).await?;
    // Both nodes are full: one pod may end.
    assert_eq!(replica.preempt(&pod, &b, &[&on_b]).await?, 1);

    delete(&case.client, &on_a, 0).await?;
    wait_gone(&case.client, &on_a, SOON).await?;
    replica.refuses(&pod, &a).await?;
    assert_eq!(replica.preempt(&pod, &b, &[&on_b]).await?, 0);
    // The ledger has learnt it, long before its watch shows it.
    replica.place(&pod, &a).await?;

    drop(late);
    replica.proxy.cut_connections();
    replica.settled(&case).await?;
    clear(&case).await?;
    case.end().await
}

/// A slow API server delays a preemption by two answers, not by one for each pod that is gone.
#[tokio::test]
async fn preempt_reads_all_pods_again_at_the_same_time_that_a_late_watch_still_shows() -> Result<()>
{
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "late-many", &[]).await?;
    let case = Case::new(turn.cluster, "late-many").await?;
    case.node("n", &[8000]).create(&case.client).await?;
    let node = case.node_name("n");
    let mut pods = Vec::new();
    for index in 0..8 {
        let pod = case.pod(&format!("p{index}")).gpu_mem(1000);
        let pod = pod.create(&case.client).await?;
        replica.place(&pod, &node).await?;
        pods.push(pod);
    }
    let late = delayed(&replica, PODS, DAY).await?;
    let pod = high(&case, "p").gpu_mem(8000).create(&case.client).await?;
    for gone in &pods {
        delete(&case.client, gone, 0).await?;
        wait_gone(&case.client, gone, SOON).await?;
    }
    replica.refuses(&pod, &node).await?;
    let path = format!("/api/v1/namespaces/{}/pods/", case.namespace);
    let reads = replica.proxy.rule(
        move |method, uri| method.as_str() == "GET" && uri.path().starts_with(&path),
        Action::Hold,
    );
    let all = async {
        let seen = reads.seen(pods.len(), SOON).await;
        reads.release();
        seen
    };
    let victims = [&pods[0]];
    let (victims, seen) = tokio::join!(replica.preempt(&pod, &node, &victims), all);
    seen?;
    assert_eq!(victims?, 0);
    replica.place(&pod, &node).await?;
    drop(late);
    replica.proxy.cut_connections();
    replica.settled(&case).await?;
    clear(&case).await?;
    case.end().await
}

/// kube-scheduler offers the node as soon as the sum suffices, while an added victim terminates.
#[tokio::test]
async fn preempt_evicts_no_pod_while_earlier_victims_terminate() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "late-ends", &[]).await?;
    let case = Case::new(turn.cluster, "late-ends").await?;
    let [(a, on_a), (b, on_b)] = full(&replica, &case).await?;
    set_running(&case.client, &on_a).await?;
    delete(&case.client, &on_a, 600).await?;
    let pod = high(&case, "p").gpu_mem(10000).create(&case.client).await?;

    // Not nominated there, it may have others end.
    replica.refuses(&pod, &a).await?;
    assert_eq!(replica.preempt(&pod, &b, &[&on_b]).await?, 1);
    let pod = status(&case, &pod, json!({ "nominatedNodeName": a })).await?;
    replica.refuses(&pod, &a).await?;
    assert_eq!(replica.preempt(&pod, &b, &[&on_b]).await?, 0);

    let ended = json!({ "terminated": { "exitCode": 0 } });
    set_containers(&case.client, &on_a, "Running", ended).await?;
    replica.place(&now(&case, &pod).await?, &a).await?;
    clear(&case).await?;
    case.end().await
}

/// A predecessor refused the node, and this one decides from the next call on.
#[tokio::test]
async fn preempt_after_a_takeover_asks_about_the_nominated_node() -> Result<()> {
    let turn = turn().await?;
    let first = Replica::start(turn.cluster, "late-first", &[]).await?;
    let case = Case::new(turn.cluster, "late-takeover").await?;
    let [(a, on_a), (b, on_b)] = full(&first, &case).await?;
    let late = delayed(&first, PODS, DAY).await?;
    delete(&case.client, &on_a, 0).await?;
    wait_gone(&case.client, &on_a, SOON).await?;
    let pod = high(&case, "p").gpu_mem(10000).create(&case.client).await?;
    let pod = status(&case, &pod, json!({ "nominatedNodeName": a })).await?;
    first.refuses(&pod, &a).await?;
    let second = Replica::start(turn.cluster, "late-second", &[]).await?;
    assert_eq!(second.preempt(&pod, &b, &[&on_b]).await?, 0);
    drop(late);
    clear(&case).await?;
    case.end().await
}

/// The replica was frozen, for example, and does not know yet that another decides.
#[tokio::test]
async fn preempt_of_a_replica_that_was_relieved_evicts_no_pod() -> Result<()> {
    let turn = turn().await?;
    let first = Replica::start(turn.cluster, "late-relieved", &[]).await?;
    let case = Case::new(turn.cluster, "late-relieved").await?;
    let [_, (b, on_b)] = full(&first, &case).await?;
    let pod = high(&case, "p").gpu_mem(10000).create(&case.client).await?;
    assert_eq!(first.preempt(&pod, &b, &[&on_b]).await?, 1);
    let second = Replica::start(turn.cluster, "late-decides", &[]).await?;
    assert_eq!(second.preempt(&pod, &b, &[&on_b]).await?, 1);
    assert_eq!(first.preempt(&pod, &b, &[&on_b]).await?, 0);
    clear(&case).await?;
    case.end().await
}

/// A new node: kube-scheduler knows its sum, the extender not yet its GPUs.
#[tokio::test]
async fn preempt_evicts_no_pod_while_a_report_is_on_its_way() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "late-report", &[]).await?;
    let case = Case::new(turn.cluster, "late-report").await?;
    let [_, (b, on_b)] = full(&replica, &case).await?;
    let late = delayed(&replica, GPUNODES, DAY).await?;
    case.node("new", &[10000]).create(&case.client).await?;
    let new = case.node_name("new");
    let pod = high(&case, "p").gpu_mem(10000).create(&case.client).await?;
    replica.refuses(&pod, &new).await?;
    assert_eq!(replica.preempt(&pod, &b, &[&on_b]).await?, 0);
    replica.place(&pod, &new).await?;
    drop(late);
    clear(&case).await?;
    case.end().await
}

/// With kube-scheduler, each watch late on its own: of two pods that could go, one goes.
#[tokio::test]
async fn one_node_loses_pods_per_preemptor_however_late_a_watch_is() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "late-one", &[]).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    for (round, (path, millis)) in [
        (PODS, 200),
        (PODS, 200),
        (PODS, 1000),
        (PODS, 10_000),
        (NODES, 10_000),
        (GPUNODES, 10_000),
    ]
    .into_iter()
    .enumerate()
    {
        let case = Case::new(turn.cluster, &format!("late-one{round}")).await?;
        case.node("a", &[10000]).create(&case.client).await?;
        case.node("b", &[10000]).create(&case.client).await?;
        let low = [
            bound(&case.client, case.pod("low-0").gpu_mem(10000)).await?,
            bound(&case.client, case.pod("low-1").gpu_mem(10000)).await?,
        ];
        let late = delayed(&replica, path, Duration::from_millis(millis)).await?;
        let pod = high(&case, "high").gpu_mem(10000);
        let pod = pod.create(&case.client).await?;
        wait_bound(&case.client, &pod, 2 * SOON).await?;
        let mut left = 0;
        for pod in &low {
            let pod = case.pods().get_opt(&pod.name_any()).await?;
            left += usize::from(pod.is_some_and(|it| it.metadata.deletion_timestamp.is_none()));
        }
        ensure!(
            left == 1,
            "{path} late by {millis} ms: {left} of two pods are left"
        );
        drop(late);
        replica.proxy.cut_connections();
        eventually(2 * SOON, "the ledger agrees", async || {
            replica.settled(&case).await
        })
        .await?;
        clear(&case).await?;
        case.end().await?;
    }
    Ok(())
}

/// An earlier extender left a condition on the pod: this one ends it, and hears of that much later.
#[tokio::test]
async fn condition_is_ended_once_while_the_watch_is_late() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "late-ended", &["preempt: {after: 0s}"]).await?;
    let case = Case::new(turn.cluster, "late-ended").await?;
    case.node("n", &[10000]).create(&case.client).await?;
    let pod = case.pod("p").gpu_mem(20000).create(&case.client).await?;
    // Its first call has the extender decide.
    replica.refuses(&pod, &case.node_name("n")).await?;
    let status_of_pod = format!("/api/v1/namespaces/{}/pods/p/status", case.namespace);
    let writes = |action| {
        let path = status_of_pod.clone();
        replica.proxy.rule(
            move |method, uri| method.as_str() == "PATCH" && uri.path() == path,
            action,
        )
    };
    let failing = writes(Action::Answer(StatusCode::INTERNAL_SERVER_ERROR, ""));
    let kept = json!([{
        "type": names::RESERVED_CONDITION, "status": "True", "reason": "Preempting",
        "message": "Reserved on node n",
    }]);
    let reserved = Reservation::new("n", BTreeMap::new(), Timestamp::now()).encode();
    let left = json!({
        "metadata": { "annotations": { names::RESERVATION: reserved } },
        "status": { "conditions": kept },
    });
    let former = account(turn.cluster, names::NAMESPACE, names::SCHEDULER).await?;
    let former = Api::<Pod>::namespaced(former, &case.namespace);
    let (params, left) = (PatchParams::default(), Patch::Merge(left));
    former.patch_status("p", &params, &left).await?;
    failing.seen(1, SOON).await?;
    let late = delayed(&replica, PODS, DAY).await?;
    let leases = replica.proxy.rule(
        |method, uri| method.as_str() == "GET" && uri.path().contains("/leases/"),
        Action::DelayReply(Duration::ZERO),
    );
    let written = writes(Action::DelayReply(Duration::ZERO));
    drop(failing);
    let ended = eventually(SOON, "the condition is ended", async || {
        let pod = now(&case, &pod).await?;
        let reserved = pod.annotations().contains_key(names::RESERVATION);
        ensure!(!reserved, "the reservation is still there");
        Ok(pod)
    })
    .await?;
    let writes = written.count();
    // Each look begins with one of these.
    leases.seen(leases.count() + 4, SOON).await?;
    // A replica that lost its connections may take the lead again and try once more, by a copy that is too old.
    let more = written.count() - writes;
    ensure!(more <= 1, "{more} more writes");
    assert_eq!(now(&case, &pod).await?, ended);
    drop((late, leases, written));
    clear(&case).await?;
    case.end().await
}
