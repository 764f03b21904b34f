//! What an operator may set. Every flag can be set by its environment variable too.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::TypedValueParser as _;
use clap::{Parser, ValueEnum, value_parser};
use gpustow_api::gpunode::HEARTBEAT;
use gpustow_api::names;
use gpustow_api::request::extended_resource;
use gpustow_pack::Mib;
use gpustow_serve::{DaemonArgs, MetricsArgs, Seconds, seconds};

use crate::cgroup::is_the_hosts;
use crate::devices::Source;
use crate::limits::Means;
use crate::state::{MAX_CARD, Settings};

/// Tells gpustow what NVML shows of this node's GPUs.
#[derive(Clone, Debug, Parser)]
#[command(name = "gpustow-agent", version)]
pub struct Args {
    /// Name of this node
    #[arg(
        help_heading = "Node",
        long,
        env = "NODE_NAME",
        required_unless_present = "once"
    )]
    pub node_name: Option<String>,

    /// Where the cards are: nvml, or fake:FILE for cards that a file describes
    #[arg(help_heading = "GPUs and their driver", long, env = "GPUSTOW_DEVICES", default_value = "nvml", value_parser = Source::parse)]
    pub devices: Source,

    /// Directories in which libnvidia-ml.so.1 is looked for before the system's own
    #[arg(
        help_heading = "GPUs and their driver",
        long,
        env = "GPUSTOW_NVML_PATH",
        value_delimiter = ':',
        default_value = "/run/nvidia/driver/usr/lib64:/run/nvidia/driver/usr/lib/x86_64-linux-gnu:/run/nvidia/driver/usr/lib/aarch64-linux-gnu"
    )]
    pub nvml_path: Vec<PathBuf>,

    /// The host's /proc
    #[arg(
        help_heading = "Node",
        long,
        env = "GPUSTOW_PROC",
        default_value = "/proc"
    )]
    pub proc: PathBuf,

    /// The host's cgroup file system, by whose directories the driver names limits
    #[arg(
        help_heading = "Node",
        long,
        env = "GPUSTOW_CGROUP",
        default_value = "/sys/fs/cgroup"
    )]
    pub cgroup: PathBuf,

    /// This node's NVIDIA container toolkit is 1.20.1 or later and gives devices by CDI, so that it sets the
    /// limits of containers
    #[arg(help_heading = "Limits", long, env = "GPUSTOW_TOOLKIT_LIMITS")]
    pub toolkit_limits: bool,

    /// Set the limits of containers itself, where the toolkit does not, and have those of containers that run
    /// follow their pod's annotation; needs a privileged container, and --cgroup to be writable
    #[arg(help_heading = "Limits", long, env = "GPUSTOW_SET_LIMITS")]
    pub set_limits: bool,

    /// The kubelet's PodResources socket, which tells of pods that hold nvidia.com/gpu
    #[arg(
        help_heading = "Node",
        long,
        env = "GPUSTOW_POD_RESOURCES",
        default_value = "/var/lib/kubelet/pod-resources/kubelet.sock"
    )]
    pub pod_resources: PathBuf,

    /// Seconds between two looks at memory and processes
    #[arg(help_heading = "Reports", long, env = "GPUSTOW_PERIOD", default_value = "1", value_parser = seconds)]
    pub period: Duration,

    /// Seconds between two looks at what hardly changes
    #[arg(help_heading = "Reports", long, env = "GPUSTOW_REFRESH", default_value = "30", value_parser = seconds)]
    pub refresh: Duration,

    /// Seconds between two reports when nothing changes; the extender's --stale-after is three of
    /// these
    #[arg(help_heading = "Reports", long, env = "GPUSTOW_HEARTBEAT", default_value_t = Seconds(HEARTBEAT))]
    pub heartbeat: Seconds,

    /// MiB of foreign memory whose coming or going is reported at once
    #[arg(help_heading = "Reports", long, env = "GPUSTOW_THRESHOLD_MIB", default_value = "256", value_parser = value_parser!(u64).map(Mib))]
    pub threshold_mib: Mib,

    /// MiB per card that no pod may hold
    #[arg(help_heading = "GPUs and their driver", long, env = "GPUSTOW_HEADROOM_MIB", default_value = "0", value_parser = value_parser!(u64).range(0..=MAX_CARD.0).map(Mib))]
    pub headroom_mib: Mib,

    /// Size in MiB to assume for a GPU that shares the host's memory and reports none of its own
    #[arg(help_heading = "GPUs and their driver", long, env = "GPUSTOW_UNIFIED_MEMORY_MIB", value_parser = value_parser!(u64).range(1..=MAX_CARD.0).map(Mib))]
    pub unified_memory_mib: Option<Mib>,

    /// XIDs that are an application's fault and do not condemn a card
    #[arg(
        help_heading = "GPU health",
        long,
        env = "GPUSTOW_APPLICATION_XIDS",
        value_delimiter = ',',
        default_value = "13,31,43,45,68,109"
    )]
    pub application_xids: Vec<u64>,

    /// Seconds that a card which failed takes no pods
    #[arg(help_heading = "GPU health", long, env = "GPUSTOW_PROBATION", default_value = "600", value_parser = seconds)]
    pub probation: Duration,

    /// Seconds before the node's capacity shrinks when there is less
    #[arg(help_heading = "GPU health", long, env = "GPUSTOW_SHRINK_AFTER", default_value = "60", value_parser = seconds)]
    pub shrink_after: Duration,

    /// Report a container that has had no process on its GPU for this many seconds
    #[arg(help_heading = "Reports", long, env = "GPUSTOW_SILENT_AFTER", default_value = "60", value_parser = seconds)]
    pub silent_after: Duration,

    /// End processes of a pod that the extender demands GPU memory back from, while it uses more than it asked
    /// for; needs CAP_KILL
    #[arg(
        help_heading = "Ending processes",
        long,
        env = "GPUSTOW_KILL_PROCESSES"
    )]
    pub kill_processes: bool,

    /// Seconds that such a process has to end by itself
    #[arg(help_heading = "Ending processes", long, env = "GPUSTOW_KILL_GRACE", default_value = "10", value_parser = seconds)]
    pub kill_grace: Duration,

    /// The most such processes in a minute
    #[arg(help_heading = "Ending processes", long, env = "GPUSTOW_KILL_RATE", default_value = "6", value_parser = value_parser!(u32).range(1..=1000))]
    pub kill_rate: u32,

    /// Extended resource that pods ask for, in MiB
    #[arg(help_heading = "GPUs and their driver", long, env = "GPUSTOW_RESOURCE_NAME", default_value = names::GPU_MEM, value_parser = extended_resource)]
    pub resource_name: String,

    /// What extender and agent are told alike.
    #[command(flatten)]
    pub daemon: DaemonArgs,

    /// Address for /healthz, /readyz and /metrics
    #[arg(
        help_heading = "Metrics and health",
        long,
        env = "GPUSTOW_AGENT_LISTEN",
        default_value = "0.0.0.0:32765"
    )]
    pub listen: SocketAddr,

    /// How health and metrics are served.
    #[command(flatten)]
    pub serving: MetricsArgs,

    /// Print what is seen, and end; needs no cluster
    #[arg(help_heading = "One look", long)]
    pub once: bool,

    /// How --once prints
    #[arg(
        help_heading = "One look",
        long,
        requires = "once",
        default_value = "text"
    )]
    pub output: Output,
}

/// Form of what --once prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    Text,
    /// One JSON object.
    Json,
}

impl Args {
    /// The part that decides what a report says.
    #[must_use]
    pub fn settings(&self) -> Settings {
        Settings {
            headroom: self.headroom_mib,
            unified_memory: self.unified_memory_mib,
            threshold: self.threshold_mib,
            application_xids: self
                .application_xids
                .iter()
                .copied()
                .collect::<BTreeSet<_>>(),
            probation: self.probation,
            forget_after: self.shrink_after,
            means: Means {
                toolkit: self.toolkit_limits,
                agent: self.set_limits,
                cgroup2: is_the_hosts(&self.cgroup),
            },
        }
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
