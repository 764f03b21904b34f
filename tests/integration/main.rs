//! gpustow on a real control plane: the unmodified kube-scheduler, the extender as a process, RBAC
//! on. One cluster serves all cases that can share it.

mod main_path;
mod smoke;
mod support;
