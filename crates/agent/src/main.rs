//! `gpustow-agent`: reports the state of one node's GPUs, as NVML shows it, to gpustow.

use std::process::ExitCode;

use clap::Parser;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    gpustow_serve::set_revision(option_env!("GPUSTOW_REVISION"));
    match gpustow_agent::run(gpustow_agent::Args::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpustow-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}
