//! The webhook by which pods are admitted: its answers equal the plugin's, also while its certificate is replaced and
//! while no replica answers.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gpustow_admission::{Act, Ask, Cluster, admit};
use gpustow_api::config::GpustowConfigSpec;
use gpustow_api::names;
use gpustow_testkit::{ControlPlane, Options, Webhook, certificate, configure, eventually};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Client;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde::Deserialize as _;
use serde_json::{Value, json};

use crate::install::install;
use crate::support::{SOON, gpustow, repository};

/// The pod as it would be created, or the reason why it is refused.
pub(crate) async fn created(client: &Client, pod: &Value) -> Result<Result<Value, String>> {
    let request = axum::http::Request::post("/api/v1/namespaces/default/pods?dryRun=All")
        .header("content-type", "application/json")
        .body(pod.to_string().into_bytes())?;
    match client.request::<Value>(request).await {
        Ok(mut pod) => {
            for field in ["uid", "creationTimestamp", "managedFields"] {
                pod["metadata"]
                    .as_object_mut()
                    .context("no metadata")?
                    .remove(field);
            }
            Ok(Ok(pod))
        }
        Err(kube::Error::Api(status)) => Ok(Err(status.message)),
        Err(error) => Err(error.into()),
    }
}

/// Pods of every kind that rules distinguish, good and bad.
struct Pods(StdRng);

impl Pods {
    fn one(&mut self, of: Vec<Value>) -> Value {
        let index = self.0.random_range(0..of.len());
        of.into_iter().nth(index).unwrap_or_default()
    }

    /// Null where there is none.
    fn container(&mut self, name: &str, init: bool) -> Value {
        let own = |value: &str| json!({ "name": names::VISIBLE_DEVICES, "value": value });
        let path = format!("metadata.annotations['{}{name}']", names::DEVICES_OF);
        let field = json!({ "name": names::VISIBLE_DEVICES,
            "valueFrom": { "fieldRef": { "fieldPath": path } } });
        let other = json!({ "name": "A", "value": "b" });
        let capable = json!({ "name": names::DRIVER_CAPABILITIES, "value": "all" });
        let env = self.one(vec![
            json!(null),
            json!(null),
            json!([]),
            json!([other]),
            json!([own("void")]),
            json!([other, capable]),
            json!([field]),
            json!([own("all")]),
            json!([{ "name": names::MEMORY_LIMIT, "value": "4096" }]),
            json!([{ "name": names::MPS_THREADS, "value": "30" }]),
            json!([{ "name": names::MPS_PIPES, "value": "/tmp/nvidia-mps" }]),
            json!([other, { "name": names::MEM_SHARE, "value": "0.5" }]),
        ]);
        let wish = ["4096", "4096", "8Ki", "1", "0", "3", "1500000", "1Mi"];
        let wish = self.one(wish.iter().map(|it| json!(it)).collect());
        let whole = self.one(vec![json!("1"), json!("0")]);
        let limits = self.one(vec![
            json!({ names::GPU_MEM: wish }),
            json!({ names::GPU_MEM: wish, "cpu": "1" }),
            json!({ names::GPU_MEM: wish }),
            json!({ "cpu": "1" }),
            json!({ names::NVIDIA_GPU: whole }),
            json!({ names::GPU_MEM: wish, names::NVIDIA_GPU: whole }),
            json!(null),
        ]);
        let mut container = json!({ "name": name, "image": "cuda" });
        if !limits.is_null() {
            container["resources"] = json!({ "limits": limits });
        }
        if !env.is_null() {
            container["env"] = env;
        }
        if init && self.0.random_bool(0.5) {
            container["restartPolicy"] = json!("Always");
        }
        if self.0.random_bool(0.1) {
            let path = self.one(vec![json!("/dev/shm"), json!("/data")]);
            container["volumeMounts"] = json!([{ "name": "own", "mountPath": path }]);
        }
        if self.0.random_bool(0.05) {
            container["securityContext"] = json!({ "privileged": true });
        }
        container
    }

    fn next(&mut self) -> Value {
        let mut list = |init: bool, from: usize, to: usize| -> Vec<Value> {
            let count = self.0.random_range(from..=to);
            let name = |index| format!("{}{index}", if init { "i" } else { "c" });
            (0..count)
                .map(|index| self.container(&name(index), init))
                .collect()
        };
        let (main, init) = (list(false, 1, 3), list(true, 0, 2));
        let mut pod = json!({ "metadata": { "name": "p" }, "spec": { "containers": main,
            "volumes": [{ "name": "own", "emptyDir": {} }] } });
        if !init.is_empty() {
            pod["spec"]["initContainers"] = json!(init);
        }
        let mut may = |path: &str, values: Vec<Value>| {
            if self.0.random_bool(0.4) {
                let value = self.one(values);
                let (parent, key) = path.rsplit_once('/').unwrap_or_default();
                if let Some(parent) = pod.pointer_mut(parent) {
                    parent[key] = value;
                }
            }
        };
        let managed = names::MANAGED_LABEL;
        let labels = vec![json!({}), json!({ "a": "b" }), json!({ managed: "false" })];
        may("/metadata/labels", labels);
        let counts = ["2", "0", "x"].map(|it| json!({ names::GPU_COUNT: it }));
        let driver = |more: Value| {
            let mut notes = more;
            notes[names::ENFORCE] = json!("driver");
            notes
        };
        let limits = [
            driver(json!({})),
            driver(json!({ names::GPU_COUNT: "2", names::MEM_LIMIT: "9000" })),
            driver(json!({ names::MEM_LIMIT: "max", "gpu-mem-limit.gpustow.dev/c0": "9000" })),
            driver(json!({ names::EXCLUSIVE: "true" })),
            json!({ names::ENFORCE: "on", names::MEM_LIMIT: "lots" }),
        ];
        let shares = [
            json!({ names::COMPUTE_PERCENT: "30" }),
            json!({ names::COMPUTE_PERCENT: "30", names::GPU_COUNT: "2" }),
            driver(json!({ names::COMPUTE_PERCENT: "5" })),
            json!({ names::COMPUTE_PERCENT: "30", names::MEM_LIMIT: "max" }),
            json!({ names::COMPUTE_PERCENT: "half" }),
            json!({ names::ISOLATION: "mig" }),
            json!({ names::ISOLATION: "mig", names::COMPUTE_PERCENT: "30" }),
        ];
        may(
            "/metadata/annotations",
            [&counts[..], &limits[..], &shares[..]].concat(),
        );
        let schedulers = ["default-scheduler", names::SCHEDULER, "other"];
        let schedulers = schedulers.iter().map(|it| json!(it)).collect();
        may("/spec/schedulerName", schedulers);
        may(
            "/spec/runtimeClassName",
            vec![json!("nvidia"), json!("other")],
        );
        pod
    }
}

/// The pod as the plugin foresees it, or why it is refused.
fn foreseen(pod: &Value, spec: &GpustowConfigSpec) -> Result<Value, String> {
    let cluster = Cluster {
        resource: names::GPU_MEM,
        spec,
        queue_from: &[],
    };
    let ask = Ask {
        pod,
        act: Act::Create,
        user: "",
    };
    let made = admit(ask, cluster, &ObjectMeta::default(), None);
    made.map(|made| made.pod).map_err(|it| it.to_string())
}

/// The pods of the examples.
fn known() -> Result<Vec<Value>> {
    let mut pods = Vec::new();
    for file in std::fs::read_dir(repository("manifests/examples"))? {
        let text = std::fs::read_to_string(file?.path())?;
        for document in serde_yaml::Deserializer::from_str(&text) {
            let object = Value::deserialize(document)?;
            let templates = ["/spec/template", "/spec/jobTemplate/spec/template"];
            let template = templates.iter().find_map(|it| object.pointer(it));
            let pod = template.or_else(|| (object["kind"] == "Pod").then_some(&object));
            pods.extend(pod.map(|it| {
                let notes = it["metadata"]["annotations"].clone();
                json!({ "metadata": { "name": "p", "annotations": notes }, "spec": it["spec"] })
            }));
        }
    }
    Ok(pods)
}

/// Variables and mounts of each container, and the other fields that admission changes.
fn parts(pod: &Value) -> Vec<Value> {
    let kinds = ["initContainers", "containers"].into_iter();
    let all = kinds.flat_map(|kind| pod["spec"][kind].as_array().into_iter().flatten());
    let of = all.map(|it| {
        let mounts = it["volumeMounts"].as_array().into_iter().flatten();
        // The API server adds the account's own.
        let mounts = mounts.filter(|it| it["name"] != "token");
        let mounts: Vec<_> = mounts.map(|it| it["mountPath"].clone()).collect();
        let env = it["env"].as_array().into_iter().flatten();
        let env = env.map(|it| {
            let path = &it["valueFrom"]["fieldRef"]["fieldPath"];
            json!([it["name"], it["value"], path])
        });
        json!([it["name"], env.collect::<Vec<_>>(), mounts])
    });
    let (meta, spec) = (&pod["metadata"], &pod["spec"]);
    let label = &meta["labels"][names::MANAGED_LABEL];
    // The API server's own default, of pods that request nothing.
    let scheduler = spec["schedulerName"].as_str();
    let scheduler = scheduler.unwrap_or("default-scheduler");
    let rest = json!([
        meta["annotations"],
        label,
        scheduler,
        spec["runtimeClassName"]
    ]);
    of.chain([rest]).collect()
}

#[tokio::test]
async fn plugin_and_webhook_say_the_same_of_every_pod() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    install(&cluster, "manifests/base").await?;
    let client = cluster.admin()?;
    for name in ["nvidia", "other"] {
        let class = json!({ "apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass",
            "metadata": { "name": name }, "handler": name });
        cluster.apply(&class.to_string()).await?;
    }
    let mut pods = Pods(StdRng::seed_from_u64(20));
    let (mut made, mut refused) = (0, 0);
    for enforce in ["watch", "driver"] {
        let requests = json!({ "runtimeClassName": "nvidia", "driverCapabilities": "compute", "enforce": enforce });
        let spec: GpustowConfigSpec = serde_json::from_value(json!({ "requests": requests }))?;
        configure(&client, &[json!({ "requests": requests }).to_string()]).await?;
        let container = json!({ "name": "c", "image": "cuda", "resources": { "limits": { names::GPU_MEM: "4096" } } });
        let probe = json!({ "metadata": { "name": "p" }, "spec": { "containers": [container] } });
        eventually(SOON, "the settings are in force", async || {
            let made = created(&client, &probe)
                .await?
                .map_err(anyhow::Error::msg)?;
            ensure!(made["spec"]["runtimeClassName"] == "nvidia");
            let said = made["metadata"]["annotations"][names::ENFORCE].as_str();
            ensure!(said.unwrap_or("watch") == enforce);
            Ok(())
        })
        .await?;
        let known = known()?;
        ensure!(known.len() >= 5, "{known:#?}");
        for pod in known.into_iter().chain((0..250).map(|_| pods.next())) {
            match (created(&client, &pod).await?, foreseen(&pod, &spec)) {
                (Ok(one), Ok(other)) => {
                    made += 1;
                    ensure!(parts(&one) == parts(&other), "{pod:#}: {one:#} {other:#}");
                }
                (Err(said), Err(foreseen)) => {
                    refused += 1;
                    ensure!(said.ends_with(&foreseen), "{pod:#}: {said}, not {foreseen}");
                }
                (one, other) => ensure!(false, "{pod:#}: {one:#?} {other:#?}"),
            }
        }
    }
    ensure!(
        made > 100 && refused > 100,
        "{made} made, {refused} refused"
    );
    Ok(())
}

#[tokio::test]
async fn no_pod_is_refused_while_the_webhooks_certificate_is_replaced() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    install(&cluster, "manifests/base").await?;
    // A second webhook, as with two replicas.
    let webhook = Webhook::start(&cluster, gpustow(), &[]).await?;
    let client = cluster.admin()?;
    let limits = json!({ "limits": { names::GPU_MEM: "1" } });
    let container = json!({ "name": "c", "image": "cuda", "resources": limits });
    let pod = json!({ "metadata": { "name": "p" }, "spec": { "containers": [container] } });
    let create = async || {
        let made = created(&client, &pod).await?.map_err(anyhow::Error::msg)?;
        ensure!(made["spec"]["schedulerName"] == names::SCHEDULER, "{made}");
        anyhow::Ok(())
    };
    eventually(SOON, "the second one answers", create).await?;
    let old = std::fs::read_to_string(webhook.folder.join("tls.crt"))?;
    let aside = tempfile::tempdir()?;
    let authority = certificate(aside.path(), "127.0.0.1")?;
    // The old certificate stands for its own authority until no replica shows it any more.
    let both = format!("{authority}{old}");
    webhook.trusted(&cluster, &both).await?;
    for file in ["tls.crt", "tls.key"] {
        std::fs::copy(aside.path().join(file), webhook.folder.join(file))?;
    }
    for _ in 0..50 {
        create().await?;
    }
    webhook.trusted(&cluster, &authority).await?;
    let settled = tokio::time::Instant::now() + Duration::from_secs(1);
    while tokio::time::Instant::now() < settled {
        create().await?;
    }
    Ok(())
}

#[tokio::test]
async fn pods_that_ask_for_nothing_do_not_notice_that_the_webhook_is_down() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    install(&cluster, "manifests/base").await?;
    let webhook = Webhook::start(&cluster, gpustow(), &[]).await?;
    let client = cluster.admin()?;
    let container = json!({ "name": "c", "image": "cuda" });
    let plain = json!({ "metadata": { "name": "p" }, "spec": { "containers": [container] } });
    let mut asking = plain.clone();
    asking["spec"]["containers"][0]["resources"] = json!({ "limits": { names::GPU_MEM: "1" } });
    eventually(SOON, "it answers", async || {
        created(&client, &asking).await?.map_err(anyhow::Error::msg)
    })
    .await?;
    webhook.process.kill9();
    let made = created(&client, &plain)
        .await?
        .map_err(anyhow::Error::msg)?;
    assert_eq!(made["spec"]["schedulerName"], "default-scheduler");
    let Err(message) = created(&client, &asking).await? else {
        anyhow::bail!("a pod that asks is created unchanged");
    };
    ensure!(message.contains("pods.gpustow.dev"), "{message}");
    Ok(())
}
