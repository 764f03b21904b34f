//! Cards as NVIDIA's library shows them. A call that the driver lacks leaves its field unknown.

mod pools;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpustow_api::gpunode::Place;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::{
    ComputeMode, P2pCapabilitiesIndex, P2pStatus, TopologyLevel,
};
use nvml_wrapper::enums::device::{DeviceArchitecture, UsedGpuMemory};
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::event::EventSet;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use nvml_wrapper::{Device, Nvml};

use super::{
    Card, DeviceError, Devices, Fault, FaultKind, Memory, Path, Process, Reading, Wanted, limits,
    nearest_first,
};
use crate::instances::Unmade;
use crate::limited::own_limit;

const LIBRARY: &str = "libnvidia-ml.so.1";
/// More links than any card has.
const MAX_NVLINKS: u32 = 36;
/// A list of processes can grow between the question for its size and that for its entries.
const TRIES: u32 = 3;

/// The cards of the driver's library.
#[derive(Debug)]
pub struct NvmlDevices {
    dirs: Vec<PathBuf>,
    refresh: Duration,
    wanted: Arc<Wanted>,
}

impl NvmlDevices {
    /// Looks for the library in `dirs` first. After `refresh`, it reads again the properties that hardly change. It
    /// reads the `wanted` limits every time.
    #[must_use]
    pub fn new(dirs: Vec<PathBuf>, refresh: Duration, wanted: Arc<Wanted>) -> Self {
        Self {
            dirs,
            refresh,
            wanted,
        }
    }

    fn load(&self) -> Result<Nvml, DeviceError> {
        let found = self
            .dirs
            .iter()
            .map(|dir| dir.join(LIBRARY))
            .find(|path| path.exists());
        let path = found
            .as_deref()
            .map_or(OsStr::new(LIBRARY), |path| path.as_os_str());
        let nvml = Nvml::builder()
            .lib_path(path)
            .init()
            .map_err(|error| match error {
                NvmlError::LibloadingError(_) | NvmlError::FailedToLoadSymbol(_) => {
                    let library = path.to_string_lossy().into_owned();
                    // The loader's own words are in the source.
                    let source = std::error::Error::source(&error).map(ToString::to_string);
                    DeviceError::Library {
                        library,
                        problem: source.unwrap_or(error.to_string()),
                    }
                }
                error => driver(error),
            })?;
        // The wrapper calls it on drop and panics if it is missing.
        if let Err(error) = &nvml.lib().nvmlShutdown {
            let problem = error.to_string();
            std::mem::forget(nvml);
            return Err(DeviceError::Library {
                library: LIBRARY.to_owned(),
                problem,
            });
        }
        Ok(nvml)
    }
}

impl Devices for NvmlDevices {
    fn watch(
        &mut self,
        each: &mut dyn FnMut(Reading) -> ControlFlow<()>,
    ) -> Result<(), DeviceError> {
        if let Some(limit) = own_limit() {
            return Err(DeviceError::Limited(limit));
        }
        let nvml = self.load()?;
        let mut session = Session::new(&nvml)?;
        session.makes = self.wanted.makes().is_some();
        session.refresh()?;
        loop {
            if nvml.device_count().map_err(driver)? != session.count {
                return Ok(());
            }
            session.make(&self.wanted)?;
            let reading = session.read(&self.wanted);
            // A card that is lost stays lost until the library is opened again.
            let lost = reading.cards.iter().any(|card| card.failure.is_some());
            if each(reading).is_break() {
                return Ok(());
            }
            if session.opened.elapsed() > self.refresh {
                if lost {
                    return Ok(());
                }
                session.refresh()?;
            }
        }
    }
}

fn driver(error: NvmlError) -> DeviceError {
    match error {
        NvmlError::DriverNotLoaded => DeviceError::DriverNotLoaded,
        error => DeviceError::Driver(error.to_string()),
    }
}

/// The library while it works.
struct Session<'a> {
    nvml: &'a Nvml,
    count: u32,
    opened: Instant,
    /// The agent makes MIG instances.
    makes: bool,
    cards: Vec<(Device<'a>, Card)>,
    /// MIG instances that the agent made, and the UUIDs of their cards.
    own: Vec<(Device<'a>, String)>,
    /// Pods that wait for theirs.
    unmade: Vec<Unmade>,
    /// By UUID: the driver's time of the last thing that a process was seen to do.
    active: HashMap<String, u64>,
    /// One set per card: a card that refuses events would spoil a common one.
    events: Vec<(String, EventSet<'a>)>,
}

impl<'a> Session<'a> {
    fn new(nvml: &'a Nvml) -> Result<Self, DeviceError> {
        let mut session = Self {
            nvml,
            count: 0,
            opened: Instant::now(),
            makes: false,
            cards: Vec::new(),
            own: Vec::new(),
            unmade: Vec::new(),
            active: HashMap::new(),
            events: Vec::new(),
        };
        session.refresh()?;
        session.events = session.watch_events();
        Ok(session)
    }

    /// Reads again the properties that hardly change.
    fn refresh(&mut self) -> Result<(), DeviceError> {
        self.opened = Instant::now();
        self.count = self.nvml.device_count().map_err(driver)?;
        let before = std::mem::take(&mut self.cards);
        self.own.clear();
        for index in 0..self.count {
            match self.nvml.device_by_index(index) {
                Ok(device) => {
                    let mut cards = fixed(self.nvml, device, index, self.count);
                    if self.makes {
                        self.divide(&mut cards, &before, index);
                    }
                    self.cards.extend(cards);
                }
                Err(error) => tracing::debug!(index, %error, "cannot open the card"),
            }
        }
        Ok(())
    }

    fn watch_events(&self) -> Vec<(String, EventSet<'a>)> {
        // The wrapper calls it on drop and panics if it is missing.
        if self.nvml.lib().nvmlEventSetFree.is_err() {
            return Vec::new();
        }
        let wanted = EventTypes::CRITICAL_XID_ERROR | EventTypes::DOUBLE_BIT_ECC_ERROR;
        let watch = |index| {
            let device = self.nvml.device_by_index(index)?;
            let uuid = device.uuid()?;
            let types = device.supported_event_types()? & wanted;
            let set = device.register_events(types, self.nvml.create_event_set()?);
            set.map(|set| (uuid, set)).map_err(|error| error.error)
        };
        let set = |index| match watch(index) {
            Ok(set) => Some(set),
            Err(error) => {
                tracing::warn!(index, %error, "the card reports no errors: its health is judged by its answers alone");
                None
            }
        };
        (0..self.count).filter_map(set).collect()
    }

    fn device(&self, uuid: &str) -> Option<&Device<'a>> {
        let mut all = self.cards.iter();
        all.find(|(_, card)| card.uuid == uuid)
            .map(|(device, _)| device)
    }

    fn read(&mut self, wanted: &Wanted) -> Reading {
        let mut cards = Vec::new();
        for (device, card) in &self.cards {
            let mut card = match card.on_demand {
                Some(_) => self.pool(device, card),
                None => now(device, card),
            };
            if let Some(processes) = card.processes.as_mut().filter(|list| !list.is_empty()) {
                let since = self.active.entry(card.uuid.clone()).or_default();
                let busy = busy(device, since).ok();
                for process in processes {
                    process.busy = busy.as_ref().map(|busy| busy.contains(&process.pid));
                }
            }
            cards.push(card);
        }
        Reading {
            limits: limits::read(wanted, &cards, self.nvml, |uuid| self.device(uuid)),
            driver: self.nvml.sys_driver_version().ok(),
            cards,
            unmade: self.unmade.clone(),
            faults: self
                .events
                .iter()
                .flat_map(|(uuid, set)| faults(uuid, set))
                .collect(),
        }
    }
}

fn faults(uuid: &str, set: &EventSet<'_>) -> Vec<Fault> {
    // Any other error than a timeout comes with a card that does not answer either.
    std::iter::from_fn(|| set.wait(0).ok())
        .take(64)
        .filter_map(|event| {
            let kind = match event.event_data {
                Some(XidError::Value(xid)) => FaultKind::Xid(xid),
                Some(XidError::Unknown) => FaultKind::Xid(999),
                None if event.event_type.contains(EventTypes::DOUBLE_BIT_ECC_ERROR) => {
                    FaultKind::Ecc
                }
                None => return None,
            };
            Some(Fault {
                uuid: uuid.to_owned(),
                kind,
            })
        })
        .collect()
}

/// The card, or its MIG instances, with the properties that hardly change.
fn fixed<'a>(nvml: &Nvml, device: Device<'a>, index: u32, count: u32) -> Vec<(Device<'a>, Card)> {
    let uuid = match device.uuid() {
        Ok(uuid) => uuid,
        Err(error) => {
            tracing::debug!(index, %error, "the card lacks a UUID");
            return Vec::new();
        }
    };
    let whole = Card {
        uuid: uuid.clone(),
        index,
        model: device.name().unwrap_or_default(),
        place: place(nvml, &device, index, count),
        can_limit: limits::can_limit(nvml, &device),
        most_processes: match device.compute_mode() {
            Ok(ComputeMode::Prohibited) => Some(0),
            Ok(ComputeMode::ExclusiveProcess | ComputeMode::ExclusiveThread) => Some(1),
            Ok(ComputeMode::Default) | Err(_) => None,
        },
        ..Card::default()
    };
    if !device.mig_mode().is_ok_and(|mode| mode.current == 1) {
        return vec![(device, whole)];
    }
    // Slots without an instance are in between.
    let slots = device.mig_device_count().unwrap_or_default();
    let instance = |slot| {
        let instance = device.mig_device_by_index(slot).ok()?;
        let name = instance.name().unwrap_or_default();
        let card = Card {
            uuid: instance.uuid().ok()?,
            place: Place {
                parent: Some(uuid.clone()),
                profile: name
                    .rsplit_once(" MIG ")
                    .map(|(_, profile)| profile.to_owned()),
                near: Vec::new(),
                ..whole.place.clone()
            },
            ..whole.clone()
        };
        Some((instance, card))
    };
    (0..slots).filter_map(instance).collect()
}

fn place(nvml: &Nvml, device: &Device<'_>, index: u32, count: u32) -> Place {
    let links: Vec<bool> = (0..MAX_NVLINKS)
        .map_while(|link| device.link_wrapper_for(link).is_active().ok())
        .collect();
    let paths = (0..count)
        .filter(|&other| other != index)
        .filter_map(|gpu| {
            let other = nvml.device_by_index(gpu).ok()?;
            let nvlinks = nvlinks_to(device, &other, &links);
            let level = match device.topology_common_ancestor(other).ok()? {
                TopologyLevel::Internal | TopologyLevel::Single => "PIX",
                TopologyLevel::Multiple => "PXB",
                TopologyLevel::HostBridge => "PHB",
                TopologyLevel::Node => "NODE",
                TopologyLevel::System => "SYS",
            };
            Some(Path {
                gpu,
                nvlinks,
                level,
            })
        });
    let nodes = device.memory_affinity(4, 0).unwrap_or_default();
    let numa = (0..).zip(&nodes).find(|(_, word)| **word != 0);
    Place {
        minor: device.minor_number().ok(),
        pci_bus_id: device.pci_info().ok().map(|pci| pci.bus_id),
        architecture: match device.architecture() {
            Ok(DeviceArchitecture::Unknown) | Err(_) => None,
            Ok(architecture) => Some(format!("{architecture:?}")),
        },
        numa_node: numa.map(|(at, word): (u32, _)| at * 64 + word.trailing_zeros()),
        near: nearest_first(paths.collect()),
        nvlinks: u32::try_from(links.iter().filter(|up| **up).count())
            .ok()
            .filter(|_| !links.is_empty()),
        ..Place::default()
    }
}

/// The number of NVLinks that join the card to `other`: the links that end there or, through switches, all active
/// links.
fn nvlinks_to(device: &Device<'_>, other: &Device<'_>, links: &[bool]) -> usize {
    let joined = device.p2p_status(other, P2pCapabilitiesIndex::NvLink);
    if !joined.is_ok_and(|status| status == P2pStatus::Ok) {
        return 0;
    }
    let address = other.pci_info().ok().map(|pci| pci.bus_id);
    let ends_there = |link: u32| {
        let remote = device.link_wrapper_for(link).remote_pci_info().ok();
        remote.is_some_and(|remote| Some(remote.bus_id) == address)
    };
    let up = || (0..).zip(links).filter(|(_, up)| **up);
    match up().filter(|(link, _)| ends_there(*link)).count() {
        0 => up().count(),
        direct => direct,
    }
}

/// The card with the properties that change.
fn now(device: &Device<'_>, fixed: &Card) -> Card {
    let (memory, failure) = match device.memory_info() {
        Ok(info) => {
            let memory = Memory {
                total: info.total,
                reserved: info.reserved,
                used: info.used,
            };
            (Some(memory), None)
        }
        Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_)) => (None, None),
        Err(error) => (None, Some(error.to_string())),
    };
    Card {
        memory,
        utilization: device
            .utilization_rates()
            .ok()
            .map(|rates| rates.gpu.min(100)),
        processes: processes(device, memory).ok(),
        failure,
        ..fixed.clone()
    }
}

/// All processes of the card, each once. An error if the driver does not list them or lists nonsense.
fn processes(device: &Device<'_>, memory: Option<Memory>) -> Result<Vec<Process>, NvmlError> {
    let compute = again(|| device.running_compute_processes())?;
    let graphics = optional(again(|| device.running_graphics_processes()))?;
    let mps = optional(again(|| device.mps_running_compute_processes()))?;
    let clients: HashSet<u32> = mps.iter().map(|client| client.pid).collect();
    let mut used = BTreeMap::new();
    for process in compute.into_iter().chain(graphics).chain(mps) {
        let bytes = match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        };
        // Some drivers of series 535 fill the list with rows of another size.
        if process.pid == 0 || bytes > memory.map_or(bytes, |memory| Some(memory.total)) {
            return Err(NvmlError::Unknown);
        }
        let known = used.entry(process.pid).or_insert(bytes);
        *known = (*known).max(bytes);
    }
    Ok(used
        .into_iter()
        .map(|(pid, used)| Process {
            pid,
            used,
            busy: None,
            mps: clients.contains(&pid),
        })
        .collect())
}

/// The processes that have done something on the card since then; moves that on.
fn busy(device: &Device<'_>, since: &mut u64) -> Result<HashSet<u32>, NvmlError> {
    let samples = match device.process_utilization_stats(*since) {
        Err(NvmlError::NotFound) => Vec::new(),
        samples => samples?,
    };
    let newest = samples.iter().map(|sample| sample.timestamp).max();
    *since = newest.map_or(*since, |newest| newest.max(*since));
    let busy = samples.iter().filter(|sample| {
        [
            sample.sm_util,
            sample.mem_util,
            sample.enc_util,
            sample.dec_util,
        ]
        .iter()
        .any(|percent| *percent > 0)
    });
    Ok(busy.map(|sample| sample.pid).collect())
}

fn again(
    list: impl Fn() -> Result<Vec<ProcessInfo>, NvmlError>,
) -> Result<Vec<ProcessInfo>, NvmlError> {
    let mut answer = list();
    for _ in 1..TRIES {
        match answer {
            Err(NvmlError::InsufficientSize(_)) => answer = list(),
            _ => break,
        }
    }
    answer
}

/// Lists that not every card has.
fn optional(list: Result<Vec<ProcessInfo>, NvmlError>) -> Result<Vec<ProcessInfo>, NvmlError> {
    match list {
        Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_)) => Ok(Vec::new()),
        list => list,
    }
}
