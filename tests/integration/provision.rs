//! Placeholders: pods that have an autoscaler add a node. There is no autoscaler: the cases add nodes by hand.

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use gpustow_testkit::builders::delete;
use gpustow_testkit::{Case, ControlPlane, client, eventually, wait_bound};
use k8s_openapi::api::core::v1::{Pod, ResourceQuota};
use kube::ResourceExt as _;
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::attack::placeholders::provision;
use crate::fault_rig::{Replica, now, turn};
use crate::fragmented::bound;
use crate::queue;
use crate::support::{ACCOUNT, SOON, SYSTEM, event};

const CARD: u64 = 10_000;
const ON: &str = "provision: {max: 3}";

async fn placeholders(case: &Case) -> Result<Vec<Pod>> {
    let marked = ListParams::default().labels(names::PLACEHOLDER);
    Ok(case.pods().list(&marked).await?.items)
}

/// Waits until there is one placeholder; it.
async fn placeholder(case: &Case) -> Result<Pod> {
    eventually(SOON, "there is one placeholder", async || {
        let mut all = placeholders(case).await?;
        ensure!(all.len() == 1, "{} placeholders", all.len());
        all.pop().context("none")
    })
    .await
}

async fn none_is_left(case: &Case) -> Result<()> {
    eventually(SOON, "no placeholder is left", async || {
        let all = placeholders(case).await?;
        ensure!(all.is_empty(), "{}", all[0].name_any());
        Ok(())
    })
    .await
}

/// Waits until the replica's metrics have these lines.
async fn shows(replica: &Replica, lines: &[&str]) -> Result<()> {
    eventually(SOON, "the metrics say so", async || {
        let metrics = replica.extender.metrics().await?;
        for line in lines {
            ensure!(metrics.lines().any(|it| it == *line), "{line}");
        }
        Ok(())
    })
    .await
}

/// A node with free memory in two pieces, of which none suffices for the pod.
async fn fragmented(case: &Case) -> Result<Pod> {
    case.node("n", &[CARD, CARD]).create(&case.client).await?;
    for name in ["one", "two"] {
        bound(case, case.pod(name).gpu_mem(6000)).await?;
    }
    case.pod("waits").gpu_mem(7001).create(&case.client).await
}

#[tokio::test]
async fn a_placeholder_waits_for_a_node_and_goes_when_it_comes() -> Result<()> {
    let turn = turn().await?;
    provision(turn.cluster).await?;
    let replica = Replica::start(turn.cluster, "provides", &[ON]).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "provides").await?;
    let waits = fragmented(&case).await?;

    let placeholder = placeholder(&case).await?;
    let created = "gpustow_placeholders_created_total{result=\"created\"} 1";
    shows(&replica, &["gpustow_placeholders 1", created]).await?;
    let owner = &placeholder.owner_references()[0];
    assert_eq!(
        (&*owner.kind, Some(&owner.uid)),
        ("Pod", waits.uid().as_ref())
    );
    let spec = placeholder.spec.clone().context("no spec")?;
    assert_eq!(spec.priority, Some(-10));
    assert_eq!(spec.preemption_policy.as_deref(), Some("Never"));
    let limits = spec.containers[0]
        .resources
        .clone()
        .and_then(|it| it.limits);
    let asks = limits.context("no limits")?[names::GPU_MEM].0.clone();
    assert_eq!(asks, "7001");
    let affinity = json!(spec.affinity)["nodeAffinity"].to_string();
    ensure!(affinity.contains(names::KNOWN_LABEL), "{affinity}");
    ensure!(
        json!(spec.node_selector) == json!(waits.spec.context("no spec")?.node_selector),
        "it goes where its owner may not"
    );
    // An autoscaler sees it.
    eventually(SOON, "it is unschedulable", async || {
        let status = json!(now(&case, &placeholder).await?.status);
        ensure!(status.to_string().contains("Unschedulable"), "{status}");
        Ok(())
    })
    .await?;
    let refused = replica.filter(&placeholder, &case.node_name("n")).await;
    ensure!(refused.is_err(), "a node takes the placeholder");
    ensure!(
        replica
            .bind(&placeholder, &case.node_name("n"))
            .await
            .is_err()
    );

    case.node("new", &[CARD]).create(&case.client).await?;
    wait_bound(&case.client, &case_pod(&case, "waits").await?, SOON).await?;
    none_is_left(&case).await?;
    shows(&replica, &["gpustow_placeholders 0", created]).await?;
    replica.settled(&case).await?;
    case.end().await
}

#[tokio::test]
async fn a_placeholder_that_a_quota_refuses_is_counted_and_its_owner_told() -> Result<()> {
    let turn = turn().await?;
    provision(turn.cluster).await?;
    let replica = Replica::start(turn.cluster, "refused", &[ON]).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "refused").await?;
    // No controller runs that would write its status.
    let quota = json!({
        "metadata": { "name": "none" },
        "spec": { "hard": { "pods": "0" }, "scopeSelector": { "matchExpressions": [{
            "scopeName": "PriorityClass", "operator": "In", "values": [names::PLACEHOLDER_CLASS],
        }] } },
    });
    let quotas = Api::<ResourceQuota>::namespaced(case.client.clone(), &case.namespace);
    let quota: ResourceQuota = serde_json::from_value(quota)?;
    quotas.create(&PostParams::default(), &quota).await?;
    let status = json!({ "status": { "hard": { "pods": "0" }, "used": { "pods": "0" } } });
    let params = PatchParams::default();
    quotas
        .patch_status("none", &params, &Patch::Merge(&status))
        .await?;
    let waits = fragmented(&case).await?;
    let note = event(&case.client, &waits, "GpuPlaceholderRefused").await?;
    ensure!(note.contains("quota"), "{note}");
    let refused = "gpustow_placeholders_created_total{result=\"refused\"} 1";
    shows(&replica, &["gpustow_placeholders 0", refused]).await?;
    ensure!(placeholders(&case).await?.is_empty(), "it was created");
    case.end().await
}

async fn case_pod(case: &Case, name: &str) -> Result<Pod> {
    Ok(case.pods().get(name).await?)
}

#[tokio::test]
async fn the_next_leader_keeps_the_placeholder_and_deletes_it_in_the_end() -> Result<()> {
    let turn = turn().await?;
    provision(turn.cluster).await?;
    let case = Case::new(turn.cluster, "inherits").await?;
    let before = {
        let replica = Replica::start(turn.cluster, "first", &[ON]).await?;
        let _scheduler = replica.scheduler(turn.cluster).await?;
        fragmented(&case).await?;
        placeholder(&case).await?
    };
    let replica = Replica::start(turn.cluster, "second", &[ON]).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    // It leads once it has placed a pod.
    bound(&case, case.pod("small").gpu_mem(500)).await?;
    let after = placeholder(&case).await?;
    assert_eq!(before.uid(), after.uid());
    delete(&case.client, &case_pod(&case, "one").await?, 0).await?;
    wait_bound(&case.client, &case_pod(&case, "waits").await?, SOON).await?;
    none_is_left(&case).await?;
    replica.settled(&case).await?;
    case.end().await
}

#[tokio::test]
async fn queued_pods_have_a_placeholder_that_is_not_queued() -> Result<()> {
    let cluster = queue::open().await?;
    let settings = [ON, "queue: {mode: Always}"];
    provision(&cluster).await?;
    let replica = Replica::start(&cluster, "queues", &settings).await?;
    let _scheduler = replica.scheduler(&cluster).await?;
    let case = Case::new(&cluster, "queues").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    bound(&case, case.pod("one").gpu_mem(6000)).await?;
    queue::flag(&cluster, true).await?;
    let waits = case.pod("waits").gpu_mem(8000).create(&case.client).await?;
    queue::still_held(&case, &[&waits]).await?;
    let placeholder = placeholder(&case).await?;
    let gates = placeholder.spec.clone().and_then(|it| it.scheduling_gates);
    ensure!(gates.is_none_or(|gates| gates.is_empty()), "it is queued");
    delete(&case.client, &waits, 0).await?;
    none_is_left(&case).await?;
    case.end().await
}

/// Creates this pod as this account.
async fn creates(cluster: &ControlPlane, account: &str, pod: Value) -> Result<Pod> {
    let client = match account {
        "admin" => cluster.admin()?,
        account => client(&cluster.kubeconfig(SYSTEM, account, None).await?).await?,
    };
    let namespace = pod["metadata"]["namespace"].as_str().context("namespace")?;
    let pods = Api::<Pod>::namespaced(client, namespace);
    let pod = serde_json::from_value(pod.clone())?;
    Ok(pods.create(&PostParams::default(), &pod).await?)
}

#[tokio::test]
async fn only_the_extender_creates_placeholders_and_nothing_else() -> Result<()> {
    let turn = turn().await?;
    provision(turn.cluster).await?;
    let case = Case::new(turn.cluster, "forged").await?;
    let plain = json!(case.pod("plain").gpu_mem(100).build());
    let mut forged = plain.clone();
    forged["metadata"]["labels"][names::PLACEHOLDER] = json!("alone");
    let mut named = plain.clone();
    named["metadata"]["annotations"][names::PLACEHOLDER_FOR] = json!("alone");
    let mut idle = json!(case.pod("idle").build());
    idle["metadata"]["annotations"][names::PLACEHOLDER_FOR] = json!("alone");
    for (account, pod, why) in [
        ("admin", &forged, "only gpustow's extender may write"),
        (ACCOUNT, &plain, "creates no pods but placeholders"),
        (ACCOUNT, &forged, "owned by a pod"),
        ("admin", &named, "only gpustow's extender may write"),
        ("admin", &idle, "only gpustow's extender may write"),
        (ACCOUNT, &idle, "only gpustow's extender may write"),
    ] {
        let error = creates(turn.cluster, account, pod.clone()).await.err();
        let error = error.context("it was created")?.to_string();
        ensure!(error.contains(why), "{account}: {error}");
    }
    let idle = json!(case.pod("idle").build());
    let marks = [
        json!({ "metadata": { "labels": { names::PLACEHOLDER: "alone" } } }),
        json!({ "metadata": { "annotations": { names::PLACEHOLDER_FOR: "alone" } } }),
    ];
    for pod in [plain, idle] {
        let name = creates(turn.cluster, "admin", pod).await?.name_any();
        for mark in &marks {
            let (pods, params, patch) = (case.pods(), PatchParams::default(), Patch::Merge(mark));
            let marked = pods.patch(&name, &params, &patch);
            ensure!(marked.await.is_err(), "{name} became a placeholder: {mark}");
        }
    }
    case.end().await
}
