//! Filter for pods of several containers on nodes that are all in different states, with nothing
//! remembered: the most that one call can cost, by the search steps that it may spend: half as many as
//! it does, as many, and twice as many. `make bench ARGS=several` runs it alone.

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

use gpustow_api::PodFacts;
use gpustow_ledger::{Ask, Config};
use load::{CARDS, NOW, diverse, facts, percentile};
use serde_json::json;

const NODES: usize = 5_000;
/// Calls of each kind; no two ask for the same.
const CALLS: u64 = 60;
/// Containers, GPUs of each, MiB on each GPU, and what each container asks beyond the one before.
const KINDS: [(&str, u64, u64, u64, u64); 7] = [
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
    if filter.is_some_and(|filter| !"several".contains(&filter)) {
        return;
    }
    let steps = Config::default().search_steps;
    for steps in [steps / 2, steps, steps * 2] {
        table(steps);
    }
}

fn table(search_steps: u64) {
    println!(
        "\nFilter on {NODES} nodes of {CARDS} cards, all in different states, nothing remembered;"
    );
    println!("{search_steps} search steps a call; {CALLS} calls of each kind, ms");
    println!(
        "{:>16} {:>8} {:>8} {:>8} {:>8}",
        "", "p50", "p99", "max", "placed"
    );
    let config = Config {
        search_steps,
        ..Config::default()
    };
    let (mut ledger, names) = diverse(NODES, CARDS, config);
    ledger.learn();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    for (kind, containers, gpus, mib, step) in KINDS {
        let mut placed = 0;
        let mut calls: Vec<Duration> = (0..CALLS)
            .map(|call| {
                let pod = pod(kind, call, containers, gpus, mib, step);
                let began = Instant::now();
                let verdict = ledger.filter(&Ask::of(&pod), &names, NOW);
                let took = began.elapsed();
                placed += usize::from(!verdict.nodes.is_empty());
                ledger.delete_pod(&pod.uid);
                took
            })
            .collect();
        calls.sort_unstable();
        let ms = |percent| percentile(&calls, percent).as_secs_f64() * 1e3;
        println!(
            "{kind:>16} {:>8.1} {:>8.1} {:>8.1} {placed:>8}",
            ms(50),
            ms(99),
            ms(100)
        );
    }
}

fn pod(kind: &str, call: u64, containers: u64, gpus: u64, mib: u64, step: u64) -> PodFacts {
    let container = |index: u64| {
        let mib = (mib + call + index * step) * gpus;
        json!({
            "name": format!("c{index}"),
            "resources": {"limits": {"gpustow.dev/gpu-mem": mib.to_string()}},
        })
    };
    facts(json!({
        "metadata": {
            "uid": format!("{kind}-{call}"),
            "name": format!("p-{call}"),
            "namespace": "team-a",
            "annotations": {"gpustow.dev/gpu-count": gpus.to_string()},
        },
        "spec": {"containers": (0..containers).map(container).collect::<Vec<_>>()},
        "status": {"phase": "Pending"},
    }))
}
