//! Pods that at times do not need their requested memory, such as servers of a model that sleeps.

use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use strum::{EnumString, IntoStaticStr};

use super::PodFacts;
use crate::names;

/// A pod's statement about its requested memory ([`names::ASLEEP`]), and the extender's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sleep {
    /// Others may borrow all that it does not use. Else it needs all that it requested.
    pub asleep: bool,
    /// The last word of the extender.
    pub told: Option<Memory>,
}

/// Whether a pod has the memory that it requested; as a string, the reason of [`names::AVAILABLE_CONDITION`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumString, IntoStaticStr)]
pub enum Memory {
    /// Others may borrow it.
    Asleep,
    /// Others use some of it, and give it back.
    Reclaiming,
    /// The pod may allocate it.
    Free,
}

impl PodFacts {
    /// Can the pod do without the part of its request that it does not use?
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        self.sleep.is_some_and(|sleep| sleep.asleep)
    }

    /// Does it need all that it requested, whatever others do at the same time?
    #[must_use]
    pub fn wants_all(&self) -> bool {
        self.sleep.is_some_and(|sleep| !sleep.asleep)
    }
}

pub(super) fn sleep(meta: &ObjectMeta, status: Option<&PodStatus>) -> Option<Sleep> {
    let asleep = match meta.annotations.as_ref()?.get(names::ASLEEP)?.as_str() {
        "true" => true,
        "false" => false,
        _ => return None,
    };
    let conditions = status.and_then(|status| status.conditions.as_ref());
    let mut conditions = conditions.into_iter().flatten();
    let told = conditions.find(|it| it.type_ == names::AVAILABLE_CONDITION);
    let told = told.and_then(|it| it.reason.as_deref()?.parse().ok());
    Some(Sleep { asleep, told })
}
