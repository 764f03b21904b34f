//! The whole path on a node that is real but for its GPUs: kubelet, containerd and runc, the agent on
//! `fake-nvml`, pods whose processes run. It needs root and a machine that may be disturbed:
//! `make test-node`.

mod containers;
mod driver;
mod install;
mod instances;
mod kubelet;
mod limits;
mod mps;
mod node;
mod place;
mod restarts;
mod rig;
mod site;
