//! A seeded cluster and a seeded mix of pods for the benches.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::gpunode::{Gpu, GpuNodeStatus};
use gpustow_api::{NodeFacts, PodFacts};
use gpustow_ledger::{Ask, Config, Ledger, Outcome};
use gpustow_pack::Mib;
use k8s_openapi::api::core::v1::Pod;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};

/// Cards of each node.
pub(crate) const CARDS: usize = 8;
/// MiB of each card.
pub(crate) const CARD_MIB: u64 = 81_920;
/// The requests of pods: MiB over all their GPUs, and the number of GPUs.
const MIX: [(u64, u32); 10] = [
    (2_048, 1),
    (4_096, 1),
    (8_192, 1),
    (10_240, 1),
    (12_288, 1),
    (16_384, 1),
    (20_480, 1),
    (40_960, 1),
    (81_920, 2),
    (163_840, 2),
];

/// Nothing a bench does takes long on this clock.
pub(crate) const NOW: Duration = Duration::from_secs(1);

/// Name of a node.
pub(crate) fn node_name(index: usize) -> String {
    format!("gpu-node-{index:05}.pool-a.example.internal")
}

/// UUID of a node's card.
pub(crate) fn uuid(node: usize, card: usize) -> String {
    format!("GPU-{node:08x}-0000-4000-8000-{card:012x}")
}

/// The report of a node's agent.
pub(crate) fn gpunode(node: usize, cards: usize) -> GpuNodeStatus {
    let gpus = (0..cards).map(|card| Gpu {
        uuid: uuid(node, card),
        index: u32::try_from(card).unwrap_or(u32::MAX),
        model: "NVIDIA H100 80GB HBM3".to_owned(),
        total_mib: CARD_MIB,
        healthy: true,
        ..Gpu::default()
    });
    GpuNodeStatus {
        gpus: gpus.collect(),
        ..GpuNodeStatus::default()
    }
}

/// Pods without end, drawn from the mix.
pub(crate) struct Pods {
    rng: SmallRng,
    next: u64,
    /// No two requests are equal.
    unique: bool,
}

impl Pods {
    /// The same pods for the same seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            rng: SmallRng::seed_from_u64(seed),
            next: 0,
            unique: false,
        }
    }

    /// From here on no two pods have equal requests.
    pub(crate) fn make_unique(&mut self) {
        self.unique = true;
    }

    /// The next pod as kube-scheduler sends it.
    pub(crate) fn json(&mut self) -> Value {
        let (mib, gpus) = MIX
            .get(self.rng.random_range(0..MIX.len()))
            .copied()
            .unwrap_or((1, 1));
        let cpu = [500, 1_000, 2_000, 4_000]
            .get(self.rng.random_range(0..4_usize))
            .map_or(500, |cpu| cpu + u64::from(self.unique) * self.next);
        self.next += 1;
        json!({
            "metadata": {
                "uid": format!("{:08x}-0000-4000-8000-000000000000", self.next),
                "name": format!("model-server-{}", self.next),
                "namespace": "team-a",
                "resourceVersion": self.next.to_string(),
                "creationTimestamp": "2026-11-21T08:00:00Z",
                "labels": {"app": "model-server"},
                "annotations": {"gpustow.dev/gpu-count": gpus.to_string()},
            },
            "spec": {
                "schedulerName": "gpustow-scheduler",
                "containers": [{
                    "name": "main",
                    "image": "registry.example/model-server:1",
                    "resources": {
                        "limits": {"gpustow.dev/gpu-mem": mib.to_string()},
                        "requests": {
                            "gpustow.dev/gpu-mem": mib.to_string(),
                            "cpu": format!("{cpu}m"),
                            "memory": "8Gi",
                        },
                    },
                }],
            },
            "status": {"phase": "Pending"},
        })
    }

    /// The next pod, read.
    pub(crate) fn facts(&mut self) -> PodFacts {
        facts(self.json())
    }
}

/// The order in which kube-scheduler names the nodes: of its list, which stays as it is, two workers take pieces of √n
/// nodes. They append the nodes that pass, now one, now the other.
pub(crate) struct Order {
    rng: SmallRng,
    list: Vec<usize>,
}

impl Order {
    pub(crate) fn new(nodes: usize) -> Self {
        let mut rng = SmallRng::seed_from_u64(7);
        let mut list: Vec<usize> = (0..nodes).collect();
        for last in (1..nodes).rev() {
            list.swap(last, rng.random_range(0..=last));
        }
        Self { rng, list }
    }

    /// The next call begins so many nodes later, where kube-scheduler stopped.
    pub(crate) fn pass(&mut self, nodes: usize) {
        self.list.rotate_left(nodes);
    }

    pub(crate) fn next(&mut self) -> Vec<usize> {
        let mut pieces = self.list.chunks(self.list.len().isqrt() + 1);
        let mut next = || pieces.next().unwrap_or_default().iter();
        let mut workers = [next(), next()];
        let mut order = Vec::with_capacity(self.list.len());
        let mut turn = 0;
        while order.len() < self.list.len() {
            // They take turns seldom enough for 3 of 5 nodes to follow the one that they followed before, as seen.
            if self.rng.random_range(0..4) == 0 {
                turn = 1 - turn;
            }
            match workers[turn].next() {
                Some(&node) => order.push(node),
                None => {
                    workers[turn] = next();
                    turn = 1 - turn;
                }
            }
        }
        order
    }
}

/// A pod's facts.
pub(crate) fn facts(pod: Value) -> PodFacts {
    let pod: Pod = serde_json::from_value(pod).expect("a pod");
    PodFacts::from_pod(&pod, gpustow_api::names::GPU_MEM).expect("a UID")
}

/// A ledger of `nodes` nodes without pods of which no two have the same free, and the names of the nodes.
pub(crate) fn diverse(nodes: usize, cards: usize, config: Config) -> (Ledger, Vec<String>) {
    let (mut ledger, names) = empty(nodes, cards, config);
    let mut rng = SmallRng::seed_from_u64(11);
    for (index, name) in names.iter().enumerate() {
        let mut report = gpunode(index, cards);
        for gpu in &mut report.gpus {
            gpu.unmanaged_mib = rng.random_range(0..60_000);
        }
        ledger.apply_gpunode(name, report, NOW);
    }
    (ledger, names)
}

/// The time that so many percent of the calls took at most; the calls in ascending order.
pub(crate) fn percentile(calls: &[Duration], percent: usize) -> Duration {
    let last = calls.len().saturating_sub(1);
    calls.get(last * percent / 100).copied().unwrap_or_default()
}

/// A ledger of `nodes` nodes without pods, and the names of the nodes.
pub(crate) fn empty(nodes: usize, cards: usize, config: Config) -> (Ledger, Vec<String>) {
    let mut ledger = Ledger::new(config);
    let names: Vec<String> = (0..nodes).map(node_name).collect();
    for (index, name) in names.iter().enumerate() {
        ledger.apply_node(NodeFacts {
            name: name.as_str().into(),
            cpu_milli: 192_000,
            ram: Mib(1 << 20).into(),
            ..NodeFacts::default()
        });
        ledger.apply_gpunode(name, gpunode(index, cards), NOW);
    }
    (ledger, names)
}

/// A ledger of `nodes` nodes with half of all cards in use, and the names of the nodes.
pub(crate) fn half_full(
    nodes: usize,
    pods: &mut Pods,
) -> (Ledger, Vec<String>, Vec<Arc<PodFacts>>) {
    let (mut ledger, names) = empty(nodes, CARDS, Config::default());
    // Packed in name order, so that half of the nodes, and so half of the cards, stay empty.
    let mut bound = Vec::new();
    let mut node = 0;
    while let Some(name) = names.get(node).filter(|_| node < nodes / 2) {
        let pod = pods.facts();
        match bind(&mut ledger, &pod, name) {
            true => bound.push(Arc::new(pod)),
            false => node += 1,
        }
    }
    (ledger, names, bound)
}

/// Takes a pod through filter and bind on one node.
pub(crate) fn bind(ledger: &mut Ledger, pod: &PodFacts, node: &str) -> bool {
    bind_anywhere(ledger, pod, &[node])
}

/// Takes a pod through filter among these nodes, and bind.
pub(crate) fn bind_anywhere(ledger: &mut Ledger, pod: &PodFacts, nodes: &[&str]) -> bool {
    let chosen = ledger.filter(&Ask::of(pod), nodes, NOW).nodes;
    chosen.first().is_some_and(|node| settle(ledger, pod, node))
}

/// Binds a pod that has its reservation.
pub(crate) fn settle(ledger: &mut Ledger, pod: &PodFacts, node: &str) -> bool {
    let bound = ledger.begin_bind(pod, node, NOW).is_ok();
    if bound {
        ledger.end_bind(pod, Outcome::Bound, NOW);
    }
    bound
}
