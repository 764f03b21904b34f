//! gpustow on a real control plane: the unmodified kube-scheduler, the extender as a process, RBAC
//! on. One cluster serves all cases that can share it.

mod admission_options;
mod after_filter;
mod agent;
mod agent_capacity;
mod agent_token;
mod attack;
mod bind_faults;
mod cli;
mod containers;
mod dashboard;
mod docs;
mod doors;
mod fault_rig;
mod faults;
mod gpunodes;
mod install;
mod lifecycle;
mod main_path;
mod manifests;
mod observability;
mod packing;
mod policies;
mod preemption;
mod quota;
mod races;
mod scheduling;
mod serving;
mod shutdown;
mod smoke;
mod support;
mod takeover;
mod undecodable;
mod waiting;
mod wire;
