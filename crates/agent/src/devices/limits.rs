//! The driver's limits of memory by cgroup: the limits that the loop wants to read or to set, and their calls. The
//! wrapper lacks these calls of NVML.
#![allow(unsafe_code, reason = "C functions that the wrapper lacks")]

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_ulonglong, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpustow_api::limit::WHOLE;
use gpustow_pack::Mib;
use nvml_wrapper::{Device, Nvml};

use super::Card;
use crate::cgroup;
use crate::instances::{Makes, Order};

/// The hard limit that limits nothing.
const NO_LIMIT: u64 = u64::MAX;
const SUCCESS: u32 = 0;
const INVALID_ARGUMENT: u32 = 2;
const NOT_SUPPORTED: u32 = 3;
const NOT_FOUND: u32 = 6;
const FUNCTION_NOT_FOUND: u32 = 13;
const GPU_IS_LOST: u32 = 15;
/// Looks that a container's cgroup is not looked up again for, at most, once it was not found.
const MAX_PAUSE: u32 = 60;

/// Whose cgroup it is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Group {
    /// All of a pod's containers, by the name of the pod's cgroup.
    Pod(Arc<str>),
    /// A container's, by its id.
    Container(Arc<str>),
}

/// A cgroup whose limit on a card is to be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// The card.
    pub uuid: String,
    /// Whose.
    pub of: Group,
    /// The limit to set, where the agent sets limits. [`WHOLE`] raises the present limit of the cgroup, if there is
    /// one.
    pub set: Option<Mib>,
}

/// The tasks of every look at the cards: limits to read or to set, and MIG instances to make.
#[derive(Debug, Default)]
pub struct Wanted {
    asks: Mutex<Arc<[Ask]>>,
    cgroups: Mutex<Cgroups>,
    makes: Mutex<Option<Makes>>,
}

impl Wanted {
    /// And with these instances made, if any are.
    #[must_use]
    pub fn making(self, makes: Option<Makes>) -> Self {
        *locked(&self.makes) = makes;
        self
    }

    /// From now on pods must have these instances, where any are made.
    pub fn order(&self, orders: Vec<Order>) {
        if let Some(makes) = &mut *locked(&self.makes) {
            makes.orders = Some(orders);
        }
    }

    pub(super) fn makes(&self) -> Option<Makes> {
        locked(&self.makes).clone()
    }

    /// May a container of this pod still run?
    pub(super) fn lives(&self, uid: &str) -> bool {
        cgroup::find_pod(&locked(&self.cgroups).root, uid).is_some()
    }

    /// Nothing yet, of containers whose cgroups lie below `root`, the host's cgroup file system.
    #[must_use]
    pub fn below(root: PathBuf) -> Self {
        let cgroups = Cgroups {
            root,
            ..Cgroups::default()
        };
        Self {
            cgroups: Mutex::new(cgroups),
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

/// Where cgroups are.
#[derive(Debug, Default)]
struct Cgroups {
    root: PathBuf,
    known: HashMap<Group, Lookup>,
    /// The driver's last error code for each limit that it refused.
    refused: HashMap<(Group, String), u32>,
}

/// The result of a search for a cgroup. The search may have to read all of the host's cgroup directories.
#[derive(Debug)]
enum Lookup {
    /// One of these has the limit; the other may be absent.
    Found([PathBuf; 2]),
    /// It was not there. It is looked up again once `left` looks have passed. If it is still missing then, `pause`
    /// doubles.
    Missed { left: u32, pause: u32 },
}

impl Cgroups {
    fn keep(&mut self, asks: &[Ask]) {
        self.known
            .retain(|group, _| asks.iter().any(|ask| ask.of == *group));
        self.refused
            .retain(|(group, _), _| self.known.contains_key(group));
        for lookup in self.known.values_mut() {
            if let Lookup::Missed { left, .. } = lookup {
                *left = left.saturating_sub(1);
            }
        }
    }

    /// None where it is not there.
    fn of(&mut self, group: &Group) -> Option<[PathBuf; 2]> {
        let pause = match self.known.get(group) {
            None => Some(1),
            Some(Lookup::Missed { left: 0, pause }) => Some((pause * 2).min(MAX_PAUSE)),
            Some(_) => None,
        };
        if let Some(pause) = pause {
            let found = match group {
                Group::Pod(name) => cgroup::find_pod(&self.root, name),
                Group::Container(id) => cgroup::find(&self.root, id),
            };
            let lookup = match found {
                Some(found) => {
                    // Where crun or CRI-O runs the container one level below; a pod has none of that name.
                    let below = found.join("container");
                    Lookup::Found([found, below])
                }
                None => Lookup::Missed { left: pause, pause },
            };
            self.known.insert(group.clone(), lookup);
        }
        match self.known.get(group)? {
            Lookup::Found(cgroups) => Some(cgroups.clone()),
            Lookup::Missed { .. } => None,
        }
    }

    /// Warns once where the driver refuses a limit.
    fn settled(&mut self, ask: &Ask, limit: Mib, code: u32) {
        let key = (ask.of.clone(), ask.uuid.clone());
        let before = match code {
            SUCCESS => self.refused.remove(&key),
            _ => self.refused.insert(key, code),
        };
        let (of, gpu, limit) = (&ask.of, &ask.uuid, limit.0);
        if code != SUCCESS && before != Some(code) {
            tracing::warn!(
                ?of,
                gpu,
                limit,
                code,
                "the driver refuses a limit of MiB: NVML's error"
            );
        } else if code == SUCCESS && before.is_some() {
            tracing::info!(?of, gpu, limit, "the driver takes the limit now");
        }
    }
}

/// The limit of a container on a card, and its use there, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The card.
    pub uuid: String,
    /// The container's id.
    pub container: Arc<str>,
    /// The limit that the driver reports; none if the container lacks one.
    pub bytes: Option<u64>,
    /// The memory of all of its processes, contexts included. The driver reports it or, where the driver knows of no
    /// limit, the kernel.
    pub used: Option<u64>,
}

/// The driver's answer about a cgroup on a card, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Told {
    limit: Option<u64>,
    used: Option<u64>,
}

/// Reads each wanted limit, after setting the limits that are to be set. It leaves out limits that cannot be read now,
/// for example of a container that has ended. `cards` show the free memory, and the place of each card on the PCI bus,
/// by which the kernel names it.
pub(super) fn read<'a, 'n: 'a>(
    wanted: &Wanted,
    cards: &[Card],
    nvml: &Nvml,
    device: impl Fn(&str) -> Option<&'a Device<'n>>,
) -> Vec<Limit> {
    let asks = locked(&wanted.asks).clone();
    let mut cgroups = locked(&wanted.cgroups);
    cgroups.keep(&asks);
    let mut read = Vec::new();
    for ask in &*asks {
        let Some(places) = cgroups.of(&ask.of) else {
            continue;
        };
        let card = cards.iter().find(|card| card.uuid == ask.uuid);
        let device = device(&ask.uuid);
        let told = || -> Vec<Told> {
            let told = places.iter();
            let told = told.filter_map(|place| told_of(nvml, device?, place));
            told.collect()
        };
        let mut all = told();
        if let (Some(wish), Some(card)) = (ask.set, card)
            && let Some(limit) = step(wish, &all, card)
        {
            for place in places.iter().filter(|place| place.is_dir()) {
                let code = device.map_or(GPU_IS_LOST, |device| {
                    hold(nvml, device, place, limit.0 << 20)
                });
                cgroups.settled(ask, limit, code);
            }
            all = told();
        }
        let Group::Container(container) = &ask.of else {
            continue;
        };
        let used = all.iter().filter_map(|told| told.used).max();
        let kernels = || {
            let bus = card?.place.pci_bus_id.as_deref()?;
            used_of(places.first()?, bus)
        };
        if !all.is_empty() {
            read.push(Limit {
                uuid: ask.uuid.clone(),
                container: container.clone(),
                bytes: held(&all),
                used: used.or_else(kernels),
            });
        }
    }
    read
}

fn held(told: &[Told]) -> Option<u64> {
    told.iter().filter_map(|told| told.limit).min()
}

/// The limit to set now, if it differs from the present limit. A present limit rises at most to the memory in use below
/// it plus the card's free memory. So the neighbours do not lose at once memory that they might use.
fn step(wish: Mib, told: &[Told], card: &Card) -> Option<Mib> {
    let memory = card.memory?;
    let now = held(told);
    if wish == WHOLE && now.is_none() {
        return None;
    }
    let wish = wish.min(Mib(memory.total >> 20));
    let Some(now) = now else {
        return Some(wish);
    };
    let used = told.iter().filter_map(|told| told.used).max();
    let free = memory
        .total
        .saturating_sub(memory.reserved)
        .saturating_sub(memory.used);
    let room = Mib(used.unwrap_or(0).saturating_add(free) >> 20);
    let now = Mib(now >> 20);
    let limit = match wish > now {
        true => wish.min(room).max(now),
        false => wish,
    };
    (limit != now).then_some(limit)
}

/// The memory that a cgroup uses of the card at this place of the bus, by the kernel's dmem controller.
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

#[repr(C)]
struct Hold {
    name_space: *const c_char,
    soft: c_ulonglong,
    hard: c_ulonglong,
}

type Set = unsafe extern "C" fn(*mut c_void, *mut Hold) -> u32;
type Get = unsafe extern "C" fn(*mut c_void, *mut Limits) -> u32;

/// The driver's answer about a cgroup on a card: NVML's code, and the limits.
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

/// Makes the driver limit a cgroup to `bytes` of a card, without a reserve for it. Returns NVML's code.
fn hold(nvml: &Nvml, device: &Device<'_>, cgroup: &Path, bytes: u64) -> u32 {
    let Ok(path) = CString::new(cgroup.as_os_str().as_bytes()) else {
        return INVALID_ARGUMENT;
    };
    let mut limits = Hold {
        name_space: path.as_ptr(),
        soft: 0,
        hard: bytes,
    };
    // SAFETY: the signature is that of nvml.h of driver 615; the library, the device and the path outlive
    // the call.
    unsafe {
        let function = nvml
            .lib()
            .__library
            .get::<Set>(b"nvmlDeviceSetMemoryLimits_v1\0");
        match function {
            Ok(function) => function(device.handle().cast(), &mut limits),
            Err(_) => FUNCTION_NOT_FOUND,
        }
    }
}

/// Does the driver take limits for this card?
pub(super) fn can_limit(nvml: &Nvml, device: &Device<'_>) -> bool {
    let said = get(nvml, device, Path::new("/sys/fs/cgroup"));
    said.is_some_and(|(code, _)| code != NOT_SUPPORTED && code != FUNCTION_NOT_FOUND)
}

/// The limit and the use of a cgroup on a card, by the driver; none if the call fails.
fn told_of(nvml: &Nvml, device: &Device<'_>, cgroup: &Path) -> Option<Told> {
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
