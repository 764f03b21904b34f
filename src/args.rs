//! The settings of one process. The administrator's settings for the whole cluster are in the GpustowConfig.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Parser;
use gpustow_api::names;
use gpustow_api::request::extended_resource;
use gpustow_serve::{DaemonArgs, MetricsArgs, Tls, TlsError, seconds};

use crate::webhook::WebhookArgs;

/// kube-scheduler extender that packs pods onto physical GPUs by memory. Every flag but --ungate-all and --unfence-all has an
/// environment variable. The GpustowConfig named gpustow has the settings of the whole cluster
#[derive(Clone, Debug, Parser)]
#[command(name = "gpustow", version)]
pub struct Args {
    /// Serve kube-scheduler at this address. Without --tls every client that reaches it is served: keep it on loopback
    #[arg(
        help_heading = "Serving kube-scheduler",
        long,
        env = "GPUSTOW_LISTEN",
        default_value = "127.0.0.1:32766"
    )]
    pub listen: SocketAddr,

    /// Serve kube-scheduler over TLS with tls.crt and tls.key of this folder, and only clients whose certificate an
    /// authority in its ca.crt signed. The files are read again when they change
    #[arg(
        help_heading = "Serving kube-scheduler",
        long,
        env = "GPUSTOW_TLS",
        value_name = "FOLDER"
    )]
    pub tls: Option<PathBuf>,

    /// Read this extended resource of pods, in MiB
    #[arg(help_heading = "Serving kube-scheduler", long, env = "GPUSTOW_RESOURCE_NAME", default_value = names::GPU_MEM, value_parser = extended_resource)]
    pub resource_name: String,

    /// Serve /healthz, /readyz, /metrics and /version at this address
    #[arg(
        help_heading = "Metrics and health",
        long,
        env = "GPUSTOW_HEALTH_LISTEN",
        default_value = "0.0.0.0:32767"
    )]
    pub health_listen: SocketAddr,

    /// Export one series per GPU and pod share as well. The agents do that by default
    #[arg(
        help_heading = "Metrics and health",
        long,
        env = "GPUSTOW_METRICS_PER_GPU"
    )]
    pub metrics_per_gpu: bool,

    /// How health and metrics are served.
    #[command(flatten)]
    pub serving: MetricsArgs,

    /// The flags that extender and agent share.
    #[command(flatten)]
    pub daemon: DaemonArgs,

    /// Elect the leader with this Lease. If you change it, name it in the admission policy gpustow-extender and in a
    /// Role too
    #[arg(
        help_heading = "Leadership",
        long,
        env = "GPUSTOW_LEASE",
        value_name = "NAMESPACE/NAME",
        default_value_t = LeaseName::default()
    )]
    pub lease: LeaseName,

    /// Name this replica in the Lease, unique among replicas. The default is the host's name
    #[arg(help_heading = "Leadership", long, env = "GPUSTOW_IDENTITY")]
    pub identity: Option<String>,

    /// Wait this many seconds before this replica leads again after another took over from it
    #[arg(help_heading = "Leadership", long, env = "GPUSTOW_RETAKE_AFTER", value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub retake_after: Duration,

    /// How pods are changed where the API server cannot do it.
    #[command(flatten)]
    pub webhook: WebhookArgs,

    /// Remove gpustow's scheduling gate from every pod, and exit: run this before you uninstall gpustow
    #[arg(help_heading = "Uninstalling", long)]
    pub ungate_all: bool,

    /// Remove every DeviceTaintRule of gpustow, and exit: run this before you uninstall gpustow
    #[arg(help_heading = "Uninstalling", long)]
    pub unfence_all: bool,
}

/// Namespace and name of a Lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseName {
    /// The namespace.
    pub namespace: String,
    /// The name in it.
    pub name: String,
}

impl Default for LeaseName {
    fn default() -> Self {
        Self {
            namespace: names::NAMESPACE.to_owned(),
            name: names::EXTENDER.to_owned(),
        }
    }
}

impl std::fmt::Display for LeaseName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl FromStr for LeaseName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = text.split_once('/');
        let parts = parts.filter(|(namespace, name)| !namespace.is_empty() && !name.is_empty());
        let (namespace, name) = parts.ok_or("write a namespace, a slash and a name")?;
        Ok(Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        })
    }
}

impl Args {
    /// Checks the flags against each other.
    ///
    /// # Errors
    /// With the flags that contradict each other.
    pub fn check(&self) -> Result<()> {
        ensure!(
            self.listen != self.health_listen,
            "--listen and --health-listen are equal"
        );
        Ok(())
    }

    /// The certificate with which kube-scheduler is served, if any.
    ///
    /// # Errors
    /// If it, its key or the authorities cannot be used.
    pub fn tls(&self) -> Result<Option<Tls>, TlsError> {
        self.tls.as_deref().map(Tls::for_clients).transpose()
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn flags_are_few_and_below_headings() {
        let command = Args::command();
        for arg in command.get_arguments() {
            assert!(arg.get_help_heading().is_some(), "{arg}");
        }
        let count = command.get_arguments().count();
        assert!(count <= 17, "{count} flags");
    }
}
