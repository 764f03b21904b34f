//! Admits pods that carry a key of gpustow's, and warns the author of a template of such pods. It reads the API
//! server's reviews, and [`gpustow_admission`] decides the answers. Every replica serves, whether it leads or not.

use std::convert::Infallible;
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
use gpustow_admission::{Act, Admitted, Ask, Cluster, admit, auto, reads_namespace, template};
use gpustow_api::{GpuWorkload, workload};
use gpustow_serve::{Bounds, Tls, serve_until};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::app::App;
use crate::ask::within;
use crate::call::{Call, Calls, Rejected};
use crate::certificate::Keeper;
use crate::config::{Current, Followed};

/// For API servers, which reuse connections. Anybody may be able to reach it.
const BOUNDS: Bounds = Bounds {
    connections: 256,
    patience: Duration::from_secs(120),
    buffer: 64 << 10,
    // API servers call a replica on until they hear that it goes.
    farewell: Duration::from_secs(5),
};
/// For the reads that an answer depends on, below the time that the API server waits.
const PATIENCE: Duration = Duration::from_secs(2);

/// What an operator may set about the webhook.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Webhook")]
pub struct WebhookArgs {
    /// Serve the API server, which has pods admitted as they are created, at this address
    #[arg(long, env = "GPUSTOW_WEBHOOK_LISTEN")]
    pub webhook_listen: Option<SocketAddr>,

    /// Serve it with tls.crt and tls.key of this folder, read again when they change. Without it the extender makes and
    /// renews the certificate in the Secret gpustow-webhook-tls, for which it needs the permissions of
    /// manifests/certificate
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

/// Serves the webhook, if it is wanted, until the extender drains; the answer ends when it has ended. Until `ready` is
/// set, it lacks a certificate and does not serve clients.
///
/// # Errors
/// If its address is in use or its certificate cannot be used.
pub(crate) async fn start(
    app: &Arc<App>,
    ready: Arc<AtomicBool>,
) -> Result<oneshot::Receiver<Infallible>> {
    let (ended, end) = oneshot::channel();
    let args = &app.args.webhook;
    let Some(address) = args.webhook_listen else {
        return Ok(end);
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
        .route("/admit", post(on_admit))
        .route("/resize", post(on_resize))
        .with_state(Arc::new(webhook));
    tracing::info!(listen = ?listener.local_addr(), "serving the webhook");
    let (stop, drained) = (app.clone(), app.clone());
    let serve = async move |tls: Tls| {
        let stop = stop.drained();
        serve_until(listener, Some(tls), BOUNDS, router, stop).await;
        drop(ended);
    };
    match tls {
        Some(tls) => {
            ready.store(true, Ordering::Release);
            app.panics.spawn("webhook", serve(tls));
        }
        None => {
            let (keeper, certificate) = Keeper::new(app.client.clone(), &app.identity);
            app.panics.spawn("certificate", keeper.run(ready));
            app.panics.spawn("webhook", async move {
                tokio::select! {
                    Ok(tls) = certificate => serve(tls).await,
                    () = drained.drained() => {}
                }
            });
        }
    }
    Ok(end)
}

impl FromRequest<Arc<Webhook>> for Call {
    type Rejection = Rejected;

    async fn from_request(request: Request, webhook: &Arc<Webhook>) -> Result<Self, Rejected> {
        Call::hear(&webhook.calls, request).await
    }
}

/// Why there is no answer: the request may succeed later. It is for who makes it.
type NoAnswer = &'static str;

impl Webhook {
    /// The administrator's decisions.
    async fn config(&self) -> Result<Current, NoAnswer> {
        let current = self.config.known(PATIENCE).await;
        current.ok_or("gpustow cannot read its GpustowConfig yet: try again")
    }

    /// The labels and annotations of a namespace.
    async fn namespace(&self, name: &str) -> Result<ObjectMeta, NoAnswer> {
        let all = Api::<Namespace>::all(self.client.clone());
        match within(PATIENCE, all.get_metadata(name)).await {
            Ok(found) => Ok(found.metadata),
            Err(error) => {
                tracing::warn!(%error, namespace = name, "cannot read a namespace");
                Err(
                    "gpustow cannot read the pod's namespace: try again, or apply gpustow's manifests again",
                )
            }
        }
    }

    /// The history of the pod's workload.
    async fn history(&self, pod: &Value, namespace: &str) -> Result<Option<GpuWorkload>, NoAnswer> {
        let name = workload::name_of(&auto::workload(pod));
        let all = Api::<GpuWorkload>::namespaced(self.client.clone(), namespace);
        within(PATIENCE, all.get_opt(&name)).await.map_err(|error| {
            tracing::warn!(%error, namespace, workload = name, "cannot read a history");
            "gpustow cannot read the history of the pod's workload: try again"
        })
    }

    /// The decision about the request; the inner error is the reason to refuse it.
    async fn judge(
        &self,
        request: &Value,
        resizes: bool,
    ) -> Result<Result<Admitted, String>, NoAnswer> {
        let current = self.config().await?;
        let cluster = Cluster {
            resource: &self.resource,
            spec: &current.spec,
            queue_from: current.queue_from(),
        };
        let (object, before) = (&request["object"], &request["oldObject"]);
        let name = request["namespace"].as_str().unwrap_or_default();
        if request["kind"]["kind"] != "Pod" {
            let warnings = template::warnings(object, cluster, &ObjectMeta::default());
            return Ok(Ok(Admitted {
                warnings,
                ..Admitted::default()
            }));
        }
        let act = match (&request["operation"], &request["subResource"]) {
            (_, it) if it == "ephemeralcontainers" => Act::Debug { before },
            (it, _) if it == "UPDATE" => Act::Annotate { before, resizes },
            _ => Act::Create,
        };
        let creates = matches!(act, Act::Create);
        if !is_name(name) {
            return Err("the request names no namespace: only API servers call this");
        }
        let namespace = match creates && reads_namespace(object, cluster) {
            true => self.namespace(name).await?,
            false => ObjectMeta {
                name: Some(name.to_owned()),
                ..ObjectMeta::default()
            },
        };
        let history = match creates && auto::reads_history(object, &namespace, &self.resource) {
            true => self.history(object, name).await?,
            false => None,
        };
        let ask = Ask {
            pod: object,
            act,
            user: request["userInfo"]["username"].as_str().unwrap_or_default(),
        };
        let admitted = admit(ask, cluster, &namespace, history.as_ref());
        Ok(admitted.map_err(|refusal| refusal.to_string()))
    }
}

/// May it be the name of a namespace? Anybody may call, and a name becomes a part of a path.
fn is_name(name: &str) -> bool {
    let letter = |it: u8| it.is_ascii_lowercase() || it.is_ascii_digit() || it == b'-';
    (1..=63).contains(&name.len()) && name.bytes().all(letter)
}

async fn on_admit(State(webhook): State<Arc<Webhook>>, call: Call) -> Response {
    answer(&webhook, &call, false).await
}

/// The API server has found that the user may change limits of pods that run.
async fn on_resize(State(webhook): State<Arc<Webhook>>, call: Call) -> Response {
    answer(&webhook, &call, true).await
}

/// The answer to the API server: how to change the pod, the warnings for its author, or why it is refused.
async fn answer(webhook: &Webhook, call: &Call, resizes: bool) -> Response {
    let review: Value = match call.read("admit") {
        Ok(review) => review,
        Err(failure) => return (StatusCode::BAD_REQUEST, failure.text).into_response(),
    };
    let mut answer = json!({ "uid": review["request"]["uid"], "allowed": true });
    let refuse = |answer: &mut Value, code: u16, reason: &str, message: &str| {
        answer["allowed"] = json!(false);
        answer["status"] = json!({ "code": code, "reason": reason, "message": message });
    };
    match webhook.judge(&review["request"], resizes).await {
        Ok(Ok(Admitted {
            patch, warnings, ..
        })) => {
            if !patch.is_empty() {
                let operations = Value::from(patch).to_string().into_bytes();
                answer["patchType"] = json!("JSONPatch");
                answer["patch"] = json!(ByteString(operations));
            }
            if !warnings.is_empty() {
                answer["warnings"] = json!(warnings);
            }
        }
        Ok(Err(refusal)) => refuse(&mut answer, 422, "Invalid", &refusal),
        Err(unknown) => refuse(&mut answer, 503, "ServiceUnavailable", unknown),
    }
    Json(json!({
        "apiVersion": review["apiVersion"], "kind": review["kind"], "response": answer,
    }))
    .into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_be_a_namespace_becomes_a_part_of_a_path() {
        for name in ["default", "team-a", "0", &"a".repeat(63)] {
            assert!(is_name(name), "{name}");
        }
        for name in ["", "a/b", "..", "a%2Fb", "A", "a?b", "a b", &"a".repeat(64)] {
            assert!(!is_name(name), "{name}");
        }
    }
}
