//! Everything that parses what others wrote, each a target for a fuzzer: bytes in, and whatever they say, no panic
//! and nothing that cannot be. `make fuzz` runs each under libFuzzer; what that has found interesting is kept in
//! `corpus`, and every test run goes through it again.
#![allow(
    clippy::panic,
    reason = "this is how a fuzzer is told that something is wrong"
)]

mod agent;
mod extender;
mod people;

/// Takes in what another program wrote; panics if what comes of it cannot be.
pub type Target = fn(&[u8]);

/// All of them, by name.
pub const TARGETS: [(&str, Target); 9] = [
    ("calls", extender::calls),
    ("cgroup", agent::cgroup),
    ("kubelet", agent::kubelet),
    ("listed", people::listed),
    ("nvml", agent::nvml),
    ("pod", extender::pod),
    ("quantity", extender::quantity),
    ("report", extender::report),
    ("trace", people::trace),
];
