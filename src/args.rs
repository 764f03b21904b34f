//! What an operator may set. Every flag can be set by its environment variable too.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Parser;
use gpustow_api::manifests::extended_resource;
use gpustow_api::names;
use gpustow_serve::{DaemonArgs, MetricsArgs, Tls, TlsError, seconds};

use crate::metrics::Size;
use crate::webhook::WebhookArgs;

/// kube-scheduler extender that packs pods onto physical GPUs by memory.
#[derive(Clone, Debug, Parser)]
#[command(name = "gpustow", version)]
pub struct Args {
    /// Address for kube-scheduler. Without --client-ca anybody who reaches it is served: keep it on
    /// loopback, beside the scheduler
    #[arg(
        help_heading = "Serving kube-scheduler",
        long,
        env = "GPUSTOW_LISTEN",
        default_value = "127.0.0.1:32766"
    )]
    pub listen: SocketAddr,

    /// Certificates (PEM) with which kube-scheduler is served over TLS, to clients with a certificate
    /// alone; read anew when they change
    #[arg(
        help_heading = "Serving kube-scheduler",
        long,
        env = "GPUSTOW_TLS_CERT",
        value_name = "FILE",
        requires_all = ["tls_key", "client_ca"]
    )]
    pub tls_cert: Option<PathBuf>,

    /// Key (PEM) of that certificate
    #[arg(
        help_heading = "Serving kube-scheduler",
        long,
        env = "GPUSTOW_TLS_KEY",
        value_name = "FILE",
        requires = "tls_cert"
    )]
    pub tls_key: Option<PathBuf>,

    /// Authorities (PEM) whose certificates let a client call; use one that signs for kube-scheduler
    /// alone
    #[arg(
        help_heading = "Serving kube-scheduler",
        long,
        env = "GPUSTOW_CLIENT_CA",
        value_name = "FILE",
        requires = "tls_cert"
    )]
    pub client_ca: Option<PathBuf>,

    /// Address for /healthz, /readyz, /metrics and /version
    #[arg(
        help_heading = "Metrics and health",
        long,
        env = "GPUSTOW_HEALTH_LISTEN",
        default_value = "0.0.0.0:32767"
    )]
    pub health_listen: SocketAddr,

    /// Extended resource that pods ask for, in MiB
    #[arg(help_heading = "Packing", long, env = "GPUSTOW_RESOURCE_NAME", default_value = names::GPU_MEM, value_parser = extended_resource)]
    pub resource_name: String,

    /// What extender and agent are told alike.
    #[command(flatten)]
    pub daemon: DaemonArgs,

    /// Namespace of the Lease that says which extender decides; another than the default must also be
    /// named in the admission policy gpustow-extender and in a Role
    #[arg(
        help_heading = "Leadership",
        long,
        env = "GPUSTOW_LEASE_NAMESPACE",
        default_value = "gpustow-system"
    )]
    pub lease_namespace: String,

    /// Name of that Lease
    #[arg(help_heading = "Leadership", long, env = "GPUSTOW_LEASE_NAME", default_value = names::EXTENDER)]
    pub lease_name: String,

    /// Name of this replica in the Lease, unique among replicas; by default that of the host
    #[arg(help_heading = "Leadership", long, env = "GPUSTOW_IDENTITY")]
    pub identity: Option<String>,

    /// Seconds within which a bind is answered; keep it below kube-scheduler's httpTimeout
    #[arg(help_heading = "Binds", long, env = "GPUSTOW_BIND_TIMEOUT", default_value = "8", value_parser = seconds)]
    pub bind_timeout: Duration,

    /// Maximum number of waiting pods to wake per second
    #[arg(help_heading = "Binds", long, env = "GPUSTOW_WAKE_RATE", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub wake_rate: u32,

    /// Seconds for which a replica that another has relieved does not take over again
    #[arg(help_heading = "Leadership", long, env = "GPUSTOW_RETAKE_AFTER", default_value = "60", value_parser = seconds)]
    pub retake_after: Duration,

    /// Remove gpustow's scheduling gate from every pod, and exit: run this before you uninstall gpustow
    #[arg(help_heading = "Queue", long)]
    pub ungate_all: bool,

    /// Export one series per GPU and pod share as well; the agents do that by default
    #[arg(
        help_heading = "Metrics and health",
        long,
        env = "GPUSTOW_METRICS_PER_GPU"
    )]
    pub metrics_per_gpu: bool,

    /// Sizes of the pods that gpustow_placeable_pods counts, each on one GPU
    #[arg(help_heading = "Metrics and health", long, env = "GPUSTOW_METRICS_SIZES", value_delimiter = ',', default_value = "4Gi,8Gi,16Gi,32Gi", value_parser = Size::from_str)]
    pub metrics_sizes: Vec<Size>,

    /// How health and metrics are served.
    #[command(flatten)]
    pub serving: MetricsArgs,

    /// How pods are changed where the API server cannot do it.
    #[command(flatten)]
    pub webhook: WebhookArgs,
}

impl Args {
    /// Checks what the flags say together.
    ///
    /// # Errors
    /// With the flags that contradict each other.
    pub fn check(&self) -> Result<()> {
        ensure!(
            self.listen != self.health_listen,
            "--listen and --health-listen are the same"
        );
        Ok(())
    }

    /// The certificate with which kube-scheduler is served, if any.
    ///
    /// # Errors
    /// If it, its key or the authorities cannot be used.
    pub fn tls(&self) -> Result<Option<Tls>, TlsError> {
        let files = self.tls_cert.clone().zip(self.tls_key.clone());
        files
            .map(|(cert, key)| Tls::load(cert, key, self.client_ca.clone()))
            .transpose()
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn every_flag_is_below_a_heading() {
        for arg in Args::command().get_arguments() {
            assert!(arg.get_help_heading().is_some(), "{arg}");
        }
    }
}
