//! Preemption for a gang: all of its victims go together, or none.

use anyhow::{Result, ensure};
use gpustow_testkit::{Action, Case, PodBuilder, eventually, wait_bound, wait_gone};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::api::{Api, DeleteParams, PostParams};
use serde_json::json;

use crate::fault_rig::{Replica, on_delete};
use crate::fragmented::{bound, nothing_is_left, staying};
use crate::gang_binding::{cluster, refused};
use crate::install::install;
use crate::support::SOON;

const PREEMPTS: &str = "preempt: {after: 0s}";
const CARD: u64 = 15_000;
const HALF: u64 = 10_000;

/// A PodGroup may have none of the priorities that are there from the start.
const HIGH: &str = "gang";

fn high(pod: PodBuilder) -> PodBuilder {
    pod.priority_class(HIGH)
}

/// A pod of low priority on each of these GPUs, and a gang of as many of high priority.
async fn crowd(case: &Case, gpus: usize) -> Result<(Vec<Pod>, Vec<Pod>)> {
    case.node("n", &vec![CARD; gpus])
        .create(&case.client)
        .await?;
    let mut low = Vec::new();
    for index in 0..gpus {
        let name = format!("low-{index}");
        let pod = case.pod(&name).label("app", &name).gpu_mem(HALF);
        low.push(bound(case, pod).await?);
    }
    let class: PriorityClass =
        serde_json::from_value(json!({"metadata": {"name": HIGH}, "value": 1000}))?;
    let classes = Api::<PriorityClass>::all(case.client.clone());
    classes.create(&PostParams::default(), &class).await?;
    // kube-scheduler wants group and pods to have the same priority. Admission sees the new class only after a while.
    let spec = json!({
        "priorityClassName": HIGH, "schedulingPolicy": {"gang": {"minCount": gpus}},
    });
    eventually(SOON, "the class is known", async || {
        case.pod_group("g", spec.clone()).await
    })
    .await?;
    let mut gang = Vec::new();
    for index in 0..gpus {
        let pod = high(case.pod(&format!("g-{index}")).gpu_mem(HALF));
        gang.push(case.member("g", pod).await?);
    }
    Ok((low, gang))
}

#[tokio::test]
async fn gang_of_higher_priority_preempts_for_all_of_its_pods() -> Result<()> {
    let cluster = cluster().await?;
    install(&cluster, "manifests/base").await?;
    let replica = Replica::start(&cluster, "gang", &[PREEMPTS]).await?;
    let _scheduler = replica.scheduler(&cluster).await?;
    let case = Case::new(&cluster, "gang").await?;
    let (low, gang) = crowd(&case, 2).await?;
    for pod in &gang {
        wait_bound(&case.client, pod, SOON).await?;
    }
    for pod in &low {
        wait_gone(&case.client, pod, SOON).await?;
    }
    nothing_is_left(&replica, &case).await?;
    case.end().await
}

#[tokio::test]
async fn budget_that_protects_one_victim_spares_all_victims_of_a_gang() -> Result<()> {
    let cluster = cluster().await?;
    install(&cluster, "manifests/base").await?;
    let replica = Replica::start(&cluster, "gang", &[PREEMPTS]).await?;
    let _scheduler = replica.scheduler(&cluster).await?;
    let case = Case::new(&cluster, "gang").await?;
    let budgets = case.budget("low-1", ("minAvailable", 1)).await?;
    let (_, gang) = crowd(&case, 2).await?;
    refused(&case, &gang[0], "0 of 2 fit").await?;
    // Preemption for another pod, on another node, shows that the extender has looked at the gang meanwhile.
    let other = case.node("m", &[9_500, 9_500]).label("for", "singles");
    other.create(&case.client).await?;
    let single = |name: &str, mib| case.pod(name).gpu_mem(mib).node_selector("for", "singles");
    bound(&case, single("small", 5_500)).await?;
    bound(&case, high(single("firm", 5_500))).await?;
    bound(&case, high(single("waits", 7_500))).await?;
    let left = staying(&case).await?;
    ensure!(
        left.contains(&"low-0".into()) && left.contains(&"low-1".into()),
        "{left:?}"
    );
    budgets.delete("low-1", &DeleteParams::default()).await?;
    for pod in &gang {
        wait_bound(&case.client, pod, SOON).await?;
    }
    nothing_is_left(&replica, &case).await?;
    case.end().await
}

#[tokio::test]
async fn successor_goes_on_between_two_deletes_for_a_gang() -> Result<()> {
    let cluster = cluster().await?;
    install(&cluster, "manifests/base").await?;
    let replica = Replica::start(&cluster, "first", &[PREEMPTS]).await?;
    let case = Case::new(&cluster, "gang").await?;
    // The API server is asked first whether it would delete each of them.
    let stuck = on_delete(&replica, 3, Action::Hold);
    let scheduler = replica.scheduler(&cluster).await?;
    let (low, gang) = crowd(&case, 2).await?;
    stuck.seen(1, SOON).await?;
    eventually(SOON, "one victim is gone", async || {
        let left = staying(&case).await?;
        let left = left.iter().filter(|name| name.starts_with("low"));
        ensure!(left.count() == 1, "both or none");
        Ok(())
    })
    .await?;
    replica.extender.process.kill9();
    drop(scheduler);
    let successor = Replica::start(&cluster, "successor", &[PREEMPTS]).await?;
    let _scheduler = successor.scheduler(&cluster).await?;
    for pod in &gang {
        wait_bound(&case.client, pod, SOON).await?;
    }
    for pod in &low {
        wait_gone(&case.client, pod, SOON).await?;
    }
    nothing_is_left(&successor, &case).await?;
    case.end().await
}
