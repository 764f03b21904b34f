//! The configuration that this extender follows: the GpustowConfig of the cluster, as it is now. Without the object, or
//! without its kind, the defaults hold. If the object cannot be decoded the last valid one holds. Until the first answer
//! of the API server nothing that disrupts pods is on.

pub(crate) mod status;

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use gpustow_api::config::{self, GpustowConfigSpec, GpustowConfigStatus, QueueMode};
use gpustow_api::{GpustowConfig, QueueFrom};
use gpustow_serve::WATCH_SECONDS;
use kube::runtime::{WatchStreamExt as _, watcher};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::app::App;
use crate::decode::{self, Each};
use crate::watch::Retry;

/// The name of the resource in metrics and messages.
const RESOURCE: &str = "gpustowconfigs";

/// The configuration that the extender follows now.
#[derive(Clone, Debug)]
pub(crate) struct Current {
    pub(crate) spec: Arc<GpustowConfigSpec>,
    /// The generation of the object that set this spec; none without a valid object.
    pub(crate) generation: Option<i64>,
    /// The object's status, if there is an object.
    pub(crate) status: Option<GpustowConfigStatus>,
    /// Why the object as it is now is not followed.
    pub(crate) problem: Option<String>,
    /// The API server has answered whether there is an object.
    pub(crate) known: bool,
}

impl Current {
    fn unknown() -> Self {
        Self {
            spec: gpustow_settings::cautious().into(),
            generation: None,
            status: None,
            problem: None,
            known: false,
        }
    }

    /// Which new pods are queued now? The admission policy `gpustow-queue` judges by the same fields.
    pub(crate) fn queue_from(&self) -> &[QueueFrom] {
        let on = self.spec.queue.mode != QueueMode::Off;
        let status = self.status.as_ref().filter(|_| on);
        status.map_or(&[], |status| &status.queue_from)
    }

    /// The state after the latest change of the object.
    fn after(&self, object: Option<Each<GpustowConfig>>) -> Self {
        let (spec, generation, status, problem) = match object {
            None => (Arc::default(), None, None, None),
            Some(Each::Whole(object)) => {
                let spec = match object.spec == *self.spec {
                    true => self.spec.clone(),
                    false => object.spec.into(),
                };
                let status = object.status.unwrap_or_default();
                (spec, object.metadata.generation, Some(status), None)
            }
            Some(Each::Broken(remains)) => (
                self.spec.clone(),
                self.generation,
                Some(self.status.clone().unwrap_or_default()),
                Some(remains.error),
            ),
        };
        Self {
            spec,
            generation,
            status,
            problem,
            known: true,
        }
    }
}

/// The configuration for everyone who asks.
pub(crate) struct Followed(watch::Sender<Current>);

impl Default for Followed {
    fn default() -> Self {
        Self(watch::Sender::new(Current::unknown()))
    }
}

impl Followed {
    pub(crate) fn current(&self) -> Current {
        self.0.borrow().clone()
    }

    pub(crate) fn spec(&self) -> Arc<GpustowConfigSpec> {
        self.0.borrow().spec.clone()
    }

    /// The same once it is known. None if it is unknown for this long.
    pub(crate) async fn known(&self, limit: Duration) -> Option<Current> {
        let mut changes = self.0.subscribe();
        let known = timeout(limit, changes.wait_for(|current| current.known)).await;
        Some(known.ok()?.ok()?.clone())
    }

    /// Reports every change from now on.
    pub(crate) fn changes(&self) -> watch::Receiver<Current> {
        self.0.subscribe()
    }
}

/// Follows the object for as long as the process runs.
pub(crate) async fn follow(app: Arc<App>) {
    let named = watcher::Config::default()
        .timeout(WATCH_SECONDS)
        .fields(&format!("metadata.name={}", config::NAME));
    let events = decode::watch::<GpustowConfig>(app.client.clone(), named, true);
    let mut events = std::pin::pin!(events.backoff(Retry::default()));
    let mut listed = None;
    while let Some(event) = events.next().await {
        app.metrics.watch_event(RESOURCE);
        match event {
            Ok(watcher::Event::Init) => listed = None,
            Ok(watcher::Event::InitApply(object)) => listed = Some(object),
            Ok(watcher::Event::InitDone) => set(&app, listed.take()),
            Ok(watcher::Event::Apply(object)) => set(&app, Some(object)),
            Ok(watcher::Event::Delete(_)) => set(&app, None),
            Err(error) if is_no_kind(&error) => {
                tracing::debug!(%error, "the GpustowConfig is missing: the defaults hold");
                set(&app, None);
            }
            Err(error) => tracing::warn!(
                %error, resource = RESOURCE, known = app.config.current().known,
                "cannot read the configuration: the last one holds, and without one nothing disrupts pods"
            ),
        }
    }
}

/// Does the API server not know the resource?
fn is_no_kind(error: &watcher::Error) -> bool {
    let status = match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => status,
        watcher::Error::WatchError(status) => status,
        _ => return false,
    };
    status.code == 404
}

fn set(app: &App, object: Option<Each<GpustowConfig>>) {
    if let Some(Each::Broken(remains)) = &object {
        tracing::error!(
            name = remains.meta.name.as_deref(),
            error = remains.error,
            "cannot decode the GpustowConfig: the last valid one holds"
        );
    }
    let before = app.config.current();
    let now = before.after(object);
    app.metrics
        .undecodable(RESOURCE, now.problem.is_some().into());
    if !before.known || now.spec != before.spec {
        tracing::info!(generation = now.generation, spec = ?now.spec, "follows the configuration");
        app.ledger
            .lock()
            .configure(gpustow_settings::ledger(&now.spec));
        app.ledger.wake.notify_one();
    }
    app.config.0.send_replace(now);
}
