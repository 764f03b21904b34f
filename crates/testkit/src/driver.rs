//! A DRA driver that consists only of objects: kube-scheduler allocates the devices in its slices, and no program
//! prepares devices.

use anyhow::Result;
use gpustow_api::claim::GROUP;
use kube::Client;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use serde_json::{Value, json};

use crate::{Case, PodBuilder};

/// The name of the driver and of its DeviceClass.
pub const DRIVER: &str = "gpu.example.com";

/// A kind of the group of claims.
#[must_use]
pub fn claim_kind(version: &str, kind: &str) -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk(GROUP, version, kind))
}

/// Creates the DeviceClass.
///
/// # Errors
/// The API server refuses it, or serves none.
pub async fn device_class(client: &Client) -> Result<()> {
    let class = json!({
        "metadata": { "name": DRIVER },
        "spec": { "selectors": [{ "cel": { "expression": format!("device.driver == '{DRIVER}'") } }] },
    });
    let classes = Api::all_with(client.clone(), &claim_kind("v1", "DeviceClass"));
    create(&classes, class).await
}

async fn create(api: &Api<DynamicObject>, object: Value) -> Result<()> {
    let object = serde_json::from_value(object)?;
    api.create(&PostParams::default(), &object).await?;
    Ok(())
}

impl Case {
    /// Publishes the GPUs of this case's node `name`, of these sizes in MiB.
    ///
    /// # Errors
    /// The API server refuses the ResourceSlice.
    pub async fn publish(&self, name: &str, gpus: &[u64]) -> Result<()> {
        let node = self.node_name(name);
        let device = |(gpu, mib): (usize, &u64)| {
            json!({
                "name": format!("gpu-{gpu}"),
                "allowMultipleAllocations": true,
                "attributes": { "uuid": { "string": self.uuid(name, gpu) } },
                "capacity": { "memory": { "value": format!("{mib}Mi") } },
            })
        };
        let devices: Vec<Value> = gpus.iter().enumerate().map(device).collect();
        let slice = json!({
            "metadata": { "name": format!("{node}-{DRIVER}") },
            "spec": {
                "driver": DRIVER, "nodeName": node, "devices": devices,
                "pool": { "name": node, "generation": 1, "resourceSliceCount": 1 },
            },
        });
        let slices = Api::all_with(self.client.clone(), &claim_kind("v1", "ResourceSlice"));
        create(&slices, slice).await
    }

    /// This case's ResourceClaims.
    #[must_use]
    pub fn claims(&self) -> Api<DynamicObject> {
        let kind = claim_kind("v1", "ResourceClaim");
        Api::namespaced_with(self.client.clone(), &self.namespace, &kind)
    }

    /// Creates a claim of GPUs, of so much of each or all of it, as kube-controller-manager would from a template.
    ///
    /// # Errors
    /// The API server refuses it.
    pub async fn claim(&self, name: &str, gpus: u64, mib: Option<u64>) -> Result<()> {
        let mut exactly = json!({ "deviceClassName": DRIVER, "count": gpus });
        if let Some(mib) = mib {
            exactly["capacity"] = json!({ "requests": { "memory": format!("{mib}Mi") } });
        }
        let claim = json!({
            "metadata": { "name": name },
            "spec": { "devices": { "requests": [{ "name": "gpu", "exactly": exactly }] } },
        });
        create(&self.claims(), claim).await
    }

    /// Deletes a claim whose pod is gone, as kube-controller-manager would.
    ///
    /// # Errors
    /// The API server refuses it.
    pub async fn release(&self, name: &str) -> Result<()> {
        let claims = self.claims();
        let params = PatchParams::default();
        // kube-scheduler tries waiting pods again after this update, and not after the deletion.
        let unused = Patch::Merge(json!({ "status": { "reservedFor": null, "allocation": null } }));
        claims.patch_status(name, &params, &unused).await?;
        let free = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
        claims.patch(name, &params, &free).await?;
        claims.delete(name, &DeleteParams::default()).await?;
        Ok(())
    }
}

impl PodBuilder {
    /// All containers use the ResourceClaim of this name.
    #[must_use]
    pub fn claim(self, name: &str) -> Self {
        self.with(|spec| {
            let claims = json!([{ "name": "gpu", "resourceClaimName": name }]);
            spec.resource_claims = serde_json::from_value(claims).ok();
            for container in &mut spec.containers {
                let resources = container.resources.get_or_insert_default();
                resources.claims = serde_json::from_value(json!([{ "name": "gpu" }])).ok();
            }
        })
    }
}
