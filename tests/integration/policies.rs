//! The pods that admission lets in, changes and refuses.

use anyhow::{Context as _, Result};
use gpustow_api::{names, request};
use k8s_openapi::api::core::v1::{Container, Pod};
use kube::Client;
use serde_json::{Value, json};

use crate::install::{installed, try_create};

pub(crate) fn pod(annotations: Value, spec: Value) -> Result<Pod> {
    let mut pod = json!({"metadata": {"name": "p", "annotations": annotations}, "spec": spec});
    for list in ["initContainers", "containers"] {
        for container in pod["spec"][list].as_array_mut().into_iter().flatten() {
            container["image"] = json!("registry.k8s.io/pause:3.10");
        }
        if pod["spec"][list].is_null() {
            pod["spec"][list] = json!([]);
        }
    }
    Ok(serde_json::from_value(pod)?)
}

pub(crate) fn asks(name: &str, mib: &str) -> Value {
    json!({"name": name, "resources": {"limits": {names::GPU_MEM: mib}}})
}

pub(crate) fn with(mut container: Value, key: &str, value: Value) -> Value {
    container[key] = value;
    container
}

pub(crate) fn own_env(value: &str) -> Value {
    json!([{"name": names::VISIBLE_DEVICES, "value": value}])
}

/// The device variables of every container: its own word, or the annotation that it reads.
pub(crate) fn devices(pod: &Pod) -> Vec<(String, Vec<String>)> {
    let of = |container: &Container| {
        let ours = container
            .env
            .iter()
            .flatten()
            .filter(|env| env.name == names::VISIBLE_DEVICES);
        let source = ours.map(|env| match (&env.value, &env.value_from) {
            (Some(value), _) => value.clone(),
            (None, Some(from)) => from
                .field_ref
                .as_ref()
                .map(|field| field.field_path.clone())
                .unwrap_or_default(),
            (None, None) => String::new(),
        });
        (container.name.clone(), source.collect())
    };
    let spec = pod.spec.as_ref();
    let init = spec
        .iter()
        .flat_map(|spec| spec.init_containers.iter().flatten());
    init.chain(spec.iter().flat_map(|spec| &spec.containers))
        .map(of)
        .collect()
}

pub(crate) fn path_of(container: &str) -> String {
    format!("metadata.annotations['{}{container}']", names::DEVICES_OF)
}

fn scheduler(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.scheduler_name.as_deref()
}

pub(crate) async fn refusal(client: &Client, pod: &Pod) -> Result<String> {
    match try_create(client, pod).await {
        Ok(_) => anyhow::bail!("admitted: {}", serde_json::to_string(pod)?),
        Err(kube::Error::Api(status)) => Ok(status.message),
        Err(error) => Err(error.into()),
    }
}

#[tokio::test]
async fn an_asking_pod_gets_scheduler_label_and_device_variables() -> Result<()> {
    let client = installed().await?.admin()?;
    let field = json!({"fieldRef": {"fieldPath": path_of("given")}});
    let given = json!([{"name": names::VISIBLE_DEVICES, "valueFrom": field}]);
    let pod = pod(
        json!({}),
        json!({
            "initContainers": [
                asks("init", "8Ki"),
                with(asks("sidecar", "16"), "restartPolicy", json!("Always")),
                {"name": "whole", "resources": {"limits": {names::NVIDIA_GPU: "1"}}},
            ],
            "containers": [
                with(asks("main", "8192"), "env", json!([{"name": "A", "value": "b"}])),
                with(asks("given", "1"), "env", given),
                asks("zero", "0"),
                {"name": "none", "env": own_env("none")},
            ],
        }),
    )?;
    let made = try_create(&client, &pod).await?;
    assert_eq!(scheduler(&made), Some(names::SCHEDULER));
    let label = made
        .metadata
        .labels
        .as_ref()
        .and_then(|labels| labels.get(names::MANAGED_LABEL));
    assert_eq!(label.map(String::as_str), Some("true"));
    let expected = [
        ("init", vec![path_of("init")]),
        ("sidecar", vec![path_of("sidecar")]),
        ("whole", vec![]),
        ("main", vec![path_of("main")]),
        ("given", vec![path_of("given")]),
        ("zero", vec!["void".to_owned()]),
        ("none", vec!["none".to_owned()]),
    ];
    assert_eq!(
        devices(&made),
        expected.map(|(name, source)| (name.to_owned(), source))
    );
    Ok(())
}

/// First of all variables, so that a container's own can name them; its own words stand.
#[tokio::test]
async fn an_asking_container_is_told_what_it_may_use() -> Result<()> {
    let client = installed().await?.admin()?;
    let named =
        json!([{"name": "XLA_PYTHON_CLIENT_MEM_FRACTION", "value": "$(GPUSTOW_MEM_SHARE)"}]);
    let own = json!([{"name": names::MEM_SHARE, "value": "0.5"}]);
    let pod = pod(
        json!({}),
        json!({
            "initContainers": [asks("init", "1")],
            "containers": [
                with(asks("main", "1"), "env", named),
                with(asks("own", "1"), "env", own),
                {"name": "idle"},
            ],
        }),
    )?;
    let made = try_create(&client, &pod).await?;
    let spec = made.spec.context("no spec")?;
    let all = spec
        .init_containers
        .iter()
        .flatten()
        .chain(&spec.containers);
    let told = all.map(|container| {
        let env = container.env.iter().flatten().map(|env| {
            let field = env
                .value_from
                .as_ref()
                .and_then(|from| from.field_ref.as_ref());
            let from = field.map(|field| field.field_path.clone());
            format!(
                "{}={}",
                env.name,
                env.value.clone().or(from).unwrap_or_default()
            )
        });
        (container.name.clone(), env.collect::<Vec<_>>().join(" "))
    });
    let told: Vec<_> = told.collect();
    let mib = |name: &str| {
        format!(
            "GPUSTOW_MEM_MIB=metadata.annotations['mib.gpustow.dev/{name}'] \
             GPUSTOW_MEM_BYTES=metadata.annotations['bytes.gpustow.dev/{name}']"
        )
    };
    let share =
        |name: &str| format!("GPUSTOW_MEM_SHARE=metadata.annotations['share.gpustow.dev/{name}']");
    let devices = |name: &str| format!("{}={}", names::VISIBLE_DEVICES, path_of(name));
    let expected = [
        (
            "init",
            format!("{} {} {}", mib("init"), share("init"), devices("init")),
        ),
        (
            "main",
            format!(
                "{} {} XLA_PYTHON_CLIENT_MEM_FRACTION=$(GPUSTOW_MEM_SHARE) {}",
                mib("main"),
                share("main"),
                devices("main")
            ),
        ),
        (
            "own",
            format!("{} GPUSTOW_MEM_SHARE=0.5 {}", mib("own"), devices("own")),
        ),
        ("idle", format!("{}=void", names::VISIBLE_DEVICES)),
    ];
    assert_eq!(told, expected.map(|(name, env)| (name.to_owned(), env)));
    Ok(())
}

#[tokio::test]
async fn a_pod_that_asks_for_nothing_is_created_as_ever() -> Result<()> {
    let client = installed().await?.admin()?;
    for container in [
        json!({"name": "a", "env": own_env("all"), "securityContext": {"privileged": true}}),
        asks("a", "0"),
        json!({"name": "a", "resources": {"limits": {names::NVIDIA_GPU: "1"}}}),
    ] {
        // Another scheduler's name is not our business then, and annotations are only warned of.
        let annotations = json!({names::GPU_COUNT: "?", "nvidia.cdi.k8s.io/container.a": "x"});
        let spec = json!({"containers": [container], "schedulerName": "other"});
        let pod = pod(annotations, spec)?;
        let made = try_create(&client, &pod).await?;
        assert_eq!(scheduler(&made), Some("other"));
        assert_eq!(made.metadata.labels, None);
        assert_eq!(made.metadata.annotations, pod.metadata.annotations);
        assert_eq!(devices(&made), devices(&pod));
    }
    let plain = pod(json!({}), json!({"containers": [{"name": "a"}]}))?;
    assert_eq!(
        scheduler(&try_create(&client, &plain).await?),
        Some("default-scheduler")
    );
    Ok(())
}

#[tokio::test]
async fn good_requests_pass() -> Result<()> {
    let client = installed().await?.admin()?;
    let two = || json!({"containers": [asks("a", "4096"), asks("b", "3000")]});
    for annotations in [
        json!({}),
        json!({names::GPU_COUNT: "2", "gpu-count.gpustow.dev/b": "3", "example.com/a": "b"}),
        json!({names::GPU_COUNT: "64", "gpu-count.gpustow.dev/b": "1"}),
        json!({names::GPU_MEM_PERCENTAGE: "100", "gpu-mem-percentage.gpustow.dev/b": "1", names::GPU_COUNT: "2"}),
        json!({names::EXCLUSIVE: "true", names::POLICY: "first-fit"}),
        json!({names::EXCLUSIVE: "false", names::POLICY: "spread"}),
        json!({names::GPU_MODELS: "*A100*, NVIDIA H100", names::NOT_GPU_MODELS: "*", names::GPU_AFFINITY: "a.b_c-d"}),
        json!({names::GPU_UUIDS: " GPU-1 ,MIG-2/0 ", names::NOT_GPU_UUIDS: "GPU-1", names::GPU_ANTI_AFFINITY: "0"}),
    ] {
        let pod = pod(annotations, two())?;
        assert!(request(&pod, names::GPU_MEM).is_ok());
        try_create(&client, &pod).await?;
    }
    Ok(())
}

/// Admission and the extender refuse the same requests with the same words.
#[tokio::test]
async fn bad_requests_are_refused_in_the_extenders_words() -> Result<()> {
    let client = installed().await?.admin()?;
    let one = |mib: &str| json!({"containers": [asks("a", mib)]});
    let mixed = json!({names::GPU_MEM: "1", names::NVIDIA_GPU: "1"});
    let mixed = json!({"name": "a", "resources": {"limits": mixed}});
    for (annotations, spec) in [
        (json!({names::GPU_COUNT: "3"}), one("8192")),
        (json!({}), one("8192Mi")),
        (json!({names::GPU_COUNT: "2"}), one("3000001")),
        (json!({names::GPU_COUNT: "0"}), one("1")),
        (json!({names::GPU_COUNT: "65"}), one("1")),
        (json!({names::GPU_COUNT: "+2"}), one("2")),
        (json!({names::GPU_COUNT: "99999999999999999999"}), one("2")),
        (json!({names::GPU_COUNT: ""}), one("2")),
        (json!({"gpu-count.gpustow.dev/a": "two"}), one("1")),
        (json!({"gpu-count.gpustow.dev/b": "1"}), one("1")),
        (json!({names::GPU_MEM_PERCENTAGE: "0"}), one("1")),
        (json!({names::GPU_MEM_PERCENTAGE: "101"}), one("1")),
        (json!({names::GPU_MEM_PERCENTAGE: "25%"}), one("1")),
        (json!({names::GPU_MEM_PERCENTAGE: "025"}), one("1")),
        (json!({"gpu-mem-percentage.gpustow.dev/a": ""}), one("1")),
        (json!({"gpu-mem-percentage.gpustow.dev/b": "25"}), one("1")),
        (
            json!({names::GPU_MEM_PERCENTAGE: "25", names::EXCLUSIVE: "true"}),
            one("1"),
        ),
        (
            json!({"gpu-mem-percentage.gpustow.dev/a": "25", names::ENFORCE: "driver"}),
            one("1"),
        ),
        (
            json!({names::GPU_MEM_PERCENTAGE: "25", names::MEM_LIMIT: "max"}),
            one("1"),
        ),
        (json!({names::COMPUTE_PERCENT: "0"}), one("1")),
        (json!({names::COMPUTE_PERCENT: "101"}), one("1")),
        (json!({names::COMPUTE_PERCENT: "30%"}), one("1")),
        (json!({names::COMPUTE_PERCENT: ""}), one("1")),
        (
            json!({names::COMPUTE_PERCENT: "30", names::EXCLUSIVE: "true"}),
            one("1"),
        ),
        (
            json!({names::COMPUTE_PERCENT: "30", names::MEM_LIMIT: "max"}),
            one("1"),
        ),
        (json!({names::ISOLATION: "mps"}), one("1")),
        (json!({names::ISOLATION: ""}), one("1")),
        (
            json!({names::ISOLATION: "mig", names::COMPUTE_PERCENT: "30"}),
            one("1"),
        ),
        (
            json!({names::ISOLATION: "mig", names::EXCLUSIVE: "true"}),
            one("1"),
        ),
        (
            json!({names::ISOLATION: "mig", names::GPU_MEM_PERCENTAGE: "25"}),
            one("1"),
        ),
        (
            json!({names::ISOLATION: "mig", names::GPU_COUNT: "2"}),
            one("2"),
        ),
        (
            json!({names::ISOLATION: "mig"}),
            json!({"containers": [asks("a", "1"), asks("b", "1")]}),
        ),
        (
            json!({names::ISOLATION: "mig", names::ENFORCE: "driver"}),
            one("1024"),
        ),
        (
            json!({names::ISOLATION: "mig", names::MEM_LIMIT: "max"}),
            one("1"),
        ),
        (
            json!({names::ISOLATION: "mig"}),
            json!({"containers": [asks("a", "1")], "restartPolicy": "Never"}),
        ),
        (json!({names::EXCLUSIVE: "yes"}), one("1")),
        (json!({names::GPU_MODELS: ""}), one("1")),
        (json!({names::GPU_MODELS: "A100,,H100"}), one("1")),
        (json!({names::NOT_GPU_MODELS: " "}), one("1")),
        (json!({names::NOT_GPU_MODELS: "-A100"}), one("1")),
        (json!({names::GPU_MODELS: "A".repeat(1025)}), one("1")),
        (json!({names::GPU_UUIDS: "*"}), one("1")),
        (json!({names::GPU_UUIDS: "GPU-1 GPU-2"}), one("1")),
        (json!({names::NOT_GPU_UUIDS: "GPU-1,"}), one("1")),
        (json!({names::GPU_AFFINITY: "a/b"}), one("1")),
        (json!({names::GPU_AFFINITY: ""}), one("1")),
        (json!({names::GPU_ANTI_AFFINITY: "a".repeat(64)}), one("1")),
        (json!({names::GPU_ANTI_AFFINITY: "a-"}), one("1")),
        (json!({names::POLICY: "best"}), one("1")),
        (
            json!({}),
            json!({"initContainers": [mixed], "containers": [{"name": "b"}]}),
        ),
        (
            json!({}),
            json!({"containers": [asks(&"c".repeat(54), "1")]}),
        ),
        (
            json!({names::GPU_COUNT: "2"}),
            json!({"containers": [asks("a", "2"), asks("b", "3")]}),
        ),
    ] {
        let pod = pod(annotations, spec)?;
        let expected = request(&pod, names::GPU_MEM).unwrap_err().to_string();
        let message = refusal(&client, &pod).await?;
        assert!(
            message.ends_with(&expected),
            "{message}\nexpected {expected}"
        );
    }
    Ok(())
}

#[tokio::test]
async fn what_would_go_around_the_assignment_is_refused() -> Result<()> {
    let client = installed().await?.admin()?;
    let spec = |container: Value| json!({"containers": [container]});
    let privileged = with(
        asks("a", "1"),
        "securityContext",
        json!({"privileged": true}),
    );
    let other = json!({"fieldRef": {"fieldPath": path_of("b")}});
    let other = json!([{"name": names::VISIBLE_DEVICES, "valueFrom": other}]);
    let twice = json!([
        {"name": names::VISIBLE_DEVICES, "valueFrom": {"fieldRef": {"fieldPath": path_of("a")}}},
        {"name": names::VISIBLE_DEVICES, "value": "all"},
    ]);
    let idle = json!({"name": "b", "env": own_env("all")});
    let own = "spec.containers[0].env: NVIDIA_VISIBLE_DEVICES is gpustow's to set: remove it";
    for (spec, expected) in [
        (
            json!({"schedulerName": "other", "containers": [asks("a", "1")]}),
            "spec.schedulerName: other does not use gpustow: write gpustow-scheduler",
        ),
        (
            spec(privileged),
            "spec.containers[0].securityContext.privileged: a privileged container sees every \
             GPU of its node: remove it, or do not ask for gpustow.dev/gpu-mem",
        ),
        (spec(with(asks("a", "1"), "env", own_env("all"))), own),
        (spec(with(asks("a", "1"), "env", own_env("GPU-1"))), own),
        (spec(with(asks("a", "1"), "env", other)), own),
        (spec(with(asks("a", "1"), "env", twice)), own),
        (
            json!({"initContainers": [idle], "containers": [asks("a", "1")]}),
            "spec.initContainers[0].env: NVIDIA_VISIBLE_DEVICES is gpustow's to set: remove it",
        ),
    ] {
        let message = refusal(&client, &pod(json!({}), spec)?).await?;
        assert!(
            message.ends_with(expected),
            "{message}\nexpected {expected}"
        );
    }
    Ok(())
}
