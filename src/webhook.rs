//! Changes pods that ask as they are created, where the API server cannot do it by policy: reads its
//! reviews and answers with patches. What is changed is `gpustow_api::mutate`'s affair. Every replica
//! serves, whether it decides or not.

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
use gpustow_api::mutate::{Change, PodDefaults, patch};
use gpustow_api::names;
use gpustow_serve::{Bounds, Tls, WATCH_SECONDS, serve_until};
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
    let (defaults, writer) = reflector::store();
    let maps = Api::<ConfigMap>::namespaced(app.client.clone(), names::NAMESPACE);
    let config = watcher::Config::default()
        .timeout(WATCH_SECONDS)
        .fields(&format!("metadata.name={}", names::POD_DEFAULTS));
    let watch = watcher(maps, config).default_backoff().reflect(writer);
    tokio::spawn(watch.for_each(async |event| {
        if let Err(error) = event {
            tracing::warn!(%error, "cannot watch the ConfigMap {}", names::POD_DEFAULTS);
        }
    }));
    let webhook = Webhook {
        calls: Calls::new(None),
        resource: app.args.resource_name.clone(),
        defaults,
    };
    let router = Router::new()
        .route("/mutate", post(on_mutate))
        .with_state(Arc::new(webhook));
    tracing::info!(listen = ?listener.local_addr(), "serving the webhook");
    let serve = async |tls: Tls| {
        let never = std::future::pending();
        serve_until(listener, Some(tls), BOUNDS, router, never).await;
    };
    match tls {
        Some(tls) => {
            ready.store(true, Ordering::Release);
            tokio::spawn(serve(tls));
        }
        None => {
            let (keeper, certificate) = Keeper::new(app.client.clone(), &app.identity);
            tokio::spawn(keeper.run(ready));
            tokio::spawn(async {
                if let Ok(tls) = certificate.await {
                    serve(tls).await;
                }
            });
        }
    }
    Ok(())
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
}

async fn on_mutate(State(webhook): State<Arc<Webhook>>, call: Call) -> Response {
    let review: Value = match call.read("mutate") {
        Ok(review) => review,
        Err(failure) => return (StatusCode::BAD_REQUEST, failure.text).into_response(),
    };
    let request = &review["request"];
    let mut answer = json!({ "uid": request["uid"], "allowed": true });
    match webhook.defaults().await {
        Ok(defaults) => {
            let change = Change {
                pod: &request["object"],
                before: Some(&request["oldObject"]),
                debugs: request["subResource"] == "ephemeralcontainers",
            };
            let operations = patch(change, &webhook.resource, &defaults);
            if !operations.is_empty() {
                let operations = Value::from(operations).to_string().into_bytes();
                answer["patchType"] = json!("JSONPatch");
                answer["patch"] = json!(ByteString(operations));
            }
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
