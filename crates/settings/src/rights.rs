//! The permissions that features need beyond the base installation, and which manifests give them.

use gpustow_api::config::{Action, GpustowConfigSpec, QueueMode};
use k8s_openapi::api::authorization::v1::ResourceAttributes;

/// A feature that the administrator can turn on or off. The order is that of the object's fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Feature {
    /// `spec.queue`.
    Queue,
    /// `spec.reclaim`.
    Reclaim,
    /// `spec.preempt`.
    Preempt,
    /// `spec.reserve`.
    Reserve,
    /// `spec.defragment`.
    Defragment,
    /// `spec.provision`.
    Provision,
    /// `spec.claims`.
    Claims,
}

impl Feature {
    /// Every feature.
    pub const ALL: [Self; 7] = [
        Self::Queue,
        Self::Reclaim,
        Self::Preempt,
        Self::Reserve,
        Self::Defragment,
        Self::Provision,
        Self::Claims,
    ];

    /// The type of its condition.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Queue => "Queue",
            Self::Reclaim => "Reclaim",
            Self::Preempt => "Preempt",
            Self::Reserve => "Reserve",
            Self::Defragment => "Defragment",
            Self::Provision => "Provision",
            Self::Claims => "Claims",
        }
    }

    /// Is it on?
    #[must_use]
    pub fn is_on(self, spec: &GpustowConfigSpec) -> bool {
        match self {
            Self::Queue => spec.queue.mode != QueueMode::Off,
            Self::Reclaim => spec.reclaim.action != Action::Off,
            Self::Preempt => spec.preempt.fragmented,
            Self::Reserve => spec.reserve.after.0.is_some(),
            Self::Defragment => spec.defragment.evictions_per_hour > 0,
            Self::Provision => spec.provision.max > 0,
            Self::Claims => spec.claims.fence,
        }
    }

    /// The permission that it needs as it is set, if any.
    #[must_use]
    pub fn needs(self, spec: &GpustowConfigSpec) -> Option<Right> {
        let right = match self {
            Self::Queue => Right::UNGATE,
            Self::Reclaim if spec.reclaim.action != Action::Evict => return None,
            Self::Reclaim | Self::Defragment => Right::EVICT,
            Self::Preempt => Right::DELETE,
            Self::Provision => Right::CREATE,
            Self::Claims => Right::FENCE,
            Self::Reserve if !spec.reserve.mark_nodes => return None,
            Self::Reserve => Right::MARK,
        };
        self.is_on(spec).then_some(right)
    }
}

/// A permission that the base installation does not give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Right {
    /// The ClusterRole that gives it.
    pub role: &'static str,
    /// The folder below `manifests` with that ClusterRole.
    pub component: &'static str,
    verb: &'static str,
    group: Option<&'static str>,
    resource: &'static str,
    subresource: Option<&'static str>,
}

impl Right {
    /// To remove the scheduling gate.
    pub const UNGATE: Self = Self {
        role: "gpustow-queue",
        component: "queue",
        verb: "patch",
        group: None,
        resource: "pods",
        subresource: None,
    };
    /// To evict pods.
    pub const EVICT: Self = Self {
        role: "gpustow-disruptions",
        component: "disruptions",
        verb: "create",
        group: None,
        resource: "pods",
        subresource: Some("eviction"),
    };
    /// To delete pods of lower priority.
    pub const DELETE: Self = Self {
        verb: "delete",
        subresource: None,
        ..Self::EVICT
    };
    /// To create placeholder pods.
    pub const CREATE: Self = Self {
        role: "gpustow-provision",
        component: "provision",
        verb: "create",
        subresource: None,
        ..Self::EVICT
    };
    /// To mark nodes for autoscalers.
    pub const MARK: Self = Self {
        verb: "patch",
        resource: "nodes",
        subresource: None,
        ..Self::EVICT
    };
    /// To keep claims off GPUs.
    pub const FENCE: Self = Self {
        role: "gpustow-claims",
        component: "claims",
        group: Some("resource.k8s.io"),
        resource: "devicetaintrules",
        ..Self::CREATE
    };

    /// Every one.
    pub const ALL: [Self; 6] = [
        Self::UNGATE,
        Self::EVICT,
        Self::DELETE,
        Self::CREATE,
        Self::MARK,
        Self::FENCE,
    ];

    /// The permission that the feature with this name needs as it is set.
    #[must_use]
    pub fn of_feature(name: &str, spec: &GpustowConfigSpec) -> Option<Self> {
        let mut all = Feature::ALL.into_iter();
        all.find(|feature| feature.name() == name)?.needs(spec)
    }

    /// The attributes of this right for an access review by the API server.
    #[must_use]
    pub fn attributes(&self) -> ResourceAttributes {
        ResourceAttributes {
            verb: Some(self.verb.to_owned()),
            group: self.group.map(str::to_owned),
            resource: Some(self.resource.to_owned()),
            subresource: self.subresource.map(str::to_owned),
            ..ResourceAttributes::default()
        }
    }

    /// `patch pods`, for people.
    #[must_use]
    pub fn text(&self) -> String {
        let subresource = self.subresource.map(|it| format!("/{it}"));
        format!(
            "{} {}{}",
            self.verb,
            self.resource,
            subresource.unwrap_or_default()
        )
    }
}

/// The features that are on and need a permission, each with that permission.
pub fn rights(spec: &GpustowConfigSpec) -> impl Iterator<Item = (Feature, Right)> {
    let needs = |feature: Feature| Some((feature, feature.needs(spec)?));
    Feature::ALL.into_iter().filter_map(needs)
}
