//! Memory that pods use beyond their requests is reclaimed for a pod with a right to it. That pod waits, or runs with
//! them. Without that setting, pods are not touched.

use anyhow::{Context as _, Result, ensure};
use gpustow_api::gpunode::PodUse;
use gpustow_api::names;
use gpustow_testkit::builders::{delete, set_running};
use gpustow_testkit::{
    Action, Case, GpuNodeBuilder, eventually, wait_bound, wait_condition, wait_gone, wait_refused,
};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::DeleteParams;

use crate::fault_rig::{Replica, clear, now, on_eviction, turn};
use crate::fragmented::condition;
use crate::support::{SOON, event, event_saying};

const CARD: u64 = 9000;
const CALLED: &str = "GPU memory used above requests is being reclaimed";

/// The node's agent reports the usage of its card by these pods.
async fn uses(case: &Case, node: &GpuNodeBuilder, pods: &[(&Pod, u64)]) -> Result<()> {
    let used = pods.iter().map(|(pod, used_mib)| PodUse {
        uid: pod.uid().unwrap_or_default(),
        used_mib: *used_mib,
        ..PodUse::default()
    });
    let used: Vec<_> = used.collect();
    let node = node
        .clone()
        .with_status(|status| status.gpus[0].pods = used);
    node.report(&case.client).await
}

/// Waits until this condition of the pod has this status, and for its reason.
async fn says(case: &Case, pod: &Pod, of_type: &str, status: &str) -> Result<(String, String)> {
    let holds = |pod: Option<&Pod>| {
        let found = pod.and_then(|pod| condition(pod, of_type));
        found.is_some_and(|found| found.status == status)
    };
    let what = format!("{of_type} is {status}");
    let pod = wait_condition(&case.client, pod, &what, SOON, holds).await?;
    let found = condition(&pod, of_type).context("it was there")?;
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    Ok((text(&found.reason), text(&found.message)))
}

/// A pod that asks for so much, may use the whole card, and runs.
pub(crate) async fn borrower(case: &Case, name: &str, mib: u64) -> Result<Pod> {
    let pod = case.pod(name).gpu_mem(mib).label("app", name);
    let pod = pod.annotation(names::MEM_LIMIT, "max");
    let pod = pod.create(&case.client).await?;
    let pod = wait_bound(&case.client, &pod, SOON).await?;
    set_running(&case.client, &pod).await
}

/// Its deletion is under way or done.
async fn is_evicted(case: &Case, pod: &Pod) -> Result<bool> {
    let found = case.pods().get_opt(&pod.name_any()).await?;
    Ok(found.is_none_or(|found| found.metadata.deletion_timestamp.is_some()))
}

#[tokio::test]
async fn what_is_lent_is_asked_back_and_the_pod_is_bound_when_it_came() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "asks", &["reclaim: {action: Event}"]).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "lent").await?;
    let node = case.node("n", &[CARD]);
    node.create(&case.client).await?;
    let greedy = borrower(&case, "greedy", 2000).await?;
    let within = borrower(&case, "within", 1000).await?;
    uses(&case, &node, &[(&greedy, 7500), (&within, 1000)]).await?;

    let waits = case.pod("waits").gpu_mem(6000).create(&case.client).await?;
    wait_refused(&case.client, &waits, CALLED, SOON).await?;
    let (reason, message) = says(&case, &greedy, names::RECLAIM_CONDITION, "True").await?;
    assert_eq!(reason, "Event");
    for part in ["7500 MiB", "2000 MiB", "no limit", "waits", "6000 MiB"] {
        ensure!(message.contains(part), "{part} is missing: {message}");
    }
    let told = event(&case.client, &greedy, "GpuPodDisrupted").await?;
    ensure!(told.contains("7500 MiB"), "{told}");
    let (reason, kept) = says(&case, &waits, names::RESERVED_CONDITION, "True").await?;
    assert_eq!(reason, "Reclaiming");
    ensure!(
        kept.contains(&format!(
            "Reclaiming memory from {}/greedy.",
            case.namespace
        )),
        "{kept}"
    );
    event(&case.client, &waits, "GpuMemoryReserved").await?;
    assert!(condition(&now(&case, &within).await?, names::RECLAIM_CONDITION).is_none());

    uses(&case, &node, &[(&greedy, 2000), (&within, 1000)]).await?;
    wait_bound(&case.client, &waits, SOON).await?;
    says(&case, &greedy, names::RECLAIM_CONDITION, "False").await?;
    says(&case, &waits, names::RESERVED_CONDITION, "False").await?;
    let metrics = replica.extender.metrics().await?;
    ensure!(metrics.contains(
        "gpustow_disruptions_total{action=\"event\",cause=\"reclaim\",outcome=\"done\"} 1"
    ));
    replica.settled(&case).await?;
    case.end().await
}

#[tokio::test]
async fn what_a_neighbour_has_a_right_to_is_asked_back_before_it_wants_it() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "short", &["reclaim: {action: Event}"]).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "short").await?;
    let node = case.node("n", &[CARD]);
    node.create(&case.client).await?;
    let greedy = borrower(&case, "greedy", 2000).await?;
    let quiet = borrower(&case, "quiet", 4000).await?;
    uses(&case, &node, &[(&greedy, 7000), (&quiet, 500)]).await?;

    let (reason, message) = says(&case, &greedy, names::RECLAIM_CONDITION, "True").await?;
    assert_eq!(reason, "Event");
    for part in ["7000 MiB", "2000 MiB", "quiet", "4000 MiB"] {
        ensure!(message.contains(part), "{part} is missing: {message}");
    }
    event(&case.client, &greedy, "GpuPodDisrupted").await?;
    let from = format!("{}/greedy", case.namespace);
    event_saying(&case.client, &quiet, "GpuMemoryReserved", &from).await?;
    let metrics = replica.extender.metrics().await?;
    ensure!(
        metrics.contains("gpustow_gpus_under_pressure 1\n"),
        "{metrics}"
    );
    // Now both fit together, and greedy borrows still.
    uses(&case, &node, &[(&greedy, 5000), (&quiet, 500)]).await?;
    says(&case, &greedy, names::RECLAIM_CONDITION, "False").await?;
    assert!(condition(&now(&case, &quiet).await?, names::RECLAIM_CONDITION).is_none());
    let metrics = replica.extender.metrics().await?;
    ensure!(metrics.contains(
        "gpustow_disruptions_total{action=\"event\",cause=\"pressure\",outcome=\"done\"} 1\n"
    ));
    ensure!(
        metrics.contains("gpustow_gpus_under_pressure 0\n"),
        "{metrics}"
    );
    case.end().await
}

#[tokio::test]
async fn reclaim_names_the_next_pod_that_needs_the_memory_once_the_first_is_gone() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "names", &["reclaim: {action: Event}"]).await?;
    let case = Case::new(turn.cluster, "names").await?;
    let node = case.node("n", &[CARD]);
    node.create(&case.client).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    let greedy = borrower(&case, "greedy", 1000).await?;
    let first = borrower(&case, "first", 2000).await?;
    borrower(&case, "second", 1000).await?;
    uses(&case, &node, &[(&greedy, 8500)]).await?;
    let is_named = async |pod: &str| -> Result<()> {
        let holds = |found: Option<&Pod>| {
            let found = found.and_then(|found| condition(found, names::RECLAIM_CONDITION));
            let text = found.and_then(|it| it.message.clone()).unwrap_or_default();
            text.contains(&format!("Pod {}/{pod} requested", case.namespace))
        };
        let what = format!("its condition names {pod}");
        wait_condition(&case.client, &greedy, &what, SOON, holds).await?;
        Ok(())
    };
    is_named("first").await?;
    delete(&case.client, &first, 0).await?;
    is_named("second").await?;
    clear(&case).await?;
    case.end().await
}

#[tokio::test]
async fn a_pod_that_takes_a_neighbours_room_is_evicted_as_its_budget_allows_and_no_other_is()
-> Result<()> {
    let turn = turn().await?;
    let args = ["reclaim: {action: Evict}"];
    let replica = Replica::start(turn.cluster, "protects", &args).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "protect").await?;
    let node = case.node("n", &[CARD]);
    node.create(&case.client).await?;
    let greedy = borrower(&case, "greedy", 2000).await?;
    let little = borrower(&case, "little", 1000).await?;
    let quiet = borrower(&case, "quiet", 4000).await?;
    let budgets = case.budget("greedy", ("minAvailable", 1)).await?;
    let all = [(&greedy, 5000), (&little, 1200), (&quiet, 500)];
    uses(&case, &node, &all).await?;

    event(&case.client, &greedy, "GpuDisruptionRefused").await?;
    event(&case.client, &quiet, "GpuDisruptionRefused").await?;
    assert!(!is_evicted(&case, &greedy).await?);
    assert!(condition(&now(&case, &little).await?, names::RECLAIM_CONDITION).is_none());
    budgets.delete("greedy", &DeleteParams::default()).await?;
    wait_gone(&case.client, &greedy, SOON).await?;
    uses(&case, &node, &[(&little, 1200), (&quiet, 500)]).await?;
    eventually(SOON, "nothing is short", async || {
        let metrics = replica.extender.metrics().await?;
        ensure!(
            metrics.contains("gpustow_gpus_under_pressure 0\n"),
            "{metrics}"
        );
        Ok(())
    })
    .await?;
    for pod in [&little, &quiet] {
        assert!(!is_evicted(&case, pod).await?);
        assert!(condition(&now(&case, pod).await?, names::RECLAIM_CONDITION).is_none());
    }
    case.end().await
}

#[tokio::test]
async fn a_pod_that_stays_over_its_limit_is_asked_though_no_other_wants_it_and_not_if_none_watches()
-> Result<()> {
    let turn = turn().await?;
    let args = ["reclaim: {action: Event, overLimitAfter: 500ms}"];
    let replica = Replica::start(turn.cluster, "over", &args).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "over").await?;
    let node = case.node("n", &[CARD]);
    node.create(&case.client).await?;
    let starts = async |name: &str, enforce: &str| {
        let pod = case.pod(name).gpu_mem(1500);
        let pod = pod.annotation(names::MEM_LIMIT, "2000");
        let pod = pod.annotation(names::ENFORCE, enforce);
        wait_bound(&case.client, &pod.create(&case.client).await?, SOON).await
    };
    let over = starts("over", "watch").await?;
    let free = starts("free", "none").await?;
    let within = starts("within", "watch").await?;
    // Each report repeats it, as an agent's does.
    eventually(SOON, "it is asked", async || {
        // A hundredth more than the limit is no offence.
        let all = [(&over, 2021), (&free, 2021), (&within, 2020)];
        uses(&case, &node, &all).await?;
        let over = now(&case, &over).await?;
        let asked = condition(&over, names::RECLAIM_CONDITION).context("no condition")?;
        let said = asked.message.clone().unwrap_or_default();
        ensure!(
            asked.status == "True" && said.contains("Over its limit for more than 500 ms"),
            "{said}"
        );
        Ok(())
    })
    .await?;
    event(&case.client, &over, "GpuPodDisrupted").await?;
    for pod in [&free, &within] {
        assert!(condition(&now(&case, pod).await?, names::RECLAIM_CONDITION).is_none());
    }
    uses(
        &case,
        &node,
        &[(&over, 2000), (&free, 2021), (&within, 2020)],
    )
    .await?;
    says(&case, &over, names::RECLAIM_CONDITION, "False").await?;
    case.end().await
}

#[tokio::test]
async fn no_pod_is_touched_unless_the_operator_wants_it() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "off", &[]).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "off").await?;
    let node = case.node("n", &[CARD]);
    node.create(&case.client).await?;
    let greedy = borrower(&case, "greedy", 2000).await?;
    uses(&case, &node, &[(&greedy, 8000)]).await?;
    let waits = case.pod("waits").gpu_mem(6000).create(&case.client).await?;
    wait_refused(&case.client, &waits, "not enough free memory", SOON).await?;
    event(&case.client, &waits, "GpuMemoryUnavailable").await?;
    assert!(condition(&now(&case, &greedy).await?, names::RECLAIM_CONDITION).is_none());
    assert!(condition(&now(&case, &waits).await?, names::RESERVED_CONDITION).is_none());
    case.end().await
}

#[tokio::test]
async fn an_eviction_that_a_budget_refuses_is_shown_and_tried_again() -> Result<()> {
    let turn = turn().await?;
    let args = ["reclaim: {action: Evict}"];
    let replica = Replica::start(turn.cluster, "evicts", &args).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "evict").await?;
    let node = case.node("n", &[CARD]);
    node.create(&case.client).await?;
    let greedy = borrower(&case, "greedy", 2000).await?;
    let budgets = case.budget("greedy", ("minAvailable", 1)).await?;
    uses(&case, &node, &[(&greedy, 8000)]).await?;

    let waits = case.pod("waits").gpu_mem(6000).create(&case.client).await?;
    let refused = event(&case.client, &greedy, "GpuDisruptionRefused").await?;
    ensure!(refused.contains("disruption budget"), "{refused}");
    event(&case.client, &waits, "GpuDisruptionRefused").await?;
    assert!(!is_evicted(&case, &greedy).await?);

    budgets.delete("greedy", &DeleteParams::default()).await?;
    wait_gone(&case.client, &greedy, SOON).await?;
    uses(&case, &node, &[]).await?;
    wait_bound(&case.client, &waits, SOON).await?;
    replica.settled(&case).await?;
    case.end().await
}

#[tokio::test]
async fn a_pods_owner_softens_what_is_done() -> Result<()> {
    let turn = turn().await?;
    let args = ["reclaim: {action: Evict}"];
    let replica = Replica::start(turn.cluster, "softens", &args).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "soft").await?;
    let node = case.node("n", &[CARD]);
    node.create(&case.client).await?;
    let wrong = case
        .pod("wrong")
        .gpu_mem(1)
        .annotation(names::RECLAIM_ACTION, "shoot");
    let refused = wrong.create(&case.client).await.err();
    let refused = format!("{:#}", refused.context("taken")?);
    ensure!(
        refused.contains("is none of Event, KillProcess, Evict"),
        "{refused}"
    );
    let soft = case
        .pod("soft")
        .gpu_mem(2000)
        .annotation(names::RECLAIM_ACTION, "Event");
    let soft = wait_bound(&case.client, &soft.create(&case.client).await?, SOON).await?;
    uses(&case, &node, &[(&soft, 8000)]).await?;
    let waits = case.pod("waits").gpu_mem(6000).create(&case.client).await?;
    let (reason, _) = says(&case, &soft, names::RECLAIM_CONDITION, "True").await?;
    assert_eq!(reason, "Event");
    eventually(SOON, "it is told, and nothing else", async || {
        let metrics = replica.extender.metrics().await?;
        let counted = |act: &str, count: u64| {
            let series = format!(
                "gpustow_disruptions_total{{action=\"{act}\",cause=\"reclaim\",outcome=\"done\"}} {count}\n"
            );
            metrics.contains(&series)
        };
        ensure!(counted("event", 1) && counted("evict", 0), "{metrics}");
        Ok(())
    })
    .await?;
    assert!(!is_evicted(&case, &soft).await?);
    // It gives back in time.
    uses(&case, &node, &[(&soft, 2000)]).await?;
    wait_bound(&case.client, &waits, SOON).await?;
    assert!(!is_evicted(&case, &soft).await?);
    replica.settled(&case).await?;
    case.end().await
}

#[tokio::test]
async fn an_eviction_that_arrives_after_a_takeover_fails() -> Result<()> {
    let turn = turn().await?;
    let case = Case::new(turn.cluster, "thawed").await?;
    let node = case.node("n", &[CARD]);
    node.create(&case.client).await?;
    let args = ["reclaim: {action: Evict}"];
    let frozen = Replica::start(turn.cluster, "icy", &args).await?;
    let scheduler = frozen.scheduler(turn.cluster).await?;
    let greedy = borrower(&case, "greedy", 2000).await?;
    let late = on_eviction(&frozen, 0, Action::Hold);
    uses(&case, &node, &[(&greedy, 8000)]).await?;
    let waits = case.pod("waits").gpu_mem(6000).create(&case.client).await?;
    late.seen(1, SOON).await?;
    scheduler.process.kill9();
    frozen.extender.process.stop()?;

    let successor = Replica::start(turn.cluster, "heir", &["reclaim: {action: Event}"]).await?;
    let small = case.pod("small").gpu_mem(1000).create(&case.client).await?;
    successor.place(&small, &case.node_name("n")).await?;
    eventually(SOON, "the successor wrote into the victim", async || {
        let greedy = now(&case, &greedy).await?;
        let asked = condition(&greedy, names::RECLAIM_CONDITION).context("no condition")?;
        let message = asked.message.clone().unwrap_or_default();
        ensure!(message.contains("heir continues"), "{message}");
        Ok(())
    })
    .await?;
    frozen
        .thaws(&late, &waits, &case.node_name("n"), "heir")
        .await?;
    assert!(!is_evicted(&case, &greedy).await?);
    clear(&case).await?;
    case.end().await
}

#[tokio::test]
async fn a_successor_goes_on_between_two_victims_and_evicts_no_other_pod() -> Result<()> {
    let turn = turn().await?;
    let case = Case::new(turn.cluster, "between").await?;
    let node = case.node("n", &[CARD]);
    node.create(&case.client).await?;
    let args = ["reclaim: {action: Evict}"];
    let killed = Replica::start(turn.cluster, "killed", &args).await?;
    let scheduler = killed.scheduler(turn.cluster).await?;
    let one = borrower(&case, "one", 1000).await?;
    let two = borrower(&case, "two", 1000).await?;
    let spared = borrower(&case, "spared", 1000).await?;
    let second = on_eviction(&killed, 1, Action::Hold);
    uses(&case, &node, &[(&one, 3400), (&two, 3400), (&spared, 1100)]).await?;
    let waits = case.pod("waits").gpu_mem(5700).create(&case.client).await?;
    second.seen(1, SOON).await?;
    scheduler.process.kill9();
    killed.extender.process.kill9();
    drop(killed);

    let successor = Replica::start(turn.cluster, "goes-on", &args).await?;
    let _scheduler = successor.scheduler(turn.cluster).await?;
    // The agent reports that the pod that was evicted first is gone.
    let left = match is_evicted(&case, &one).await? {
        true => &two,
        false => &one,
    };
    uses(&case, &node, &[(left, 3400), (&spared, 1100)]).await?;
    wait_gone(&case.client, left, SOON).await?;
    assert!(is_evicted(&case, &one).await? && is_evicted(&case, &two).await?);
    uses(&case, &node, &[(&spared, 1100)]).await?;
    wait_bound(&case.client, &waits, SOON).await?;
    assert!(!is_evicted(&case, &spared).await?);
    assert!(condition(&now(&case, &spared).await?, names::RECLAIM_CONDITION).is_none());
    successor.settled(&case).await?;
    case.end().await
}
