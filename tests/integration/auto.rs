//! Pods whose amount follows from the history of their workload, when they are created.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use gpustow_admission::{Act, Ask, Cluster, admit, auto};
use gpustow_advice::History;
use gpustow_api::config::GpustowConfigSpec;
use gpustow_api::owner::Owner;
use gpustow_api::workload::{ContainerHistory, TargetRef, name_of};
use gpustow_api::{GpuWorkload, GpuWorkloadSpec, names, quantity};
use gpustow_pack::Mib;
use gpustow_testkit::{Case, eventually, wait_bound};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::ResourceExt as _;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::json;

use crate::support::{SOON, rig};

/// A day in which one minute of fifty needs 9000 MiB and the others 5000.
fn history() -> History {
    let mut history = History::default();
    for minute in 0..1440 {
        let mib = if minute % 50 == 0 { 9000 } else { 5000 };
        history.add(Mib(mib), 1_700_000_000 + 60 * minute);
    }
    history
}

/// The workload's object, with a history of the image `web:1`.
async fn known(case: &Case, kind: &str, name: &str) -> Result<GpuWorkload> {
    let owner = Owner {
        kind: kind.to_owned(),
        name: name.to_owned(),
    };
    let container = ContainerHistory::new("main", "web:1", Mib(80_000), &history());
    let target_ref = TargetRef {
        kind: owner.kind.clone(),
        name: owner.name.clone(),
    };
    let containers = vec![container];
    let spec = GpuWorkloadSpec {
        target_ref,
        containers,
    };
    let object = GpuWorkload::new(&name_of(&owner), spec);
    let objects = Api::namespaced(case.client.clone(), &case.namespace);
    Ok(objects.create(&PostParams::default(), &object).await?)
}

pub(crate) async fn namespace(
    case: &Case,
    quantile: Option<&str>,
    default: Option<&str>,
) -> Result<()> {
    let patch = json!({ "metadata": {
        "labels": { names::AUTO_LABEL: quantile }, "annotations": { names::AUTO_DEFAULT: default },
    } });
    let namespaces = Api::<Namespace>::all(case.client.clone());
    let params = PatchParams::default();
    namespaces
        .patch(&case.namespace, &params, &Patch::Merge(patch))
        .await?;
    Ok(())
}

/// A pod without an amount, of the controller that Kubernetes would name.
pub(crate) fn pod(case: &Case, kind: &str, owner: &str, image: &str) -> Pod {
    let mut pod = case
        .pod(&format!("{}-{}", owner, rand::random::<u32>()))
        .annotation(names::GPU_MEM, "auto")
        .label("pod-template-hash", "5f9474c99c")
        .scheduler("default-scheduler")
        .with(|spec| spec.containers[0].image = Some(image.to_owned()))
        .build();
    if kind == "Pod" {
        pod.metadata.name = Some(owner.to_owned());
        return pod;
    }
    pod.metadata.owner_references = Some(vec![OwnerReference {
        api_version: "v1".to_owned(),
        kind: kind.to_owned(),
        name: owner.to_owned(),
        uid: "5f9474c9-0000-0000-0000-000000000000".to_owned(),
        controller: Some(true),
        block_owner_deletion: None,
    }]);
    pod
}

/// The pod as the API server would store it.
pub(crate) async fn admitted(case: &Case, pod: &Pod) -> Result<Pod> {
    let params = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    Ok(case.pods().create(&params, pod).await?)
}

/// The pod as the API server would store it, according to `kubectl gpustow fit`.
async fn foreseen(case: &Case, pod: Pod) -> Result<Pod> {
    let namespaces = Api::<Namespace>::all(case.client.clone());
    let namespace = namespaces.get(&case.namespace).await?.metadata;
    let mut object = serde_json::to_value(pod)?;
    let histories = Api::<GpuWorkload>::namespaced(case.client.clone(), &case.namespace);
    let name = name_of(&auto::workload(&object));
    let history = histories.get_opt(&name).await?;
    let cluster = Cluster {
        resource: names::GPU_MEM,
        spec: &GpustowConfigSpec::default(),
        queue_from: &[],
    };
    let ask = Ask {
        pod: &object,
        act: Act::Create,
        user: "",
    };
    object = admit(ask, cluster, &namespace, history.as_ref())?.pod;
    Ok(serde_json::from_value(object)?)
}

/// Do both give the pod the same amount, limit and word about it?
async fn is_foreseen(case: &Case, pod: &Pod) -> Result<()> {
    let said = |pod: &Pod| -> Result<_> {
        let spec = pod.spec.as_ref().context("no spec")?;
        let limits = spec.containers[0].resources.as_ref();
        let limits = limits.and_then(|it| it.limits.as_ref());
        let amount = limits.and_then(|it| it.get(names::GPU_MEM));
        let notes = pod.annotations();
        let limit = notes.get(&format!("{}main", names::MEM_LIMIT_OF));
        let amount = amount.map(|it| quantity::rounded_up(it, 1));
        Ok((amount, limit.cloned(), notes.get(names::GPU_MEM).cloned()))
    };
    let (one, other) = (
        admitted(case, pod).await?,
        foreseen(case, pod.clone()).await?,
    );
    ensure!(said(&one)? == said(&other)?, "{one:?} and {other:?}");
    Ok(())
}

/// Amount, limit, where the amount is from, and whether the container gets its devices.
fn got(pod: &Pod) -> Result<(String, Option<String>, String, bool)> {
    let spec = pod.spec.as_ref().context("no spec")?;
    let main = spec.containers.first().context("no container")?;
    let resources = main.resources.as_ref().context("no resources")?;
    let amount = |list: &Option<BTreeMap<String, Quantity>>| {
        Some(list.as_ref()?.get(names::GPU_MEM)?.0.clone())
    };
    let limits = amount(&resources.limits).context("no amount")?;
    ensure!(
        amount(&resources.requests).as_ref() == Some(&limits),
        "{resources:?}"
    );
    let notes = pod.annotations();
    let env = main.env.iter().flatten();
    let devices = env
        .clone()
        .filter(|it| it.name == names::VISIBLE_DEVICES)
        .all(|it| it.value_from.is_some());
    let devices = devices && env.clone().any(|it| it.name == names::VISIBLE_DEVICES);
    let ours = spec.scheduler_name.as_deref() == Some(names::SCHEDULER);
    Ok((
        limits,
        notes.get(&format!("{}main", names::MEM_LIMIT_OF)).cloned(),
        notes.get(names::GPU_MEM).cloned().unwrap_or_default(),
        devices && ours,
    ))
}

#[tokio::test]
async fn new_pod_of_a_known_workload_gets_its_amount() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "auto").await?;
    namespace(&case, Some("p95"), Some("12000")).await?;
    let object = known(&case, "Deployment", "web").await?;
    for (kind, name) in [
        ("StatefulSet", "web"),
        ("CronJob", "nightly"),
        ("Pod", "alone"),
    ] {
        known(&case, kind, name).await?;
    }
    let advice = &object.spec.containers[0].advice;
    let p95 = |from: &str| {
        let (amount, limit) = (advice.p95_mib.to_string(), advice.limit_mib.to_string());
        (amount, Some(limit), from.to_owned(), true)
    };
    let kinds = [
        ("ReplicaSet", "web-5f9474c99c"),
        ("StatefulSet", "web"),
        ("Job", "nightly-29384756"),
        ("Pod", "alone"),
    ];
    for (kind, owner) in kinds {
        eventually(SOON, "the API server knows the history", async || {
            let got = got(&admitted(&case, &pod(&case, kind, owner, "web:1")).await?)?;
            ensure!(got == p95("auto-p95"), "{kind}: {got:?}");
            Ok(())
        })
        .await?;
    }
    for (kind, owner) in kinds {
        is_foreseen(&case, &pod(&case, kind, owner, "web:1")).await?;
        is_foreseen(&case, &pod(&case, kind, owner, "web:2")).await?;
    }
    // It is placed like any other.
    case.node("n", &[80_000]).create(&case.client).await?;
    let pod = pod(&case, "ReplicaSet", "web-5f9474c99c", "web:1");
    let pod = case.pods().create(&PostParams::default(), &pod).await?;
    wait_bound(&case.client, &pod, SOON).await?;
    rig.end(case).await
}

#[tokio::test]
async fn pod_without_a_history_gets_the_default_or_a_reason() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "auto-new").await?;
    let new = || pod(&case, "ReplicaSet", "young-5f9474c99c", "web:2");
    let refused = async |text: &str| {
        let refused = admitted(&case, &new()).await;
        let refused = refused.err().context("it is admitted")?.to_string();
        ensure!(refused.contains(text), "{refused}");
        let foreseen = foreseen(&case, new()).await.err();
        let foreseen = foreseen.context("it is foreseen")?.to_string();
        ensure!(refused.contains(&foreseen), "{refused} and {foreseen}");
        anyhow::Ok(())
    };
    eventually(SOON, "the policy is in force", async || {
        refused("the namespace does not allow it").await
    })
    .await?;
    known(&case, "Deployment", "web").await?;
    namespace(&case, Some("p99"), None).await?;
    eventually(SOON, "the namespace allows it", async || {
        refused("has no advice to follow").await
    })
    .await?;
    // A new image gets the amount of an earlier image.
    let image = pod(&case, "ReplicaSet", "web-5f9474c99c", "web:2");
    eventually(SOON, "the API server knows the history", async || {
        let (.., from, _) = got(&admitted(&case, &image).await?)?;
        ensure!(from == "auto-earlier-image", "{from}");
        Ok(())
    })
    .await?;
    is_foreseen(&case, &image).await?;
    namespace(&case, Some("p99"), Some("12000")).await?;
    eventually(SOON, "the namespace has a default", async || {
        let got = got(&admitted(&case, &new()).await?)?;
        let expected = ("12k".to_owned(), None, "auto-default".to_owned(), true);
        ensure!(got == expected, "{got:?}");
        Ok(())
    })
    .await?;
    // The default counts for each of the pod's GPUs, and a pod's own amount stays.
    let mut own = new();
    own.metadata
        .annotations
        .get_or_insert_default()
        .insert(names::GPU_COUNT.to_owned(), "2".to_owned());
    let (amount, _, from, _) = got(&admitted(&case, &own).await?)?;
    assert_eq!((&*amount, &*from), ("24k", "auto-default"));
    is_foreseen(&case, &own).await?;
    let own = json!({ "limits": { names::GPU_MEM: "500" } });
    let mut said = pod(&case, "ReplicaSet", "web-5f9474c99c", "web:1");
    if let Some(spec) = &mut said.spec {
        spec.containers[0].resources = serde_json::from_value(own)?;
    }
    let (amount, _, from, _) = got(&admitted(&case, &said).await?)?;
    assert_eq!((&*amount, &*from), ("500", "auto"));
    case.end().await
}
