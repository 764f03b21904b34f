//! The driver's limits of memory by cgroup: what the loop wants to know of them, and the call by which NVML
//! tells, which the wrapper lacks.
#![allow(unsafe_code, reason = "a C function that the wrapper lacks")]

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_ulonglong, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpustow_machine::NO_LIMIT;
use nvml_wrapper::{Device, Nvml};

use super::Card;
use crate::cgroup;

const SUCCESS: u32 = 0;
const NOT_SUPPORTED: u32 = 3;
const NOT_FOUND: u32 = 6;
const FUNCTION_NOT_FOUND: u32 = 13;
/// Looks that a container's cgroup is not looked up again for, at most, once it was not found.
const MAX_PAUSE: u32 = 60;

/// A container whose limit on a card is to be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// The card.
    pub uuid: String,
    /// The container's id.
    pub container: Arc<str>,
}

/// What is to be read with every look at the cards.
#[derive(Debug, Default)]
pub struct Wanted {
    asks: Mutex<Arc<[Ask]>>,
    cgroups: Mutex<Cgroups>,
}

impl Wanted {
    /// Nothing yet, of containers whose cgroups lie below `root`, the host's cgroup file system.
    #[must_use]
    pub fn below(root: PathBuf) -> Self {
        let known = HashMap::new();
        Self {
            cgroups: Mutex::new(Cgroups { root, known }),
            ..Self::default()
        }
    }

    /// From now on these.
    pub fn set(&self, asks: Vec<Ask>) {
        *locked(&self.asks) = asks.into();
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where containers' cgroups are, by the containers' ids.
#[derive(Debug, Default)]
struct Cgroups {
    root: PathBuf,
    known: HashMap<Arc<str>, Lookup>,
}

/// What came of looking a cgroup up: that may mean reading all of the host's directories.
#[derive(Debug)]
enum Lookup {
    /// One of these bears the limit.
    Found([PathBuf; 2]),
    /// It was not there; it is looked up again after so many looks, and if in vain after twice as many.
    Missed { left: u32, pause: u32 },
}

impl Cgroups {
    fn keep(&mut self, asks: &[Ask]) {
        self.known
            .retain(|id, _| asks.iter().any(|ask| ask.container == *id));
        for lookup in self.known.values_mut() {
            if let Lookup::Missed { left, .. } = lookup {
                *left = left.saturating_sub(1);
            }
        }
    }

    /// None where it is not there.
    fn of(&mut self, container: &Arc<str>) -> Option<&[PathBuf]> {
        let pause = match self.known.get(container) {
            None => Some(1),
            Some(Lookup::Missed { left: 0, pause }) => Some((pause * 2).min(MAX_PAUSE)),
            Some(_) => None,
        };
        if let Some(pause) = pause {
            let lookup = match cgroup::find(&self.root, container) {
                Some(found) => {
                    // Where crun or CRI-O runs the container one level below.
                    let below = found.join("container");
                    Lookup::Found([found, below])
                }
                None => Lookup::Missed { left: pause, pause },
            };
            self.known.insert(container.clone(), lookup);
        }
        match self.known.get(container)? {
            Lookup::Found(cgroups) => Some(cgroups),
            Lookup::Missed { .. } => None,
        }
    }
}

/// The limit of a container on a card, in bytes, and what it uses there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The card.
    pub uuid: String,
    /// The container's id.
    pub container: Arc<str>,
    /// As the driver told it; none if it has none.
    pub bytes: Option<u64>,
    /// What all of its processes use, contexts included: as the driver told it or, where it told of no
    /// limit, the kernel.
    pub used: Option<u64>,
}

/// What the driver says of a cgroup on a card, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) limit: Option<u64>,
    pub(super) used: Option<u64>,
}

/// Asks for each that is wanted; what nobody can tell now, as the container has ended, is left out.
/// The cards say where each is on the PCI bus, by which the kernel names it.
pub(super) fn read<'a>(
    wanted: &Wanted,
    cards: impl Iterator<Item = &'a Card> + Clone,
    of: impl Fn(&str, &Path) -> Option<Told>,
) -> Vec<Limit> {
    let asks = locked(&wanted.asks).clone();
    let mut cgroups = locked(&wanted.cgroups);
    cgroups.keep(&asks);
    let read = asks.iter().filter_map(|ask| {
        let cgroups = cgroups.of(&ask.container)?;
        let told: Vec<_> = cgroups
            .iter()
            .filter_map(|cgroup| of(&ask.uuid, cgroup))
            .collect();
        let used = told.iter().filter_map(|told| told.used).max();
        let kernels = || {
            let card = cards.clone().find(|card| card.uuid == ask.uuid)?;
            used_of(cgroups.first()?, card.place.pci_bus_id.as_deref()?)
        };
        (!told.is_empty()).then(|| Limit {
            uuid: ask.uuid.clone(),
            container: ask.container.clone(),
            bytes: told.iter().filter_map(|told| told.limit).min(),
            used: used.or_else(kernels),
        })
    });
    read.collect()
}

/// What the kernel's dmem controller says that a cgroup uses of the card at this place of the bus.
fn used_of(cgroup: &Path, bus: &str) -> Option<u64> {
    // NVML writes 00000000:3B:00.0 where the kernel writes 0000:3b:00.0.
    let bus = bus.to_ascii_lowercase();
    let region = format!("nvidia/{}/", bus.get(bus.len().checked_sub(12)?..)?);
    let text = std::fs::read_to_string(cgroup.join("dmem.current")).ok()?;
    let line = text.lines().find(|line| line.starts_with(&region))?;
    line.split_once(' ')?.1.trim().parse().ok()
}

#[repr(C)]
struct Limits {
    name_space: *const c_char,
    soft: c_ulonglong,
    hard: c_ulonglong,
    used: c_ulonglong,
}

type Get = unsafe extern "C" fn(*mut c_void, *mut Limits) -> u32;

/// What the driver says of a cgroup on a card: its code, and the limits.
fn get(nvml: &Nvml, device: &Device<'_>, cgroup: &Path) -> Option<(u32, Limits)> {
    let path = CString::new(cgroup.as_os_str().as_bytes()).ok()?;
    let mut limits = Limits {
        name_space: path.as_ptr(),
        soft: 0,
        hard: 0,
        used: 0,
    };
    // SAFETY: the signature is that of nvml.h of driver 615; the library, the device and the path outlive
    // the call, which writes to `limits` alone.
    let code = unsafe {
        let function = nvml
            .lib()
            .__library
            .get::<Get>(b"nvmlDeviceGetMemoryLimits_v1\0");
        function.ok()?(device.handle().cast(), &mut limits)
    };
    Some((code, limits))
}

/// Does the driver take limits for this card?
pub(super) fn can_limit(nvml: &Nvml, device: &Device<'_>) -> bool {
    let said = get(nvml, device, Path::new("/sys/fs/cgroup"));
    said.is_some_and(|(code, _)| code != NOT_SUPPORTED && code != FUNCTION_NOT_FOUND)
}

/// What the driver says of a cgroup on a card; none if it cannot tell.
pub(super) fn told_of(nvml: &Nvml, device: &Device<'_>, cgroup: &Path) -> Option<Told> {
    let (limit, used) = match get(nvml, device, cgroup)? {
        (SUCCESS, limits) => (
            Some(limits.hard).filter(|hard| *hard != NO_LIMIT),
            Some(limits.used),
        ),
        (NOT_FOUND, _) => (None, None),
        _ => return None,
    };
    Some(Told { limit, used })
}
