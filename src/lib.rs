//! The gpustow extender: everything that scheduling does to the outside world. The decisions are
//! made in `gpustow-ledger` and `gpustow-pack`.

mod args;
mod bind;
mod epoch;
mod events;
mod metrics;
mod preempt;
mod routes;
mod telemetry;
mod wake;
mod watch;
pub mod wire;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use gpustow_ledger::Ledger;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

pub use args::{Args, LogFormat};
use bind::Binds;
use epoch::{Epoch, EpochError};
use events::Events;
use metrics::Metrics;
use watch::Ready;

/// For binds under way at a shutdown, unknown outcomes included.
const DRAIN: Duration = Duration::from_secs(20);

/// Everything that handlers share.
pub struct App {
    args: Args,
    identity: String,
    client: Client,
    started: Instant,
    ledger: Mutex<Ledger>,
    ready: Ready,
    draining: AtomicBool,
    epoch: Epoch,
    binds: Binds,
    metrics: Metrics,
    events: Events,
    /// Something changed that may let a waiting pod in.
    wake: Notify,
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
            metrics: Metrics::new().context("cannot set up the metrics")?,
            started: Instant::now(),
            ready: Ready::default(),
            draining: AtomicBool::new(false),
            binds: Binds::default(),
            wake: Notify::new(),
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
            let relisted = |pods, began: Instant| {
                let began = began.saturating_duration_since(app.started);
                app.ledger().reset_pods(pods, began);
                app.metrics.takeovers.inc();
            };
            app.epoch.ensure(relisted).await
        });
        taking.await.unwrap_or(Err(EpochError::Timeout))
    }

    /// Is this replica in a position to decide? If not, the text says why.
    async fn may_decide(self: &Arc<Self>) -> Result<(), String> {
        let missing = self.ready.missing();
        if self.is_draining() {
            return Err("gpustow is shutting down".to_owned());
        }
        if !missing.is_empty() {
            return Err(format!("gpustow is still reading {}", missing.join(", ")));
        }
        self.epoch()
            .await
            .map(drop)
            .map_err(|error| format!("gpustow: {error}"))
    }
}

fn default_identity() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let nonce = std::collections::hash_map::RandomState::new();
    let nonce = std::hash::BuildHasher::hash_one(&nonce, std::process::id());
    format!("{}-{:08x}", host.trim(), nonce & 0xffff_ffff)
}

/// A client that sends every request once: what to make of a failure is decided per request.
async fn client(args: &Args) -> Result<Client> {
    let mut config = match &args.kubeconfig {
        None => Config::infer().await.context(
            "no way to the API server: give --kubeconfig FILE, or run in a pod with a ServiceAccount",
        )?,
        Some(path) => {
            let file = Kubeconfig::read_from(path)
                .with_context(|| format!("--kubeconfig {}", path.display()))?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                .await
                .with_context(|| format!("--kubeconfig {}", path.display()))?
        }
    };
    config.default_retry = false;
    Client::try_from(config).context("cannot set up the client of the API server")
}

/// Runs the extender until SIGTERM or SIGINT.
///
/// # Errors
/// If it cannot start: bad flags, no API server, an address in use.
pub async fn run(args: Args) -> Result<()> {
    telemetry::init(&args)?;
    let client = client(&args).await?;
    let listen = |address, flag: &'static str| async move {
        TcpListener::bind(address)
            .await
            .with_context(|| format!("{flag} {address}"))
    };
    let verbs = listen(args.listen, "--listen").await?;
    let health = listen(args.health_listen, "--health-listen").await?;
    serve(args, client, verbs, health, stop_signal()).await
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
    let app = App::new(args, client)?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"), identity = %app.identity,
        listen = ?verbs.local_addr(), health = ?health.local_addr(),
        resource = %app.args.resource_name, policy = %app.args.policy,
        "starting"
    );
    watch::spawn(&app);
    tokio::spawn(wake::run(app.clone()));
    let health = axum::serve(health, routes::health(app.clone())).into_future();
    let health = tokio::spawn(health);
    let draining = app.clone();
    axum::serve(verbs, routes::scheduler(app.clone()))
        .with_graceful_shutdown(async move {
            stop.await;
            tracing::info!(binds = draining.binds.count(), "shutting down");
            draining.draining.store(true, Ordering::Release);
        })
        .await
        .context("serving kube-scheduler failed")?;
    drain(&app).await;
    health.abort();
    Ok(())
}

async fn stop_signal() {
    let terminated = async {
        match signal(SignalKind::terminate()) {
            Ok(mut signal) => drop(signal.recv().await),
            Err(error) => {
                tracing::error!(%error, "cannot listen for SIGTERM");
                std::future::pending::<()>().await;
            }
        }
    };
    tokio::select! {
        () = terminated => {}
        _ = tokio::signal::ctrl_c() => {}
    }
}

/// Sees binds through, then leaves the epoch.
async fn drain(app: &App) {
    let done = async {
        while app.binds.count() > 0 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    if timeout(DRAIN, done).await.is_err() {
        tracing::warn!(
            binds = app.binds.count(),
            "binds without outcome; the successor will fence"
        );
        return;
    }
    match timeout(Duration::from_secs(5), app.epoch.leave()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%error, "cannot mark the epoch as left"),
        Err(_) => tracing::warn!("cannot mark the epoch as left: no answer from the API server"),
    }
}
