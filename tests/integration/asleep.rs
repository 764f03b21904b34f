//! Servers of models that sleep: others borrow their memory, and give it back before it is allocated again.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gpustow_api::GpuNode;
use gpustow_api::names;
use gpustow_testkit::builders::set_running;
use gpustow_testkit::{Case, eventually, wait_condition};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;

use crate::agent::{AgentNode, cgroup_of};
use crate::fault_rig::{Replica, now, turn};
use crate::fragmented::condition;
use crate::support::{SOON, event_saying};

/// A model is there again within this.
const WAKES: Duration = Duration::from_secs(3);

/// Waits until the pod has the condition with this status and reason; its message.
async fn says(case: &Case, pod: &Pod, of_type: &str, status: &str, reason: &str) -> Result<String> {
    let holds = |pod: Option<&Pod>| {
        let found = pod.and_then(|pod| condition(pod, of_type));
        found.is_some_and(|it| it.status == status && it.reason.as_deref() == Some(reason))
    };
    let what = format!("{of_type} is {status} by {reason}");
    let pod = wait_condition(&case.client, pod, &what, SOON, holds).await?;
    let found = condition(&pod, of_type).context("it was there")?;
    Ok(found.message.clone().unwrap_or_default())
}

async fn sleeps(case: &Case, pod: &Pod, asleep: &str) -> Result<()> {
    let patch = json!({ "metadata": { "annotations": { names::ASLEEP: asleep } } });
    let params = PatchParams::default();
    case.pods()
        .patch(&pod.name_any(), &params, &Patch::Merge(patch))
        .await?;
    Ok(())
}

#[tokio::test]
async fn model_that_sleeps_gets_its_memory_back_before_it_allocates() -> Result<()> {
    let turn = turn().await?;
    let case = Case::new(turn.cluster, "asleep").await?;
    let replica = Replica::start(turn.cluster, "asleep", &["reclaim: {action: Event}"]).await?;
    let mut node = AgentNode::start(turn.cluster, &case).await?;
    node.capacity(79_000).await?;
    node.kubelet_writes("allocatable", 79_000).await?;
    let start = async |name: &str, mib: u64, key: &str, value: &str| {
        let pod = case.pod(name).gpu_mem(mib).annotation(key, value);
        let pod = pod.create(&case.client).await?;
        replica.place(&pod, &node.name).await?;
        set_running(&case.client, &pod).await
    };
    let model = start("model", 40_960, names::ASLEEP, "true").await?;
    let greedy = start("greedy", 20_000, names::MEM_LIMIT, "max").await?;
    let cgroups = [cgroup_of(&model)?, cgroup_of(&greedy)?];
    let uses = |node: &mut AgentNode, model: u64, greedy: u64| {
        let [one, two] = cgroups.clone();
        node.runs(&[(100, model, one), (200, greedy, two)])
    };
    let reported = async |node: &AgentNode, within: Duration, mib: u64| {
        let gpunodes = Api::<GpuNode>::all(case.client.clone());
        eventually(within, "the agent reports it", async || {
            let status = gpunodes.get_status(&node.name).await?.status;
            let status = status.context("no report")?;
            let uid = model.uid().unwrap_or_default();
            let used = status.gpus[0].pods.iter().find(|it| it.uid == uid);
            ensure!(used.is_some_and(|it| it.used_mib == mib), "{used:?}");
            Ok(())
        })
        .await
    };

    // It sleeps at 2 GiB: another pod borrows all the rest, and is not asked for it.
    uses(&mut node, 2048, 76_000)?;
    reported(&node, SOON, 2048).await?;
    says(&case, &model, names::AVAILABLE_CONDITION, "False", "Asleep").await?;
    let metrics = replica.extender.metrics().await?;
    ensure!(
        metrics.contains("gpustow_gpus_under_pressure 0\n"),
        "{metrics}"
    );
    assert!(condition(&now(&case, &greedy).await?, names::RECLAIM_CONDITION).is_none());

    // It asks before it allocates.
    sleeps(&case, &model, "false").await?;
    says(&case, &greedy, names::RECLAIM_CONDITION, "True", "Event").await?;
    let text = says(
        &case,
        &model,
        names::AVAILABLE_CONDITION,
        "False",
        "Reclaiming",
    )
    .await?;
    // 79000 less 78048 are free of 38912.
    ensure!(text.contains("37960 MiB"), "{text}");
    let from = format!("{}/greedy", case.namespace);
    event_saying(&case.client, &model, "GpuMemoryReserved", &from).await?;

    // The other pod gives back the memory that it borrowed. The model's condition shows it, and the model is there
    // within 3 s.
    uses(&mut node, 2048, 20_000)?;
    says(&case, &model, names::AVAILABLE_CONDITION, "True", "Free").await?;
    says(
        &case,
        &greedy,
        names::RECLAIM_CONDITION,
        "False",
        "GivenBack",
    )
    .await?;
    uses(&mut node, 40_960, 20_000)?;
    reported(&node, WAKES, 40_960).await?;
    let model_now = now(&case, &model).await?;
    assert!(condition(&model_now, names::RECLAIM_CONDITION).is_none());

    // It sleeps again, and anything else than a yes or a no is refused.
    sleeps(&case, &model, "true").await?;
    says(&case, &model, names::AVAILABLE_CONDITION, "False", "Asleep").await?;
    let refused = sleeps(&case, &model, "soon").await.err();
    let refused = refused.context("it was taken")?.to_string();
    ensure!(
        refused.contains("is neither \"true\" nor \"false\""),
        "{refused}"
    );
    node.end().await;
    case.end().await
}
