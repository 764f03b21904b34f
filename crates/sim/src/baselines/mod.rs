//! The policies that others published, and two that they left out, as in the FGD artifact: integer
//! scores, the first host in order wins a tie. They keep no books of their own.

mod fgd;
mod scores;

use std::fmt;
use std::str::FromStr;

use gpustow_pack::PolicyKind;

pub use fgd::{Fragmentation, TargetMix};

use crate::hosts::{Host, Job};
use crate::random::Random;
use crate::replay::{Placed, Placer};
use crate::stowed::{Settings, Stowed};

/// A policy by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// Any host, any card.
    Random,
    /// Alignment of the pod's request with the free resources.
    DotProd,
    /// Hosts that hold pods of the same kind first.
    Clustering,
    /// Part-used cards first, then part-used hosts.
    Packing,
    /// Least CPU and GPU left over.
    BestFit,
    /// Fragmentation gradient descent; the first host wins a tie, as in the artifact.
    Fgd,
    /// `Fgd` with kube-scheduler's own random choice among equals.
    FgdRandomTies,
    /// The host with the least free GPU, its tightest card.
    FullestNode,
    /// Stock kube-scheduler with dynamic resource allocation and consumable capacity: its default scores of CPU and host
    /// memory, a random one of equals, and the first devices that fit.
    Dra,
    /// `Dra` with `MostAllocated` for CPU and host memory.
    DraMostAllocated,
    /// One of gpustow's own.
    Own(PolicyKind),
}

impl Choice {
    /// The policies that are not gpustow's own.
    pub const BASELINES: [Self; 10] = [
        Self::Random,
        Self::DotProd,
        Self::Clustering,
        Self::Packing,
        Self::BestFit,
        Self::Fgd,
        Self::FgdRandomTies,
        Self::FullestNode,
        Self::Dra,
        Self::DraMostAllocated,
    ];

    /// Every policy.
    pub fn all() -> impl Iterator<Item = Self> {
        Self::BASELINES
            .into_iter()
            .chain(PolicyKind::ALL.into_iter().map(Self::Own))
    }

    /// The name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::DotProd => "dotprod",
            Self::Clustering => "clustering",
            Self::Packing => "packing",
            Self::BestFit => "bestfit",
            Self::Fgd => "fgd",
            Self::FgdRandomTies => "fgd-random-ties",
            Self::FullestNode => "fullest-node",
            Self::Dra => "dra",
            Self::DraMostAllocated => "dra-most-allocated",
            Self::Own(kind) => kind.name(),
        }
    }

    /// The policy at work on these hosts; `jobs` is the whole trace, which FGD knows in advance. the settings are for
    /// gpustow's own.
    #[must_use]
    pub fn placer(
        self,
        hosts: &[Host],
        jobs: &[Job],
        seed: u64,
        settings: Settings,
    ) -> Box<dyn Placer> {
        match self {
            Self::Own(kind) => Box::new(Stowed::new(hosts, kind, settings)),
            Self::Fgd | Self::FgdRandomTies => {
                let random = (self == Self::FgdRandomTies).then(|| Random::new(seed));
                Box::new(fgd::Fgd::new(TargetMix::of(jobs), random))
            }
            _ => Box::new(scores::Scored::new(self, hosts, seed)),
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Choice {
    type Err = String;
    fn from_str(name: &str) -> Result<Self, String> {
        Self::all()
            .find(|choice| choice.name() == name)
            .ok_or_else(|| {
                let names: Vec<_> = Self::all().map(Self::name).collect();
                format!("unknown policy {name:?}: use one of {}", names.join(" "))
            })
    }
}

/// The host with the highest score among those where the job fits, the first of equals.
fn best_host(hosts: &[Host], job: &Job, mut score: impl FnMut(usize) -> i64) -> Option<usize> {
    let mut best: Option<(i64, usize)> = None;
    for (index, host) in hosts.iter().enumerate() {
        if host.fits(job) {
            let score = score(index);
            if best.is_none_or(|(highest, _)| score > highest) {
                best = Some((score, index));
            }
        }
    }
    best.map(|(_, host)| host)
}

fn usual(hosts: &[Host], host: usize, job: &Job) -> Placed {
    Placed {
        host,
        cards: hosts[host].usual_cards(job),
    }
}
