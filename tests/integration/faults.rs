//! Faults between filter and bound: processes, connections, the API server.

use std::time::Duration;

use anyhow::{Result, ensure};
use gpustow_testkit::builders::delete;
use gpustow_testkit::{Action, Case, Rule, eventually, wait_bound, wait_pods, wait_refused};
use k8s_openapi::api::core::v1::Pod;

use crate::fault_rig::{Replica, clear, control_plane, now, turn};
use crate::support::{SOON, assignment, node_of, rounds};

const CARD: u64 = 8192;

/// A pod that wants a card of its own.
async fn asking(case: &Case, name: &str) -> Result<Pod> {
    case.pod(name).gpu_mem(CARD).create(&case.client).await
}

fn count_bound(pods: &[Pod]) -> usize {
    pods.iter().filter(|pod| !node_of(pod).is_empty()).count()
}

#[tokio::test]
async fn killed_between_filter_and_bind_the_pod_is_bound_by_the_next_life() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "between", &[]).await?;
    let case = Case::new(turn.cluster, "between").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    let n = case.node_name("n");
    for round in 0..rounds()? {
        let pod = asking(&case, &format!("p{round}")).await?;
        let late = asking(&case, &format!("q{round}")).await?;
        replica.until_fits(&pod, &n).await?;
        replica.restart().await?;
        replica.bind(&pod, &n).await?;
        let refused = replica.filter(&late, &n).await;
        assert!(refused.is_err(), "the same card twice");
        replica.settled(&case).await?;
        clear(&case).await?;
    }
    case.end().await
}

#[tokio::test]
async fn killed_during_the_post_its_late_arrival_takes_nothing() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "during", &[]).await?;
    let case = Case::new(turn.cluster, "during").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    let n = case.node_name("n");
    for round in 0..rounds()? {
        let late = asking(&case, &format!("p{round}")).await?;
        let other = asking(&case, &format!("q{round}")).await?;
        replica.until_fits(&late, &n).await?;
        let rule = replica.on_first_bind(&late, Action::Hold)?;
        let next_life = async {
            rule.seen(1, SOON).await?;
            replica.restart().await?;
            replica.place(&other, &n).await?;
            rule.release();
            rule.answered(1, SOON).await
        };
        let (bind, next_life) = tokio::join!(replica.bind(&late, &n), next_life);
        next_life?;
        assert!(bind.is_err());
        assert_eq!(node_of(&now(&case, &late).await?), "");
        replica.settled(&case).await?;
        clear(&case).await?;
    }
    case.end().await
}

#[tokio::test]
async fn killed_after_the_post_the_next_life_counts_the_pod() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "after", &[]).await?;
    let case = Case::new(turn.cluster, "after").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    let n = case.node_name("n");
    for round in 0..rounds()? {
        let pod = asking(&case, &format!("p{round}")).await?;
        let late = asking(&case, &format!("q{round}")).await?;
        replica.until_fits(&pod, &n).await?;
        // The API server has answered, and the answer is lost.
        let never = Duration::from_secs(3600);
        let rule = replica.on_first_bind(&pod, Action::DelayReply(never))?;
        let next_life = async {
            rule.answered(1, SOON).await?;
            replica.restart().await
        };
        let (bind, next_life) = tokio::join!(replica.bind(&pod, &n), next_life);
        next_life?;
        assert!(bind.is_err());
        // kube-scheduler asks again.
        replica.bind(&pod, &n).await?;
        let refused = replica.filter(&late, &n).await;
        assert!(refused.is_err(), "the same card twice");
        replica.settled(&case).await?;
        clear(&case).await?;
    }
    case.end().await
}

#[tokio::test]
async fn killed_at_any_moment_under_kube_scheduler_all_pods_are_bound_once() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "mortal", &[]).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "mortal").await?;
    for node in ["n", "m"] {
        case.node(node, &[CARD; 4]).create(&case.client).await?;
    }
    let exactly_all = 16;
    for round in 0..rounds()? {
        for i in 0..exactly_all {
            let pod = case.pod(&format!("p{round}-{i}")).gpu_mem(CARD / 2);
            pod.create(&case.client).await?;
        }
        let before = round % exactly_all;
        let reached = |pods: &[Pod]| count_bound(pods) >= before;
        wait_pods(&case.client, &case.namespace, "it is time", SOON, reached).await?;
        replica.restart().await?;
        let bound = |pods: &[Pod]| count_bound(pods) == exactly_all;
        wait_pods(&case.client, &case.namespace, "all are bound", SOON, bound).await?;
        replica.settled(&case).await?;
        clear(&case).await?;
    }
    case.end().await
}

/// One bind through kube-scheduler with a fault in its first POST, which must cost nothing.
async fn bound_despite(fault: Action, sent: impl AsyncFn(&Rule) -> Result<()>) -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "despite", &[]).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "despite").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    for round in 0..rounds()? {
        let pod = case.pod(&format!("p{round}")).gpu_mem(CARD);
        let rule = replica.on_first_bind(&pod.clone().build(), fault)?;
        let pod = pod.create(&case.client).await?;
        let bound = wait_bound(&case.client, &pod, SOON).await?;
        sent(&rule).await?;
        assert_eq!(assignment(&bound)?.charges.len(), 1);
        replica.settled(&case).await?;
        case.check().await?;
        let metrics = replica.extender.metrics().await?;
        let mut failures = metrics
            .lines()
            .filter(|line| line.starts_with("gpustow_bind_failures_total{"));
        ensure!(
            failures.all(|line| line.ends_with(" 0")),
            "a bind was answered with an error"
        );
        clear(&case).await?;
    }
    case.end().await
}

#[tokio::test]
async fn the_reply_of_a_bind_is_lost() -> Result<()> {
    bound_despite(Action::DropReply, async |rule| rule.answered(1, SOON).await).await
}

#[tokio::test]
async fn the_post_of_a_bind_never_arrives() -> Result<()> {
    bound_despite(Action::Cut, async |rule| rule.seen(1, SOON).await).await
}

#[tokio::test]
async fn pods_without_gpu_memory_do_not_notice_that_the_extender_is_down() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "down", &[]).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "down").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    replica.extender.process.kill9();
    let asks = case.pod("asks").gpu_mem(CARD).create(&case.client).await?;
    for i in 0..20 {
        let plain = case.pod(&format!("plain{i}")).create(&case.client).await?;
        wait_bound(&case.client, &plain, SOON).await?;
    }
    assert_eq!(node_of(&now(&case, &asks).await?), "");
    replica.restart().await?;
    wait_bound(&case.client, &asks, SOON).await?;
    replica.settled(&case).await?;
    case.end().await
}

#[tokio::test]
async fn an_extender_that_was_killed_wakes_who_waited_before() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "waker", &[]).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "waker").await?;
    let node = case.node("n", &[CARD, CARD]);
    node.create(&case.client).await?;
    for name in ["a", "b"] {
        let pod = case
            .pod(name)
            .gpu_mem(CARD / 2 + 1)
            .create(&case.client)
            .await?;
        wait_bound(&case.client, &pod, SOON).await?;
    }
    // The node's sum suffices: only the extender refuses the pod, and only it can notice that a card has grown.
    let waits = case
        .pod("waits")
        .gpu_mem(CARD / 2)
        .create(&case.client)
        .await?;
    wait_refused(&case.client, &waits, "GPU", SOON).await?;
    replica.restart().await?;
    // Nothing has been asked of the new life when room appears.
    let node = node.with_status(|status| status.gpus[1].total_mib = 2 * CARD);
    node.report(&case.client).await?;
    wait_bound(&case.client, &waits, SOON).await?;
    replica.settled(&case).await?;
    case.end().await
}

#[tokio::test]
async fn the_api_server_stops_for_ten_seconds_under_load() -> Result<()> {
    let cluster = control_plane().await?;
    let replica = Replica::start(&cluster, "outage", &[]).await?;
    let _scheduler = replica.scheduler(&cluster).await?;
    let case = Case::new(&cluster, "outage").await?;
    for i in 0..4 {
        case.node(&format!("n{i}"), &[CARD; 4])
            .create(&case.client)
            .await?;
    }
    for i in 0..128 {
        case.pod(&format!("p{i}"))
            .gpu_mem(CARD / 8)
            .create(&case.client)
            .await?;
    }
    let some_bound = |pods: &[Pod]| count_bound(pods) > 0;
    let all_bound = |pods: &[Pod]| count_bound(pods) == pods.len();
    wait_pods(
        &case.client,
        &case.namespace,
        "some are bound",
        SOON,
        some_bound,
    )
    .await?;

    cluster.stop_api_server();
    // The fault lasts for a fixed time: there is no event to wait for.
    tokio::time::sleep(Duration::from_secs(10)).await;
    cluster.start_api_server().await?;
    // Ready, it still answers some requests with status 429.
    eventually(SOON, "the API server is up again", async || {
        case.check().await
    })
    .await?;
    // While the API server does not know the GpustowConfig as parameter of policies.
    case.pod("plain").create(&case.client).await?;

    let outage = 4 * SOON;
    wait_pods(
        &case.client,
        &case.namespace,
        "all are bound",
        outage,
        all_bound,
    )
    .await?;
    case.check().await?;
    replica.settled(&case).await?;
    // One more waits, and is woken as ever.
    let more = case
        .pod("more")
        .gpu_mem(CARD / 8)
        .create(&case.client)
        .await?;
    // kube-scheduler's own watch comes back with a backoff of up to half a minute.
    wait_refused(&case.client, &more, "", outage).await?;
    let first = case.pods().get("p0").await?;
    delete(&case.client, &first, 0).await?;
    wait_bound(&case.client, &more, SOON).await?;
    case.end().await
}
