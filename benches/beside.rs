//! What `/filter` waits for beside 16 kinds of pods that wait and that no feature can help, on 500 and 5,000 nodes, with
//! each feature on and off. `make bench ARGS=beside` runs it alone.
//!
//! Time is virtual and costs are real: each part of the extender holds the ledger's lock when its loop would, for as long as
//! it computes, and a call that comes meanwhile waits. Computing is what the thread spends, so other programs of the
//! machine only spoil its caches.

#![allow(
    clippy::expect_used,
    reason = "a bench that cannot make its world has to stop"
)]
#![allow(
    dead_code,
    reason = "the module of the load is shared with the other benches"
)]

mod load;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::gpunode::{GpuNodeStatus, PodUse};
use gpustow_api::{Assignment, NodeFacts, PodFacts, names};
use gpustow_ledger::{Ask, Config, Ledger, Outcome};
use gpustow_pack::Mib;
use load::{CARDS, facts, gpunode, node_name, uuid};
use nix::time::{ClockId, clock_gettime};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};

const SIZES: [usize; 2] = [500, 5_000];
const KINDS: usize = 16;
const ROUNDS: u64 = 3;
/// What is measured, after a while in which all loops have looked.
const WARM_UP: Duration = Duration::from_secs(10);
const LASTS: Duration = Duration::from_secs(40);
/// Nodes whose shortages are looked for in one hold of the lock, and the pause after it.
const AT_ONCE: usize = 8;
const TURN: Duration = Duration::from_millis(1);
/// Between two pods that come and fit.
const COME: Duration = Duration::from_millis(20);
/// Between two calls for pods that wait: each asks every two seconds, kube-scheduler's longest back-off here.
const RETRY: Duration = Duration::from_millis(125);
/// Until the watch tells of a write.
const PATCH: Duration = Duration::from_millis(10);
/// Until kube-scheduler asks about a pod that the watch shows.
const SEEN: Duration = Duration::from_millis(1);
/// The extender's loops.
const LOOK: Duration = Duration::from_secs(1);
const QUEUE: Duration = Duration::from_millis(250);
const WAKE: Duration = Duration::from_millis(20);
const WARM: Duration = Duration::from_millis(1);
/// Answers computed ahead, and pods woken, in one hold of the lock.
const SLICE: usize = 256;
const LIMIT: usize = 10;
/// Every agent reports so often.
const HEARTBEAT: Duration = Duration::from_secs(60);
/// Pods that came during the bench and run at a time.
const RUN: usize = 200;
/// Of each card: what a pod holds that stays, what one of low priority holds that may move, what that one uses beyond it,
/// and what programs use that are no pods.
const STAYS: u64 = 30_000;
const LOW: u64 = 20_000;
const BORROWED: u64 = 5_000;
const UNMANAGED: u64 = 5_000;
/// What a waiting pod requests of each card: more than one has without the low one, or more than is free in fact when that
/// one gives back what it borrows, though its request is free.
const NOWHERE: u64 = 60_000;
const BY_THE_BOOKS: u64 = 28_000;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Feature {
    Queue,
    Reclaim,
    Preempt,
    Reserve,
    Defragment,
}

impl Feature {
    const ALL: [Self; 5] = [
        Self::Queue,
        Self::Reclaim,
        Self::Preempt,
        Self::Reserve,
        Self::Defragment,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Reclaim => "reclaim",
            Self::Preempt => "preempt fragmented",
            Self::Reserve => "reserve",
            Self::Defragment => "defragment",
        }
    }

    fn config(self) -> Config {
        Config {
            line: self == Self::Queue,
            call_back: self == Self::Reclaim,
            preempt_scattered: self == Self::Preempt,
            keep: (self == Self::Reserve).then_some(Duration::from_secs(1)),
            moves: self == Self::Defragment,
            ..Config::default()
        }
    }

    /// What a waiting pod requests of each card.
    fn request(self) -> u64 {
        match self {
            Self::Reclaim => BY_THE_BOOKS,
            _ => NOWHERE,
        }
    }
}

fn main() {
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    if filter.is_some_and(|filter| !"beside".contains(&filter)) {
        return;
    }
    println!(
        "\n/filter beside {KINDS} kinds of pods that no feature can help; ms, median (least to most) of {ROUNDS} runs of \
         {} s",
        LASTS.as_secs()
    );
    println!("| nodes | feature | p50 | p99 | p99 on ÷ off | longest hold of the lock |");
    println!("|---|---|---|---|---|---|");
    for nodes in SIZES {
        for request in [NOWHERE, BY_THE_BOOKS] {
            let runs = |on| -> Vec<Figures> {
                let run = |seed| World::new(nodes, request, on, seed).run();
                (0..ROUNDS).map(run).collect()
            };
            let off = runs(None);
            row(nodes, "off", &off, &off);
            for feature in Feature::ALL {
                if feature.request() == request {
                    row(nodes, feature.name(), &runs(Some(feature)), &off);
                }
            }
        }
    }
}

fn row(nodes: usize, name: &str, runs: &[Figures], off: &[Figures]) {
    let spread = |figures: Vec<f64>| {
        let mut all = figures;
        all.sort_by(f64::total_cmp);
        let (least, most) = (all[0], all[all.len() - 1]);
        format!("{:.2} ({least:.2} to {most:.2})", all[all.len() / 2])
    };
    let of = |figure: fn(&Figures) -> f64| spread(runs.iter().map(figure).collect());
    let ratios = runs.iter().zip(off).map(|(on, off)| on.p99 / off.p99);
    let longest = runs
        .iter()
        .max_by(|one, other| one.longest.0.total_cmp(&other.longest.0));
    println!(
        "| {nodes} | {name} | {} | {} | {} | {:.1}, {} |",
        of(|it| it.p50),
        of(|it| it.p99),
        spread(ratios.collect()),
        longest.map_or(f64::NAN, |it| it.longest.0),
        longest.map_or("", |it| it.longest.1),
    );
}

/// Milliseconds.
struct Figures {
    p50: f64,
    p99: f64,
    /// The longest that the lock was held, and what for.
    longest: (f64, &'static str),
}

/// What comes up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    /// A pod that fits.
    Come,
    /// The watch shows a pod that may be scheduled.
    Shown,
    /// kube-scheduler asks about the oldest of those that came and may be scheduled.
    Call,
    /// One for a pod that waits.
    Retry,
    /// The extender's loops.
    Look,
    Shortages,
    Reserve,
    Queue,
    Wake,
    Warm,
    /// An agent's report.
    Report,
}

struct World {
    ledger: Ledger,
    on: Option<Feature>,
    names: Vec<String>,
    reports: Vec<GpuNodeStatus>,
    waiting: Vec<PodFacts>,
    /// They came and may be scheduled, and those of them that the watch shows.
    ready: VecDeque<PodFacts>,
    asked: VecDeque<PodFacts>,
    /// Nodes to look at for shortages.
    may_be_short: Vec<Arc<str>>,
    run: VecDeque<Arc<str>>,
    due: BinaryHeap<Reverse<(Duration, Due)>>,
    /// The lock is held until then.
    held: Duration,
    /// The longest that it was held, and what for.
    longest: (Duration, &'static str),
    warms: bool,
    rng: SmallRng,
    /// Numbers of what came so far.
    calls: usize,
    retries: usize,
    beats: usize,
    /// Where kube-scheduler's next window begins.
    window: usize,
}

impl World {
    fn new(nodes: usize, request: u64, on: Option<Feature>, seed: u64) -> Self {
        let mut ledger = Ledger::new(on.map_or_else(Config::default, Feature::config));
        let names: Vec<String> = (0..nodes).map(node_name).collect();
        let mut reports = Vec::new();
        let (stays, low) = (facts(pod("stays", STAYS, 1, 100)), borrower());
        for (node, name) in names.iter().enumerate() {
            ledger.apply_node(NodeFacts {
                name: name.as_str().into(),
                cpu_milli: 192_000,
                ram: Mib(1 << 20).into(),
                ..NodeFacts::default()
            });
            let mut report = gpunode(node, CARDS);
            for (card, gpu) in report.gpus.iter_mut().enumerate() {
                gpu.strangers_mib = UNMANAGED;
                gpu.pods = [(&stays, STAYS), (&low, LOW + BORROWED)]
                    .map(|(pod, used)| use_of(pod, node, card, used))
                    .into();
            }
            ledger.apply_gpunode(name, report.clone(), Duration::ZERO);
            reports.push(report);
            for card in 0..CARDS {
                ledger.apply_pod(on_card(&stays, node, card, STAYS));
                ledger.apply_pod(on_card(&low, node, card, LOW));
            }
        }
        ledger.learn();
        let gated = on == Some(Feature::Queue);
        let waiting: Vec<PodFacts> = (0..KINDS)
            .map(|kind| waiting(kind, request, gated))
            .collect();
        for pod in &waiting {
            ledger.apply_pod(pod.clone());
        }
        let mut due = BinaryHeap::new();
        for first in [
            Due::Come,
            Due::Retry,
            Due::Look,
            Due::Shortages,
            Due::Reserve,
            Due::Queue,
            Due::Wake,
            Due::Report,
        ] {
            due.push(Reverse((Duration::from_millis(1), first)));
        }
        Self {
            ledger,
            on,
            names,
            reports,
            waiting,
            ready: VecDeque::new(),
            asked: VecDeque::new(),
            may_be_short: Vec::new(),
            run: VecDeque::new(),
            due,
            held: Duration::ZERO,
            longest: (Duration::ZERO, ""),
            warms: false,
            rng: SmallRng::seed_from_u64(seed),
            calls: 0,
            retries: 0,
            beats: 0,
            window: 0,
        }
    }

    fn run(mut self) -> Figures {
        let mut took = Vec::new();
        while let Some(Reverse((at, due))) = self.due.pop() {
            if at >= WARM_UP + LASTS {
                break;
            }
            if at < WARM_UP {
                self.longest = (Duration::ZERO, "");
            }
            let again = match due {
                Due::Come => {
                    self.come(at);
                    // As likely at any time between two looks.
                    COME.mul_f64(self.rng.random_range(0.5..1.5))
                }
                Due::Shown => {
                    self.shown_to_all(at);
                    continue;
                }
                Due::Call => {
                    let waited = self.call(at);
                    if at >= WARM_UP {
                        took.push(waited);
                    }
                    continue;
                }
                Due::Retry => {
                    self.retry(at);
                    RETRY
                }
                Due::Look => {
                    self.look(at);
                    LOOK
                }
                Due::Shortages => self.shortages(at),
                Due::Reserve => {
                    if self.on == Some(Feature::Reserve) {
                        self.hold(at, "reserve", |ledger, now| {
                            ledger.keep_places(now, unix(now));
                            black_box(ledger.places());
                        });
                    }
                    LOOK
                }
                Due::Queue => {
                    if self.on == Some(Feature::Queue) {
                        self.hold(at, "queue", |ledger, _| {
                            black_box(ledger.wants_line());
                            black_box(ledger.standing_in_line().count());
                        });
                    }
                    QUEUE
                }
                Due::Wake => {
                    let woken = self.hold(at, "wake", |ledger, now| ledger.wake(LIMIT, now));
                    for pod in woken.iter().filter(|pod| pod.in_line) {
                        self.ungated(at, pod);
                    }
                    self.hold(at, "wake", |ledger, _| {
                        black_box(ledger.void_nominations());
                    });
                    WAKE
                }
                Due::Warm => {
                    self.warms = self.hold(at, "warm", |ledger, _| ledger.warm(SLICE));
                    if self.warms {
                        self.due
                            .push(Reverse((at.max(self.held) + WARM, Due::Warm)));
                    }
                    continue;
                }
                Due::Report => {
                    self.report(at);
                    HEARTBEAT.div_f64(self.names.len() as f64)
                }
            };
            // A loop sleeps after its work.
            let next = match due {
                Due::Come | Due::Call | Due::Retry | Due::Report => at,
                _ => at.max(self.held),
            };
            self.due.push(Reverse((next + again, due)));
        }
        took.sort_unstable();
        let at = |part: usize| took.get(took.len() * part / 100).map_or(f64::NAN, ms);
        Figures {
            p50: at(50),
            p99: at(99),
            longest: (ms(&self.longest.0), self.longest.1),
        }
    }

    /// Does something under the lock, as soon as it is free.
    fn hold<T>(
        &mut self,
        at: Duration,
        part: &'static str,
        work: impl FnOnce(&mut Ledger, Duration) -> T,
    ) -> T {
        let from = at.max(self.held);
        let began = spent();
        let done = work(&mut self.ledger, from);
        let lasts = spent().saturating_sub(began);
        self.held = from + lasts;
        if self.longest.0 < lasts {
            self.longest = (lasts, part);
        }
        done
    }

    /// Something has changed: answers are computed ahead again.
    fn changed(&mut self, at: Duration) {
        if !self.warms {
            self.warms = true;
            self.due.push(Reverse((at.max(self.held), Due::Warm)));
        }
    }

    /// What kube-scheduler shows, by its shipped setting.
    fn shown(&mut self) -> Vec<String> {
        let nodes = self.names.len();
        let percent = 50_usize.saturating_sub(nodes / 125).max(5);
        let shown = (nodes * percent / 100).max(100).min(nodes);
        let names = self.names.iter().cycle().skip(self.window).take(shown);
        self.window = (self.window + shown) % nodes;
        names.cloned().collect()
    }

    /// A pod comes; the queue has it gated first.
    fn come(&mut self, at: Duration) {
        self.calls += 1;
        let mib = 2_048 << self.rng.random_range(0..3_u32);
        let mut pod = pod(&format!("new-{}", self.calls), mib, 1, 10);
        pod["metadata"]["creationTimestamp"] = "2026-11-22T08:00:00Z".into();
        let free = facts(pod.clone());
        if self.on == Some(Feature::Queue) {
            gate(&mut pod);
            self.hold(at, "watch", |ledger, _| ledger.apply_pod(facts(pod)));
            self.changed(at);
            return;
        }
        self.schedulable(at, free);
    }

    /// The gate is taken off, and the watch tells so.
    fn ungated(&mut self, at: Duration, pod: &PodFacts) {
        assert!(!pod.uid.starts_with("waits"), "a queued pod is helped");
        let free = PodFacts {
            gated: false,
            in_line: false,
            ..pod.clone()
        };
        self.schedulable(at.max(self.held) + PATCH, free);
    }

    fn schedulable(&mut self, at: Duration, pod: PodFacts) {
        self.ready.push_back(pod);
        self.due.push(Reverse((at, Due::Shown)));
    }

    fn shown_to_all(&mut self, at: Duration) {
        let pod = self.ready.pop_front().expect("one is ready");
        self.hold(at, "watch", |ledger, _| ledger.apply_pod(pod.clone()));
        self.asked.push_back(pod);
        self.due.push(Reverse((at + SEEN, Due::Call)));
    }

    /// A pod is bound, and one that came earlier ends. From the call until its answer.
    fn call(&mut self, at: Duration) -> Duration {
        let pod = self.asked.pop_front().expect("one is ready");
        let names = self.shown();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let chosen = self.hold(at, "filter", |ledger, now| {
            let verdict = ledger.filter(&Ask::of(&pod), &names, now);
            verdict.nodes.first().map(|node| (*node).to_owned())
        });
        let waited = self.held - at;
        let node = chosen.expect("it fits");
        self.hold(at, "bind", |ledger, now| {
            assert!(ledger.begin_bind(&pod, &node, now).is_ok(), "it is bound");
            ledger.end_bind(&pod, Outcome::Bound, now);
        });
        self.run.push_back(pod.uid.clone());
        if self.run.len() > RUN
            && let Some(oldest) = self.run.pop_front()
        {
            self.hold(at, "watch", |ledger, _| ledger.delete_pod(&oldest));
        }
        self.changed(at);
        waited
    }

    /// kube-scheduler tries a waiting pod again, unless it is gated.
    fn retry(&mut self, at: Duration) {
        self.retries += 1;
        let pod = self.waiting[self.retries % KINDS].clone();
        if pod.in_line {
            return;
        }
        let names = self.shown();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let placed = self.hold(at, "filter", |ledger, now| {
            ledger.filter(&Ask::of(&pod), &names, now).nodes.len()
        });
        assert_eq!(placed, 0, "it fits nowhere");
    }

    /// What the extender does once a second for reclaim, preemption and defragmentation.
    fn look(&mut self, at: Duration) {
        if !matches!(
            self.on,
            Some(Feature::Reclaim | Feature::Preempt | Feature::Defragment)
        ) {
            return;
        }
        let moves = self.on == Some(Feature::Defragment);
        let due = self.hold(at, "look", |ledger, now| {
            ledger.tell_time(unix(now));
            ledger.call_back(now);
            ledger.scattered(now)
        });
        let to_move = self.hold(at, "look", |ledger, now| {
            moves.then(|| ledger.due_to_move(now)).flatten()
        });
        self.hold(at, "look", |ledger, _| {
            black_box(ledger.marked().count());
        });
        self.hold(at, "limits", |ledger, now| {
            black_box((ledger.over_limits(now), ledger.call_backs(now)));
        });
        for pod in due {
            self.hold(at, "preempt", |ledger, now| {
                ledger.preempt_scattered(&pod.uid, &|_| Vec::new(), now)
            });
        }
        if let Some(pod) = to_move {
            self.hold(at, "move", |ledger, now| {
                ledger.move_for(&pod.uid, &|_| Vec::new(), 10, now)
            });
        }
        let helped = self.hold(at, "look", |ledger, now| {
            ledger.preemptions(now).len() + ledger.call_backs(now).len()
        });
        assert_eq!(helped, 0, "a waiting pod is helped");
    }

    /// Looks at some nodes, and says after which pause it goes on.
    fn shortages(&mut self, at: Duration) -> Duration {
        if self.on != Some(Feature::Reclaim) {
            return LOOK;
        }
        if self.may_be_short.is_empty() {
            self.may_be_short = self.hold(at, "look", |ledger, _| ledger.may_be_short());
        }
        let left = self.may_be_short.len().saturating_sub(AT_ONCE);
        let few = self.may_be_short.split_off(left);
        self.hold(at, "shortages", |ledger, now| {
            for node in &few {
                black_box(ledger.shortages_on(node, now));
            }
        });
        if left == 0 { LOOK } else { TURN }
    }

    /// The next agent reports what it reported before.
    fn report(&mut self, at: Duration) {
        let node = self.beats % self.names.len();
        self.beats += 1;
        let (name, mut report) = (self.names[node].clone(), self.reports[node].clone());
        report.heartbeat = Some(self.beats.to_string());
        self.hold(at, "watch", |ledger, now| {
            ledger.apply_gpunode(&name, report, now)
        });
    }
}

fn ms(took: &Duration) -> f64 {
    took.as_secs_f64() * 1e3
}

/// What this thread has computed so far.
fn spent() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
        .expect("a clock of the thread")
        .into()
}

fn unix(now: Duration) -> i64 {
    1_800_000_000 + i64::try_from(now.as_secs()).unwrap_or_default()
}

fn uid(pod: &PodFacts, node: usize, card: usize) -> String {
    format!("{}-{node}-{card}", pod.name)
}

fn use_of(pod: &PodFacts, node: usize, card: usize, used_mib: u64) -> PodUse {
    PodUse {
        uid: uid(pod, node, card),
        used_mib,
        ..PodUse::default()
    }
}

/// A pod that requests so much over its GPUs.
fn pod(name: &str, mib: u64, gpus: u64, priority: i32) -> Value {
    json!({
        "metadata": {
            "uid": name, "name": name, "namespace": "team-a", "resourceVersion": "1",
            "creationTimestamp": "2026-11-21T08:00:00Z",
            "annotations": {names::GPU_COUNT: gpus.to_string()},
        },
        "spec": {
            "schedulerName": names::SCHEDULER,
            "priority": priority,
            "containers": [{"name": "main", "resources": {
                "limits": {names::GPU_MEM: mib.to_string()},
                "requests": {names::GPU_MEM: mib.to_string(), "cpu": "100m", "memory": "1Gi"},
            }}],
        },
        "status": {"phase": "Pending"},
    })
}

/// One of low priority that may use more than it requests, and may be moved.
fn borrower() -> PodFacts {
    let mut pod = pod("low", LOW, 1, 1);
    let notes = &mut pod["metadata"]["annotations"];
    notes[names::MEM_LIMIT] = "max".into();
    notes[names::MOVABLE] = "true".into();
    pod["metadata"]["ownerReferences"] = json!([{
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "web", "controller": true,
    }]);
    facts(pod)
}

/// The same pod on a card.
fn on_card(pod: &PodFacts, node: usize, card: usize, mib: u64) -> PodFacts {
    let uuid = uuid(node, card);
    let assignment = Assignment {
        charges: vec![(uuid.as_str().into(), Mib(mib))],
        containers: vec![("main".into(), vec![uuid.as_str().into()])],
        exclusive: None,
    };
    let uid = uid(pod, node, card);
    PodFacts {
        uid: uid.as_str().into(),
        name: uid.into(),
        node: Some(node_name(node).into()),
        assignment: Some(Ok(Arc::new(assignment))),
        ..pod.clone()
    }
}

fn gate(pod: &mut Value) {
    pod["spec"]["schedulingGates"] = json!([{"name": names::GATE}]);
}

/// A pod of its own kind that kube-scheduler could not place; one of four wants two GPUs.
fn waiting(kind: usize, request: u64, gated: bool) -> PodFacts {
    let gpus = if kind % 4 == 3 { 2 } else { 1 };
    let mib = (request + 100 * kind as u64) * gpus;
    let mut pod = pod(&format!("waits-{kind}"), mib, gpus, 10);
    if gated {
        gate(&mut pod);
    } else {
        pod["status"]["conditions"] = json!([
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"},
        ]);
    }
    facts(pod)
}
