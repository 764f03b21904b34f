//! Preemption for a pod that free memory is too fragmented for: pods that end, pods that stay, and the state after an
//! interruption.

use anyhow::{Context as _, Result, ensure};
use axum::http::{Method, StatusCode, Uri};
use gpustow_api::names;
use gpustow_testkit::builders::delete;
use gpustow_testkit::{
    Action, Case, PodBuilder, Scheduler, configure, eventually, wait_bound, wait_condition,
    wait_gone, wait_refused,
};
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use kube::ResourceExt as _;
use kube::api::ListParams;

use crate::fault_rig::{Replica, Turn, clear, now, on_delete, turn};
use crate::support::{SOON, charges, event, event_saying};

const CARD: u64 = 10_000;
const PREEMPTS: &str = "preempt: {after: 0s}";
/// Small pods go to one card together.
const PACKS: &str = "scheduling: {policy: binpack}";

/// A pod of a priority that is there from the start: admission sees a new class only after a while.
fn high(case: &Case, name: &str) -> PodBuilder {
    case.pod(name).priority_class("system-cluster-critical")
}

/// One of a higher priority still.
fn highest(case: &Case, name: &str) -> PodBuilder {
    case.pod(name).priority_class("system-node-critical")
}

/// The same pod, which may take so many seconds to end. There is no kubelet: it stays until a case ends it.
pub(crate) fn slow(pod: PodBuilder, seconds: i64) -> PodBuilder {
    pod.with(|spec| spec.termination_grace_period_seconds = Some(seconds))
}

pub(crate) async fn bound(case: &Case, pod: PodBuilder) -> Result<Pod> {
    let pod = pod.create(&case.client).await?;
    wait_bound(&case.client, &pod, SOON).await
}

pub(crate) fn condition<'a>(pod: &'a Pod, of_type: &str) -> Option<&'a PodCondition> {
    let status = pod.status.as_ref()?;
    let mut conditions = status.conditions.iter().flatten();
    conditions.find(|it| it.type_ == of_type)
}

pub(crate) fn holds(pod: &Pod, of_type: &str) -> bool {
    condition(pod, of_type).is_some_and(|it| it.status == "True")
}

/// Waits until the pod's deletion is under way; the pod.
async fn ends(case: &Case, pod: &Pod) -> Result<Pod> {
    let deleting =
        |pod: Option<&Pod>| pod.is_some_and(|pod| pod.metadata.deletion_timestamp.is_some());
    wait_condition(&case.client, pod, "it ends", SOON, deleting).await
}

/// The names of the pods that exist and are not on their way out.
pub(crate) async fn staying(case: &Case) -> Result<Vec<String>> {
    let pods = case.pods().list(&ListParams::default()).await?;
    let staying = pods
        .iter()
        .filter(|pod| pod.metadata.deletion_timestamp.is_none());
    let mut names: Vec<_> = staying.map(|pod| pod.name_any()).collect();
    names.sort_unstable();
    Ok(names)
}

/// The state after every case: books that agree with the API server, no card over its bound, and no reserved room.
pub(crate) async fn nothing_is_left(replica: &Replica, case: &Case) -> Result<()> {
    replica.settled(case).await?;
    eventually(SOON, "no room is kept, and no pod must end", async || {
        for pod in case.pods().list(&ListParams::default()).await? {
            ensure!(
                !holds(&pod, names::RESERVED_CONDITION),
                "{}",
                pod.name_any()
            );
            ensure!(!holds(&pod, names::DISRUPTION_TARGET), "{}", pod.name_any());
        }
        Ok(())
    })
    .await
}

/// A replica that preempts, its kube-scheduler, and a case with a node of two cards.
async fn rig(turn: &Turn, name: &str, args: &[&str]) -> Result<(Replica, Scheduler, Case)> {
    let args: Vec<&str> = [PREEMPTS, PACKS].iter().chain(args).copied().collect();
    let replica = Replica::start(turn.cluster, name, &args).await?;
    let scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, name).await?;
    case.node("n", &[CARD, CARD]).create(&case.client).await?;
    Ok((replica, scheduler, case))
}

/// A pod on each card, this one of two on the first: 4000 MiB are free on each.
async fn fill(case: &Case, grace: i64) -> Result<[Pod; 3]> {
    let one = bound(case, slow(case.pod("one").gpu_mem(3000), grace)).await?;
    let two = bound(case, slow(case.pod("two").gpu_mem(3000), grace)).await?;
    ensure!(charges(&one)?[0].0 == charges(&two)?[0].0, "on one card");
    let firm = bound(case, high(case, "firm").gpu_mem(6000)).await?;
    ensure!(charges(&one)?[0].0 != charges(&firm)?[0].0, "on the other");
    Ok([one, two, firm])
}

#[tokio::test]
async fn one_of_lower_priority_ends_and_the_pod_gets_its_card() -> Result<()> {
    let turn = turn().await?;
    let (replica, _scheduler, case) = rig(&turn, "card", &[]).await?;
    let low = bound(&case, slow(case.pod("low").gpu_mem(6000), 600)).await?;
    bound(&case, high(&case, "firm").gpu_mem(6000)).await?;
    let waits = high(&case, "waits")
        .gpu_mem(8000)
        .create(&case.client)
        .await?;

    let victim = ends(&case, &low).await?;
    let target = condition(&victim, names::DISRUPTION_TARGET).context("no condition")?;
    assert_eq!(target.status, "True");
    assert_eq!(target.reason.as_deref(), Some(names::PREEMPTED));
    assert_eq!(victim.metadata.deletion_grace_period_seconds, Some(600));
    let told = event(&case.client, &low, "GpuPodDisrupted").await?;
    ensure!(
        told.contains(&format!("{}/waits", case.namespace)),
        "{told}"
    );
    let preempts = format!("Preempting {}/low.", case.namespace);
    event_saying(&case.client, &waits, "GpuMemoryReserved", &preempts).await?;
    ensure!(holds(&now(&case, &waits).await?, names::RESERVED_CONDITION));
    // While it ends, no pod of the same priority gets the room.
    let late = high(&case, "late").gpu_mem(4000);
    let late = bound(&case, late).await?;
    ensure!(charges(&late)?[0].0 != charges(&low)?[0].0, "on its card");

    delete(&case.client, &low, 0).await?;
    let waits = wait_bound(&case.client, &waits, SOON).await?;
    assert_eq!(charges(&waits)?[0].0, charges(&low)?[0].0);
    assert_eq!(replica.disruptions("delete", "preempt").await?, "1");
    assert_eq!(staying(&case).await?, ["firm", "late", "waits"]);
    nothing_is_left(&replica, &case).await?;
    case.end().await
}

#[tokio::test]
async fn no_pod_ends_unless_the_operator_wants_it_nor_for_a_pod_that_may_not_preempt() -> Result<()>
{
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "left", &[PACKS]).await?;
    let scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "left").await?;
    case.node("n", &[CARD, CARD]).create(&case.client).await?;
    fill(&case, 0).await?;
    let waits = high(&case, "waits")
        .gpu_mem(8000)
        .create(&case.client)
        .await?;
    wait_refused(&case.client, &waits, "not enough free memory", SOON).await?;
    event(&case.client, &waits, "GpuMemoryUnavailable").await?;
    drop((scheduler, replica));
    assert_eq!(staying(&case).await?, ["firm", "one", "two", "waits"]);
    delete(&case.client, &waits, 0).await?;

    let replica = Replica::start(turn.cluster, "equal", &[PREEMPTS]).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    let equal = case.pod("equal").gpu_mem(8000);
    let equal = equal.create(&case.client).await?;
    wait_refused(&case.client, &equal, "not enough free memory", SOON).await?;
    // One that may comes after it, and is helped.
    let may = high(&case, "may")
        .gpu_mem(7500)
        .create(&case.client)
        .await?;
    wait_bound(&case.client, &may, SOON).await?;
    assert!(condition(&now(&case, &equal).await?, names::RESERVED_CONDITION).is_none());
    nothing_is_left(&replica, &case).await?;
    case.end().await
}

/// kube-scheduler of 1.38 can ask about a node on which its own filters pass without a victim.
#[tokio::test]
async fn kube_scheduler_that_asks_about_fragmented_memory_gets_victims_by_the_switches()
-> Result<()> {
    let turn = turn().await?;
    let off = "preempt: {fragmented: false, after: 0s}";
    let replica = Replica::start(turn.cluster, "asked", &[off]).await?;
    let case = Case::new(turn.cluster, "asked").await?;
    case.node("n", &[CARD, CARD]).create(&case.client).await?;
    let node = case.node_name("n");
    for name in ["one", "two"] {
        let pod = case.pod(name).gpu_mem(6000).create(&case.client).await?;
        replica.place(&pod, &node).await?;
    }
    let pod = high(&case, "p").gpu_mem(6000).create(&case.client).await?;
    for (switches, offered) in [(off, 0), ("preempt: {after: 1h}", 0), (PREEMPTS, 1)] {
        configure(&case.client, &[switches.to_owned()]).await?;
        eventually(SOON, switches, async || {
            let nodes = replica.preempt(&pod, &node, &[]).await?;
            ensure!(nodes == offered, "{nodes} nodes");
            Ok(())
        })
        .await?;
    }
    clear(&case).await?;
    case.end().await
}

/// The extender believes the API server to be 1.38. kube-scheduler of that minor evicts; for an older one the extender does.
#[tokio::test]
async fn kube_scheduler_that_can_evict_for_fragmented_memory_does_once_the_pod_is_old_enough()
-> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "by-scheduler", &["preempt: {after: 8s}"]).await?;
    let version = r#"{"minor": "38"}"#;
    let is_version = |_: &Method, uri: &Uri| uri.path() == "/version";
    let told = (replica.proxy).rule(is_version, Action::Answer(StatusCode::OK, version));
    replica.restart().await?;
    told.seen(1, SOON).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "by-scheduler").await?;
    case.node("n", &[CARD, CARD]).create(&case.client).await?;
    let low = bound(&case, slow(case.pod("low").gpu_mem(6000), 600)).await?;
    bound(&case, high(&case, "firm").gpu_mem(6000)).await?;
    let waits = high(&case, "waits").gpu_mem(8000);
    let waits = waits.create(&case.client).await?;
    let victim = ends(&case, &low).await?;
    let target = condition(&victim, names::DISRUPTION_TARGET).context("no condition")?;
    let (reason, count) = match turn.cluster.scheduler_minor().await? {
        38.. => ("PreemptionByScheduler", "0"),
        _ => (names::PREEMPTED, "1"),
    };
    assert_eq!(target.reason.as_deref(), Some(reason));
    let created = waits.metadata.creation_timestamp.as_ref();
    let created = created.context("no time")?.0;
    let marked = target.last_transition_time.as_ref().context("no time")?.0;
    ensure!(
        marked.duration_since(created).as_secs() >= 7,
        "{marked}, created {created}"
    );
    delete(&case.client, &low, 0).await?;
    let waits = wait_bound(&case.client, &waits, SOON).await?;
    assert_eq!(charges(&waits)?[0].0, charges(&low)?[0].0);
    assert_eq!(replica.disruptions("delete", "preempt").await?, count);
    nothing_is_left(&replica, &case).await?;
    case.end().await
}

#[tokio::test]
async fn of_two_cards_the_one_goes_whose_pod_no_budget_protects() -> Result<()> {
    for protected in ["a", "b"] {
        let turn = turn().await?;
        let (replica, _scheduler, case) = rig(&turn, &format!("budget-{protected}"), &[]).await?;
        for name in ["a", "b"] {
            bound(&case, case.pod(name).gpu_mem(6000).label("app", name)).await?;
        }
        case.budget(protected, ("minAvailable", 1)).await?;
        bound(&case, high(&case, "high").gpu_mem(8000)).await?;
        assert_eq!(staying(&case).await?, [protected, "high"]);
        nothing_is_left(&replica, &case).await?;
        case.end().await?;
    }
    Ok(())
}

#[tokio::test]
async fn of_two_that_want_one_card_one_gets_it_and_no_victim_is_too_many() -> Result<()> {
    let turn = turn().await?;
    let (replica, _scheduler, case) = rig(&turn, "both", &[]).await?;
    let [one, two, _] = fill(&case, 600).await?;
    let p = high(&case, "p").gpu_mem(8000).create(&case.client).await?;
    let q = high(&case, "q").gpu_mem(8000).create(&case.client).await?;
    for victim in [&one, &two] {
        ends(&case, victim).await?;
        delete(&case.client, victim, 0).await?;
    }
    eventually(SOON, "one of them is bound", async || {
        let (p, q) = (now(&case, &p).await?, now(&case, &q).await?);
        let is_bound = |pod: &Pod| pod.spec.as_ref().is_some_and(|it| it.node_name.is_some());
        ensure!(is_bound(&p) != is_bound(&q));
        Ok(())
    })
    .await?;
    assert_eq!(staying(&case).await?, ["firm", "p", "q"]);
    assert_eq!(replica.disruptions("delete", "preempt").await?, "2");
    nothing_is_left(&replica, &case).await?;
    case.end().await
}

#[tokio::test]
async fn a_victim_that_ends_by_itself_spares_the_next_one() -> Result<()> {
    let turn = turn().await?;
    // The second must wait for a minute.
    let (replica, _scheduler, case) =
        rig(&turn, "itself", &["disruptions: {perNodePerMinute: 1}"]).await?;
    let [one, two, _] = fill(&case, 600).await?;
    let spared = bound(&case, high(&case, "spared").gpu_mem(1000)).await?;
    ensure!(charges(&one)?[0].0 == charges(&spared)?[0].0, "on one card");
    let waits = highest(&case, "waits")
        .gpu_mem(7000)
        .create(&case.client)
        .await?;
    let first = eventually(SOON, "one ends", async || {
        for pod in [&one, &two] {
            let pod = now(&case, pod).await?;
            if pod.metadata.deletion_timestamp.is_some() {
                return Ok(pod);
            }
        }
        anyhow::bail!("none")
    })
    .await?;
    let second = match first.name_any() == "one" {
        true => &two,
        false => &one,
    };
    delete(&case.client, second, 0).await?;
    delete(&case.client, &first, 0).await?;
    wait_bound(&case.client, &waits, SOON).await?;
    assert_eq!(replica.disruptions("delete", "preempt").await?, "1");
    assert_eq!(staying(&case).await?, ["firm", "spared", "waits"]);
    nothing_is_left(&replica, &case).await?;
    case.end().await
}

#[tokio::test]
async fn when_the_preemptor_is_deleted_half_way_the_next_victim_stays() -> Result<()> {
    let turn = turn().await?;
    let (replica, _scheduler, case) = rig(&turn, "half", &["disruptions: {perMinute: 1}"]).await?;
    let [one, two, _] = fill(&case, 600).await?;
    let waits = high(&case, "waits")
        .gpu_mem(8000)
        .create(&case.client)
        .await?;
    event(&case.client, &waits, "GpuMemoryReserved").await?;
    eventually(SOON, "one ends", async || {
        ensure!(staying(&case).await?.len() == 3);
        Ok(())
    })
    .await?;
    delete(&case.client, &waits, 0).await?;
    wait_gone(&case.client, &waits, SOON).await?;
    // The memory that was kept is free for every pod again.
    bound(&case, case.pod("small").gpu_mem(4000)).await?;
    bound(&case, case.pod("other").gpu_mem(4000)).await?;
    let left = staying(&case).await?;
    ensure!(
        left.contains(&one.name_any()) != left.contains(&two.name_any()),
        "{left:?}"
    );
    assert_eq!(replica.disruptions("delete", "preempt").await?, "1");
    clear(&case).await?;
    nothing_is_left(&replica, &case).await?;
    case.end().await
}

#[tokio::test]
async fn a_successor_goes_on_between_two_deletes_and_deletes_no_other_pod() -> Result<()> {
    let turn = turn().await?;
    let (killed, scheduler, case) = rig(&turn, "killed-half", &[]).await?;
    let [one, two, _] = fill(&case, 0).await?;
    let spared = bound(&case, high(&case, "spared").gpu_mem(1000)).await?;
    ensure!(charges(&one)?[0].0 == charges(&spared)?[0].0, "on one card");
    let second = on_delete(&killed, 1, Action::Hold);
    let waits = highest(&case, "waits")
        .gpu_mem(7000)
        .create(&case.client)
        .await?;
    second.seen(1, SOON).await?;
    scheduler.process.kill9();
    killed.extender.process.kill9();
    drop(killed);

    let successor = Replica::start(turn.cluster, "heir-half", &[PREEMPTS]).await?;
    let _scheduler = successor.scheduler(turn.cluster).await?;
    for pod in [&one, &two] {
        wait_gone(&case.client, pod, SOON).await?;
    }
    wait_bound(&case.client, &waits, SOON).await?;
    assert_eq!(successor.disruptions("delete", "preempt").await?, "1");
    assert_eq!(staying(&case).await?, ["firm", "spared", "waits"]);
    nothing_is_left(&successor, &case).await?;
    case.end().await
}

#[tokio::test]
async fn a_delete_that_arrives_after_a_takeover_fails() -> Result<()> {
    let turn = turn().await?;
    let (frozen, scheduler, case) = rig(&turn, "icy-delete", &[]).await?;
    let low = bound(&case, case.pod("low").gpu_mem(6000)).await?;
    bound(&case, high(&case, "firm").gpu_mem(6000)).await?;
    let late = on_delete(&frozen, 0, Action::Hold);
    let waits = high(&case, "waits")
        .gpu_mem(8000)
        .create(&case.client)
        .await?;
    late.seen(1, SOON).await?;
    scheduler.process.kill9();
    frozen.extender.process.stop()?;

    // The successor does not preempt, and ends the preemption that the other replica began.
    let successor = Replica::start(
        turn.cluster,
        "heir-delete",
        &["reclaim: {action: Event}", "preempt: {fragmented: false}"],
    )
    .await?;
    let small = case.pod("small").gpu_mem(1000).create(&case.client).await?;
    successor.place(&small, &case.node_name("n")).await?;
    eventually(SOON, "the successor wrote into the victim", async || {
        let low = now(&case, &low).await?;
        let target = condition(&low, names::DISRUPTION_TARGET).context("no condition")?;
        ensure!(target.status == "False", "{target:?}");
        Ok(())
    })
    .await?;
    frozen
        .thaws(&late, &waits, &case.node_name("n"), "heir-delete")
        .await?;
    assert_eq!(staying(&case).await?, ["firm", "low", "small", "waits"]);
    nothing_is_left(&successor, &case).await?;
    case.end().await
}

#[tokio::test]
async fn room_that_another_filter_keeps_the_pod_from_is_given_up() -> Result<()> {
    let turn = turn().await?;
    let (replica, _scheduler, case) =
        rig(&turn, "other-filter", &["reclaim: {timeout: 2s}"]).await?;
    let [one, two, _] = fill(&case, 0).await?;
    let last = on_delete(&replica, 1, Action::Hold);
    let waits = high(&case, "waits")
        .gpu_mem(8000)
        .create(&case.client)
        .await?;
    last.seen(1, SOON).await?;
    let node = case.node_name("n");
    turn.cluster
        .kubectl(&["taint", "nodes", &node, "case=closed:NoSchedule"])
        .await?;
    last.release();
    for pod in [&one, &two] {
        wait_gone(&case.client, pod, SOON).await?;
    }
    eventually(SOON, "no room is kept", async || {
        ensure!(!holds(
            &now(&case, &waits).await?,
            names::RESERVED_CONDITION
        ));
        Ok(())
    })
    .await?;
    assert_eq!(replica.disruptions("delete", "preempt").await?, "2");
    assert_eq!(staying(&case).await?, ["firm", "waits"]);
    nothing_is_left(&replica, &case).await?;
    case.end().await
}
