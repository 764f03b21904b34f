//! Fuzz targets for all code that parses foreign input. For any bytes, a target must not panic, and its results must be
//! consistent. `make fuzz` runs each target under libFuzzer. Interesting inputs of these runs are in `corpus`, and
//! every test run repeats them.
#![allow(
    clippy::panic,
    reason = "this is how a fuzzer is told that something is wrong"
)]

mod agent;
mod extender;
mod people;

/// Takes in foreign input; panics if the results are inconsistent.
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
