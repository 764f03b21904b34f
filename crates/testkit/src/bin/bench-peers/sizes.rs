//! The requests of pods: six round sizes in turn, or the GPU pods of a list in the format of Alibaba's openb trace.

use std::path::Path;

use anyhow::{Result, ensure};
use gpustow_sim::trace::{TracePod, pods, read};

use crate::CARDS;

/// MiB of the round sizes.
const ROUND: [u64; 6] = [4_096, 8_192, 10_240, 16_384, 24_576, 40_960];

/// The request of a pod.
#[derive(Clone, Copy)]
pub(crate) struct Size {
    pub(crate) gpus: u64,
    /// MiB of each GPU.
    pub(crate) mib: u64,
    pub(crate) cpu_milli: u64,
    pub(crate) ram_mib: u64,
}

impl Size {
    pub(crate) fn all_mib(&self) -> u64 {
        self.gpus * self.mib
    }

    /// Does it take all GPUs of a node?
    pub(crate) fn is_node(&self) -> bool {
        self.gpus == CARDS.len() as u64
    }
}

/// The sizes in the order in which pods have them. The sizes of a list come in a random order, equal in each run.
pub(crate) fn sizes(openb: Option<&Path>) -> Result<Vec<Size>> {
    let Some(list) = openb else {
        let round = |mib| Size {
            gpus: 1,
            mib,
            cpu_milli: 100,
            ram_mib: 0,
        };
        return Ok(ROUND.map(round).into());
    };
    let of = |pod: TracePod| Size {
        gpus: pod.gpus as u64,
        mib: CARDS[0] * pod.gpu_milli / 1000,
        cpu_milli: pod.cpu_milli,
        ram_mib: pod.ram_mib,
    };
    let all = pods(&read(list)?)?.into_iter().map(of);
    let mut all: Vec<Size> = all.filter(|it| it.gpus > 0 && it.mib > 0).collect();
    ensure!(!all.is_empty(), "{} has no GPU pod", list.display());
    fastrand::Rng::with_seed(1).shuffle(&mut all);
    Ok(all)
}
