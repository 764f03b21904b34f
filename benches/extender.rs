//! The cost of the extender's part of a scheduling cycle, without a cluster. `make bench` runs it.
//!
//! Criterion gives means with their spread; the p50 and p99 of `/filter`, which kube-scheduler
//! waits for in its single loop, are printed after it from every single call.

#![allow(
    clippy::expect_used,
    reason = "a bench that cannot make its world has to stop"
)]
#![allow(
    dead_code,
    reason = "the module of the load is shared with the other benches"
)]

mod load;

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BatchSize, Criterion, Throughput};
use gpustow_api::PodFacts;
use gpustow_ledger::{Ask, Ledger};
use load::{NOW, Order, Pods, facts, half_full, settle};
use serde_json::{Value, json};

use gpustow::wire::{ExtenderArgs, ExtenderFilterResult};

/// Cluster sizes in nodes of 8 cards.
const SIZES: [usize; 3] = [100, 1_000, 5_000];
/// Answers looked up ahead between two calls: for 10 ms or so, less than kube-scheduler takes for a
/// pod where there are thousands of nodes.
const AHEAD: usize = 10_000;
/// Of so many nodes one is named, in calls that name a part.
const SAMPLE: usize = 10;
/// Calls whose quantiles are printed.
const CALLS: usize = 2_000;

fn main() {
    let mut criterion = Criterion::default().configure_from_args().sample_size(20);
    filter(&mut criterion);
    settling(&mut criterion);
    watch(&mut criterion);
    criterion.final_summary();
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    if filter.is_none_or(|filter| filter.starts_with("filter")) {
        quantiles();
    }
}

fn quantiles() {
    println!(
        "\n/filter on the server's side, {CALLS} calls, the view changing between them; µs, p50 / p99 / max"
    );
    println!(
        "{:>8} {:>22} {:>22} {:>22}",
        "nodes", "decision", "decode and encode", "body to body"
    );
    for (nodes, kind) in SIZES.into_iter().flat_map(|size| {
        [Kind::Usual, Kind::Sample, Kind::Unwarmed, Kind::Unique].map(|kind| (size, kind))
    }) {
        let mut world = World::new(nodes);
        match kind {
            Kind::Usual => {}
            Kind::Sample => world.named = nodes.div_ceil(SAMPLE),
            Kind::Unwarmed => world.ahead = None,
            Kind::Unique => world.pods.make_unique(),
        }
        let took: Vec<Took> = (0..CALLS).map(|_| world.call()).collect();
        let of = |part: fn(&Took) -> Duration| {
            let mut took: Vec<Duration> = took.iter().map(part).collect();
            took.sort_unstable();
            let at = |index: usize| took.get(index).map_or(f64::NAN, |t| t.as_secs_f64() * 1e6);
            let [p50, p99, max] = [CALLS / 2, CALLS * 99 / 100, CALLS - 1].map(at);
            format!("{p50:.0} / {p99:.0} / {max:.0}")
        };
        let note = match kind {
            Kind::Usual => "",
            Kind::Sample => "  a tenth of the nodes is named",
            Kind::Unwarmed => "  nothing looked up ahead",
            Kind::Unique => "  each pod with a request that no pod had before",
        };
        println!(
            "{nodes:>8} {:>22} {:>22} {:>22}{note}",
            of(|took| took.decision),
            of(|took| took.wire),
            of(|took| took.decision + took.wire),
        );
    }
}

/// Which calls are timed.
#[derive(Clone, Copy)]
enum Kind {
    Usual,
    /// As kube-scheduler asks by default where there are 5,000 nodes and most would do.
    Sample,
    Unwarmed,
    Unique,
}

/// The time of one call of `/filter`.
struct Took {
    decision: Duration,
    /// Decoding the call and encoding the answer.
    wire: Duration,
}

/// A cluster that is half full and stays so: every call binds a pod, and the oldest one ends.
struct World {
    ledger: Ledger,
    names: Vec<String>,
    /// So many nodes are named in a call.
    named: usize,
    order: Order,
    bound: std::collections::VecDeque<std::sync::Arc<PodFacts>>,
    pods: Pods,
    /// Answers looked up ahead between two calls, if any.
    ahead: Option<usize>,
}

impl World {
    fn new(nodes: usize) -> Self {
        let mut pods = Pods::new(42);
        let (ledger, names, bound) = half_full(nodes, &mut pods);
        Self {
            ledger,
            named: nodes,
            order: Order::new(nodes),
            names,
            bound: bound.into(),
            pods,
            ahead: Some(AHEAD),
        }
    }

    fn body(&mut self) -> (Value, Vec<u8>) {
        let pod = self.pods.json();
        let names: Vec<&str> = self
            .order
            .next()
            .iter()
            .take(self.named)
            .map(|&at| &*self.names[at])
            .collect();
        self.order.pass(self.named);
        let body = json!({"Pod": pod, "Nodes": null, "NodeNames": names});
        (pod, body.to_string().into_bytes())
    }

    /// One call of `/filter`, then the view changes. Only the call is timed.
    fn call(&mut self) -> Took {
        let (pod, body) = self.body();
        // The watch shows the pod first, and the extender computes as much as it can ahead.
        self.ledger.apply_pod(facts(pod.clone()));
        if let Some(ahead) = self.ahead {
            self.ledger.warm(ahead);
        }
        let (chosen, took) = answer(&mut self.ledger, &body);
        if let Some(node) = chosen {
            let pod = facts(pod);
            settle(&mut self.ledger, &pod, &node);
            self.bound.push_back(pod.into());
        }
        if let Some(oldest) = self.bound.pop_front() {
            self.ledger.delete_pod(&oldest.uid);
        }
        took
    }
}

/// The work of the route between two reads of the socket.
fn answer(ledger: &mut Ledger, body: &[u8]) -> (Option<String>, Took) {
    let began = Instant::now();
    let body = std::str::from_utf8(body).expect("UTF-8");
    let args: ExtenderArgs<'_> = serde_json::from_str(body).expect("a call of /filter");
    let pod = PodFacts::from_pod(&args.pod, gpustow_api::names::GPU_MEM).expect("a UID");
    let names = args.node_names.unwrap_or_default();
    let names: Vec<&str> = names.iter().map(|name| &*name.0).collect();
    let decoded = began.elapsed();
    let verdict = ledger.filter(&Ask::of(&pod), &names, NOW);
    let decided = began.elapsed();
    let chosen = verdict.nodes.first().map(|name| (*name).to_owned());
    let refused = verdict.refused.iter().filter(|_| verdict.nodes.is_empty());
    let answer = ExtenderFilterResult {
        failed_and_unresolvable_nodes: refused.map(|(n, reason)| (*n, reason.text())).collect(),
        node_names: Some(verdict.nodes.clone()),
        ..ExtenderFilterResult::default()
    };
    black_box(serde_json::to_vec(&answer).expect("JSON"));
    let decision = decided - decoded;
    let took = Took {
        decision,
        wire: began.elapsed() - decision,
    };
    (chosen, took)
}

fn filter(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("filter");
    for nodes in SIZES {
        let mut world = World::new(nodes);
        group.throughput(Throughput::Elements(nodes as u64));
        group.bench_function(format!("{nodes}_nodes"), |bencher| {
            bencher.iter_custom(|calls| {
                let took = (0..calls).map(|_| world.call());
                took.map(|took| took.decision + took.wire).sum()
            });
        });
    }
    group.finish();
}

fn settling(criterion: &mut Criterion) {
    let mut world = World::new(1_000);
    criterion.bench_function("reserve_and_settle", |bencher| {
        bencher.iter_custom(|count| {
            let mut took = Duration::ZERO;
            for _ in 0..count {
                let pod = world.pods.facts();
                let node = world.names[world.names.len() - 1].clone();
                let began = Instant::now();
                black_box(load::bind(&mut world.ledger, &pod, &node));
                took += began.elapsed();
                world.ledger.delete_pod(&pod.uid);
            }
            took
        });
    });
}

fn watch(criterion: &mut Criterion) {
    let mut world = World::new(5_000);
    let busy: Vec<PodFacts> = world.bound.iter().map(|pod| PodFacts::clone(pod)).collect();
    let known = |ledger: &Ledger, pod: &PodFacts| ledger.pod(&pod.uid).map(|pod| (*pod).clone());
    let busy: Vec<_> = busy
        .iter()
        .filter_map(|pod| known(&world.ledger, pod))
        .collect();
    let mut next = busy.iter().cycle();
    criterion.bench_function("apply_pod_event", |bencher| {
        bencher.iter_batched(
            || next.next().expect("bound pods").clone(),
            |pod| world.ledger.apply_pod(pod),
            BatchSize::SmallInput,
        );
    });
}
