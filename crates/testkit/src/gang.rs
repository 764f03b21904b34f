//! Gangs of Kubernetes' own PodGroups, of which the typed API that the tests use knows nothing.

use anyhow::Result;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams, PostParams, Request};
use serde_json::{Value, json};

use crate::Case;

/// Where PodGroups are served.
pub const POD_GROUPS: &str = "/apis/scheduling.k8s.io/v1beta1";

impl Case {
    /// Creates a PodGroup with this specification.
    ///
    /// # Errors
    /// The API server refuses it, or serves none.
    pub async fn pod_group(&self, name: &str, spec: Value) -> Result<Value> {
        let url = format!("{POD_GROUPS}/namespaces/{}/podgroups", self.namespace);
        let group = json!({
            "apiVersion": "scheduling.k8s.io/v1beta1", "kind": "PodGroup",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": spec,
        });
        self.post(url, &group).await
    }

    /// Merges a change into a PodGroup.
    ///
    /// # Errors
    /// The API server refuses it.
    pub async fn patch_pod_group(&self, name: &str, change: Value) -> Result<()> {
        let url = format!("{POD_GROUPS}/namespaces/{}/podgroups", self.namespace);
        let params = PatchParams::default();
        let request = Request::new(url).patch(name, &params, &Patch::Merge(change))?;
        self.client.request::<Value>(request).await?;
        Ok(())
    }

    /// Creates a pod of that PodGroup.
    ///
    /// # Errors
    /// The API server refuses it.
    pub async fn member(&self, group: &str, pod: impl Into<Pod>) -> Result<Pod> {
        let mut pod = serde_json::to_value(pod.into())?;
        pod["spec"]["schedulingGroup"] = json!({"podGroupName": group});
        let url = format!("/api/v1/namespaces/{}/pods", self.namespace);
        Ok(serde_json::from_value(self.post(url, &pod).await?)?)
    }

    async fn post(&self, url: String, object: &Value) -> Result<Value> {
        let body = serde_json::to_vec(object)?;
        let request = Request::new(url).create(&PostParams::default(), body)?;
        Ok(self.client.request(request).await?)
    }
}
