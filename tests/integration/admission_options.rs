//! An administrator's choices for admission: defaults for pods that ask, a guard on pods that do not ask, and another
//! name for the resource.

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use gpustow_policies::manifests;
use gpustow_testkit::{ControlPlane, Options, Webhook, configure, eventually};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::install::{install, installed_guard, try_create};
use crate::policies::{asks, devices, own_env, path_of, pod, refusal, with};
use crate::support::{SOON, gpustow, repository};

/// The value of this variable in the container's environment.
fn env<'a>(pod: &'a Pod, container: &str, name: &str) -> Option<&'a str> {
    let containers = pod.spec.as_ref()?.containers.iter();
    let mut containers = containers.filter(|it| it.name == container);
    let mut env = containers.next()?.env.iter().flatten();
    env.find(|env| env.name == name)?.value.as_deref()
}

fn runtime_class(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.runtime_class_name.as_deref()
}

fn plain(container: Value) -> Value {
    json!({ "schedulerName": "default-scheduler", "containers": [container] })
}

#[tokio::test]
async fn asking_pods_get_what_the_administrator_configured_and_they_do_not_say() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    install(&cluster, "manifests/base").await?;
    let client = cluster.admin()?;
    for name in ["nvidia", "other"] {
        let class = json!({
            "apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass",
            "metadata": { "name": name }, "handler": name,
            "scheduling": { "nodeSelector": { "runtime": name } },
        });
        cluster.apply(&class.to_string()).await?;
    }
    let wish = json!({ "containers": [asks("a", "1"), { "name": "idle" }] });
    let wish = pod(json!({}), wish)?;
    let made = try_create(&client, &wish).await?;
    assert_eq!(
        (
            runtime_class(&made),
            env(&made, "a", names::DRIVER_CAPABILITIES)
        ),
        (None, None),
        "nothing is configured"
    );

    let requests = r#"requests: {runtimeClassName: nvidia, driverCapabilities: "compute,utility"}"#;
    configure(&client, &[requests.to_owned()]).await?;
    let made = eventually(SOON, "the settings are in force", async || {
        let made = try_create(&client, &wish).await?;
        ensure!(runtime_class(&made) == Some("nvidia"), "{:?}", made.spec);
        Ok(made)
    })
    .await?;
    let given = env(&made, "a", names::DRIVER_CAPABILITIES);
    assert_eq!(given, Some("compute,utility"));
    assert_eq!(env(&made, "idle", names::DRIVER_CAPABILITIES), None);
    let selector = made.spec.and_then(|spec| spec.node_selector);
    let selected = selector.and_then(|mut selector| selector.remove("runtime"));
    assert_eq!(selected.as_deref(), Some("nvidia"), "the class's own nodes");

    let own = json!([{ "name": names::DRIVER_CAPABILITIES, "value": "all" }]);
    let own = json!({
        "runtimeClassName": "other",
        "containers": [with(asks("a", "1"), "env", own), asks("b", "1")],
    });
    let made = try_create(&client, &pod(json!({}), own)?).await?;
    assert_eq!(runtime_class(&made), Some("other"));
    assert_eq!(env(&made, "a", names::DRIVER_CAPABILITIES), Some("all"));
    let given = env(&made, "b", names::DRIVER_CAPABILITIES);
    assert_eq!(given, Some("compute,utility"));

    let stranger = pod(json!({}), plain(json!({ "name": "a" })))?;
    let made = try_create(&client, &stranger).await?;
    assert_eq!(
        (
            runtime_class(&made),
            env(&made, "a", names::DRIVER_CAPABILITIES)
        ),
        (None, None),
        "other pods are left alone"
    );
    Ok(())
}

#[tokio::test]
async fn the_guard_gives_no_gpu_to_containers_that_ask_for_none() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    install(&cluster, "manifests/base").await?;
    let client = cluster.admin()?;
    installed_guard(&cluster).await?;
    let helps_itself = pod(
        json!({}),
        plain(with(json!({ "name": "a" }), "env", own_env("all"))),
    )?;
    let message = refusal(&client, &helps_itself).await?;
    let expected = "spec.containers[0].env: NVIDIA_VISIBLE_DEVICES: a container gets its GPUs by \
                    asking for gpustow.dev/gpu-mem or nvidia.com/gpu: remove it";
    assert!(message.ends_with(expected), "{message}");

    let whole =
        |name: &str| json!({ "name": name, "resources": { "limits": { names::NVIDIA_GPU: "1" } } });
    let claims = json!({ "name": "claims", "resources": { "claims": [{ "name": "gpu" }] } });
    let mixed = json!({
        "schedulerName": "other",
        "resourceClaims": [{ "name": "gpu", "resourceClaimTemplateName": "t" }],
        "initContainers": [{ "name": "init" }, whole("whole-init")],
        "containers": [
            { "name": "none", "env": own_env("none") }, { "name": "plain" }, whole("whole"), claims,
        ],
    });
    let made = try_create(&client, &pod(json!({}), mixed)?).await?;
    let expected = [
        ("init", vec!["void"]),
        ("whole-init", vec![]),
        ("none", vec!["none"]),
        ("plain", vec!["void"]),
        ("whole", vec![]),
        ("claims", vec!["void"]),
    ];
    let expected = expected.map(|(name, values)| {
        let values = values.into_iter().map(str::to_owned).collect::<Vec<_>>();
        (name.to_owned(), values)
    });
    assert_eq!(devices(&made), expected);

    let asking = json!({ "containers": [asks("main", "1"), { "name": "idle" }] });
    let asking = pod(json!({}), asking)?;
    let made = try_create(&client, &asking).await?;
    let expected = [
        ("main".to_owned(), vec![path_of("main")]),
        ("idle".to_owned(), vec!["void".to_owned()]),
    ];
    assert_eq!(devices(&made), expected, "pods that ask are as before");

    let key = format!("{}/container.a", names::CDI_DOMAIN);
    let annotated = pod(
        json!({ key: "nvidia.com/gpu=all" }),
        plain(json!({ "name": "a" })),
    )?;
    let message = refusal(&client, &annotated).await?;
    assert!(
        message.contains("nvidia.cdi.k8s.io/container.a"),
        "{message}"
    );

    // Where the cluster's own GPU programs live.
    let label = format!("{}=off", names::GUARD_LABEL);
    cluster
        .kubectl(&["create", "namespace", "monitoring"])
        .await?;
    cluster
        .kubectl(&["label", "namespace", "monitoring", &label])
        .await?;
    for namespace in ["monitoring", "kube-system"] {
        let mut free = helps_itself.clone();
        free.metadata.namespace = Some(namespace.to_owned());
        eventually(SOON, "the namespace is let out", async || {
            let made = try_create(&client, &free).await?;
            ensure!(devices(&made) == devices(&free), "{:?}", devices(&made));
            Ok(())
        })
        .await?;
    }
    ephemeral_containers(&client, asking).await
}

/// `kubectl debug` in a pod that holds a card.
async fn ephemeral_containers(client: &Client, pod: Pod) -> Result<()> {
    let pods = Api::<Pod>::default_namespaced(client.clone());
    pods.create(&PostParams::default(), &pod).await?;
    let dry = PatchParams {
        dry_run: true,
        ..PatchParams::default()
    };
    let debug = async |env: Value| {
        let container = json!({ "name": "debug", "image": "cuda", "env": env });
        let patch = json!({ "spec": { "ephemeralContainers": [container] } });
        let patched = pods
            .patch_ephemeral_containers("p", &dry, &Patch::Strategic(patch))
            .await?;
        let spec = patched.spec.context("pod without a spec")?;
        let container = spec.ephemeral_containers.into_iter().flatten().next();
        let env = container.context("no container")?.env.into_iter().flatten();
        Ok::<_, anyhow::Error>(env.map(|env| (env.name, env.value)).collect::<Vec<_>>())
    };
    let name = || names::VISIBLE_DEVICES.to_owned();
    assert_eq!(debug(json!([])).await?, [(name(), Some("void".to_owned()))]);
    let refused = debug(own_env("all")).await.map(drop);
    let message = refused.err().context("admitted")?.to_string();
    assert!(
        message.contains("spec.ephemeralContainers[0].env"),
        "{message}"
    );
    let field = json!({ "fieldRef": { "fieldPath": path_of("main") } });
    let shared = json!([{ "name": names::VISIBLE_DEVICES, "valueFrom": field }]);
    assert_eq!(debug(shared).await?, [(name(), None)], "what main sees");
    Ok(())
}

/// The steps of docs/install.md for a cluster whose pods ask for another resource.
#[tokio::test]
async fn manifests_for_another_resource_hold_for_that_one() -> Result<()> {
    const OTHER: &str = "example.com/vram";
    let cluster = ControlPlane::start(Options::default()).await?;
    let copy = tempfile::tempdir()?;
    let from = repository("");
    let args = [
        "-r",
        "manifests",
        "scheduler-config",
        &copy.path().display().to_string(),
    ];
    let copied = tokio::process::Command::new("cp")
        .args(args)
        .current_dir(from)
        .status();
    ensure!(copied.await?.success(), "cannot copy the manifests");
    for (file, text) in manifests::generated(OTHER)? {
        std::fs::write(copy.path().join("manifests").join(file), text)?;
    }
    let path = copy.path().join("manifests/base").display().to_string();
    cluster
        .kubectl(&["apply", "--server-side", "-k", &path])
        .await?;
    let named = [format!("--resource-name={OTHER}")];
    let webhook = Webhook::start(&cluster, gpustow(), &named).await?;
    cluster.keep(webhook.process);
    let client = cluster.admin()?;
    let asks_for = |resource: &str, mib: &str| {
        let limits = json!({ resource: mib });
        let container = json!({ "name": "a", "resources": { "limits": limits } });
        pod(json!({ names::GPU_COUNT: "2" }), plain(container))
    };
    eventually(SOON, "pods are admitted", async || {
        let made = try_create(&client, &asks_for(OTHER, "2")?).await?;
        let spec = made.spec.as_ref().context("pod without a spec")?;
        ensure!(spec.scheduler_name.as_deref() == Some(names::SCHEDULER));
        ensure!(devices(&made) == [("a".to_owned(), vec![path_of("a")])]);
        let message = refusal(&client, &asks_for(OTHER, "3")?).await?;
        ensure!(
            message.contains("limits[example.com/vram]: 3 MiB"),
            "{message}"
        );
        Ok(())
    })
    .await?;
    let message = refusal(&client, &asks_for(names::GPU_MEM, "3")?).await?;
    let expected =
        "limits[gpustow.dev/gpu-mem]: no node has such a resource: write example.com/vram";
    assert!(message.ends_with(expected), "{message}");
    Ok(())
}
