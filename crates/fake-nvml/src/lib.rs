//! A `libnvidia-ml.so.1` that works without a GPU. It simulates the machine in the file `fake-nvml.yaml` next to it,
//! and reads the file again whenever it changes. It does not know which program loads it. [`Machine`] is the file, for
//! programs that write it.
//!
//! Copied from the real library: answers in two steps (`INSUFFICIENT_SIZE` with the size wanted),
//! struct versions that are checked, waiting for events, cards that are lost, calls that a driver
//! does not support.

mod ffi;
mod instances;
mod limits;
mod machine;
mod mig;
mod state;

pub use machine::{
    Event, FILE, Gpu, Kind, Limit, Limits, Machine, Mig, NO_LIMIT, Near, Process, Profile,
    ReadError, install, library,
};
