//! The cluster's GpustowConfig.

use std::time::Duration;

use anyhow::Result;
use gpustow_api::{GpustowConfig, config};
use kube::Client;
use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams};
use serde_json::{Value, json};

use crate::wait::eventually;

/// Its kind may have been created just now.
const SOON: Duration = Duration::from_secs(30);

/// Makes these fields of `spec`, in YAML as `preempt: {fragmented: false}`, the whole configuration of the cluster.
/// Reports of GpuNodes stay fresh for a day, because no agent of a test repeats them.
pub async fn configure(client: &Client, fields: &[String]) -> Result<()> {
    let mut spec = json!({ "scheduling": { "staleAfter": "24h" } });
    for field in fields {
        merge(&mut spec, serde_yaml::from_str(field)?);
    }
    let object = json!({
        "apiVersion": format!("{}/{}", gpustow_api::names::GROUP, gpustow_api::names::VERSION),
        "kind": "GpustowConfig",
        "metadata": { "name": config::NAME },
        "spec": spec,
    });
    // This program may be older than the schema.
    let kind = ApiResource::erase::<GpustowConfig>(&());
    let all: Api<DynamicObject> = Api::all_with(client.clone(), &kind);
    let params = PatchParams::apply("tests").force();
    eventually(SOON, "the GpustowConfig is taken", async || {
        all.patch(config::NAME, &params, &Patch::Apply(&object))
            .await?;
        Ok(())
    })
    .await
}

/// Merges the fields of `more` into `into`; a value of `more` takes precedence.
fn merge(into: &mut Value, more: Value) {
    match (into, more) {
        (Value::Object(into), Value::Object(more)) => {
            for (key, value) in more {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, more) => *into = more,
    }
}
