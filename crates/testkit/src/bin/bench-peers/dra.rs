//! kube-scheduler with dynamic resource allocation alone: a claim of consumable capacity for each pod, on slices that a
//! driver of GPUs would publish. No kubelet runs, and no driver prepares the devices.

use anyhow::{Context as _, Result};
use gpustow_api::claim::{Consumed, consumed};
use gpustow_testkit::{Case, SchedulerConfig};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::ListParams;

use crate::program::Running;
use crate::{CARDS, Site, kubernetes};

/// Annotation of pods as they are read: the devices and the MiB of their claim.
const DEVICES: &str = "bench/devices";
const CONFIG: &str = "
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection: {qps: 10000, burst: 10000}
podInitialBackoffSeconds: 1
podMaxBackoffSeconds: 2
profiles: [{schedulerName: gpustow-scheduler}]
";
const MOST_ALLOCATED: &str = "
- name: NodeResourcesFit
  args:
    scoringStrategy:
      type: MostAllocated
      resources: [{name: cpu, weight: 1}, {name: memory, weight: 1}]
";

pub(crate) async fn start(site: &Site<'_>, most_allocated: bool) -> Result<Running> {
    let mut config = SchedulerConfig::parse(CONFIG)?;
    if most_allocated {
        let plugins: serde_yaml::Value = serde_yaml::from_str(MOST_ALLOCATED)?;
        config = config.with("profiles.0.pluginConfig", plugins)?;
    }
    kubernetes::scheduler(site, config).await
}

/// Notes on each pod which devices its claim has, and how much of each.
pub(crate) async fn note(case: &Case, pods: &mut [Pod]) -> Result<()> {
    for claim in case.claims().list(&ListParams::default()).await?.items {
        let devices = consumed(&claim.data).into_iter();
        let devices = devices.map(|(device, consumed)| match consumed {
            Consumed::Mib(mib) => format!("{} {}", device.name, mib.0),
            _ => format!("{} {}", device.name, CARDS[0]),
        });
        let note = devices.collect::<Vec<_>>().join(",");
        let name = claim.name_any();
        for pod in pods.iter_mut().filter(|it| it.name_any() == name) {
            pod.annotations_mut()
                .insert(DEVICES.to_owned(), note.clone());
        }
    }
    Ok(())
}

pub(crate) fn holds(pod: &Pod) -> Result<Vec<(String, u64)>> {
    let note = pod.annotations().get(DEVICES);
    let note = note.context("bound without a claim")?;
    let device = |text: &str| {
        let (device, mib) = text.split_once(' ').context("no device")?;
        Ok((device.to_owned(), mib.parse()?))
    };
    note.split(',').map(device).collect()
}
