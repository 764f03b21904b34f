//! `gpustow`: the kube-scheduler extender.

use std::process::ExitCode;

use clap::Parser;

#[tokio::main]
async fn main() -> ExitCode {
    gpustow_serve::set_revision(option_env!("GPUSTOW_REVISION"));
    match gpustow::run(gpustow::Args::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpustow: {error:#}");
            ExitCode::FAILURE
        }
    }
}
