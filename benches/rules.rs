//! What it costs that pods may choose GPUs, share them by rule or ask for a percentage: filter for pods that do none of it, in
//! a cluster where no pod does and in one where every bound pod does, in turn; then for pods that do.
//! `make bench ARGS=rules` runs it alone.

#![allow(
    clippy::expect_used,
    reason = "a bench that cannot make its world has to stop"
)]
#![allow(
    dead_code,
    reason = "the module of the load is shared with the other benches"
)]

mod load;

use std::time::{Duration, Instant};

use gpustow_api::{PodFacts, names};
use gpustow_ledger::{Ask, Config, Ledger};
use load::{CARDS, NOW, diverse, facts, percentile, uuid};
use serde_json::{Value, json};

const NODES: usize = 1_000;
/// Calls of each kind; no two ask for the same.
const CALLS: u64 = 500;

fn main() {
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    if filter.is_some_and(|filter| !"rules".contains(&filter)) {
        return;
    }
    println!("\nFilter on {NODES} nodes of {CARDS} cards with a pod each, nothing remembered;");
    println!("{CALLS} calls of each kind, in turn, µs");
    println!("{:>44} {:>8} {:>8}", "", "p50", "p99");
    let (mut plain, names) = cluster(&json!({}));
    let (mut ruled, _) = cluster(&json!({
        names::GPU_ANTI_AFFINITY: "bound", names::NOT_GPU_MODELS: "*A100*", names::GPU_MEM_PERCENTAGE: "1",
    }));
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let one = uuid(NODES / 2, 3);
    let (mut without, mut beside) = (Vec::new(), Vec::new());
    for call in 0..CALLS {
        let pod = pod("plain", call, &json!({}));
        without.push(ask(&mut plain, &pod, &names));
        beside.push(ask(&mut ruled, &pod, &names));
    }
    row("no pod uses any of it", without);
    row("every bound pod does, this one does not", beside);
    for (what, annotations) in [
        ("gpu-models", json!({ names::GPU_MODELS: "*H100*" })),
        ("gpu-uuids", json!({ names::GPU_UUIDS: one })),
        ("gpu-affinity", json!({ names::GPU_AFFINITY: "new" })),
        (
            "gpu-anti-affinity",
            json!({ names::GPU_ANTI_AFFINITY: "bound" }),
        ),
        (
            "gpu-mem-percentage",
            json!({ names::GPU_MEM_PERCENTAGE: "12" }),
        ),
    ] {
        let calls = (0..CALLS).map(|call| {
            let pod = pod(what, call, &annotations);
            ask(&mut ruled, &pod, &names)
        });
        row(&format!("with {what}"), calls.collect());
    }
}

fn ask(ledger: &mut Ledger, pod: &PodFacts, names: &[&str]) -> Duration {
    let began = Instant::now();
    let verdict = ledger.filter(&Ask::of(pod), names, NOW);
    let took = began.elapsed();
    assert!(!verdict.nodes.is_empty(), "{:?}", verdict.refused.first());
    ledger.delete_pod(&pod.uid);
    took
}

fn row(what: &str, mut calls: Vec<Duration>) {
    calls.sort_unstable();
    let us = |percent| percentile(&calls, percent).as_secs_f64() * 1e6;
    println!("{what:>44} {:>8.1} {:>8.1}", us(50), us(99));
}

/// A ledger in which no two nodes have the same free and each has a pod with these annotations.
fn cluster(annotations: &Value) -> (Ledger, Vec<String>) {
    let (mut ledger, names) = diverse(NODES, CARDS, Config::default());
    for (index, name) in names.iter().enumerate() {
        let card = uuid(index, 0);
        let mut annotations = annotations.clone();
        annotations[names::ASSIGNMENT] = json!(
            json!({ "version": 1, "gpus": [{ "uuid": card, "mib": 820 }], "containers": { "main": [card] }, "exclusive": false })
                .to_string()
        );
        let mut pod = body(&format!("bound-{index}"), 820, annotations);
        pod["spec"]["nodeName"] = json!(name);
        ledger.apply_pod(facts(pod));
    }
    ledger.learn();
    (ledger, names)
}

/// One whose UID no other kind has: a pod that is gone stays so.
fn pod(kind: &str, call: u64, annotations: &Value) -> PodFacts {
    let name = format!("{kind}-{call}");
    facts(body(&name, 9_000 + call, annotations.clone()))
}

fn body(name: &str, mib: u64, annotations: Value) -> Value {
    json!({
        "metadata": { "uid": name, "name": name, "namespace": "team-a", "annotations": annotations },
        "spec": { "containers": [
            { "name": "main", "resources": { "limits": { "gpustow.dev/gpu-mem": mib.to_string() } } },
        ]},
        "status": { "phase": "Pending" },
    })
}
