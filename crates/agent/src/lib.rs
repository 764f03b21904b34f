//! The node agent: it reads the cards of one node and reports to the cluster which pod uses which memory. The modules
//! [`state`], [`shares`], [`health`], [`capacity`] and [`notices`] decide, without I/O. The agent does not decide where
//! pods go.

mod agent;
pub mod args;
pub mod capacity;
pub mod cgroup;
pub mod claims;
pub mod clock;
pub mod cluster;
pub mod devices;
pub mod giveback;
pub mod health;
pub mod history;
pub mod instances;
pub mod kill;
mod limited;
pub mod limits;
pub mod metrics;
pub mod mps;
pub mod notices;
pub mod once;
pub mod over;
pub mod podresources;
pub mod pods;
pub mod processes;
pub mod sampler;
mod sharers;
pub mod shares;
pub mod state;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use kube::Client;
use tokio::net::TcpListener;

use agent::{Agent, Shared};
pub use args::Args;
use cluster::Cluster;
use devices::{NvmlDevices, Wanted};
use gpustow_serve::{exposition, stop_signal};
use metrics::Metrics;
use sampler::Sampler;

/// Runs the agent until SIGTERM or SIGINT, or looks once.
///
/// # Errors
/// If it cannot start: bad flags, no API server, an address in use; or if --once sees nothing.
pub async fn run(args: Args) -> Result<()> {
    if args.once {
        println!("{}", once::once(&args)?.trim_end());
        return Ok(());
    }
    args.daemon.start_log()?;
    let client = args.daemon.client().await?;
    let health = TcpListener::bind(args.listen)
        .await
        .with_context(|| format!("--listen {}", args.listen))?;
    serve(args, client, health, stop_signal()).await
}

/// Does the agent's work and serves health and metrics on `health`, until `stop`. The addresses in
/// `args` are not used.
///
/// # Errors
/// If `args` name no node, or the system gives no thread.
pub async fn serve(
    args: Args,
    client: Client,
    health: TcpListener,
    stop: impl Future<Output = ()>,
) -> Result<()> {
    let node = args.node_name.clone().context("--node-name is missing")?;
    anyhow::ensure!(
        !args.kill_processes || args.proc == Path::new("/proc"),
        "--kill-processes needs the host's process ids as its own: run the agent with hostPID and without --proc"
    );
    if let Some(directory) = &args.mps_shm {
        mps::share(directory).with_context(|| format!("--mps-shm {}", directory.display()))?;
    }
    let work = Work::new(args, client, &node)?;
    let Work { args, client, .. } = &work;
    tracing::info!(version = env!("CARGO_PKG_VERSION"), node, "starting");
    let devices = NvmlDevices::new(args.nvml_path.clone(), args.refresh, work.wanted.clone());
    let sampler =
        Sampler::start(Box::new(devices), args.period).context("cannot start the sampler")?;
    let tls = args.serving.tls()?;
    let routes = routes(work.shared.clone(), args, client);
    let health = gpustow_serve::serve(health, tls, routes);
    tokio::select! {
        () = stop => tracing::info!("shutting down"),
        () = work.run(&sampler) => {}
        () = health => {}
    }
    sampler.stop();
    Ok(())
}

/// The work of an agent, except for reading the cards and serving its health.
pub struct Work {
    args: Args,
    client: Client,
    node: String,
    shared: Arc<Shared>,
    wanted: Arc<Wanted>,
}

impl Work {
    /// For this node.
    ///
    /// # Errors
    /// If the metrics cannot be set up.
    pub fn new(args: Args, client: Client, node: &str) -> Result<Self> {
        let metrics = Metrics::new(node).context("cannot set up the metrics")?;
        let ready = AtomicBool::new(false);
        Ok(Self {
            wanted: Arc::new(Wanted::below(args.cgroup.clone()).making(args.makes())),
            args,
            client,
            node: node.to_owned(),
            shared: Arc::new(Shared { metrics, ready }),
        })
    }

    /// Reports these samples to the cluster, without end.
    pub async fn run(self, sampler: &Sampler) {
        let cluster = Cluster::new(self.client, &self.node);
        let before = loop {
            match cluster.reported().await {
                Ok(before) => break before,
                Err(error) => {
                    tracing::warn!(%error, "cannot read this node's GpuNode; trying again")
                }
            }
            tokio::time::sleep(Duration::from_secs(2)).await;
        };
        let agent = Agent::new(
            self.args,
            cluster,
            self.shared,
            self.wanted,
            before.as_ref(),
        );
        agent.run(sampler, &self.node).await;
    }
}

fn routes(shared: Arc<Shared>, args: &Args, client: &Client) -> Router {
    let ready = shared.clone();
    let metrics = get(async move || exposition(shared.metrics.gather()));
    let metrics = Router::new().route("/metrics", metrics);
    Router::new()
        .route("/healthz", get(|| async { "ok" }))
        .route(
            "/readyz",
            get(|| async move {
                if ready.ready.load(Ordering::Acquire) {
                    (StatusCode::OK, "ok")
                } else {
                    (StatusCode::SERVICE_UNAVAILABLE, "nothing reported yet")
                }
            }),
        )
        .merge(args.serving.guarded(metrics, client))
}
