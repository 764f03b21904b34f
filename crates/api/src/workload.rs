//! `GpuWorkload`: what the pods of one workload used of their GPUs, and what they should request by that.

use gpustow_advice::{Advice, Checkpoint, History, advise_at};
use gpustow_pack::Mib;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::owner::Owner;

/// Containers and images of one workload whose histories are kept.
pub const MAX_HISTORIES: usize = 16;
/// Characters of an object's name, as the API server takes it.
const MAX_NAME: usize = 253;

/// A GpuWorkload has no desired state: it is a history.
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
    doc = "What the pods of one workload used of their GPUs. The leading extender writes it at most once an hour, and deletes it two weeks after the last pod.",
    printcolumn = r#"{"name":"Kind","type":"string","jsonPath":".spec.targetRef.kind","description":"Kind of the workload"}"#,
    printcolumn = r#"{"name":"Workload","type":"string","jsonPath":".spec.targetRef.name","description":"Name of the workload"}"#,
    printcolumn = r#"{"name":"P95-MiB","type":"integer","jsonPath":".spec.containers[*].advice.p95MiB","description":"MiB of a GPU that a container exceeds in one minute of twenty"}"#,
    printcolumn = r#"{"name":"P99-MiB","type":"integer","jsonPath":".spec.containers[*].advice.p99MiB","description":"MiB of a GPU that a container exceeds in one minute of a hundred"}"#,
    printcolumn = r#"{"name":"Peak-MiB","type":"integer","jsonPath":".spec.containers[*].history.peakMiB","description":"The most MiB of a GPU that a container used"}"#,
    printcolumn = r#"{"name":"Minutes","type":"integer","jsonPath":".spec.containers[*].history.samples","description":"Minutes of all pods that were seen"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct GpuWorkloadSpec {
    /// The workload.
    pub target_ref: TargetRef,
    /// Its containers, a history for each image.
    #[schemars(length(max = MAX_HISTORIES), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name", "image"]))]
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

/// What a container with this image used of each of its GPUs.
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
    /// What follows from the history.
    pub advice: Amounts,
    /// The peaks of all minutes.
    pub history: Checkpoint,
}

/// MiB of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Amounts {
    /// Exceeded in one minute of twenty at most.
    #[schemars(range(min = 0, max = 16_777_216))]
    #[serde(rename = "p95MiB")]
    pub p95_mib: u64,
    /// Exceeded in one minute of a hundred at most.
    #[schemars(range(min = 0, max = 16_777_216))]
    #[serde(rename = "p99MiB")]
    pub p99_mib: u64,
    /// Never exceeded so far, with a margin.
    #[schemars(range(min = 0, max = 16_777_216))]
    #[serde(rename = "limitMiB")]
    pub limit_mib: u64,
    /// Half a day or more was seen.
    pub enough: bool,
}

impl ContainerHistory {
    /// The history as it is stored.
    #[must_use]
    pub fn new(name: &str, image: &str, gpu: Mib, history: &History) -> Self {
        let advice = |permille| advise_at(history, gpu, permille);
        let request = |permille| advice(permille).map_or(0, |it| it.request.0);
        let usual = advice(950);
        Self {
            name: name.to_owned(),
            image: image.chars().take(1024).collect(),
            gpu_mib: gpu.0,
            advice: Amounts {
                p95_mib: request(950),
                p99_mib: request(990),
                limit_mib: usual.as_ref().map_or(0, |it| it.limit.0),
                enough: usual.is_some_and(|it| it.is_enough()),
            },
            history: history.checkpoint(),
        }
    }

    /// Advice by what is stored, exceeded in no more than `1000 - permille` of a thousand minutes.
    #[must_use]
    pub fn advise(&self, permille: u32) -> Option<Advice> {
        advise_at(&History::of(&self.history), Mib(self.gpu_mib), permille)
    }
}

/// The name of a workload's object. Kinds have no dash, so that no two workloads of one API group share a name.
#[must_use]
pub fn name_of(workload: &Owner) -> String {
    let whole = format!("{}-{}", workload.kind, workload.name).to_lowercase();
    let may = |byte: u8| byte.is_ascii_alphanumeric() || b"-.".contains(&byte);
    if whole.len() <= MAX_NAME && whole.bytes().all(may) {
        return whole;
    }
    // FNV-1a, which stays the same in each version of this program.
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
