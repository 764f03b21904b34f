//! How gpustow's programs reach the API server, stop, and serve what people and Prometheus read: in
//! which form, over plain TCP or TLS, and to whom. It knows none of gpustow's objects.

mod daemon;
mod door;
mod exposition;
mod server;
mod tls;

use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;
use kube::Client;

pub use daemon::{ClientError, DaemonArgs, LogError, Seconds, WATCH_SECONDS, seconds, stop_signal};
pub use door::Door;
pub use exposition::{BUCKETS, Scrape, about, exposition};
pub use server::{Bounds, serve, serve_until};
pub use tls::{Tls, TlsError};

/// What an operator may set about health and metrics.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Metrics and health")]
pub struct MetricsArgs {
    /// Certificates (PEM) with which health and metrics are served over TLS; read anew when they
    /// change
    #[arg(
        long,
        env = "GPUSTOW_METRICS_TLS_CERT",
        value_name = "FILE",
        requires = "metrics_tls_key"
    )]
    pub metrics_tls_cert: Option<PathBuf>,

    /// Key (PEM) of that certificate
    #[arg(
        long,
        env = "GPUSTOW_METRICS_TLS_KEY",
        value_name = "FILE",
        requires = "metrics_tls_cert"
    )]
    pub metrics_tls_key: Option<PathBuf>,

    /// Show /metrics only to bearers of a token whose user may get /metrics by RBAC; health stays
    /// open. Needs TLS, and the right to create token reviews and subject access reviews
    #[arg(long, env = "GPUSTOW_METRICS_AUTH", requires = "metrics_tls_cert")]
    pub metrics_auth: bool,
}

impl MetricsArgs {
    /// The certificate, if health and metrics are to be served over TLS.
    ///
    /// # Errors
    /// If it or its key cannot be used.
    pub fn tls(&self) -> Result<Option<Tls>, TlsError> {
        let files = self
            .metrics_tls_cert
            .clone()
            .zip(self.metrics_tls_key.clone());
        files
            .map(|(cert, key)| Tls::load(cert, key, None))
            .transpose()
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
