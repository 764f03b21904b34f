//! The C functions, as the header of NVML declares them.
#![allow(unsafe_code, non_snake_case, reason = "this is a C library")]

use std::ffi::{CStr, c_char, c_uint, c_ulong, c_ulonglong};
use std::time::{Duration, Instant, SystemTime};

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlDeviceArchitecture_t, nvmlEnableState_t, nvmlEventData_t, nvmlEventSet_t,
    nvmlEventTypeDoubleBitEccError, nvmlEventTypeXidCriticalError,
    nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_NVLINK as P2P_NVLINK, nvmlGpuP2PCapsIndex_t,
    nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_NOT_SUPPORTED as P2P_NOT_SUPPORTED,
    nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_OK as P2P_OK, nvmlGpuP2PStatus_t, nvmlGpuTopologyLevel_t,
    nvmlMemory_v2_t, nvmlPciInfo_t, nvmlProcessInfo_t, nvmlProcessUtilizationSample_t,
    nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH as VERSION_MISMATCH,
    nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE as INSUFFICIENT_SIZE,
    nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT as INVALID_ARGUMENT,
    nvmlReturn_enum_NVML_ERROR_NOT_FOUND as NOT_FOUND,
    nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED as NOT_SUPPORTED,
    nvmlReturn_enum_NVML_ERROR_TIMEOUT as TIMEOUT, nvmlReturn_enum_NVML_SUCCESS as SUCCESS,
    nvmlReturn_t as Return, nvmlUtilization_t,
};

use crate::machine::{FAR, Gpu, Kind, Mig, Process};
use crate::state::{EventSet, Handle, state, sum};

/// NVML's "value not available".
const NOT_AVAILABLE: u64 = u64::MAX;
const NO_INSTANCE: u32 = u32::MAX;

/// NVML's data about a PCI address.
fn pci_info(address: &str) -> Result<nvmlPciInfo_t, Return> {
    let mut parts = address.split([':', '.']);
    let mut part = || {
        parts
            .next()
            .and_then(|part| c_uint::from_str_radix(part, 16).ok())
            .ok_or(NOT_SUPPORTED)
    };
    let mut info = nvmlPciInfo_t {
        busIdLegacy: [0; 16],
        domain: part()?,
        bus: part()?,
        device: part()?,
        pciDeviceId: 0,
        pciSubSystemId: 0,
        busId: [0; 32],
    };
    for (to, from) in info.busId.iter_mut().take(31).zip(address.bytes()) {
        *to = from as c_char;
    }
    Ok(info)
}

pub(crate) fn done(result: Result<(), Return>) -> Return {
    result.err().unwrap_or(SUCCESS)
}

/// # Safety
/// `to` is null or points to memory for a `T`.
pub(crate) unsafe fn put<T>(to: *mut T, value: T) -> Result<(), Return> {
    if to.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    unsafe { to.write(value) };
    Ok(())
}

/// # Safety
/// `to` is null or points to `length` bytes.
unsafe fn put_text(to: *mut c_char, length: c_uint, text: &str) -> Result<(), Return> {
    if to.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    if text.len() >= length as usize {
        return Err(INSUFFICIENT_SIZE);
    }
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), text.len());
        to.add(text.len()).write(0);
    }
    Ok(())
}

pub(crate) fn device<T>(
    call: &str,
    device: nvmlDevice_t,
    read: impl FnOnce(Handle, &Gpu, Option<&Mig>) -> Result<T, Return>,
) -> Result<T, Return> {
    state(|state| {
        let (handle, gpu, mig) = state.device(call, device as usize)?;
        read(handle, gpu, mig)
    })
}

pub(crate) fn pointer(handle: Handle) -> nvmlDevice_t {
    handle.encode() as nvmlDevice_t
}

/// Defines C functions. Their pointers are the caller's to get right, as in the real library.
macro_rules! c {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $body:expr)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $type),*) -> Return {
            done($body(stringify!($name)))
        }
    )*};
}
pub(crate) use c;

c! {
    fn nvmlInit_v2() |_: &str| state(|state| state.init())
    fn nvmlInitWithFlags(_flags: c_uint) |_: &str| state(|state| state.init())
    fn nvmlShutdown() |_: &str| state(|state| state.shutdown())
    fn nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint) |call: &str| {
        let driver = state(|state| state.machine(call).map(|machine| machine.driver.clone()))?;
        unsafe { put_text(version, length, &driver) }
    }
    fn nvmlDeviceGetCount_v2(count: *mut c_uint) |call: &str| {
        let gpus = state(|state| state.machine(call).map(|machine| machine.gpus.len()))?;
        unsafe { put(count, gpus as c_uint) }
    }
    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut nvmlDevice_t) |call: &str| {
        let handle = Handle { gpu: index as usize, mig: None };
        state(|state| state.device(call, handle.encode()).map(drop))?;
        unsafe { put(device, pointer(handle)) }
    }
    fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut nvmlDevice_t) |call: &str| {
        if uuid.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let uuid = unsafe { CStr::from_ptr(uuid) }.to_str().map_err(|_| INVALID_ARGUMENT)?;
        let handle = state(|state| {
            let gpus = state.machine(call)?.gpus.iter().enumerate();
            let mut found = gpus.filter_map(|(gpu, it)| {
                let mig = it.mig.iter().position(|mig| mig.uuid == uuid);
                (it.uuid == uuid || mig.is_some()).then_some(Handle { gpu, mig })
            });
            found.next().ok_or(NOT_FOUND)
        })?;
        unsafe { put(device, pointer(handle)) }
    }
    fn nvmlDeviceGetUUID(of: nvmlDevice_t, text: *mut c_char, length: c_uint) |call: &str| {
        let uuid = device(call, of, |_, gpu, mig| {
            Ok(mig.map_or(&gpu.uuid, |mig| &mig.uuid).clone())
        })?;
        unsafe { put_text(text, length, &uuid) }
    }
    fn nvmlDeviceGetName(of: nvmlDevice_t, text: *mut c_char, length: c_uint) |call: &str| {
        let name = device(call, of, |_, gpu, mig| Ok(match mig {
            Some(mig) => format!("{} MIG {}", gpu.name, mig.profile),
            None => gpu.name.clone(),
        }))?;
        unsafe { put_text(text, length, &name) }
    }
    fn nvmlDeviceGetIndex(of: nvmlDevice_t, index: *mut c_uint) |call: &str| {
        let gpu = device(call, of, |handle, _, _| Ok(handle.mig.unwrap_or(handle.gpu)))?;
        unsafe { put(index, gpu as c_uint) }
    }
    fn nvmlDeviceGetMinorNumber(of: nvmlDevice_t, minor: *mut c_uint) |call: &str| {
        let number = device(call, of, |_, gpu, _| gpu.minor.ok_or(NOT_SUPPORTED))?;
        unsafe { put(minor, number) }
    }
    fn nvmlDeviceGetMemoryAffinity(
        of: nvmlDevice_t, size: c_uint, nodes: *mut c_ulong, _scope: c_uint
    ) |call: &str| {
        let node = device(call, of, |_, gpu, _| gpu.numa_node.ok_or(NOT_SUPPORTED))?;
        if size == 0 || node >= c_ulong::BITS {
            return Err(INSUFFICIENT_SIZE);
        }
        unsafe { put(nodes, 1 << node) }
    }
    fn nvmlDeviceGetArchitecture(of: nvmlDevice_t, is: *mut nvmlDeviceArchitecture_t) |call: &str| {
        let number = device(call, of, |_, gpu, _| gpu.architecture.ok_or(NOT_SUPPORTED))?;
        unsafe { put(is, number) }
    }
    fn nvmlDeviceGetPciInfo_v3(of: nvmlDevice_t, pci: *mut nvmlPciInfo_t) |call: &str| {
        let address = device(call, of, |_, gpu, _| Ok(gpu.pci_bus_id.clone()))?;
        let info = pci_info(&address)?;
        unsafe { put(pci, info) }
    }
    fn nvmlDeviceGetMemoryInfo_v2(of: nvmlDevice_t, memory: *mut nvmlMemory_v2_t) |call: &str| {
        let wanted = (size_of::<nvmlMemory_v2_t>() as c_uint) | 2 << 24;
        if memory.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        if unsafe { (*memory).version } != wanted {
            return Err(VERSION_MISMATCH);
        }
        let limit = state(|state| {
            let gpu = state.device(call, of as usize).ok().map(|(_, gpu, _)| gpu.clone());
            gpu.and_then(|gpu| state.own_limit(&gpu))
        });
        let (total, reserved, used) = device(call, of, |_, gpu, mig| Ok(match (mig, limit) {
            (Some(mig), _) => (mig.total_mib, mig.reserved_mib, sum(&mig.processes)),
            (None, Some(limit)) => (limit.hard >> 20, 0, limit.used_mib(gpu)),
            (None, None) => {
                let used = gpu.used_mib.unwrap_or_else(|| sum(&gpu.processes));
                (gpu.total_mib, gpu.reserved_mib, used)
            }
        }))?;
        let free = total.saturating_sub(reserved).saturating_sub(used);
        let bytes = |mib: u64| mib.saturating_mul(1 << 20);
        unsafe { put(memory, nvmlMemory_v2_t {
            version: wanted,
            total: bytes(total),
            reserved: bytes(reserved),
            free: bytes(free),
            used: bytes(used),
        }) }
    }
    fn nvmlDeviceGetUtilizationRates(of: nvmlDevice_t, rates: *mut nvmlUtilization_t) |call: &str| {
        let gpu = device(call, of, |_, gpu, mig| match mig {
            Some(_) => Err(NOT_SUPPORTED),
            None => gpu.utilization.ok_or(NOT_SUPPORTED),
        })?;
        unsafe { put(rates, nvmlUtilization_t { gpu, memory: 0 }) }
    }
    fn nvmlDeviceGetProcessUtilization(
        of: nvmlDevice_t, samples: *mut nvmlProcessUtilizationSample_t, count: *mut c_uint, _since: c_ulonglong
    ) |call: &str| {
        let busy: Vec<_> = device(call, of, |_, gpu, mig| {
            let tells = |process: &Process| process.utilization.is_some();
            if mig.is_some() || !gpu.processes.iter().any(tells) {
                return Err(NOT_SUPPORTED);
            }
            let all = gpu.processes.iter();
            Ok(all.filter(|it| it.utilization > Some(0)).cloned().collect())
        })?;
        let room = unsafe { count.as_mut() }.ok_or(INVALID_ARGUMENT)?;
        let fits = !samples.is_null() && *room as usize >= busy.len();
        *room = busy.len() as c_uint;
        match (busy.is_empty(), fits) {
            (true, _) => return Err(NOT_FOUND),
            (_, false) => return Err(INSUFFICIENT_SIZE),
            _ => {}
        }
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_micros() as c_ulonglong;
        for (at, process) in busy.iter().enumerate() {
            let percent = process.utilization.unwrap_or_default();
            let sample = nvmlProcessUtilizationSample_t {
                pid: process.pid, timeStamp: now, smUtil: percent, memUtil: 0, encUtil: 0, decUtil: 0,
            };
            unsafe { samples.add(at).write(sample) };
        }
        Ok(())
    }
    fn nvmlDeviceGetComputeRunningProcesses_v3(
        of: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_t
    ) |call: &str| {
        let is = |kind| matches!(kind, Kind::Compute | Kind::Both);
        unsafe { processes(call, of, is, count, infos) }
    }
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(
        of: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_t
    ) |call: &str| {
        let is = |kind| matches!(kind, Kind::Graphics | Kind::Both);
        unsafe { processes(call, of, is, count, infos) }
    }
    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(
        of: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_t
    ) |call: &str| {
        unsafe { processes(call, of, |kind| kind == Kind::Mps, count, infos) }
    }
    fn nvmlDeviceGetMigMode(
        of: nvmlDevice_t, current: *mut c_uint, pending: *mut c_uint
    ) |call: &str| {
        let mode = device(call, of, |_, gpu, _| Ok(c_uint::from(gpu.is_divided())))?;
        unsafe {
            put(current, mode)?;
            put(pending, mode)
        }
    }
    fn nvmlDeviceGetComputeMode(of: nvmlDevice_t, mode: *mut c_uint) |call: &str| {
        unsafe { put(mode, device(call, of, |_, gpu, _| Ok(gpu.compute_mode))?) }
    }
    fn nvmlDeviceGetMaxMigDeviceCount(of: nvmlDevice_t, count: *mut c_uint) |call: &str| {
        // The real library answers with the number of slots, most of which are empty.
        device(call, of, |_, _, _| Ok(()))?;
        unsafe { put(count, 7) }
    }
    fn nvmlDeviceGetMigDeviceHandleByIndex(
        of: nvmlDevice_t, index: c_uint, mig: *mut nvmlDevice_t
    ) |call: &str| {
        let handle = device(call, of, |handle, gpu, _| {
            gpu.mig.get(index as usize).filter(|mig| !mig.bare).ok_or(NOT_FOUND)?;
            Ok(Handle { mig: Some(index as usize), ..handle })
        })?;
        unsafe { put(mig, pointer(handle)) }
    }
    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
        of: nvmlDevice_t, parent: *mut nvmlDevice_t
    ) |call: &str| {
        let handle = device(call, of, |handle, _, _| Ok(Handle { mig: None, ..handle }))?;
        unsafe { put(parent, pointer(handle)) }
    }
    fn nvmlDeviceIsMigDeviceHandle(of: nvmlDevice_t, is: *mut c_uint) |call: &str| {
        let mig = device(call, of, |handle, _, _| Ok(handle.mig.is_some()))?;
        unsafe { put(is, c_uint::from(mig)) }
    }
    fn nvmlDeviceGetTopologyCommonAncestor(
        one: nvmlDevice_t, other: nvmlDevice_t, level: *mut nvmlGpuTopologyLevel_t
    ) |call: &str| {
        let other = device(call, other, |handle, _, _| Ok(handle.gpu))?;
        let nearest = device(call, one, |_, gpu, _| {
            let near = gpu.near.iter().find(|near| near.gpu as usize == other);
            Ok(near.map_or(FAR, |near| near.level))
        })?;
        unsafe { put(level, nearest) }
    }
    fn nvmlDeviceGetNvLinkState(
        of: nvmlDevice_t, link: c_uint, active: *mut nvmlEnableState_t
    ) |call: &str| {
        let up = device(call, of, |_, gpu, _| match gpu.nvlinks {
            0 => Err(NOT_SUPPORTED),
            links => Ok(nvmlEnableState_t::from(link < links)),
        })?;
        unsafe { put(active, up) }
    }
    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(
        of: nvmlDevice_t, link: c_uint, pci: *mut nvmlPciInfo_t
    ) |call: &str| {
        // Any further link goes to a switch, which the file does not describe.
        let other = device(call, of, |_, gpu, _| {
            let mut first = 0u32;
            let near = gpu.near.iter().find(|near| {
                first = near.nvlinks.unwrap_or(0).saturating_add(first);
                link < first
            });
            near.map(|near| near.gpu as usize).ok_or(NOT_SUPPORTED)
        })?;
        let address = state(|state| -> Result<String, Return> {
            let gpu = state.machine(call)?.gpus.get(other).ok_or(NOT_FOUND)?;
            Ok(gpu.pci_bus_id.clone())
        })?;
        unsafe { put(pci, pci_info(&address)?) }
    }
    fn nvmlDeviceGetP2PStatus(
        one: nvmlDevice_t, other: nvmlDevice_t, by: nvmlGpuP2PCapsIndex_t,
        is: *mut nvmlGpuP2PStatus_t
    ) |call: &str| {
        if by != P2P_NVLINK {
            return Err(NOT_SUPPORTED);
        }
        let other = device(call, other, |handle, _, _| Ok(handle.gpu))?;
        let status = device(call, one, |_, gpu, _| {
            let mut near = gpu.near.iter().filter(|near| near.nvlinks.is_some());
            Ok(match near.any(|near| near.gpu as usize == other) {
                true => P2P_OK,
                false => P2P_NOT_SUPPORTED,
            })
        })?;
        unsafe { put(is, status) }
    }
    fn nvmlDeviceGetSupportedEventTypes(of: nvmlDevice_t, types: *mut c_ulonglong) |call: &str| {
        device(call, of, |_, _, _| Ok(()))?;
        unsafe { put(types, XID | ECC) }
    }
    fn nvmlEventSetCreate(set: *mut nvmlEventSet_t) |call: &str| {
        let handle = state(|state| -> Result<usize, Return> {
            let seen = state.machine(call)?.events.len();
            state.sets.push(Some(EventSet { seen, ..EventSet::default() }));
            Ok(state.sets.len())
        })?;
        unsafe { put(set, handle as nvmlEventSet_t) }
    }
    fn nvmlDeviceRegisterEvents(
        of: nvmlDevice_t, types: c_ulonglong, set: nvmlEventSet_t
    ) |call: &str| {
        let handle = device(call, of, |handle, _, _| Ok(handle))?;
        if types & !(XID | ECC) != 0 {
            return Err(NOT_SUPPORTED);
        }
        state(|state| {
            let set = state.sets.get_mut((set as usize).wrapping_sub(1));
            set.and_then(Option::as_mut).ok_or(INVALID_ARGUMENT)?.gpus.push(handle.gpu);
            Ok(())
        })
    }
    fn nvmlEventSetWait_v2(
        set: nvmlEventSet_t, data: *mut nvmlEventData_t, timeout_ms: c_uint
    ) |call: &str| {
        let end = Instant::now() + Duration::from_millis(timeout_ms.into());
        loop {
            if let Some(event) = next_event(call, set as usize)? {
                return unsafe { put(data, event) };
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(TIMEOUT);
            }
            std::thread::sleep(left.min(Duration::from_millis(5)));
        }
    }
    fn nvmlEventSetFree(set: nvmlEventSet_t) |_: &str| {
        state(|state| {
            let set = state.sets.get_mut((set as usize).wrapping_sub(1));
            set.and_then(Option::take).map(drop).ok_or(INVALID_ARGUMENT)
        })
    }
}

const XID: u64 = nvmlEventTypeXidCriticalError as u64;
const ECC: u64 = nvmlEventTypeDoubleBitEccError as u64;

/// The next event of the set's cards.
fn next_event(call: &str, set: usize) -> Result<Option<nvmlEventData_t>, Return> {
    state(|state| {
        let place = set.wrapping_sub(1);
        let known = state
            .sets
            .get(place)
            .and_then(Option::as_ref)
            .ok_or(INVALID_ARGUMENT)?;
        let (gpus, from) = (known.gpus.clone(), known.seen);
        let machine = state.machine(call)?;
        let mut found = None;
        let mut seen = machine.events.len();
        for (at, event) in machine.events.iter().enumerate().skip(from) {
            let gpu = machine.gpus.iter().position(|gpu| gpu.uuid == event.gpu);
            if let Some(gpu) = gpu.filter(|gpu| gpus.contains(gpu)) {
                seen = at + 1;
                found = Some(nvmlEventData_t {
                    device: pointer(Handle { gpu, mig: None }),
                    eventType: if event.xid.is_some() { XID } else { ECC },
                    eventData: event.xid.unwrap_or_default(),
                    gpuInstanceId: NO_INSTANCE,
                    computeInstanceId: NO_INSTANCE,
                });
                break;
            }
        }
        if let Some(Some(set)) = state.sets.get_mut(place) {
            set.seen = seen;
        }
        Ok(found)
    })
}

/// # Safety
/// `infos` is null or has room for `*count` entries.
unsafe fn processes(
    call: &str,
    of: nvmlDevice_t,
    is: impl Fn(Kind) -> bool,
    count: *mut c_uint,
    infos: *mut nvmlProcessInfo_t,
) -> Result<(), Return> {
    let list: Vec<Process> = device(call, of, |_, gpu, mig| {
        let all = mig.map_or(&gpu.processes, |mig| &mig.processes);
        Ok(all
            .iter()
            .filter(|process| is(process.kind))
            .cloned()
            .collect())
    })?;
    if count.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    let used = |mib: u64| mib.saturating_mul(1 << 20).min(NOT_AVAILABLE - 1);
    let room = unsafe { *count } as usize;
    unsafe { count.write(list.len() as c_uint) };
    if room < list.len() || infos.is_null() && !list.is_empty() {
        return Err(INSUFFICIENT_SIZE);
    }
    for (at, process) in list.iter().enumerate() {
        let info = nvmlProcessInfo_t {
            pid: process.pid,
            usedGpuMemory: process.used_mib.map_or(NOT_AVAILABLE, used),
            gpuInstanceId: NO_INSTANCE,
            computeInstanceId: NO_INSTANCE,
        };
        unsafe { infos.add(at).write(info) };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use nvml_wrapper_sys::bindings::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED as UNINITIALIZED;

    use super::*;

    #[test]
    fn a_structure_of_another_version_is_refused() {
        let mut memory = nvmlMemory_v2_t {
            version: 1 << 24,
            total: 7,
            reserved: 7,
            free: 7,
            used: 7,
        };
        let first = pointer(Handle { gpu: 0, mig: None });
        let call = |to| unsafe { nvmlDeviceGetMemoryInfo_v2(first, to) };
        assert_eq!(call(&mut memory), VERSION_MISMATCH);
        assert_eq!(memory.total, 7);
        assert_eq!(call(std::ptr::null_mut()), INVALID_ARGUMENT);
        memory.version = (size_of::<nvmlMemory_v2_t>() as c_uint) | 2 << 24;
        assert_eq!(call(&mut memory), UNINITIALIZED, "nvmlInit was not called");
    }
}
