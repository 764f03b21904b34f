//! Conditions of pods, by which the API server, kubelets, agents and a successor know what is done to them and why.

use gpustow_api::PodFacts;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use super::{Acts, TIMEOUT};
use crate::ask::{AskError, within};

impl Acts {
    pub(super) fn pods(&self, pod: &PodFacts) -> Api<Pod> {
        Api::namespaced(self.app.client.clone(), &pod.namespace)
    }

    /// Writes one condition of the pod, of this copy of it if that is given; the resourceVersion after that.
    pub(super) async fn write(
        &self,
        pod: &PodFacts,
        version: Option<&str>,
        condition: Value,
    ) -> Result<String, AskError> {
        let patch = json!({
            "metadata": {"uid": &*pod.uid, "resourceVersion": version},
            "status": {"conditions": [condition]},
        });
        let (pods, params) = (self.pods(pod), PatchParams::default());
        let patch = Patch::Strategic(patch);
        let patched = pods.patch_status(&pod.name, &params, &patch);
        let now = within(TIMEOUT, patched).await?;
        Ok(now.metadata.resource_version.unwrap_or_default())
    }

    /// The same; a failure is told in the log alone, and the next look tries again.
    pub(super) async fn try_write(&self, pod: &PodFacts, condition: Value) -> bool {
        self.written(pod, condition).await.is_some()
    }

    pub(super) async fn written(&self, pod: &PodFacts, condition: Value) -> Option<String> {
        match self.write(pod, None, condition).await {
            Ok(version) => Some(version),
            Err(error) => {
                if !is_settled(&error) {
                    tracing::warn!(
                        namespace = %pod.namespace, pod = %pod.name, %error, "cannot write a condition"
                    );
                }
                None
            }
        }
    }
}

/// Has the pod changed or gone meanwhile, so that this act is none any more?
pub(super) fn is_settled(error: &AskError) -> bool {
    matches!(error.status(), Some(404 | 409))
}

pub(super) fn condition(of_type: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({
        "type": of_type, "status": status, "reason": reason, "message": message,
        "lastTransitionTime": Timestamp::now().to_string(),
    })
}
