//! `GpustowConfig`: the administrator's settings for a whole cluster. The extender follows them, the plugin reads them,
//! and the admission policies take the object as their parameter.

use std::time::Duration;

use gpustow_pack::PolicyKind;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use strum::{EnumString, IntoStaticStr};

use crate::gpunode::STALE_AFTER;
use crate::limit::Enforce;
use crate::queue_from::QueueFrom;

/// The only object that is read.
pub const NAME: &str = "gpustow";

/// The condition of all features together.
pub const WORKING: &str = "Working";
/// The reason of a feature's condition if the extender lacks the permission.
pub const PERMISSION_MISSING: &str = "PermissionMissing";
/// The reason of a feature's condition if the API server does not serve an API that the feature needs.
pub const NOT_SERVED: &str = "NotServed";
/// The reason of [`WORKING`] if the extender cannot decode the object.
pub const UNREADABLE: &str = "Unreadable";

/// A Go duration such as `90s` or `1h30m`. The schema refuses negative durations.
type GoDuration = kube::core::Duration;

/// The settings that the administrator decides for the whole cluster.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "gpustow.dev",
    version = "v1alpha1",
    kind = "GpustowConfig",
    plural = "gpustowconfigs",
    singular = "gpustowconfig",
    category = "gpustow",
    status = "GpustowConfigStatus",
    derive = "Default",
    derive = "PartialEq",
    doc = "Configuration of gpustow for the whole cluster. Only the object named gpustow is read; without it, every field has its default.",
    validation = Rule::new("self.metadata.name == 'gpustow'").message("gpustow reads only the GpustowConfig named gpustow: choose that name"),
    printcolumn = r#"{"name":"Queue","type":"string","jsonPath":".spec.queue.mode"}"#,
    printcolumn = r#"{"name":"Reclaim","type":"string","jsonPath":".spec.reclaim.action"}"#,
    printcolumn = r#"{"name":"Preempt","type":"boolean","jsonPath":".spec.preempt.fragmented"}"#,
    printcolumn = r#"{"name":"Reserve","type":"string","jsonPath":".spec.reserve.after"}"#,
    printcolumn = r#"{"name":"Defragment","type":"integer","jsonPath":".spec.defragment.evictionsPerHour","description":"Evictions per hour"}"#,
    printcolumn = r#"{"name":"Provision","type":"integer","jsonPath":".spec.provision.max","description":"Placeholder pods at most"}"#,
    printcolumn = r#"{"name":"Working","type":"string","jsonPath":".status.conditions[?(@.type=='Working')].status","description":"False if a feature lacks a permission"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct GpustowConfigSpec {
    /// Which GPU a pod gets.
    #[serde(default)]
    pub scheduling: Scheduling,
    /// Defaults of pods that request GPU memory, and their minimum requests.
    #[serde(default)]
    pub requests: Requests,
    /// The queue of pods that wait for GPU memory.
    #[serde(default)]
    pub queue: Queue,
    /// Reclaiming memory that pods use beyond their requests.
    #[serde(default)]
    pub reclaim: Reclaim,
    /// Preemption of pods of lower priority for fragmented memory.
    #[serde(default)]
    pub preempt: Preempt,
    /// Reservations for pods that have waited long.
    #[serde(default)]
    pub reserve: Reserve,
    /// Evictions that bring free memory together.
    #[serde(default)]
    pub defragment: Defragment,
    /// Nodes that autoscalers add for pods that no present node can take.
    #[serde(default)]
    pub provision: Provision,
    /// ResourceClaims of DRA drivers for the same GPUs.
    #[serde(default)]
    pub claims: Claims,
    /// Limits of all disruptions together.
    #[serde(default)]
    pub disruptions: Disruptions,
}

/// Which GPU a pod gets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Scheduling {
    /// Packing policy of pods that name none with the annotation gpustow.dev/policy.
    #[serde(with = "word")]
    #[schemars(with = "String", extend("enum" = PolicyKind::ALL.map(PolicyKind::name)))]
    pub policy: PolicyKind,
    /// How old the report of a node's agent may be before the node gets no new pods: three heartbeats of the agent.
    #[schemars(extend("x-kubernetes-validations" = at_least("1s")))]
    pub stale_after: GoDuration,
    /// How long a pod that has not finished its start holds up other pods at most, if it or they have the annotation
    /// gpustow.dev/start: alone. 0s: the annotation is ignored.
    #[schemars(extend("x-kubernetes-validations" = at_least("0s")))]
    pub start_timeout: GoDuration,
    /// How many percent of the compute of a GPU with MPS pods may hold together (annotation gpustow.dev/compute-percent).
    /// More than 100 lets pods compete for compute.
    #[schemars(range(min = 100, max = 4800))]
    pub max_compute_percent: u16,
    /// Names of your own schedulers that call the extender. Pods may name these and gpustow-scheduler.
    #[schemars(length(max = 16), inner(length(min = 1, max = 63)), extend("x-kubernetes-list-type" = "set"))]
    pub schedulers: Vec<String>,
}

/// Defaults of pods that request GPU memory, and their minimum requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Requests {
    /// RuntimeClass of pods that name none. It must exist; empty leaves pods as they are.
    #[schemars(length(max = 253))]
    pub runtime_class_name: String,
    /// Value of NVIDIA_DRIVER_CAPABILITIES for containers without one, for example compute,utility. Empty leaves
    /// containers as they are.
    #[schemars(length(max = 253))]
    pub driver_capabilities: String,
    /// How limits are enforced for pods without the annotation gpustow.dev/enforce: driver, watch or none.
    #[serde(with = "word")]
    #[schemars(with = "String", extend("enum" = <Enforce as strum::VariantNames>::VARIANTS))]
    pub enforce: Enforce,
    /// Namespaces whose new pods get the annotation gpustow.dev/start: alone, unless they have it. "*" stands for all.
    #[schemars(length(max = 256), inner(length(min = 1, max = 63)), extend("x-kubernetes-list-type" = "set"))]
    pub start_alone: Vec<String>,
    /// The least that a container may request of each GPU, in MiB. 0 refuses none.
    #[serde(rename = "leastMiBPerGpu")]
    #[schemars(range(min = 0, max = 999_999_999))]
    pub least_mib_per_gpu: u32,
    /// The least that a container may request of each GPU if it gets whole GPUs, in MiB. 0 refuses none.
    #[serde(rename = "leastMiBPerExclusiveGpu")]
    #[schemars(range(min = 0, max = 999_999_999))]
    pub least_mib_per_exclusive_gpu: u32,
}

/// The queue of pods that wait for GPU memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Queue {
    /// Which new pods are queued with a scheduling gate: Off queues none, Auto queues new pods while others wait, Always
    /// queues every new pod. Quote "Off", because YAML reads it as false.
    pub mode: QueueMode,
}

/// Which new pods are queued.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum QueueMode {
    /// None, and pods that are queued already are ungated.
    #[default]
    Off,
    /// New pods while others wait.
    Auto,
    /// Every new pod.
    Always,
}

/// Reclaiming memory that pods use beyond their requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Reclaim {
    /// The action on a pod whose borrowed memory another pod has requested: Off does nothing, Event informs the pod,
    /// KillProcess lets the agent end its processes, Evict evicts it. Quote "Off", because YAML reads it as false.
    pub action: Action,
    /// How long a pod waits, since it was created, before memory is reclaimed for it.
    #[schemars(extend("x-kubernetes-validations" = at_least("0s")))]
    pub after: GoDuration,
    /// Whether the annotation gpustow.dev/reclaim-action of a pod may choose a milder action for that pod.
    pub pods_may_soften: bool,
    /// How long a pod may use more than its limit before it must give memory back.
    #[schemars(extend("x-kubernetes-validations" = at_least("0s")))]
    pub over_limit_after: GoDuration,
    /// How long the extender waits for memory, in addition to the grace period of its users, before it tries other
    /// GPUs.
    #[schemars(extend("x-kubernetes-validations" = at_least("1s")))]
    pub timeout: GoDuration,
}

/// The action on a pod whose borrowed memory another pod has requested, the mildest first. The word is also a value of the
/// annotation ([`RECLAIM_ACTION`](crate::names::RECLAIM_ACTION)) and in the reason of the condition
/// ([`RECLAIM_CONDITION`](crate::names::RECLAIM_CONDITION)).
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
    EnumString,
    IntoStaticStr,
)]
pub enum Action {
    /// Nothing.
    #[default]
    Off,
    /// An Event and a condition inform it.
    Event,
    /// Its agent ends processes of it that use GPUs.
    KillProcess,
    /// It is evicted.
    Evict,
}

impl Action {
    /// The actions on pods.
    pub const OF_PODS: [Self; 3] = [Self::Event, Self::KillProcess, Self::Evict];

    /// The word for it.
    #[must_use]
    pub fn word(self) -> &'static str {
        self.into()
    }

    /// The action of a pod's annotation or condition. An unknown word counts as the mildest action.
    #[must_use]
    pub fn of_pod(word: &str) -> Self {
        word.parse::<Self>().unwrap_or_default().max(Self::Event)
    }
}

/// Preemption of pods of lower priority for fragmented memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Preempt {
    /// Whether pods of lower priority are preempted for a pod that fits on no GPU although the node has enough free
    /// memory in sum. Kubernetes' own preemption cannot see this shortage.
    pub fragmented: bool,
    /// How long a pod waits, since it was created, before others are preempted for it. Choose about 60s with an autoscaler, which then acts
    /// first.
    #[schemars(extend("x-kubernetes-validations" = at_least("0s")))]
    pub after: GoDuration,
}

/// Reservations for pods that have waited long.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "!self.markNodes || self.after != 'Off'",
    "message": "markNodes needs reservations: set after to a time, or markNodes to false",
}]))]
pub struct Reserve {
    /// How long a pod waits, since it was created, before GPUs are reserved for it as they become free: a time such as
    /// 10m, or Off. Quote "Off", because YAML reads it as false.
    pub after: After,
    /// How long a reservation waits if no pod finishes on its GPUs, before other GPUs are tried.
    #[schemars(extend("x-kubernetes-validations" = at_least("1s")))]
    pub give_up_after: GoDuration,
    /// How many reservations there are at a time at most.
    #[schemars(range(min = 1, max = 1000))]
    pub max: u32,
    /// How many percent of the cluster's GPUs are reserved at most. A single reservation may be more.
    #[schemars(range(min = 0, max = 100))]
    pub max_percent: u32,
    /// Whether nodes with a reservation are marked, so that autoscalers do not remove them.
    pub mark_nodes: bool,
}

/// Evictions that bring free memory together.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "!self.emptyNodes || self.evictionsPerHour > 0",
    "message": "emptyNodes evicts pods: set evictionsPerHour to more than 0, or emptyNodes to false",
}]))]
pub struct Defragment {
    /// How many pods with the annotation gpustow.dev/evictable are evicted per hour at most, for pods that wait for
    /// fragmented memory. 0 evicts none.
    #[schemars(range(min = 0, max = 10_000))]
    pub evictions_per_hour: u32,
    /// Whether evictable pods also leave a nearly empty node if all of them fit on fuller nodes, so that an
    /// autoscaler can remove the node. It needs evictionsPerHour, which counts these evictions too.
    pub empty_nodes: bool,
}

/// Nodes that autoscalers add for pods that no present node can take.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Provision {
    /// How many placeholder pods there are at a time at most. Each has an autoscaler add one node for pods whose need it
    /// cannot see: memory is free in fragments only, every GPU with enough memory free is too small, or the pod is queued.
    /// 0 creates none.
    #[schemars(range(min = 0, max = 1000))]
    pub max: u32,
}

/// ResourceClaims of DRA drivers for the same GPUs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Claims {
    /// Whether the extender keeps ResourceClaims off GPUs that pods may get, with one DeviceTaintRule for each device. It releases
    /// whole GPUs to pods whose claims wait. It needs Kubernetes 1.37, or a cluster that serves DeviceTaintRules.
    pub fence: bool,
}

/// Limits of all disruptions together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Disruptions {
    /// How many pods are disrupted per minute at most. All that a gang preempts on one node count as one.
    #[schemars(range(min = 1, max = 10_000))]
    pub per_minute: u32,
    /// How many pods of one node are disrupted per minute at most.
    #[schemars(range(min = 1, max = 10_000))]
    pub per_node_per_minute: u32,
}

/// The rule of a time that is at least `least`, and at most a month.
fn at_least(least: &str) -> Value {
    json!([{
        "rule": format!("duration(self) >= duration('{least}') && duration(self) <= duration('720h')"),
        "message": format!("a time from {least} to 720h"),
    }])
}

/// A time, or never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct After(pub Option<Duration>);

const OFF: &str = "Off";

impl Serialize for After {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Some(after) => GoDuration::from(after).serialize(serializer),
            None => serializer.serialize_str(OFF),
        }
    }
}

impl<'de> Deserialize<'de> for After {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        if text == OFF {
            return Ok(Self(None));
        }
        let after: GoDuration = text.parse().map_err(serde::de::Error::custom)?;
        Ok(Self(Some(after.into())))
    }
}

impl JsonSchema for After {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "After".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "type": "string",
            "maxLength": 32,
            "x-kubernetes-validations": [{
                "rule": "self == 'Off' || self.matches('^[0-9.hmsun]+$') && duration(self) <= duration('720h')",
                "message": "a time from 0s to 720h, or Off",
            }],
        })
    }
}

/// A word that its type reads and writes.
mod word {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::{Deserialize as _, Deserializer, Serializer};

    pub(super) fn serialize<T: Display, S: Serializer>(it: &T, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(it)
    }

    pub(super) fn deserialize<'de, T: FromStr, D: Deserializer<'de>>(from: D) -> Result<T, D::Error>
    where
        T::Err: Display,
    {
        let text = String::deserialize(from)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

impl Default for Scheduling {
    fn default() -> Self {
        Self {
            policy: PolicyKind::default(),
            stale_after: STALE_AFTER.into(),
            start_timeout: Duration::from_secs(300).into(),
            max_compute_percent: 100,
            schedulers: Vec::new(),
        }
    }
}

impl Default for Reclaim {
    fn default() -> Self {
        Self {
            action: Action::default(),
            after: Duration::ZERO.into(),
            pods_may_soften: true,
            over_limit_after: Duration::from_secs(60).into(),
            timeout: Duration::from_secs(60).into(),
        }
    }
}

impl Default for Preempt {
    fn default() -> Self {
        Self {
            fragmented: true,
            after: Duration::from_secs(1).into(),
        }
    }
}

impl Default for Reserve {
    fn default() -> Self {
        Self {
            after: After::default(),
            give_up_after: Duration::from_secs(4 * 3600).into(),
            max: 4,
            max_percent: 10,
            mark_nodes: false,
        }
    }
}

impl Default for Disruptions {
    fn default() -> Self {
        Self {
            per_minute: 30,
            per_node_per_minute: 16,
        }
    }
}

/// The leading extender's report about the configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpustowConfigStatus {
    /// The generation of the object that the extender follows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Which new pods are queued now: the pods to which an entry applies.
    #[serde(default)]
    #[schemars(length(max = 16))]
    pub queue_from: Vec<QueueFrom>,
    /// One per feature, and Working for all of them.
    #[schemars(schema_with = "conditions")]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// `metav1.Condition`: k8s-openapi does not have its schema.
fn conditions(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "array",
        "maxItems": 16,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["type", "status", "reason", "message", "lastTransitionTime"],
            "properties": {
                "type": { "type": "string", "maxLength": 64 },
                "status": { "type": "string", "enum": ["True", "False", "Unknown"] },
                "reason": { "type": "string", "maxLength": 128 },
                "message": { "type": "string", "maxLength": 32768 },
                "observedGeneration": { "type": "integer", "format": "int64" },
                "lastTransitionTime": { "type": "string", "format": "date-time" },
            },
        },
    })
}
