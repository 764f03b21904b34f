//! The library's answers about MIG instances, in addition to their memory, for NVIDIA's container toolkit. Each is a
//! GPU instance with one compute instance, or without one if it is bare. On a card without profiles, it has the
//! smallest profile.
#![allow(unsafe_code, non_snake_case, reason = "this is a C library")]

use std::ffi::c_uint;
use std::mem::zeroed;

use nvml_wrapper_sys::bindings::{
    nvmlComputeInstance_t, nvmlComputeInstanceInfo_t, nvmlComputeInstanceProfileInfo_t,
    nvmlDevice_t, nvmlDeviceAttributes_t, nvmlGpuInstance_t, nvmlGpuInstanceInfo_t,
    nvmlGpuInstancePlacement_t, nvmlGpuInstanceProfileInfo_t, nvmlMemory_t,
    nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT as INVALID_ARGUMENT,
    nvmlReturn_enum_NVML_ERROR_NOT_FOUND as NOT_FOUND,
    nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED as NOT_SUPPORTED, nvmlReturn_t as Return,
};

use crate::ffi::{c, device, done, pointer, put};
use crate::instances::profile_id;
use crate::machine::Gpu;
use crate::state::{Handle, sum};

/// The number of the instance on its card.
fn instance(call: &str, of: nvmlDevice_t) -> Result<usize, Return> {
    device(call, of, |handle, _, _| handle.mig.ok_or(INVALID_ARGUMENT))
}

/// The number of the instance by which others name it.
fn number(handle: Handle, gpu: &Gpu) -> Result<c_uint, Return> {
    let place = handle.mig.ok_or(INVALID_ARGUMENT)?;
    let mig = gpu.mig.get(place).ok_or(NOT_FOUND)?;
    Ok(mig.id.unwrap_or(place as u32))
}

/// There is one profile, the first.
fn profile(first: bool) -> Result<(), Return> {
    first.then_some(()).ok_or(NOT_SUPPORTED)
}

c! {
    // The agent uses the second version, which also reports the memory that the driver keeps for itself.
    fn nvmlDeviceGetMemoryInfo(of: nvmlDevice_t, memory: *mut nvmlMemory_t) |call: &str| {
        let (total, used) = device(call, of, |_, gpu, mig| Ok(match mig {
            Some(mig) => (mig.total_mib, sum(&mig.processes)),
            None => (gpu.total_mib, gpu.used_mib.unwrap_or_else(|| sum(&gpu.processes))),
        }))?;
        let bytes = |mib: u64| mib.saturating_mul(1 << 20);
        let told = nvmlMemory_t {
            total: bytes(total),
            free: bytes(total.saturating_sub(used)),
            used: bytes(used),
        };
        unsafe { put(memory, told) }
    }
    fn nvmlDeviceGetGpuInstanceId(of: nvmlDevice_t, id: *mut c_uint) |call: &str| {
        let number = device(call, of, |handle, gpu, _| number(handle, gpu))?;
        unsafe { put(id, number) }
    }
    fn nvmlDeviceGetComputeInstanceId(of: nvmlDevice_t, id: *mut c_uint) |call: &str| {
        instance(call, of)?;
        unsafe { put(id, 0) }
    }
    fn nvmlDeviceGetAttributes_v2(
        of: nvmlDevice_t, attributes: *mut nvmlDeviceAttributes_t
    ) |call: &str| {
        let mib = device(call, of, |_, _, mig| mig.map(|it| it.total_mib).ok_or(NOT_SUPPORTED))?;
        let told = nvmlDeviceAttributes_t {
            gpuInstanceSliceCount: 1,
            computeInstanceSliceCount: 1,
            memorySizeMB: mib,
            // Numbers, for which zero means unknown.
            ..unsafe { zeroed() }
        };
        unsafe { put(attributes, told) }
    }
    fn nvmlDeviceGetGpuInstanceById(
        of: nvmlDevice_t, id: c_uint, found: *mut nvmlGpuInstance_t
    ) |call: &str| {
        let handle = device(call, of, |handle, gpu, _| {
            let place = gpu.instance(id).ok_or(NOT_FOUND)?;
            Ok(Handle { mig: Some(place), ..handle })
        })?;
        unsafe { put(found, pointer(handle).cast()) }
    }
    fn nvmlGpuInstanceGetInfo(
        of: nvmlGpuInstance_t, info: *mut nvmlGpuInstanceInfo_t
    ) |call: &str| {
        let told = device(call, of.cast(), |handle, gpu, mig| {
            let mig = mig.ok_or(INVALID_ARGUMENT)?;
            Ok(nvmlGpuInstanceInfo_t {
                id: number(handle, gpu)?,
                device: pointer(Handle { mig: None, ..handle }),
                profileId: profile_id(gpu, &mig.profile),
                placement: nvmlGpuInstancePlacement_t {
                    start: mig.start.into(),
                    size: gpu.slices(mig).into(),
                },
            })
        })?;
        unsafe { put(info, told) }
    }
    fn nvmlGpuInstanceGetComputeInstanceById(
        of: nvmlGpuInstance_t, id: c_uint, found: *mut nvmlComputeInstance_t
    ) |call: &str| {
        let bare = device(call, of.cast(), |_, _, mig| Ok(mig.ok_or(INVALID_ARGUMENT)?.bare))?;
        if id != 0 || bare {
            return Err(NOT_FOUND);
        }
        unsafe { put(found, of.cast()) }
    }
    fn nvmlComputeInstanceGetInfo_v2(
        of: nvmlComputeInstance_t, info: *mut nvmlComputeInstanceInfo_t
    ) |call: &str| {
        instance(call, of.cast())?;
        // As above.
        unsafe { put(info, zeroed()) }
    }
    fn nvmlDeviceGetGpuInstanceProfileInfo(
        of: nvmlDevice_t, number: c_uint, info: *mut nvmlGpuInstanceProfileInfo_t
    ) |call: &str| {
        let told = device(call, of, |_, gpu, _| match gpu.profiles.get(number as usize) {
            Some(profile) => Ok(nvmlGpuInstanceProfileInfo_t {
                id: profile_id(gpu, &profile.name),
                sliceCount: profile.compute_slices.into(),
                memorySizeMB: profile.total_mib,
                instanceCount: profile.starts.len() as c_uint,
                // Numbers, for which zero means unknown.
                ..unsafe { zeroed() }
            }),
            None => profile(number == 0 && gpu.profiles.is_empty()).map(|()| unsafe { zeroed() }),
        })?;
        unsafe { put(info, told) }
    }
    fn nvmlGpuInstanceGetComputeInstanceProfileInfo(
        of: nvmlGpuInstance_t, number: c_uint, engines: c_uint,
        info: *mut nvmlComputeInstanceProfileInfo_t
    ) |call: &str| {
        device(call, of.cast(), |handle, gpu, _| {
            handle.mig.ok_or(INVALID_ARGUMENT)?;
            let known = if gpu.profiles.is_empty() { 1 } else { 8 };
            profile(number < known && engines == 0)
        })?;
        unsafe { put(info, zeroed()) }
    }
}
