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

use crate::agent::AgentNode;
use crate::support::{bound, refused, repository, rig};

/// The folder of prometheus and promtool; builds both the first time.
pub(crate) async fn prometheus() -> Result<&'static PathBuf> {
    static FOLDER: OnceCell<PathBuf> = OnceCell::const_new();
    let build = async || folder("tests/prometheus/build.sh").await;
    FOLDER.get_or_try_init(build).await
}

/// The folder of the Prometheus operator's resource definitions; fetches them the first time.
pub(crate) async fn operator_crds() -> Result<&'static PathBuf> {
    static FOLDER: OnceCell<PathBuf> = OnceCell::const_new();
    let fetch = async || folder("tests/prometheus/crds.sh").await;
    FOLDER.get_or_try_init(fetch).await
}

/// The folder that a script makes and names.
async fn folder(script: &str) -> Result<PathBuf> {
    let mut made = Command::new(repository(script));
    let made = made.stderr(Stdio::inherit()).output().await?;
    ensure!(made.status.success(), "{script} failed");
    Ok(PathBuf::from(String::from_utf8(made.stdout)?.trim()))
}

/// Runs promtool; the error contains its whole output.
pub(crate) async fn promtool(args: &[&str], input: &str) -> Result<()> {
    let mut child = Command::new(prometheus().await?.join("promtool"))
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
        "gpustow_cluster_memory_available_bytes{model=\"Testkit GPU\"}",
        "gpustow_gpus{model=\"Testkit GPU\",state=\"ready\"}",
        "gpustow_gpus{model=\"Testkit GPU\",state=\"stale\"} ",
        "gpustow_gpus{model=\"unknown\",state=\"unknown\"} ",
        "gpustow_problems{kind=\"overcommitted\"} ",
        "gpustow_ledger_mismatches{kind=\"orphan\"} ",
        "gpustow_ledger_mismatches{kind=\"unconfirmed\"} ",
        "gpustow_ledger_mismatches{kind=\"wrong_gpu\"} ",
        "gpustow_build_info{revision=",
        "gpustow_extender_request_duration_seconds_count{verb=\"filter\"}",
        "gpustow_extender_request_duration_seconds_bucket{verb=\"filter\",le=\"0.0003\"}",
        "gpustow_extender_request_errors_total{error=\"internal\",verb=\"preempt\"} ",
        "gpustow_extender_refusals_total{reason=\"no_whole_gpu\"} ",
        "gpustow_extender_request_duration_seconds_count{verb=\"bind\"}",
        "gpustow_bind_failures_total{reason=\"gated\"} ",
        "gpustow_pending_pods{reason=\"policy\"} ",
        "gpustow_pending_oldest_timestamp_seconds ",
        "gpustow_assumed_pods ",
        "gpustow_assumed_pods_expired_total ",
        "gpustow_watch_last_event_timestamp_seconds{resource=\"gpunodes\"} ",
        "process_start_time_seconds ",
    ] {
        ensure!(text.contains(series), "{series} is missing in\n{text}");
    }
    has_bounded_labels(&text)?;
    case.end().await
}

fn has_bounded_labels(text: &str) -> Result<()> {
    for label in ["pid", "uid", "image"] {
        let here = |sign: &str| text.contains(&format!("{sign}{label}="));
        ensure!(!here("{") && !here(","), "{label} grows without bound");
    }
    Ok(())
}

#[tokio::test]
async fn the_agents_metrics_are_as_prometheus_likes_them() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "agent-metrics").await?;
    let mut node = AgentNode::start(rig.cluster, &case).await?;
    node.gets_busy(&case).await?;
    let text = node.exposition().await?;
    promtool(&["check", "metrics"], &text).await?;
    for series in [
        "gpustow_gpu_info{driver_version=\"580.1\",gpu=\"0\",gpu_uuid=",
        "gpustow_gpu_memory_total_bytes{",
        "gpustow_gpu_memory_reserved_bytes{",
        "gpustow_gpu_memory_capacity_bytes{",
        "gpustow_gpu_memory_used_bytes{",
        "gpustow_gpu_memory_unmanaged_bytes{",
        "gpustow_gpu_healthy{",
        "gpustow_gpu_xid_errors_total{",
        "gpustow_pod_gpu_memory_requested_bytes{container=",
        "gpustow_pod_gpu_memory_used_bytes{container=",
        "gpustow_agent_sample_duration_seconds_bucket{le=\"0.0003\"}",
        "gpustow_agent_sample_errors_total{source=\"nvml\"} ",
        "gpustow_agent_last_publish_timestamp_seconds ",
        "gpustow_agent_build_info{revision=",
        "process_start_time_seconds ",
    ] {
        ensure!(text.contains(series), "{series} is missing in\n{text}");
    }
    has_bounded_labels(&text)?;
    node.end().await;
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
    let files = ["gpustow.test.yaml", "limits.test.yaml"];
    promtool(&[&["test", "rules"], &files[..]].concat(), "").await?;
    let mut tests = String::new();
    for file in files {
        let path = repository(&format!("manifests/alerts/{file}"));
        tests += &std::fs::read_to_string(path)?;
    }
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
        let parts = [
            "\n\nFirst command: `kubectl ",
            "\n\n**Meaning**: ",
            "\n\n**Fixed when**: ",
            "\n\n**Escalate**: ",
        ];
        let mut rest = text.as_str();
        for part in parts {
            let (_, after) = rest
                .split_once(part)
                .with_context(|| format!("{} has no {part}", path.display()))?;
            rest = after;
        }
        let name = path.file_stem().context("a page without a name")?;
        pages.insert(name.to_string_lossy().into_owned());
    }
    assert_eq!(pages, alerts()?);
    Ok(())
}
