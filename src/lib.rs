//! The gpustow extender: everything that scheduling does to the outside world. The decisions are
//! made in `gpustow-ledger` and `gpustow-pack`.

mod admission;
mod app;
mod args;
mod ask;
mod bind;
mod call;
#[cfg(feature = "tls")]
mod certificate;
#[cfg(not(feature = "tls"))]
#[path = "no_certificate.rs"]
mod certificate;
mod claims;
mod config;
mod decode;
mod disruptions;
mod epoch;
mod events;
mod failure;
mod history;
mod leading;
mod locked;
mod metrics;
mod panics;
mod pod_groups;
mod preempt;
mod provision;
mod queue;
mod routes;
mod silence;
mod turns;
mod ungate_all;
mod wake;
mod warm;
mod watch;
mod webhook;
pub mod wire;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use axum::Router;
use gpustow_policies::admission::Expected;
use gpustow_serve::Bounds;
use kube::Client;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};

use app::App;
pub use args::{Args, LeaseName};
pub use metrics::every_series;
use wake::Waker;
pub use webhook::WebhookArgs;

/// For binds under way at a shutdown, unknown outcomes included.
const DRAIN: Duration = Duration::from_secs(20);
/// Between two attempts to resume.
const RETRY: Duration = Duration::from_secs(2);

/// A replica that kube-scheduler does not call leads after so long without a leader. kube-scheduler's own replicas have
/// elected their leader by then, and it has called its extender if there was anything to ask.
const LEADERLESS: Duration = Duration::from_secs(30);

/// For kube-scheduler, whose connections wait for 90 s before they are closed.
const VERBS: Bounds = Bounds {
    connections: 1024,
    patience: Duration::from_secs(120),
    buffer: 256 << 10,
    farewell: Duration::ZERO,
};

/// Runs the extender until SIGTERM or SIGINT.
///
/// # Errors
/// If it cannot start: bad flags, no API server, an address in use.
pub async fn run(args: Args) -> Result<()> {
    args.check()?;
    args.daemon.start_log()?;
    let client = args.daemon.client().await?;
    if args.ungate_all {
        return ungate_all::run(client).await;
    }
    if args.unfence_all {
        return claims::unfence_all(client).await;
    }
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
/// If a listener fails, or a part of the extender panics.
pub async fn serve(
    args: Args,
    client: Client,
    verbs: TcpListener,
    health: TcpListener,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<()> {
    let (tls, verbs_tls) = (args.serving.tls()?, args.tls()?);
    let extender = Extender::new(args, client)?;
    let app = extender.app.clone();
    let webhook = webhook::start(&app, app.webhook.clone()).await?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"), identity = %app.identity,
        listen = ?verbs.local_addr(), health = ?health.local_addr(),
        resource = %app.args.resource_name,
        "starting"
    );
    extender.start();
    let health = gpustow_serve::serve(health, tls, extender.health());
    let health = tokio::spawn(health);
    let (stopping, stopped) = oneshot::channel();
    let draining = app.clone();
    let stop = async move {
        stop.await;
        tracing::info!(binds = draining.binds.count(), "shutting down");
        draining.drain();
        // The receiver lives until verbs ends.
        let _ = stopping.send(());
    };
    let verbs = gpustow_serve::serve_until(verbs, verbs_tls, VERBS, extender.scheduler(), stop);
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
        // Its successor fences the binds that are under way.
        part = app.panics.noted() => bail!("{part} panicked"),
    }
    drain(&app).await;
    if timeout(DRAIN, webhook).await.is_err() {
        tracing::warn!("an API server holds a call open");
    }
    health.abort();
    Ok(())
}

/// An extender without its doors: the caller that has them calls [`Extender::scheduler`].
pub struct Extender {
    app: Arc<App>,
}

impl Extender {
    /// An extender that does not send anything yet.
    ///
    /// # Errors
    /// If its metrics cannot be set up.
    pub fn new(args: Args, client: Client) -> Result<Self> {
        let app = App::new(args, client)?;
        Ok(Self { app })
    }

    /// Starts the tasks that run in parallel with kube-scheduler's calls, for as long as the runtime does.
    pub fn start(&self) {
        let app = self.app.clone();
        let App {
            args,
            client,
            ledger,
            lists,
            policies,
            ..
        } = &*app;
        let resource = &args.resource_name;
        let spawn = &app.panics;
        watch::spawn(&app);
        let (groups, known) = (client.clone(), ledger.clone());
        spawn.spawn("pod groups", pod_groups::follow(groups, known));
        spawn.spawn("config", config::follow(app.clone()));
        spawn.spawn("warm", warm::run(app.clone()));
        let mut expected = Expected::new(resource);
        if args.webhook.is_self_signed() {
            expected = expected.and(Expected::of_certificate(resource));
        }
        let (policies, listed) = (policies.clone(), lists.clone());
        spawn.spawn(
            "policies",
            admission::run(client.clone(), expected, policies, listed),
        );
        spawn.spawn("version", preempt::asked::run(app.clone()));
        spawn.spawn("silence", silence::run(app.clone()));
        spawn.spawn("wake", Waker::run(app.clone()));
        spawn.spawn("queue", queue::run(app.clone()));
        spawn.spawn("standby", queue::stand_by(app.clone()));
        spawn.spawn("confirm", bind::confirm(app.clone()));
        spawn.spawn("resume", resume(app.clone()));
        spawn.spawn("marks", disruptions::marks::run(app.clone()));
        spawn.spawn("disruptions", disruptions::run(app.clone()));
        spawn.spawn("provision", provision::run(app.clone()));
        spawn.spawn("claims", claims::run(app.clone()));
        spawn.spawn("history", history::run(app.clone()));
        spawn.spawn("status", config::status::run(app.clone()));
    }

    /// kube-scheduler's four verbs.
    pub fn scheduler(&self) -> Router {
        routes::scheduler(self.app.clone())
    }

    /// Health, metrics and version.
    pub fn health(&self) -> Router {
        routes::health(self.app.clone())
    }
}

/// A replica that was restarted takes its place again at once: pods may wait for room, and as long
/// as kube-scheduler has nothing to ask, no replica would wake them.
async fn resume(app: Arc<App>) {
    app.lists.all_in().await;
    loop {
        let resumed = match app.epoch.is_inherited().await {
            Ok(false) => break,
            Ok(true) => app.epoch().await.map(drop),
            Err(error) => Err(error.into()),
        };
        match resumed {
            Ok(()) => break,
            Err(error) => tracing::warn!(
                %error, lease = %app.args.lease,
                "cannot take the epoch of an earlier life"
            ),
        }
        sleep(RETRY).await;
    }
    lead_if_none_does(app).await;
}

/// Becomes the leader if there is none and pods wait. Where the nodes' sums refuse every pod, kube-scheduler asks about
/// none of them, and no call would make this replica the leader.
async fn lead_if_none_does(app: Arc<App>) {
    let mut since: Option<Instant> = None;
    loop {
        sleep(RETRY).await;
        let pods_wait = || {
            let ledger = app.ledger.lock();
            ledger.waiting() > 0 || ledger.queued().pods > 0
        };
        let may_lead = app.epoch.held().is_none() && !app.is_draining();
        let may_lead = may_lead && app.lists.missing().is_empty() && pods_wait();
        if !may_lead || !app.epoch.is_free().await.unwrap_or(false) {
            since = None;
        } else if since.get_or_insert_with(Instant::now).elapsed() >= LEADERLESS {
            since = None;
            tracing::info!("pods wait and no extender leads: taking over");
            if let Err(error) = app.epoch().await {
                tracing::warn!(%error, "cannot take over");
            }
        }
    }
}

/// Sees binds through, then leaves the epoch.
async fn drain(app: &App) {
    let done = async {
        binds_done(app).await;
        // A call that came since may have read the epoch.
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
    let unfenced = app.ledger.lock().unfenced();
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
