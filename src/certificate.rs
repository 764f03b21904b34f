//! The webhook's certificate, made and renewed by the extenders themselves: it is its own authority, and
//! no key outlives it. It is kept in a Secret, and the webhook's configuration trusts it.
//!
//! Every replica looks after both and none leads: before the first pod asks, no replica decides, and no pod can ask
//! before there is a certificate. Replicas do not conflict, because each write fails if another replica wrote since.
//! The configuration is read first, so that a replica that read an older Secret cannot withdraw trust from a newer
//! certificate. `step` chooses the next step.

mod step;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::http::{Request, header};
use gpustow_api::names;
use gpustow_serve::Tls;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use thiserror::Error;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

use crate::ask::{AskError, send_dated, within};
use step::{Kept, Pair, Seen, Step, next};

/// Between two looks.
const PERIOD: Duration = Duration::from_secs(5);
/// For one request.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Until every API server has heard which authorities the configuration trusts.
const SETTLE: Duration = Duration::from_secs(30);
/// For other replicas to restore a lost Secret from memory.
const FORGOTTEN: Duration = Duration::from_secs(15);
/// Steps in one look: each one leads to the next.
const STEPS: usize = 4;
const CONFIGURATIONS: &str = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations";

/// Why a step could not be made.
#[derive(Debug, Error)]
enum StepError {
    #[error(transparent)]
    Ask(#[from] AskError),
    #[error("cannot make a certificate: {0}")]
    Make(#[from] rcgen::Error),
    #[error("cannot write the request: {0}")]
    Request(#[from] axum::http::Error),
    #[error(
        "the MutatingWebhookConfiguration {name} lacks webhooks: apply gpustow's manifests",
        name = names::WEBHOOK_CONFIGURATION
    )]
    NoWebhook,
}

/// This replica's part in looking after the certificate.
pub(crate) struct Keeper {
    client: Client,
    secrets: Api<Secret>,
    /// The name by which the API server distinguishes replicas.
    manager: String,
    /// The last usable contents of the Secret.
    kept: Option<Kept>,
    /// The certificate that comes next, and since when the configuration trusts it.
    trusted: Option<(String, Instant)>,
    /// Since when there has been no Secret that makes sense.
    missing: Option<Instant>,
    /// How far the API server's clock is behind this node's.
    behind: Option<SignedDuration>,
    served: Served,
}

/// Where the first certificate goes; the others replace it.
enum Served {
    First(oneshot::Sender<Tls>),
    Now(Tls, Pair),
}

impl Keeper {
    /// Also returns the receiver of the first certificate.
    pub(crate) fn new(client: Client, identity: &str) -> (Keeper, oneshot::Receiver<Tls>) {
        let (first, comes) = oneshot::channel();
        // The API server takes 128 characters.
        let identity: String = identity.chars().take(100).collect();
        let keeper = Keeper {
            secrets: Api::namespaced(client.clone(), names::NAMESPACE),
            client,
            manager: format!("{}-{identity}", names::EXTENDER),
            kept: None,
            trusted: None,
            missing: None,
            behind: None,
            served: Served::First(first),
        };
        (keeper, comes)
    }

    /// Looks after it for as long as the process runs.
    pub(crate) async fn run(mut self, ready: Arc<AtomicBool>) {
        let mut told = String::new();
        loop {
            let result = self.look().await;
            ready.store(matches!(self.served, Served::Now(..)), Ordering::Release);
            let problem = result.err().map(|it| it.to_string()).unwrap_or_default();
            if !problem.is_empty() && problem != told {
                tracing::warn!(
                    error = problem,
                    "cannot look after the webhook's certificate"
                );
            }
            told = problem;
            sleep(PERIOD).await;
        }
    }

    async fn look(&mut self) -> Result<(), StepError> {
        for _ in 0..STEPS {
            let configuration = self.configuration().await?;
            let read = self.secrets.get_opt(names::WEBHOOK_TLS);
            let secret = within(TIMEOUT, read).await?;
            let known = self.kept.as_ref();
            let found = secret.as_ref().and_then(|secret| Kept::of(secret, known));
            let bundle = configuration.as_ref().map(|it| it.bundle.as_str());
            if let Some(found) = &found {
                // Any is better than none.
                let is_first = matches!(self.served, Served::First(_));
                if is_first || bundle.is_none_or(|bundle| found.is_trusted(bundle)) {
                    self.serve(&found.now);
                }
                self.kept = Some(found.clone());
            }
            self.missing = match found {
                Some(_) => None,
                None => self.missing.or_else(|| Some(Instant::now())),
            };
            let settled = self.settled(found.as_ref(), bundle);
            let seen = Seen {
                found: found.as_ref(),
                kept: self.kept.as_ref(),
                bundle,
                settled,
                forgotten: self.missing.is_some_and(|it| it.elapsed() >= FORGOTTEN),
                now: self.now(),
            };
            match next(&seen)? {
                Step::Wait => return Ok(()),
                Step::Write(kept) => {
                    self.write(secret, &kept).await?;
                    // It may be lost before the next look.
                    self.kept = Some(kept);
                }
                Step::Trust(bundle) => {
                    if let Some(configuration) = configuration {
                        self.trust(&configuration, &bundle).await?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The API server's time, as far as it is known. The API server judges certificates, and this node's clock may be
    /// wrong.
    fn now(&self) -> Timestamp {
        let (own, behind) = (Timestamp::now(), self.behind.unwrap_or_default());
        own.checked_sub(behind).unwrap_or(own)
    }

    /// Has this process seen for long enough that the next certificate is trusted?
    fn settled(&mut self, found: Option<&Kept>, bundle: Option<&str>) -> bool {
        let next = found.and_then(|found| Some(found.next.as_ref()?.cert.trim()));
        let trusted = next.filter(|next| bundle.is_some_and(|bundle| bundle.contains(next)));
        let before = self.trusted.take();
        self.trusted = trusted.map(|next| {
            let since = before.filter(|(cert, _)| cert == next);
            since.unwrap_or_else(|| (next.to_owned(), Instant::now()))
        });
        let long = |since: &Instant| since.elapsed() >= SETTLE;
        self.trusted.as_ref().is_some_and(|(_, since)| long(since))
    }

    fn serve(&mut self, pair: &Pair) {
        match &mut self.served {
            Served::Now(_, now) if now == pair => {}
            Served::Now(tls, now) => match tls.replace(&pair.cert, &pair.key) {
                Ok(()) => {
                    tracing::info!("serving the webhook with another certificate");
                    *now = pair.clone();
                }
                Err(error) => tracing::warn!(%error, "the former certificate stays in use"),
            },
            Served::First(_) => {
                let Ok(tls) = Tls::given(&pair.cert, &pair.key) else {
                    return;
                };
                let now = Served::Now(tls.clone(), pair.clone());
                if let Served::First(first) = std::mem::replace(&mut self.served, now) {
                    // Who waited for it has gone with the process.
                    let _ = first.send(tls);
                }
            }
        }
    }

    async fn configuration(&mut self) -> Result<Option<Configuration>, StepError> {
        let request = Request::get(path()).body(Vec::new())?;
        let (answer, date) = within(TIMEOUT, send_dated(&self.client, request)).await?;
        self.behind = date.map(|date| Timestamp::now().duration_since(date));
        match answer.map_err(AskError::from) {
            Ok(object) => Configuration::of(&object)
                .map(Some)
                .ok_or(StepError::NoWebhook),
            Err(error) if error.status() == Some(404) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes which authorities the API server trusts, if no other replica wrote since, and nothing else.
    async fn trust(&self, to: &Configuration, bundle: &str) -> Result<(), StepError> {
        let bundle = ByteString(bundle.as_bytes().to_vec());
        let version =
            json!({ "op": "test", "path": "/metadata/resourceVersion", "value": to.version });
        let each = (0..to.webhooks).map(|index| {
            let path = format!("/webhooks/{index}/clientConfig/caBundle");
            json!({ "op": "add", "path": path, "value": bundle })
        });
        let patch: Value = [version].into_iter().chain(each).collect();
        let request = Request::patch(path())
            .header(header::CONTENT_TYPE, "application/json-patch+json")
            .body(patch.to_string().into_bytes())?;
        within(TIMEOUT, self.client.request::<Value>(request)).await?;
        tracing::info!("the API server trusts the webhook's certificate");
        Ok(())
    }

    async fn write(&self, before: Option<Secret>, kept: &Kept) -> Result<(), StepError> {
        match before {
            Some(mut secret) => {
                kept.fill(&mut secret);
                let params = PostParams::default();
                let write = self.secrets.replace(names::WEBHOOK_TLS, &params, &secret);
                within(TIMEOUT, write).await?;
            }
            // The patch uses a right on this name alone, which a POST could not use. If two replicas patch, the second
            // gets a conflict.
            None => {
                let mut secret = Secret {
                    type_: Some("kubernetes.io/tls".to_owned()),
                    ..Secret::default()
                };
                secret.metadata.name = Some(names::WEBHOOK_TLS.to_owned());
                kept.fill(&mut secret);
                let params = PatchParams::apply(&self.manager);
                let secret = Patch::Apply(&secret);
                let write = self.secrets.patch(names::WEBHOOK_TLS, &params, &secret);
                within(TIMEOUT, write).await?;
            }
        }
        tracing::info!(
            secret = names::WEBHOOK_TLS,
            "wrote the webhook's certificate"
        );
        Ok(())
    }
}

/// The state of the webhook's configuration.
struct Configuration {
    version: String,
    /// The number of webhooks in it. Each trusts the same authorities.
    webhooks: usize,
    /// The authorities that the API server trusts for all of them, in PEM.
    bundle: String,
}

impl Configuration {
    fn of(object: &Value) -> Option<Configuration> {
        let webhooks = object["webhooks"].as_array()?;
        let bundle = |it: &Value| it["clientConfig"]["caBundle"].clone();
        let first = bundle(webhooks.first()?);
        // One that a later version added trusts no authority yet.
        let same = webhooks.iter().all(|it| bundle(it) == first);
        let first = serde_json::from_value(first).ok().filter(|_| same);
        let ByteString(trusted) = first.unwrap_or(ByteString(Vec::new()));
        Some(Configuration {
            version: object["metadata"]["resourceVersion"].as_str()?.to_owned(),
            webhooks: webhooks.len(),
            bundle: String::from_utf8_lossy(&trusted).into_owned(),
        })
    }
}

fn path() -> String {
    format!("{CONFIGURATIONS}/{}", names::WEBHOOK_CONFIGURATION)
}

#[cfg(test)]
mod tests;
