//! JobSet creates the pods of a gang: all of a JobSet's pods are bound, or none.

use anyhow::{Result, ensure};
use gpustow_testkit::builders::{delete, set_phase};
use gpustow_testkit::{Process, eventually, refusal, wait_bound, wait_pods};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde_json::json;

use crate::manager::Manager;
use crate::site::{CARD, SOON, Site, is_bound};

async fn jobset(site: &Site) -> Result<Process> {
    let manager = Manager {
        name: "jobset",
        config_version: "config.jobset.x-k8s.io/v1alpha1",
        config: json!({}),
        args: &[],
        makes_certificate: false,
    };
    manager.start(site).await
}

/// A JobSet of a leader and so many workers, each with a GPU of its own, that is a gang.
async fn create(site: &Site, name: &str, workers: usize) -> Result<()> {
    let namespace = &site.case.namespace;
    let meta = json!({ "name": name, "namespace": namespace });
    let group = json!({
        "apiVersion": "scheduling.k8s.io/v1beta1", "kind": "PodGroup", "metadata": meta,
        "spec": { "schedulingPolicy": { "gang": { "minCount": workers + 1 } } },
    });
    site.cluster.apply(&group.to_string()).await?;
    let pod = site.case.pod(name).gpu_mem(CARD).build();
    let mut spec = serde_json::to_value(pod.spec)?;
    spec["restartPolicy"] = "Never".into();
    spec["schedulingGroup"] = json!({ "podGroupName": name });
    let job = |name: &str, pods: usize| {
        json!({ "name": name, "template": { "spec": {
            "parallelism": pods, "completions": pods, "backoffLimit": 0,
            "template": { "spec": spec },
        } } })
    };
    let set = json!({
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": meta,
        "spec": { "replicatedJobs": [job("leader", 1), job("workers", workers)] },
    });
    site.cluster.apply(&set.to_string()).await?;
    Ok(())
}

fn is_of(pod: &Pod, set: &str) -> bool {
    let name = pod.labels().get("jobset.sigs.k8s.io/jobset-name");
    name.is_some_and(|it| it == set)
}

/// The pods of the JobSet, once there are so many and `done` holds of each.
async fn pods(
    site: &Site,
    set: &str,
    count: usize,
    what: &str,
    done: impl Fn(&Pod) -> bool,
) -> Result<Vec<Pod>> {
    let (client, namespace) = (&site.case.client, &site.case.namespace);
    let what = format!("{set} {what}");
    let all = wait_pods(client, namespace, &what, SOON, |all| {
        let of_set: Vec<_> = all.iter().filter(|pod| is_of(pod, set)).collect();
        of_set.len() == count && of_set.into_iter().all(&done)
    });
    let all = all.await?.into_iter();
    Ok(all.filter(|pod| is_of(pod, set)).collect())
}

/// kube-scheduler refused the pod.
fn is_refused(pod: &Pod) -> bool {
    refusal(pod).is_some()
}

#[tokio::test]
async fn pods_of_a_jobset_are_bound_together_and_hold_nothing_while_they_wait() -> Result<()> {
    let site = Site::start("manifests/base", 2, &[]).await?;
    let (case, client) = (&site.case, &site.case.client);
    let _jobset = jobset(&site).await?;

    // Two of its three pods fit.
    create(&site, "large", 2).await?;
    pods(&site, "large", 3, "waits", is_refused).await?;
    let single = case.pod("single").gpu_mem(CARD).create(client).await?;
    let single = wait_bound(client, &single, SOON).await?;
    delete(client, &single, 0).await?;

    create(&site, "first", 1).await?;
    let first = pods(&site, "first", 2, "is bound", is_bound).await?;
    create(&site, "second", 1).await?;
    pods(&site, "second", 2, "waits", is_refused).await?;
    for pod in &first {
        set_phase(client, pod, "Succeeded").await?;
    }
    pods(&site, "second", 2, "is bound", is_bound).await?;
    eventually(SOON, "the first JobSet is complete", async || {
        let args = ["get", "jobset", "first", "-n", &case.namespace];
        let args = [&args[..], &["-o", "jsonpath={.status.terminalState}"]].concat();
        let state = site.cluster.kubectl(&args).await?;
        ensure!(state == "Completed", "{state}");
        Ok(())
    })
    .await?;
    let large = pods(&site, "large", 3, "still waits", is_refused).await?;
    ensure!(!large.iter().any(is_bound), "bound in part");
    site.case.end().await
}
