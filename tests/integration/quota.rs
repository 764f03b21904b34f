//! Quotas and LimitRanges on pods that take whole cards or many, and the right to use the priority of gpustow's own
//! pods.

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use gpustow_testkit::{Case, ControlPlane, Options, configure, eventually};
use k8s_openapi::api::core::v1::{Pod, ResourceQuota};
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::install::{install, try_create};
use crate::policies::{asks, pod, refusal};
use crate::support::SOON;

fn wish(case: &Case, name: &str, mib: &str, annotations: Value) -> Result<Pod> {
    let mut pod = pod(annotations, json!({ "containers": [asks("a", mib)] }))?;
    pod.metadata.name = Some(name.to_owned());
    pod.metadata.namespace = Some(case.namespace.clone());
    Ok(pod)
}

fn whole(gpus: &str) -> Value {
    json!({ names::EXCLUSIVE: "true", names::GPU_COUNT: gpus })
}

#[tokio::test]
async fn whole_cards_and_many_cards_count_what_the_administrator_says() -> Result<()> {
    let cluster = ControlPlane::start(Options {
        controllers: true,
        ..Options::default()
    })
    .await?;
    install(&cluster, "manifests/base").await?;
    let case = Case::new(&cluster, "quota").await?;
    let client = &case.client;
    let pods = Api::<Pod>::namespaced(client.clone(), &case.namespace);
    let counted = format!("requests.{}", names::GPU_MEM);
    for object in [
        json!({ "apiVersion": "v1", "kind": "ResourceQuota",
                "metadata": { "name": "team", "namespace": case.namespace },
                "spec": { "hard": { &counted: "1000" } } }),
        json!({ "apiVersion": "v1", "kind": "LimitRange",
                "metadata": { "name": "team", "namespace": case.namespace },
                "spec": { "limits": [{ "type": "Container", "max": { names::GPU_MEM: "500" },
                    "default": { names::GPU_MEM: "0" } }] } }),
    ] {
        cluster.apply(&object.to_string()).await?;
    }
    let one = wish(&case, "one", "1", whole("1"))?;
    eventually(SOON, "the quota counts", async || {
        Ok(try_create(client, &one).await?)
    })
    .await?;

    // The maximum is not given to a pod that requests nothing, as docs/quotas.md describes.
    let mut idle = pod(json!({}), json!({ "containers": [{ "name": "a" }] }))?;
    idle.metadata.namespace = Some(case.namespace.clone());
    let made = try_create(client, &idle).await?;
    let limits = made.spec.iter().flat_map(|spec| &spec.containers);
    let mut limits =
        limits.filter_map(|it| it.resources.as_ref()?.limits.as_ref()?.get(names::GPU_MEM));
    ensure!(limits.all(|limit| limit.0 == "0"), "{made:?}");
    let requests = "requests: {leastMiBPerGpu: 50, leastMiBPerExclusiveGpu: 400}";
    configure(client, &[requests.to_owned()]).await?;
    let message = eventually(SOON, "the least sizes are in force", async || {
        refusal(client, &one).await
    })
    .await?;
    let field = "spec.containers[0].resources.limits[gpustow.dev/gpu-mem]: ";
    let expected = format!(
        "{field}1 MiB over 1 whole GPUs are less than the 400 MiB that this cluster counts for each: ask for 400, or remove {}",
        names::EXCLUSIVE
    );
    ensure!(message.ends_with(&expected), "{message}");
    for (wish, expected) in [
        (
            wish(&case, "many", "8", json!({ names::GPU_COUNT: "8" }))?,
            "8 MiB over 8 GPUs are less than the 50 MiB that this cluster counts for each: ask for 400",
        ),
        (
            wish(&case, "whole", "399", whole("1"))?,
            "399 MiB over 1 whole GPUs are less than the 400 MiB that this cluster counts for each: \
             ask for 400, or remove gpustow.dev/exclusive",
        ),
        (
            wish(&case, "wholes", "700", whole("2"))?,
            "ask for 800, or remove gpustow.dev/exclusive",
        ),
        (
            wish(&case, "wholes", "500", whole("2"))?,
            "500 MiB over 2 whole GPUs are less than the 400 MiB that this cluster counts for each: \
             ask for 800, or remove gpustow.dev/exclusive",
        ),
    ] {
        let message = refusal(client, &wish).await?;
        ensure!(message.contains(expected), "{message}\nexpected {expected}");
    }
    for name in ["first", "second"] {
        let pod = wish(&case, name, "400", whole("1"))?;
        pods.create(&PostParams::default(), &pod).await?;
    }
    let message = refusal(client, &wish(&case, "third", "400", whole("1"))?).await?;
    ensure!(message.contains("exceeded quota: team"), "{message}");
    pods.create(
        &PostParams::default(),
        &wish(&case, "shares", "50", json!({}))?,
    )
    .await?;

    // One that was small does not become whole behind the quota's back.
    let change = json!({ "metadata": { "annotations": { names::EXCLUSIVE: "true" } } });
    let (params, change) = (PatchParams::default(), Patch::Merge(change));
    let patched = pods.patch("shares", &params, &change).await;
    let refused = patched.err().context("taken")?.to_string();
    ensure!(refused.contains("less than the 400 MiB"), "{refused}");

    case.end().await
}

#[tokio::test]
async fn our_priority_is_the_systems_and_the_old_class_goes_without_harm() -> Result<()> {
    let cluster = ControlPlane::start(Options {
        controllers: true,
        ..Options::default()
    })
    .await?;
    // As earlier manifests made it.
    let old = json!({ "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
                      "metadata": { "name": "gpustow-scheduler" }, "value": 1_000_000_000 });
    cluster.apply(&old.to_string()).await?;
    let case = Case::new(&cluster, "priority").await?;
    let bearing = |name: &str, class: &str| {
        let pod = json!({
            "metadata": { "name": name },
            "spec": { "priorityClassName": class,
                      "containers": [{ "name": "a", "image": "registry.k8s.io/pause:3.10" }] },
        });
        serde_json::from_value::<Pod>(pod)
    };
    let pods = Api::<Pod>::namespaced(case.client.clone(), &case.namespace);
    let params = PostParams::default();
    pods.create(&params, &bearing("old", "gpustow-scheduler")?)
        .await?;
    install(&cluster, "manifests/base").await?;
    let delete = [
        "delete",
        "priorityclass",
        "gpustow-scheduler",
        "--ignore-not-found",
    ];
    cluster.kubectl(&delete).await?;
    let change = Patch::Merge(json!({ "metadata": { "annotations": { "a": "b" } } }));
    let kept = pods.patch("old", &PatchParams::default(), &change).await?;
    let priority = kept.spec.and_then(|spec| spec.priority);
    assert_eq!(priority, Some(1_000_000_000), "who bears it keeps it");
    eventually(SOON, "no other pod takes it", async || {
        let refused = pods
            .create(&params, &bearing("new", "gpustow-scheduler")?)
            .await;
        ensure!(refused.is_err(), "taken");
        Ok(())
    })
    .await?;

    // Where clusters limit the system's classes to namespaces that have a quota for them.
    let ours = Api::<Pod>::namespaced(case.client.clone(), names::NAMESPACE);
    let quotas = Api::<ResourceQuota>::namespaced(case.client.clone(), names::NAMESPACE);
    for (name, class) in [
        ("a", "system-cluster-critical"),
        ("b", "system-node-critical"),
    ] {
        eventually(SOON, "the quota is known", async || {
            Ok(ours.create(&params, &bearing(name, class)?).await?)
        })
        .await?;
    }
    eventually(
        SOON,
        "the quota of gpustow's namespace counts both",
        async || {
            let quota = quotas.get("gpustow-critical-pods").await?;
            let used = quota
                .status
                .and_then(|status| status.used)
                .unwrap_or_default();
            let used = used
                .get("pods")
                .map_or("0", |count| count.0.as_str())
                .parse::<u32>()?;
            ensure!(used >= 2, "{used}");
            Ok(())
        },
    )
    .await?;
    case.end().await
}
