//! `GpuNode`: the report of one node's agent about the node's cards.

use std::time::Duration;

use gpustow_pack::Mib;
use k8s_openapi::jiff::Timestamp;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::instances::OnDemand;
use crate::limit;

/// Between two reports of an agent when nothing changes, unless its operator sets another interval.
pub const HEARTBEAT: Duration = Duration::from_secs(60);
/// The silence after which a report is stale, unless an operator sets another time: three heartbeats.
pub const STALE_AFTER: Duration = Duration::from_secs(3 * HEARTBEAT.as_secs());

/// The condition of a GpuNode that is False if the agent cannot attribute processes to pods.
pub const PROCESSES_READABLE: &str = "ProcessesReadable";
/// The condition that is True if the agent reads the node's GPUs; if not, its reason is a
/// [`NodeFault`](crate::faults::NodeFault) or [`NO_GPUS`].
pub const READY: &str = "Ready";
/// The reason of [`READY`] where the driver shows no GPU.
pub const NO_GPUS: &str = "NoGpus";

/// A GpuNode is a report, without a desired state.
#[derive(
    CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema,
)]
#[kube(
    group = "gpustow.dev",
    version = "v1alpha1",
    kind = "GpuNode",
    plural = "gpunodes",
    shortname = "gn",
    category = "gpustow",
    status = "GpuNodeStatus",
    derive = "Default",
    derive = "PartialEq",
    doc = "The GPUs of one node as its agent sees them. Named after the node and owned by it.",
    printcolumn = r#"{"name":"GPUs","type":"integer","jsonPath":".status.summary.gpus","description":"Cards on the node"}"#,
    printcolumn = r#"{"name":"Healthy","type":"integer","jsonPath":".status.summary.healthy","description":"Cards that take pods"}"#,
    printcolumn = r#"{"name":"Model","type":"string","jsonPath":".status.summary.models","description":"Card models"}"#,
    printcolumn = r#"{"name":"Capacity-MiB","type":"integer","jsonPath":".status.summary.capacityMiB","description":"MiB that pods may hold"}"#,
    printcolumn = r#"{"name":"In-Use-MiB","type":"integer","jsonPath":".status.summary.usedMiB","description":"MiB in use now, by any process"}"#,
    printcolumn = r#"{"name":"Driver","type":"string","jsonPath":".status.driver","priority":1}"#,
    printcolumn = r#"{"name":"Reported","type":"date","jsonPath":".status.heartbeat","description":"Last report"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct GpuNodeSpec {}

/// One report. It is only as good as it is fresh: a reader measures its age on its own clock since
/// the last change that it saw.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuNodeStatus {
    /// When the agent wrote this (RFC 3339). Readers compare it with the same node's kubelet alone.
    #[schemars(extend("format" = "date-time"))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heartbeat: Option<String>,
    /// Driver version.
    #[schemars(length(max = 64))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Sums for `kubectl get`.
    #[serde(default)]
    pub summary: Summary,
    /// MiB per GPU that the agent keeps free for contexts and fragmentation.
    #[schemars(range(min = 0, max = 16_777_216))]
    #[serde(default, rename = "headroomMiB")]
    pub headroom_mib: u64,
    /// The GPUs present, in NVML index order.
    #[schemars(length(max = 256), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["uuid"]))]
    #[serde(default)]
    pub gpus: Vec<Gpu>,
    /// The problem of the node's GPU software, if any.
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

impl GpuNodeStatus {
    /// When the agent wrote this, in seconds since 1970, if that can be read.
    #[must_use]
    pub fn written(&self) -> Option<i64> {
        let written: Timestamp = self.heartbeat.as_deref()?.parse().ok()?;
        Some(written.as_second())
    }

    /// Does it attribute each process to its pod?
    #[must_use]
    pub fn is_readable(&self) -> bool {
        let unreadable = |it: &Condition| it.r#type == PROCESSES_READABLE && it.status == "False";
        !self.conditions.iter().any(unreadable)
    }
}

/// Sums over the node's GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "self.healthy <= self.gpus",
    "message": "more healthy cards than cards"
}]))]
pub struct Summary {
    /// GPUs present.
    #[schemars(range(min = 0, max = 256))]
    pub gpus: u32,
    /// GPUs that get pods.
    #[schemars(range(min = 0, max = 256))]
    pub healthy: u32,
    /// Model names, comma separated.
    #[schemars(length(max = 1024))]
    pub models: String,
    /// MiB that pods may hold.
    #[schemars(range(min = 0))]
    #[serde(rename = "capacityMiB")]
    pub capacity_mib: u64,
    /// MiB in use now, by any process.
    #[schemars(range(min = 0))]
    #[serde(rename = "usedMiB")]
    pub used_mib: u64,
}

/// One GPU, or one MIG instance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "self.reservedMiB <= self.totalMiB",
    "message": "reservedMiB is more than totalMiB"
}]))]
pub struct Gpu {
    /// NVML's UUID: `GPU-…` or `MIG-…`.
    #[schemars(
        length(min = 1, max = 96),
        regex(pattern = r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")
    )]
    pub uuid: String,
    /// NVML's index, which can change at a reboot.
    #[schemars(range(min = 0, max = 4096))]
    pub index: u32,
    /// Model name as NVML gives it.
    #[schemars(length(max = 128))]
    #[serde(default)]
    pub model: String,
    /// All of the GPU's memory, MiB.
    #[schemars(range(min = 0, max = 16_777_216))]
    #[serde(rename = "totalMiB")]
    pub total_mib: u64,
    /// The memory that the driver keeps for itself, MiB.
    #[schemars(range(min = 0, max = 16_777_216))]
    #[serde(default, rename = "reservedMiB")]
    pub reserved_mib: u64,
    /// False while the GPU gets no new pods.
    #[serde(default = "yes")]
    pub healthy: bool,
    /// The reason, if not.
    #[schemars(length(max = 256))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The memory that gpustow pods use now.
    #[schemars(length(max = 1024), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["uid"]))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pods: Vec<PodUse>,
    /// Memory in use outside gpustow's pods: of other pods, host processes and unnamed processes; MiB.
    #[schemars(range(min = 0, max = 16_777_216))]
    #[serde(default, rename = "unmanagedMiB")]
    pub unmanaged_mib: u64,
    /// The part of it that belongs to pods without an assignment: the memory that they use, or that another GPU sharer
    /// allocated to them, if that is more; MiB.
    #[schemars(range(min = 0, max = 16_777_216))]
    #[serde(default, rename = "otherPodsMiB", skip_serializing_if = "is_zero")]
    pub other_pods_mib: u64,
    /// The part of it that belongs to processes outside pods, MiB.
    #[schemars(range(min = 0, max = 16_777_216))]
    #[serde(default, rename = "hostMiB", skip_serializing_if = "is_zero")]
    pub host_mib: u64,
    /// Per cent of the time in which a kernel ran, when this was written.
    #[schemars(range(min = 0, max = 100))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub utilization: Option<u32>,
    /// When it was last seen to fail (RFC 3339); it returns once that is long enough ago.
    #[schemars(extend("format" = "date-time"))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
    /// The pod that holds the whole GPU, or this instance, without gpustow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_by: Option<HeldBy>,
    /// ResourceClaims that hold a known part of it. unmanagedMiB and otherPodsMiB include them.
    #[schemars(length(max = 256), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["claim"]))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub claims: Vec<ClaimUse>,
    /// The driver does not show it any more: it counts in the node's capacity only for the memory that pods hold
    /// of it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub missing: bool,
    /// `Holds` if the driver can enforce a container's memory limit here, else one word for the missing requirement;
    /// absent if the agent does not report it.
    #[schemars(length(max = 64))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<String>,
    /// Its processes share it through NVIDIA's MPS: it gets only pods with the annotation gpustow.dev/compute-percent.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mps: bool,
    /// Present if the agent makes MIG instances on it for pods: it gets only pods with the annotation
    /// gpustow.dev/isolation. Its capacity leaves out the instances of others, which are reported separately.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<Box<OnDemand>>,
    /// The GPU's location and kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<Box<Place>>,
}

impl Gpu {
    /// The memory that pods may hold of it if the agent keeps so much free.
    #[must_use]
    pub fn capacity(&self, headroom: Mib) -> Mib {
        if let Some(mig) = &self.mig {
            return mig.slices().map_or(Mib::ZERO, |slices| slices.capacity());
        }
        Mib(self.total_mib)
            .minus(Mib(self.reserved_mib))
            .minus(headroom)
    }

    /// The highest limit that the driver can enforce here; zero if it cannot.
    #[must_use]
    pub fn limit(&self) -> Mib {
        match limit::hindrance(self.memory_limit.as_deref()) {
            None => Mib(self.total_mib),
            Some(_) => Mib::ZERO,
        }
    }
}

/// Properties that are constant while a GPU stays in its place. Unknown is absent, never zero.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Place {
    /// Number of the device file `/dev/nvidia…`.
    #[schemars(range(min = 0, max = 4096))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    /// PCI address.
    #[schemars(length(max = 32))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pci_bus_id: Option<String>,
    /// Architecture, as `Hopper`.
    #[schemars(length(max = 32))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub architecture: Option<String>,
    /// The nearest NUMA node.
    #[schemars(range(min = 0, max = 4096))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// UUID of the GPU of which this is a MIG instance.
    #[schemars(length(max = 96))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Profile of the MIG instance, as `1g.10gb`.
    #[schemars(length(max = 64))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Active NVLinks.
    #[schemars(range(min = 0, max = 64))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvlinks: Option<u32>,
    /// The path to every other GPU of the node, by index, in `nvidia-smi topo`'s words:
    /// NV and the number of NVLinks, PIX, PXB, PHB, NODE or SYS, nearest first.
    #[schemars(length(max = 256))]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub near: Vec<Near>,
}

/// The path from a GPU to another one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Near {
    /// The other GPU's index.
    #[schemars(range(min = 0, max = 4096))]
    pub gpu: u32,
    /// The best path.
    #[schemars(length(max = 16))]
    pub path: String,
}

/// The holder of a GPU without gpustow.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HeldBy {
    /// Namespace and name of the pod.
    #[schemars(length(max = 320))]
    pub pod: String,
    /// The way of allocation: an extended resource, or a claim and its driver.
    #[schemars(length(max = 640))]
    pub through: String,
}

/// The memory that one ResourceClaim holds of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClaimUse {
    /// Namespace and name of the claim.
    #[schemars(length(min = 1, max = 320))]
    pub claim: String,
    /// Namespace and name of a pod that uses it.
    #[schemars(length(max = 320))]
    pub pod: String,
    /// MiB that it holds.
    #[schemars(range(min = 0, max = 16_777_216))]
    #[serde(rename = "heldMiB")]
    pub held_mib: u64,
}

/// One pod's live memory on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodUse {
    /// Pod UID.
    #[schemars(length(min = 1, max = 64))]
    pub uid: String,
    /// MiB in use.
    #[schemars(range(min = 0, max = 16_777_216))]
    #[serde(rename = "usedMiB")]
    pub used_mib: u64,
    /// The most that was in use at once during the last half hour, as far as the agent has watched it;
    /// absent if unknown.
    #[schemars(range(min = 0, max = 16_777_216))]
    #[serde(default, rename = "highMiB", skip_serializing_if = "Option::is_none")]
    pub high_mib: Option<u64>,
    /// Since when all of its processes have been idle here (RFC 3339); absent if one is busy, or if the driver does not
    /// report it.
    #[schemars(extend("format" = "date-time"))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_since: Option<String>,
    /// When its memory had been constant for a while, for the first time since it started (RFC 3339).
    #[schemars(extend("format" = "date-time"))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settled_at: Option<String>,
    /// A process of it is a client of MPS, which shares its memory with others.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mps: bool,
    /// The use of each of its containers, if the driver reports it.
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub containers: Vec<ContainerUse>,
}

/// The use of one GPU by one container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerUse {
    /// Its name.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// The most that it used at once since the report before this one.
    #[schemars(range(min = 0, max = 16_777_216))]
    #[serde(rename = "peakMiB")]
    pub peak_mib: u64,
}

fn seconds(time: &str) -> Option<i64> {
    let time: Timestamp = time.parse().ok()?;
    Some(time.as_second())
}

impl PodUse {
    /// Since when it is idle, in seconds since 1970, if that can be read.
    #[must_use]
    pub fn idle(&self) -> Option<i64> {
        seconds(self.idle_since.as_deref()?)
    }

    /// When its memory had settled, in seconds since 1970, if that can be read.
    #[must_use]
    pub fn settled(&self) -> Option<i64> {
        seconds(self.settled_at.as_deref()?)
    }
}

/// One aspect of the node's GPU software.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Which aspect.
    #[schemars(length(min = 1, max = 64))]
    pub r#type: String,
    /// `True`, `False` or `Unknown`.
    #[schemars(regex(pattern = r"^(True|False|Unknown)$"))]
    pub status: String,
    /// One CamelCase word.
    #[schemars(length(max = 128))]
    pub reason: String,
    /// A sentence for people.
    #[schemars(length(max = 1024))]
    pub message: String,
}

fn yes() -> bool {
    true
}

fn is_zero(mib: &u64) -> bool {
    *mib == 0
}
