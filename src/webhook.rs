//! Changes pods that ask as they are created, where the API server cannot do it by policy: reads its
//! reviews and answers with patches. What is changed is `gpustow_policies::mutate`'s affair. Every replica
//! serves, whether it decides or not. Where there is a line, pods get its gate here too.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use axum::extract::{FromRequest, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use gpustow_api::config::Requests;
use gpustow_policies::adopt::Terms;
use gpustow_policies::mutate::{Change, adopt, gate, patch};
use gpustow_serve::{Bounds, Tls, serve_until};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::app::App;
use crate::ask::within;
use crate::call::{Call, Calls, Rejected};
use crate::certificate::Keeper;
use crate::config::Followed;

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
    /// Serve the API server, which has pods changed as they are created, at this address
    #[arg(long, env = "GPUSTOW_WEBHOOK_LISTEN")]
    pub webhook_listen: Option<SocketAddr>,

    /// Serve it with tls.crt and tls.key of this folder, read again when they change. Without it the extender makes and
    /// renews the certificate in the Secret gpustow-webhook-tls, for which it needs the permissions of
    /// manifests/overlays/webhook-self-signed
    #[arg(
        long,
        env = "GPUSTOW_WEBHOOK_TLS",
        value_name = "FOLDER",
        requires = "webhook_listen"
    )]
    pub webhook_tls: Option<PathBuf>,
}

impl WebhookArgs {
    /// Does the extender make the certificate?
    pub(crate) fn is_self_signed(&self) -> bool {
        self.webhook_listen.is_some() && self.webhook_tls.is_none()
    }
}

struct Webhook {
    client: Client,
    calls: Calls,
    resource: String,
    config: Arc<Followed>,
}

/// Serves the webhook, if it is wanted, until the runtime ends. Until `ready` is set, it has no
/// certificate and serves nobody.
///
/// # Errors
/// If its address is in use or its certificate cannot be used.
pub(crate) async fn start(app: &App, ready: Arc<AtomicBool>) -> Result<()> {
    let args = &app.args.webhook;
    let Some(address) = args.webhook_listen else {
        return Ok(());
    };
    let tls = args.webhook_tls.as_deref().map(Tls::of).transpose()?;
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("--webhook-listen {address}"))?;
    let webhook = Webhook {
        client: app.client.clone(),
        calls: Calls::of_api_servers(),
        resource: app.args.resource_name.clone(),
        config: app.config.clone(),
    };
    let router = Router::new()
        .route("/mutate", post(on_mutate))
        .route("/adopt", post(on_adopt))
        .route("/queue", post(on_queue))
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
            let (keeper, certificate) =
                Keeper::new(app.client.clone(), &app.identity, app.config.clone());
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

impl FromRequest<Arc<Webhook>> for Call {
    type Rejection = Rejected;

    async fn from_request(request: Request, webhook: &Arc<Webhook>) -> Result<Self, Rejected> {
        Call::hear(&webhook.calls, request).await
    }
}

impl Webhook {
    /// What the administrator gives pods; the error is for the user who creates one.
    async fn requests(&self) -> Result<Requests, &'static str> {
        let current = self.config.known(DEFAULTS).await;
        let unknown = "gpustow cannot read its GpustowConfig yet: try again";
        Ok(current.ok_or(unknown)?.spec.requests.clone())
    }

    /// What the namespace's labels say; the error is for the user who creates a pod there.
    async fn labels(&self, namespace: &str) -> Result<Labels, &'static str> {
        let all = Api::<Namespace>::all(self.client.clone());
        match within(DEFAULTS, all.get_metadata(namespace)).await {
            Ok(found) => Ok(found.metadata.labels.unwrap_or_default()),
            Err(error) => {
                tracing::warn!(%error, namespace, "cannot read the labels of a namespace");
                Err(
                    "gpustow cannot read the namespace's labels: apply manifests/adopt-webhook again, or try again",
                )
            }
        }
    }
}

type Labels = BTreeMap<String, String>;

async fn on_mutate(State(webhook): State<Arc<Webhook>>, call: Call) -> Response {
    let review: Value = match call.read("mutate") {
        Ok(review) => review,
        Err(failure) => return (StatusCode::BAD_REQUEST, failure.text).into_response(),
    };
    let request = &review["request"];
    let change = match webhook.requests().await {
        Ok(requests) => {
            let change = Change {
                pod: &request["object"],
                before: Some(&request["oldObject"]),
                debugs: request["subResource"] == "ephemeralcontainers",
            };
            Ok(patch(change, &webhook.resource, &requests))
        }
        Err(message) => Err(message),
    };
    answer(&review, change)
}

/// Which namespaces are meant is said in the webhook's configuration; what cannot be translated, a policy refuses.
async fn on_adopt(State(webhook): State<Arc<Webhook>>, call: Call) -> Response {
    let review: Value = match call.read("adopt") {
        Ok(review) => review,
        Err(failure) => return (StatusCode::BAD_REQUEST, failure.text).into_response(),
    };
    let request = &review["request"];
    let namespace = request["namespace"].as_str().unwrap_or_default();
    let (labels, requests) = tokio::join!(webhook.labels(namespace), webhook.requests());
    let change = labels.and_then(|labels| {
        let requests = requests?;
        let terms = Terms::of(&labels).ok().flatten();
        let resource = &webhook.resource;
        Ok(terms.map_or_else(Vec::new, |terms| {
            adopt(&request["object"], terms, resource, &requests)
        }))
    });
    answer(&review, change)
}

/// Whom the gate is for is said in the webhook's configuration; nobody is refused here.
async fn on_queue(State(webhook): State<Arc<Webhook>>, call: Call) -> Response {
    let review: Value = match call.read("queue") {
        Ok(review) => review,
        Err(failure) => return (StatusCode::BAD_REQUEST, failure.text).into_response(),
    };
    let current = webhook.config.current();
    let change = gate(
        &review["request"]["object"],
        &webhook.resource,
        current.queue_from(),
    );
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
