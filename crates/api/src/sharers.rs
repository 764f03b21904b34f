//! The promise of another GPU sharer to a pod, read from that sharer's annotations.
//!
//! Formats: gpushare's annotations `ALIYUN_COM_GPU_MEM_*` and the JSON of its successor
//! (<https://github.com/AliyunContainerService/gpushare-scheduler-extender>), HAMi's and Volcano's lists
//! `UUID,TYPE,MIB,CORES:` for each GPU with a `;` after each container
//! (<https://project-hami.io/docs/developers/protocol>).
//!
//! Anyone may write an annotation. It counts only on a pod that requests the sharer's resource, which no node has where
//! an administrator has not installed that sharer.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::{names, quantity};

/// As many GPUs of a pod are read.
const MAX_GPUS: usize = 256;

/// The promise to a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Promise {
    /// Who placed the pod.
    pub sharer: &'static str,
    /// False if its annotation cannot be read: every GPU of the node is then charged with the request.
    pub readable: bool,
    gpus: Vec<(Which, Amount)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Which {
    Uuid(String),
    Index(u32),
    Every,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Amount {
    Bytes(u64),
    /// Volcano's own units, each of as many MiB as its `gpuMemoryFactor` states.
    Units(u64),
    /// So many of the units into which the GPU is divided.
    Part(u64, u64),
    Whole,
}

impl Promise {
    /// The promise in the annotations of a pod; `None` if no other sharer placed it, or once it has finished.
    #[must_use]
    pub fn of(pod: &Pod) -> Option<Self> {
        let phase = pod
            .status
            .as_ref()
            .and_then(|status| status.phase.as_deref());
        if matches!(phase, Some("Succeeded" | "Failed")) {
            return None;
        }
        let none = BTreeMap::new();
        let notes = pod.metadata.annotations.as_ref().unwrap_or(&none);
        if notes.contains_key(names::ASSIGNMENT) {
            return None;
        }
        gpushare(pod, notes)
            .or_else(|| volcano(pod, notes))
            .or_else(|| hami(pod, notes))
    }

    /// Bytes of this GPU, which has `total`, on a node where a unit of Volcano's is as many MiB.
    #[must_use]
    pub fn on(&self, uuid: &str, index: u32, total: u64, unit: u64) -> u64 {
        let here = self.gpus.iter().filter(|(which, _)| match which {
            Which::Uuid(it) => it == uuid,
            Which::Index(it) => *it == index,
            Which::Every => true,
        });
        let bytes = here.map(|(_, amount)| match *amount {
            Amount::Bytes(bytes) => bytes,
            Amount::Units(units) => units.saturating_mul(unit).saturating_mul(1 << 20),
            Amount::Part(units, of) => part(total, units, of),
            Amount::Whole => total,
        });
        bytes.fold(0, u64::saturating_add).min(total)
    }

    fn readable(sharer: &'static str, gpus: Vec<(Which, Amount)>) -> Self {
        Self {
            sharer,
            readable: true,
            gpus,
        }
    }

    fn unreadable(sharer: &'static str, amount: Amount) -> Self {
        Self {
            sharer,
            readable: false,
            gpus: vec![(Which::Every, amount)],
        }
    }
}

/// `units` of the `of` parts of `total`, rounded up.
fn part(total: u64, units: u64, of: u64) -> u64 {
    let bytes = u128::from(total) * u128::from(units);
    let bytes = bytes.div_ceil(u128::from(of.max(1)));
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

fn mib(mib: u64) -> Amount {
    Amount::Bytes(mib.saturating_mul(1 << 20))
}

/// The sum of the containers' limits of a resource. A limit that is not a whole number counts as zero.
#[must_use]
pub fn requested(pod: &Pod, resource: &str) -> u64 {
    let spec = pod.spec.iter();
    let containers = spec.flat_map(|spec| {
        spec.containers
            .iter()
            .chain(spec.init_containers.iter().flatten())
    });
    let amounts = containers.filter_map(|container| {
        let limits = container.resources.as_ref()?.limits.as_ref()?;
        quantity::whole(limits.get(resource)?)
    });
    amounts.fold(0, u64::saturating_add)
}

/// MiB of a unit of Volcano's on a node that has so much of its memory, and GPUs of `mib` in all; `None` if it has none.
#[must_use]
pub fn volcano_unit(amounts: Option<&BTreeMap<String, Quantity>>, mib: u64) -> Option<u64> {
    let units = quantity::whole(amounts?.get(names::VOLCANO_MEMORY)?)?;
    let unit = mib.checked_add(units / 2)?.checked_div(units)?;
    (mib > 0).then_some(unit.max(1))
}

fn number(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

/// The installation decides whether its units are GiB or MiB, so that only the part of the GPU counts.
fn gpushare(pod: &Pod, notes: &BTreeMap<String, String>) -> Option<Promise> {
    const SHARER: &str = "gpushare";
    let units = requested(pod, names::GPUSHARE_MEM);
    if units == 0 {
        return None;
    }
    let note = |key: &str| number(notes.get(key)?);
    let one = || {
        let index = u32::try_from(note("ALIYUN_COM_GPU_MEM_IDX")?).ok()?;
        let (units, of) = (
            note("ALIYUN_COM_GPU_MEM_POD")?,
            note("ALIYUN_COM_GPU_MEM_DEV")?,
        );
        (units <= of).then(|| vec![(Which::Index(index), Amount::Part(units, of))])
    };
    // Containers by number, then GPUs by index.
    let several = || {
        let text = notes.get("scheduler.framework.gpushare.allocation")?;
        let all: BTreeMap<String, BTreeMap<String, u64>> = serde_json::from_str(text).ok()?;
        let gpus = all
            .values()
            .flatten()
            .take(MAX_GPUS + 1)
            .map(|(index, units)| {
                let gib = units.saturating_mul(1024);
                Some((Which::Index(index.parse().ok()?), mib(gib)))
            });
        let gpus: Vec<_> = gpus.collect::<Option<_>>()?;
        (1..=MAX_GPUS).contains(&gpus.len()).then_some(gpus)
    };
    let gpus = one().or_else(several);
    Some(gpus.map_or_else(
        || Promise::unreadable(SHARER, mib(units.saturating_mul(1024))),
        |gpus| Promise::readable(SHARER, gpus),
    ))
}

fn volcano(pod: &Pod, notes: &BTreeMap<String, String>) -> Option<Promise> {
    const SHARER: &str = "volcano";
    let gpus = requested(pod, "volcano.sh/vgpu-number");
    if gpus == 0 {
        return None;
    }
    let each = requested(pod, names::VOLCANO_MEMORY);
    let listed = notes
        .get("volcano.sh/vgpu-ids-new")
        .and_then(|it| list(it, gpus, Amount::Units));
    Some(listed.map_or_else(
        || Promise::unreadable(SHARER, memory(each, Amount::Units)),
        |gpus| Promise::readable(SHARER, gpus),
    ))
}

/// A pod with GPUs alone may be a pod of NVIDIA's own device plugin. The kubelet reports its GPUs.
fn hami(pod: &Pod, notes: &BTreeMap<String, String>) -> Option<Promise> {
    const SHARER: &str = "hami";
    let each = requested(pod, "nvidia.com/gpumem");
    let percent = requested(pod, "nvidia.com/gpumem-percentage");
    let gpus = requested(pod, names::NVIDIA_GPU);
    let only_hamis = each > 0 || percent > 0;
    if gpus == 0 && !only_hamis {
        return None;
    }
    let listed = notes
        .get("hami.io/vgpu-devices-allocated")
        .and_then(|it| list(it, gpus.max(1), mib));
    match listed {
        Some(gpus) => Some(Promise::readable(SHARER, gpus)),
        None if only_hamis => Some(Promise::unreadable(SHARER, memory(each, mib))),
        None => None,
    }
}

/// Without an amount it is the whole GPU.
fn memory(each: u64, amount: fn(u64) -> Amount) -> Amount {
    match each {
        0 => Amount::Whole,
        each => amount(each),
    }
}

/// The GPUs of a list, at most as many as the pod requests.
fn list(text: &str, at_most: u64, of: fn(u64) -> Amount) -> Option<Vec<(Which, Amount)>> {
    let entries = text.split([';', ':']).filter(|entry| !entry.is_empty());
    let gpus = entries.take(MAX_GPUS + 1).map(|entry| {
        let mut fields = entry.split(',');
        let (uuid, _, amount) = (fields.next()?, fields.next()?, fields.next()?);
        let uuid = uuid.trim();
        (!uuid.is_empty()).then_some(())?;
        Some((Which::Uuid(uuid.to_owned()), of(number(amount)?)))
    });
    let gpus: Vec<_> = gpus.collect::<Option<_>>()?;
    let count = u64::try_from(gpus.len()).ok()?;
    (count > 0 && count <= at_most && gpus.len() <= MAX_GPUS).then_some(gpus)
}
