//! Where log lines go.

use std::io::IsTerminal;

use anyhow::{Context, Result};
use tracing_subscriber::EnvFilter;

use crate::args::{Args, LogFormat};

/// Starts logging to standard error.
///
/// # Errors
/// If the filter of `--log` does not parse, or logging was started before.
pub(crate) fn init(args: &Args) -> Result<()> {
    let filter = EnvFilter::try_new(&args.log).with_context(|| {
        format!(
            "--log {:?}: use a form like info or gpustow=debug",
            args.log
        )
    })?;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    let started = match args.log_format {
        LogFormat::Text => log.try_init(),
        LogFormat::Json => log.json().flatten_event(true).try_init(),
    };
    started.map_err(|error| anyhow::anyhow!("cannot start the log: {error}"))
}
