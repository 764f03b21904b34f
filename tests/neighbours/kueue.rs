//! Kueue admits by quota on `gpustow.dev/gpu-mem`; gpustow queues the admitted pods.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use gpustow_testkit::builders::{delete, set_phase};
use gpustow_testkit::{Case, Process, eventually, wait_bound, wait_gone, wait_pods};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::Api;
use serde_json::{Value, json};

use crate::manager::Manager;
use crate::site::{CARD, SOON, Site, gates, is_bound};

/// Kueue's gate on pods without an owner.
const ADMISSION: &str = "kueue.x-k8s.io/admission";
const QUEUE: &str = "kueue.x-k8s.io/queue-name";

/// Starts Kueue, with this for `waitForPodsReady`.
async fn kueue(site: &Site, patience: Option<Value>) -> Result<Process> {
    let manager = Manager {
        name: "kueue",
        config_version: "config.kueue.x-k8s.io/v1beta2",
        config: json!({
            "namespace": "kueue-system",
            "integrations": { "frameworks": ["batch/job", "pod"] },
            "waitForPodsReady": patience,
        }),
        args: &["--feature-gates=VisibilityOnDemand=false"],
        makes_certificate: true,
    };
    manager.start(site).await
}

/// A queue in the case's namespace whose jobs may have so many cards together.
async fn queue(site: &Site, cards: u64) -> Result<()> {
    let version = "kueue.x-k8s.io/v1beta2";
    let namespace = &site.case.namespace;
    let quota = json!({ "name": names::GPU_MEM, "nominalQuota": cards * CARD });
    let objects = [
        json!({ "apiVersion": version, "kind": "ResourceFlavor", "metadata": { "name": "gpu" } }),
        json!({ "apiVersion": version, "kind": "ClusterQueue", "metadata": { "name": "gpu" }, "spec": {
            "namespaceSelector": {},
            "resourceGroups": [{
                "coveredResources": [names::GPU_MEM],
                "flavors": [{ "name": "gpu", "resources": [quota] }],
            }],
        } }),
        json!({ "apiVersion": version, "kind": "LocalQueue", "metadata": { "name": "gpu", "namespace": namespace },
            "spec": { "clusterQueue": "gpu" } }),
    ];
    for object in objects {
        let object = object.to_string();
        eventually(SOON, "the queue is created", async || {
            site.cluster.apply(&object).await
        })
        .await?;
    }
    Ok(())
}

/// A Job of one pod that asks for a card, by way of the queue.
async fn job(site: &Site, name: &str) -> Result<()> {
    let pod = site.case.pod(name).gpu_mem(CARD).build();
    let mut spec = serde_json::to_value(pod.spec)?;
    spec["restartPolicy"] = "Never".into();
    let job = json!({
        "apiVersion": "batch/v1", "kind": "Job",
        "metadata": { "name": name, "namespace": site.case.namespace, "labels": { QUEUE: "gpu" } },
        "spec": { "template": { "spec": spec } },
    });
    site.cluster.apply(&job.to_string()).await?;
    Ok(())
}

fn is_of(pod: &Pod, job: &str) -> bool {
    pod.labels()
        .get("batch.kubernetes.io/job-name")
        .map(String::as_str)
        == Some(job)
}

/// The Job's pod, once it is queued.
async fn queued(case: &Case, job: &str) -> Result<Pod> {
    let held = |pod: &&Pod| is_of(pod, job) && gates(pod) == [names::GATE];
    let what = format!("{job} is queued");
    let pods = wait_pods(&case.client, &case.namespace, &what, SOON, |pods| {
        pods.iter().any(|pod| held(&pod))
    });
    pods.await?.into_iter().find(|pod| held(&pod)).context(what)
}

/// The named condition of the Job's workload in Kueue.
async fn workload(site: &Site, job: &str, condition: &str) -> Result<Value> {
    let args = ["get", "workloads", "-n", &site.case.namespace, "-o", "json"];
    let list: Value = serde_json::from_str(&site.cluster.kubectl(&args).await?)?;
    let all = list["items"].as_array().into_iter().flatten();
    let mut of = all.filter(|one| one["metadata"]["ownerReferences"][0]["name"] == *job);
    let one = of.next().context("no workload")?;
    let conditions = one["status"]["conditions"].as_array();
    let mut named = conditions.into_iter().flatten();
    let found = named.find(|it| it["type"] == *condition);
    Ok(found
        .with_context(|| format!("no {condition}: {one}"))?
        .clone())
}

#[tokio::test]
async fn jobs_are_admitted_by_quota_and_then_queued() -> Result<()> {
    let (site, occupant) = Site::with_queue(1, &[]).await?;
    let (case, client) = (&site.case, &site.case.client);
    let _kueue = kueue(&site, None).await?;
    queue(&site, 2).await?;

    job(&site, "first").await?;
    let first = queued(case, "first").await?;
    job(&site, "second").await?;
    let second = queued(case, "second").await?;
    job(&site, "third").await?;
    eventually(SOON, "there is no quota for a third", async || {
        let said = workload(&site, "third", "QuotaReserved").await?;
        ensure!(said["status"] == "False", "{said}");
        Ok(())
    })
    .await?;
    let jobs = Api::<Job>::namespaced(client.clone(), &case.namespace);
    let third = jobs.get("third").await?.spec.context("a spec")?;
    ensure!(third.suspend == Some(true), "it runs");

    delete(client, &occupant, 0).await?;
    let first = wait_bound(client, &first, SOON).await?;
    let waits = case.pods().get(&second.name_any()).await?;
    ensure!(gates(&waits) == [names::GATE], "two pods for one card");
    // Who has ended gives back quota and card.
    set_phase(client, &first, "Succeeded").await?;
    let second = wait_bound(client, &second, SOON).await?;
    let third = queued(case, "third").await?;
    set_phase(client, &second, "Succeeded").await?;
    wait_bound(client, &third, SOON).await?;
    site.case.end().await
}

#[tokio::test]
async fn a_pod_without_an_owner_is_gated_twice_and_no_pod_waits_for_it_meanwhile() -> Result<()> {
    let (site, _) = Site::with_queue(3, &[]).await?;
    let (case, client) = (&site.case, &site.case.client);
    let _kueue = kueue(&site, None).await?;
    queue(&site, 1).await?;
    let queued = |name: &str| case.pod(name).gpu_mem(CARD).label(QUEUE, "gpu");

    let first = queued("first").create(client).await?;
    let first = wait_bound(client, &first, SOON).await?;
    let second = queued("second").create(client).await?;
    ensure!(gates(&second).contains(&ADMISSION), "{:?}", gates(&second));
    ensure!(
        gates(&second).contains(&names::GATE),
        "{:?}",
        gates(&second)
    );
    // There is a card, but no quota.
    let other = case.pod("other").gpu_mem(CARD).create(client).await?;
    let other = wait_bound(client, &other, SOON).await?;
    let later = case.pod("later").gpu_mem(CARD).create(client).await?;
    ensure!(gates(&later) == [names::GATE], "{:?}", gates(&later));
    delete(client, &other, 0).await?;
    wait_bound(client, &later, SOON).await?;
    let waits = case.pods().get("second").await?;
    ensure!(gates(&waits).contains(&ADMISSION), "{:?}", gates(&waits));

    delete(client, &first, 0).await?;
    wait_bound(client, &second, SOON).await?;
    site.case.end().await
}

#[tokio::test]
async fn pod_queued_for_longer_than_kueue_waits_is_evicted_and_comes_back() -> Result<()> {
    let (site, occupant) = Site::with_queue(1, &[]).await?;
    let (case, client) = (&site.case, &site.case.client);
    let patience = json!({ "timeout": "5s", "requeuingStrategy": { "backoffBaseSeconds": 1 } });
    let _kueue = kueue(&site, Some(patience)).await?;
    queue(&site, 1).await?;

    job(&site, "job").await?;
    let before = queued(case, "job").await?;
    wait_gone(client, &before, SOON).await?;
    eventually(SOON, "Kueue says why", async || {
        let said = workload(&site, "job", "Evicted").await?;
        ensure!(said["reason"] == "PodsReadyTimeout", "{said}");
        Ok(())
    })
    .await?;
    // It comes back as another pod, later in age.
    delete(client, &occupant, 0).await?;
    let what = "the Job has its card";
    let long = Duration::from_secs(120);
    wait_pods(client, &case.namespace, what, long, |pods| {
        pods.iter().any(|pod| is_of(pod, "job") && is_bound(pod))
    })
    .await?;
    site.case.end().await
}
