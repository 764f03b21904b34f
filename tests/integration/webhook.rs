//! Where the API server cannot change pods by policy, the extender does: the same pods come of it.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use gpustow_testkit::{
    ControlPlane, Launch, Options, Process, certificate, configure, eventually, free_port,
};
use kube::Client;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};

use crate::install::{apply, install};
use crate::support::{ACCOUNT, SOON, SYSTEM, gpustow};

/// Where it is served here.
const ADDRESS: &str = "127.0.0.1";

/// An extender that serves the webhook of the manifests, at an address instead of behind a Service.
pub(crate) struct Webhook {
    pub(crate) process: Process,
    folder: std::path::PathBuf,
    port: u16,
}

/// The configurations that call it, and where: the second one with a line.
const CALLED: [(&str, &str); 3] = [
    (names::WEBHOOK_CONFIGURATION, "mutate"),
    (names::ADOPT, "adopt"),
    (names::QUEUE, "queue"),
];

impl Webhook {
    /// Starts it, and has the installed configuration call it.
    pub(crate) async fn start(cluster: &ControlPlane) -> Result<Webhook> {
        let folder = cluster.dir().join("webhook");
        std::fs::create_dir_all(&folder)?;
        let authority = certificate(&folder, ADDRESS)?;
        let (port, health) = (free_port()?, free_port()?);
        let kubeconfig = cluster.kubeconfig(SYSTEM, ACCOUNT, None).await?;
        let process = Process::start(Launch {
            program: gpustow().to_owned(),
            args: vec![
                format!("--kubeconfig={}", kubeconfig.display()),
                "--listen=127.0.0.1:0".to_owned(),
                format!("--health-listen=127.0.0.1:{health}"),
                format!("--webhook-listen=127.0.0.1:{port}"),
                format!("--webhook-tls={}", folder.display()),
                "--identity=webhook".to_owned(),
            ],
            env: Vec::new(),
            log: folder.join(format!("webhook-{port}.log")),
        })?;
        let webhook = Webhook {
            process,
            folder,
            port,
        };
        webhook.trusted(cluster, &authority).await?;
        Ok(webhook)
    }

    /// Writes the authorities into the configuration, as an administrator does.
    async fn trusted(&self, cluster: &ControlPlane, authorities: &str) -> Result<()> {
        let bundle = k8s_openapi::ByteString(authorities.as_bytes().to_vec());
        for (name, path) in CALLED {
            if !called(cluster, name).await? {
                continue;
            }
            let url = format!("https://{ADDRESS}:{}/{path}", self.port);
            let config = json!({ "url": url, "caBundle": bundle });
            let patch =
                json!([{ "op": "replace", "path": "/webhooks/0/clientConfig", "value": config }]);
            let patch = format!("--patch={patch}");
            let args = ["patch", KIND, name, "--type=json", &patch];
            cluster.kubectl(&args).await?;
        }
        Ok(())
    }
}

const KIND: &str = "mutatingwebhookconfiguration";

/// Is there a configuration by this name?
async fn called(cluster: &ControlPlane, name: &str) -> Result<bool> {
    let get = ["get", KIND, name, "--ignore-not-found", "--output=name"];
    Ok(!cluster.kubectl(&get).await?.is_empty())
}

/// What comes of a pod if it is created, or why it is not.
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

/// Pods of every kind that rules tell apart, good and bad.
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

/// The pod with NVIDIA's variables in one order: they come from two policies, and which of those is
/// first is the API server's affair.
fn in_order(mut pod: Value) -> Value {
    for list in ["initContainers", "containers"] {
        let containers = pod["spec"][list].as_array_mut().into_iter().flatten();
        for env in containers.filter_map(|it| it["env"].as_array_mut()) {
            env.sort_by_key(|it| {
                let name = it["name"].as_str().unwrap_or_default();
                let nvidia = name.starts_with("NVIDIA_");
                (nvidia, nvidia.then(|| name.to_owned()))
            });
        }
    }
    pod
}

/// A control plane with gpustow's policies, and one with the webhook in their place.
pub(crate) async fn policies_and_webhook() -> Result<(ControlPlane, ControlPlane)> {
    let start = || ControlPlane::start(Options::default());
    let (policies, webhook) = tokio::try_join!(start(), start())?;
    ensure!(
        policies.minor() >= 34,
        "this API server has no policies that change pods"
    );
    install(&policies, "manifests/base").await?;
    let flags = ["--server-side", "--warnings-as-errors"];
    apply(&webhook, "manifests/overlays/webhook", &flags).await?;
    Ok((policies, webhook))
}

#[tokio::test]
async fn of_a_pod_comes_the_same_by_webhook_and_by_policy() -> Result<()> {
    let (policies, webhook) = policies_and_webhook().await?;
    for cluster in [&policies, &webhook] {
        for name in ["nvidia", "other"] {
            let class = json!({ "apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass",
                "metadata": { "name": name }, "handler": name,
                "scheduling": { "nodeSelector": { "runtime": name } } });
            cluster.apply(&class.to_string()).await?;
        }
    }
    let clients = (policies.admin()?, webhook.admin()?);
    let mut pods = Pods(StdRng::seed_from_u64(20));
    let (mut made, mut refused) = (0, 0);
    // Without and with what an administrator gives pods.
    for given in [None, Some("watch"), Some("driver")] {
        if let Some(enforce) = given {
            let requests = format!(
                "requests: {{runtimeClassName: nvidia, driverCapabilities: compute, enforce: {enforce}}}"
            );
            for client in [&clients.0, &clients.1] {
                configure(client, std::slice::from_ref(&requests)).await?;
                let limits = json!({ "limits": { names::GPU_MEM: "4096" } });
                let container = json!({ "name": "c", "image": "cuda", "resources": limits });
                let pod =
                    json!({ "metadata": { "name": "p" }, "spec": { "containers": [container] } });
                eventually(SOON, "the settings are in force", async || {
                    let made = created(client, &pod).await?.map_err(anyhow::Error::msg)?;
                    ensure!(made["spec"]["runtimeClassName"] == "nvidia");
                    let said = made["metadata"]["annotations"][names::ENFORCE].as_str();
                    ensure!(said.unwrap_or("watch") == enforce);
                    Ok(())
                })
                .await?;
            }
        }
        for _ in 0..150 {
            let pod = pods.next();
            let both = tokio::try_join!(created(&clients.0, &pod), created(&clients.1, &pod))?;
            let both = (both.0.map(in_order), both.1.map(in_order));
            match &both.0 {
                Ok(_) => made += 1,
                Err(_) => refused += 1,
            }
            ensure!(both.0 == both.1, "{pod:#}: {both:#?}");
        }
    }
    ensure!(made > 50 && refused > 50, "{made} made, {refused} refused");
    Ok(())
}

#[tokio::test]
async fn no_pod_is_refused_while_the_webhooks_certificate_is_replaced() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    let flags = ["--server-side", "--warnings-as-errors"];
    apply(&cluster, "manifests/overlays/webhook", &flags).await?;
    // One beside the first, as two replicas are.
    let webhook = Webhook::start(&cluster).await?;
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
    let authority = certificate(aside.path(), ADDRESS)?;
    // The old certificate stands for its own authority until nobody shows it any more.
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
    let flags = ["--server-side", "--warnings-as-errors"];
    apply(&cluster, "manifests/overlays/webhook", &flags).await?;
    let webhook = Webhook::start(&cluster).await?;
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
