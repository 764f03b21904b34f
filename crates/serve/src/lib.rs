//! How gpustow's programs reach the API server, stop, and serve pages to people and Prometheus: in which form, over
//! plain TCP or TLS, and to which clients. The crate does not know gpustow's objects.

mod daemon;
mod door;
mod exposition;
pub mod rate;
mod server;
mod status;
#[cfg(feature = "tls")]
mod tls;
#[cfg(not(feature = "tls"))]
#[path = "no_tls.rs"]
mod tls;

use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;
use kube::Client;

pub use daemon::{ClientError, DaemonArgs, LogError, Seconds, WATCH_SECONDS, seconds, stop_signal};
pub use door::Door;
pub use exposition::{BUCKETS, Scrape, about, exposition, set_revision};
pub use server::{Bounds, serve, serve_until};
pub use status::status_patch;
pub use tls::{Tls, TlsError};

/// What an operator may set about health and metrics.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Metrics and health")]
pub struct MetricsArgs {
    /// Serve health and metrics over TLS with tls.crt and tls.key of this folder, read again when they change
    #[arg(long, env = "GPUSTOW_METRICS_TLS", value_name = "FOLDER")]
    pub metrics_tls: Option<PathBuf>,

    /// Show /metrics only to users who may get /metrics by RBAC, by their token. Health stays open. Needs TLS and the
    /// permission to create token reviews and subject access reviews
    #[arg(long, env = "GPUSTOW_METRICS_AUTH", requires = "metrics_tls")]
    pub metrics_auth: bool,
}

impl MetricsArgs {
    /// The certificate, if health and metrics are to be served over TLS.
    ///
    /// # Errors
    /// If it or its key cannot be used.
    pub fn tls(&self) -> Result<Option<Tls>, TlsError> {
        self.metrics_tls.as_deref().map(Tls::of).transpose()
    }

    /// `metrics`, behind a door if so set.
    pub fn guarded(&self, metrics: Router, client: &Client) -> Router {
        if self.metrics_auth {
            Arc::new(Door::new(client.clone(), "/metrics")).before(metrics)
        } else {
            metrics
        }
    }
}
