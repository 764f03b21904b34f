//! gpustow without a cluster: workloads replayed through its decisions and through others'.

pub mod advise;
pub mod baselines;
pub mod bench;
pub mod churn;
pub mod hosts;
pub mod progress;
pub mod protocol;
pub mod random;
pub mod replay;
pub mod report;
pub mod starts;
pub mod stowed;
pub mod synthetic;
pub mod trace;
