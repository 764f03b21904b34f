//! The driver's limits of memory by cgroup: what the loop wants to know of them, and the call by which NVML
//! tells, which the wrapper lacks.
#![allow(unsafe_code, reason = "a C function that the wrapper lacks")]

use std::ffi::{CString, c_char, c_ulonglong, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use nvml_wrapper::{Device, Nvml};

const SUCCESS: u32 = 0;
const NOT_SUPPORTED: u32 = 3;
const NOT_FOUND: u32 = 6;
const FUNCTION_NOT_FOUND: u32 = 13;
/// A hard limit that limits nothing.
const NO_LIMIT: u64 = u64::MAX;

/// A container whose limit on a card is to be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// The card.
    pub uuid: String,
    /// The container's id.
    pub container: Arc<str>,
    /// The cgroups of which one bears the limit: full paths.
    pub cgroups: Vec<PathBuf>,
}

/// What is to be read with every look at the cards.
#[derive(Debug, Default)]
pub struct Wanted(Mutex<Arc<[Ask]>>);

impl Wanted {
    /// From now on these.
    pub fn set(&self, asks: Vec<Ask>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = asks.into();
    }

    pub(super) fn get(&self) -> Arc<[Ask]> {
        let asks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        asks.clone()
    }
}

/// The limit of a container on a card, in bytes, as the driver told it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The card.
    pub uuid: String,
    /// The container's id.
    pub container: Arc<str>,
    /// None if it has none.
    pub bytes: Option<u64>,
}

/// Asks for each; what nobody can tell now, as the container has ended, is left out.
pub(super) fn read(asks: &[Ask], of: impl Fn(&str, &Path) -> Option<Option<u64>>) -> Vec<Limit> {
    let read = asks.iter().filter_map(|ask| {
        let told: Vec<_> = ask
            .cgroups
            .iter()
            .filter_map(|cgroup| of(&ask.uuid, cgroup))
            .collect();
        let bytes = told.iter().copied().flatten().min();
        (!told.is_empty()).then(|| Limit {
            uuid: ask.uuid.clone(),
            container: ask.container.clone(),
            bytes,
        })
    });
    read.collect()
}

#[repr(C)]
struct Limits {
    name_space: *const c_char,
    soft: c_ulonglong,
    hard: c_ulonglong,
    used: c_ulonglong,
}

type Get = unsafe extern "C" fn(*mut c_void, *mut Limits) -> u32;

/// What the driver says of a cgroup on a card: its code, and the hard limit.
fn get(nvml: &Nvml, device: &Device<'_>, cgroup: &Path) -> Option<(u32, u64)> {
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
    Some((code, limits.hard))
}

/// Does the driver take limits for this card?
pub(super) fn can_limit(nvml: &Nvml, device: &Device<'_>) -> bool {
    let said = get(nvml, device, Path::new("/sys/fs/cgroup"));
    said.is_some_and(|(code, _)| code != NOT_SUPPORTED && code != FUNCTION_NOT_FOUND)
}

/// The limit of a cgroup on a card, if there is one; none if the driver cannot tell.
pub(super) fn limit_of(nvml: &Nvml, device: &Device<'_>, cgroup: &Path) -> Option<Option<u64>> {
    match get(nvml, device, cgroup)? {
        (SUCCESS, NO_LIMIT) | (NOT_FOUND, _) => Some(None),
        (SUCCESS, bytes) => Some(Some(bytes)),
        _ => None,
    }
}
