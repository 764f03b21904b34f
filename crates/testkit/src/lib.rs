//! Drives a real Kubernetes control plane, and a network that misbehaves on demand, for the tests. It does not know how
//! gpustow decides: it creates objects, runs programs, and recomputes the invariants from the API server alone.
//!
//! Everything listens on 127.0.0.1 and dies with the test process.

mod agent;
mod bench;
mod binaries;
pub mod builders;
mod case;
mod certificate;
mod check;
mod config;
mod control_plane;
mod driver;
mod etcd;
mod extender;
mod gang;
mod net;
mod process;
mod proxy;
mod scheduler;
mod shared;
mod stats;
mod wait;
mod webhook;

pub use agent::Agent;
pub use bench::{Binds, at_once, paced, since};
pub use binaries::kubernetes_minor;
pub use builders::{GpuNodeBuilder, PodBuilder, gpu_node, pod};
pub use case::Case;
pub use certificate::certificate;
pub use check::{BY_HAND, check_cluster, held};
pub use config::configure;
pub use control_plane::{ControlPlane, Options, client};
pub use driver::{DRIVER, claim_kind, device_class};
pub use extender::{Build, Extender, ExtenderOptions};
pub use gang::POD_GROUPS;
pub use net::{free_port, get};
pub use process::{Launch, Process, built};
pub use proxy::{Action, ApiProxy, Rule};
pub use scheduler::{Scheduler, SchedulerConfig};
pub use shared::shared;
pub use stats::{median, quantile, quantiles, sorted, spread};
pub use wait::{
    eventually, node_of, refusal, wait_bound, wait_condition, wait_gone, wait_pods, wait_refused,
};
pub use webhook::Webhook;
