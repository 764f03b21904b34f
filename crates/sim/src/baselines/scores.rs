//! Policies that look at one host's free CPU and cards and score it from 0 to 100.

use super::{Choice, best_host, usual};
use crate::hosts::{Host, Job};
use crate::random::Random;
use crate::replay::{Placed, Placer};

/// The largest host's CPU, in thousandths of a core, by the artifact.
const MAX_CPU: f64 = 128_000.0;
/// The largest host's cards, in thousandths of a card, by the artifact.
const MAX_GPU: f64 = 8000.0;
/// Kinds of pods that the clustering policy distinguishes: share, 1, 2, 4 and 8 cards.
const KINDS: usize = 5;

/// One of these policies at work.
pub(super) struct Scored {
    choice: Choice,
    random: Random,
    /// Pods of each kind on each host.
    kinds: Vec<[u32; KINDS]>,
    /// CPU and host memory of each host while it was empty.
    sizes: Vec<(u64, u64)>,
}

fn kind(job: &Job) -> usize {
    match (job.whole(), job.gpus) {
        (false, _) => 0,
        (true, 1) => 1,
        (true, 2 | 3) => 2,
        (true, 4..=7) => 3,
        (true, _) => 4,
    }
}

/// Thousandths of cards that are free.
fn gpu_left(host: &Host) -> f64 {
    let left: u64 = host.left.iter().sum();
    left as f64 * 1000.0 / host.card.max(1) as f64
}

/// Thousandths of cards that the job is charged there.
fn gpu_asked(host: &Host, job: &Job) -> f64 {
    (job.gpus as u64 * host.charge(job)) as f64 * 1000.0 / host.card.max(1) as f64
}

fn dot_product(host: &Host, job: &Job) -> i64 {
    let cpu = host.cpu as f64 * job.cpu as f64 / (MAX_CPU * MAX_CPU);
    let gpu = gpu_left(host) * gpu_asked(host, job) / (MAX_GPU * MAX_GPU);
    (100.0 * (1.0 - 0.5 * (cpu + gpu))).floor() as i64
}

fn best_fit(host: &Host, job: &Job) -> i64 {
    let cpu = (host.cpu - job.cpu) as f64 / MAX_CPU;
    let gpu = (gpu_left(host) - gpu_asked(host, job)) / MAX_GPU;
    (100.0 * (1.0 - 0.5 * (cpu + gpu))).floor() as i64
}

fn clustering(host: &Host, kinds: &[u32; KINDS], job: &Job) -> i64 {
    if job.gpus == 0 {
        return 0;
    }
    let same = kinds[kind(job)] > 0;
    let others = kinds
        .iter()
        .enumerate()
        .any(|(at, &pods)| at != kind(job) && pods > 0);
    let base = match (same, others) {
        (true, false) => 75,
        (true, true) => 50,
        (false, false) => 25,
        (false, true) => 0,
    };
    base + (25.0 * (MAX_GPU - gpu_left(host)) / MAX_GPU) as i64
}

fn packing(host: &Host, job: &Job) -> i64 {
    if job.gpus == 0 {
        return 0;
    }
    let is_free = |card: &usize| host.left[*card] == host.card;
    let cards = host.usual_cards(job);
    let opened = cards.iter().filter(|card| is_free(card)).count() as i64;
    let used_host = host.left.iter().any(|&left| left < host.card);
    if !used_host {
        33 - host.left.len() as i64
    } else if opened > 0 {
        (50 - opened).max(33)
    } else {
        let left = |&card: &usize| host.left[card] as f64 * 100.0 / host.card as f64;
        (100.0 - cards.iter().map(left).sum::<f64>() / 10.0).max(50.0) as i64
    }
}

/// The sum of the scores of kube-scheduler's plugins NodeResourcesFit and NodeResourcesBalancedAllocation, by the whole
/// numbers of `least_allocated.go`, `most_allocated.go` and `balanced_allocation.go` of kubernetes/kubernetes 1.36.
fn stock(host: &Host, size: (u64, u64), job: &Job, most_allocated: bool) -> i64 {
    let parts = [(host.cpu, job.cpu, size.0), (host.ram, job.ram, size.1)];
    let fit = parts.map(|(left, asked, all)| {
        let left = left.saturating_sub(asked);
        let part = if most_allocated { all - left } else { left };
        (100 * part / all.max(1)) as i64
    });
    let balance = |with_pod: bool| {
        let used = parts.map(|(left, asked, all)| {
            let asked = if with_pod { asked } else { 0 };
            1.0 - left.saturating_sub(asked) as f64 / all.max(1) as f64
        });
        (100.0 * (1.0 - (used[0] - used[1]).abs() / 2.0)) as i64
    };
    (fit[0] + fit[1]) / 2 + 50 + (50 + balance(true) - balance(false)) / 2
}

/// The first devices that fit, in the order in which a driver publishes them.
fn first_cards(host: &Host, job: &Job) -> Vec<usize> {
    let all = 0..host.left.len();
    all.filter(|card| host.card_fits(*card, job))
        .take(job.gpus)
        .collect()
}

impl Scored {
    /// Stock kube-scheduler chooses a random one of the hosts with the highest score.
    fn stock(&mut self, hosts: &[Host], job: &Job) -> Option<Placed> {
        let most = self.choice == Choice::DraMostAllocated;
        let (sizes, random) = (&self.sizes, &mut self.random);
        let score = |at: usize| {
            let score = stock(&hosts[at], sizes[at], job, most);
            (score << 20) + random.below(1 << 20) as i64
        };
        let host = best_host(hosts, job, score)?;
        let cards = first_cards(&hosts[host], job);
        Some(Placed { host, cards })
    }

    pub(super) fn new(choice: Choice, hosts: &[Host], seed: u64) -> Self {
        let kinds = vec![[0; KINDS]; hosts.len()];
        Self {
            choice,
            random: Random::new(seed),
            kinds,
            sizes: hosts.iter().map(|host| (host.cpu, host.ram)).collect(),
        }
    }

    fn any(&mut self, hosts: &[Host], job: &Job) -> Option<Placed> {
        let fitting: Vec<usize> = (0..hosts.len()).filter(|&at| hosts[at].fits(job)).collect();
        let host = *fitting.get(self.random.below(fitting.len()))?;
        let mut cards: Vec<usize> = (0..hosts[host].left.len())
            .filter(|&card| hosts[host].card_fits(card, job))
            .collect();
        self.random.shuffle(&mut cards);
        cards.truncate(job.gpus);
        Some(Placed { host, cards })
    }
}

impl Placer for Scored {
    fn place(&mut self, hosts: &[Host], job: &Job, _id: usize) -> Option<Placed> {
        let best = match self.choice {
            Choice::DotProd => best_host(hosts, job, |at| dot_product(&hosts[at], job)),
            Choice::BestFit => best_host(hosts, job, |at| best_fit(&hosts[at], job)),
            Choice::Clustering => best_host(hosts, job, |at| {
                clustering(&hosts[at], &self.kinds[at], job)
            }),
            Choice::Packing => best_host(hosts, job, |at| packing(&hosts[at], job)),
            Choice::FullestNode => best_host(hosts, job, |at| -gpu_left(&hosts[at]) as i64),
            Choice::Dra | Choice::DraMostAllocated => return self.stock(hosts, job),
            _ => return self.any(hosts, job),
        };
        let placed = usual(hosts, best?, job);
        if job.gpus > 0 {
            self.kinds[placed.host][kind(job)] += 1;
        }
        Some(placed)
    }

    fn left(&mut self, _id: usize, job: &Job, placed: &Placed) {
        let has_kinds = !matches!(
            self.choice,
            Choice::Random | Choice::Dra | Choice::DraMostAllocated
        );
        if job.gpus > 0 && has_kinds {
            self.kinds[placed.host][kind(job)] -= 1;
        }
    }
}
