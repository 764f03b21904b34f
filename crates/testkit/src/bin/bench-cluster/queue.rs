//! The queue: the cost of its waiting pods for other pods, and the time until freed memory goes to its head.
//!
//! Each node's first card has a small pod, so that pods that ask for all eight cards fit nowhere, although they could.
//! They wait; other pods that fit are created at a steady pace, then at once. Then the small pods of some nodes are
//! deleted, one after the other. The bench takes the time until a waiting pod is bound there. More of them are deleted
//! at once.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use gpustow_api::config::{self, QueueMode};
use gpustow_api::{GpustowConfig, QueueFrom, names};
use gpustow_testkit::{
    Binds, Case, ControlPlane, Extender, PodBuilder, Scheduler, at_once, eventually, median,
    node_of, paced, quantile, quantiles, sorted, spread,
};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams};

use crate::{
    Args, CARDS, NODE, QUIET, SETTLED, WIDTH, calls, config, cpu, create, next_bound, pod, refused,
    rounds, site, start, sum_of,
};

/// MiB of the small pod on each node.
const SMALL: u64 = 1_024;
/// Nodes that are freed one after the other, and then at once.
const FREED: usize = 50;
/// Marks the pods of one way's measurement, which are deleted after it.
const PART: &str = "bench/part";

/// The settings that a run compares.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Way {
    /// The mode of the queue; none without an extender.
    mode: Option<QueueMode>,
    waiting: usize,
    /// Whether the others ask for GPU memory.
    ask: bool,
}

impl Way {
    fn name(self) -> String {
        let others = if self.ask {
            ""
        } else {
            ", others ask for none"
        };
        match self.mode {
            Some(mode) => format!("queue {mode:?}, {} wait{others}", self.waiting),
            None => "scheduler alone".to_owned(),
        }
    }

    /// The one that others are compared with first.
    fn all(args: &Args) -> Vec<Self> {
        let way = |mode, waiting, ask| Self { mode, waiting, ask };
        let mut ways: Vec<_> = [
            None,
            Some(QueueMode::Off),
            Some(QueueMode::Auto),
            Some(QueueMode::Always),
        ]
        .map(|mode| way(mode, 0, true))
        .into();
        for &waiting in &args.queue {
            if args.refused {
                ways.push(way(Some(QueueMode::Off), waiting, true));
            }
            ways.extend([true, false].map(|ask| way(Some(QueueMode::Auto), waiting, ask)));
        }
        ways
    }
}

struct Round {
    /// Pods per second of those created at once.
    rate: f64,
    /// Milliseconds from creation to bound at a steady pace, ascending.
    waits: Vec<f64>,
    /// Milliseconds from a node's last pod deleted to one of the queue bound there, ascending.
    freed: Vec<f64>,
    /// Of nodes that were freed at once: pods bound per second, calls of /filter per pod, pods that others should have preceded.
    at_once: [f64; 3],
    /// CPU per pod of those created at once in ms: scheduler, API server and etcd, extender.
    cpu: [f64; 3],
    /// Pods created while the queue was on that got no gate.
    beside: f64,
    /// Pods that were ungated for room, for each that was bound.
    ungates: f64,
    /// The extender's resident memory in MiB with all that wait.
    memory: f64,
}

pub(crate) async fn bench(args: &Args, nodes: usize, began: Instant) -> Result<()> {
    let (cluster, case, kubeconfig) = site(args, nodes, "overlays/queue", 2, began).await?;
    let run = async |way| run(args, &cluster, &case, (nodes, &kubeconfig), way).await;
    let figures = |round: &Round| (round.rate, quantile(&round.waits, 0.5));
    let ways = Way::all(args);
    let results = rounds(args, (nodes, began), ways.clone(), Way::name, run, figures).await?;
    report(nodes, args, &ways, &results);
    Ok(())
}

/// Has each node bear the small pod that keeps others off all of its cards together.
pub(crate) async fn fill(case: &Case, nodes: usize) -> Result<()> {
    let selected = ListParams::default().labels(&format!("{PART}=small"));
    let there = case.pods().list_metadata(&selected).await?.items;
    let there: HashSet<_> = there.iter().map(|pod| pod.name_any()).collect();
    let missing = (0..nodes)
        .map(|node| format!("n{node:05}"))
        .filter(|node| !there.contains(&small(node)));
    at_once(WIDTH, missing, |node| {
        let pod = case.pod(&small(&node)).gpu_mem(SMALL);
        create(case, pod.label(PART, "small").node_selector(NODE, &node))
    })
    .await?;
    eventually(SETTLED, "each node bears a small pod", async || {
        let pods = case.pods().list(&selected).await?;
        let bound = pods.items.iter().filter_map(node_of).count();
        ensure!(bound == nodes, "{bound} of {nodes} do");
        Ok(())
    })
    .await
}

fn small(node: &str) -> String {
    format!("small-{node}")
}

/// A pod that asks for every card of a node.
pub(crate) fn whole(case: &Case, name: &str) -> PodBuilder {
    case.pod(name)
        .gpu_mem(CARDS.iter().sum())
        .annotation(names::GPU_COUNT, &CARDS.len().to_string())
        .label(PART, "waits")
}

pub(crate) fn is_held(pod: &Pod) -> bool {
    let gates = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.scheduling_gates.as_ref());
    gates.is_some_and(|gates| gates.iter().any(|gate| gate.name == names::GATE))
}

/// Creates the pods that wait, and waits until each is queued or was refused; how many got no gate.
async fn wait_queued(case: &Case, extender: &Extender, nodes: usize, way: Way) -> Result<usize> {
    let metric = async |series: &str| anyhow::Ok(sum_of(&extender.metrics().await?, series));
    let first = usize::from(way.mode != Some(QueueMode::Off) && way.waiting > 0);
    if first == 1 {
        whole(case, "waits-first").create(&case.client).await?;
        eventually(SETTLED, "the queue is on", async || {
            ensure!(metric("gpustow_queue_on").await? > 0.0, "it is not");
            Ok(())
        })
        .await?;
    } else if way.mode == Some(QueueMode::Auto) {
        // The queue may still be on for the pods that were created a moment ago.
        eventually(SETTLED, "the queue is off", async || {
            ensure!(metric("gpustow_queue_on").await? == 0.0, "it is up");
            Ok(())
        })
        .await?;
    }
    let waits = |index| create(case, whole(case, &format!("waits-{index}")));
    at_once(WIDTH, first..way.waiting, waits).await?;
    refused(case, nodes + way.waiting).await?;
    let selected = ListParams::default().labels(&format!("{PART}=waits"));
    let waiting = case.pods().list(&selected).await?.items;
    let held = waiting.iter().filter(|pod| is_held(pod)).count();
    eventually(SETTLED, "all are queued", async || {
        let standing = metric("gpustow_queued_pods").await? as usize;
        ensure!(standing == held, "{standing} of {held} are");
        Ok(())
    })
    .await?;
    if way.mode == Some(QueueMode::Auto) {
        let configs = Api::<GpustowConfig>::all(case.client.clone());
        let after = "what another mode queued no longer is";
        eventually(SETTLED, after, async || {
            let status = configs.get_status(config::NAME).await?.status;
            let from = status.unwrap_or_default().queue_from;
            ensure!(!from.contains(&QueueFrom::ALL), "{from:?}");
            Ok(())
        })
        .await?;
    }
    Ok(way.waiting - held)
}

/// kube-scheduler and the extender, or kube-scheduler alone, where no pod is queued.
async fn started(
    args: &Args,
    cluster: &ControlPlane,
    kubeconfig: &Path,
    way: Way,
) -> Result<(Option<Extender>, Scheduler)> {
    if let Some(mode) = way.mode {
        let queue = format!("queue: {{mode: \"{mode:?}\"}}");
        let (extender, scheduler) = start(args, cluster, kubeconfig, &[&queue]).await?;
        return Ok((Some(extender), scheduler));
    }
    let delete = ["delete", "gpustowconfig", "--all"];
    cluster.kubectl(&delete).await?;
    let config = config(args)?.without_extender()?;
    let scheduler = Scheduler::start(cluster, config, kubeconfig).await?;
    Ok((None, scheduler))
}

async fn run(
    args: &Args,
    cluster: &ControlPlane,
    case: &Case,
    (nodes, kubeconfig): (usize, &Path),
    way: Way,
) -> Result<Round> {
    let (extender, scheduler) = started(args, cluster, kubeconfig, way).await?;
    let (mut beside, mut memory) = (0, 0.0);
    if let Some(extender) = &extender {
        fill(case, nodes).await?;
        beside = wait_queued(case, extender, nodes, way).await?;
        memory = extender.process.resident()?;
    }

    let make = |name: &str, index| {
        let pod = match way.ask {
            true => pod(case, name, index),
            false => case.pod(name).requests("cpu", "100m"),
        };
        pod.label(PART, "fits")
    };
    let mut binds = Binds::of(case.pods(), Some(&format!("{PART}=fits"))).await?;
    let create_paced = async |name: &str, index| create(case, make(name, index)).await;
    let waits = paced(args.paced, &mut binds, QUIET, create_paced).await?;
    let ungates = async || match &extender {
        Some(extender) => {
            let ungates = r#"gpustow_ungated_pods_total{cause="room",result="done"}"#;
            anyhow::Ok(sum_of(&extender.metrics().await?, ungates))
        }
        None => Ok(0.0),
    };
    let ungated = ungates().await?;
    let before = cpu(cluster, &scheduler, extender.as_ref())?;
    let first = Instant::now();
    let backlog = |index| create(case, make(&format!("backlog-{index}"), index));
    let created = at_once(WIDTH, 0..args.pods, backlog);
    let mut places = BTreeMap::new();
    let bound = async {
        while places.len() < args.pods {
            let (pod, node) = next_bound(&mut binds).await?;
            places.insert(pod, node);
        }
        anyhow::Ok(first.elapsed())
    };
    let ((), took) = futures::try_join!(created, bound)?;
    let after = cpu(cluster, &scheduler, extender.as_ref())?;
    let ungated = ungates().await? - ungated;

    remove(case, "fits").await?;
    let (freed, at_once) = match &extender {
        Some(extender) if way.waiting > 2 * FREED && way.ask => {
            (free(case).await?, free_at_once(case, extender).await?)
        }
        _ => (Vec::new(), [0.0; 3]),
    };
    case.check().await?;
    scheduler.process.kill9();
    remove(case, "waits").await?;
    Ok(Round {
        rate: args.pods as f64 / took.as_secs_f64(),
        waits,
        freed,
        at_once,
        cpu: [0, 1, 2].map(|at| (after[at] - before[at]) * 1e3 / args.pods as f64),
        beside: beside as f64,
        ungates: ungated / args.pods as f64,
        memory,
    })
}

/// Frees nodes, one after the other; milliseconds until a pod of the queue was bound there, ascending.
async fn free(case: &Case) -> Result<Vec<f64>> {
    let mut binds = Binds::of(case.pods(), Some(&format!("{PART}=waits"))).await?;
    let mut freed = Vec::new();
    for index in 0..FREED {
        let node = format!("n{index:05}");
        let now = DeleteParams::default().grace_period(0);
        let at = Instant::now();
        case.pods().delete(&small(&node), &now).await?;
        let on = case.node_name(&node);
        while next_bound(&mut binds).await?.1 != on {}
        freed.push(at.elapsed().as_secs_f64() * 1e3);
    }
    Ok(sorted(freed.into_iter()))
}

/// Frees as many more nodes at once; the figures of [`Round::at_once`].
async fn free_at_once(case: &Case, extender: &Extender) -> Result<[f64; 3]> {
    let selected = format!("{PART}=waits");
    let waiting = ListParams::default().labels(&selected);
    let mut waiting = case.pods().list(&waiting).await?.items;
    waiting.retain(|pod| node_of(pod).is_none());
    waiting.sort_by_key(|pod| pod.creation_timestamp());
    let last = waiting.get(FREED - 1).and_then(Pod::creation_timestamp);
    let later = waiting.iter().filter(|pod| pod.creation_timestamp() > last);
    let later: HashSet<String> = later.map(ResourceExt::name_any).collect();
    let mut binds = Binds::of(case.pods(), Some(&selected)).await?;
    let [[before, _], _] = calls(Some(extender)).await?;
    let first = Instant::now();
    at_once(WIDTH, FREED..2 * FREED, |index| async move {
        let now = DeleteParams::default().grace_period(0);
        case.pods()
            .delete(&small(&format!("n{index:05}")), &now)
            .await?;
        Ok(())
    })
    .await?;
    let mut bound = HashSet::new();
    while bound.len() < FREED {
        bound.insert(next_bound(&mut binds).await?.0);
    }
    let took = first.elapsed();
    // Others may have been woken for the same room.
    let mut after = before;
    loop {
        let [[now, _], _] = calls(Some(extender)).await?;
        if now == std::mem::replace(&mut after, now) {
            break;
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
    let pods = FREED as f64;
    let out_of_turn = bound.intersection(&later).count();
    Ok([
        pods / took.as_secs_f64(),
        (after - before) / pods,
        out_of_turn as f64,
    ])
}

/// Deletes the pods of this part and waits until they are gone.
pub(crate) async fn remove(case: &Case, part: &str) -> Result<()> {
    case.clear(Some(&format!("{PART}={part}")), SETTLED).await
}

fn report(nodes: usize, args: &Args, ways: &[Way], results: &HashMap<Way, Vec<Round>>) {
    println!(
        "\n{nodes} nodes × {} GPUs, {} others, {} rounds in turn; median (least..most) of rounds\n\n\
         | | pods/s | ÷ first | created → bound p50 / p99, ms | freed → bound p50 / p99 / worst, ms | {FREED} freed at once: pods/s, /filter a pod, out of turn | CPU ms a pod: kube-scheduler, \
         API server and etcd, extender | without the gate | ungated a pod | MiB |\n|---|---|---|---|---|---|---|---|---|---|",
        CARDS.len(),
        args.pods,
        args.rounds
    );
    let rounds = |way: &Way| results.get(way).map_or(&[][..], Vec::as_slice);
    let base = ways.first().map_or(&[][..], rounds);
    for way in ways {
        let rounds = rounds(way);
        let middle = |value: fn(&Round) -> f64| median(rounds.iter().map(value));
        let all = |value: fn(&Round) -> &Vec<f64>| {
            sorted(rounds.iter().flat_map(|round| value(round).iter().copied()))
        };
        let ratios = rounds.iter().zip(base).map(|(a, b)| a.rate / b.rate);
        let halves = rounds.iter().map(|round| quantile(&round.waits, 0.5));
        println!(
            "| {} | {} | {} | {} / {:.0} | {} | {:.1}, {:.1}, {:.0} | {:.1}, {:.1}, {:.1} | {:.0} | {:.2} | {:.0} |",
            way.name(),
            spread(rounds.iter().map(|round| round.rate), 1),
            spread(ratios, 2),
            spread(halves, 0),
            quantile(&all(|round| &round.waits), 0.99),
            quantiles(&all(|round| &round.freed), [0.5, 0.99, 1.0], 0),
            middle(|round| round.at_once[0]),
            middle(|round| round.at_once[1]),
            middle(|round| round.at_once[2]),
            middle(|round| round.cpu[0]),
            middle(|round| round.cpu[1]),
            middle(|round| round.cpu[2]),
            middle(|round| round.beside),
            middle(|round| round.ungates),
            middle(|round| round.memory),
        );
    }
}
