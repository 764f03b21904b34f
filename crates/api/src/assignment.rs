//! The assignment: which cards a pod holds and how much of each, as annotations. It does not know
//! whether those cards exist.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gpustow_pack::mig;
use gpustow_pack::{Mib, Placement};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::names;

/// The version of the annotation's format that this code reads and writes.
const VERSION: u64 = 1;
/// The API server's bound on the annotations of one object, names and values together, in bytes.
const ANNOTATIONS_LIMIT: usize = 256 << 10;
/// The part of that bound that stays free for later annotations, for example the agent's.
const ANNOTATIONS_SPARE: usize = 16 << 10;

/// The longest UUID that a GpuNode may report.
const MAX_UUID: usize = 96;
/// Bound on the bytes that one GPU of one container adds: its UUID five times, and the text around it.
const GPU_BYTES: usize = 5 * MAX_UUID + 96;
/// Bound on the bytes that one container adds, without its GPUs and its name.
const CONTAINER_BYTES: usize = 256;

/// The GPUs of a bound pod, and the memory that it holds on them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Assignment {
    /// GPU UUID and the MiB charged on it, each GPU once.
    pub charges: Vec<(Arc<str>, Mib)>,
    /// Container name and the GPU UUIDs that it sees, in the order of the names.
    pub containers: Vec<(Box<str>, Vec<Arc<str>>)>,
    /// No other pod is on its GPUs. Unknown if an older version wrote it: then the pod's annotation decides, and its
    /// owner may have changed that annotation since.
    pub exclusive: Option<bool>,
    /// Hundredths of the compute of each of its GPUs; zero without a share of compute.
    pub compute: u8,
    /// The MIG instance that is made for it on its GPU, if it has one of its own.
    pub instance: Option<Instance>,
}

/// Where a pod's MIG instance lies.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Instance {
    /// The name of its profile.
    pub profile: Box<str>,
    /// Its first memory slice.
    pub start: u8,
    /// How many memory slices it has.
    pub slices: u8,
}

impl Instance {
    /// Its memory slices.
    #[must_use]
    pub fn mask(&self) -> u8 {
        mig::mask(self.start.into(), self.slices.into())
    }
}

/// An assignment annotation that this version cannot use. The pod is accounted for on every card
/// of its node.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("annotation {key}: {0}", key = names::ASSIGNMENT)]
pub struct BrokenAssignment(pub String);

#[derive(Serialize, Deserialize)]
struct Written {
    version: u64,
    gpus: Vec<WrittenGpu>,
    containers: BTreeMap<Box<str>, Vec<Arc<str>>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    exclusive: Option<bool>,
    #[serde(default, rename = "computePercent", skip_serializing_if = "is_zero")]
    compute: u8,
    #[serde(default, rename = "mig", skip_serializing_if = "Option::is_none")]
    instance: Option<Instance>,
}

fn is_zero(it: &u8) -> bool {
    *it == 0
}

#[derive(Serialize, Deserialize)]
struct WrittenGpu {
    uuid: Arc<str>,
    mib: u64,
}

impl Assignment {
    /// The UUIDs that it has.
    pub(crate) fn uuids_mut(&mut self) -> impl Iterator<Item = &mut Arc<str>> {
        let charged = self.charges.iter_mut().map(|(uuid, _)| uuid);
        let seen = self.containers.iter_mut().flat_map(|(_, uuids)| uuids);
        charged.chain(seen)
    }

    /// `placement` with names: `containers` has one per claim, `uuids` one per card of the node.
    /// `None` if a claim or a card of the placement is without a name.
    pub fn from_placement(
        placement: &Placement,
        containers: &[Box<str>],
        uuids: &[impl AsRef<str>],
        exclusive: bool,
        compute: u8,
    ) -> Option<Self> {
        let uuid = |card: usize| uuids.get(card).map(|uuid| Arc::from(uuid.as_ref()));
        let charge = |&(card, mib): &(usize, Mib)| Some((uuid(card)?, mib));
        let container = |(claim, cards): (usize, &Vec<usize>)| {
            let cards = cards
                .iter()
                .map(|&card| uuid(card))
                .collect::<Option<_>>()?;
            Some((containers.get(claim)?.clone(), cards))
        };
        let mut containers: Vec<_> = placement
            .cards
            .iter()
            .enumerate()
            .map(container)
            .collect::<Option<_>>()?;
        containers.sort_unstable();
        Some(Self {
            charges: placement
                .charges
                .iter()
                .map(charge)
                .collect::<Option<_>>()?,
            containers,
            exclusive: Some(exclusive),
            compute,
            instance: None,
        })
    }

    /// The value of the assignment annotation.
    #[must_use]
    pub fn encode(&self) -> String {
        let gpus = self.charges.iter();
        let written = Written {
            version: VERSION,
            gpus: gpus
                .map(|(uuid, mib)| WrittenGpu {
                    uuid: uuid.clone(),
                    mib: mib.0,
                })
                .collect(),
            containers: self.containers.iter().cloned().collect(),
            exclusive: self.exclusive,
            compute: self.compute,
            instance: self.instance.clone(),
        };
        serde_json::json!(written).to_string()
    }

    /// Reads the value of the assignment annotation.
    ///
    /// # Errors
    /// [`BrokenAssignment`] if a newer version wrote it or if it does not state which card holds how much.
    pub fn decode(text: &str) -> Result<Self, BrokenAssignment> {
        #[derive(Deserialize)]
        struct Head {
            version: u64,
        }
        let broken = |problem: serde_json::Error| BrokenAssignment(problem.to_string());
        let Head { version } = serde_json::from_str(text).map_err(broken)?;
        if version != VERSION {
            return Err(BrokenAssignment(format!(
                "version {version}, and this gpustow reads version {VERSION}"
            )));
        }
        let Written {
            gpus,
            containers,
            exclusive,
            compute,
            instance,
            ..
        } = serde_json::from_str(text).map_err(broken)?;
        if instance.as_ref().is_some_and(|it| it.mask() == 0) {
            return Err(BrokenAssignment("a MIG instance that no GPU has".into()));
        }
        let mut seen = BTreeSet::new();
        if gpus.is_empty() {
            return Err(BrokenAssignment("no GPUs".into()));
        }
        for WrittenGpu { uuid, mib } in &gpus {
            if uuid.is_empty() || *mib == 0 {
                return Err(BrokenAssignment("a GPU without UUID or MiB".into()));
            }
            if !seen.insert(uuid) {
                return Err(BrokenAssignment(format!("GPU {uuid} twice")));
            }
        }
        if let Some(unknown) = containers
            .values()
            .flatten()
            .find(|uuid| !seen.contains(uuid))
        {
            return Err(BrokenAssignment(format!(
                "GPU {unknown} of a container is not charged"
            )));
        }
        Ok(Self {
            charges: gpus
                .into_iter()
                .map(|gpu| (gpu.uuid, Mib(gpu.mib)))
                .collect(),
            containers: containers.into_iter().collect(),
            exclusive,
            compute,
            instance,
        })
    }

    /// Everything that the Binding writes into the pod: the assignment, and for every container
    /// the devices it sees, once for the environment and once for NVIDIA's NRI plugin. A MIG instance is not made yet: its
    /// device is called by the pod's UID, whose agent makes that name known.
    #[must_use]
    pub fn annotations(&self, uid: &str) -> BTreeMap<String, String> {
        let mut annotations = BTreeMap::from([(names::ASSIGNMENT.to_owned(), self.encode())]);
        for (container, uuids) in &self.containers {
            if self.instance.is_some() {
                let device = format!("{}={uid}", names::CDI_MIG);
                annotations.insert(format!("{}{container}", names::DEVICES_OF), device.clone());
                annotations.insert(format!("{}{container}", names::CDI_OF), device);
                continue;
            }
            annotations.insert(format!("{}{container}", names::DEVICES_OF), uuids.join(","));
            let cdi: Vec<_> = uuids
                .iter()
                .map(|uuid| format!("{}={uuid}", names::CDI_KIND))
                .collect();
            annotations.insert(format!("{}{container}", names::CDI_OF), cdi.join(","));
        }
        annotations
    }

    /// May a pod that has these annotations have an assignment too, on whatever node? Its containers are given by name and
    /// number of GPUs. Since Kubernetes 1.38 the API server refuses a Binding that makes annotations too large; before, it
    /// refuses every later write to the pod.
    ///
    /// # Errors
    /// The error in their size, in bytes.
    pub fn fits_beside<'a>(
        present: &BTreeMap<String, String>,
        containers: impl Iterator<Item = (&'a str, u32)>,
    ) -> Result<(), String> {
        let present: usize = present
            .iter()
            .map(|(key, value)| key.len() + value.len())
            .sum();
        let added: usize = containers
            .map(|(name, gpus)| {
                CONTAINER_BYTES + 7 * name.len() + GPU_BYTES.saturating_mul(gpus as usize)
            })
            .sum();
        let most = ANNOTATIONS_LIMIT - ANNOTATIONS_SPARE;
        match present.saturating_add(added) <= most {
            true => Ok(()),
            false => Err(format!(
                "they have {present} bytes, and the assignment may need {added} more. Together they may have {most}: remove some"
            )),
        }
    }
}

#[cfg(test)]
mod tests;
