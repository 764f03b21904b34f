//! The queue: what others pay for pods that wait in it, and how soon freed memory goes to its head.
//!
//! Each node's first card bears a small pod, so that pods that ask for all eight fit nowhere and could. They wait;
//! others that fit are created at a steady pace, then at once. Then the small pods of some nodes are deleted, one after
//! the other, and the time is taken until a pod of the queue is bound there.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use gpustow_api::config::{self, QueueMode};
use gpustow_api::{GpustowConfig, QueueFrom, names};
use gpustow_testkit::{
    Case, ControlPlane, Extender, Options, Scheduler, Webhook, eventually, median, quantile,
    sorted, spread,
};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, ListParams};
use kube::runtime::{WatchStreamExt as _, watcher};

use crate::{
    Args, CARDS, SETTLED, WIDTH, config, cpu, extender, next_bound, paced, pod, refused, since,
    sum_of,
};

/// MiB of the small pod on each node.
const SMALL: u64 = 1_024;
/// Nodes that are freed, one after the other.
const FREED: usize = 50;
/// Marks the pods of one way's measurement, which are deleted after it.
const PART: &str = "bench/part";
/// Names a node to its small pod.
pub(crate) const NODE: &str = "bench/node";

/// What is compared.
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
        if args.refused {
            ways.extend(
                args.queue
                    .first()
                    .map(|&waiting| way(Some(QueueMode::Off), waiting, true)),
            );
        }
        for &waiting in &args.queue {
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
    eprintln!("{} {nodes} nodes: starting the control plane", since(began));
    let cluster = ControlPlane::start(Options::default()).await?;
    let overlay = args.repository.join("manifests/overlays/queue");
    cluster
        .kubectl(&["apply", "-k", &overlay.display().to_string()])
        .await?;
    Webhook::keep(&cluster, &args.gpustow).await?;
    let case = Case::new(&cluster, "bench").await?;
    stream::iter(0..nodes)
        .map(|node| {
            let case = &case;
            async move {
                let name = format!("n{node:05}");
                let node = case.node(&name, &CARDS).label(NODE, &name);
                node.create(&case.client).await.map(drop)
            }
        })
        .buffer_unordered(WIDTH)
        .try_collect::<()>()
        .await?;
    let all = Way::all(args);
    let mut ways = all.clone();
    let mut results: HashMap<Way, Vec<Round>> = HashMap::new();
    for round in 0..args.rounds {
        // Not always the same one first.
        ways.rotate_left(usize::from(round > 0));
        for &way in &ways {
            let result = run(args, &cluster, &case, nodes, way)
                .await
                .with_context(|| way.name())?;
            eprintln!(
                "{} {nodes} nodes, round {} of {}, {}: {:.1} pods/s, bound after {:.0} ms (p50)",
                since(began),
                round + 1,
                args.rounds,
                way.name(),
                result.rate,
                quantile(&result.waits, 0.5),
            );
            results.entry(way).or_default().push(result);
        }
    }
    report(nodes, args, &all, &results);
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
    let created = stream::iter(missing).map(|node| async move {
        let pod = case.pod(&small(&node)).gpu_mem(SMALL);
        let pod = pod.label(PART, "small").node_selector(NODE, &node);
        pod.create(&case.client).await
    });
    created
        .buffer_unordered(WIDTH)
        .try_collect::<Vec<_>>()
        .await?;
    eventually(SETTLED, "each node bears a small pod", async || {
        let pods = case.pods().list(&selected).await?;
        let of = |pod: &Pod| pod.spec.as_ref()?.node_name.clone();
        let bound = pods.items.iter().filter_map(of).count();
        ensure!(bound == nodes, "{bound} of {nodes} do");
        Ok(())
    })
    .await
}

fn small(node: &str) -> String {
    format!("small-{node}")
}

/// A pod that asks for every card of a node.
pub(crate) fn whole(case: &Case, name: &str) -> gpustow_testkit::PodBuilder {
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
        // It may be up for those that were created a moment ago.
        eventually(SETTLED, "the queue is off", async || {
            ensure!(metric("gpustow_queue_on").await? == 0.0, "it is up");
            Ok(())
        })
        .await?;
    }
    let created = stream::iter(first..way.waiting).map(|index| async move {
        whole(case, &format!("waits-{index}"))
            .create(&case.client)
            .await
    });
    created
        .buffer_unordered(WIDTH)
        .try_collect::<Vec<_>>()
        .await?;
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
async fn start(
    args: &Args,
    cluster: &ControlPlane,
    kubeconfig: &Path,
    way: Way,
) -> Result<(Option<Extender>, Scheduler)> {
    let (extender, config) = match way.mode {
        Some(mode) => {
            let queue = format!("queue: {{mode: \"{mode:?}\"}}");
            let extender = extender(args, cluster, kubeconfig, &[&queue]).await?;
            let config = config(args)?.with_extender(&extender.url)?;
            (Some(extender), config)
        }
        None => {
            let delete = ["delete", "gpustowconfig", "--all"];
            cluster.kubectl(&delete).await?;
            (None, config(args)?.with("extenders", Vec::<String>::new())?)
        }
    };
    let scheduler = Scheduler::start(cluster, config, kubeconfig).await?;
    Ok((extender, scheduler))
}

async fn run(
    args: &Args,
    cluster: &ControlPlane,
    case: &Case,
    nodes: usize,
    way: Way,
) -> Result<Round> {
    let kubeconfig = cluster
        .kubeconfig("gpustow-system", "gpustow-scheduler", None)
        .await?;
    let (extender, scheduler) = start(args, cluster, &kubeconfig, way).await?;
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
    let selected = watcher::Config::default().labels(&format!("{PART}=fits"));
    let mut bound = std::pin::pin!(
        watcher(case.pods(), selected)
            .default_backoff()
            .applied_objects()
    );
    let waits = paced(args, case, &mut bound, &make).await?;
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
    let created = stream::iter(0..args.pods).map(|index| {
        let pod = make(&format!("backlog-{index}"), index);
        async move { pod.create(&case.client).await }
    });
    let created = created.buffer_unordered(WIDTH).try_collect::<Vec<_>>();
    let mut places = BTreeMap::new();
    let binds = async {
        while places.len() < args.pods {
            let (pod, node) = next_bound(&mut bound).await?;
            places.insert(pod, node);
        }
        anyhow::Ok(first.elapsed())
    };
    let (_, took) = futures::try_join!(created, binds)?;
    let after = cpu(cluster, &scheduler, extender.as_ref())?;
    let ungated = ungates().await? - ungated;

    remove(case, "fits").await?;
    let freed = match way.mode {
        Some(QueueMode::Auto) if way.waiting > FREED && way.ask => free(case).await?,
        _ => Vec::new(),
    };
    case.check().await?;
    scheduler.process.kill9();
    remove(case, "waits").await?;
    Ok(Round {
        rate: args.pods as f64 / took.as_secs_f64(),
        waits,
        freed,
        cpu: [0, 1, 2].map(|at| (after[at] - before[at]) * 1e3 / args.pods as f64),
        beside: beside as f64,
        ungates: ungated / args.pods as f64,
        memory,
    })
}

/// Frees nodes, one after the other; milliseconds until a pod of the queue was bound there, ascending.
async fn free(case: &Case) -> Result<Vec<f64>> {
    let selected = watcher::Config::default().labels(&format!("{PART}=waits"));
    let mut events = Box::pin(watcher(case.pods(), selected).default_backoff());
    // Reading all that wait takes a while, and is none of what is measured.
    while !matches!(
        events.try_next().await?,
        Some(watcher::Event::InitDone) | None
    ) {}
    let mut bound = std::pin::pin!(events.applied_objects());
    let mut freed = Vec::new();
    for index in 0..FREED {
        let node = format!("n{index:05}");
        let now = DeleteParams::default().grace_period(0);
        let at = Instant::now();
        case.pods().delete(&small(&node), &now).await?;
        let on = case.node_name(&node);
        while next_bound(&mut bound).await?.1 != on {}
        freed.push(at.elapsed().as_secs_f64() * 1e3);
    }
    Ok(sorted(freed.into_iter()))
}

/// Deletes the pods of this part and waits until they are gone.
pub(crate) async fn remove(case: &Case, part: &str) -> Result<()> {
    let selected = ListParams::default().labels(&format!("{PART}={part}"));
    let now = DeleteParams::default().grace_period(0);
    case.pods().delete_collection(&now, &selected).await?;
    let pods: Api<Pod> = case.pods();
    eventually(SETTLED, "the pods are gone", async || {
        let left = pods.list_metadata(&selected.clone().limit(1)).await?.items;
        let left = left.first().and_then(|pod| pod.metadata.name.as_deref());
        ensure!(left.is_none(), "{left:?} is there");
        Ok(())
    })
    .await
}

fn report(nodes: usize, args: &Args, ways: &[Way], results: &HashMap<Way, Vec<Round>>) {
    println!(
        "\n{nodes} nodes × {} GPUs, {} others, {} rounds in turn; median (min..max) of rounds",
        CARDS.len(),
        args.pods,
        args.rounds
    );
    println!(
        "{:46} {:>20} {:>18} {:>18} {:>6} {:>24} {:>22} {:>8} {:>6} {:>6}",
        "",
        "pods/s",
        "ratio",
        "bound after ms",
        "p99",
        "freed → bound p50/99/max",
        "CPU ms sched/API/ext",
        "no gate",
        "lifts",
        "MiB"
    );
    let rounds = |way: &Way| results.get(way).map_or(&[][..], Vec::as_slice);
    let base = ways.first().map_or(&[][..], rounds);
    for way in ways {
        let rounds = rounds(way);
        let middle = |value: fn(&Round) -> f64| median(rounds.iter().map(value));
        let all = |value: fn(&Round) -> &Vec<f64>| {
            sorted(rounds.iter().flat_map(|round| value(round).iter().copied()))
        };
        let rates = spread(rounds.iter().map(|round| round.rate), 1);
        let ratios = rounds.iter().zip(base).map(|(a, b)| a.rate / b.rate);
        let p50 = spread(rounds.iter().map(|round| quantile(&round.waits, 0.5)), 0);
        let freed = all(|round| &round.freed);
        let [half, most, worst] = [0.5, 0.99, 1.0].map(|q| quantile(&freed, q));
        let freed = match freed.is_empty() {
            true => String::new(),
            false => format!("{half:.0} / {most:.0} / {worst:.0}"),
        };
        println!(
            "{:46} {rates:>20} {:>18} {p50:>18} {:>6.0} {freed:>24} {:>22} {:>8.0} {:>6.2} {:>6.0}",
            way.name(),
            spread(ratios, 2),
            quantile(&all(|round| &round.waits), 0.99),
            format!(
                "{:.1} / {:.1} / {:.1}",
                middle(|round| round.cpu[0]),
                middle(|round| round.cpu[1]),
                middle(|round| round.cpu[2])
            ),
            middle(|round| round.beside),
            middle(|round| round.ungates),
            middle(|round| round.memory),
        );
    }
}
