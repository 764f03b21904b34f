//! The events of the demo, drawn from a seed: the nodes with their cards, and each pod's arrival and run time. Time is
//! virtual.

use std::time::Duration;

use clap::ValueEnum;
use gpustow_api::names;
use gpustow_sim::trace::TracePod;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};

use super::openb;

/// Virtual time from the first pod to the end.
pub(crate) const SPAN: Duration = Duration::from_secs(12 * 3600);
/// The cluster fills during this part of it.
pub(crate) const RAMP: Duration = Duration::from_secs(2 * 3600);
/// Part of the pods that come while it fills.
const RAMP_PODS: f64 = 0.35;
/// Σ MiB × run time of the pods ÷ Σ MiB × time of the cards: more than fits.
pub(crate) const LOAD: f64 = 1.05;
/// Steps to the run times that make that load.
const STEPS: usize = 32;
/// Namespace of the pods.
pub(crate) const NAMESPACE: &str = "demo";
/// The node label that notebooks prefer a value of.
const ZONE: &str = "topology.kubernetes.io/zone";

/// The hardware of a node.
#[derive(Clone, Copy)]
struct Hardware {
    cores: u32,
    /// Of host memory.
    gib: u32,
    /// Model and MiB of each.
    cards: &'static [(&'static str, u64)],
}

/// In turn.
const NODES: [Hardware; 3] = [
    Hardware {
        cores: 128,
        gib: 1024,
        cards: &[("H100 80 GiB", 81_920); 8],
    },
    Hardware {
        cores: 48,
        gib: 256,
        cards: &[("L4 24 GiB", 24_576); 4],
    },
    Hardware {
        cores: 64,
        gib: 384,
        cards: &[
            ("L40S 48 GiB", 49_152),
            ("L40S 48 GiB", 49_152),
            ("T4 16 GiB", 16_384),
            ("T4 16 GiB", 16_384),
        ],
    },
];

/// A kind of pod.
struct Kind {
    name: &'static str,
    /// Of how many in a hundred.
    share: u32,
    /// GiB per card, both ends included.
    gib: (u64, u64),
    gpus: usize,
    exclusive: bool,
    /// States a preference among nodes, so that /prioritize decides.
    prefers: bool,
    priority: i32,
}

const fn kind(name: &'static str, share: u32, gib: (u64, u64), gpus: usize) -> Kind {
    Kind {
        name,
        share,
        gib,
        gpus,
        exclusive: false,
        prefers: false,
        priority: 0,
    }
}

/// Which pods come, and to which nodes.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub(crate) enum Mix {
    /// Most pods need a part of a GPU; nodes have GPUs of 16 to 80 GiB
    #[default]
    Small,
    /// Most pods need most of a GPU, and some 8 GPUs; all nodes have 8 GPUs of 80 GiB
    Large,
    /// Pods of a list of Alibaba's openb trace, by --openb; all nodes have 8 GPUs of 80 GiB
    Openb,
}

impl Mix {
    fn nodes(self, count: usize) -> impl Iterator<Item = &'static Hardware> {
        let different = match self {
            Self::Small => NODES.len(),
            Self::Large | Self::Openb => 1,
        };
        NODES.iter().take(different).cycle().take(count)
    }
}

const LARGE: [Kind; 5] = [
    kind("chat", 25, (16, 36), 1),
    kind("llm", 35, (44, 76), 1),
    kind("serve", 20, (60, 76), 2),
    kind("tune", 12, (64, 76), 4),
    Kind {
        exclusive: true,
        ..kind("pretrain", 8, (70, 80), 8)
    },
];

const KINDS: [Kind; 7] = [
    kind("embed", 22, (3, 6), 1),
    kind("chat", 26, (10, 16), 1),
    kind("vision", 14, (18, 24), 1),
    kind("llm", 14, (36, 46), 1),
    kind("train", 8, (20, 40), 2),
    Kind {
        prefers: true,
        ..kind("notebook", 12, (4, 8), 1)
    },
    Kind {
        exclusive: true,
        priority: 10,
        ..kind("batch", 4, (64, 80), 1)
    },
];

/// One pod to come.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Arrival {
    pub(crate) name: String,
    /// When it is created.
    pub(crate) at: Duration,
    /// From bound to gone.
    pub(crate) runs_for: Duration,
    /// GPUs that it needs, and MiB of each.
    pub(crate) gpus: usize,
    pub(crate) mib: u64,
    pub(crate) priority: i32,
    /// The Pod as a user writes it.
    pub(crate) pod: Value,
}

/// A node to schedule on.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Host {
    /// The Node as its kubelet writes it.
    pub(crate) node: Value,
    /// Model and MiB of each.
    pub(crate) gpus: &'static [(&'static str, u64)],
}

/// Nodes and pods.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Workload {
    pub(crate) nodes: Vec<Host>,
    /// In the order in which they come.
    pub(crate) pods: Vec<Arrival>,
    /// Cards of all nodes.
    pub(crate) gpus: usize,
    /// A one-line description of the GPUs and the pods.
    pub(crate) description: String,
}

impl Workload {
    /// A workload that depends on the arguments alone. `trace` has the pods of [`Mix::Openb`].
    pub(crate) fn new(mix: Mix, trace: &[TracePod], seed: u64, nodes: usize, pods: usize) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let hardware = || mix.nodes(nodes);
        let cards = || hardware().flat_map(|node| node.cards);
        let capacity: u64 = cards().map(|(_, mib)| mib).sum();
        let (drawn, description) = match mix {
            Mix::Small => draw(&KINDS, &mut random, pods),
            Mix::Large => draw(&LARGE, &mut random, pods),
            Mix::Openb => openb::draw(trace, &mut random, pods),
        };
        Self {
            nodes: hardware().enumerate().map(|(n, it)| node(n, *it)).collect(),
            pods: lengthen(drawn, capacity as f64),
            gpus: cards().count(),
            description: format!("GPUs: {}. Pods: {description}", models(cards())),
        }
    }
}

/// Pods with their MiB, and a description of them in words.
pub(crate) type Drawn = (Vec<(Arrival, f64)>, String);

/// Scales the run times of pods to the load. None becomes longer than the span.
fn lengthen(mut drawn: Vec<(Arrival, f64)>, capacity: f64) -> Vec<Arrival> {
    let span = SPAN.as_secs_f64();
    let run = |pod: &Arrival, factor: f64| (pod.runs_for.as_secs_f64() * factor).min(span);
    let mut factor = 1.0;
    // Run times that the span bounds take from the load, so that each step gets closer to it.
    for _ in 0..STEPS {
        let demand = drawn.iter().map(|(pod, mib)| run(pod, factor) * mib);
        factor *= span * LOAD * capacity / demand.sum::<f64>();
    }
    for (pod, _) in &mut drawn {
        pod.runs_for = Duration::from_secs_f64(run(pod, factor));
    }
    drawn.into_iter().map(|(pod, _)| pod).collect()
}

/// Pods of these kinds.
fn draw(kinds: &'static [Kind], random: &mut StdRng, pods: usize) -> Drawn {
    let mut times: Vec<Duration> = (0..pods)
        .map(|_| match random.random_bool(RAMP_PODS) {
            true => RAMP.mul_f64(random.random()),
            false => RAMP + (SPAN - RAMP).mul_f64(random.random()),
        })
        .collect();
    times.sort_unstable();
    let times = times.into_iter().zip(0..);
    let drawn = times.map(|(at, number)| arrival(kinds, random, number, at));
    (drawn.collect(), describe(kinds))
}

/// The number of GPUs of each model.
fn models(cards: impl Iterator<Item = &'static (&'static str, u64)>) -> String {
    let mut gpus: Vec<(usize, &str)> = Vec::new();
    for (model, _) in cards {
        match gpus.iter_mut().find(|(_, known)| known == model) {
            Some((count, _)) => *count += 1,
            None => gpus.push((1, model)),
        }
    }
    let gpus = gpus.iter().map(|(count, model)| format!("{count} {model}"));
    gpus.collect::<Vec<_>>().join(", ")
}

fn describe(kinds: &[Kind]) -> String {
    let pods = kinds.iter().map(|kind| {
        let (gpus, (least, most)) = (kind.gpus, kind.gib);
        let several = (gpus > 1).then(|| format!("{gpus} × "));
        let gpus = several.unwrap_or_default();
        format!("{} % {} {gpus}{least} to {most} GiB", kind.share, kind.name)
    });
    pods.collect::<Vec<_>>().join(", ") + "."
}

/// A pod, and the MiB that it holds.
fn arrival(
    kinds: &'static [Kind],
    random: &mut StdRng,
    number: usize,
    at: Duration,
) -> (Arrival, f64) {
    let mut draw = random.random_range(0..kinds.iter().map(|kind| kind.share).sum());
    let kind = kinds.iter().find(|kind| {
        let found = draw < kind.share;
        draw = draw.saturating_sub(kind.share);
        found
    });
    let kind = kind.unwrap_or(&KINDS[0]);
    let gib = random.random_range(kind.gib.0..=kind.gib.1);
    let mib = gib * 1024 * kind.gpus as u64;
    let name = format!("{}-{number:03}", kind.name);
    let mut pod = pod(&name, kind.gpus, mib, kind.priority);
    if kind.exclusive {
        pod["metadata"]["annotations"][names::EXCLUSIVE] = "true".into();
    }
    if kind.prefers {
        let zone = if random.random() { "a" } else { "b" };
        let term = json!({"key": ZONE, "operator": "In", "values": [zone]});
        let term = json!({"weight": 1, "preference": {"matchExpressions": [term]}});
        let soft = "preferredDuringSchedulingIgnoredDuringExecution";
        pod["spec"]["affinity"] = json!({"nodeAffinity": {soft: [term]}});
    }
    let unit: f64 = random.random();
    let arrival = Arrival {
        name,
        at,
        // Exponential, without its tails.
        runs_for: Duration::from_secs_f64((-(1.0 - unit).ln()).clamp(0.1, 3.0)),
        gpus: kind.gpus,
        mib: gib * 1024,
        priority: kind.priority,
        pod,
    };
    let held = if kind.exclusive {
        81_920 * kind.gpus as u64
    } else {
        mib
    };
    (arrival, held as f64)
}

/// The Pod as a user writes it, with so many MiB in all.
pub(crate) fn pod(name: &str, gpus: usize, mib: u64, priority: i32) -> Value {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "annotations": {}},
        "spec": {
            "schedulerName": names::SCHEDULER,
            "priority": priority,
            "containers": [{
                "name": "main",
                "resources": {
                    "requests": {"cpu": "2", "memory": "8Gi"},
                    "limits": {names::GPU_MEM: mib.to_string()},
                },
            }],
        },
    });
    if gpus > 1 {
        pod["metadata"]["annotations"][names::GPU_COUNT] = gpus.to_string().into();
    }
    pod
}

fn node(number: usize, Hardware { cores, gib, cards }: Hardware) -> Host {
    let zone = if number.is_multiple_of(2) { "a" } else { "b" };
    let node = json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": format!("node-{number}"), "labels": {ZONE: zone}},
        "status": {"allocatable": {
            "cpu": cores.to_string(), "memory": format!("{gib}Gi"), "pods": "110",
        }},
    });
    Host { node, gpus: cards }
}

/// True if the pod prefers the zone that the node is in.
pub(crate) fn prefers(pod: &Value, node: &Value) -> bool {
    let wanted = pod.pointer(
        "/spec/affinity/nodeAffinity/preferredDuringSchedulingIgnoredDuringExecution/0\
         /preference/matchExpressions/0/values/0",
    );
    let labels = node.pointer("/metadata/labels");
    wanted.is_some() && labels.and_then(|labels| labels.get(ZONE)) == wanted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_workload() {
        let one = Workload::new(Mix::Small, &[], 7, 6, 50);
        assert_eq!(one, Workload::new(Mix::Small, &[], 7, 6, 50));
        assert_ne!(one, Workload::new(Mix::Small, &[], 8, 6, 50));
    }

    #[test]
    fn pods_come_in_order_within_the_span() {
        let workload = Workload::new(Mix::Small, &[], 1, 3, 200);
        assert_eq!((workload.pods.len(), workload.gpus), (200, 16));
        assert!(workload.pods.is_sorted_by_key(|pod| pod.at));
        assert!(
            workload
                .pods
                .iter()
                .all(|pod| pod.at <= SPAN && pod.runs_for <= SPAN)
        );
    }
}
