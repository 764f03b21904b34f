//! How the extender's costs grow with the cluster: the ledger as the watches fill it, without an
//! API server. `make bench ARGS=growth` runs it alone.

#![allow(
    clippy::expect_used,
    reason = "a bench that cannot make its world has to stop"
)]
#![allow(
    dead_code,
    reason = "the module of the load is shared with the other bench"
)]

mod load;

use std::hint::black_box;
use std::time::{Duration, Instant};

use gpustow_api::{Assignment, PodFacts, Shared, names};
use gpustow_ledger::{Config, Ledger};
use gpustow_pack::Mib;
use load::{Pods, bind_anywhere, empty, uuid};

/// Nodes, cards of each, pods bound to them.
const CLUSTERS: [(usize, usize, usize); 9] = [
    (1_000, 8, 10_000),
    (5_000, 8, 10_000),
    (5_000, 8, 50_000),
    (5_000, 8, 100_000),
    (5_000, 16, 50_000),
    (10_000, 8, 100_000),
    (12_500, 8, 125_000),
    (12_500, 8, 200_000),
    (15_000, 8, 150_000),
];
/// Calls of filter and pod events of which times are taken.
const CALLS: usize = 1_000;
const EVENTS: usize = 5_000;
/// Pod events a second for which the share of a core is computed.
const RATES: [f64; 2] = [100.0, 1_000.0];

fn main() {
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    if filter.is_some_and(|filter| !"growth".contains(&filter)) {
        return;
    }
    println!("\nGrowth: filter and bind in the ledger, {CALLS} calls, a deletion between them;");
    println!(
        "a pod event from its JSON to the ledger, and the share of a core that so many a second"
    );
    println!("would take, computed from it; resident memory of the whole bench");
    println!(
        "{:>7} {:>6} {:>8} {:>10} {:>10} {:>10} {:>10} {:>10} {:>11} {:>11}",
        "nodes",
        "cards",
        "pods",
        "p50 µs",
        "p99 µs",
        "learn ms",
        "MiB",
        "event µs",
        "core 100/s",
        "core 1000/s"
    );
    for (nodes, cards, pods) in CLUSTERS {
        row(nodes, cards, pods);
    }
}

fn row(nodes: usize, cards: usize, count: usize) {
    let (mut ledger, names) = empty(nodes, cards, Config::default());
    let mut pods = Pods::new(42);
    let mut shared = Shared::default();
    let mut listed = Vec::new();
    for index in 0..count {
        // Half of the nodes stay empty.
        let (node, card) = (index % (nodes / 2), index / (nodes / 2) % cards);
        let body = bound_pod(&mut pods, &names[node], &uuid(node, card));
        listed.push(read(&body, &mut shared).into());
    }
    ledger.reset_pods(listed, 0);
    let began = Instant::now();
    ledger.learn();
    let learn = began.elapsed().as_secs_f64() * 1e3;
    let memory = resident();

    let candidates: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut last: Option<PodFacts> = None;
    let mut calls: Vec<Duration> = (0..CALLS)
        .map(|_| {
            let pod = pods.facts();
            let began = Instant::now();
            let bound = bind_anywhere(&mut ledger, &pod, &candidates);
            let took = began.elapsed();
            assert!(black_box(bound), "no room for {}", pod.name);
            if let Some(gone) = last.replace(pod) {
                ledger.delete_pod(&gone.uid);
            }
            took
        })
        .collect();
    calls.sort_unstable();
    let micros = |took: &Duration| took.as_secs_f64() * 1e6;
    let event = event(&mut ledger, &mut pods, &names, cards, &mut shared);
    let [few, many] = RATES.map(|rate| rate * event / 1e4);
    println!(
        "{nodes:>7} {cards:>6} {count:>8} {:>10.0} {:>10.0} {learn:>10.1} {memory:>10.0} {event:>10.1} {few:>9.2} % {many:>9.2} %",
        calls.get(CALLS / 2).map_or(f64::NAN, micros),
        calls.get(CALLS * 99 / 100).map_or(f64::NAN, micros),
    );
}

/// Mean time of a pod that appears bound in the watch, in µs.
fn event(
    ledger: &mut Ledger,
    pods: &mut Pods,
    names: &[String],
    cards: usize,
    shared: &mut Shared,
) -> f64 {
    let bodies: Vec<Vec<u8>> = (0..EVENTS)
        .map(|index| {
            let (node, card) = (index * 7 % (names.len() / 2), index % cards);
            bound_pod(pods, &names[node], &uuid(node, card))
        })
        .collect();
    let began = Instant::now();
    for body in &bodies {
        ledger.apply_pod(read(body, shared));
    }
    began.elapsed().as_secs_f64() * 1e6 / EVENTS as f64
}

/// A bound pod of 2 GiB as the API server sends it.
fn bound_pod(pods: &mut Pods, node: &str, uuid: &str) -> Vec<u8> {
    let mut pod = pods.json();
    let assignment = Assignment {
        charges: vec![(uuid.into(), Mib(2_048))],
        containers: vec![("main".into(), vec![uuid.into()])],
        exclusive: None,
        compute: 0,
        instance: None,
    };
    pod["spec"]["nodeName"] = node.into();
    for (key, value) in assignment.annotations("") {
        pod["metadata"]["annotations"][key] = value.into();
    }
    pod["status"] = serde_json::json!({"phase": "Running"});
    pod.to_string().into_bytes()
}

fn read(body: &[u8], shared: &mut Shared) -> PodFacts {
    let pod = serde_json::from_slice(body).expect("a pod");
    let mut pod = PodFacts::from_pod(&pod, names::GPU_MEM).expect("a UID");
    shared.share(&mut pod);
    pod
}

/// MiB of this process.
fn resident() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.map(|line| line.trim().trim_end_matches(" kB").parse::<f64>());
    kib.expect("VmRSS").expect("a number") / 1024.0
}
