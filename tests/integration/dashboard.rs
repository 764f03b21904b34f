//! The dashboard: its shape, and every query of it on a real Prometheus that scrapes a real
//! extender and a real agent on cards out of a file.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use gpustow_generate::dashboard;
use gpustow_testkit::{Case, eventually};
use serde_json::{Value, json};

use crate::agent::AgentNode;
use crate::observability::promtool;
use crate::prometheus::Prometheus;
use crate::support::{SOON, refused, repository, rig};

/// The kinds of panels in a classic dashboard.
const KINDS: [&str; 6] = [
    "barchart",
    "heatmap",
    "stat",
    "state-timeline",
    "table",
    "timeseries",
];

fn panels() -> Vec<Value> {
    let board = dashboard();
    let all = board["panels"].as_array().into_iter().flatten();
    all.filter(|panel| panel["type"] != "row")
        .cloned()
        .collect()
}

#[test]
fn every_panel_says_what_it_shows_and_in_which_unit() -> Result<()> {
    let mut cells = BTreeSet::new();
    for panel in panels() {
        let title = panel["title"].as_str().unwrap_or_default();
        let full = |text: &Value| text.as_str().is_some_and(|text| !text.is_empty());
        ensure!(
            full(&panel["title"]) && full(&panel["description"]),
            "{title}: no description"
        );
        ensure!(
            full(&panel["fieldConfig"]["defaults"]["unit"]),
            "{title}: no unit"
        );
        ensure!(
            KINDS.iter().any(|kind| panel["type"] == *kind),
            "{title}: unknown type"
        );
        ensure!(
            panel["datasource"]["uid"] == "${datasource}",
            "{title}: a fixed data source"
        );
        for link in panel["links"].as_array().into_iter().flatten() {
            let url = link["url"].as_str().unwrap_or_default();
            let page = url
                .split_once("/blob/main/")
                .context("not our repository")?
                .1;
            ensure!(repository(page).is_file(), "{title}: no {page}");
        }
        let at = |key: &str| panel["gridPos"][key].as_u64().context("a place");
        for x in at("x")?..at("x")? + at("w")? {
            for y in at("y")?..at("y")? + at("h")? {
                ensure!(
                    x < 24 && cells.insert((x, y)),
                    "{title} lies on another panel"
                );
            }
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_pod_counts_in_gib_hours_for_as_long_as_it_was_there() -> Result<()> {
    let mut panels = panels().into_iter();
    let teams = panels.find(|panel| panel["title"] == "GiB-hours by namespace");
    let expr = teams.context("no such panel")?["targets"][0]["expr"].clone();
    let expr = substituted(expr.as_str().context("an expression")?).replace("[1h:", "[6h:");
    // 8 GiB for 36 of 360 minutes.
    let case = json!({
        "rule_files": [repository("manifests/alerts/gpustow.rules.yaml")],
        "evaluation_interval": "1m",
        "tests": [{
            "interval": "1m",
            "input_series": [{
                "series": r#"gpustow_pod_gpu_memory_requested_bytes{node="n",namespace="t",pod="p"}"#,
                "values": "_x100 8589934592x35 stale",
            }],
            "promql_expr_test": [{
                "expr": expr,
                "eval_time": "6h",
                "exp_samples": [{ "labels": r#"{namespace="t"}"#, "value": 4.8 }],
            }],
        }],
    });
    let file = tempfile::NamedTempFile::with_suffix(".json")?;
    std::fs::write(file.path(), case.to_string())?;
    let path = file.path().to_string_lossy();
    promtool(&["test", "rules", &path], "").await
}

fn substituted(expr: &str) -> String {
    let mut expr = expr.to_owned();
    for (variable, value) in [
        ("$__rate_interval", "1m"),
        ("$__range_s", "3600"),
        ("$__range", "1h"),
        ("$cluster", ".*"),
        ("$node", ".*"),
        ("$model", ".*"),
        ("$namespace", ".*"),
        ("$job", ".*"),
    ] {
        expr = expr.replace(variable, value);
    }
    expr
}

#[tokio::test]
async fn every_query_of_the_dashboard_is_answered_by_a_real_prometheus() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "dashboard").await?;
    let mut node = AgentNode::start(rig.cluster, &case).await?;
    node.gets_busy(&case).await?;
    refused(&case.client, case.pod("waits").gpu_mem(72_000), "").await?;
    let prometheus = Prometheus::start(&rig.extender.health_url, &node.metrics).await?;
    let mut asked = 0;
    for panel in panels() {
        println!("\n{}", panel["title"].as_str().unwrap_or_default());
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expr = substituted(target["expr"].as_str().context("an expression")?);
            ensure!(!expr.contains('$'), "{expr}: an unknown variable");
            let what = panel["title"].to_string();
            // Sums over minutes begin with the next full one.
            let series = eventually(3 * SOON, &what, async || {
                let series = prometheus.ask(&expr).await?;
                ensure!(!series.is_empty(), "{expr}: no series");
                Ok(series)
            })
            .await?;
            for one in series {
                println!("  {} {}", one["value"][1], one["metric"]);
            }
            asked += 1;
        }
    }
    ensure!(asked > 20, "{asked} queries");
    let board = dashboard();
    for note in board["annotations"]["list"]
        .as_array()
        .into_iter()
        .flatten()
    {
        let expr = substituted(note["expr"].as_str().context("an expression")?);
        prometheus.ask(&expr).await?;
    }
    node.end().await;
    case.end().await
}
