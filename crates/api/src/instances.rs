//! MIG instances that an agent makes on demand, as a `GpuNode` shows them.

use gpustow_pack::mig::{self, Geometry, Slices};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What instances can be made on a GPU, and which there are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OnDemand {
    /// The profiles that the driver offers.
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    #[serde(default)]
    pub profiles: Vec<Profile>,
    /// The instances on the GPU, including instances of other owners.
    #[schemars(length(max = 8), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["start"]))]
    #[serde(default)]
    pub instances: Vec<Instance>,
}

/// A profile of MIG instances.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Profile {
    /// Its name, as `1g.10gb`.
    #[schemars(length(min = 1, max = 64))]
    pub name: String,
    /// Memory of an instance, MiB.
    #[schemars(range(min = 0, max = 16_777_216))]
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u32,
    /// Memory slices of an instance.
    #[schemars(range(min = 1, max = 8))]
    pub slices: u8,
    /// Compute slices of an instance.
    #[schemars(range(min = 1, max = 8))]
    pub compute_slices: u8,
    /// The memory slices at which an instance may start.
    #[schemars(length(max = 8), inner(range(min = 0, max = 7)))]
    #[serde(default)]
    pub starts: Vec<u8>,
}

/// An instance that there is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Instance {
    /// The name of its profile.
    #[schemars(length(max = 64))]
    pub profile: String,
    /// Its first memory slice.
    #[schemars(range(min = 0, max = 7))]
    pub start: u8,
    /// How many memory slices it has.
    #[schemars(range(min = 1, max = 8))]
    pub slices: u8,
    /// UID of the pod for which the agent made it; absent if others made it: the agent never changes such an instance.
    #[schemars(length(min = 1, max = 64))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
}

impl Instance {
    /// Its memory slices.
    #[must_use]
    pub fn mask(&self) -> u8 {
        mig::mask(self.start.into(), self.slices.into())
    }
}

impl OnDemand {
    /// The slices of the GPU as they are if no pod holds any: slices of others' instances are blocked. None if no
    /// instance could ever be made there.
    #[must_use]
    pub fn slices(&self) -> Option<Slices> {
        let geometry = Geometry::new(self.profiles.iter().map(Profile::shape))?;
        let of_others = self.instances.iter().filter(|it| it.pod.is_none());
        Some(Slices {
            geometry,
            blocked: of_others.fold(0, |mask, it| mask | it.mask()),
            taken: 0,
        })
    }

    /// The name of the profile that lies so.
    #[must_use]
    pub fn name(&self, shape: mig::Profile) -> Option<&str> {
        let same = |profile: &&Profile| profile.shape() == shape;
        Some(&self.profiles.iter().find(same)?.name)
    }

    /// The profile of this name.
    #[must_use]
    pub fn profile(&self, name: &str) -> Option<&Profile> {
        self.profiles.iter().find(|profile| profile.name == name)
    }
}

impl Profile {
    fn shape(&self) -> mig::Profile {
        let starts = self.starts.iter();
        let starts = starts.filter(|start| u32::from(**start) < mig::MAX_SLICES);
        mig::Profile {
            slices: self.slices,
            compute: self.compute_slices,
            mib: self.memory_mib,
            starts: starts.fold(0, |bits, start| bits | 1 << start),
        }
    }
}
