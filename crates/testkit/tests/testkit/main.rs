//! The test rig, tested: a rig that lies makes every other test worthless.

mod check;
mod cluster;
mod fetch;
mod make_cluster;
mod process;
mod proxy;
mod scheduler;
