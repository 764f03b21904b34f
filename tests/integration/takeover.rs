//! Who decides: a replica that was killed, frozen or relieved never gives a card away twice, however
//! late its last Binding arrives.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use axum::http::{Method, StatusCode, Uri};
use gpustow_api::names;
use gpustow_testkit::{Action, Case, eventually, wait_bound, wait_refused};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, PostParams};
use serde_json::json;
use tokio::time::{Instant, sleep_until};

use crate::fault_rig::{Replica, clear, control_plane, now, turn};
use crate::support::{SOON, SYSTEM, node_of, rounds};

const CARD: u64 = 8192;

fn error<T>(outcome: Result<T>) -> Result<String> {
    Ok(format!("{:#}", outcome.err().context("that should fail")?))
}

#[tokio::test]
async fn a_binding_that_arrives_after_a_takeover_fails() -> Result<()> {
    let turn = turn().await?;
    let mut first = Replica::start(turn.cluster, "first", &[]).await?;
    let mut second = Replica::start(turn.cluster, "second", &[]).await?;
    let case = Case::new(turn.cluster, "late").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    let n = case.node_name("n");
    for round in 0..rounds()? {
        let name = |what: &str| format!("{what}{round}");
        let late = case
            .pod(&name("late"))
            .gpu_mem(CARD)
            .create(&case.client)
            .await?;
        let other = case
            .pod(&name("other"))
            .gpu_mem(CARD)
            .create(&case.client)
            .await?;
        let takeover = async || {
            first.extender.process.kill9();
            second.place(&other, &n).await
        };
        first.bind_late(&case, &late, &n, takeover).await?;
        assert_eq!(node_of(&now(&case, &other).await?), n);
        second.settled(&case).await?;
        clear(&case).await?;
        first.restart().await?;
        std::mem::swap(&mut first, &mut second);
    }
    case.end().await
}

#[tokio::test]
async fn a_replica_that_thaws_gives_up_and_comes_back_when_its_successor_has_left() -> Result<()> {
    let turn = turn().await?;
    let frozen = Replica::start(turn.cluster, "frozen", &[]).await?;
    let successor = Replica::start(turn.cluster, "successor", &[]).await?;
    let case = Case::new(turn.cluster, "frozen").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    let n = case.node_name("n");
    for round in 0..rounds()? {
        let name = |what: &str| format!("{what}{round}");
        let loser = case
            .pod(&name("loser"))
            .gpu_mem(CARD)
            .create(&case.client)
            .await?;
        let winner = case
            .pod(&name("winner"))
            .gpu_mem(CARD)
            .create(&case.client)
            .await?;
        frozen.until_fits(&loser, &n).await?;
        frozen.extender.process.stop()?;
        successor.place(&winner, &n).await?;
        let newer = case
            .pod(&name("newer"))
            .gpu_mem(CARD)
            .create(&case.client)
            .await?;
        frozen.extender.process.cont()?;

        let told = error(frozen.bind(&loser, &n).await)?;
        assert!(told.contains("successor"), "{told}");
        // It relieved another replica less than a minute ago.
        let told = error(frozen.filter(&newer, &n).await)?;
        assert!(
            told.contains("successor") && told.contains("point both"),
            "{told}"
        );
        case.check().await?;

        successor.extender.process.term()?;
        successor.extender.process.wait_exit(SOON).await?;
        case.pods()
            .delete(&winner.name_any(), &DeleteParams::default())
            .await?;
        frozen.place(&newer, &n).await?;
        frozen.settled(&case).await?;
        clear(&case).await?;
        frozen.restart().await?;
        successor.restart().await?;
    }
    case.end().await
}

#[tokio::test]
async fn one_look_at_the_lease_answers_for_every_pod_known_before() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "looks", &[]).await?;
    let case = Case::new(turn.cluster, "looks").await?;
    case.node("n", &[3 * CARD]).create(&case.client).await?;
    let n = case.node_name("n");
    let create = async |name: &str| case.pod(name).gpu_mem(CARD).create(&case.client).await;
    let (first, second) = (create("first").await?, create("second").await?);
    replica.until_fits(&second, &n).await?;
    replica.place(&first, &n).await?;

    let lease = "/leases/gpustow-extender";
    let rule = replica.proxy.rule(
        move |method, uri| method.as_str() == "GET" && uri.path().ends_with(lease),
        Action::Hold,
    );
    replica.bind(&second, &n).await?;
    let third = create("third").await?;
    replica.until_fits(&third, &n).await?;
    let looked = async {
        rule.seen(1, SOON).await?;
        assert_eq!(node_of(&now(&case, &third).await?), "");
        rule.release();
        anyhow::Ok(())
    };
    let (bound, looked) = tokio::join!(replica.bind(&third, &n), looked);
    looked.and(bound)?;
    replica.settled(&case).await?;
    case.end().await
}

#[tokio::test]
async fn a_lease_that_is_deleted_is_taken_again() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "alone", &[]).await?;
    let case = Case::new(turn.cluster, "lease").await?;
    case.node("n", &[2 * CARD]).create(&case.client).await?;
    let n = case.node_name("n");
    let before = case
        .pod("before")
        .gpu_mem(CARD)
        .create(&case.client)
        .await?;
    replica.place(&before, &n).await?;
    let leases = Api::<Lease>::namespaced(case.client.clone(), SYSTEM);
    leases
        .delete("gpustow-extender", &DeleteParams::default())
        .await?;

    let after = case.pod("after").gpu_mem(CARD).create(&case.client).await?;
    replica.until_fits(&after, &n).await?;
    error(replica.bind(&after, &n).await)?;
    replica.place(&after, &n).await?;
    replica.settled(&case).await?;
    case.end().await
}

#[tokio::test]
async fn a_takeover_that_another_overtook_is_given_up() -> Result<()> {
    let turn = turn().await?;
    let case = Case::new(turn.cluster, "overtaken").await?;
    case.node("n", &[2 * CARD]).create(&case.client).await?;
    let n = case.node_name("n");
    for round in 0..rounds()? {
        let name = |what: &str| format!("{what}{round}");
        let pod = |what: &str| case.pod(&name(what)).gpu_mem(CARD);
        let own = pod("own").create(&case.client).await?;
        let other = pod("other").create(&case.client).await?;
        let slow = Replica::start(turn.cluster, &name("slow"), &[]).await?;
        let quick = Replica::start(turn.cluster, &name("quick"), &[]).await?;
        // It wins the Lease, and cannot list the pods that it has to fence.
        let unlisted = slow.proxy.rule(
            |method, uri| method.as_str() == "GET" && uri.to_string().contains("spec.nodeName"),
            Action::Answer(StatusCode::SERVICE_UNAVAILABLE, ""),
        );
        error(slow.filter(&own, &n).await)?;
        unlisted.seen(1, SOON).await?;
        quick.place(&other, &n).await?;
        drop(unlisted);

        let leader = name("quick");
        eventually(SOON, "it knows who decides", async || {
            let told = error(slow.filter(&own, &n).await)?;
            ensure!(told.contains(&leader), "{told}");
            Ok(())
        })
        .await?;
        assert_eq!(slow.takeovers().await?, 0);
        quick.place(&own, &n).await?;
        quick.settled(&case).await?;
        clear(&case).await?;
    }
    case.end().await
}

#[tokio::test]
async fn a_replica_that_was_relieved_wakes_the_pods_it_refused_once_more() -> Result<()> {
    let turn = turn().await?;
    let case = Case::new(turn.cluster, "asleep").await?;
    for name in ["n", "m"] {
        case.node(name, &[CARD]).create(&case.client).await?;
    }
    let (n, m) = (case.node_name("n"), case.node_name("m"));
    for round in 0..rounds()? {
        let name = |what: &str| format!("{what}{round}");
        let pod = |what: &str| case.pod(&name(what)).gpu_mem(CARD);
        let goes = pod("goes").create(&case.client).await?;
        let asleep = pod("asleep").create(&case.client).await?;
        let other = pod("other").create(&case.client).await?;
        let first = Replica::start(turn.cluster, &name("first"), &[]).await?;
        let second = Replica::start(turn.cluster, &name("second"), &[]).await?;
        first.place(&goes, &n).await?;
        first.refuses(&asleep, &n).await?;
        second.place(&other, &m).await?;
        // Only the first replica knows that a refused pod waits for room there.
        let pods = case.pods();
        pods.delete(&goes.name_any(), &DeleteParams::default())
            .await?;
        eventually(SOON, "it is woken", async || {
            let status = now(&case, &asleep).await?.status.unwrap_or_default();
            let mut all = status.conditions.into_iter().flatten();
            let woken = all.find(|it| it.type_ == names::AVAILABLE_CONDITION);
            let by = woken.and_then(|it| it.message).context("not woken")?;
            ensure!(by.contains(&name("first")), "{by}");
            Ok(())
        })
        .await?;
        second.settled(&case).await?;
        clear(&case).await?;
    }
    case.end().await
}

#[tokio::test]
async fn a_takeover_lists_no_pods_that_the_watch_has_shown() -> Result<()> {
    let turn = turn().await?;
    let first = Replica::start(turn.cluster, "lister", &[]).await?;
    let second = Replica::start(turn.cluster, "watcher", &[]).await?;
    let case = Case::new(turn.cluster, "shown").await?;
    case.node("n", &[CARD, CARD]).create(&case.client).await?;
    let n = case.node_name("n");
    let [held, next] = ["held", "next"].map(|name| case.pod(name).gpu_mem(CARD));
    let held = held.create(&case.client).await?;
    first.place(&held, &n).await?;
    second.settled(&case).await?;
    let next = next.create(&case.client).await?;
    let lists = |method: &Method, uri: &Uri| {
        let query = uri.query().unwrap_or_default();
        let whole = !query.contains("watch=true") && !query.contains("spec.nodeName");
        method == Method::GET && uri.path() == "/api/v1/pods" && whole
    };
    let unlisted = Action::Answer(StatusCode::INTERNAL_SERVER_ERROR, "");
    let lists = second.proxy.rule(lists, unlisted);
    first.extender.process.kill9();
    second.place(&next, &n).await?;
    assert_eq!(lists.count(), 0);
    second.settled(&case).await?;
    case.end().await
}

#[tokio::test]
async fn a_takeover_knows_what_the_watch_has_not_shown() -> Result<()> {
    let turn = turn().await?;
    let first = Replica::start(turn.cluster, "heard", &[]).await?;
    let second = Replica::start(turn.cluster, "deaf", &[]).await?;
    let case = Case::new(turn.cluster, "unshown").await?;
    case.node("n", &[CARD, CARD]).create(&case.client).await?;
    let n = case.node_name("n");
    let create = async |name: &str| case.pod(name).gpu_mem(CARD).create(&case.client).await;
    let held = create("held").await?;
    first.place(&held, &n).await?;
    second.settled(&case).await?;
    let deaf = second.proxy.on_pod_watch(Action::Hold);
    second.proxy.cut_connections();
    deaf.seen(1, SOON).await?;
    first.place(&create("unshown").await?, &n).await?;
    let other = create("other").await?;
    first.extender.process.kill9();
    let answers = async || second.ask(&other, &n).await;
    let answer = eventually(SOON, "the second decides", answers).await?;
    assert_eq!(answer["NodeNames"], json!([]));
    case.end().await
}

#[tokio::test]
async fn a_pair_takes_over_from_a_killed_one_whose_binding_is_still_under_way() -> Result<()> {
    // For longer than any client waits for an answer: a cluster of its own, so that no other case waits.
    let held = Duration::from_secs(60);
    let cluster = control_plane().await?;
    let case = Case::new(&cluster, "pair").await?;
    let mut high = PriorityClass::default();
    high.metadata.name = Some(case.namespace.clone());
    high.value = 1000;
    Api::all(case.client.clone())
        .create(&PostParams::default(), &high)
        .await?;
    case.node("n", &[CARD]).create(&case.client).await?;

    let killed = Replica::start(&cluster, "killed", &[]).await?;
    let its_scheduler = killed.scheduler(&cluster).await?;
    let late = case.pod("late").gpu_mem(CARD).build();
    let rule = killed.on_first_bind(&late, Action::Hold)?;
    let late = case.pods().create(&PostParams::default(), &late).await?;
    rule.seen(1, SOON).await?;
    let arrives = Instant::now() + held;
    its_scheduler.process.kill9();
    killed.extender.process.kill9();

    let urgent = case
        .pod("urgent")
        .gpu_mem(CARD)
        .priority_class(&case.namespace);
    let urgent = urgent.create(&case.client).await?;
    let successor = Replica::start(&cluster, "heir", &[]).await?;
    let _scheduler = successor.scheduler(&cluster).await?;
    wait_bound(&case.client, &urgent, SOON).await?;
    wait_refused(&case.client, &late, "", SOON).await?;
    sleep_until(arrives).await;
    assert_eq!(node_of(&now(&case, &late).await?), "");
    rule.release();
    rule.answered(1, SOON).await?;

    assert_eq!(node_of(&now(&case, &late).await?), "");
    case.check().await?;
    case.pods()
        .delete("urgent", &DeleteParams::default())
        .await?;
    wait_bound(&case.client, &late, SOON).await?;
    successor.settled(&case).await?;
    case.end().await
}

#[tokio::test]
async fn a_frozen_pair_thaws_beside_the_one_that_took_over() -> Result<()> {
    let turn = turn().await?;
    let case = Case::new(turn.cluster, "thaw").await?;
    case.node("n", &[CARD, CARD]).create(&case.client).await?;
    let create = async |name: &str| case.pod(name).gpu_mem(CARD / 4).create(&case.client).await;

    let frozen = Replica::start(turn.cluster, "icy", &["--retake-after=1"]).await?;
    let its_scheduler = frozen.scheduler(turn.cluster).await?;
    wait_bound(&case.client, &create("first").await?, SOON).await?;
    its_scheduler.process.stop()?;
    frozen.extender.process.stop()?;
    let mut pods = vec![create("while-frozen").await?];
    let other = Replica::start(turn.cluster, "warm", &["--retake-after=1"]).await?;
    let _scheduler = other.scheduler(turn.cluster).await?;
    wait_bound(&case.client, &pods[0], SOON).await?;
    for i in 0..3 {
        pods.push(create(&format!("new{i}")).await?);
    }
    frozen.extender.process.cont()?;
    its_scheduler.process.cont()?;
    for i in 0..3 {
        pods.push(create(&format!("newer{i}")).await?);
    }
    for pod in &pods {
        wait_bound(&case.client, pod, 2 * SOON).await?;
    }
    frozen.settled(&case).await?;
    other.settled(&case).await?;
    case.end().await
}
