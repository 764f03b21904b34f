//! Inputs that people give to the programs.

use clap::Parser as _;
use gpustow_sim::protocol::{Mode, Workload};
use gpustow_sim::trace;
use kubectl_gpustow::{Args, Screen, run};
use tempfile::TempDir;

thread_local! {
    static DIR: Option<TempDir> = tempfile::tempdir().ok();
}

/// The output of `kubectl get nodes,gpunodes,pods -A -o json`, in every command.
pub(crate) fn listed(data: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let file = DIR.with(|dir| dir.as_ref().map(|dir| dir.path().join("all.json")));
    let (Ok(runtime), Some(file)) = (runtime, file) else {
        return;
    };
    if std::fs::write(&file, data).is_err() {
        return;
    }
    let from = file.display().to_string();
    for command in [
        "nodes",
        "gpus -o wide",
        "pods -A",
        "report",
        "check",
        "gpus -o json",
        "why p -n n",
    ] {
        let words = ["kubectl-gpustow", "--from", &from];
        let Ok(args) = Args::try_parse_from(words.into_iter().chain(command.split(' '))) else {
            panic!("{command} is no command");
        };
        // The command may refuse the file with an error.
        let _ = runtime.block_on(run(args, &mut Vec::new(), Screen::default()));
    }
}

/// The two tables of a trace, with a zero byte between them.
pub(crate) fn trace(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (nodes, pods) = text.split_once('\0').unwrap_or((&text, ""));
    if let (Ok(nodes), Ok(pods)) = (trace::nodes(nodes), trace::pods(pods)) {
        let _ = Workload::new(nodes, pods, Mode::MibGuess);
    }
}
