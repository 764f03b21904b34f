//! MIG instances by NVML: which a card could have, which it has, and the calls that make and end them. The wrapper lacks
//! all of this.
#![allow(unsafe_code, reason = "C functions that the wrapper lacks")]

use std::ffi::{CStr, c_uint};
use std::mem::{size_of, zeroed};
use std::ptr::null_mut;

use gpustow_api::instances::Profile;
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings::{
    NVML_GPU_INSTANCE_PROFILE_COUNT as PROFILES, nvmlComputeInstance_t, nvmlGpuInstance_t,
    nvmlGpuInstancePlacement_t, nvmlGpuInstanceProfileInfo_v2_t,
};

use crate::instances::{Driver, Found, MakeError, Shown};

const SUCCESS: u32 = 0;
const INVALID_ARGUMENT: u32 = 2;
const NOT_SUPPORTED: u32 = 3;
/// NVML's number of a compute instance's profile that takes all of its GPU instance, by the slices of that.
const COMPUTE_PROFILES: [(u32, c_uint); 7] =
    [(1, 0), (2, 1), (3, 2), (4, 3), (7, 4), (8, 5), (6, 6)];
/// More than a card can have.
const MAX_INSTANCES: usize = 16;

/// One card in MIG mode.
pub(super) struct Card<'a, 'n> {
    pub(super) nvml: &'a Nvml,
    pub(super) device: &'a Device<'n>,
}

/// A profile and NVML's id for it. Special profiles, which pods do not get, are included.
struct Known {
    id: c_uint,
    profile: Profile,
}

impl Known {
    /// True for a profile with a media engine or for graphics, or without a part that others have. People make such
    /// instances by hand.
    fn is_special(&self) -> bool {
        self.profile.name.contains(['+', '-'])
    }
}

fn ok(call: &'static str, code: u32) -> Result<(), MakeError> {
    match code {
        SUCCESS => Ok(()),
        code => Err(MakeError { call, code }),
    }
}

fn lacks(call: &'static str) -> MakeError {
    MakeError {
        call,
        code: NOT_SUPPORTED,
    }
}

/// A function of the library, if the driver has it.
macro_rules! function {
    ($card:expr, $name:ident) => {
        match &$card.nvml.lib().$name {
            Ok(function) => function,
            Err(_) => return Err(lacks(stringify!($name))),
        }
    };
}

impl Card<'_, '_> {
    fn profiles(&self) -> Result<Vec<Known>, MakeError> {
        let info = function!(self, nvmlDeviceGetGpuInstanceProfileInfoV);
        let mut known = Vec::new();
        for number in 0..PROFILES {
            let version = size_of::<nvmlGpuInstanceProfileInfo_v2_t>() as u32 | 2 << 24;
            // SAFETY: numbers and characters, of which zero is one; the call writes to `told` alone.
            let (code, told) = unsafe {
                let mut told = nvmlGpuInstanceProfileInfo_v2_t {
                    version,
                    ..zeroed()
                };
                (info(self.device.handle(), number, &mut told), told)
            };
            if code == NOT_SUPPORTED || code == INVALID_ARGUMENT {
                continue;
            }
            ok("nvmlDeviceGetGpuInstanceProfileInfoV", code)?;
            // SAFETY: NVML ends the text with a zero; so does this, whatever it wrote.
            let name = unsafe {
                let mut bytes = told.name;
                bytes[bytes.len() - 1] = 0;
                CStr::from_ptr(bytes.as_ptr())
                    .to_string_lossy()
                    .into_owned()
            };
            let places = self.places(told.id)?;
            known.push(Known {
                id: told.id,
                profile: Profile {
                    name: name.trim_start_matches("MIG ").to_owned(),
                    memory_mib: u32::try_from(told.memorySizeMB).unwrap_or(u32::MAX),
                    slices: places.first().map_or(0, |place| small(place.size)),
                    compute_slices: small(told.sliceCount),
                    starts: places.iter().map(|place| small(place.start)).collect(),
                },
            });
        }
        Ok(known)
    }

    fn places(&self, profile: c_uint) -> Result<Vec<nvmlGpuInstancePlacement_t>, MakeError> {
        let list = function!(self, nvmlDeviceGetGpuInstancePossiblePlacements_v2);
        let call = "nvmlDeviceGetGpuInstancePossiblePlacements_v2";
        let mut places = vec![nvmlGpuInstancePlacement_t { start: 0, size: 0 }; 64];
        let mut count = 64;
        // SAFETY: there is room for `count` entries, and the call writes no more.
        let code = unsafe {
            let handle = self.device.handle();
            match list(handle, profile, null_mut(), &mut count) {
                SUCCESS if count as usize <= places.len() => {
                    list(handle, profile, places.as_mut_ptr(), &mut count)
                }
                SUCCESS => INVALID_ARGUMENT,
                code => code,
            }
        };
        ok(call, code)?;
        places.truncate(count as usize);
        Ok(places)
    }

    fn instances(&self, profile: &Known) -> Result<Vec<(nvmlGpuInstance_t, Found)>, MakeError> {
        let list = function!(self, nvmlDeviceGetGpuInstances);
        let info = function!(self, nvmlGpuInstanceGetInfo);
        let parts = function!(self, nvmlGpuInstanceGetComputeInstances);
        let mut handles: Vec<nvmlGpuInstance_t> = vec![null_mut(); MAX_INSTANCES];
        let mut count = MAX_INSTANCES as c_uint;
        // SAFETY: there is room for more than a card can have.
        let code = unsafe {
            list(
                self.device.handle(),
                profile.id,
                handles.as_mut_ptr(),
                &mut count,
            )
        };
        ok("nvmlDeviceGetGpuInstances", code)?;
        handles.truncate(count as usize);
        let mut found = Vec::new();
        for handle in handles {
            // SAFETY: numbers, of which zero is one; the calls write to `told`, `compute` and `parts_count` alone.
            let (code, told, compute) = unsafe {
                let mut told = zeroed();
                let code = info(handle, &mut told);
                // Others may have divided it in a way of their own.
                let compute = self.compute(handle, parts, profile.profile.compute_slices);
                let compute = compute.unwrap_or_default();
                (code, told, compute)
            };
            ok("nvmlGpuInstanceGetInfo", code)?;
            found.push((
                handle,
                Found {
                    id: told.id,
                    profile: profile.profile.name.clone(),
                    start: small(told.placement.start),
                    slices: small(told.placement.size),
                    whole: compute.is_some(),
                },
            ));
        }
        Ok(found)
    }

    /// The compute instance that takes all of a GPU instance, if there is one.
    ///
    /// # Safety
    /// `of` is a GPU instance of this card.
    unsafe fn compute(
        &self,
        of: nvmlGpuInstance_t,
        list: &unsafe extern "C" fn(
            nvmlGpuInstance_t,
            c_uint,
            *mut nvmlComputeInstance_t,
            *mut c_uint,
        ) -> u32,
        slices: u8,
    ) -> Result<Option<nvmlComputeInstance_t>, MakeError> {
        let mut handles: [nvmlComputeInstance_t; MAX_INSTANCES] = [null_mut(); MAX_INSTANCES];
        let mut count = MAX_INSTANCES as c_uint;
        // SAFETY: there is room for more than a GPU instance can have.
        let code = unsafe {
            let id = self.compute_profile(of, slices)?;
            list(of, id, handles.as_mut_ptr(), &mut count)
        };
        ok("nvmlGpuInstanceGetComputeInstances", code)?;
        Ok(handles.first().copied().filter(|_| count > 0))
    }

    /// NVML's id of the compute instance that takes all of a GPU instance.
    ///
    /// # Safety
    /// `of` is a GPU instance of this card.
    unsafe fn compute_profile(
        &self,
        of: nvmlGpuInstance_t,
        slices: u8,
    ) -> Result<c_uint, MakeError> {
        let call = "nvmlGpuInstanceGetComputeInstanceProfileInfo";
        let info = function!(self, nvmlGpuInstanceGetComputeInstanceProfileInfo);
        let number = COMPUTE_PROFILES.iter().find(|it| it.0 == u32::from(slices));
        let number = number.map(|it| it.1).ok_or(lacks(call))?;
        // SAFETY: numbers, of which zero is one; the call writes to `told` alone.
        let (code, told) = unsafe {
            let mut told = zeroed();
            (info(of, number, 0, &mut told), told)
        };
        ok(call, code).map(|()| told.id)
    }
}

impl Driver for Card<'_, '_> {
    fn shown(&self) -> Result<Shown, MakeError> {
        let known = self.profiles()?;
        let mut shown = Shown::default();
        for profile in known {
            let found = self.instances(&profile)?;
            shown.instances.extend(found.into_iter().map(|it| it.1));
            if !profile.is_special() {
                shown.profiles.push(profile.profile);
            }
        }
        shown.instances.sort_by_key(|it| it.start);
        Ok(shown)
    }

    fn make(&self, name: &str, start: u8) -> Result<(), MakeError> {
        let call = "nvmlDeviceCreateGpuInstanceWithPlacement";
        let make = function!(self, nvmlDeviceCreateGpuInstanceWithPlacement);
        let known = self.profiles()?;
        let profile = known.iter().find(|it| it.profile.name == name);
        let profile = profile.ok_or(lacks(call))?;
        let place = nvmlGpuInstancePlacement_t {
            start: start.into(),
            size: profile.profile.slices.into(),
        };
        let mut made = null_mut();
        // SAFETY: the device and the place outlive the call, which writes to `made` alone.
        let code = unsafe { make(self.device.handle(), profile.id, &place, &mut made) };
        ok(call, code)
    }

    fn complete(&self, instance: &Found) -> Result<(), MakeError> {
        let make = function!(self, nvmlGpuInstanceCreateComputeInstance);
        let (handle, slices) = self.handle(instance)?;
        let mut made = null_mut();
        // SAFETY: the handle is one of this card's; the call writes to `made` alone.
        let code = unsafe {
            let id = self.compute_profile(handle, slices)?;
            make(handle, id, &mut made)
        };
        ok("nvmlGpuInstanceCreateComputeInstance", code)
    }

    fn end(&self, instance: &Found) -> Result<(), MakeError> {
        let list = function!(self, nvmlGpuInstanceGetComputeInstances);
        let end_compute = function!(self, nvmlComputeInstanceDestroy);
        let end = function!(self, nvmlGpuInstanceDestroy);
        let (handle, slices) = self.handle(instance)?;
        // SAFETY: the handles are this card's, and are used no more once they are destroyed.
        unsafe {
            if let Some(compute) = self.compute(handle, list, slices)? {
                ok("nvmlComputeInstanceDestroy", end_compute(compute))?;
            }
            ok("nvmlGpuInstanceDestroy", end(handle))
        }
    }
}

impl Card<'_, '_> {
    /// The handle of an instance that was shown, and its compute slices.
    fn handle(&self, wanted: &Found) -> Result<(nvmlGpuInstance_t, u8), MakeError> {
        for profile in self.profiles()? {
            if profile.profile.name != wanted.profile {
                continue;
            }
            let slices = profile.profile.compute_slices;
            let found = self.instances(&profile)?.into_iter();
            let same = |it: &Found| it.id == wanted.id && it.start == wanted.start;
            if let Some((handle, _)) = found.into_iter().find(|(_, it)| same(it)) {
                return Ok((handle, slices));
            }
        }
        Err(lacks("nvmlDeviceGetGpuInstances"))
    }
}

fn small(number: c_uint) -> u8 {
    u8::try_from(number).unwrap_or(u8::MAX)
}

/// First slice and number of slices of a MIG device's GPU instance.
pub(super) fn place(nvml: &Nvml, instance: &Device<'_>) -> Option<(u8, u8)> {
    let lib = nvml.lib();
    let id = lib.nvmlDeviceGetGpuInstanceId.as_ref().ok()?;
    let parent = lib
        .nvmlDeviceGetDeviceHandleFromMigDeviceHandle
        .as_ref()
        .ok()?;
    let by_id = lib.nvmlDeviceGetGpuInstanceById.as_ref().ok()?;
    let info = lib.nvmlGpuInstanceGetInfo.as_ref().ok()?;
    // SAFETY: numbers and handles, of which zero is one; each call writes to its last argument alone.
    unsafe {
        let (mut number, mut card, mut handle) = (0, null_mut(), null_mut());
        let device = instance.handle();
        let fine = id(device, &mut number) == SUCCESS
            && parent(device, &mut card) == SUCCESS
            && by_id(card, number, &mut handle) == SUCCESS;
        let mut told = zeroed();
        let fine = fine && info(handle, &mut told) == SUCCESS;
        fine.then(|| (small(told.placement.start), small(told.placement.size)))
    }
}
