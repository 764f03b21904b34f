//! Limits that the driver holds: the fields that admission writes, its refusals, and the nodes of such pods.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use gpustow_api::{names, request};
use gpustow_testkit::{ControlPlane, Options, configure, eventually};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::install::{install, installed, try_create};
use crate::policies::{asks, pod, refusal, with};
use crate::support::SOON;

/// The variables that NVIDIA's hook would read, by container.
fn literals(pod: &Pod) -> BTreeMap<String, Vec<String>> {
    let spec = pod.spec.iter();
    let containers = spec.flat_map(|spec| {
        spec.init_containers
            .iter()
            .flatten()
            .chain(&spec.containers)
    });
    let of = |names: [&str; 2], env: &[k8s_openapi::api::core::v1::EnvVar]| {
        let ours = env.iter().filter(|it| names.contains(&it.name.as_str()));
        ours.map(|it| format!("{}={}", it.name, it.value.as_deref().unwrap_or("?")))
            .collect()
    };
    let names = [names::MEMORY_LIMIT, names::MEMORY_REQUEST];
    containers
        .map(|it| {
            (
                it.name.clone(),
                of(names, it.env.as_deref().unwrap_or_default()),
            )
        })
        .collect()
}

fn held(mib: &str) -> Vec<String> {
    vec![
        format!("{}={mib}", names::MEMORY_LIMIT),
        format!("{}=0", names::MEMORY_REQUEST),
    ]
}

/// A pod of every kind of container.
fn mixed(annotations: Value) -> Result<Pod> {
    pod(
        annotations,
        json!({
            "initContainers": [
                asks("init", "8Ki"),
                with(asks("sidecar", "2048"), "restartPolicy", json!("Always")),
            ],
            "containers": [
                with(asks("main", "4096"), "env", json!([{ "name": "A", "value": "b" }])),
                asks("burst", "2048"),
                asks("all", "2048"),
                { "name": "idle" },
                { "name": "whole", "resources": { "limits": { names::NVIDIA_GPU: "1" } } },
            ],
        }),
    )
}

fn expected() -> BTreeMap<String, Vec<String>> {
    [
        ("init", held("4096")),
        ("sidecar", held("1024")),
        ("main", held("2048")),
        ("burst", held("3000")),
        ("all", vec![]),
        ("idle", vec![]),
        ("whole", vec![]),
    ]
    .map(|(name, held)| (name.to_owned(), held))
    .into()
}

const BURST: &str = "gpu-mem-limit.gpustow.dev/burst";
const ALL: &str = "gpu-mem-limit.gpustow.dev/all";

#[tokio::test]
async fn containers_that_the_driver_limits_get_the_literals_of_its_hook() -> Result<()> {
    let client = installed().await?.admin()?;
    let said = json!({ names::GPU_COUNT: "2", BURST: "6000", ALL: "max" });
    let mut driver = said.clone();
    driver[names::ENFORCE] = json!("driver");
    let made = try_create(&client, &mixed(driver.clone())?).await?;
    assert_eq!(literals(&made), expected());
    // The extender reads the same out of it.
    let mut stored = made.clone();
    stored.metadata.resource_version = Some("1".to_owned());
    let (request, _) = request(&stored, names::GPU_MEM)?;
    let limits = request.claims.iter().map(|claim| claim.driver_limit.0);
    let limits: Vec<u64> = limits.collect();
    assert_eq!(limits, [4096, 1024, 2048, 3000, 0]);
    for enforce in ["watch", "none"] {
        let mut other = said.clone();
        other[names::ENFORCE] = json!(enforce);
        let made = try_create(&client, &mixed(other)?).await?;
        ensure!(literals(&made).values().all(Vec::is_empty), "{enforce}");
    }
    // Exclusive pods need none.
    let whole = json!({ names::ENFORCE: "driver", names::EXCLUSIVE: "true" });
    let made = try_create(
        &client,
        &pod(whole, json!({ "containers": [asks("a", "4096")] }))?,
    )
    .await?;
    ensure!(literals(&made).values().all(Vec::is_empty));
    Ok(())
}

/// The extender refuses these limits too, with these messages.
#[tokio::test]
async fn a_limit_that_cannot_be_is_refused_at_creation() -> Result<()> {
    let client = installed().await?.admin()?;
    let driver = |more: Value| {
        let mut notes = more;
        notes[names::ENFORCE] = json!("driver");
        notes
    };
    let limit = |text: &str| json!({ names::MEM_LIMIT: text });
    for annotations in [
        limit("8Gi"),
        limit("9000Mi"),
        limit("1.5Gi"),
        limit("0Gi"),
        limit("+8Gi"),
        limit("100000Gi"),
        limit("0"),
        limit(""),
        limit("-1"),
        limit("1000000000"),
        limit("4096"),
        limit("999999999"),
        json!({ names::GPU_COUNT: "2", names::MEM_LIMIT: "8193" }),
        json!({ "gpu-mem-limit.gpustow.dev/c": "9000" }),
        json!({ names::EXCLUSIVE: "true", names::MEM_LIMIT: "max" }),
        json!({ names::ENFORCE: "on" }),
        driver(json!({ names::GPU_COUNT: "16" })),
        json!({ names::GPU_COUNT: "16", names::MEM_LIMIT: "8192" }),
        driver(json!({ "gpu-mem-limit.gpustow.dev/a": "8000" })),
        json!({ "gpustow.dev/gpu-memory-limit": "9000" }),
        json!({ "gpu-memlimit.gpustow.dev/a": "9000" }),
        json!({ "gpustow.dev/enforced": "driver" }),
    ] {
        let pod = pod(
            annotations.clone(),
            json!({ "containers": [asks("a", "8192")] }),
        )?;
        let ours = request(&pod, names::GPU_MEM)
            .err()
            .map(|bad| bad.to_string());
        let notes = pod.metadata.annotations.clone().unwrap_or_default();
        let keys = gpustow_admission::keys::known(&notes, names::GPU_MEM);
        let ours = ours.or(keys.err().map(|bad| bad.to_string()));
        let ours = ours.with_context(|| format!("{annotations} is taken"))?;
        let theirs = refusal(&client, &pod).await?;
        ensure!(
            theirs.contains(&ours),
            "{annotations}: {theirs}, not {ours}"
        );
    }
    let own = |name: &str, value: &str| {
        with(
            asks("a", "8192"),
            "env",
            json!([{ "name": name, "value": value }]),
        )
    };
    for (annotations, container) in [
        (json!({}), own(names::MEMORY_LIMIT, "8192")),
        (json!({}), own(names::MEMORY_REQUEST, "4096")),
        (driver(json!({})), own(names::MEMORY_LIMIT, "9000")),
        (driver(json!({})), own(names::MEMORY_REQUEST, "4096")),
        (
            driver(json!({})),
            json!({ "name": "idle", "env": [{ "name": names::MEMORY_REQUEST, "value": "0" }] }),
        ),
    ] {
        let pod = pod(
            annotations,
            json!({ "containers": [asks("z", "8192"), container] }),
        )?;
        let said = refusal(&client, &pod).await?;
        ensure!(
            said.contains("spec.containers[1].env") && said.contains("gpustow's to set"),
            "{said}"
        );
    }
    Ok(())
}

async fn patched(client: &Client, annotations: Value) -> Result<String> {
    let patch = json!({ "metadata": { "annotations": annotations } });
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    match pods
        .patch("held", &PatchParams::default(), &Patch::Merge(patch))
        .await
    {
        Ok(_) => Ok(String::new()),
        Err(kube::Error::Api(status)) => Ok(status.message),
        Err(error) => Err(error.into()),
    }
}

#[tokio::test]
async fn what_was_written_into_containers_stays_what_the_annotations_say() -> Result<()> {
    let client = installed().await?.admin()?;
    let mut held = pod(
        json!({ names::ENFORCE: "driver", names::POLICY: "spread" }),
        json!({ "containers": [asks("a", "8192")] }),
    )?;
    held.metadata.name = Some("held".to_owned());
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    pods.create(&PostParams::default(), &held).await?;
    for change in [
        json!({ names::ENFORCE: "none" }),
        json!({ names::ENFORCE: null }),
        json!({ names::MEM_LIMIT: "9000" }),
        json!({ "gpu-mem-limit.gpustow.dev/a": "max" }),
        json!({ names::GPU_COUNT: "2" }),
        json!({ names::EXCLUSIVE: "true" }),
    ] {
        let said = patched(&client, change.clone()).await?;
        ensure!(said.contains("create the pod again"), "{change}: {said}");
    }
    let said = patched(&client, json!({ names::POLICY: "tight" })).await?;
    ensure!(said.is_empty(), "{said}");
    // A container that is added would see the card without a limit.
    let field = format!("metadata.annotations['{}a']", names::DEVICES_OF);
    let env = json!([{ "name": names::VISIBLE_DEVICES, "valueFrom": { "fieldRef": { "fieldPath": field } } }]);
    let added = json!({ "name": "debug", "image": "i", "env": env });
    let patch = json!({ "spec": { "ephemeralContainers": [added] } });
    let said = pods
        .patch_ephemeral_containers("held", &PatchParams::default(), &Patch::Strategic(patch))
        .await;
    let Err(kube::Error::Api(status)) = said else {
        anyhow::bail!("a container is added that sees the GPU without a limit");
    };
    ensure!(
        status.message.contains("gets no GPU: remove it"),
        "{}",
        status.message
    );
    pods.delete("held", &DeleteParams::default().grace_period(0))
        .await?;
    Ok(())
}

#[tokio::test]
async fn an_administrators_default_is_for_pods_that_do_not_say() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    install(&cluster, "manifests/base").await?;
    let client = cluster.admin()?;
    let requests = "requests: {enforce: driver}".to_owned();
    configure(&client, &[requests]).await?;
    let said = || json!({ names::GPU_COUNT: "2", BURST: "6000", ALL: "max" });
    let enforce = |pod: &Pod| {
        pod.metadata
            .annotations
            .as_ref()?
            .get(names::ENFORCE)
            .cloned()
    };
    eventually(SOON, "the default is in force", async || {
        let made = try_create(&client, &mixed(said())?).await?;
        ensure!(enforce(&made).as_deref() == Some("driver"));
        assert_eq!(literals(&made), expected());
        Ok(())
    })
    .await?;
    let mut own = said();
    own[names::ENFORCE] = json!("none");
    let made = try_create(&client, &mixed(own)?).await?;
    ensure!(
        enforce(&made).as_deref() == Some("none") && literals(&made).values().all(Vec::is_empty)
    );
    let whole = pod(
        json!({ names::EXCLUSIVE: "true" }),
        json!({ "containers": [asks("a", "1")] }),
    )?;
    let made = try_create(&client, &whole).await?;
    ensure!(enforce(&made).is_none() && literals(&made).values().all(Vec::is_empty));
    // Nor are pods touched that do not ask.
    let plain = pod(json!({}), json!({ "containers": [{ "name": "a" }] }))?;
    ensure!(enforce(&try_create(&client, &plain).await?).is_none());
    let wrong = configure(&client, &["requests: {enforce: drvier}".to_owned()]).await;
    let said = format!("{:#}", wrong.err().context("a wrong default is taken")?);
    ensure!(said.contains("spec.requests.enforce"), "{said}");
    Ok(())
}
