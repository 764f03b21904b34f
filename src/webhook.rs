//! Changes pods that ask as they are created, where the API server cannot do it by policy: reads its
//! reviews and answers with patches. What is changed is `gpustow_api::mutate`'s affair. Every replica
//! serves, whether it decides or not. Where there is a line, pods get its gate here too.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use axum::extract::{FromRequest, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use futures::StreamExt;
use gpustow_api::mutate::{Change, PodDefaults, gate, patch};
use gpustow_api::names;
use gpustow_serve::{Bounds, Tls, WATCH_SECONDS, serve_until};
use gpustow_settings::LineMode;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::runtime::reflector::{self, Store};
use kube::runtime::{WatchStreamExt, watcher};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::time::timeout;

use crate::app::App;
use crate::call::{Call, Calls, Rejected};
use crate::certificate::Keeper;

/// For API servers, which reuse connections. Anybody may be able to reach it.
const BOUNDS: Bounds = Bounds {
    connections: 256,
    patience: Duration::from_secs(120),
    buffer: 64 << 10,
};
/// Until it is known what the administrator gives pods, below the time that the API server waits.
const DEFAULTS: Duration = Duration::from_secs(4);

/// What an operator may set about the webhook.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Webhook")]
pub struct WebhookArgs {
    /// Address at which the API server has pods changed as they are created; without it, nobody
    /// is served there
    #[arg(long, env = "GPUSTOW_WEBHOOK_LISTEN")]
    pub webhook_listen: Option<SocketAddr>,

    /// Certificates (PEM) for that address; read anew when they change
    #[arg(
        long,
        env = "GPUSTOW_WEBHOOK_TLS_CERT",
        value_name = "FILE",
        requires_all = ["webhook_listen", "webhook_tls_key"]
    )]
    pub webhook_tls_cert: Option<PathBuf>,

    /// Key (PEM) of that certificate
    #[arg(
        long,
        env = "GPUSTOW_WEBHOOK_TLS_KEY",
        value_name = "FILE",
        requires_all = ["webhook_listen", "webhook_tls_cert"]
    )]
    pub webhook_tls_key: Option<PathBuf>,

    /// Make and renew that certificate, in the Secret gpustow-webhook-tls, and have the API server
    /// trust it: needs the rights in manifests/overlays/webhook-self-signed
    #[arg(
        long,
        env = "GPUSTOW_WEBHOOK_SELF_SIGNED",
        requires = "webhook_listen",
        conflicts_with = "webhook_tls_cert"
    )]
    pub webhook_self_signed: bool,
}

struct Webhook {
    calls: Calls,
    resource: String,
    /// The ConfigMap that says what an administrator gives pods, if it is there.
    defaults: Store<ConfigMap>,
    /// The one that says whether new pods stand in line, where this extender has a line.
    line: Option<Store<ConfigMap>>,
}

/// Serves the webhook, if it is wanted, until the runtime ends. Until `ready` is set, it has no
/// certificate and serves nobody.
///
/// # Errors
/// If its address is in use or its certificate cannot be used.
pub(crate) async fn start(app: &App, ready: Arc<AtomicBool>) -> Result<()> {
    let args = &app.args.webhook;
    let Some(address) = args.webhook_listen else {
        ready.store(true, Ordering::Release);
        return Ok(());
    };
    let files = args.webhook_tls_cert.clone();
    let tls = match files.zip(args.webhook_tls_key.clone()) {
        Some((cert, key)) => Some(Tls::load(cert, key, None)?),
        None if args.webhook_self_signed => None,
        None => bail!(
            "--webhook-listen needs --webhook-tls-cert and --webhook-tls-key, or \
             --webhook-self-signed"
        ),
    };
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("--webhook-listen {address}"))?;
    let defaults = follow(app, names::POD_DEFAULTS);
    let has_line = app.args.settings.line != LineMode::Off;
    let line = has_line.then(|| follow(app, names::LINE));
    let webhook = Webhook {
        calls: Calls::of_api_servers(),
        resource: app.args.resource_name.clone(),
        defaults,
        line,
    };
    let router = Router::new()
        .route("/mutate", post(on_mutate))
        .route("/line", post(on_line))
        .with_state(Arc::new(webhook));
    tracing::info!(listen = ?listener.local_addr(), "serving the webhook");
    let serve = async |tls: Tls| {
        let never = std::future::pending();
        serve_until(listener, Some(tls), BOUNDS, router, never).await;
    };
    match tls {
        Some(tls) => {
            ready.store(true, Ordering::Release);
            app.panics.spawn("webhook", serve(tls));
        }
        None => {
            let (keeper, certificate) = Keeper::new(app.client.clone(), &app.identity, has_line);
            app.panics.spawn("certificate", keeper.run(ready));
            app.panics.spawn("webhook", async {
                if let Ok(tls) = certificate.await {
                    serve(tls).await;
                }
            });
        }
    }
    Ok(())
}

/// What the ConfigMap `name` of gpustow's namespace holds, from now on.
fn follow(app: &App, name: &'static str) -> Store<ConfigMap> {
    let (store, writer) = reflector::store();
    let maps = Api::<ConfigMap>::namespaced(app.client.clone(), names::NAMESPACE);
    let config = watcher::Config::default()
        .timeout(WATCH_SECONDS)
        .fields(&format!("metadata.name={name}"));
    let watch = watcher(maps, config).default_backoff().reflect(writer);
    tokio::spawn(watch.for_each(move |event| {
        if let Err(error) = event {
            tracing::warn!(%error, "cannot watch the ConfigMap {name}");
        }
        std::future::ready(())
    }));
    store
}

impl FromRequest<Arc<Webhook>> for Call {
    type Rejection = Rejected;

    async fn from_request(request: Request, webhook: &Arc<Webhook>) -> Result<Self, Rejected> {
        Call::hear(&webhook.calls, request).await
    }
}

impl Webhook {
    /// What an administrator gives pods; the error is for whoever creates one.
    async fn defaults(&self) -> Result<PodDefaults, &'static str> {
        match timeout(DEFAULTS, self.defaults.wait_until_ready()).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) | Err(_) => {
                return Err("gpustow cannot read its ConfigMap gpustow-pods yet: try again");
            }
        }
        let map = self.defaults.state().into_iter().next();
        let text = |key: &str| {
            let data = map.as_ref()?.data.as_ref()?;
            data.get(key).cloned()
        };
        Ok(PodDefaults {
            runtime_class: text("runtimeClassName").unwrap_or_default(),
            capabilities: text("driverCapabilities").unwrap_or_default(),
            enforce: text("enforce").unwrap_or_default(),
        })
    }

    /// Do new pods stand in line? Not where that cannot be told.
    fn holds(&self) -> bool {
        let map = self
            .line
            .as_ref()
            .and_then(|line| line.state().into_iter().next());
        let data = map.as_ref().and_then(|map| map.data.as_ref());
        data.and_then(|data| data.get(names::LINE_KEY))
            .is_some_and(|said| said == "true")
    }
}

async fn on_mutate(State(webhook): State<Arc<Webhook>>, call: Call) -> Response {
    let review: Value = match call.read("mutate") {
        Ok(review) => review,
        Err(failure) => return (StatusCode::BAD_REQUEST, failure.text).into_response(),
    };
    let request = &review["request"];
    let change = match webhook.defaults().await {
        Ok(defaults) => {
            let change = Change {
                pod: &request["object"],
                before: Some(&request["oldObject"]),
                debugs: request["subResource"] == "ephemeralcontainers",
            };
            Ok(patch(change, &webhook.resource, &defaults))
        }
        Err(message) => Err(message),
    };
    answer(&review, change)
}

/// Whom the gate is for is said in the webhook's configuration; nobody is refused here.
async fn on_line(State(webhook): State<Arc<Webhook>>, call: Call) -> Response {
    let review: Value = match call.read("line") {
        Ok(review) => review,
        Err(failure) => return (StatusCode::BAD_REQUEST, failure.text).into_response(),
    };
    let change = match webhook.holds() {
        true => gate(&review["request"]["object"]),
        false => Vec::new(),
    };
    answer(&review, Ok(change))
}

/// What the API server is told: how to change the pod, or why it is refused.
fn answer(review: &Value, change: Result<Vec<Value>, &'static str>) -> Response {
    let mut answer = json!({ "uid": review["request"]["uid"], "allowed": true });
    match change {
        Ok(operations) if operations.is_empty() => {}
        Ok(operations) => {
            let operations = Value::from(operations).to_string().into_bytes();
            answer["patchType"] = json!("JSONPatch");
            answer["patch"] = json!(ByteString(operations));
        }
        Err(message) => {
            answer["allowed"] = json!(false);
            answer["status"] = json!({ "code": 503, "message": message });
        }
    }
    Json(json!({
        "apiVersion": review["apiVersion"], "kind": review["kind"], "response": answer,
    }))
    .into_response()
}
