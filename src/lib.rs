//! The gpustow extender: everything that scheduling does to the outside world. The decisions are
//! made in `gpustow-ledger` and `gpustow-pack`.

mod admission;
mod args;
mod ask;
mod bind;
mod call;
mod decode;
mod epoch;
mod events;
mod failure;
mod metrics;
mod preempt;
mod routes;
mod silence;
mod telemetry;
mod wake;
mod warm;
mod watch;
mod webhook;
pub mod wire;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use gpustow_api::names;
use gpustow_ledger::Ledger;
use gpustow_serve::Bounds;
use kube::Client;
use tokio::net::TcpListener;
use tokio::sync::{Notify, oneshot};
use tokio::time::{sleep, timeout};

pub use args::{Args, LogFormat};
use bind::Binds;
use call::Calls;
use epoch::{Epoch, EpochError, Unfenced};
use events::Events;
use failure::{ErrorKind, Failure};
use metrics::Metrics;
use watch::Lists;
pub use webhook::WebhookArgs;

/// For binds under way at a shutdown, unknown outcomes included.
const DRAIN: Duration = Duration::from_secs(20);
/// Between two attempts to resume.
const RETRY: Duration = Duration::from_secs(2);

/// For kube-scheduler, whose connections wait for 90 s before they are closed.
const VERBS: Bounds = Bounds {
    connections: 1024,
    patience: Duration::from_secs(120),
    buffer: 256 << 10,
};

/// Everything that handlers share.
pub struct App {
    args: Args,
    identity: String,
    client: Client,
    started: Instant,
    ledger: Mutex<Ledger>,
    lists: Lists,
    /// Whether the admission policies hold.
    policies: admission::Found,
    draining: AtomicBool,
    epoch: Epoch,
    binds: Binds,
    calls: Calls,
    metrics: Metrics,
    events: Events,
    /// Something changed that may let a waiting pod in.
    wake: Notify,
    /// Something changed that may make answers void.
    warm: Notify,
}

impl App {
    fn new(args: Args, client: Client) -> Result<Arc<Self>> {
        let identity = args.identity.clone().unwrap_or_else(default_identity);
        let epoch = Epoch::new(
            client.clone(),
            epoch::Settings {
                namespace: args.lease_namespace.clone(),
                name: args.lease_name.clone(),
                identity: identity.clone(),
                resource: args.resource_name.clone(),
                retake_after: args.retake_after,
            },
        );
        Ok(Arc::new(Self {
            events: Events::start(client.clone(), &identity),
            ledger: Mutex::new(Ledger::new(args.ledger())),
            metrics: Metrics::new(args.metrics_sizes.clone())
                .context("cannot set up the metrics")?,
            started: Instant::now(),
            lists: Lists::default(),
            policies: admission::Found::default(),
            draining: AtomicBool::new(false),
            binds: Binds::default(),
            calls: Calls::new(args.client_ca.is_none().then_some(args.listen.ip())),
            wake: Notify::new(),
            warm: Notify::new(),
            args,
            identity,
            client,
            epoch,
        }))
    }

    /// The ledger's clock.
    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// The epoch in which this replica decides.
    async fn epoch(self: &Arc<Self>) -> Result<u64, EpochError> {
        if let Some(epoch) = self.epoch.held() {
            return Ok(epoch);
        }
        // Its own task: kube-scheduler hanging up must not end a takeover in the middle.
        let app = self.clone();
        let taking = tokio::spawn(async move {
            let known = || app.ledger().highest_epoch();
            let relist = async |unfenced: Arc<[Unfenced]>| {
                app.lists.pods.renew().await;
                app.metrics.takeovers.inc();
                let pods = unfenced.iter().map(|unfenced| unfenced.pod.clone());
                app.ledger().withhold(pods);
                unfenced
                    .iter()
                    .for_each(|unfenced| app.events.unfenced(unfenced));
            };
            app.epoch.ensure(known, relist).await
        });
        match timeout(self.args.bind_timeout, taking).await {
            Ok(Ok(taken)) => taken,
            Ok(Err(_)) | Err(_) => Err(EpochError::TakingOver),
        }
    }

    /// Is this replica in a position to decide? If not, the text says why.
    async fn may_decide(self: &Arc<Self>) -> Result<(), Failure> {
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
            .map(drop)
            .map_err(|error| Failure::new((&error).into(), format!("gpustow: {error}")))
    }
}

/// The host's name: a container that is restarted keeps it, and with it its place.
fn default_identity() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}-{}", names::EXTENDER, host.trim())
}

/// Runs the extender until SIGTERM or SIGINT.
///
/// # Errors
/// If it cannot start: bad flags, no API server, an address in use.
pub async fn run(args: Args) -> Result<()> {
    args.check()?;
    telemetry::init(&args)?;
    let client = gpustow_serve::client(args.kubeconfig.as_deref()).await?;
    let listen = |address, flag: &'static str| async move {
        TcpListener::bind(address)
            .await
            .with_context(|| format!("{flag} {address}"))
    };
    let verbs = listen(args.listen, "--listen").await?;
    let health = listen(args.health_listen, "--health-listen").await?;
    serve(args, client, verbs, health, gpustow_serve::stop_signal()).await
}

/// Serves kube-scheduler on `verbs`, and health and metrics on `health`, until `stop`. The addresses
/// in `args` are not used; its tasks end with the runtime.
///
/// # Errors
/// If a listener fails.
pub async fn serve(
    args: Args,
    client: Client,
    verbs: TcpListener,
    health: TcpListener,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<()> {
    let (tls, verbs_tls) = (args.serving.tls()?, args.tls()?);
    webhook::start(&args.webhook, &args.resource_name, client.clone()).await?;
    let app = App::new(args, client)?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"), identity = %app.identity,
        listen = ?verbs.local_addr(), health = ?health.local_addr(),
        resource = %app.args.resource_name, policy = %app.args.policy,
        "starting"
    );
    watch::spawn(&app);
    tokio::spawn(wake::run(app.clone()));
    tokio::spawn(warm::run(app.clone()));
    tokio::spawn(admission::run(app.clone()));
    tokio::spawn(silence::run(app.clone()));
    tokio::spawn(bind::confirm(app.clone()));
    tokio::spawn(resume(app.clone()));
    let health = gpustow_serve::serve(health, tls, routes::health(app.clone()));
    let health = tokio::spawn(health);
    let (stopping, stopped) = oneshot::channel();
    let draining = app.clone();
    let stop = async move {
        stop.await;
        tracing::info!(binds = draining.binds.count(), "shutting down");
        draining.draining.store(true, Ordering::Release);
        // The receiver lives until verbs ends.
        let _ = stopping.send(());
    };
    let verbs = gpustow_serve::serve_until(
        verbs,
        verbs_tls,
        VERBS,
        routes::scheduler(app.clone()),
        stop,
    );
    let overdue = async {
        // Without a stop there is nothing to be late for.
        match stopped.await {
            Ok(()) => sleep(DRAIN).await,
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        () = verbs => {}
        () = overdue => tracing::warn!("kube-scheduler holds a call open"),
    }
    drain(&app).await;
    health.abort();
    Ok(())
}

/// A replica that was restarted takes its place again at once: pods may wait for room, and as long
/// as kube-scheduler has nothing to ask, nobody would wake them.
async fn resume(app: Arc<App>) {
    app.lists.all_in().await;
    loop {
        let resumed = match app.epoch.is_inherited().await {
            Ok(false) => return,
            Ok(true) => app.epoch().await.map(drop),
            Err(error) => Err(error.into()),
        };
        match resumed {
            Ok(()) => return,
            Err(error) => tracing::warn!(
                %error, namespace = %app.args.lease_namespace, lease = %app.args.lease_name,
                "cannot take the epoch of an earlier life"
            ),
        }
        sleep(RETRY).await;
    }
}

/// Sees binds through, then leaves the epoch.
async fn drain(app: &App) {
    let done = async {
        binds_done(app).await;
        // A call that came since may have been told of the epoch.
        app.epoch.close();
        binds_done(app).await;
    };
    if timeout(DRAIN, done).await.is_err() {
        tracing::warn!(
            binds = app.binds.count(),
            "binds without outcome; the successor will fence"
        );
        return;
    }
    let unfenced = app.ledger().unfenced();
    if unfenced > 0 {
        tracing::warn!(unfenced, "pods could not be fenced; the successor will try");
        return;
    }
    if let Err(error) = app.epoch.leave().await {
        tracing::warn!(%error, "cannot mark the epoch as left; the successor will fence");
    }
}

async fn binds_done(app: &App) {
    while app.binds.count() > 0 {
        sleep(Duration::from_millis(20)).await;
    }
}
