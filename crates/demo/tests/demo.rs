//! The demo as its users run it, without a terminal.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};
use clap::Parser as _;
use kubectl_gpustow::{Args, Screen, run};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

fn demo(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_demo"));
    command.args(args).stdin(Stdio::null());
    command
}

/// The numbers of a line.
fn numbers(line: &str) -> Vec<usize> {
    let words = line.split(|c: char| !c.is_ascii_digit());
    words.filter_map(|word| word.parse().ok()).collect()
}

#[test]
fn every_pod_is_accounted_for_under_every_policy() -> Result<()> {
    let output = demo(&["--nodes=2", "--pods=60", "--speed=120"]).output()?;
    let text = String::from_utf8(output.stdout)?;
    assert!(output.status.success(), "{text}{:?}", output.stderr);
    let sums: Vec<_> = text
        .lines()
        .filter(|line| line.contains("pods arrived"))
        .map(numbers)
        .collect();
    assert_eq!(sums.len(), gpustow_pack::PolicyKind::ALL.len(), "{text}");
    for sum in sums {
        let [arrived, finished, running, waiting] = sum[..] else {
            panic!("{text}");
        };
        assert_eq!(arrived, 60, "{text}");
        assert_eq!(arrived, finished + running + waiting, "{text}");
        assert!(finished > 0, "{text}");
    }
    assert!(text.contains("No card was over-committed, no pod was lost."));
    // It says where the default policy is behind another.
    let verdict = ["tight is not first:", "tight: no other policy"];
    let lines = text
        .lines()
        .filter(|line| verdict.iter().any(|v| line.starts_with(v)));
    assert_eq!(lines.count(), 1, "{text}");
    Ok(())
}

#[tokio::test]
async fn what_runs_on_a_cluster_runs_on_the_demos() -> Result<()> {
    let mut child = demo(&["--nodes=2", "--pods=50", "--speed=30"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut hint = String::new();
    BufReader::new(child.stderr.take().context("no stderr")?).read_line(&mut hint)?;
    let mut words = hint.split_whitespace();
    words
        .find(|word| *word == "--kubeconfig")
        .context(hint.clone())?;
    let kubeconfig = words.next().context(hint.clone())?;
    let words = ["kubectl-gpustow", "--kubeconfig", kubeconfig, "whatif"];
    let mut out = Vec::new();
    let answer = run(Args::try_parse_from(words)?, &mut out, Screen::default()).await;
    kill(Pid::from_raw(i32::try_from(child.id())?), Signal::SIGINT)?;
    child.wait()?;
    answer?;
    let text = String::from_utf8(out)?;
    assert!(text.contains("tight"), "{text}");
    Ok(())
}

#[test]
fn an_interrupted_demo_sums_up_what_it_has() -> Result<()> {
    let mut child = demo(&["--nodes=1", "--pods=50", "--speed=1"])
        .stdout(Stdio::piped())
        .spawn()?;
    let mut stdout = BufReader::new(child.stdout.take().context("no stdout")?);
    let mut text = String::new();
    stdout.read_line(&mut text)?;
    kill(Pid::from_raw(i32::try_from(child.id())?), Signal::SIGINT)?;
    stdout.read_to_string(&mut text)?;
    assert_eq!(child.wait()?.code(), Some(130), "{text}");
    assert!(text.contains("pods arrived"), "{text}");
    Ok(())
}

#[test]
fn a_speed_that_is_none_is_refused() -> Result<()> {
    let output = demo(&["--speed=0"]).output()?;
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr)?.contains("from 0.01"));
    Ok(())
}
