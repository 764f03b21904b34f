//! Failed cards, which do not get new pods, and the time when they get pods again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use gpustow_api::gpunode::GpuNodeStatus;
use k8s_openapi::jiff::Timestamp;

use crate::clock::Now;
use crate::devices::{Fault, FaultKind};

/// The failure of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Illness {
    /// In words.
    pub reason: String,
    /// When it was last seen to fail, by the host's clock.
    pub since: Timestamp,
    /// The agent's age when its probation ends.
    until: Duration,
}

/// The cards' faults.
#[derive(Clone, Debug)]
pub struct Health {
    application_xids: BTreeSet<u64>,
    probation: Duration,
    ill: BTreeMap<String, Illness>,
}

impl Health {
    /// Errors of `application_xids` are an application's fault; any other condemns the card until
    /// `probation` has passed without another.
    #[must_use]
    pub fn new(application_xids: BTreeSet<u64>, probation: Duration) -> Self {
        Self {
            application_xids,
            probation,
            ill: BTreeMap::new(),
        }
    }

    /// Takes over the failures that an earlier agent reported: a restart does not cure a card.
    pub fn resume(&mut self, status: &GpuNodeStatus, now: Now) {
        for gpu in &status.gpus {
            if let (Some(failed), Some(reason)) = (&gpu.failed, &gpu.reason) {
                let since = failed.parse().unwrap_or(now.wall).min(now.wall);
                let left = self.probation.saturating_sub(now.since(since));
                let illness = Illness {
                    reason: reason.clone(),
                    since,
                    until: now.age.saturating_add(left),
                };
                self.ill.insert(gpu.uuid.clone(), illness);
            }
        }
    }

    /// Something went wrong. True if it condemns the card.
    pub fn fault(&mut self, fault: &Fault, now: Now) -> bool {
        let reason = match fault.kind {
            FaultKind::Xid(xid) if self.application_xids.contains(&xid) => return false,
            FaultKind::Xid(xid) => format!("XID {xid}"),
            FaultKind::Ecc => "uncorrectable memory error".to_owned(),
        };
        self.condemn(&fault.uuid, reason, now);
        true
    }

    /// The card does not answer.
    pub fn condemn(&mut self, uuid: &str, reason: String, now: Now) {
        let illness = Illness {
            reason,
            since: now.wall,
            until: now.age.saturating_add(self.probation),
        };
        self.ill.insert(uuid.to_owned(), illness);
    }

    /// The failure of the card, or of the card of which it is an instance.
    #[must_use]
    pub fn of(&self, uuid: &str, parent: Option<&str>, now: Now) -> Option<&Illness> {
        let illness = self.ill.get(uuid).or_else(|| self.ill.get(parent?))?;
        (now.age < illness.until).then_some(illness)
    }
}
