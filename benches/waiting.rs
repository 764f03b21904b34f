//! The cost of waking: computing under the lock, wake-ups without result, memory. `make bench ARGS=waiting` runs it
//! alone; copied into an older checkout it measures that one.

#![allow(
    clippy::expect_used,
    reason = "a bench that cannot make its world has to stop"
)]

use std::time::{Duration, Instant};

use gpustow_api::gpunode::{Gpu, GpuNodeStatus};
use gpustow_api::{NodeFacts, PodFacts, names};
use gpustow_ledger::{Config, Ledger};
use serde_json::json;

/// A card's MiB.
const CARD: u64 = 40_960;
/// The extender's pauses between two calls: when there is more to wake, and when not.
const PAUSE: Duration = Duration::from_millis(20);
const IDLE: Duration = Duration::from_millis(500);
/// Pods woken in one call at most, as by the default of `--wake-rate`.
const LIMIT: usize = 10;
/// A measurement is given up after so much computing.
const PATIENCE: Duration = Duration::from_secs(60);
const RUNS: usize = 3;

fn main() {
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    if filter.is_some_and(|filter| !"waiting".contains(&filter)) {
        return;
    }
    println!("\nMemory: 5,000 nodes × 8 cards that come to differ, waiting pods that all differ");
    for kinds in [500, 4_000] {
        println!("{kinds:>7} kinds: {:>6.0} MiB more", memory(kinds));
    }
    println!(
        "\nRoom on one of 2,000 nodes, 8 MiB more on each of the others; pods that all differ"
    );
    for kinds in [1_000, 10_000] {
        let runs = [(); RUNS].map(|()| until_woken(kinds));
        for (what, number) in [("until woken", 0), ("longest call", 1)] {
            let mut times = runs.map(|run| [run.0, run.1][number]);
            times.sort_unstable();
            let [least, median, most] = times.map(|it| it.as_secs_f64() * 1e3);
            println!("{kinds:>7} kinds: {what} {median:.1} ms ({least:.1} to {most:.1})");
        }
    }
    println!("\nRoom on 200 nodes that no pod comes for, ten minutes of virtual time");
    for (waiting, cpu) in [
        (10_000, false),
        (30_000, false),
        (10_000, true),
        (30_000, true),
    ] {
        let (woken, minutes, computed, longest) = without_result(waiting, cpu);
        let why = if cpu {
            "something unknown"
        } else {
            "no CPU there"
        };
        println!(
            "{waiting:>7} pods, {why}: {:.1} wake-ups/s in {minutes:.1} min, {:.2} s computed, longest call {:.1} ms",
            woken as f64 / minutes / 60.0,
            computed.as_secs_f64(),
            longest.as_secs_f64() * 1e3
        );
    }
}

/// A ledger of nodes with so many cards each, on which strangers leave `free` MiB.
fn cluster(nodes: usize, cards: usize, cpu: bool, free: u64) -> Ledger {
    let mut ledger = Ledger::new(Config::default());
    for node in 0..nodes {
        let object = json!({
            "metadata": {"name": name(node)},
            "status": {"allocatable": {"cpu": if cpu { "64" } else { "0" }, "memory": "1Ti"}},
        });
        let object = serde_json::from_value(object).expect("a node");
        ledger.apply_node(NodeFacts::from_node(&object));
        report(&mut ledger, node, cards, free, Duration::ZERO);
    }
    ledger
}

fn name(node: usize) -> String {
    format!("node-{node}")
}

fn report(ledger: &mut Ledger, node: usize, cards: usize, free: u64, now: Duration) {
    let card = |card| Gpu {
        uuid: format!("GPU-{node}-{card}"),
        total_mib: CARD,
        unmanaged_mib: CARD - free,
        healthy: true,
        ..Gpu::default()
    };
    let status = GpuNodeStatus {
        gpus: (0..cards).map(card).collect(),
        ..GpuNodeStatus::default()
    };
    ledger.apply_gpunode(&name(node), status, now);
}

/// A pod that kube-scheduler has refused; of the kind that its RAM makes it.
fn waiting(number: usize, kind: usize, mib: u64) -> PodFacts {
    let resources = json!({"requests": {"cpu": "1", "memory": format!("{}Mi", 1 + kind)}, "limits": {names::GPU_MEM: mib.to_string()}});
    let pod = json!({
        "metadata": {
            "uid": format!("uid-{number}"), "name": format!("pod-{number}"), "namespace": "default",
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {
            "schedulerName": names::SCHEDULER,
            "containers": [{"name": "main", "resources": resources}],
        },
        "status": {"conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"},
        ]},
    });
    let pod = serde_json::from_value(pod).expect("a pod");
    PodFacts::from_pod(&pod, names::GPU_MEM).expect("a UID")
}

/// MiB that so many kinds of waiting pods take.
fn memory(kinds: usize) -> f64 {
    let mut ledger = cluster(5_000, 8, true, 0);
    let before = resident();
    for kind in 0..kinds {
        ledger.apply_pod(waiting(kind, kind, 1_000));
    }
    for node in 0..5_000 {
        report(&mut ledger, node, 8, 1 + node as u64 % 900, Duration::ZERO);
        if node % 100 == 0 {
            ledger.warm(1_000);
        }
    }
    for _ in 0..20 {
        ledger.warm(1_000);
    }
    resident() - before
}

/// Computing until the first pod is woken, and the longest call.
fn until_woken(kinds: usize) -> (Duration, Duration) {
    let mut ledger = cluster(2_000, 8, true, 0);
    for kind in 0..kinds {
        ledger.apply_pod(waiting(kind, kind, 1_000 + kind as u64 % 30_000));
    }
    // The pods that wait already are looked at before the measurement.
    let now = Duration::from_secs(60);
    let began = Instant::now();
    for step in 0..600 {
        ledger.wake(LIMIT, now - PAUSE * (600 - step));
        if began.elapsed() > PATIENCE {
            break;
        }
    }
    for node in 0..2_000 {
        report(
            &mut ledger,
            node,
            8,
            if node == 1_999 { CARD } else { 8 },
            now,
        );
    }
    let (mut computed, mut longest) = (Duration::ZERO, Duration::ZERO);
    for step in 1.. {
        let began = Instant::now();
        let woken = ledger.wake(LIMIT, now + PAUSE * step);
        let took = began.elapsed();
        computed += took;
        longest = longest.max(took);
        if !woken.is_empty() || computed > PATIENCE {
            break;
        }
    }
    (computed, longest)
}

/// Wake-ups, virtual minutes, computing and the longest call.
fn without_result(pods: usize, cpu: bool) -> (usize, f64, Duration, Duration) {
    let mut ledger = cluster(200, 8, cpu, 0);
    for number in 0..pods {
        ledger.apply_pod(waiting(number, number % 50, 1_000 + number as u64 % 50));
    }
    for node in 0..200 {
        report(&mut ledger, node, 8, CARD, Duration::from_secs(1));
    }
    let (mut now, mut woken) = (Duration::from_secs(1), 0);
    let (mut computed, mut longest) = (Duration::ZERO, Duration::ZERO);
    let mut beat = now;
    while now < Duration::from_secs(601) && computed < PATIENCE {
        if now > beat + Duration::from_secs(60) {
            beat = now;
            // A heartbeat, or the report would be stale.
            for node in 0..200 {
                report(&mut ledger, node, 8, CARD - now.as_secs() / 60, now);
            }
        }
        let began = Instant::now();
        let count = ledger.wake(LIMIT, now).len();
        let took = began.elapsed();
        (computed, longest) = (computed + took, longest.max(took));
        woken += count;
        now += if count == LIMIT { PAUSE } else { IDLE };
    }
    (woken, now.as_secs_f64() / 60.0, computed, longest)
}

/// MiB of this process.
fn resident() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.map(|line| line.trim().trim_end_matches(" kB").parse::<f64>());
    kib.expect("VmRSS").expect("a number") / 1024.0
}
