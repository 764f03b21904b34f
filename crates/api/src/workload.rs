//! `GpuWorkload`: the use of GPUs by the pods of one workload, and the request that follows from it.

use std::fmt;

use gpustow_advice::{Advice, Caution, Checkpoint, History, advise, advise_at};
use gpustow_pack::Mib;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::owner::Owner;

/// Containers and images of one workload whose histories are kept.
pub const MAX_HISTORIES: usize = 16;
/// Characters of an object's name, as the API server takes it.
const MAX_NAME: usize = 253;

/// A GpuWorkload is a history, without a desired state.
#[derive(
    CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema,
)]
#[kube(
    group = "gpustow.dev",
    version = "v1alpha1",
    kind = "GpuWorkload",
    plural = "gpuworkloads",
    shortname = "gw",
    category = "gpustow",
    namespaced,
    derive = "Default",
    derive = "PartialEq",
    doc = "The GPU memory that the pods of one workload used. The leading extender writes it at most once an hour, and deletes it two weeks after the last pod.",
    printcolumn = r#"{"name":"Kind","type":"string","jsonPath":".spec.targetRef.kind","description":"Kind of the workload"}"#,
    printcolumn = r#"{"name":"Workload","type":"string","jsonPath":".spec.targetRef.name","description":"Name of the workload"}"#,
    printcolumn = r#"{"name":"Request-MiB","type":"integer","jsonPath":".spec.containers[*].advice.requestMiB","description":"MiB of a GPU that a container exceeds in short peaks alone"}"#,
    printcolumn = r#"{"name":"P95-MiB","type":"integer","jsonPath":".spec.containers[*].advice.p95MiB","description":"MiB of a GPU that a container exceeded in one minute of twenty"}"#,
    printcolumn = r#"{"name":"Peak-MiB","type":"integer","jsonPath":".spec.containers[*].history.peakMiB","description":"The most MiB of a GPU that a container used in eight days"}"#,
    printcolumn = r#"{"name":"Minutes","type":"integer","jsonPath":".spec.containers[*].history.samples","description":"Minutes of all pods that were seen"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct GpuWorkloadSpec {
    /// The workload.
    pub target_ref: TargetRef,
    /// Its containers, a history for each image and size of GPU.
    #[schemars(length(max = MAX_HISTORIES), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name", "image", "gpuMiB"]))]
    #[serde(default)]
    pub containers: Vec<ContainerHistory>,
}

/// The outermost controller of pods, or a pod without one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TargetRef {
    /// Its kind, as `Deployment`.
    #[schemars(length(min = 1, max = 63))]
    pub kind: String,
    /// Its name.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

/// The use of each GPU by a container with this image, on GPUs of about equal size.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerHistory {
    /// The container's name.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// Its image as the pod names it.
    #[schemars(length(max = 1024))]
    pub image: String,
    /// The size of the largest GPU that it ran on, in MiB.
    #[schemars(range(min = 0, max = 16_777_216))]
    #[serde(rename = "gpuMiB")]
    pub gpu_mib: u64,
    /// The conclusions from the history.
    pub advice: Amounts,
    /// The peaks of all minutes.
    pub history: Checkpoint,
}

/// MiB of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Amounts {
    /// Exceeded in short peaks alone; 0 in objects of earlier versions.
    #[schemars(range(min = 0, max = 16_777_216))]
    #[serde(default, rename = "requestMiB")]
    pub request_mib: u64,
    /// Exceeded in one minute of twenty so far.
    #[schemars(range(min = 0, max = 16_777_216))]
    #[serde(rename = "p95MiB")]
    pub p95_mib: u64,
    /// Exceeded in one minute of a hundred so far.
    #[schemars(range(min = 0, max = 16_777_216))]
    #[serde(rename = "p99MiB")]
    pub p99_mib: u64,
    /// Not exceeded for eight days, with a margin.
    #[schemars(range(min = 0, max = 16_777_216))]
    #[serde(rename = "limitMiB")]
    pub limit_mib: u64,
    /// Enough hours of the day were seen.
    pub enough: bool,
    /// Why it must not be followed.
    #[schemars(length(max = 3), extend("x-kubernetes-list-type" = "set"))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub against: Vec<Against>,
}

/// A reason why advice is wrong, however long the history is.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub enum Against {
    /// The allocator takes most of the GPU, whatever the program needs.
    TakesEverything,
    /// NVML may count memory that clients of MPS share for one of them only.
    #[serde(rename = "MPS")]
    Mps,
    /// A MIG instance has the memory of its profile.
    #[serde(rename = "MIG")]
    Mig,
}

impl fmt::Display for Against {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TakesEverything => Caution::TakesEverything.fmt(f),
            Self::Mps => f.write_str("shares memory with other clients of MPS"),
            Self::Mig => f.write_str("runs on a MIG instance: a smaller profile frees memory"),
        }
    }
}

impl ContainerHistory {
    /// The history as it is stored.
    #[must_use]
    pub fn new(name: &str, image: &str, gpu: Mib, history: &History) -> Self {
        let request = |permille| advise_at(history, gpu, permille).map_or(0, |it| it.request.0);
        let usual = advise(history, gpu);
        let everything = |it: &Advice| it.cautions.contains(&Caution::TakesEverything);
        let everything = usual.as_ref().is_some_and(everything);
        Self {
            name: name.to_owned(),
            image: image.chars().take(1024).collect(),
            gpu_mib: gpu.0,
            advice: Amounts {
                request_mib: usual.as_ref().map_or(0, |it| it.request.0),
                p95_mib: request(950),
                p99_mib: request(990),
                limit_mib: usual.as_ref().map_or(0, |it| it.limit.0),
                enough: usual.is_some_and(|it| it.is_enough()),
                against: everything
                    .then_some(Against::TakesEverything)
                    .into_iter()
                    .collect(),
            },
            history: history.checkpoint(),
        }
    }

    /// The advice from the stored history. With `permille`, the use exceeds it in no more than `1000 - permille` of a
    /// thousand minutes.
    #[must_use]
    pub fn advise(&self, permille: Option<u32>) -> Option<Advice> {
        let (history, gpu) = (History::of(&self.history), Mib(self.gpu_mib));
        match permille {
            Some(permille) => advise_at(&history, gpu, permille),
            None => advise(&history, gpu),
        }
    }
}

/// Do both sizes belong to one kind of GPU? Drivers differ in how much they keep for themselves.
#[must_use]
pub fn same_size(one: Mib, other: Mib) -> bool {
    one.0.abs_diff(other.0) <= one.max(other).0 / 20
}

/// The histories by which a container is advised.
#[derive(Clone, Debug)]
pub struct Basis<'a> {
    /// One for each size of GPU, and for each image.
    pub histories: Vec<&'a ContainerHistory>,
    /// Does its own image have too little history, so that an earlier one counts too?
    pub earlier: bool,
}

impl<'a> Basis<'a> {
    /// The histories of a container that count for this image.
    #[must_use]
    pub fn new(all: impl IntoIterator<Item = &'a ContainerHistory>, image: &str) -> Self {
        let all = all.into_iter();
        let (mut histories, others): (Vec<_>, Vec<_>) = all.partition(|it| it.image == image);
        let is_known = histories.iter().any(|it| it.advice.enough);
        let known = others.iter().filter(|it| !is_known && it.advice.enough);
        let earlier = known.max_by_key(|it| it.history.last).map(|it| &it.image);
        histories.extend(others.iter().filter(|it| Some(&it.image) == earlier));
        Self {
            histories,
            earlier: earlier.is_some(),
        }
    }

    /// Why the advice must not be followed, however long the history is.
    #[must_use]
    pub fn against(&self) -> Option<Against> {
        let all = self.histories.iter().flat_map(|it| &it.advice.against);
        all.copied().min()
    }

    /// The largest of an amount, if it may be followed.
    #[must_use]
    pub fn follow(&self, amount: fn(&Amounts) -> u64) -> Option<u64> {
        let may = self.against().is_none() && self.histories.iter().any(|it| it.advice.enough);
        let amounts = self.histories.iter().map(|it| amount(&it.advice));
        amounts.max().filter(|amount| may && *amount > 0)
    }

    /// Advice that covers all of them.
    #[must_use]
    pub fn advise(&self, permille: Option<u32>) -> Option<Advice> {
        let all = self.histories.iter();
        let mut all = all.filter_map(|it| it.advise(permille));
        let first = all.next()?;
        let mut advice = all.fold(first, |mut sum, it| {
            sum.request = sum.request.max(it.request);
            sum.limit = sum.limit.max(it.limit);
            sum.samples = sum.samples.saturating_add(it.samples);
            sum.spans = sum.spans.max(it.spans);
            sum.cautions.extend(it.cautions);
            sum
        });
        let is_known = self.histories.iter().any(|it| it.advice.enough);
        advice
            .cautions
            .retain(|it| !is_known || *it != Caution::LittleHistory);
        Some(advice)
    }
}

/// The name of a workload's object. Kinds do not contain dashes, so that no two workloads of one API group share a
/// name.
#[must_use]
pub fn name_of(workload: &Owner) -> String {
    let whole = format!("{}-{}", workload.kind, workload.name).to_lowercase();
    let may = |byte: u8| byte.is_ascii_alphanumeric() || b"-.".contains(&byte);
    if whole.len() <= MAX_NAME && whole.bytes().all(may) {
        return whole;
    }
    // FNV-1a gives equal hashes in each version of this program.
    let hash = whole.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let plain = whole.chars().filter(char::is_ascii_alphanumeric);
    format!(
        "{}-{hash:016x}",
        plain.take(MAX_NAME - 17).collect::<String>()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_workload_has_a_name_that_the_api_server_takes() {
        let name = |kind: &str, name: &str| {
            name_of(&Owner {
                kind: kind.to_owned(),
                name: name.to_owned(),
            })
        };
        assert_eq!(name("Deployment", "web"), "deployment-web");
        let long = [
            name("Job", &"a".repeat(253)),
            name("Job", &"a".repeat(252)),
            name("Odd", "a:b"),
        ];
        assert!(
            long.iter()
                .all(|it| it.len() <= MAX_NAME && !it.contains(':'))
        );
        assert_ne!(long[0], long[1]);
    }
}
