//! What is done about a pod that is to give memory back, and how far its owner softens it.

use strum::{Display, EnumString, IntoStaticStr, VariantNames};

/// What is done, the softest first. As a string, the setting and the annotation ([`ACT`](crate::names::ACT)).
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
    Display,
    EnumString,
    IntoStaticStr,
    VariantNames,
)]
#[strum(serialize_all = "kebab-case")]
pub enum Act {
    /// It is told.
    #[default]
    Event,
    /// Its agent ends processes of it that use GPUs, until it is within its request; the pod stays.
    KillProcess,
    /// It is evicted, as disruption budgets allow.
    Evict,
}

impl Act {
    const ALL: [Self; 3] = [Self::Event, Self::KillProcess, Self::Evict];

    /// The reason of the condition that says so ([`GIVE_BACK`](crate::names::GIVE_BACK)).
    #[must_use]
    pub fn reason(self) -> &'static str {
        match self {
            Self::Event => "Event",
            Self::KillProcess => "KillProcess",
            Self::Evict => "Evict",
        }
    }

    /// What the reason of a condition says; a word that this version does not know is the softest.
    #[must_use]
    pub fn of_reason(reason: &str) -> Self {
        let is_it = |act: &Self| act.reason() == reason;
        Self::ALL.into_iter().find(is_it).unwrap_or_default()
    }
}
