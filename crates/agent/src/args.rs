//! The settings of an operator. Every flag except `--once` and `--output` also has an environment variable.

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
use crate::instances::{Makes, Places};
use crate::limits::Means;
use crate::state::{MAX_CARD, Settings};

/// Reports the state of this node's GPUs, as NVML shows it, to gpustow.
#[derive(Clone, Debug, Parser)]
#[command(name = "gpustow-agent", version)]
pub struct Args {
    /// Report as this node
    #[arg(
        help_heading = "Node",
        long,
        env = "NODE_NAME",
        required_unless_present = "once"
    )]
    pub node_name: Option<String>,

    /// Look for libnvidia-ml.so.1 in these folders before the system's own
    #[arg(
        help_heading = "GPUs and their driver",
        long,
        env = "GPUSTOW_NVML_PATH",
        value_delimiter = ':',
        default_value = "/run/nvidia/driver/usr/lib64:/run/nvidia/driver/usr/lib/x86_64-linux-gnu:/run/nvidia/driver/usr/lib/aarch64-linux-gnu"
    )]
    pub nvml_path: Vec<PathBuf>,

    /// Read the host's processes from this folder
    #[arg(
        help_heading = "Node",
        long,
        env = "GPUSTOW_PROC",
        default_value = "/proc"
    )]
    pub proc: PathBuf,

    /// Read the host's cgroup file system from this folder, whose directories the driver uses to name limits
    #[arg(
        help_heading = "Node",
        long,
        env = "GPUSTOW_CGROUP",
        default_value = "/sys/fs/cgroup"
    )]
    pub cgroup: PathBuf,

    /// Rely on this node's NVIDIA container toolkit to set the limits of containers. It must be 1.20.1 or later and give
    /// devices by CDI
    #[arg(help_heading = "Limits", long, env = "GPUSTOW_TOOLKIT_LIMITS")]
    pub toolkit_limits: bool,

    /// Set the limits of containers if the toolkit does not, and apply changes of a pod's annotation to running containers.
    /// Needs a privileged container and a writable --cgroup
    #[arg(help_heading = "Limits", long, env = "GPUSTOW_SET_LIMITS")]
    pub set_limits: bool,

    /// Read which pods hold nvidia.com/gpu from the kubelet's PodResources socket
    #[arg(
        help_heading = "Node",
        long,
        env = "GPUSTOW_POD_RESOURCES",
        default_value = "/var/lib/kubelet/pod-resources/kubelet.sock"
    )]
    pub pod_resources: PathBuf,

    /// Read memory and processes at this interval, in seconds
    #[arg(help_heading = "Reports", long, env = "GPUSTOW_PERIOD", default_value = "1", value_parser = seconds)]
    pub period: Duration,

    /// Read static GPU properties at this interval, in seconds
    #[arg(help_heading = "Reports", long, env = "GPUSTOW_REFRESH", default_value = "30", value_parser = seconds)]
    pub refresh: Duration,

    /// Report at this interval, in seconds, if nothing changes. scheduling.staleAfter of the GpustowConfig is three of these
    #[arg(help_heading = "Reports", long, env = "GPUSTOW_HEARTBEAT", default_value_t = Seconds(HEARTBEAT))]
    pub heartbeat: Seconds,

    /// Report immediately when unmanaged memory changes by this many MiB
    #[arg(help_heading = "Reports", long, env = "GPUSTOW_THRESHOLD_MIB", default_value = "256", value_parser = value_parser!(u64).map(Mib))]
    pub threshold_mib: Mib,

    /// Keep this many MiB of each GPU free of pods
    #[arg(help_heading = "GPUs and their driver", long, env = "GPUSTOW_HEADROOM_MIB", default_value = "0", value_parser = value_parser!(u64).range(0..=MAX_CARD.0).map(Mib))]
    pub headroom_mib: Mib,

    /// Assume this size in MiB for a GPU that shares the host's memory and reports no size
    #[arg(help_heading = "GPUs and their driver", long, env = "GPUSTOW_UNIFIED_MEMORY_MIB", value_parser = value_parser!(u64).range(1..=MAX_CARD.0).map(Mib))]
    pub unified_memory_mib: Option<Mib>,

    /// Ignore these XIDs, which applications cause, when the health of a GPU is judged
    #[arg(
        help_heading = "GPU health",
        long,
        env = "GPUSTOW_APPLICATION_XIDS",
        value_delimiter = ',',
        default_value = "13,31,43,45,68,109"
    )]
    pub application_xids: Vec<u64>,

    /// Place no pods on a failed GPU for this many seconds
    #[arg(help_heading = "GPU health", long, env = "GPUSTOW_PROBATION", default_value = "600", value_parser = seconds)]
    pub probation: Duration,

    /// Wait this many seconds before the node's capacity shrinks
    #[arg(help_heading = "GPU health", long, env = "GPUSTOW_SHRINK_AFTER", default_value = "60", value_parser = seconds)]
    pub shrink_after: Duration,

    /// Report a container that has had no process on its GPU for this many seconds
    #[arg(help_heading = "Reports", long, env = "GPUSTOW_SILENT_AFTER", default_value = "60", value_parser = seconds)]
    pub silent_after: Duration,

    /// End processes of pods from which the extender reclaims GPU memory, while they use more than they requested. Needs
    /// CAP_KILL
    #[arg(
        help_heading = "Ending processes",
        long,
        env = "GPUSTOW_KILL_PROCESSES"
    )]
    pub kill_processes: bool,

    /// Give such a process this many seconds to exit by itself
    #[arg(help_heading = "Ending processes", long, env = "GPUSTOW_KILL_GRACE", default_value = "10", value_parser = seconds)]
    pub kill_grace: Duration,

    /// End at most this many processes per minute
    #[arg(help_heading = "Ending processes", long, env = "GPUSTOW_KILL_RATE", default_value = "6", value_parser = value_parser!(u32).range(1..=1000))]
    pub kill_rate: u32,

    /// Share this node's GPUs through NVIDIA's MPS: they take only pods with the annotation gpustow.dev/compute-percent, and
    /// only while MPS's control daemon answers
    #[arg(help_heading = "GPUs and their driver", long, env = "GPUSTOW_MPS")]
    pub mps: bool,

    /// Find MPS's control daemon in this directory (its CUDA_MPS_PIPE_DIRECTORY)
    #[arg(help_heading = "GPUs and their driver", long, env = "GPUSTOW_MPS_PIPES", default_value = names::MPS_PIPES_DIRECTORY)]
    pub mps_pipes: PathBuf,

    /// Let programs of all users write to this directory, which pods with MPS share as their /dev/shm
    #[arg(
        help_heading = "GPUs and their driver",
        long,
        env = "GPUSTOW_MPS_SHM",
        value_name = "DIR",
        requires = "mps"
    )]
    pub mps_shm: Option<PathBuf>,

    /// Make MIG instances for pods with the annotation gpustow.dev/isolation, on GPUs whose MIG mode is on. Experimental; needs a
    /// privileged container
    #[arg(help_heading = "MIG instances", long, env = "GPUSTOW_MAKE_INSTANCES")]
    pub make_instances: bool,

    /// Note in this directory which instances the agent made. It must be empty after a reboot
    #[arg(
        help_heading = "MIG instances",
        long,
        env = "GPUSTOW_INSTANCES",
        default_value = "/run/gpustow/instances"
    )]
    pub instances: PathBuf,

    /// Find NVIDIA's CDI specification in these directories, and write the specifications of pods' instances into the first
    #[arg(
        help_heading = "MIG instances",
        long,
        env = "GPUSTOW_CDI",
        value_delimiter = ':',
        default_value = "/var/run/cdi:/etc/cdi"
    )]
    pub cdi: Vec<PathBuf>,

    /// Read this extended resource of pods, in MiB
    #[arg(help_heading = "GPUs and their driver", long, env = "GPUSTOW_RESOURCE_NAME", default_value = names::GPU_MEM, value_parser = extended_resource)]
    pub resource_name: String,

    /// The flags that extender and agent share.
    #[command(flatten)]
    pub daemon: DaemonArgs,

    /// Serve /healthz, /readyz and /metrics at this address
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

    /// Print one report and exit, without a cluster
    #[arg(help_heading = "One look", long)]
    pub once: bool,

    /// Print the report of --once in this form
    #[arg(
        help_heading = "One look",
        long,
        requires = "once",
        default_value = "text"
    )]
    pub output: Output,
}

/// Form of the report of --once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    Text,
    /// One JSON object.
    Json,
}

impl Args {
    /// The settings that decide a report's content.
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
            mps: self.mps,
        }
    }

    /// Where MIG instances are noted, if the agent makes some.
    #[must_use]
    pub fn makes(&self) -> Option<Makes> {
        let places = || Places {
            records: self.instances.clone(),
            cdi: self.cdi.clone(),
            proc: self.proc.clone(),
        };
        self.make_instances.then(|| Makes {
            places: places(),
            orders: None,
        })
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
