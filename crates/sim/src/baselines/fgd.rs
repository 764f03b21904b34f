//! Fragmentation gradient descent, as its artifact computes it: the whole trace is known in
//! advance, and the score is an integer.

use std::collections::HashMap;

use super::best_host;
use crate::hosts::{Host, Job};
use crate::random::Random;
use crate::replay::{Placed, Placer};

/// The most popular classes of the trace that make up this share of its pods.
const POPULAR: f64 = 0.95;

/// The expected pods, with their shares.
#[derive(Clone, Debug)]
pub struct TargetMix(Vec<(Job, f64)>);

impl TargetMix {
    /// The popular classes among `jobs`; classes do not depend on host memory.
    #[must_use]
    pub fn of(jobs: &[Job]) -> Self {
        let mut counts: HashMap<_, (usize, usize)> = HashMap::new();
        for (index, job) in jobs.iter().enumerate() {
            let key = (job.cpu, job.milli, job.gpus, job.models);
            counts.entry(key).or_insert((0, index)).0 += 1;
        }
        let mut counts: Vec<(usize, usize)> = counts.into_values().collect();
        counts.sort_by_key(|&(count, first)| (std::cmp::Reverse(count), first));
        let mut kept = 0;
        let mut classes = Vec::new();
        for (count, first) in counts {
            if kept as f64 >= POPULAR * jobs.len() as f64 {
                break;
            }
            kept += count;
            classes.push((jobs[first].clone(), count as f64));
        }
        classes
            .iter_mut()
            .for_each(|(_, share)| *share /= kept as f64);
        Self(classes)
    }

    /// The free part of the host that is of no use to the mix, in thousandths of cards.
    fn waste(&self, host: &Host, cpu: u64, left: &[u64]) -> f64 {
        let sum = |useless: &dyn Fn(u64) -> bool| {
            left.iter().filter(|left| useless(**left)).sum::<u64>() as f64
        };
        let of = |(job, share): &(Job, f64)| {
            let need = if job.whole() { host.card } else { job.units };
            let fitting = left.iter().filter(|left| **left >= need).count();
            let lacks = host.model & job.models == 0 || cpu < job.cpu || fitting < job.gpus;
            share
                * if job.gpus == 0 || lacks {
                    sum(&|_| true)
                } else {
                    sum(&|left| left < need)
                }
        };
        self.0.iter().map(of).sum::<f64>() * 1000.0 / host.card.max(1) as f64
    }
}

/// The cluster's fragmentation, kept up to date host by host.
#[derive(Clone, Debug)]
pub struct Fragmentation {
    mix: TargetMix,
    wasted: Vec<f64>,
}

impl Fragmentation {
    /// The fragmentation of these hosts.
    #[must_use]
    pub fn new(mix: TargetMix, hosts: &[Host]) -> Self {
        let wasted = hosts
            .iter()
            .map(|host| mix.waste(host, host.cpu, &host.left))
            .collect();
        Self { mix, wasted }
    }

    /// A host has changed.
    pub fn update(&mut self, index: usize, host: &Host) {
        self.wasted[index] = self.mix.waste(host, host.cpu, &host.left);
    }

    /// Thousandths of cards that are free and of no use to the mix.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.wasted.iter().sum()
    }
}

/// The policy at work.
pub(super) struct Fgd {
    mix: TargetMix,
    /// Breaks ties among hosts, if the first is not to win.
    random: Option<Random>,
    /// Score and cards by host and class.
    known: Vec<HashMap<usize, (i64, Vec<usize>)>>,
}

impl Fgd {
    pub(super) fn new(mix: TargetMix, random: Option<Random>) -> Self {
        Self {
            mix,
            random,
            known: Vec::new(),
        }
    }
}

/// The best cards of a host and their score.
fn score(mix: &TargetMix, host: &Host, job: &Job) -> (i64, Vec<usize>) {
    let before = mix.waste(host, host.cpu, &host.left);
    let after = |cards: &[usize]| {
        let mut host = host.clone();
        host.take(job, cards);
        let gain = (before - mix.waste(&host, host.cpu, &host.left)) / 1000.0;
        (100.0 / (1.0 + (-gain).exp())) as i64
    };
    if job.gpus == 0 || job.whole() {
        let cards = host.usual_cards(job);
        return (after(&cards), cards);
    }
    let mut best = (-1, Vec::new());
    for card in 0..host.left.len() {
        let twin = host.left[..card].contains(&host.left[card]);
        if !twin && host.card_fits(card, job) {
            let score = after(&[card]);
            if score > best.0 {
                best = (score, vec![card]);
            }
        }
    }
    best
}

impl Placer for Fgd {
    fn place(&mut self, hosts: &[Host], job: &Job, _id: usize) -> Option<Placed> {
        let Self { mix, random, known } = self;
        known.resize_with(hosts.len(), HashMap::new);
        let mut of = |at: usize| {
            known[at]
                .entry(job.class)
                .or_insert_with(|| score(mix, &hosts[at], job))
                .0
        };
        let host = match random {
            None => best_host(hosts, job, of)?,
            Some(random) => {
                let fitting: Vec<usize> =
                    (0..hosts.len()).filter(|&at| hosts[at].fits(job)).collect();
                let highest = fitting.iter().map(|&at| of(at)).max()?;
                let best: Vec<usize> = fitting
                    .into_iter()
                    .filter(|&at| of(at) == highest)
                    .collect();
                best[random.below(best.len())]
            }
        };
        let cards = known[host]
            .get(&job.class)
            .map(|(_, cards)| cards.clone())?;
        known[host].clear();
        Some(Placed { host, cards })
    }

    fn left(&mut self, _id: usize, _job: &Job, placed: &Placed) {
        self.known[placed.host].clear();
    }

    fn beside(&mut self, _id: usize, _job: &Job, host: usize) {
        if let Some(known) = self.known.get_mut(host) {
            known.clear();
        }
    }
}
