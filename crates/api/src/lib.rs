//! gpustow's contract with the cluster: every name, the custom resources, a Pod's request and the format of an
//! assignment. No I/O.

mod allowance;
pub mod assignment;
mod bad_request;
pub mod claim;
pub mod config;
mod disruption_budget;
pub mod events;
pub mod facts;
pub mod faults;
pub mod gpunode;
pub mod instances;
pub mod intree;
pub mod limit;
mod links;
pub mod names;
pub mod owner;
mod pod;
mod podgroup;
pub mod quantity;
mod queue_from;
mod regards;
pub mod request;
pub mod reserved;
mod selector;
mod share;
pub mod sharers;
pub mod version;
pub mod workload;

pub use allowance::allowances;
pub use assignment::{Assignment, BrokenAssignment};
pub use bad_request::BadRequest;
pub use config::GpustowConfig;
pub use disruption_budget::DisruptionBudget;
pub use facts::{Asks, Memory, NodeFacts, Phase, PodFacts, Sleep, gone_by};
pub use gpunode::{GpuNode, GpuNodeSpec, GpuNodeStatus};
pub use pod::PodObject;
pub use podgroup::{Group, GroupPolicy, PodGroup, PodGroupFacts};
pub use queue_from::QueueFrom;
pub use regards::Regards;
pub use request::request;
pub use share::{Interned, Shared};
pub use workload::{GpuWorkload, GpuWorkloadSpec};
