//! Filter for kinds of pods, without remembered answers. First the cost of pods that may choose GPUs, share them by
//! rule or ask for a percentage. Pods that do none of it ask in turn in two clusters: one where no pod does, and one
//! where every bound pod does. Then come pods that do. Then come pods of several containers, the most expensive calls,
//! by the allowed search steps: half as many as shipped, as many, and twice as many. `make bench ARGS=kinds` runs it
//! alone.

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

/// Containers, GPUs of each, MiB on each GPU, and the MiB that each container asks more than the one before.
const SEVERAL: [(&str, u64, u64, u64, u64); 7] = [
    ("1 container", 1, 1, 9_000, 0),
    ("4 containers", 4, 1, 9_000, 500),
    ("6 of 2 GPUs", 6, 2, 5_000, 300),
    ("8 of 4 GPUs", 8, 4, 4_000, 200),
    ("9 equal ones", 9, 1, 9_000, 0),
    ("4, nowhere", 4, 1, 60_000, 500),
    ("8 of 4, nowhere", 8, 4, 30_000, 200),
];

fn main() {
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    if filter.is_some_and(|filter| !"kinds".contains(&filter)) {
        return;
    }
    rules();
    let steps = Config::default().search_steps;
    for steps in [steps / 2, steps, steps * 2] {
        several(steps);
    }
}

fn rules() {
    const NODES: usize = 1_000;
    /// Calls of each kind; no two requests are equal.
    const CALLS: u64 = 500;
    head(NODES, CALLS, "");
    let (mut plain, names) = cluster(NODES, &json!({}));
    let (mut ruled, _) = cluster(
        NODES,
        &json!({
            names::GPU_ANTI_AFFINITY: "bound", names::NOT_GPU_MODELS: "*A100*", names::GPU_MEM_PERCENTAGE: "1",
        }),
    );
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
    for (key, value) in [
        (names::GPU_MODELS, "*H100*"),
        (names::GPU_UUIDS, &*one),
        (names::GPU_AFFINITY, "new"),
        (names::GPU_ANTI_AFFINITY, "bound"),
        (names::GPU_MEM_PERCENTAGE, "12"),
    ] {
        let calls =
            (0..CALLS).map(|call| ask(&mut ruled, &pod(key, call, &json!({ key: value })), &names));
        row(&format!("with {key}"), calls.collect());
    }
}

fn several(search_steps: u64) {
    const NODES: usize = 5_000;
    /// Calls of each kind; no two requests are equal.
    const CALLS: u64 = 60;
    head(
        NODES,
        CALLS,
        &format!(", {search_steps} search steps a call"),
    );
    let config = Config {
        search_steps,
        ..Config::default()
    };
    let (mut ledger, names) = diverse(NODES, CARDS, config);
    ledger.learn();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    for (kind, containers, gpus, mib, step) in SEVERAL {
        let calls = (0..CALLS).map(|call| {
            let all = (0..containers).map(|index| (mib + call + index * step) * gpus);
            let pod = body(
                &format!("{kind}-{call}"),
                all,
                json!({ names::GPU_COUNT: gpus.to_string() }),
            );
            ask(&mut ledger, &facts(pod), &names)
        });
        row(kind, calls.collect());
    }
}

fn head(nodes: usize, calls: u64, steps: &str) {
    println!(
        "\nFilter on {nodes} nodes of {CARDS} cards, all in different states, nothing remembered{steps};"
    );
    println!("{calls} calls of each kind, µs");
    println!(
        "{:>44} {:>8} {:>8} {:>8} {:>8}",
        "", "p50", "p99", "max", "placed"
    );
}

/// How long one call lasts, and whether it finds a node.
fn ask(ledger: &mut Ledger, pod: &PodFacts, names: &[&str]) -> (Duration, bool) {
    let began = Instant::now();
    let verdict = ledger.filter(&Ask::of(pod), names, NOW);
    let took = began.elapsed();
    ledger.delete_pod(&pod.uid);
    (took, !verdict.nodes.is_empty())
}

fn row(what: &str, calls: Vec<(Duration, bool)>) {
    let placed = calls.iter().filter(|(_, placed)| *placed).count();
    let mut calls: Vec<Duration> = calls.into_iter().map(|(took, _)| took).collect();
    calls.sort_unstable();
    let [p50, p99, max] =
        [50, 99, 100].map(|percent| percentile(&calls, percent).as_secs_f64() * 1e6);
    println!("{what:>44} {p50:>8.1} {p99:>8.1} {max:>8.1} {placed:>8}");
}

/// A ledger in which no two nodes have the same free and each has a pod with these annotations.
fn cluster(nodes: usize, annotations: &Value) -> (Ledger, Vec<String>) {
    let (mut ledger, names) = diverse(nodes, CARDS, Config::default());
    for (index, name) in names.iter().enumerate() {
        let card = uuid(index, 0);
        let mut annotations = annotations.clone();
        annotations[names::ASSIGNMENT] = json!(
            json!({ "version": 1, "gpus": [{ "uuid": card, "mib": 820 }], "containers": { "main": [card] }, "exclusive": false })
                .to_string()
        );
        let mut pod = body(&format!("bound-{index}"), [820], annotations);
        pod["spec"]["nodeName"] = json!(name);
        ledger.apply_pod(facts(pod));
    }
    ledger.learn();
    (ledger, names)
}

/// One whose UID no other kind has: a pod that is gone stays so.
fn pod(kind: &str, call: u64, annotations: &Value) -> PodFacts {
    let name = format!("{kind}-{call}");
    facts(body(&name, [9_000 + call], annotations.clone()))
}

/// A pod with a container for each of these amounts of MiB.
fn body(name: &str, amounts: impl IntoIterator<Item = u64>, annotations: Value) -> Value {
    let containers = amounts.into_iter().enumerate().map(|(index, mib)| {
        let name = if index == 0 {
            "main".to_owned()
        } else {
            format!("c{index}")
        };
        json!({ "name": name, "resources": { "limits": { names::GPU_MEM: mib.to_string() } } })
    });
    json!({
        "metadata": { "uid": name, "name": name, "namespace": "team-a", "annotations": annotations },
        "spec": { "containers": containers.collect::<Vec<_>>() },
        "status": { "phase": "Pending" },
    })
}
