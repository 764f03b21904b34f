//! The file that describes a simulated machine: the answers of its driver about its GPUs.

mod limits;

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use limits::{Limit, Limits, NO_LIMIT};

/// The file's name, in the folder of the library.
pub const FILE: &str = "fake-nvml.yaml";
/// The name by which programs load the library.
const LIBRARY: &str = "libnvidia-ml.so.1";
/// The name by which Cargo builds it.
const BUILT: &str = "libnvidia_ml.so";

/// The library, which Cargo builds next to the program that runs, or in `deps` there.
///
/// # Errors
/// [`ReadError`] if it is in neither.
pub fn library() -> Result<PathBuf, ReadError> {
    let failed = |error| ReadError::File(BUILT.into(), error);
    let beside = std::env::current_exe().map_err(failed)?.with_file_name("");
    let mut places = [beside.clone(), beside.join("deps")].into_iter();
    let found = places.find_map(|it| Some(it.join(BUILT)).filter(|it| it.is_file()));
    found.ok_or_else(|| failed(std::io::ErrorKind::NotFound.into()))
}

/// Copies `library` into a folder, for programs that look for NVML there, and describes this machine in a file next to
/// it. Returns the file's path. The library is a copy, as the loader distinguishes libraries by their files.
///
/// # Errors
/// [`ReadError`] if the folder cannot be written.
pub fn install(library: &Path, folder: &Path, machine: &Machine) -> Result<PathBuf, ReadError> {
    let copy = std::fs::copy(library, folder.join(LIBRARY));
    copy.map_err(|error| ReadError::File(library.to_owned(), error))?;
    let file = folder.join(FILE);
    machine.write(&file)?;
    Ok(file)
}

/// A machine with cards. YAML or JSON; everything has a default.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Machine {
    /// Driver version.
    pub driver: String,
    /// NVML's return code for every call, 0 if the driver works: 9 is "driver not loaded".
    pub error: u32,
    /// The cards in NVML's order.
    pub gpus: Vec<Gpu>,
    /// The events so far. Append new events: a reader only sees events that it has not seen yet.
    pub events: Vec<Event>,
    /// Functions that this driver does not support, as `nvmlDeviceGetUtilizationRates`.
    pub unsupported: Vec<String>,
}

/// A card.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Gpu {
    /// `GPU-…`.
    pub uuid: String,
    /// Model name.
    pub name: String,
    /// Number of its device file.
    pub minor: Option<u32>,
    /// PCI address, as `00000000:17:00.0`.
    pub pci_bus_id: String,
    /// NVML's number of the architecture: 9 is Hopper.
    pub architecture: Option<u32>,
    /// NUMA node nearest to it.
    pub numa_node: Option<u32>,
    /// NVML's return code for every call on this card; 15 is "lost".
    pub error: u32,
    /// All its memory.
    #[serde(rename = "totalMiB")]
    pub total_mib: u64,
    /// Memory that the driver keeps for itself.
    #[serde(rename = "reservedMiB")]
    pub reserved_mib: u64,
    /// Memory in use; the sum of the processes by default.
    #[serde(rename = "usedMiB")]
    pub used_mib: Option<u64>,
    /// Per cent of the time in which a kernel ran.
    pub utilization: Option<u32>,
    /// Who uses it.
    pub processes: Vec<Process>,
    /// Its MIG instances; MIG is off without any, unless it has profiles.
    pub mig: Vec<Mig>,
    /// The profiles of MIG instances that can be made. The library changes the file where it makes one.
    pub profiles: Vec<Profile>,
    /// Cards that are nearer than the system's interconnect.
    pub near: Vec<Near>,
    /// NVML's number of the compute mode: 0 is DEFAULT, 2 PROHIBITED, 3 EXCLUSIVE_PROCESS.
    pub compute_mode: u32,
    /// Active NVLinks.
    pub nvlinks: u32,
}

/// A MIG instance.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Mig {
    /// `MIG-…`.
    pub uuid: String,
    /// As `1g.10gb`.
    pub profile: String,
    /// Its number on the card; its place in the list by default.
    pub id: Option<u32>,
    /// Its first memory slice.
    pub start: u8,
    /// It is a GPU instance without a compute instance, in which no program can run.
    pub bare: bool,
    /// All its memory.
    #[serde(rename = "totalMiB")]
    pub total_mib: u64,
    /// Memory that the driver keeps for itself.
    #[serde(rename = "reservedMiB")]
    pub reserved_mib: u64,
    /// Who uses it.
    pub processes: Vec<Process>,
}

/// A profile of MIG instances.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Profile {
    /// As `1g.10gb`.
    pub name: String,
    /// Memory of an instance.
    #[serde(rename = "totalMiB")]
    pub total_mib: u64,
    /// Its memory slices.
    pub slices: u8,
    /// Its compute slices.
    pub compute_slices: u8,
    /// The memory slices at which one may start.
    pub starts: Vec<u8>,
}

/// A process on a card.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Process {
    /// Its id on the host.
    pub pid: u32,
    /// The memory that it uses; none if the driver does not report it.
    #[serde(rename = "usedMiB")]
    pub used_mib: Option<u64>,
    /// In which lists it is.
    pub kind: Kind,
    /// Per cent of the time in which a kernel of its own ran. If all processes of a card lack it, the driver does not
    /// support the call.
    pub utilization: Option<u32>,
}

/// The kind of a process's use of the card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Kind {
    /// CUDA.
    #[default]
    Compute,
    /// OpenGL or Vulkan.
    Graphics,
    /// Both.
    Both,
    /// A client of MPS.
    Mps,
}

/// How near another card is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Near {
    /// The other's index.
    pub gpu: u32,
    /// NVML's level: 10 one PCIe switch, 20 several, 30 one host bridge, 40 one NUMA node.
    pub level: u32,
    /// NVLinks between the two, in the order of link numbers; 0 if all of them go through
    /// switches, none if no NVLink joins the two.
    pub nvlinks: Option<u32>,
}

impl Gpu {
    /// Is MIG on?
    #[must_use]
    pub fn is_divided(&self) -> bool {
        !self.mig.is_empty() || !self.profiles.is_empty()
    }

    /// The memory slices of an instance; none if its profile is unknown.
    #[must_use]
    pub fn slices(&self, mig: &Mig) -> u8 {
        let mut profiles = self.profiles.iter();
        let known = profiles.find(|profile| profile.name == mig.profile);
        known.map_or(0, |profile| profile.slices)
    }

    /// The place in the list of the instance with this number.
    #[must_use]
    pub fn instance(&self, id: u32) -> Option<usize> {
        let all = self.mig.iter().zip(0..);
        let mut ids = all.map(|(mig, place)| mig.id.unwrap_or(place));
        ids.position(|it| it == id)
    }
}

/// NVML's level when nothing nearer than the whole system connects two cards.
pub(crate) const FAR: u32 = 50;

/// Something that happened to a card.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Event {
    /// The card's UUID.
    pub gpu: String,
    /// NVIDIA's error number; none for an uncorrectable memory error.
    pub xid: Option<u64>,
}

/// The file cannot be used.
#[derive(Debug, Error)]
pub enum ReadError {
    /// It cannot be read.
    #[error("{0}: {1}")]
    File(PathBuf, std::io::Error),
    /// Its text is neither a [`Machine`] nor a list of [`Limit`]s.
    #[error("{0}: {1}")]
    Text(PathBuf, serde_yaml::Error),
}

/// The first driver that limits memory by cgroup.
const LIMITS_SINCE: u32 = 615;

impl Machine {
    /// Does its driver limit memory by cgroup?
    #[must_use]
    pub fn limits_memory(&self) -> bool {
        let major = self.driver.split('.').next();
        major.and_then(|major| major.parse().ok()) >= Some(LIMITS_SINCE)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`ReadError`] if there is none or if it does not describe a machine.
    pub fn read(path: &Path) -> Result<Self, ReadError> {
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|error| ReadError::File(path.to_owned(), error))?;
        serde_yaml::from_str(&text).map_err(|error| ReadError::Text(path.to_owned(), error))
    }

    /// Writes a file so that no reader sees half of it.
    ///
    /// # Errors
    /// [`ReadError`] if it cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), ReadError> {
        let text = serde_yaml::to_string(self);
        let text = text.map_err(|error| ReadError::Text(path.to_owned(), error))?;
        let aside = path.with_extension("new");
        std::fs::write(&aside, text)
            .and_then(|()| std::fs::rename(&aside, path))
            .map_err(|error| ReadError::File(path.to_owned(), error))
    }
}

/// A file and the machine that it described last.
#[derive(Debug)]
pub(crate) struct Followed {
    path: PathBuf,
    stamp: Option<(SystemTime, u64, u64)>,
    machine: Machine,
}

impl Followed {
    /// A file that is not read yet.
    pub(crate) fn new(path: PathBuf) -> Self {
        Self {
            path,
            stamp: None,
            machine: Machine::default(),
        }
    }

    /// The file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The machine as the file describes it now, unless that has become unusable.
    pub(crate) fn now(&mut self) -> Result<&Machine, ReadError> {
        use std::os::unix::fs::MetadataExt as _;
        let meta = std::fs::metadata(&self.path);
        let meta = meta.map_err(|error| ReadError::File(self.path.clone(), error))?;
        // A file that was replaced has another inode, whatever the clock's resolution.
        let stamp = meta
            .modified()
            .ok()
            .map(|time| (time, meta.len(), meta.ino()));
        if stamp.is_none() || stamp != self.stamp {
            self.machine = Machine::read(&self.path)?;
            self.stamp = stamp;
        }
        Ok(&self.machine)
    }
}
