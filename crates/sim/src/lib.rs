//! gpustow without a cluster: the demo, trace replay and policy comparison.

pub mod baselines;
pub mod bench;
pub mod demo;
pub mod hosts;
pub mod protocol;
pub mod random;
pub mod replay;
pub mod report;
pub mod stowed;
pub mod trace;
