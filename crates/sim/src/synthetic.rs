//! A cluster and a pod list that are the same everywhere, for users without a trace and for tests.

use crate::random::Random;
use crate::trace::{TraceNode, TracePod};

/// Nodes of the list that tests and the benchmark use.
pub const NODES: usize = 48;
/// Its pods.
pub const PODS: usize = 700;

/// Nodes of three kinds in turn: 8 cards, 2 cards, 4 cards.
#[must_use]
pub fn nodes(count: usize) -> Vec<TraceNode> {
    let kinds = [("G2", 8, 96_000), ("T4", 2, 64_000), ("V100M32", 4, 48_000)];
    let node = |index: usize| {
        let (model, gpus, cpu_milli) = kinds[index % kinds.len()];
        TraceNode {
            name: format!("node-{index:02}"),
            cpu_milli,
            ram_mib: 400_000,
            gpus,
            model: model.to_owned(),
        }
    };
    (0..count).map(node).collect()
}

/// Pods: shares of six sizes, whole cards, some of several, some bound to a model, some without.
#[must_use]
pub fn pods() -> Vec<TracePod> {
    let mut random = Random::new(7);
    let pod = |index| {
        let (gpus, gpu_milli) = match random.below(20) {
            0..2 => (0, 0),
            2..8 => (1, [110, 230, 320, 470, 650, 810][random.below(6)]),
            8..19 => (1, 1000),
            _ => ([2, 4, 8][random.below(3)], 1000),
        };
        let bound = gpus == 1 && random.below(10) == 0;
        TracePod {
            name: format!("pod-{index:03}"),
            cpu_milli: [2000, 6000, 12_000][random.below(3)] * gpus.max(1) as u64,
            ram_mib: 8192,
            gpus,
            gpu_milli,
            models: if bound {
                vec!["T4".to_owned()]
            } else {
                Vec::new()
            },
            lived: None,
        }
    };
    (0..PODS).map(pod).collect()
}
