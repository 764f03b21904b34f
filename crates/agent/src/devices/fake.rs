//! Cards out of a file.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use gpustow_api::gpunode::{Near, Place};
use gpustow_machine::{self as machine, Followed, Limit, Limits, NO_LIMIT};

use super::{
    Card, DeviceError, Devices, Fault, FaultKind, LEVELS, Memory, Path, Process, Reading, Wanted,
    limits, nearest_first,
};

/// The cards that a file of `fake-nvml` describes, without a library in between.
#[derive(Debug)]
pub struct FakeDevices {
    file: Followed,
    seen: Option<usize>,
    limits: Limits,
    wanted: Arc<Wanted>,
}

impl FakeDevices {
    /// Follows this file, and reads the limits that are `wanted`.
    #[must_use]
    pub fn new(file: PathBuf, wanted: Arc<Wanted>) -> Self {
        Self {
            limits: Limits::beside(&file),
            file: Followed::new(file),
            seen: None,
            wanted,
        }
    }

    fn read(&mut self) -> Result<Reading, DeviceError> {
        let machine = self
            .file
            .now()
            .map_err(|error| DeviceError::Fake(error.to_string()))?;
        match machine.error {
            0 => {}
            9 => return Err(DeviceError::DriverNotLoaded),
            code => return Err(DeviceError::Driver(format!("NVML's error {code}"))),
        }
        let seen = self
            .seen
            .replace(machine.events.len())
            .unwrap_or(machine.events.len());
        let count = machine.gpus.len();
        let fault = |event: &machine::Event| Fault {
            uuid: event.gpu.clone(),
            kind: event.xid.map_or(FaultKind::Ecc, FaultKind::Xid),
        };
        let can_limit = machine.limits_memory();
        let cards: Vec<Card> = machine
            .gpus
            .iter()
            .zip(0..)
            .flat_map(|(gpu, index)| cards(gpu, index, count))
            .map(|card| Card { can_limit, ..card })
            .collect();
        let driver = Driver {
            machine,
            limits: &self.limits,
        };
        Ok(Reading {
            limits: limits::read(&self.wanted, cards.iter(), &driver),
            driver: Some(machine.driver.clone()).filter(|driver| !driver.is_empty()),
            cards,
            faults: machine.events.iter().skip(seen).map(fault).collect(),
            unmade: Vec::new(),
        })
    }
}

/// The half of the file's driver that limits memory.
struct Driver<'a> {
    machine: &'a machine::Machine,
    limits: &'a Limits,
}

impl limits::Driver for Driver<'_> {
    fn told(&self, uuid: &str, cgroup: &std::path::Path) -> Option<limits::Told> {
        let set = self.limits.of(uuid, cgroup).ok();
        let set = set.filter(|_| self.machine.limits_memory() && cgroup.is_dir())?;
        let gpu = self.machine.gpus.iter().find(|gpu| gpu.uuid == uuid)?;
        let hard = set.as_ref().map(|limit| limit.hard);
        Some(limits::Told {
            limit: hard.filter(|hard| *hard != NO_LIMIT),
            used: set.map(|limit| limit.used_mib(gpu).saturating_mul(1 << 20)),
        })
    }

    fn hold(&self, uuid: &str, cgroup: &std::path::Path, bytes: u64) -> u32 {
        let limit = Limit {
            gpu: uuid.to_owned(),
            cgroup: cgroup.to_owned(),
            soft: 0,
            hard: bytes,
        };
        match self.limits.set(limit) {
            Ok(()) => limits::SUCCESS,
            Err(_) => limits::OPERATING_SYSTEM,
        }
    }
}

impl Devices for FakeDevices {
    fn watch(
        &mut self,
        each: &mut dyn FnMut(Reading) -> ControlFlow<()>,
    ) -> Result<(), DeviceError> {
        while each(self.read()?).is_continue() {}
        Ok(())
    }
}

fn cards(gpu: &machine::Gpu, index: u32, count: usize) -> Vec<Card> {
    let failure = (gpu.error != 0).then(|| format!("NVML's error {}", gpu.error));
    let whole = Card {
        uuid: gpu.uuid.clone(),
        index,
        model: gpu.name.clone(),
        place: Place {
            minor: gpu.minor,
            pci_bus_id: Some(gpu.pci_bus_id.clone()).filter(|address| !address.is_empty()),
            numa_node: gpu.numa_node,
            near: near(gpu, index, count),
            ..Place::default()
        },
        memory: memory(
            gpu.total_mib,
            gpu.reserved_mib,
            gpu.used_mib,
            &gpu.processes,
        ),
        utilization: gpu.utilization,
        processes: Some(processes(&gpu.processes)),
        failure,
        can_limit: false,
        on_demand: None,
    };
    if !gpu.is_divided() {
        return vec![whole];
    }
    let instance = |mig: &machine::Mig| Card {
        uuid: mig.uuid.clone(),
        place: Place {
            parent: Some(gpu.uuid.clone()),
            profile: Some(mig.profile.clone()),
            near: Vec::new(),
            ..whole.place.clone()
        },
        memory: memory(mig.total_mib, mig.reserved_mib, None, &mig.processes),
        utilization: None,
        processes: Some(processes(&mig.processes)),
        ..whole.clone()
    };
    gpu.mig.iter().map(instance).collect()
}

/// Paths to the other cards, if the file tells of any.
fn near(gpu: &machine::Gpu, index: u32, count: usize) -> Vec<Near> {
    if gpu.near.is_empty() {
        return Vec::new();
    }
    let others = (0..).take(count).filter(|&other| other != index);
    let paths = others.map(|other| {
        let near = gpu.near.iter().find(|near| near.gpu == other);
        let nvlinks = match near.and_then(|near| near.nvlinks) {
            None => 0,
            Some(0) => gpu.nvlinks,
            Some(direct) => direct,
        };
        let level = match near.map_or(machine::FAR, |near| near.level) {
            0..=10 => 0,
            11..=20 => 1,
            21..=30 => 2,
            31..=40 => 3,
            41.. => 4,
        };
        Path {
            gpu: other,
            nvlinks: nvlinks as usize,
            level: LEVELS[level],
        }
    });
    nearest_first(paths.collect())
}

fn memory(total: u64, reserved: u64, used: Option<u64>, by: &[machine::Process]) -> Option<Memory> {
    let sum = || {
        by.iter()
            .filter_map(|process| process.used_mib)
            .fold(0, u64::saturating_add)
    };
    let bytes = |mib: u64| mib.saturating_mul(1 << 20);
    (total > 0).then(|| Memory {
        total: bytes(total),
        reserved: bytes(reserved),
        used: bytes(used.unwrap_or_else(sum)),
    })
}

fn processes(list: &[machine::Process]) -> Vec<Process> {
    let bytes = |mib: u64| mib.saturating_mul(1 << 20);
    let tells = list.iter().any(|process| process.utilization.is_some());
    list.iter()
        .map(|process| Process {
            pid: process.pid,
            used: process.used_mib.map(bytes),
            mps: process.kind == machine::Kind::Mps,
            busy: tells.then(|| process.utilization > Some(0)),
        })
        .collect()
}
