//! Metrics, rules and runbooks, held against Prometheus' own programs.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use gpustow_testkit::Case;
use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use tokio::sync::OnceCell;

use crate::support::{bound, refused, repository, rig};

/// Where prometheus and promtool are; builds them the first time.
pub(crate) async fn bin() -> Result<&'static PathBuf> {
    static BIN: OnceCell<PathBuf> = OnceCell::const_new();
    BIN.get_or_try_init(async || {
        let script = repository("tests/prometheus/build.sh");
        let built = Command::new(script)
            .stderr(Stdio::inherit())
            .output()
            .await?;
        ensure!(built.status.success(), "tests/prometheus/build.sh failed");
        Ok(PathBuf::from(String::from_utf8(built.stdout)?.trim()))
    })
    .await
}

/// Runs promtool; the error has all that it said.
async fn promtool(args: &[&str], input: &str) -> Result<()> {
    let mut child = Command::new(bin().await?.join("promtool"))
        .args(args)
        .current_dir(repository("manifests/alerts"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut stdin = child.stdin.take().context("promtool without stdin")?;
    stdin.write_all(input.as_bytes()).await?;
    drop(stdin);
    let output = child.wait_with_output().await?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    ensure!(
        output.status.success(),
        "promtool {}: {said}",
        args.join(" ")
    );
    Ok(())
}

#[tokio::test]
async fn the_extenders_metrics_are_as_prometheus_likes_them() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "metrics").await?;
    case.node("n", &[24576]).create(&case.client).await?;
    bound(&case.client, case.pod("fits").gpu_mem(16384)).await?;
    refused(&case.client, case.pod("waits").gpu_mem(16384), "").await?;
    let text = rig.extender.metrics().await?;
    promtool(&["check", "metrics"], &text).await?;
    for series in [
        "gpustow_pending_pods{reason=\"no_room\"}",
        "gpustow_pending_memory_bytes{reason=\"fragmented\"}",
        "gpustow_placeable_pods{model=\"Testkit GPU\",size=\"8Gi\"}",
        "gpustow_cluster_memory_room_bytes{model=\"Testkit GPU\"}",
        "gpustow_gpus{model=\"Testkit GPU\",state=\"ready\"}",
        "gpustow_problems{kind=\"overcommitted\"} 0",
        "gpustow_extender_request_duration_seconds_count{result=\"ok\",verb=\"filter\"}",
    ] {
        ensure!(text.contains(series), "{series} is missing in\n{text}");
    }
    for label in ["pid", "uid", "image"] {
        let here = |sign: &str| text.contains(&format!("{sign}{label}="));
        ensure!(!here("{") && !here(","), "{label} grows without bound");
    }
    case.end().await
}

#[tokio::test]
async fn every_alert_fires_when_it_should_and_is_silent_when_it_should() -> Result<()> {
    let rules = [
        "check",
        "rules",
        "--lint=all",
        "--lint-fatal",
        "gpustow.rules.yaml",
    ];
    promtool(&rules, "").await?;
    promtool(&["test", "rules", "gpustow.test.yaml"], "").await?;
    let tests = std::fs::read_to_string(repository("manifests/alerts/gpustow.test.yaml"))?;
    for alert in alerts()? {
        for what in ["fires", "is silent"] {
            ensure!(
                tests.contains(&format!("{alert} {what}")),
                "no test that {alert} {what}"
            );
        }
    }
    Ok(())
}

fn alerts() -> Result<BTreeSet<String>> {
    let text = std::fs::read_to_string(repository("manifests/alerts/gpustow.rules.yaml"))?;
    let rules: Value = serde_yaml::from_str(&text)?;
    let groups = rules["groups"].as_array().context("groups")?.iter();
    let rules = groups.flat_map(|group| group["rules"].as_array().into_iter().flatten());
    Ok(rules
        .filter_map(|rule| rule["alert"].as_str().map(str::to_owned))
        .collect())
}

#[test]
fn every_alert_has_a_runbook_that_begins_with_a_command() -> Result<()> {
    let mut pages = BTreeSet::new();
    for entry in std::fs::read_dir(repository("docs/runbooks"))? {
        let path = entry?.path();
        let text = std::fs::read_to_string(&path)?;
        let first = text.lines().next().unwrap_or_default();
        ensure!(
            first.starts_with("`kubectl "),
            "{}: {first}",
            path.display()
        );
        let name = path.file_stem().context("a page without a name")?;
        pages.insert(name.to_string_lossy().into_owned());
    }
    assert_eq!(pages, alerts()?);
    Ok(())
}
