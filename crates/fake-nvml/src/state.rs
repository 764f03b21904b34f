//! The library's state between calls: the file, and the events for which each client waits.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use nvml_wrapper_sys::bindings::{
    nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT as INVALID_ARGUMENT,
    nvmlReturn_enum_NVML_ERROR_NOT_FOUND as NOT_FOUND,
    nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED as NOT_SUPPORTED,
    nvmlReturn_enum_NVML_ERROR_UNINITIALIZED as UNINITIALIZED,
    nvmlReturn_enum_NVML_ERROR_UNKNOWN as UNKNOWN, nvmlReturn_t as Return,
};

use crate::machine::{FILE, Followed, Gpu, Limit, Limits, Machine, Mig, Process};

/// A card, or a MIG instance of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle {
    pub(crate) gpu: usize,
    pub(crate) mig: Option<usize>,
}

impl Handle {
    /// Never null, so that a caller's zeroed handle is no card.
    pub(crate) fn encode(self) -> usize {
        (self.gpu + 1) << 8 | self.mig.map_or(0, |mig| mig + 1)
    }

    fn decode(handle: usize) -> Option<Self> {
        let gpu = (handle >> 8).checked_sub(1)?;
        Some(Self {
            gpu,
            mig: (handle & 0xff).checked_sub(1),
        })
    }
}

/// A set of events that a client waits on.
#[derive(Debug, Default)]
pub(crate) struct EventSet {
    pub(crate) gpus: Vec<usize>,
    /// Events of the file that are older or delivered.
    pub(crate) seen: usize,
}

#[derive(Debug)]
pub(crate) struct State {
    file: Followed,
    limits: Limits,
    users: usize,
    /// A set's handle is its place here plus one.
    pub(crate) sets: Vec<Option<EventSet>>,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

/// Runs `call` on the state, initialised or not.
pub(crate) fn state<T>(call: impl FnOnce(&mut State) -> T) -> T {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    call(state.get_or_insert_with(|| {
        let file = file_beside_library();
        State {
            limits: Limits::beside(&file),
            file: Followed::new(file),
            users: 0,
            sets: Vec::new(),
        }
    }))
}

impl State {
    /// Counts one more user.
    pub(crate) fn init(&mut self) -> Result<(), Return> {
        self.users += 1;
        let up = self.machine("nvmlInit_v2").map(drop);
        if up.is_err() {
            self.users -= 1;
        }
        up
    }

    /// Counts one user less.
    pub(crate) fn shutdown(&mut self) -> Result<(), Return> {
        self.users = self.users.checked_sub(1).ok_or(UNINITIALIZED)?;
        Ok(())
    }

    /// The machine, if the driver works and supports the call.
    pub(crate) fn machine(&mut self, call: &str) -> Result<&Machine, Return> {
        if self.users == 0 {
            return Err(UNINITIALIZED);
        }
        let machine = self.file.now().map_err(|error| {
            eprintln!("fake-nvml: {error}");
            UNKNOWN
        })?;
        match machine.error {
            0 if machine.unsupported.iter().any(|name| name == call) => Err(NOT_SUPPORTED),
            0 => Ok(machine),
            error => Err(error),
        }
    }

    /// Limits of memory by cgroup.
    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The limit under which this very process is on a card: it sees that instead of the card.
    pub(crate) fn own_limit(&self, gpu: &Gpu) -> Option<Limit> {
        let all = self.limits.all().unwrap_or_default();
        let mut own = all.into_iter().filter(|limit| limit.gpu == gpu.uuid);
        own.find(|limit| limit.holds(std::process::id()))
    }

    /// A card and, if the handle is one's, its MIG instance.
    pub(crate) fn device(
        &mut self,
        call: &str,
        handle: usize,
    ) -> Result<(Handle, &Gpu, Option<&Mig>), Return> {
        let handle = Handle::decode(handle).ok_or(INVALID_ARGUMENT)?;
        let gpu = self
            .machine(call)?
            .gpus
            .get(handle.gpu)
            .ok_or(INVALID_ARGUMENT)?;
        if gpu.error != 0 {
            return Err(gpu.error);
        }
        let mig = match handle.mig {
            Some(mig) => Some(gpu.mig.get(mig).ok_or(NOT_FOUND)?),
            None => None,
        };
        Ok((handle, gpu, mig))
    }
}

impl State {
    /// Changes the card of a handle in the file, as a call does that makes something.
    pub(crate) fn change<T>(
        &mut self,
        call: &str,
        handle: usize,
        change: impl FnOnce(Handle, &mut Gpu) -> Result<T, Return>,
    ) -> Result<T, Return> {
        let (handle, ..) = self.device(call, handle)?;
        let mut machine = self.machine(call)?.clone();
        let gpu = machine.gpus.get_mut(handle.gpu).ok_or(INVALID_ARGUMENT)?;
        let done = change(handle, gpu)?;
        machine.write(self.file.path()).map_err(|error| {
            eprintln!("fake-nvml: {error}");
            UNKNOWN
        })?;
        Ok(done)
    }
}

/// MiB in use by these.
pub(crate) fn sum(processes: &[Process]) -> u64 {
    processes
        .iter()
        .filter_map(|process| process.used_mib)
        .fold(0, u64::saturating_add)
}

/// The file in the folder from which the library was loaded: the mapping with this function has its path.
fn file_beside_library() -> PathBuf {
    let here = file_beside_library as *const () as usize;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let is_ours = |line: &&str| {
        let range = line
            .split(' ')
            .next()
            .and_then(|range| range.split_once('-'));
        let ends = range.map(|(from, to)| (parse(from), parse(to)));
        matches!(ends, Some((Some(from), Some(to))) if (from..to).contains(&here))
    };
    let library = maps
        .lines()
        .find(is_ours)
        .and_then(|line| line.find('/').map(|at| &line[at..]));
    Path::new(library.unwrap_or("./")).with_file_name(FILE)
}

fn parse(address: &str) -> Option<usize> {
    usize::from_str_radix(address, 16).ok()
}
