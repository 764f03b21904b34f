//! The objects of an API server at one time.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpustow_api::names;
use serde_json::Value;

/// The kinds that the server knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[expect(missing_docs, reason = "they are Kubernetes' and gpustow's own names")]
pub enum Kind {
    GpuNode,
    GpustowConfig,
    Lease,
    Node,
    Pod,
    PodDisruptionBudget,
    PodGroup,
}

impl Kind {
    /// The kind whose objects have such a path.
    #[must_use]
    pub fn of_plural(plural: &str) -> Option<Self> {
        match plural {
            "gpunodes" => Some(Self::GpuNode),
            "gpustowconfigs" => Some(Self::GpustowConfig),
            "leases" => Some(Self::Lease),
            "nodes" => Some(Self::Node),
            "pods" => Some(Self::Pod),
            "poddisruptionbudgets" => Some(Self::PodDisruptionBudget),
            "podgroups" => Some(Self::PodGroup),
            _ => None,
        }
    }

    /// Group and version.
    #[must_use]
    pub fn api_version(self) -> String {
        match self {
            Self::GpuNode | Self::GpustowConfig => format!("{}/{}", names::GROUP, names::VERSION),
            Self::Lease => "coordination.k8s.io/v1".to_owned(),
            Self::Node | Self::Pod => "v1".to_owned(),
            Self::PodDisruptionBudget => "policy/v1".to_owned(),
            Self::PodGroup => "scheduling.k8s.io/v1beta1".to_owned(),
        }
    }
}

/// Kind, namespace (empty for none) and name.
pub type Key = (Kind, String, String);

/// The key of an object of that kind.
#[must_use]
pub fn key_of(kind: Kind, object: &Value) -> Key {
    let text = |field: &str| {
        let text = object["metadata"][field].as_str();
        text.unwrap_or_default().to_owned()
    };
    (kind, text("namespace"), text("name"))
}

/// An object at one version.
pub type Copy = Arc<Value>;

/// Why a request is refused: HTTP status, reason and message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal(pub u16, pub &'static str, pub String);

/// An object as it is now, or why there is none.
pub type Answer = Result<Copy, Refusal>;

pub(crate) fn conflict(text: &str) -> Refusal {
    Refusal(409, "Conflict", text.to_owned())
}

pub(crate) fn not_found(key: &Key) -> Refusal {
    Refusal(404, "NotFound", format!("{:?} {} not found", key.0, key.2))
}

/// All objects.
#[derive(Clone, Debug, Default)]
pub struct Objects(pub(crate) BTreeMap<Key, Copy>);

impl Objects {
    /// The objects of one kind, by namespace and name.
    pub fn all(&self, kind: Kind) -> impl Iterator<Item = &Copy> {
        let from = (kind, String::new(), String::new());
        let all = self.0.range(from..);
        all.take_while(move |(key, _)| key.0 == kind)
            .map(|(_, object)| object)
    }

    /// # Errors
    /// If there is none.
    pub fn get(&self, key: &Key) -> Answer {
        self.0.get(key).cloned().ok_or_else(|| not_found(key))
    }
}
