//! The GPUs of this machine, as NVML describes them.

mod limits;
mod mig;
mod nvml;

use std::cmp::Reverse;
use std::ops::ControlFlow;

use gpustow_api::faults::NodeFault;
use gpustow_api::gpunode::{Near, Place};
use gpustow_api::instances::OnDemand;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::instances::Unmade;

pub use limits::{Ask, Group, Limit, Wanted};
pub use nvml::NvmlDevices;

/// The result of one look at the cards.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Reading {
    /// Driver version, if the driver reports it.
    pub driver: Option<String>,
    /// Cards and MIG instances in NVML's order. A divided card is among them only if the agent makes instances on it.
    /// The instances that the agent made are not among them.
    pub cards: Vec<Card>,
    /// Faults since the last look.
    pub faults: Vec<Fault>,
    /// Pods whose MIG instances could not be made.
    #[serde(skip)]
    pub unmade: Vec<Unmade>,
    /// The limits of containers that were asked for.
    #[serde(skip)]
    pub limits: Vec<Limit>,
}

/// A card or a MIG instance as it is now.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Card {
    /// NVML's UUID.
    pub uuid: String,
    /// NVML's index, of the card for an instance.
    pub index: u32,
    /// Model name.
    pub model: String,
    /// Its place in the machine and its kind, as far as they are known.
    pub place: Place,
    /// Its memory; none if the card does not report it.
    pub memory: Option<Memory>,
    /// Per cent of time in which a kernel ran.
    pub utilization: Option<u32>,
    /// The processes that use it; none if the card does not report them.
    pub processes: Option<Vec<Process>>,
    /// Why it does not answer, if so.
    pub failure: Option<String>,
    /// The driver takes limits of memory for it.
    pub can_limit: bool,
    /// So many processes may use it, by its compute mode; any number if none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub most_processes: Option<u32>,
    /// The instances that it has and could have, if the agent makes some for pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_demand: Option<OnDemand>,
}

/// A card's memory in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Memory {
    /// All of it.
    pub total: u64,
    /// Memory that the driver keeps for itself.
    pub reserved: u64,
    /// Memory in use, apart from the driver's reserve.
    pub used: u64,
}

/// A process that uses a card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Process {
    /// Its id on the host.
    pub pid: u32,
    /// Bytes; none if the driver does not report them.
    pub used: Option<u64>,
    /// It has done something there since the last look; none if the driver does not report that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub busy: Option<bool>,
    /// It is a client of MPS, whose end can take other clients with it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub mps: bool,
}

/// Something went wrong with a card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Its UUID; that of the whole card for a MIG instance's.
    pub uuid: String,
    /// The kind of fault.
    pub kind: FaultKind,
}

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum FaultKind {
    /// NVIDIA's error of this number.
    Xid(u64),
    /// A memory error that could not be corrected.
    Ecc,
}

/// There are no cards to be seen.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DeviceError {
    /// The library is not there.
    #[error(
        "cannot load {library}: {problem}; is this a GPU node, and does the container get the driver's libraries?"
    )]
    Library {
        /// The library that the agent tried to load.
        library: String,
        /// Why it was not.
        problem: String,
    },
    /// The library is there, the driver is not.
    #[error("the NVIDIA driver is not loaded")]
    DriverNotLoaded,
    /// The driver does not answer.
    #[error("the NVIDIA driver does not answer: {0}")]
    Driver(String),
    /// The driver shows this process a limit instead of the card's size.
    #[error(
        "this agent is under a limit of GPU memory, {0}: run it without one, or the driver shows it the limit instead of the card"
    )]
    Limited(String),
}

impl DeviceError {
    /// The fault of the node that this error means.
    #[must_use]
    pub fn fault(&self) -> NodeFault {
        match self {
            Self::Library { .. } => NodeFault::LibraryMissing,
            Self::DriverNotLoaded => NodeFault::DriverNotLoaded,
            Self::Driver(_) => NodeFault::DriverFailed,
            Self::Limited(_) => NodeFault::UnderGpuLimit,
        }
    }

    /// One word for conditions and metrics.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        self.fault().into()
    }
}

/// A source that knows the cards. Calls may block: keep them off the event loop.
pub trait Devices: Send {
    /// Reads the cards again and again, and hands every reading to `each`, which decides on the pause. Returns without
    /// an error when `each` breaks, or when a fresh start is better.
    ///
    /// # Errors
    /// [`DeviceError`] if there is nothing to be seen any more.
    fn watch(
        &mut self,
        each: &mut dyn FnMut(Reading) -> ControlFlow<()>,
    ) -> Result<(), DeviceError>;
}

/// Paths through PCIe and the host in `nvidia-smi topo`'s words, nearest first.
const LEVELS: [&str; 5] = ["PIX", "PXB", "PHB", "NODE", "SYS"];

/// The connection of a card to another one.
struct Path {
    /// The other's index.
    gpu: u32,
    /// NVLinks between the two.
    nvlinks: usize,
    /// The path through PCIe and the host, one of [`LEVELS`].
    level: &'static str,
}

/// The best paths, nearest first.
fn nearest_first(mut paths: Vec<Path>) -> Vec<Near> {
    let level = |path: &Path| LEVELS.iter().position(|level| *level == path.level);
    paths.sort_by_key(|path| (Reverse(path.nvlinks), level(path), path.gpu));
    let near = paths.into_iter().map(|path| Near {
        gpu: path.gpu,
        path: match path.nvlinks {
            0 => path.level.to_owned(),
            links => format!("NV{links}"),
        },
    });
    near.collect()
}
