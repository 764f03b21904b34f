use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use gpustow_testkit::{Launch, Process, eventually};

const SOON: Duration = Duration::from_secs(10);

fn shell(script: &str) -> Result<Process> {
    let log = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("process-{:08x}.log", rand::random::<u32>()));
    let args = vec!["-c".to_owned(), script.to_owned()];
    Process::start(Launch {
        program: "sh".into(),
        args,
        env: Vec::new(),
        log,
    })
}

/// `T` while it is stopped, `R` or `S` while it runs, `Z` once it has ended; `None` if it is gone.
fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(") ").next()?.chars().next()
}

#[tokio::test]
async fn signals_reach_the_process() -> Result<()> {
    let process =
        shell("trap 'echo terminated; exit 3' TERM; echo up; while :; do sleep 0.01; done")?;
    process.wait_for_log_line("up", SOON).await?;
    process.stop()?;
    eventually(SOON, "stopped", async || {
        ensure!(state(process.id()) == Some('T'));
        Ok(())
    })
    .await?;
    process.term()?;
    assert_eq!(
        process.exited()?,
        None,
        "a stopped process must not see SIGTERM"
    );
    process.cont()?;
    assert_eq!(process.wait_exit(SOON).await?.code(), Some(3));
    assert!(
        process.term().is_err(),
        "a signal to a process that is gone is an error"
    );
    assert!(process.read_log()?.ends_with("terminated\n"));
    Ok(())
}

#[tokio::test]
async fn a_restart_keeps_the_log() -> Result<()> {
    let process = shell("echo pid $$; exec sleep 1000")?;
    process.wait_for_log_line("pid", SOON).await?;
    let before = process.id();
    process.restart()?;
    let after = process.id();
    process
        .wait_for_log_line(&format!("pid {after}"), SOON)
        .await?;
    assert!(process.read_log()?.starts_with(&format!("pid {before}\n")));
    assert_eq!(state(before), None);
    Ok(())
}

/// Kills a copy of this test with -9 while a child that it started runs.
#[tokio::test]
async fn children_die_with_the_test() -> Result<()> {
    const ROLE: &str = "TESTKIT_VICTIM";
    if std::env::var_os(ROLE).is_some() {
        let child = tokio::task::spawn_blocking(|| shell("exec sleep 1000")).await??;
        println!("child {}", child.id());
        std::future::pending::<()>().await;
    }
    let mut victim = Command::new(std::env::current_exe()?)
        .args([
            "--exact",
            "process::children_die_with_the_test",
            "--nocapture",
        ])
        .env(ROLE, "yes")
        .stdout(Stdio::piped())
        .spawn()?;
    let lines = BufReader::new(victim.stdout.take().context("no stdout")?).lines();
    let child = lines
        .map_while(Result::ok)
        .find_map(|line| line.rsplit("child ").next()?.parse::<u32>().ok());
    let child = child.context("the copy started no child")?;
    let runs = Path::new("/proc").join(child.to_string()).join("cmdline");
    eventually(SOON, "the child runs", async || {
        ensure!(std::fs::read_to_string(&runs)?.starts_with("sleep"));
        Ok(())
    })
    .await?;

    victim.kill()?;
    victim.wait()?;
    eventually(SOON, "the child dies", async || match state(child) {
        None | Some('Z') => Ok(()),
        Some(state) => bail!("{state}"),
    })
    .await
}
