//! Limits of GPU memory by cgroup, in a file next to the machine's: other processes read the limits that one process
//! sets.

use std::fs::File;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{Gpu, ReadError};

/// NVML's hard limit that limits nothing.
pub const NO_LIMIT: u64 = u64::MAX;

/// The memory of a card that a cgroup may use, in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Limit {
    /// The card's UUID.
    pub gpu: String,
    /// Full path of the cgroup's directory.
    pub cgroup: PathBuf,
    /// Memory that the driver tries to keep for it.
    pub soft: u64,
    /// The most memory that it can use.
    pub hard: u64,
}

/// The limits of a machine.
#[derive(Clone, Debug)]
pub struct Limits(PathBuf);

impl Limits {
    /// The limits of the machine that the file `machine` describes. They are in a file next to it.
    #[must_use]
    pub fn beside(machine: &Path) -> Self {
        Self(machine.with_extension("limits.yaml"))
    }

    /// All limits; limits of cgroups that are gone are left out.
    ///
    /// # Errors
    /// [`ReadError`] if the file cannot be used.
    pub fn all(&self) -> Result<Vec<Limit>, ReadError> {
        let text = match std::fs::read_to_string(&self.0) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            text => text.map_err(|error| ReadError::File(self.0.clone(), error))?,
        };
        let all: Result<Vec<Limit>, _> = serde_yaml::from_str(&text);
        let mut all = all.map_err(|error| ReadError::Text(self.0.clone(), error))?;
        all.retain(|limit| limit.cgroup.is_dir());
        Ok(all)
    }

    /// The limit of a cgroup on a card.
    ///
    /// # Errors
    /// [`ReadError`] if the file cannot be used.
    pub fn of(&self, gpu: &str, cgroup: &Path) -> Result<Option<Limit>, ReadError> {
        let mut all = self.all()?.into_iter();
        Ok(all.find(|limit| limit.gpu == gpu && limit.cgroup == cgroup))
    }

    /// Sets one, instead of that which the cgroup had on the card.
    ///
    /// # Errors
    /// [`ReadError`] if the file cannot be written.
    pub fn set(&self, new: Limit) -> Result<(), ReadError> {
        let failed = |error| ReadError::File(self.0.clone(), error);
        // Containers start at the same time.
        let lock = File::create(self.0.with_extension("lock")).map_err(failed)?;
        lock.lock().map_err(failed)?;
        let mut all = self.all()?;
        all.retain(|limit| limit.gpu != new.gpu || limit.cgroup != new.cgroup);
        all.push(new);
        let text = serde_yaml::to_string(&all);
        let text = text.map_err(|error| ReadError::Text(self.0.clone(), error))?;
        let aside = self.0.with_extension("new");
        std::fs::write(&aside, text)
            .and_then(|()| std::fs::rename(&aside, &self.0))
            .map_err(failed)
    }
}

impl Limit {
    /// Is this process in the cgroup?
    #[must_use]
    pub fn holds(&self, pid: u32) -> bool {
        let all = std::fs::read_to_string(self.cgroup.join("cgroup.procs")).unwrap_or_default();
        all.lines().any(|line| line.parse() == Ok(pid))
    }

    /// MiB that processes of the cgroup use of the card.
    #[must_use]
    pub fn used_mib(&self, gpu: &Gpu) -> u64 {
        let inside = gpu
            .processes
            .iter()
            .filter(|process| self.holds(process.pid));
        let used = inside.filter_map(|process| process.used_mib);
        used.fold(0, u64::saturating_add)
    }
}
