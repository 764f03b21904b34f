//! gpustow on a real control plane: the unmodified kube-scheduler, the extender as a process, RBAC
//! on. One cluster serves all cases that can share it.

mod after_filter;
mod containers;
mod doors;
mod gpunodes;
mod install;
mod lifecycle;
mod main_path;
mod manifests;
mod packing;
mod policies;
mod preemption;
mod scheduling;
mod smoke;
mod support;
mod waiting;
