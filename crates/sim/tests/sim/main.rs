//! The simulator: its commands as people run them, and exact results on a workload that is the same everywhere.

mod cli;
mod synthetic;
