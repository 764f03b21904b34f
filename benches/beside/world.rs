//! Virtual time, and the lock: each part holds it for as long as it computes.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::gpunode::GpuNodeStatus;
use gpustow_api::{NodeFacts, PodFacts};
use gpustow_ledger::Ledger;
use gpustow_pack::Mib;
use gpustow_settings::Feature;
use nix::time::{ClockId, clock_gettime};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::extender::{LOOK, QUEUE, WAKE};
use crate::load::{CARDS, facts, gpunode, node_name};
use crate::pods::{BORROWED, LOW, STAYS, UNMANAGED, borrower, on_card, pod, use_of, waiting};
use crate::{Figures, KINDS, LASTS, WARM_UP, config};

/// Between two pods that come and fit.
const COME: Duration = Duration::from_millis(20);
/// Between two calls for pods that wait: each asks every two seconds, kube-scheduler's longest back-off here.
const RETRY: Duration = Duration::from_millis(125);
/// Every agent reports so often.
const HEARTBEAT: Duration = Duration::from_secs(60);

/// The events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Due {
    /// A pod that fits.
    Come,
    /// The watch shows a pod that may be scheduled.
    Shown,
    /// kube-scheduler asks about the oldest new pod that may be scheduled.
    Call,
    /// One for a pod that waits.
    Retry,
    /// The extender's loops.
    Look,
    Shortages,
    Queue,
    Wake,
    Warm,
    /// An agent's report.
    Report,
}

pub(crate) struct World {
    pub(crate) ledger: Ledger,
    pub(crate) on: Option<Feature>,
    pub(crate) names: Vec<String>,
    pub(crate) reports: Vec<GpuNodeStatus>,
    pub(crate) waiting: Vec<PodFacts>,
    /// New pods that may be scheduled, and the ones among them that the watch shows.
    pub(crate) ready: VecDeque<PodFacts>,
    pub(crate) asked: VecDeque<PodFacts>,
    /// Nodes to look at for shortages.
    pub(crate) may_be_short: Vec<Arc<str>>,
    pub(crate) run: VecDeque<Arc<str>>,
    pub(crate) due: BinaryHeap<Reverse<(Duration, Due)>>,
    /// The lock is held until then.
    pub(crate) held: Duration,
    /// The longest hold of the lock, and its purpose.
    pub(crate) longest: (Duration, &'static str),
    pub(crate) warms: bool,
    pub(crate) rng: SmallRng,
    /// Numbers of the events so far.
    pub(crate) calls: usize,
    pub(crate) retries: usize,
    pub(crate) beats: usize,
    /// Where kube-scheduler's next window begins.
    pub(crate) window: usize,
}

impl World {
    pub(crate) fn new(nodes: usize, request: u64, on: Option<Feature>, seed: u64) -> Self {
        let mut ledger = Ledger::new(config(on));
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
                gpu.unmanaged_mib = UNMANAGED;
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

    pub(crate) fn run(mut self) -> Figures {
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
                Due::Queue => {
                    self.queue(at);
                    QUEUE
                }
                Due::Wake => {
                    self.wake(at);
                    WAKE
                }
                Due::Warm => {
                    self.warm(at);
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
    pub(crate) fn hold<T>(
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
    pub(crate) fn changed(&mut self, at: Duration) {
        if !self.warms {
            self.warms = true;
            self.due.push(Reverse((at.max(self.held), Due::Warm)));
        }
    }

    /// The next agent repeats its report.
    pub(crate) fn report(&mut self, at: Duration) {
        let node = self.beats % self.names.len();
        self.beats += 1;
        let (name, mut report) = (self.names[node].clone(), self.reports[node].clone());
        report.heartbeat = Some(self.beats.to_string());
        self.hold(at, "watch", |ledger, now| {
            ledger.apply_gpunode(&name, report, now)
        });
    }
}

pub(crate) fn ms(took: &Duration) -> f64 {
    took.as_secs_f64() * 1e3
}

/// The CPU time of this thread so far.
pub(crate) fn spent() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
        .expect("a clock of the thread")
        .into()
}

pub(crate) fn unix(now: Duration) -> i64 {
    1_800_000_000 + i64::try_from(now.as_secs()).unwrap_or_default()
}
