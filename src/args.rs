//! What an operator may set. Every flag can be set by its environment variable too.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Parser;
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use gpustow_api::act::Act;
use gpustow_api::manifests::extended_resource;
use gpustow_api::names;
use gpustow_ledger::Config;
use gpustow_pack::PolicyKind;
use gpustow_serve::{DaemonArgs, MetricsArgs, Seconds, Tls, TlsError, seconds};
use strum::VariantNames as _;

use crate::line::LineMode;
use crate::metrics::Size;
use crate::webhook::WebhookArgs;

/// kube-scheduler extender that packs pods onto physical GPUs by memory.
#[derive(Clone, Debug, Parser)]
#[command(name = "gpustow", version)]
pub struct Args {
    /// Address for kube-scheduler. Without --client-ca anybody who reaches it is served: keep it on
    /// loopback, beside the scheduler
    #[arg(long, env = "GPUSTOW_LISTEN", default_value = "127.0.0.1:32766")]
    pub listen: SocketAddr,

    /// Certificates (PEM) with which kube-scheduler is served over TLS, to clients with a certificate
    /// alone; read anew when they change
    #[arg(
        long,
        env = "GPUSTOW_TLS_CERT",
        value_name = "FILE",
        requires_all = ["tls_key", "client_ca"]
    )]
    pub tls_cert: Option<PathBuf>,

    /// Key (PEM) of that certificate
    #[arg(
        long,
        env = "GPUSTOW_TLS_KEY",
        value_name = "FILE",
        requires = "tls_cert"
    )]
    pub tls_key: Option<PathBuf>,

    /// Authorities (PEM) whose certificates let a client call; use one that signs for kube-scheduler
    /// alone
    #[arg(
        long,
        env = "GPUSTOW_CLIENT_CA",
        value_name = "FILE",
        requires = "tls_cert"
    )]
    pub client_ca: Option<PathBuf>,

    /// Address for /healthz, /readyz, /metrics and /version
    #[arg(long, env = "GPUSTOW_HEALTH_LISTEN", default_value = "0.0.0.0:32767")]
    pub health_listen: SocketAddr,

    /// Extended resource that pods ask for, in MiB
    #[arg(long, env = "GPUSTOW_RESOURCE_NAME", default_value = names::GPU_MEM, value_parser = extended_resource)]
    pub resource_name: String,

    /// What extender and agent are told alike.
    #[command(flatten)]
    pub daemon: DaemonArgs,

    /// Packing policy for pods that name none: tight, binpack, spread or first-fit
    #[arg(long, env = "GPUSTOW_POLICY", default_value_t, value_parser = PolicyKind::from_str)]
    pub policy: PolicyKind,

    /// Namespace of the Lease that says which extender decides; another than the default must also be
    /// named in the admission policy gpustow-extender and in a Role
    #[arg(
        long,
        env = "GPUSTOW_LEASE_NAMESPACE",
        default_value = "gpustow-system"
    )]
    pub lease_namespace: String,

    /// Name of that Lease
    #[arg(long, env = "GPUSTOW_LEASE_NAME", default_value = names::EXTENDER)]
    pub lease_name: String,

    /// Name of this replica in the Lease, unique among replicas; by default that of the host
    #[arg(long, env = "GPUSTOW_IDENTITY")]
    pub identity: Option<String>,

    /// Seconds within which a bind is answered; keep it below kube-scheduler's httpTimeout
    #[arg(long, env = "GPUSTOW_BIND_TIMEOUT", default_value = "8", value_parser = seconds)]
    pub bind_timeout: Duration,

    /// Seconds that a reservation waits for its bind
    #[arg(long, env = "GPUSTOW_RESERVATION_TTL", default_value_t = Seconds(Config::default().reservation_ttl))]
    pub reservation_ttl: Seconds,

    /// The same for pods with volumes or resource claims; keep it above kube-scheduler's
    /// bindTimeoutSeconds
    #[arg(long, env = "GPUSTOW_SLOW_RESERVATION_TTL", default_value_t = Seconds(Config::default().slow_reservation_ttl))]
    pub slow_reservation_ttl: Seconds,

    /// Seconds after which a GpuNode that does not change is stale: three heartbeats of the agent
    #[arg(long, env = "GPUSTOW_STALE_AFTER", default_value_t = Seconds(Config::default().stale_after))]
    pub stale_after: Seconds,

    /// Maximum number of waiting pods to wake per second
    #[arg(long, env = "GPUSTOW_WAKE_RATE", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub wake_rate: u32,

    /// Seconds for which a replica that another has relieved does not take over again
    #[arg(long, env = "GPUSTOW_RETAKE_AFTER", default_value = "60", value_parser = seconds)]
    pub retake_after: Duration,

    /// Keep new pods that ask for GPU memory in line with a scheduling gate: off, auto (while others wait) or always;
    /// needs the component `line`
    #[arg(long, env = "GPUSTOW_LINE", value_enum, default_value_t)]
    pub line: LineMode,

    /// Let so many of the first in line through without room, so that an autoscaler sees them: it sees no gated pod
    #[arg(long, env = "GPUSTOW_LINE_SHOW", default_value_t = Config::default().line_show)]
    pub line_show: usize,

    /// Keep a place for a pod that has waited for so many seconds since it was created: what comes free there goes to
    /// nobody of equal or lower priority; or off
    #[arg(long, env = "GPUSTOW_KEEP", value_name = "SECONDS", default_value = "off", value_parser = Keep::from_str)]
    pub keep: Keep,

    /// Seconds for which a place is waited for where no pod ends, before other GPUs are tried
    #[arg(long, env = "GPUSTOW_KEEP_FOR", default_value_t = Seconds(Config::default().keep_for))]
    pub keep_for: Seconds,

    /// Places that are kept at a time, at most
    #[arg(long, env = "GPUSTOW_KEEP_PLACES", default_value_t = Config::default().keep_places)]
    pub keep_places: usize,

    /// Of how many of the cluster's GPUs, in percent; a single place may be more
    #[arg(long, env = "GPUSTOW_KEEP_PERCENT", default_value_t = Config::default().keep_percent)]
    pub keep_percent: usize,

    /// Mark the nodes on which places are kept, so that autoscalers let them be; needs the component `keep`
    #[arg(long, env = "GPUSTOW_KEEP_MARKS", requires = "keep")]
    pub keep_marks: bool,

    /// Call memory back that pods use beyond their requests where it keeps a pod off whose request fits
    #[arg(long, env = "GPUSTOW_CALL_BACK")]
    pub call_back: bool,

    /// What is done to have a pod give memory back, unless its owner softens it: event, kill-process (its
    /// agent must let that) or evict (a right of its own)
    #[arg(long, env = "GPUSTOW_ACT", default_value_t, value_parser = PossibleValuesParser::new(Act::VARIANTS).try_map(|word| Act::from_str(&word)))]
    pub act: Act,

    /// Do to every pod what --act says: the annotation gpustow.dev/act of a pod does not soften it
    #[arg(long, env = "GPUSTOW_IGNORE_POD_ACT", requires = "call_back")]
    pub ignore_pod_act: bool,

    /// Seconds for which memory that is called back is waited for, beyond the time that its users have to
    /// end, before another GPU is tried
    #[arg(long, env = "GPUSTOW_CALL_BACK_FOR", default_value_t = Seconds(Config::default().call_back_for))]
    pub call_back_for: Seconds,

    /// With --call-back: seconds for which a pod may use more than its limit before it is to give memory back
    #[arg(long, env = "GPUSTOW_OVER_LIMIT_FOR", default_value_t = Seconds(Config::default().over_limit_for))]
    pub over_limit_for: Seconds,

    /// Pods that are asked to give memory back, or preempted by --preempt-scattered, at most, in a minute
    #[arg(long, env = "GPUSTOW_ACTS_PER_MINUTE", default_value_t = 30)]
    pub acts_per_minute: u32,

    /// The same on one node
    #[arg(long, env = "GPUSTOW_ACTS_PER_NODE", default_value_t = 6)]
    pub acts_per_node: u32,

    /// Preempt pods of lower priority for a pod that free memory is too scattered for; needs the component
    /// `preempt-scattered`
    #[arg(long, env = "GPUSTOW_PREEMPT_SCATTERED")]
    pub preempt_scattered: bool,

    /// Move so many pods an hour at most, of those whose owners let them be moved, for pods that wait for memory which
    /// is free in pieces; 0: none. Needs the component `move`
    #[arg(
        long = "move",
        env = "GPUSTOW_MOVE",
        value_name = "PER_HOUR",
        default_value_t = 0
    )]
    pub moves: u32,

    /// Take the scheduling gate of gpustow's line off every pod, and end: before gpustow is uninstalled
    #[arg(long)]
    pub lift_all: bool,

    /// Export one series per GPU and pod share as well; the agents do that by default
    #[arg(long, env = "GPUSTOW_METRICS_PER_GPU")]
    pub metrics_per_gpu: bool,

    /// Sizes of the pods that gpustow_placeable_pods counts, each on one GPU
    #[arg(long, env = "GPUSTOW_METRICS_SIZES", value_delimiter = ',', default_value = "4Gi,8Gi,16Gi,32Gi", value_parser = Size::from_str)]
    pub metrics_sizes: Vec<Size>,

    /// How health and metrics are served.
    #[command(flatten)]
    pub serving: MetricsArgs,

    /// How pods are changed where the API server cannot do it.
    #[command(flatten)]
    pub webhook: WebhookArgs,
}

/// After how long a place is kept for a pod that waits, if at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keep(pub Option<Duration>);

impl FromStr for Keep {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self(None)),
            _ => match seconds(text) {
                Ok(after) => Ok(Self(Some(after))),
                Err(error) => Err(format!("{error}; or write off")),
            },
        }
    }
}

impl Args {
    /// Checks what the flags say together.
    ///
    /// # Errors
    /// With the flags that contradict each other.
    pub fn check(&self) -> Result<()> {
        ensure!(
            self.reservation_ttl.0 > self.bind_timeout,
            "--reservation-ttl must be more than --bind-timeout: a bind would outlive what it reserved"
        );
        ensure!(
            self.slow_reservation_ttl >= self.reservation_ttl,
            "--slow-reservation-ttl must be at least --reservation-ttl"
        );
        ensure!(
            self.call_back || self.act == Act::Event,
            "--act does nothing without --call-back"
        );
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

    /// The ledger's part of the settings.
    #[must_use]
    pub fn ledger(&self) -> Config {
        Config {
            policy: self.policy,
            stale_after: self.stale_after.0,
            reservation_ttl: self.reservation_ttl.0,
            slow_reservation_ttl: self.slow_reservation_ttl.0,
            line: self.line != LineMode::Off,
            line_show: self.line_show,
            keep: self.keep.0,
            keep_for: self.keep_for.0,
            keep_places: self.keep_places,
            keep_percent: self.keep_percent,
            call_back: self.call_back,
            action: self.act,
            owners_soften: !self.ignore_pod_act,
            preempt_scattered: self.preempt_scattered,
            moves: self.moves > 0,
            call_back_for: self.call_back_for.0,
            over_limit_for: self.over_limit_for.0,
            ..Config::default()
        }
    }
}
