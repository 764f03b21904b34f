//! Conditions of pods. They show the API server, kubelets, agents and the next leader how a pod is disrupted, and why.

use std::collections::HashMap;
use std::time::Duration;

use gpustow_api::reserved::Reservation;
use gpustow_api::{PodFacts, names};
use gpustow_ledger::Reserved;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::Patch;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{Disruptions, TIMEOUT, Uid};
use crate::ask::{AskError, patch_status, within};

/// A condition that stands after this time is ended again.
const AGAIN: Duration = Duration::from_secs(60);

/// The contents of one write.
pub(super) struct Says {
    condition: Value,
    /// The annotation of the reservation, or null to remove it.
    reservation: Option<Value>,
}

impl Says {
    pub(super) fn condition(of_type: &str, status: &str, reason: &str, message: &str) -> Self {
        Self {
            condition: json!({
                "type": of_type, "status": status, "reason": reason, "message": message,
                "lastTransitionTime": Timestamp::now().to_string(),
            }),
            reservation: None,
        }
    }

    /// Another message in a condition that stays as it is.
    pub(super) fn message(of_type: &str, message: &str) -> Self {
        Self {
            condition: json!({"type": of_type, "message": message}),
            reservation: None,
        }
    }

    /// Adds the annotation of the reservation for the next leader, or removes it.
    pub(super) fn reserved(self, reservation: Option<&Reservation>) -> Self {
        let value = reservation.map_or(Value::Null, |it| it.encode().into());
        Self {
            reservation: Some(value),
            ..self
        }
    }
}

/// The contents of the annotation.
pub(super) fn reservation(it: &Reserved, until: Timestamp) -> Reservation {
    let gpus = it.cards.iter().map(|(uuid, mib)| (uuid.to_string(), mib.0));
    Reservation::new(&it.node, gpus.collect(), until)
}

/// Has the pod changed or gone meanwhile, so that the write is about nothing?
pub(super) fn is_settled(error: &AskError) -> bool {
    matches!(error.status(), Some(404 | 409))
}

/// Conditions that were ended: the watch may show them as they were for a while, and each is ended once. By pod and type,
/// the resourceVersion that the write gave, and when.
#[derive(Default)]
pub(super) struct Ended(HashMap<(Uid, &'static str), (String, Instant)>);

impl Ended {
    /// Forgets old entries, and pods whose condition is about to hold again.
    pub(super) fn retain(&mut self, stays: impl Fn(&str) -> bool) {
        let young = |at: &Instant| at.elapsed() < AGAIN;
        self.0.retain(|(uid, _), (_, at)| young(at) && stays(uid));
    }

    /// Does this copy of the pod not show the end yet that was written?
    fn is_late(&self, pod: &PodFacts, of_type: &'static str) -> bool {
        let written = self.0.get(&(pod.uid.clone(), of_type));
        written.is_some_and(|(version, _)| **version != *pod.resource_version)
    }
}

impl Disruptions {
    pub(super) fn pods(&self, pod: &PodFacts) -> Api<Pod> {
        Api::namespaced(self.app.client.clone(), &pod.namespace)
    }

    /// Writes into the pod, into this copy of it if that is given; the resourceVersion after that.
    pub(super) async fn write(
        &self,
        pod: &PodFacts,
        version: Option<&str>,
        says: Says,
    ) -> Result<String, AskError> {
        let mut patch = json!({
            "metadata": {"uid": &*pod.uid, "resourceVersion": version},
            "status": {"conditions": [says.condition]},
        });
        if let Some(reservation) = says.reservation {
            patch["metadata"]["annotations"] = json!({names::RESERVATION: reservation});
        }
        let patch = Patch::Strategic(patch);
        let patched = patch_status(&self.app.client, pod, &patch);
        let now = within(TIMEOUT, patched).await?;
        Ok(now.resource_version.unwrap_or_default())
    }

    /// Ends a condition of the pod, unless the end was written and is on its way. The next look tries again after a
    /// failure.
    pub(super) async fn end_condition(
        &mut self,
        pod: &PodFacts,
        of_type: &'static str,
        reason: &str,
        message: &str,
    ) {
        if self.ended.is_late(pod, of_type) {
            return;
        }
        let mut says = Says::condition(of_type, "False", reason, message);
        if of_type == names::RESERVED_CONDITION {
            says = says.reserved(None);
        }
        match self.write(pod, None, says).await {
            Ok(version) => {
                let key = (pod.uid.clone(), of_type);
                self.ended.0.insert(key, (version, Instant::now()));
            }
            Err(error) if is_settled(&error) => {}
            Err(error) => tracing::warn!(
                namespace = %pod.namespace, pod = %pod.name, %error, "cannot end a condition"
            ),
        }
    }
}
