//! The author of a template of pods gets at once the refusals that would come later.

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use gpustow_testkit::{ControlPlane, eventually};
use serde_json::{Value, json};

use crate::install::installed;
use crate::policies::{asks, own_env, with};
use crate::support::SOON;

/// An object of this kind with a template of pods.
fn made(kind: &str, annotations: &Value, container: &Value) -> Value {
    let mut container = container.clone();
    container["image"] = json!("registry.k8s.io/pause:3.10");
    let labels = json!({ "app": "a" });
    let restart = if ["Job", "CronJob"].contains(&kind) {
        "Never"
    } else {
        "Always"
    };
    let template = json!({
        "metadata": { "labels": labels, "annotations": annotations },
        "spec": { "containers": [container], "restartPolicy": restart },
    });
    let selector = json!({ "matchLabels": labels });
    let (group, spec) = match kind {
        "Job" => ("batch/v1", json!({ "template": template })),
        "CronJob" => (
            "batch/v1",
            json!({ "schedule": "0 0 1 1 *", "jobTemplate": { "spec": { "template": template } } }),
        ),
        "ReplicationController" => ("v1", json!({ "selector": labels, "template": template })),
        "StatefulSet" => (
            "apps/v1",
            json!({ "serviceName": "a", "selector": selector, "template": template }),
        ),
        _ => (
            "apps/v1",
            json!({ "selector": selector, "template": template }),
        ),
    };
    json!({ "apiVersion": group, "kind": kind, "metadata": { "name": "a", "namespace": "default" }, "spec": spec })
}

fn pod(annotations: Value, container: Value) -> Result<Value> {
    let pod = crate::policies::pod(annotations, json!({ "containers": [container] }))?;
    let mut pod = serde_json::to_value(pod)?;
    pod["apiVersion"] = json!("v1");
    pod["kind"] = json!("Pod");
    Ok(pod)
}

/// The API server's warning when the object is created; nothing if there is none.
async fn warned(cluster: &ControlPlane, object: &Value) -> Result<String> {
    let file = cluster
        .dir()
        .join(format!("warned-{:08x}.json", rand::random::<u32>()));
    std::fs::write(&file, object.to_string())?;
    let path = file.to_str().context("path of the file")?;
    let create = [
        "create",
        "--dry-run=server",
        "--warnings-as-errors",
        "-f",
        path,
    ];
    Ok(match cluster.kubectl(&create).await {
        Ok(_) => String::new(),
        Err(error) => {
            let said = format!("{error:#}");
            ensure!(said.contains("Warning:"), "refused: {said}");
            said
        }
    })
}

/// So many annotations, one of them ours.
fn crowd(annotations: usize) -> Value {
    let of_others = (1..annotations).map(|n| (format!("example.com/{n}"), json!("")));
    let ours = (names::GPU_COUNT.to_owned(), json!("2"));
    Value::Object(of_others.chain([ours]).collect())
}

/// Annotations for a pod without a request, and the message of `kubectl gpustow fit` about them.
fn unasked() -> Vec<(Value, String)> {
    let ours = [
        names::GPU_COUNT,
        names::POLICY,
        names::EXCLUSIVE,
        names::GPU_MEM,
        "gpustow.dev/gpu_count",
        "gpu-count.gpustow.dev/a",
    ];
    let keys = ours.map(|key| json!({ key: "2", "example.com/own": "x" }));
    let says = |annotations: Value| {
        let map = serde_json::from_value(annotations.clone()).unwrap_or_default();
        let says = gpustow_admission::keys::unasked(&map, names::GPU_MEM);
        let says = says.map_or_else(|| "nothing".to_owned(), |it| it.to_string());
        (annotations, says)
    };
    keys.into_iter().chain([crowd(256)]).map(says).collect()
}

#[tokio::test]
async fn the_author_of_a_template_is_warned_of_what_its_pods_would_be_refused_for() -> Result<()> {
    let cluster = installed().await?;
    let none = json!({});
    let too_much = made("Deployment", &none, &asks("a", "8Gi"));
    eventually(SOON, "templates are judged", async || {
        ensure!(!warned(cluster, &too_much).await?.is_empty(), "no warning");
        Ok(())
    })
    .await?;
    let privileged = json!({ "privileged": true });
    let bad = [
        (
            none.clone(),
            asks("a", "8Gi"),
            "spec.containers[0].resources.limits[gpustow.dev/gpu-mem]: no GPU has 8589934592 MiB: the unit is MiB already, write 8192",
        ),
        (
            json!({ names::GPU_COUNT: "two" }),
            asks("a", "1"),
            "metadata.annotations[gpustow.dev/gpu-count]: \"two\" is not a number of GPUs",
        ),
        (
            json!({ names::EXCLUSIVE: "yes" }),
            asks("a", "1"),
            "metadata.annotations[gpustow.dev/exclusive]: \"yes\" is neither",
        ),
        (
            json!({ "gpustow.dev/gpu_count": "2" }),
            asks("a", "2"),
            "metadata.annotations[gpustow.dev/gpu_count]: there is no such annotation: write gpustow.dev/gpu-count",
        ),
        (
            json!({ "gpustow.dev/quota": "2" }),
            asks("a", "2"),
            "metadata.annotations[gpustow.dev/quota]: unknown annotation ",
        ),
        (
            none.clone(),
            with(asks("a", "1"), "securityContext", privileged),
            "spec.containers[0].securityContext.privileged",
        ),
        (
            none.clone(),
            with(asks("a", "1"), "env", own_env("all")),
            "spec.containers[0].env: NVIDIA_VISIBLE_DEVICES is gpustow's to set",
        ),
    ];
    let kinds = [
        "DaemonSet",
        "Deployment",
        "ReplicaSet",
        "StatefulSet",
        "ReplicationController",
        "Job",
        "CronJob",
    ];
    for kind in kinds {
        let at = if kind == "CronJob" {
            "spec.jobTemplate.spec.template."
        } else {
            "spec.template."
        };
        for (annotations, container, expected) in &bad {
            let said = warned(cluster, &made(kind, annotations, container)).await?;
            ensure!(
                said.contains(&format!("{at}{expected}")),
                "{kind}: {said}\nexpected {at}{expected}"
            );
        }
        for (annotations, container) in [
            (none.clone(), asks("a", "8k")),
            (
                json!({ names::GPU_COUNT: "2", names::EXCLUSIVE: "true" }),
                asks("a", "8192"),
            ),
            // None of our business.
            (
                json!({ "example.com/gpustow.dev": "?" }),
                json!({ "name": "a" }),
            ),
        ] {
            let said = warned(cluster, &made(kind, &annotations, &container)).await?;
            ensure!(said.is_empty(), "{kind}: {said}");
        }
        for (annotations, expected) in unasked() {
            let object = made(kind, &annotations, &json!({ "name": "a" }));
            let said = warned(cluster, &object).await?;
            ensure!(
                said.contains(&format!("{at}{expected}")),
                "{kind}: {said}\nexpected {at}{expected}"
            );
        }
    }
    Ok(())
}

#[tokio::test]
async fn an_unknown_key_is_refused_and_a_later_versions_is_warned_of() -> Result<()> {
    let cluster = installed().await?;
    let client = cluster.admin()?;
    // The message of `kubectl gpustow fit`.
    let ours = |key: &str| {
        let annotations = [(key.to_owned(), "2".to_owned())].into();
        let known = gpustow_admission::keys::known(&annotations, names::GPU_MEM);
        known.err().map(|it| it.to_string()).unwrap_or_default()
    };
    for (key, mend) in [
        ("gpustow.dev/gpu_count", "write gpustow.dev/gpu-count"),
        ("gpustow.dev/gpucount", "write gpustow.dev/gpu-count"),
        ("gpustow.dev/GPU-Count", "write gpustow.dev/gpu-count"),
        ("gpustow.dev/gpu-counts", "write gpustow.dev/gpu-count"),
        ("gpustow.dev/gpus", "write gpustow.dev/gpu-count"),
        ("gpustow.dev/count", "write gpustow.dev/gpu-count"),
        ("gpustow.dev/exlusive", "write gpustow.dev/exclusive"),
        ("gpustow.dev/Exclusive", "write gpustow.dev/exclusive"),
        ("gpustow.dev/polcy", "write gpustow.dev/policy"),
        ("gpustow.dev/policies", "write gpustow.dev/policy"),
        (
            "gpustow.dev/gpu-memory-limit",
            "write gpustow.dev/gpu-mem-limit",
        ),
        ("gpustow.dev/limit", "write gpustow.dev/gpu-mem-limit"),
        ("gpustow.dev/enforced", "write gpustow.dev/enforce"),
        (
            "gpu-counts.gpustow.dev/a",
            "write gpu-count.gpustow.dev/<container>",
        ),
        (
            "gpucount.gpustow.dev/a",
            "write gpu-count.gpustow.dev/<container>",
        ),
        (
            "gpustow.dev/gpu-mem",
            "write it into resources.limits of a container",
        ),
    ] {
        let asking = crate::policies::pod(
            json!({ key: "2" }),
            json!({ "containers": [asks("a", "2")] }),
        )?;
        let said = crate::policies::refusal(&client, &asking)
            .await
            .context(key)?;
        ensure!(
            said.contains(&format!("metadata.annotations[{key}]: ")) && said.ends_with(mend),
            "{said}"
        );
        ensure!(said.ends_with(&ours(key)), "{said}\nbut {}", ours(key));
        let plain = crate::policies::pod(
            json!({ key: "2" }),
            json!({ "containers": [{ "name": "a" }] }),
        )?;
        crate::install::try_create(&client, &plain)
            .await
            .context(key)?;
    }
    for key in [
        "gpustow.dev/quota",
        "gpustow.dev/queue",
        "gpustow.dev/topology",
        "limits.gpustow.dev/a",
    ] {
        let asking = pod(json!({ key: "2" }), asks("a", "2"))?;
        let said = crate::policies::refusal(&client, &serde_json::from_value(asking)?).await?;
        ensure!(
            said.contains("unknown annotation") && said.ends_with(&ours(key)),
            "{said}"
        );
        for version in ["9", "0.99", "0.1.99999", "9.0.0-rc.1"] {
            let later = json!({ key: "2", names::MADE_FOR: version });
            let said = warned(cluster, &pod(later, asks("a", "2"))?).await?;
            let warning =
                format!("metadata.annotations[{key}]: this version of gpustow does not know it");
            ensure!(said.contains(&warning), "{key}: {said}");
        }
        for version in ["", "0", "0.1.0", "later", "9.x", "1.2.3.4", "999999"] {
            let not = json!({ key: "2", names::MADE_FOR: version });
            let not = serde_json::from_value(pod(not, asks("a", "2"))?)?;
            let said = crate::policies::refusal(&client, &not).await?;
            ensure!(said.contains("unknown annotation"), "{version}: {said}");
        }
    }
    let said = warned(
        cluster,
        &pod(
            json!({ "example.com/own": "x", names::GPU_COUNT: "2" }),
            asks("a", "2"),
        )?,
    )
    .await?;
    ensure!(said.is_empty(), "{said}");
    Ok(())
}

#[tokio::test]
async fn who_creates_a_pod_with_annotations_that_asks_for_nothing_is_warned() -> Result<()> {
    let cluster = installed().await?;
    let none = json!({ "name": "a" });
    for (annotations, expected) in unasked() {
        let annotated = pod(annotations, none.clone())?;
        eventually(SOON, "annotations are looked at", async || {
            let said = warned(cluster, &annotated).await?;
            ensure!(said.contains(&expected), "{said}\nexpected {expected}");
            Ok(())
        })
        .await?;
    }
    let owned = |controller: bool| {
        let mut owned = pod(json!({ names::GPU_COUNT: "2" }), none.clone())?;
        owned["metadata"]["ownerReferences"] = json!([{
            "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "a", "uid": "a", "controller": controller,
        }]);
        anyhow::Ok(owned)
    };
    ensure!(!warned(cluster, &owned(false)?).await?.is_empty());
    for quiet in [
        pod(json!({ "example.com/gpustow.dev": "?" }), none.clone())?,
        pod(json!({ names::GPU_COUNT: "2" }), asks("a", "2"))?,
        // Its template was warned of.
        owned(true)?,
    ] {
        let said = warned(cluster, &quiet).await?;
        ensure!(said.is_empty(), "{said}\n{quiet}");
    }
    let zero = pod(json!({ names::POLICY: "spread" }), asks("a", "0"))?;
    ensure!(!warned(cluster, &zero).await?.is_empty());
    // It only warns.
    let client = cluster.admin()?;
    crate::install::try_create(&client, &serde_json::from_value(zero)?).await?;
    Ok(())
}
