//! `kubectl gpustow`: see `kubectl-gpustow --help`.

use std::process::ExitCode;

use kubectl_gpustow::{Answer, Args, Screen, run};

#[tokio::main]
async fn main() -> ExitCode {
    let answer = run(Args::of_process(), &mut std::io::stdout(), Screen::stdout()).await;
    match answer {
        Ok(Answer::Yes) => ExitCode::SUCCESS,
        Ok(Answer::No) => ExitCode::from(1),
        Ok(Answer::Unknown) => ExitCode::from(2),
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// `kubectl gpustow pods | head` is no failure.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<std::io::Error>();
    error.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}
