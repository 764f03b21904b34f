//! Limits of memory by cgroup, as drivers from 615 on have them. The library always has the functions. For an older
//! driver, they return `FUNCTION_NOT_FOUND`. A test that wants a library without them changes their names in a copy.
#![allow(unsafe_code, non_snake_case, reason = "this is a C library")]

use std::ffi::{CStr, OsStr, c_char, c_ulonglong};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use crate::machine::{Gpu, Limit, NO_LIMIT};
use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND as FUNCTION_NOT_FOUND,
    nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT as INVALID_ARGUMENT,
    nvmlReturn_enum_NVML_ERROR_NOT_FOUND as NOT_FOUND,
    nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED as NOT_SUPPORTED,
    nvmlReturn_enum_NVML_ERROR_OPERATING_SYSTEM as OPERATING_SYSTEM,
    nvmlReturn_enum_NVML_ERROR_UNKNOWN as UNKNOWN, nvmlReturn_t as Return,
};

use crate::ffi::done;
use crate::state::state;

#[repr(C)]
struct Set {
    name_space: *const c_char,
    soft: c_ulonglong,
    hard: c_ulonglong,
}

#[repr(C)]
struct Get {
    name_space: *const c_char,
    soft: c_ulonglong,
    hard: c_ulonglong,
    used: c_ulonglong,
}

/// The card, if it is a whole one of a driver that limits memory.
fn card(call: &str, of: nvmlDevice_t) -> Result<Gpu, Return> {
    state(|state| {
        if !state.machine(call)?.limits_memory() {
            return Err(FUNCTION_NOT_FOUND);
        }
        match state.device(call, of as usize)? {
            (_, _, Some(_)) => Err(NOT_SUPPORTED),
            (_, gpu, None) => Ok(gpu.clone()),
        }
    })
}

/// # Safety
/// `name` is null or a text that ends with a zero.
unsafe fn cgroup(name: *const c_char) -> Result<PathBuf, Return> {
    if name.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    let name = unsafe { CStr::from_ptr(name) };
    let path = Path::new(OsStr::from_bytes(name.to_bytes()));
    match path.is_absolute() && path.is_dir() {
        true => Ok(path.to_owned()),
        false => Err(OPERATING_SYSTEM),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceSetMemoryLimits_v1(of: nvmlDevice_t, limits: *mut Set) -> Return {
    let set = || {
        let gpu = card("nvmlDeviceSetMemoryLimits_v1", of)?;
        let wish = unsafe { limits.as_ref() }.ok_or(INVALID_ARGUMENT)?;
        let total = gpu.total_mib.saturating_mul(1 << 20);
        let above = |bytes: u64| bytes != NO_LIMIT && bytes > total;
        if wish.soft > wish.hard || above(wish.soft) || above(wish.hard) {
            return Err(INVALID_ARGUMENT);
        }
        let limit = Limit {
            gpu: gpu.uuid,
            cgroup: unsafe { cgroup(wish.name_space) }?,
            soft: wish.soft,
            hard: wish.hard,
        };
        state(|state| state.limits().set(limit)).map_err(|error| {
            eprintln!("fake-nvml: {error}");
            UNKNOWN
        })
    };
    done(set())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryLimits_v1(of: nvmlDevice_t, limits: *mut Get) -> Return {
    let get = || {
        let gpu = card("nvmlDeviceGetMemoryLimits_v1", of)?;
        let asked = unsafe { limits.as_mut() }.ok_or(INVALID_ARGUMENT)?;
        let cgroup = unsafe { cgroup(asked.name_space) }?;
        let limit = state(|state| state.limits().of(&gpu.uuid, &cgroup));
        let limit = limit.map_err(|_| UNKNOWN)?.ok_or(NOT_FOUND)?;
        (asked.soft, asked.hard) = (limit.soft, limit.hard);
        asked.used = limit.used_mib(&gpu).saturating_mul(1 << 20);
        Ok(())
    };
    done(get())
}
