//! The plugin's ledger follows the GpustowConfig as the extender does: both name the same node.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gpustow_api::{GpuNode, NodeFacts, PodFacts, names};
use gpustow_ledger::{Ask, Config, Ledger};
use gpustow_pack::PolicyKind;
use k8s_openapi::api::core::v1::{Node, Pod};
use serde_json::{Value, from_value, json};

use crate::objects::{Files, NOW, config, holder, node, report, waiting};

const AGO: &str = "2026-11-21T09:58:00Z";

/// Three nodes with a GPU of 24,000 MiB each: `a` and `b` hold as much, of which `a` uses all and `b` nothing; `c` holds
/// nothing, and its report is two minutes old.
fn objects() -> Vec<Value> {
    let uses = |uid: &str, mib: u64| json!({ "pods": [{ "uid": uid, "usedMiB": mib }] });
    vec![
        node("a", &json!({}), "24k"),
        node("b", &json!({}), "24k"),
        node("c", &json!({}), "24k"),
        report("a", NOW, &uses("holds-a", 8000)),
        report("b", NOW, &uses("holds-b", 0)),
        report("c", AGO, &json!({})),
        holder("holds-a", "a", 8000),
        holder("holds-b", "b", 8000),
    ]
}

/// A pod that may use more than it requests, where memory is free.
fn bursts(mib: u64) -> Value {
    let mut pod = waiting("asks", "");
    pod["metadata"]["annotations"] = json!({ names::MEM_LIMIT: "max" });
    pod["spec"]["containers"][0]["resources"]["limits"][names::GPU_MEM] = json!(mib.to_string());
    pod
}

/// The node that an extender with these settings chooses.
fn chosen(config: Config, objects: &[Value], pod: &Value) -> Result<Option<String>> {
    let mut ledger = Ledger::new(config);
    let now = Duration::from_secs(86_400);
    let mut nodes = Vec::new();
    let facts = |pod: &Value| -> Result<PodFacts> {
        let pod: Pod = from_value(pod.clone())?;
        PodFacts::from_pod(&pod, names::GPU_MEM).context("no facts")
    };
    for object in objects {
        match object["kind"].as_str() {
            Some("Node") => {
                let node: Node = from_value(object.clone())?;
                nodes.extend(node.metadata.name.clone());
                ledger.apply_node(NodeFacts::from_node(&node));
            }
            Some("GpuNode") => {
                let report: GpuNode = from_value(object.clone())?;
                let name = report.metadata.name.context("no name")?;
                let status = report.status.context("no status")?;
                let old = status.heartbeat.as_deref() == Some(AGO);
                let age = Duration::from_secs(if old { 120 } else { 0 });
                ledger.apply_gpunode(&name, status, now - age);
            }
            _ => ledger.apply_pod(facts(object)?),
        }
    }
    let pod = facts(pod)?;
    ledger.apply_pod(pod.clone());
    ledger.learn();
    let candidates: Vec<_> = nodes.iter().map(String::as_str).collect();
    let answer = ledger.filter(&Ask::of(&pod), &candidates, now);
    Ok(answer.nodes.first().map(|node| (*node).to_owned()))
}

#[tokio::test]
async fn plugin_names_the_node_that_the_extender_chooses_with_each_feature() -> Result<()> {
    let base = || Config {
        preempt_fragmented: true,
        preempt_after: Duration::from_secs(1),
        ..Config::default()
    };
    let reclaim = Config {
        reclaim: true,
        ..base()
    };
    let policy = |policy| Config { policy, ..base() };
    let minute = Duration::from_secs(60);
    let settings = [
        (json!({}), base()),
        (json!({ "reclaim": { "action": "Event" } }), reclaim),
        (
            json!({ "scheduling": { "policy": "spread" } }),
            policy(PolicyKind::Spread),
        ),
        (
            json!({ "scheduling": { "policy": "binpack" } }),
            policy(PolicyKind::Binpack),
        ),
        (
            json!({ "scheduling": { "policy": "first-fit" } }),
            policy(PolicyKind::FirstFit),
        ),
        (
            json!({ "scheduling": { "staleAfter": "60s" } }),
            Config {
                stale_after: minute,
                ..base()
            },
        ),
        (
            json!({ "queue": { "mode": "Always" } }),
            Config {
                queue: true,
                ..base()
            },
        ),
        (
            json!({ "reserve": { "after": "1m", "markNodes": true } }),
            Config {
                reserve_after: Some(minute),
                ..base()
            },
        ),
        (
            json!({ "preempt": { "fragmented": false } }),
            Config {
                preempt_fragmented: false,
                ..base()
            },
        ),
        (
            json!({ "defragment": { "evictionsPerHour": 10 } }),
            Config {
                defragment: true,
                ..base()
            },
        ),
        (
            json!({ "defragment": { "evictionsPerHour": 10, "emptyNodes": true } }),
            Config {
                defragment: true,
                empty_nodes: true,
                ..base()
            },
        ),
        (
            json!({ "reclaim": { "action": "Evict" }, "queue": { "mode": "Auto" }, "defragment": { "evictionsPerHour": 1 } }),
            Config {
                queue: true,
                defragment: true,
                ..reclaim
            },
        ),
    ];
    let objects = objects();
    let mut different = std::collections::BTreeSet::new();
    for (spec, expected) in settings {
        for mib in [4000, 16_000, 20_000, 24_000] {
            let pod = bursts(mib);
            let extender = chosen(expected, &objects, &pod)?;
            let mut all = objects.clone();
            all.push(config(spec.clone()));
            all.push(pod);
            let files = Files::new("settings", &all)?;
            let (_, why) = files.ask("why ops/asks -o json").await?;
            let why: Value = serde_json::from_str(&why)?;
            let plugin = why["place"]["node"].as_str().map(str::to_owned);
            ensure!(
                plugin == extender,
                "{spec}, {mib} MiB: the plugin says {plugin:?}, the extender {extender:?}"
            );
            different.insert((mib, extender));
        }
    }
    // The cluster is one in which the switches decide.
    ensure!(different.len() > 4, "{different:?}");
    Ok(())
}
