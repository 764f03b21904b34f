//! The protocol of the FGD paper (Weng et al., USENIX ATC 2023): a cluster in random order, and
//! arrivals drawn from a trace until 130 % of its cards are asked for. It does not know policies.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

use anyhow::{Result, bail};
use clap::ValueEnum;

use crate::hosts::{Host, Job, Models};
use crate::random::Random;
use crate::trace::{TraceNode, TracePod};

/// GPUs asked for, relative to those there are, at which arrivals end.
const TUNE: f64 = 1.3;
/// MiB that a whole T4 offers: a share is a part of it where cards are counted in MiB.
const T4_MIB: u64 = 15_109;

/// The unit of a card's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Thousandths of a card: the paper's own problem.
    Units,
    /// MiB, with the sizes that the paper's code assumes for the models whose name is withheld.
    MibPaper,
    /// MiB, with the withheld models taken for A10 and A100.
    MibGuess,
}

impl Mode {
    /// Every mode.
    pub const ALL: [Self; 3] = [Self::Units, Self::MibPaper, Self::MibGuess];

    /// The name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Units => "u",
            Self::MibPaper => "r-paper",
            Self::MibGuess => "r-guess",
        }
    }

    /// Units of a card of `model`.
    fn card(self, model: &str) -> Option<u64> {
        let (g2, g3) = match self {
            Self::Units => return Some(1000),
            Self::MibPaper => (20_000, 30_000),
            Self::MibGuess => (22_731, 81_251),
        };
        Some(match model {
            "T4" => T4_MIB,
            "P100" => 16_280,
            "V100M16" => 16_160,
            "V100M32" => 32_510,
            "A10" => 22_731,
            "G2" => g2,
            "G3" => g3,
            _ => return None,
        })
    }

    /// Units of a share of so many thousandths.
    fn share(self, milli: u64) -> u64 {
        match self {
            Self::Units => milli,
            Self::MibPaper | Self::MibGuess => (milli * T4_MIB).div_ceil(1000),
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Mode {
    type Err = String;
    fn from_str(name: &str) -> Result<Self, String> {
        let mode = Self::ALL.into_iter().find(|mode| mode.name() == name);
        mode.ok_or_else(|| format!("unknown mode {name:?}: use one of u r-paper r-guess"))
    }
}

/// Who places pods without GPUs, which never reach gpustow in a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CpuPods {
    /// The policy itself, as the paper has it
    Policy,
    /// kube-scheduler, as it is set up by default: where most CPU and host memory stay free
    LeastAllocated,
    /// kube-scheduler, set up to fill nodes: where least of them stays free
    MostAllocated,
}

/// A cluster and the jobs of a trace, ready to be drawn from.
#[derive(Clone, Debug)]
pub struct Workload {
    /// The hosts in the order of their names.
    pub hosts: Vec<Host>,
    /// The jobs of the trace in the order of their names.
    pub jobs: Vec<Job>,
    /// So many of the hosts, drawn by seed; all if there are fewer.
    pub nodes: usize,
    /// The jobs that come instead from some point on.
    pub wave: Option<Wave>,
    /// Who places pods without GPUs.
    pub cpu_pods: CpuPods,
    mode: Mode,
    models: Vec<String>,
    classes: HashMap<JobKind, usize>,
}

/// From some point on, until as much has been asked for as there is, jobs come from another list.
#[derive(Clone, Debug)]
pub struct Wave {
    /// Percent of the cards asked for when it begins.
    pub at: u32,
    /// The jobs for random draws.
    pub jobs: Vec<Job>,
}

/// The class of a job: CPU, host memory, GPUs, thousandths, models.
type JobKind = (u64, u64, usize, u64, Models);

/// One experiment: hosts in the order that ties are broken in, and jobs in the order of arrival.
#[derive(Clone, Debug)]
pub struct Experiment {
    /// The hosts.
    pub hosts: Vec<Host>,
    /// The arrivals.
    pub arrivals: Vec<Job>,
}

impl Workload {
    /// The workload of these lists.
    ///
    /// # Errors
    /// If a model's size is not known, or there are too many models.
    pub fn new(mut nodes: Vec<TraceNode>, pods: Vec<TracePod>, mode: Mode) -> Result<Self> {
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        let mut models: Vec<String> = Vec::new();
        let mut hosts = Vec::new();
        for node in &nodes {
            let known = models.iter().position(|model| *model == node.model);
            let index = known.unwrap_or_else(|| {
                models.push(node.model.clone());
                models.len() - 1
            });
            if index >= Models::BITS as usize {
                bail!("more than {} models of GPU", Models::BITS);
            }
            let Some(card) = mode.card(&node.model) else {
                bail!(
                    "node {}: the memory of a {:?} is not known",
                    node.name,
                    node.model
                );
            };
            hosts.push(Host {
                cpu: node.cpu_milli,
                ram: node.ram_mib,
                model: 1 << index,
                card,
                left: vec![card; node.gpus],
            });
        }
        let mut workload = Self {
            hosts,
            jobs: Vec::new(),
            nodes: usize::MAX,
            wave: None,
            cpu_pods: CpuPods::Policy,
            mode,
            models,
            classes: HashMap::new(),
        };
        workload.jobs = workload.read(pods);
        Ok(workload)
    }

    /// The jobs of a pod list, in the order of their names.
    #[must_use]
    pub fn read(&mut self, mut pods: Vec<TracePod>) -> Vec<Job> {
        pods.sort_by(|a, b| a.name.cmp(&b.name));
        let Self {
            mode,
            models,
            classes,
            ..
        } = self;
        let job = |pod: &TracePod| {
            let bit = |model: &String| models.iter().position(|known| known == model);
            let bits = pod.models.iter().filter_map(bit);
            let bound = bits.fold(0, |set: Models, bit| set | 1 << bit);
            let mut job = Job {
                class: 0,
                cpu: pod.cpu_milli,
                ram: pod.ram_mib,
                gpus: pod.gpus,
                milli: pod.gpu_milli,
                units: mode.share(pod.gpu_milli),
                models: if pod.models.is_empty() {
                    Models::MAX
                } else {
                    bound
                },
            };
            let next = classes.len();
            let key = (job.cpu, job.ram, job.gpus, job.milli, job.models);
            job.class = *classes.entry(key).or_insert(next);
            job
        };
        pods.iter().map(job).collect()
    }

    /// Number of cards.
    #[must_use]
    pub fn cards(&self) -> usize {
        self.hosts.iter().map(|host| host.left.len()).sum()
    }

    /// The experiment of a seed: all jobs of the trace in random order, then jobs drawn with
    /// replacement (or jobs taken out) until arrivals ask for 130 % of the cards, or until the wave.
    #[must_use]
    pub fn experiment(&self, seed: u64) -> Experiment {
        let mut random = Random::new(seed);
        let mut hosts = self.hosts.clone();
        random.shuffle(&mut hosts);
        hosts.truncate(self.nodes);
        let cards: u64 = hosts.iter().map(|host| host.left.len() as u64).sum();
        let mut arrivals = self.jobs.clone();
        random.shuffle(&mut arrivals);
        let wanted = (TUNE * 1000.0 * cards as f64) as u64;
        let mut demand: u64 = arrivals.iter().map(Job::demand).sum();
        while demand > wanted {
            let index = random.below(arrivals.len());
            demand -= arrivals.remove(index).demand();
        }
        while demand > 0 {
            let job = &self.jobs[random.below(self.jobs.len())];
            demand += job.demand();
            if demand > wanted {
                break;
            }
            arrivals.push(job.clone());
        }
        if let Some(wave) = &self.wave {
            let mut demand = 0;
            let begins = u64::from(wave.at) * 10 * cards;
            arrivals.retain(|job| {
                demand += job.demand();
                demand <= begins
            });
            let mut demand: u64 = arrivals.iter().map(Job::demand).sum();
            while demand < 1000 * cards && !wave.jobs.is_empty() {
                let job = &wave.jobs[random.below(wave.jobs.len())];
                // A list without GPUs would never end.
                demand += job.demand().max(1);
                arrivals.push(job.clone());
            }
        }
        Experiment { hosts, arrivals }
    }
}
