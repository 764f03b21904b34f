//! The results of admission, case by case and for any JSON.

mod adopt;
mod auto;
mod created;
mod properties;
mod refused;
mod time_slicing;
mod updates;

use anyhow::{Context as _, Result};
use gpustow_admission::{Act, Admitted, Ask, Cluster, admit};
use gpustow_api::config::GpustowConfigSpec;
use gpustow_api::{BadRequest, GpuWorkload, QueueFrom, names};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

/// A cluster, a namespace and a workload's history.
#[derive(Debug, Default)]
struct Site {
    spec: GpustowConfigSpec,
    from: Vec<QueueFrom>,
    namespace: ObjectMeta,
    history: Option<GpuWorkload>,
}

impl Site {
    /// With these fields of the GpustowConfig.
    fn with(spec: Value) -> Result<Self> {
        Ok(Self {
            spec: serde_json::from_value(spec)?,
            ..Self::default()
        })
    }

    /// A namespace with these labels.
    fn labelled(labels: &[(&str, &str)]) -> Self {
        let label = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        let namespace = ObjectMeta {
            labels: Some(labels.iter().map(label).collect()),
            ..ObjectMeta::default()
        };
        Self {
            namespace,
            ..Self::default()
        }
    }

    fn ask(&self, pod: &Value, act: Act<'_>) -> Result<Admitted, BadRequest> {
        let cluster = Cluster {
            resource: names::GPU_MEM,
            spec: &self.spec,
            queue_from: &self.from,
        };
        let ask = Ask {
            pod,
            act,
            user: "someone",
        };
        admit(ask, cluster, &self.namespace, self.history.as_ref())
    }

    fn create(&self, pod: &Value) -> Result<Admitted, BadRequest> {
        self.ask(pod, Act::Create)
    }

    /// Why the pod is refused, in one line.
    fn refusal(&self, pod: &Value) -> Result<String> {
        let refused = self.create(pod).err();
        let refused = refused.with_context(|| format!("admitted: {pod}"))?;
        Ok(refused.to_string())
    }
}

/// A pod of these containers, as the API server shows it.
fn pod(annotations: Value, containers: Value) -> Value {
    json!({
        "metadata": { "name": "p", "namespace": "n", "annotations": annotations },
        "spec": { "schedulerName": "default-scheduler", "containers": containers },
    })
}

/// A container that requests GPU memory.
fn asks(name: &str, mib: &str) -> Value {
    of(name, json!({ names::GPU_MEM: mib }))
}

/// A container with these limits.
fn of(name: &str, limits: Value) -> Value {
    json!({ "name": name, "image": "cuda", "resources": { "limits": limits, "requests": limits } })
}

fn with(mut value: Value, key: &str, it: Value) -> Value {
    value[key] = it;
    value
}

/// A container's variables, as `name=value` or `name=path`.
fn env(container: &Value) -> Vec<String> {
    let all = container["env"].as_array().into_iter().flatten();
    let text = |it: &Value| it.as_str().unwrap_or_default().to_owned();
    all.map(|it| {
        let path = &it["valueFrom"]["fieldRef"]["fieldPath"];
        let value = if path.is_null() { &it["value"] } else { path };
        format!("{}={}", text(&it["name"]), text(value))
    })
    .collect()
}

fn note<'a>(pod: &'a Value, key: &str) -> Option<&'a str> {
    pod["metadata"]["annotations"][key].as_str()
}

/// The container's request and limit, which must be equal.
fn amount(pod: &Value, container: usize) -> Option<&str> {
    let resources = &pod["spec"]["containers"][container]["resources"];
    let of = |list: &str| resources[list][names::GPU_MEM].as_str();
    assert_eq!(of("limits"), of("requests"));
    of("limits")
}
