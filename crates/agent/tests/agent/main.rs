//! The agent on `fake-nvml`, loaded as it loads the real library, and its decisions on the values that it reads there.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod capacity;
mod giveback;
mod health;
mod history;
mod hostile;
mod library;
mod limits;
mod manners;
mod mig;
mod mps;
mod notices;
mod podresources;
mod report;
mod sampler;
mod set_limits;
mod sharers;
mod support;
