//! One workload through one policy: pods come one by one, and a pod that fits nowhere is dropped.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Instant;

use anyhow::{Result, bail};

use crate::baselines::{Choice, Fragmentation, TargetMix};
use crate::hosts::{Host, Job};
use crate::progress::Progress;
use crate::protocol::{CpuPods, Workload};
use crate::stowed::Settings;

/// Where a policy puts a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The host, by its place in the order.
    pub host: usize,
    /// The cards, by index.
    pub cards: Vec<usize>,
}

/// A policy at work.
pub trait Placer {
    /// Where the pod goes, if anywhere. The hosts are as they are before; afterwards they are as
    /// the answer implies.
    fn place(&mut self, hosts: &[Host], job: &Job, id: usize) -> Option<Placed>;

    /// The pod `id`, which was placed, is gone. The hosts are as they are afterwards.
    fn left(&mut self, id: usize, job: &Job, placed: &Placed);

    /// The pod `id`, which asks for no GPU, was put on this host by another scheduler. The hosts are as they
    /// are afterwards.
    fn beside(&mut self, _id: usize, _job: &Job, _host: usize) {}

    /// A minute has gone by.
    fn tick(&mut self) {}

    /// So many milliseconds have gone by since the beginning. Keeps places for pods that have waited for long; true if
    /// one was given up that others may want.
    fn keep(&mut self, _now: u64) -> bool {
        false
    }

    /// Which pods would have to move for this one, which waits though enough is free, in pieces, and where to.
    fn moves(&mut self, _id: usize, _job: &Job) -> Vec<(usize, Placed)> {
        Vec::new()
    }

    /// The pod `id` has moved there. The hosts are as they are afterwards.
    fn moved(&mut self, _hosts: &[Host], _id: usize, _job: &Job, _to: &Placed) {}

    /// So many milliseconds have gone by since the beginning.
    fn at(&mut self, _now: u64) {}

    /// The pods of a nearly empty node, `most` at most, and where they would move by now ([`Placer::at`]); none if no node
    /// is to be emptied.
    fn empties(&mut self, _most: usize) -> Vec<(usize, Placed)> {
        Vec::new()
    }

    /// The host, which holds no pod, is gone, and another like it has come.
    fn replaced(&mut self, _host: usize) {}
}

/// How much of a cluster is in one piece.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Whole {
    /// Nodes without a GPU pod.
    pub empty: f64,
    /// Empty nodes that have as many cards as any node has.
    pub empty_large: f64,
    /// Wholly free cards on the node that has most of them.
    pub largest: f64,
    /// Cards of nodes with a GPU pod, in percent of all. These cards run, and are paid for, if an empty node is
    /// switched off.
    pub running_pct: f64,
    /// Pods that asked for more than four whole cards and were turned away, in percent of all such pods so far.
    pub refused_pct: f64,
}

impl Whole {
    /// The state of these hosts.
    #[must_use]
    pub fn of(hosts: &[Host]) -> Self {
        let cards = |host: &Host| host.left.len();
        let most = hosts.iter().map(cards).max().unwrap_or(0);
        let free = |host: &Host| host.left.iter().filter(|left| **left == host.card).count();
        let all: usize = hosts.iter().map(cards).sum();
        let empty = || hosts.iter().filter(|host| host.is_empty());
        let idle: usize = empty().map(cards).sum();
        Self {
            empty: empty().count() as f64,
            empty_large: empty().filter(|host| cards(host) == most).count() as f64,
            largest: hosts.iter().map(free).max().unwrap_or(0) as f64,
            running_pct: 100.0 * (all - idle) as f64 / all.max(1) as f64,
            refused_pct: 0.0,
        }
    }
}

/// The results of one run. All percentages are of the cluster's cards.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// Units allocated, by GPUs asked for so far (whole percent): the mean within each percent.
    pub allocated: BTreeMap<u32, f64>,
    /// Free cards that are of no use to the trace's mix, in percent of all free cards, likewise.
    pub fragmented: BTreeMap<u32, f64>,
    /// How whole the cluster is when so much has been asked for.
    pub whole: BTreeMap<u32, Whole>,
    /// GPUs asked for when a pod was turned away for the first time.
    pub first_rejection: Option<f64>,
    /// Pods and thousandths of cards turned away, by [`kind`].
    pub unplaced: BTreeMap<&'static str, (usize, u64)>,
    /// Thousandths of cards turned away, in percent.
    pub unplaced_pct: f64,
    /// Time of each decision in nanoseconds, ascending.
    pub decision_ns: Vec<u64>,
}

/// Pods of more than four whole cards.
const LARGEST: &str = "8-gpu";

/// The name of a pod's demand in reports.
#[must_use]
pub fn kind(job: &Job) -> &'static str {
    match (job.whole(), job.gpus) {
        (_, 0) => "cpu",
        (false, _) => "share",
        (true, 1) => "1-gpu",
        (true, 2) => "2-gpu",
        (true, 3..=4) => "4-gpu",
        (true, _) => LARGEST,
    }
}

/// kube-scheduler's own choice for a pod without GPUs, by the CPU and host memory that stay free; the first of equals.
fn by_kube_scheduler(
    cpu_pods: CpuPods,
    hosts: &[Host],
    sizes: &[(u64, u64)],
    job: &Job,
) -> Option<Placed> {
    let free = |host: &Host, size: &(u64, u64)| {
        let part = |free: u64, asked: u64, all: u64| 100 * (free - asked) / all.max(1);
        let parts = part(host.cpu, job.cpu, size.0) + part(host.ram, job.ram, size.1);
        match cpu_pods {
            CpuPods::MostAllocated => 200 - parts,
            CpuPods::LeastAllocated | CpuPods::Policy => parts,
        }
    };
    let hosts = hosts.iter().zip(sizes).enumerate();
    let able = hosts.filter(|(_, (host, _))| host.admits(job));
    let best = able.max_by_key(|(at, (host, size))| (free(host, size), Reverse(*at)));
    best.map(|(host, _)| Placed {
        host,
        cards: Vec::new(),
    })
}

/// The sums of allocated and fragmented cards within one percent of arrivals, and the number of pods.
type Bucket = (f64, f64, u32);

fn means(buckets: &BTreeMap<u32, Bucket>, of: fn(&Bucket) -> f64) -> BTreeMap<u32, f64> {
    let all = buckets.iter();
    all.map(|(percent, it)| (*percent, of(it) / f64::from(it.2)))
        .collect()
}

/// Pods of more than four whole cards.
#[derive(Default)]
struct Large {
    came: u32,
    refused: u32,
}

impl Large {
    /// This pod has come; it counts if it is such a pod.
    fn come(&mut self, job: &Job, is_refused: bool) {
        if kind(job) == LARGEST {
            self.came += 1;
            self.refused += u32::from(is_refused);
        }
    }

    fn refused_pct(&self) -> f64 {
        100.0 * f64::from(self.refused) / f64::from(self.came.max(1))
    }
}

/// Replays the experiment of `seed`; `None` if it was stopped on the way.
///
/// # Errors
/// If the policy breaks the books: more on a card, or on a host, than there is.
pub fn replay(
    workload: &Workload,
    choice: Choice,
    seed: u64,
    progress: &mut Progress,
) -> Result<Option<Run>> {
    let experiment = workload.experiment(seed);
    let mut hosts = experiment.hosts;
    let mut placer = choice.placer(&hosts, &workload.jobs, seed, Settings::default());
    let mut waste = Fragmentation::new(TargetMix::of(&workload.jobs), &hosts);
    let sizes: Vec<(u64, u64)> = hosts.iter().map(|host| (host.cpu, host.ram)).collect();
    let capacity: u64 = hosts.iter().flat_map(|host| &host.left).sum();
    let cards = 1000.0 * hosts.iter().map(|host| host.left.len()).sum::<usize>() as f64;
    let (mut arrived, mut used, mut idle, mut unplaced) = (0, 0, cards, 0);
    let mut run = Run::default();
    let mut buckets: BTreeMap<u32, Bucket> = BTreeMap::new();
    let mut large = Large::default();
    let pods = experiment.arrivals.len();
    for (id, job) in experiment.arrivals.iter().enumerate() {
        let what = || format!("{choice}, seed {seed}");
        if !progress.goes_on(what, id as f64 / pods as f64) {
            return Ok(None);
        }
        arrived += job.demand();
        let begun = Instant::now();
        let by_others = job.gpus == 0 && workload.cpu_pods != CpuPods::Policy;
        let placed = match by_others {
            true => by_kube_scheduler(workload.cpu_pods, &hosts, &sizes, job),
            false => placer.place(&hosts, job, id),
        };
        run.decision_ns
            .push(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX));
        let percent = 100.0 * arrived as f64 / cards;
        large.come(job, placed.is_none());
        if let Some(placed) = placed {
            let host = hosts.get_mut(placed.host);
            if !host.is_some_and(|host| host.take(job, &placed.cards)) {
                bail!("{choice} put pod {id} where it does not fit: {job:?} on {placed:?}");
            }
            if by_others {
                placer.beside(id, job, placed.host);
            }
            let host = &hosts[placed.host];
            let charged = job.gpus as u64 * host.charge(job);
            used += charged;
            idle -= charged as f64 * 1000.0 / host.card.max(1) as f64;
            waste.update(placed.host, host);
        } else {
            run.first_rejection.get_or_insert(percent);
            let count = run.unplaced.entry(kind(job)).or_default();
            *count = (count.0 + 1, count.1 + job.demand());
            unplaced += job.demand();
        }
        let level = percent.round() as u32;
        run.whole.entry(level).or_insert_with(|| Whole {
            refused_pct: large.refused_pct(),
            ..Whole::of(&hosts)
        });
        let bucket = buckets.entry(level).or_default();
        bucket.0 += 100.0 * used as f64 / capacity as f64;
        bucket.1 += 100.0 * waste.total() / idle.max(1.0);
        bucket.2 += 1;
    }
    (run.allocated, run.fragmented) = (means(&buckets, |it| it.0), means(&buckets, |it| it.1));
    run.unplaced_pct = 100.0 * unplaced as f64 / cards;
    run.decision_ns.sort_unstable();
    progress.done();
    Ok(Some(run))
}

/// Replays the experiments of all seeds, or of the seeds before Ctrl-C.
///
/// # Errors
/// As [`replay`].
pub fn replay_all(
    workload: &Workload,
    choice: Choice,
    seeds: RangeInclusive<u64>,
    progress: &mut Progress,
) -> Result<Vec<Run>> {
    let runs = seeds.map(|seed| replay(workload, choice, seed, progress).transpose());
    runs.map_while(|run| run).collect()
}
