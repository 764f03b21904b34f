//! One workload through one policy: pods come one by one, and what fits nowhere is dropped.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Instant;

use anyhow::{Result, bail};

use crate::baselines::{Choice, Fragmentation, TargetMix};
use crate::hosts::{Host, Job};
use crate::progress::Progress;
use crate::protocol::Workload;

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

    /// A minute has gone by.
    fn tick(&mut self) {}
}

/// What one run showed. All percentages are of the cluster's cards.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// Units allocated, by GPUs asked for so far (whole percent): the mean within each percent.
    pub allocated: BTreeMap<u32, f64>,
    /// Free cards that are of no use to the trace's mix, in percent of what is free, likewise.
    pub fragmented: BTreeMap<u32, f64>,
    /// GPUs asked for when a pod was turned away for the first time.
    pub first_rejection: Option<f64>,
    /// Pods and thousandths of cards turned away, by [`kind`].
    pub unplaced: BTreeMap<&'static str, (usize, u64)>,
    /// Thousandths of cards turned away, in percent.
    pub unplaced_pct: f64,
    /// Time of each decision in nanoseconds, ascending.
    pub decision_ns: Vec<u64>,
}

/// What a pod's demand is called in reports.
#[must_use]
pub fn kind(job: &Job) -> &'static str {
    match (job.whole(), job.gpus) {
        (_, 0) => "cpu",
        (false, _) => "share",
        (true, 1) => "1-gpu",
        (true, 2) => "2-gpu",
        (true, 3..=4) => "4-gpu",
        (true, _) => "8-gpu",
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
    let mut placer = choice.placer(&hosts, &workload.jobs, seed);
    let mut waste = Fragmentation::new(TargetMix::of(&workload.jobs), &hosts);
    let capacity: u64 = hosts.iter().flat_map(|host| &host.left).sum();
    let cards = 1000.0 * workload.cards() as f64;
    let (mut arrived, mut used, mut idle, mut unplaced) = (0, 0, cards, 0);
    let mut run = Run::default();
    let mut buckets: BTreeMap<u32, (f64, f64, u32)> = BTreeMap::new();
    let pods = experiment.arrivals.len();
    for (id, job) in experiment.arrivals.iter().enumerate() {
        let what = || format!("{choice}, seed {seed}");
        if !progress.goes_on(what, id as f64 / pods as f64) {
            return Ok(None);
        }
        arrived += job.demand();
        let begun = Instant::now();
        let placed = placer.place(&hosts, job, id);
        run.decision_ns
            .push(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX));
        let percent = 100.0 * arrived as f64 / cards;
        if let Some(placed) = placed {
            let host = hosts.get_mut(placed.host);
            if !host.is_some_and(|host| host.take(job, &placed.cards)) {
                bail!("{choice} put pod {id} where it does not fit: {job:?} on {placed:?}");
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
        let bucket = buckets.entry(percent.round() as u32).or_default();
        bucket.0 += 100.0 * used as f64 / capacity as f64;
        bucket.1 += 100.0 * waste.total() / idle.max(1.0);
        bucket.2 += 1;
    }
    for (percent, (allocated, fragmented, events)) in buckets {
        run.allocated.insert(percent, allocated / f64::from(events));
        run.fragmented
            .insert(percent, fragmented / f64::from(events));
    }
    run.unplaced_pct = 100.0 * unplaced as f64 / cards;
    run.decision_ns.sort_unstable();
    progress.done();
    Ok(Some(run))
}

/// Replays the experiments of all seeds, or of those that Ctrl-C lets.
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
