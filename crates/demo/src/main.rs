//! `make demo`: pods being packed, in the terminal.

use std::process::ExitCode;

use clap::Parser as _;
use gpustow_demo::{Args, run};

fn main() -> ExitCode {
    run(&Args::parse()).unwrap_or_else(|error| {
        eprintln!("demo: {error:#}");
        ExitCode::FAILURE
    })
}
