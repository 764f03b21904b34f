//! The state that the handlers of kube-scheduler's calls share. Background tasks take the parts that they need.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result};
use gpustow_api::{PodFacts, names};
use kube::Client;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::admission;
use crate::args::Args;
use crate::bind::{BIND_TIMEOUT, Binds};
use crate::call::Calls;
use crate::claims::Unserved;
use crate::config::Followed;
use crate::disruptions;
use crate::epoch::{self, Epoch, EpochError, Fence, Unfenced};
use crate::events::Events;
use crate::failure::{ErrorKind, Failure};
use crate::history::Uses;
use crate::locked::Locked;
use crate::metrics::Metrics;
use crate::panics::Panics;
use crate::preempt::late::Doubts;
use crate::turns::Turns;
use crate::watch::Lists;

/// For the watch to show a write of our own.
const SHOWN_WITHIN: Duration = Duration::from_secs(3);

/// Everything that handlers share.
pub(crate) struct App {
    pub(crate) args: Args,
    pub(crate) identity: String,
    pub(crate) client: Client,
    pub(crate) ledger: Arc<Locked>,
    pub(crate) lists: Arc<Lists>,
    /// The administrator's decisions for the whole cluster.
    pub(crate) config: Arc<Followed>,
    /// Whether the admission policies hold.
    pub(crate) policies: Arc<admission::Found>,
    /// The webhook is served, or not wanted.
    pub(crate) webhook: Arc<AtomicBool>,
    draining: watch::Sender<bool>,
    pub(crate) epoch: Arc<Epoch>,
    pub(crate) binds: Binds,
    pub(crate) calls: Calls,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) events: Arc<Events>,
    /// Nodes that filter refused on a view that may be late.
    pub(crate) doubts: Doubts,
    /// kube-scheduler asks for victims where only the extender refuses a node.
    pub(crate) asks: AtomicBool,
    pub(crate) turns: Turns,
    /// The pods' use of their GPUs.
    pub(crate) uses: Arc<Uses>,
    /// The fence between pods and ResourceClaims cannot be.
    pub(crate) unserved: Unserved,
    /// The part of the extender that panicked, if one did.
    pub(crate) panics: Panics,
}

impl App {
    pub(crate) fn new(args: Args, client: Client) -> Result<Arc<Self>> {
        let identity = args.identity.clone().unwrap_or_else(default_identity);
        let epoch = Epoch::new(
            client.clone(),
            epoch::Settings {
                namespace: args.lease.namespace.clone(),
                name: args.lease.name.clone(),
                identity: identity.clone(),
                resource: args.resource_name.clone(),
                retake_after: args.retake_after,
            },
        );
        let panics = Panics::default();
        let config = Followed::default();
        Ok(Arc::new(Self {
            events: Events::start(client.clone(), &identity).into(),
            ledger: Locked::new(gpustow_settings::ledger(&config.spec()), panics.clone()).into(),
            config: config.into(),
            metrics: Metrics::new().context("cannot set up the metrics")?.into(),
            lists: Arc::default(),
            policies: Arc::default(),
            webhook: Arc::new(AtomicBool::new(args.webhook.webhook_listen.is_none())),
            draining: watch::Sender::default(),
            doubts: Doubts::default(),
            asks: AtomicBool::default(),
            turns: Turns::default(),
            uses: Arc::default(),
            unserved: Unserved::default(),
            panics,
            binds: Binds::default(),
            calls: Calls::of_schedulers(args.tls.is_none().then_some(args.listen.ip())),
            args,
            identity,
            client,
            epoch: epoch.into(),
        }))
    }

    /// From now on no call is decided.
    pub(crate) fn drain(&self) {
        self.draining.send_replace(true);
    }

    pub(crate) fn is_draining(&self) -> bool {
        *self.draining.borrow()
    }

    /// Ends when no call is decided any more.
    pub(crate) async fn drained(&self) {
        // The sender lives as long as the app.
        let _ = self.draining.subscribe().wait_for(|it| *it).await;
    }

    /// The epoch in which this replica decides.
    pub(crate) async fn epoch(self: &Arc<Self>) -> Result<u64, EpochError> {
        if let Some(epoch) = self.epoch.held() {
            return Ok(epoch);
        }
        // Its own task: kube-scheduler hanging up must not end a takeover in the middle.
        let app = self.clone();
        let taking = tokio::spawn(async move {
            let known = || app.ledger.lock().highest_epoch();
            let catch_up = async |fence: Fence, unfenced: Arc<[Unfenced]>| {
                app.catch_up(&fence).await;
                app.metrics.takeovers.inc();
                let pods = unfenced.iter().map(|unfenced| unfenced.pod.clone());
                app.ledger.lock().withhold(pods);
                disruptions::resume(&app);
                unfenced
                    .iter()
                    .for_each(|unfenced| app.events.unfenced(unfenced));
            };
            app.epoch.ensure(known, catch_up).await
        });
        match timeout(BIND_TIMEOUT, taking).await {
            Ok(Ok(taken)) => taken,
            Ok(Err(_)) | Err(_) => Err(EpochError::TakingOver),
        }
    }

    /// Ends when the ledger has all that was written to pods before. A watch shows writes in their order: once it shows one
    /// of now, it has shown all that came before. All pods are listed where it does not.
    async fn catch_up(&self, fence: &Fence) {
        let pods = &self.lists.pods;
        let shown = pods.shown();
        let holds = |pod: &&Arc<PodFacts>| {
            pod.node.is_some() && pod.requests_memory() && !pod.released && !pod.deleting
        };
        let holder = self.ledger.lock().pods().find(holds).cloned();
        if let Some(holder) = holder
            && let Ok(marked) = fence.mark(&holder).await
            && let Some(version) = marked.resource_version
            && timeout(SHOWN_WITHIN, shown.reach(&version)).await.is_ok()
        {
            return;
        }
        pods.renew().await;
    }

    /// The epoch in which this replica decides, or why it may not.
    pub(crate) async fn may_decide(self: &Arc<Self>) -> Result<u64, Failure> {
        if self.is_draining() {
            return Err(Failure::new(
                ErrorKind::Internal,
                "gpustow is shutting down",
            ));
        }
        let missing = self.lists.missing();
        if !missing.is_empty() {
            let text = format!("gpustow is still reading {}", missing.join(", "));
            return Err(Failure::new(ErrorKind::Internal, text));
        }
        self.epoch()
            .await
            .map_err(|error| Failure::new((&error).into(), format!("gpustow: {error}")))
    }
}

/// The host's name: a container that is restarted keeps it, and with it its place.
fn default_identity() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}-{}", names::EXTENDER, host.trim())
}
