//! The order in which waiting pods are served.

use std::cmp::Reverse;
use std::sync::Arc;

use gpustow_api::PodFacts;

use crate::books::Uid;

/// Where a pod stands: pods with fewer useless wake-ups first, then kube-scheduler's order by priority and age, then by name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Turn {
    useless: u32,
    priority: Reverse<i32>,
    created: i64,
    name: Arc<str>,
    uid: Uid,
}

impl Turn {
    /// Of a pod whose wake-ups were of use so far.
    pub fn of(pod: &PodFacts) -> Self {
        Self {
            useless: 0,
            priority: Reverse(pod.priority),
            created: pod.created,
            name: pod.name.clone(),
            uid: pod.uid.clone(),
        }
    }

    /// The first that any pod with so many useless wake-ups could have.
    pub fn first_of(useless: u32) -> Self {
        Self {
            useless,
            priority: Reverse(i32::MAX),
            created: i64::MIN,
            name: Arc::from(""),
            uid: Uid::from(""),
        }
    }

    /// The same pod's, after so many useless wake-ups.
    pub fn after(&self, useless: u32) -> Self {
        Self {
            useless,
            ..self.clone()
        }
    }

    /// Of the pod.
    pub fn uid(&self) -> &Uid {
        &self.uid
    }

    /// Of the pod.
    pub fn priority(&self) -> i32 {
        self.priority.0
    }

    /// When the pod was created, in seconds since 1970.
    pub fn created(&self) -> i64 {
        self.created
    }

    /// How often the pod was woken without use.
    pub fn useless(&self) -> u32 {
        self.useless
    }
}
