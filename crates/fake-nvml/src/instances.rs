//! The calls that make and end MIG instances, and list the places where they may lie. A call that makes or ends an
//! instance changes the file: a driver keeps its instances when its caller dies.
#![allow(unsafe_code, non_snake_case, reason = "this is a C library")]

use std::ffi::{c_char, c_uint};
use std::mem::zeroed;

use crate::machine::{Gpu, Mig, Profile};
use nvml_wrapper_sys::bindings::{
    nvmlComputeInstance_t, nvmlDevice_t, nvmlGpuInstance_t, nvmlGpuInstancePlacement_t,
    nvmlGpuInstanceProfileInfo_v2_t, nvmlReturn_enum_NVML_ERROR_IN_USE as IN_USE,
    nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES as INSUFFICIENT_RESOURCES,
    nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT as INVALID_ARGUMENT,
    nvmlReturn_enum_NVML_ERROR_NOT_FOUND as NOT_FOUND,
    nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED as NOT_SUPPORTED, nvmlReturn_t as Return,
};

use crate::ffi::{c, device, done, pointer, put};
use crate::state::{Handle, state};

/// As in the real library, a profile's id is not its place in the list.
const FIRST_ID: u32 = 100;

/// The id of the profile of this name; zero if it is unknown.
pub(crate) fn profile_id(gpu: &Gpu, name: &str) -> c_uint {
    let place = gpu.profiles.iter().position(|it| it.name == name);
    place.map_or(0, |place| FIRST_ID + place as u32)
}

fn by_id(gpu: &Gpu, id: c_uint) -> Result<&Profile, Return> {
    let place = id.checked_sub(FIRST_ID).ok_or(INVALID_ARGUMENT)?;
    gpu.profiles.get(place as usize).ok_or(INVALID_ARGUMENT)
}

fn mask(start: u8, slices: u8) -> u64 {
    ((1_u64 << (slices % 64)) - 1) << (start % 64)
}

/// The instance of this profile at this slice, if the card has room for it there.
fn made(gpu: &Gpu, id: c_uint, start: c_uint) -> Result<Mig, Return> {
    let profile = by_id(gpu, id)?;
    let start = u8::try_from(start).map_err(|_| INVALID_ARGUMENT)?;
    if !profile.starts.contains(&start) {
        return Err(INVALID_ARGUMENT);
    }
    let taken = gpu.mig.iter().map(|mig| mask(mig.start, gpu.slices(mig)));
    if taken.fold(0, |all, mask| all | mask) & mask(start, profile.slices) != 0 {
        return Err(INSUFFICIENT_RESOURCES);
    }
    let number = (1..).find(|id| gpu.instance(*id).is_none()).unwrap_or(0);
    Ok(Mig {
        uuid: format!("MIG-{}-{number}", gpu.uuid),
        profile: profile.name.clone(),
        id: Some(number),
        start,
        bare: true,
        total_mib: profile.total_mib,
        ..Mig::default()
    })
}

/// Hands out a list as NVML does: the number alone where there is no room for it.
///
/// # Safety
/// `to` is null or points to memory for all of `list`, and `count` is null or points to a number.
unsafe fn put_list<T: Copy>(to: *mut T, count: *mut c_uint, list: &[T]) -> Result<(), Return> {
    unsafe { put(count, list.len() as c_uint)? };
    if !to.is_null() {
        unsafe { std::ptr::copy_nonoverlapping(list.as_ptr(), to, list.len()) };
    }
    Ok(())
}

c! {
    fn nvmlDeviceGetGpuInstanceProfileInfoV(
        of: nvmlDevice_t, number: c_uint, info: *mut nvmlGpuInstanceProfileInfo_v2_t
    ) |call: &str| {
        let told = device(call, of, |_, gpu, _| {
            let profile = gpu.profiles.get(number as usize).ok_or(NOT_SUPPORTED)?;
            let mut told = nvmlGpuInstanceProfileInfo_v2_t {
                id: profile_id(gpu, &profile.name),
                sliceCount: profile.compute_slices.into(),
                instanceCount: profile.starts.len() as c_uint,
                memorySizeMB: profile.total_mib,
                // Numbers, for which zero means unknown.
                ..unsafe { zeroed() }
            };
            let name = format!("MIG {}", profile.name);
            for (to, from) in told.name.iter_mut().take(95).zip(name.bytes()) {
                *to = from as c_char;
            }
            Ok(told)
        })?;
        unsafe { put(info, told) }
    }
    fn nvmlDeviceGetGpuInstancePossiblePlacements_v2(
        of: nvmlDevice_t, profile: c_uint,
        places: *mut nvmlGpuInstancePlacement_t, count: *mut c_uint
    ) |call: &str| {
        let all: Vec<_> = device(call, of, |_, gpu, _| {
            let profile = by_id(gpu, profile)?;
            let places = profile.starts.iter().map(|start| nvmlGpuInstancePlacement_t {
                start: (*start).into(),
                size: profile.slices.into(),
            });
            Ok(places.collect())
        })?;
        unsafe { put_list(places, count, &all) }
    }
    fn nvmlDeviceGetGpuInstances(
        of: nvmlDevice_t, profile: c_uint, instances: *mut nvmlGpuInstance_t, count: *mut c_uint
    ) |call: &str| {
        let all: Vec<_> = device(call, of, |handle, gpu, _| {
            let name = &by_id(gpu, profile)?.name;
            let own = gpu.mig.iter().enumerate().filter(|(_, mig)| mig.profile == *name);
            let own = own.map(|(place, _)| Handle { mig: Some(place), ..handle });
            Ok(own.map(|it| pointer(it).cast()).collect())
        })?;
        unsafe { put_list(instances, count, &all) }
    }
    fn nvmlDeviceCreateGpuInstanceWithPlacement(
        of: nvmlDevice_t, profile: c_uint, place: *const nvmlGpuInstancePlacement_t,
        instance: *mut nvmlGpuInstance_t
    ) |call: &str| {
        let place = unsafe { place.as_ref() }.ok_or(INVALID_ARGUMENT)?;
        let handle = state(|state| state.change(call, of as usize, |handle, gpu| {
            let made = made(gpu, profile, place.start)?;
            gpu.mig.push(made);
            Ok(Handle { mig: Some(gpu.mig.len() - 1), ..handle })
        }))?;
        unsafe { put(instance, pointer(handle).cast()) }
    }
    fn nvmlGpuInstanceDestroy(of: nvmlGpuInstance_t) |call: &str| {
        state(|state| state.change(call, of as usize, |handle, gpu| {
            let place = handle.mig.ok_or(INVALID_ARGUMENT)?;
            if !gpu.mig.get(place).ok_or(NOT_FOUND)?.bare {
                return Err(IN_USE);
            }
            // The remaining instances keep their numbers.
            for (mig, number) in gpu.mig.iter_mut().zip(0..) {
                mig.id.get_or_insert(number);
            }
            gpu.mig.remove(place);
            Ok(())
        }))
    }
    fn nvmlGpuInstanceCreateComputeInstance(
        of: nvmlGpuInstance_t, _profile: c_uint, instance: *mut nvmlComputeInstance_t
    ) |call: &str| {
        state(|state| state.change(call, of as usize, |handle, gpu| {
            let mig = handle.mig.and_then(|place| gpu.mig.get_mut(place));
            let mig = mig.ok_or(INVALID_ARGUMENT)?;
            if !std::mem::take(&mut mig.bare) {
                return Err(INSUFFICIENT_RESOURCES);
            }
            Ok(())
        }))?;
        unsafe { put(instance, of.cast()) }
    }
    fn nvmlGpuInstanceGetComputeInstances(
        of: nvmlGpuInstance_t, _profile: c_uint,
        instances: *mut nvmlComputeInstance_t, count: *mut c_uint
    ) |call: &str| {
        let bare = device(call, of.cast(), |_, _, mig| Ok(mig.ok_or(INVALID_ARGUMENT)?.bare))?;
        let all = if bare { vec![] } else { vec![of.cast()] };
        unsafe { put_list(instances, count, &all) }
    }
    fn nvmlComputeInstanceDestroy(of: nvmlComputeInstance_t) |call: &str| {
        state(|state| state.change(call, of as usize, |handle, gpu| {
            let mig = handle.mig.and_then(|place| gpu.mig.get_mut(place));
            let mig = mig.ok_or(INVALID_ARGUMENT)?;
            if !mig.processes.is_empty() {
                return Err(IN_USE);
            }
            mig.bare = true;
            Ok(())
        }))
    }
}
