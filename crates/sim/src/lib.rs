//! gpustow without a cluster: the demo, trace replay and policy comparison.

pub mod baselines;
pub mod bench;
pub mod churn;
pub mod demo;
pub mod hosts;
pub mod plot;
pub mod progress;
pub mod protocol;
pub mod random;
pub mod replay;
pub mod report;
pub mod stowed;
pub mod synthetic;
pub mod trace;
pub mod whatif;
