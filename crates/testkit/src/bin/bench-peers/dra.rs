//! kube-scheduler with dynamic resource allocation alone: a claim of consumable capacity for each pod, on slices that a
//! driver of GPUs would publish. No kubelet runs, and no driver prepares the devices.

use anyhow::{Context as _, Result};
use gpustow_api::claim::{Consumed, consumed};
use gpustow_testkit::{Case, PodBuilder, Scheduler, SchedulerConfig};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{Api, ApiResource, DynamicObject, ListParams, PostParams};
use kube::core::GroupVersionKind;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::program::Running;
use crate::{CARDS, Site};

const DRIVER: &str = "gpu.example.com";
/// Annotation of pods as they are read: the device and the MiB of its claim.
const DEVICE: &str = "bench/device";
/// Two profiles of one name are refused, so each way has a configuration of its own.
const DEFAULT: &str = "
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection: {qps: 10000, burst: 10000}
podInitialBackoffSeconds: 1
podMaxBackoffSeconds: 2
profiles: [{schedulerName: gpustow-scheduler}]
";
const MOST_ALLOCATED: &str = "
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection: {qps: 10000, burst: 10000}
podInitialBackoffSeconds: 1
podMaxBackoffSeconds: 2
profiles:
  - schedulerName: gpustow-scheduler
    pluginConfig:
      - name: NodeResourcesFit
        args:
          scoringStrategy:
            type: MostAllocated
            resources: [{name: cpu, weight: 1}, {name: memory, weight: 1}]
";

fn kind(kind: &str) -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("resource.k8s.io", "v1", kind))
}

fn claims(case: &Case) -> Api<DynamicObject> {
    let kind = kind("ResourceClaim");
    Api::namespaced_with(case.client.clone(), &case.namespace, &kind)
}

async fn create(api: Api<DynamicObject>, object: Value) -> Result<()> {
    let object = serde_json::from_value(object)?;
    api.create(&PostParams::default(), &object).await?;
    Ok(())
}

pub(crate) async fn install(site: &Site<'_>) -> Result<()> {
    let class = json!({
        "metadata": { "name": DRIVER },
        "spec": { "selectors": [{ "cel": { "expression": format!("device.driver == '{DRIVER}'") } }] },
    });
    let classes = Api::all_with(site.case.client.clone(), &kind("DeviceClass"));
    create(classes, class).await
}

pub(crate) async fn start(site: &Site<'_>, most_allocated: bool) -> Result<Running> {
    let yaml = if most_allocated {
        MOST_ALLOCATED
    } else {
        DEFAULT
    };
    let config = SchedulerConfig::parse(yaml)?;
    let kubeconfig = site.cluster.admin_kubeconfig();
    let scheduler = Scheduler::start(&site.cluster, config, kubeconfig).await?;
    Ok(Running {
        processes: vec![("kube-scheduler", scheduler.process)],
        extender: None,
        _players: JoinSet::new(),
    })
}

/// What a driver publishes of a node.
pub(crate) async fn publish(case: &Case, name: &str) -> Result<()> {
    let node = case.node_name(name);
    let device = |(gpu, mib): (usize, &u64)| {
        json!({
            "name": format!("gpu-{gpu}"), "allowMultipleAllocations": true,
            "capacity": { "memory": { "value": format!("{mib}Mi") } },
        })
    };
    let devices: Vec<Value> = CARDS.iter().enumerate().map(device).collect();
    let slice = json!({
        "metadata": { "name": format!("{node}-{DRIVER}") },
        "spec": {
            "driver": DRIVER, "nodeName": node, "devices": devices,
            "pool": { "name": node, "generation": 1, "resourceSliceCount": 1 },
        },
    });
    create(
        Api::all_with(case.client.clone(), &kind("ResourceSlice")),
        slice,
    )
    .await
}

/// Creates the pod's claim, as kube-controller-manager would from a template.
pub(crate) async fn claim(case: &Case, name: &str, mib: u64) -> Result<()> {
    let exactly = json!({
        "deviceClassName": DRIVER,
        "capacity": { "requests": { "memory": format!("{mib}Mi") } },
    });
    let claim = json!({
        "metadata": { "name": name },
        "spec": { "devices": { "requests": [{ "name": "gpu", "exactly": exactly }] } },
    });
    create(claims(case), claim).await
}

pub(crate) fn request(pod: PodBuilder, name: &str) -> PodBuilder {
    pod.with(|spec| {
        let claims = json!([{ "name": "gpu", "resourceClaimName": name }]);
        spec.resource_claims = serde_json::from_value(claims).ok();
        for container in &mut spec.containers {
            let resources = container.resources.get_or_insert_default();
            resources.claims = serde_json::from_value(json!([{ "name": "gpu" }])).ok();
        }
    })
}

/// Notes on each pod which device its claim has, and how much of it.
pub(crate) async fn note(case: &Case, pods: &mut [Pod]) -> Result<()> {
    for claim in claims(case).list(&ListParams::default()).await?.items {
        let Some((device, Consumed::Mib(mib))) = consumed(&claim.data).into_iter().next() else {
            continue;
        };
        let name = claim.name_any();
        for pod in pods.iter_mut().filter(|it| it.name_any() == name) {
            let note = format!("{} {}", device.name, mib.0);
            pod.annotations_mut().insert(DEVICE.to_owned(), note);
        }
    }
    Ok(())
}

pub(crate) fn holds(pod: &Pod) -> Result<(String, u64)> {
    let note = pod.annotations().get(DEVICE);
    let note = note.context("bound without a device")?;
    let (device, mib) = note.split_once(' ').context("no memory")?;
    Ok((device.to_owned(), mib.parse()?))
}
