//! The certificate of the webhook that the extenders make and renew themselves.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use gpustow_testkit::{
    ControlPlane, Extender, ExtenderOptions, Options, certificate, eventually, free_port, get,
};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::attack::{Refused, Taken, account, row, run};
use crate::helm::{chart, helm};
use crate::support::{ACCOUNT, SOON, SYSTEM, gpustow, repository};
use crate::webhook::created;

const OVERLAY: &str = "manifests/base";
const CONFIGURATIONS: &str = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations";
const KIND: &str = "mutatingwebhookconfiguration";
/// Webhooks of the configuration.
const WEBHOOKS: usize = 5;
/// Until a certificate is renewed: replicas look every 5 s, and wait for 30 s until it is trusted.
const RENEWED: Duration = Duration::from_secs(120);

async fn applied(cluster: &ControlPlane) -> Result<()> {
    let path = repository(OVERLAY).display().to_string();
    let apply = [
        "apply",
        "--server-side",
        "--warnings-as-errors",
        "-k",
        &path,
    ];
    cluster.kubectl(&apply).await.map(drop)
}

/// Acts as a Service: it leads each connection to one of the replicas that are ready.
pub(crate) struct Balancer {
    port: u16,
    /// Connections are cut when this changes.
    cuts: watch::Sender<()>,
    open: Arc<AtomicUsize>,
}

impl Balancer {
    /// `replicas` are ports, and the addresses at which they report that they are ready.
    async fn start(replicas: Vec<(u16, String)>) -> Result<Balancer> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let port = listener.local_addr()?.port();
        let (cuts, cut) = watch::channel(());
        let open = Arc::new(AtomicUsize::new(0));
        let count = open.clone();
        tokio::spawn(async move {
            let mut turn = 0;
            while let Ok((stream, _)) = listener.accept().await {
                turn += 1;
                let mut replicas = replicas.clone();
                replicas.rotate_left(turn % 2);
                let (count, mut cut) = (count.clone(), cut.clone());
                cut.mark_unchanged();
                count.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(async move {
                    // Errors are the other side's going away.
                    let _ = lead(stream, &replicas, &mut cut).await;
                    count.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Ok(Balancer { port, cuts, open })
    }

    /// Ends every connection, so that the next call is greeted with the certificate of now.
    pub(crate) async fn cut(&self) -> Result<()> {
        self.cuts.send_replace(());
        eventually(SOON, "the API server lets its connections go", async || {
            let open = self.open.load(Ordering::SeqCst);
            ensure!(open == 0, "{open} connections");
            Ok(())
        })
        .await
    }
}

async fn lead(
    mut stream: TcpStream,
    replicas: &[(u16, String)],
    cut: &mut watch::Receiver<()>,
) -> Result<()> {
    let mut found = None;
    for (port, health) in replicas {
        if get(health, "/readyz").await.is_ok() {
            found = Some(*port);
            break;
        }
    }
    let port = found.context("no replica is ready")?;
    let mut replica = TcpStream::connect(("127.0.0.1", port)).await?;
    tokio::select! {
        done = copy_bidirectional(&mut stream, &mut replica) => done.map(drop)?,
        changed = cut.changed() => {
            changed?;
            stream.shutdown().await?;
            // A client that closes too will not send a call here.
            while stream.read(&mut [0; 1024]).await? > 0 {}
        }
    }
    Ok(())
}

/// Two replicas behind the Service, with an administrator's certificate at first.
pub(crate) struct Rig {
    cluster: ControlPlane,
    pub(crate) client: Client,
    pub(crate) replicas: Vec<Extender>,
    pub(crate) balancer: Balancer,
}

impl Rig {
    pub(crate) async fn start() -> Result<Rig> {
        let cluster = ControlPlane::start(Options::default()).await?;
        applied(&cluster).await?;
        let name = format!("{}.{SYSTEM}.svc", names::WEBHOOK);
        let authority = certificate(cluster.dir(), &name)?;
        let file = |kind: &str, name: &str| {
            let path = cluster.dir().join(name);
            format!("--{kind}={}", path.display())
        };
        let (cert, key) = (file("cert", "tls.crt"), file("key", "tls.key"));
        let secret = ["create", "secret", "tls", names::WEBHOOK_TLS, "-n", SYSTEM];
        cluster
            .kubectl(&[&secret[..], &[&cert, &key]].concat())
            .await?;
        let bundle = ByteString(authority.into_bytes());
        let trusted = everywhere("add", "caBundle", &json!(bundle));
        patched(&cluster, &trusted).await?;
        Rig::on(cluster).await
    }

    /// On a cluster where the webhook is installed.
    async fn on(cluster: ControlPlane) -> Result<Rig> {
        let kubeconfig = cluster.kubeconfig(SYSTEM, ACCOUNT, None).await?;
        let (mut replicas, mut ports) = (Vec::new(), Vec::new());
        for name in ["a", "b"] {
            let port = free_port()?;
            let options = ExtenderOptions {
                args: vec![
                    format!("--webhook-listen=127.0.0.1:{port}"),
                    format!("--identity={name}"),
                ],
                ..ExtenderOptions::default()
            };
            let replica = Extender::launch(&cluster, gpustow(), &kubeconfig, options)?;
            ports.push((port, replica.health_url.clone()));
            replicas.push(replica);
        }
        let balancer = Balancer::start(ports).await?;
        // No pods are behind the Service here: the API server is sent to the balancer.
        let service = json!({ "apiVersion": "v1", "kind": "Service",
            "metadata": { "name": names::WEBHOOK, "namespace": SYSTEM },
            "spec": { "type": "ExternalName", "externalName": "localhost" } });
        let of_pods = ["delete", "service", names::WEBHOOK, "-n", SYSTEM];
        cluster.kubectl(&of_pods).await?;
        cluster.apply(&service.to_string()).await?;
        let port = everywhere("add", "service/port", &json!(balancer.port));
        patched(&cluster, &port).await?;
        let client = cluster.admin()?;
        Ok(Rig {
            cluster,
            client,
            replicas,
            balancer,
        })
    }

    fn secrets(&self) -> Api<Secret> {
        Api::namespaced(self.client.clone(), SYSTEM)
    }

    async fn secret(&self) -> Result<Value> {
        let secret = self.secrets().get_opt(names::WEBHOOK_TLS).await?;
        Ok(serde_json::to_value(secret)?)
    }

    /// A pod that asks is changed, over a connection of its own.
    pub(crate) async fn create(&self) -> Result<()> {
        let limits = json!({ "limits": { names::GPU_MEM: "1" } });
        let container = json!({ "name": "c", "image": "cuda", "resources": limits });
        let pod = json!({ "metadata": { "name": "p" }, "spec": { "containers": [container] } });
        let made = created(&self.client, &pod).await?;
        let made = made.map_err(anyhow::Error::msg)?;
        ensure!(made["spec"]["schedulerName"] == names::SCHEDULER, "{made}");
        self.balancer.cut().await
    }

    /// Creates pods until the Secret is as wanted; it is an error if one of them is refused.
    async fn until(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        let end = Instant::now() + RENEWED;
        loop {
            self.create().await.context(what.to_owned())?;
            let secret = self.secret().await?;
            if wanted(&secret) {
                return Ok(secret);
            }
            ensure!(Instant::now() < end, "{what}: not within {RENEWED:?}");
            // A load, and no flood.
            sleep(Duration::from_millis(20)).await;
        }
    }
}

/// One change of the address of every webhook.
fn everywhere(operation: &str, field: &str, value: &Value) -> Value {
    let one = |index| {
        let path = format!("/webhooks/{index}/clientConfig/{field}");
        json!({ "op": operation, "path": path, "value": value })
    };
    (0..WEBHOOKS).map(one).collect()
}

/// The authority that each webhook trusts.
async fn trusted(cluster: &ControlPlane) -> Result<Vec<String>> {
    let at = "--output=jsonpath={range .webhooks[*]}{.clientConfig.caBundle}{\"\\n\"}{end}";
    let get = ["get", KIND, names::WEBHOOK_CONFIGURATION, at];
    let said = cluster.kubectl(&get).await?;
    Ok(said.lines().map(str::to_owned).collect())
}

async fn patched(cluster: &ControlPlane, patch: &Value) -> Result<()> {
    let patch = format!("--patch={patch}");
    let name = ["patch", KIND, names::WEBHOOK_CONFIGURATION];
    cluster
        .kubectl(&[&name[..], &["--type=json", &patch]].concat())
        .await
        .map(drop)
}

#[tokio::test]
async fn no_pod_is_refused_while_the_extenders_renew_their_certificate() -> Result<()> {
    let rig = Rig::start().await?;
    let answers = || eventually(SOON, "the webhook answers", async || rig.create().await);
    answers().await?;
    // A metric shows whether the policy that holds the extender is there.
    let holds = r#"gpustow_policy_holds{policy="gpustow-webhook"} 1"#;
    eventually(SOON, "the policy is looked at", async || {
        let metrics = rig.replicas[0].metrics().await?;
        ensure!(metrics.contains(holds), "no {holds} in:\n{metrics}");
        Ok(())
    })
    .await?;

    // It is unknown how long the administrator's certificate holds: another one is made at once. The
    // replica that may have made it is killed half-way.
    let next = |secret: &Value| secret["data"]["next.crt"].clone();
    let unsaid = |secret: &Value| !secret["metadata"]["annotations"].is_object();
    let announced = rig
        .until("another is made", |secret| next(secret).is_string())
        .await?;
    ensure!(
        unsaid(&announced),
        "the administrator's is served no longer"
    );
    rig.replicas[0].process.kill9();
    let renewed = rig
        .until("it is served", |secret| !next(secret).is_string())
        .await?;
    ensure!(renewed["data"]["tls.crt"] == next(&announced) && !unsaid(&renewed));
    rig.replicas[0].process.restart()?;

    // It is lost.
    let none = DeleteParams::default();
    rig.secrets().delete(names::WEBHOOK_TLS, &none).await?;
    let back = rig
        .until("the Secret is back", |secret| secret.is_object())
        .await?;
    ensure!(back["data"]["tls.crt"] == renewed["data"]["tls.crt"]);

    // The authority that the API server trusts is lost.
    let untrusted = everywhere("remove", "caBundle", &Value::Null);
    patched(&rig.cluster, &untrusted).await?;
    answers().await?;

    // One of them is new, as after an upgrade.
    let new = json!([{ "op": "remove", "path": "/webhooks/4/clientConfig/caBundle" }]);
    patched(&rig.cluster, &new).await?;
    eventually(SOON, "all trust the same", async || {
        let all = trusted(&rig.cluster).await?;
        let first = all.first().filter(|it| !it.is_empty());
        ensure!(
            all.len() == WEBHOOKS && all.iter().all(|it| Some(it) == first),
            "{all:?}"
        );
        Ok(())
    })
    .await?;

    // Everything is lost, and no replica remembers: as on the first day.
    for replica in &rig.replicas {
        replica.process.kill9();
    }
    rig.secrets().delete(names::WEBHOOK_TLS, &none).await?;
    patched(&rig.cluster, &untrusted).await?;
    for replica in &rig.replicas {
        replica.process.restart()?;
        replica.wait_ready().await?;
    }
    answers().await?;
    let made = rig.secret().await?;
    ensure!(made["data"]["tls.crt"] != back["data"]["tls.crt"]);
    Ok(())
}

/// Helm takes its certificate away and the extenders make theirs. Meanwhile pods that ask are refused, and
/// never let in unchanged.
#[tokio::test]
async fn with_helm_the_extenders_take_over_the_certificate_that_helm_made() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    let client = cluster.admin()?;
    let chart = chart();
    let run = async |command: &str, certificate: &str, more: &[&str]| {
        let certificate = format!("--set=webhook.certificate={certificate}");
        let args = [command, "gpustow", &chart, &certificate];
        helm(
            &[&args[..], more].concat(),
            Some(cluster.admin_kubeconfig()),
        )
        .await
    };
    let secrets = Api::<Secret>::namespaced(client.clone(), SYSTEM);
    let trusts = async || Ok::<_, anyhow::Error>(trusted(&cluster).await?.join(""));
    run("install", "generated", &["--create-namespace"]).await?;
    ensure!(secrets.get_opt(names::WEBHOOK_TLS).await?.is_some());
    let helms = trusts().await?;
    ensure!(!helms.is_empty());

    run("upgrade", "selfSigned", &[]).await?;
    ensure!(secrets.get_opt(names::WEBHOOK_TLS).await?.is_none());
    ensure!(trusts().await? != helms, "Helm's is trusted still");
    let limits = json!({ "limits": { names::GPU_MEM: "1" } });
    let container = json!({ "name": "c", "image": "cuda", "resources": limits });
    let asks = json!({ "metadata": { "name": "p" }, "spec": { "containers": [container] } });
    let refused = created(&client, &asks).await?;
    ensure!(
        refused.as_ref().is_err_and(|it| it.contains("webhook")),
        "{refused:?}"
    );

    let rig = Rig::on(cluster).await?;
    eventually(SOON, "the webhook answers", async || rig.create().await).await?;
    let made = rig.secret().await?;
    let renewed = &made["metadata"]["annotations"];
    ensure!(renewed.is_object(), "{made}");
    Ok(())
}

#[tokio::test]
async fn the_extender_changes_nothing_of_the_webhook_but_the_authority_it_trusts() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    applied(&cluster).await?;
    let extender = account(&cluster, SYSTEM, ACCOUNT).await?;
    let path = format!("{CONFIGURATIONS}/{}", names::WEBHOOK_CONFIGURATION);
    let read = axum::http::Request::get(&path).body(Vec::new())?;
    let now: Value = extender.request(read).await?;
    let not_ours = || Refused("webhooks: not the extender's to write");
    let with = |at: &str, value: Value| -> Result<Value> {
        let mut webhooks = json!({ "webhooks": now["webhooks"] });
        let (parent, key) = at.rsplit_once('/').context("no path")?;
        let parent = webhooks.pointer_mut(parent).context("no such field")?;
        match value {
            Value::Null => drop(parent.as_object_mut().context("a list")?.remove(key)),
            value => parent[key] = value,
        }
        Ok(webhooks)
    };
    let mut rows = vec![row(
        "caBundle",
        "PATCH",
        &path,
        with("/webhooks/0/clientConfig/caBundle", json!("LS0t"))?,
        Taken,
    )];
    let url = json!({ "url": "https://example.com/" });
    let more = json!({ "namespace": SYSTEM, "name": names::WEBHOOK, "path": "/other" });
    let every = json!([{ "apiGroups": ["*"], "apiVersions": ["*"], "operations": ["*"],
        "resources": ["*/*"] }]);
    let selector = json!({ "matchLabels": { "a": "b" } });
    for (field, value) in [
        ("clientConfig", url),
        ("clientConfig/service", more),
        ("rules", every),
        ("failurePolicy", json!("Ignore")),
        ("matchConditions", Value::Null),
        ("namespaceSelector", selector.clone()),
        ("objectSelector", selector),
        ("timeoutSeconds", json!(30)),
        ("reinvocationPolicy", json!("Never")),
        ("matchPolicy", json!("Exact")),
        ("sideEffects", json!("NoneOnDryRun")),
        ("name", json!("others.gpustow.dev")),
    ] {
        let body = with(&format!("/webhooks/0/{field}"), value)?;
        rows.push(row(field, "PATCH", &path, body, not_ours()));
    }
    let mut second = now["webhooks"][0].clone();
    second["name"] = json!("secrets.gpustow.dev");
    let two = json!({ "webhooks": [now["webhooks"][0], second] });
    rows.push(row("one more", "PATCH", &path, two, not_ours()));
    let none = json!({ "webhooks": [] });
    rows.push(row("none", "PATCH", &path, none, not_ours()));
    for field in ["labels", "annotations"] {
        let body = json!({ "metadata": { field: { "a": "b" } } });
        rows.push(row(field, "PATCH", &path, body, Refused("metadata: ")));
    }
    let forbidden = || Refused("forbidden");
    let other = format!("{CONFIGURATIONS}/other");
    rows.push(row("whole", "PUT", &path, now.clone(), forbidden()));
    rows.push(row("away", "DELETE", &path, Value::Null, forbidden()));
    rows.push(row("new", "POST", CONFIGURATIONS, now.clone(), forbidden()));
    rows.push(row("other", "PATCH", other, json!({}), forbidden()));
    let secrets = format!("/api/v1/namespaces/{SYSTEM}/secrets");
    let token = json!({ "apiVersion": "v1", "kind": "Secret",
        "type": "kubernetes.io/service-account-token", "metadata": { "name": names::WEBHOOK_TLS,
            "annotations": { "kubernetes.io/service-account.name": names::AGENT } } });
    rows.push(row("new", "POST", &secrets, token.clone(), forbidden()));
    rows.push(row("list", "GET", &secrets, Value::Null, forbidden()));
    let another = format!("{secrets}/other");
    rows.push(row("read", "GET", another, Value::Null, forbidden()));

    let apply = PatchParams::apply("extender").dry_run();
    let ours = Api::<Secret>::namespaced(extender.clone(), SYSTEM);
    let put = async |secret: &Value| {
        let patch = Patch::Apply(secret);
        let put = ours.patch(names::WEBHOOK_TLS, &apply, &patch).await;
        put.map(drop).map_err(|error| error.to_string())
    };
    let refused = |put: Result<(), String>, text: &str| {
        let error = put.err().unwrap_or_else(|| "taken".to_owned());
        ensure!(error.contains(text), "{error}");
        Ok(())
    };
    eventually(SOON, "the policy is in force", async || {
        refused(put(&token).await, "type: the extender's Secret has")
    })
    .await?;
    run("the extender", &extender, rows).await?;
    let mut tls = token.clone();
    tls["type"] = json!("kubernetes.io/tls");
    tls["data"] = json!({ "tls.crt": "", "tls.key": "" });
    refused(put(&tls).await, "metadata: not the extender's")?;
    tls["metadata"]["annotations"] = json!({ names::RENEW_AFTER: "x" });
    put(&tls).await.map_err(anyhow::Error::msg)?;
    // The policy does not restrict the writes of others to Secrets and webhooks.
    let admin = cluster.admin()?;
    let theirs = json!({ "metadata": { "labels": { "a": "b" } } });
    run(
        "an administrator",
        &admin,
        vec![row("labels", "PATCH", &path, theirs, Taken)],
    )
    .await
}
