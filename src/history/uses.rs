//! The pods and their GPU use, as the watches show them, until the use is added to the histories.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpustow_api::gpunode::GpuNodeStatus;
use gpustow_api::owner::{self, Owner};
use gpustow_api::workload::Against;
use gpustow_api::{Interned, PodFacts};
use gpustow_pack::Mib;
use k8s_openapi::api::core::v1::Pod;

/// A workload of one namespace.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Workload {
    pub(crate) namespace: Arc<str>,
    pub(crate) owner: Owner,
}

/// A container of a pod that requests GPU memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Container {
    pub(crate) name: Arc<str>,
    pub(crate) image: Arc<str>,
}

/// The properties that pods of one workload share.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Kind {
    workload: Workload,
    containers: Arc<Containers>,
}

/// With the MiB of each GPU that they request.
type Containers = [(Container, Mib)];

/// The most that a container of one pod used of a GPU within a minute.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    pub(crate) workload: Workload,
    pub(crate) container: Container,
    pub(crate) peak: Mib,
    /// The size of that GPU.
    pub(crate) gpu: Mib,
    /// Why the sample does not show the program's need.
    pub(crate) against: Option<Against>,
    /// The container's request on each GPU.
    pub(crate) requested: Mib,
}

/// A container's request on each GPU, and the advised request.
#[derive(Clone, Debug)]
pub(crate) struct Figure {
    pub(crate) workload: Workload,
    pub(crate) container: Arc<str>,
    pub(crate) requested: Mib,
    pub(crate) advised: Mib,
}

/// Every pod that requests GPU memory, the use that was reported since the last [`Uses::take`], and the figures for
/// metrics.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    known: Mutex<Known>,
    figures: Mutex<Arc<[Figure]>>,
}

/// A pod.
#[derive(Debug)]
struct Held {
    node: Option<Arc<str>>,
    kind: Arc<Kind>,
}

/// The memory used, the size of the GPU, and the reason against advice.
type Peak = (Mib, Mib, Option<Against>);

#[derive(Debug, Default)]
struct Known {
    /// By UID.
    pods: HashMap<Arc<str>, Held>,
    kinds: Interned<Kind>,
    containers: Interned<Containers>,
    /// By pod and container.
    peaks: HashMap<(Arc<str>, Arc<str>), Peak>,
}

impl Uses {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the figures that metrics show from now on.
    pub(super) fn show(&self, figures: Arc<[Figure]>) {
        *self.figures.lock().unwrap_or_else(PoisonError::into_inner) = figures;
    }

    /// The figures that metrics show; empty on a replica that does not lead.
    pub(crate) fn figures(&self) -> Arc<[Figure]> {
        let figures = self.figures.lock();
        figures.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A pod is new or has changed.
    pub(crate) fn know(&self, pod: &Pod, facts: &PodFacts) {
        if facts.containers.is_empty() {
            return;
        }
        let mut kind = kind(pod, facts);
        let mut known = self.lock();
        known.containers.share(&mut kind.containers);
        let mut kind = Arc::new(kind);
        known.kinds.share(&mut kind);
        let node = facts.node.clone();
        known.pods.insert(facts.uid.clone(), Held { node, kind });
    }

    /// A pod is gone.
    pub(crate) fn forget(&self, uid: &str) {
        self.lock().pods.remove(uid);
    }

    /// These are all pods.
    pub(crate) fn keep(&self, pods: &[Arc<PodFacts>]) {
        let listed: HashSet<&str> = pods.iter().map(|pod| &*pod.uid).collect();
        self.lock().pods.retain(|uid, _| listed.contains(&**uid));
    }

    /// The agent of this node reported. It speaks for the pods there alone, and of no more memory than a GPU has.
    pub(crate) fn reported(&self, node: &str, status: &GpuNodeStatus) {
        let mut known = self.lock();
        let Known { pods, peaks, .. } = &mut *known;
        for gpu in &status.gpus {
            for share in &gpu.pods {
                let Some((uid, Held { node: on, kind })) = pods.get_key_value(&*share.uid) else {
                    continue;
                };
                if on.as_deref() != Some(node) {
                    continue;
                }
                for used in share.containers.iter().filter(|it| it.peak_mib > 0) {
                    let mut all = kind.containers.iter();
                    let Some((container, _)) = all.find(|(it, _)| *it.name == *used.name) else {
                        continue;
                    };
                    let size = Mib(gpu.total_mib);
                    let is_mig = gpu.uuid.starts_with("MIG-").then_some(Against::Mig);
                    let against = share.mps.then_some(Against::Mps).or(is_mig);
                    let key = (uid.clone(), container.name.clone());
                    let peak = peaks.entry(key).or_default();
                    *peak = (*peak).max((Mib(used.peak_mib).min(size), size, against));
                }
            }
        }
    }

    /// The peaks since the last call.
    pub(crate) fn take(&self) -> Vec<Sample> {
        let mut known = self.lock();
        let peaks = std::mem::take(&mut known.peaks);
        let mut samples: Vec<Sample> = peaks
            .into_iter()
            .filter_map(|((uid, name), (peak, gpu, against))| {
                let Held { kind, .. } = known.pods.get(&uid)?;
                let (container, requested) =
                    kind.containers.iter().find(|(it, _)| it.name == name)?;
                Some(Sample {
                    workload: kind.workload.clone(),
                    container: container.clone(),
                    peak,
                    gpu,
                    against,
                    requested: *requested,
                })
            })
            .collect();
        samples.sort_by(|a, b| (&a.workload, a.peak).cmp(&(&b.workload, b.peak)));
        samples
    }
}

fn kind(pod: &Pod, facts: &PodFacts) -> Kind {
    let spec = pod.spec.iter();
    let all = spec.flat_map(|spec| {
        spec.init_containers
            .iter()
            .flatten()
            .chain(&spec.containers)
    });
    let claims = facts.asks.claims().iter();
    let asking: Vec<_> = facts.containers.iter().zip(claims).collect();
    let containers = all.filter_map(|it| {
        let (_, claim) = asking.iter().find(|(name, _)| ***name == *it.name)?;
        let container = Container {
            name: it.name.as_str().into(),
            image: it.image.as_deref().unwrap_or_default().into(),
        };
        Some((container, claim.mib))
    });
    Kind {
        workload: Workload {
            namespace: facts.namespace.clone(),
            owner: owner::workload(pod),
        },
        containers: containers.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpustow_api::names;
    use serde_json::json;

    #[test]
    fn report_speaks_for_pods_of_its_own_node_and_of_no_more_than_a_gpu_has() {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": { "namespace": "ops", "name": "web", "uid": "u" },
            "spec": { "nodeName": "n", "containers": [
                { "name": "main", "image": "web:1", "resources": { "limits": { names::GPU_MEM: "4000" } } },
            ] },
        }))
        .unwrap();
        let uses = Uses::default();
        uses.know(&pod, &PodFacts::from_pod(&pod, names::GPU_MEM).unwrap());
        let report = |peak: u64| -> GpuNodeStatus {
            let used = json!({ "uid": "u", "usedMiB": 1, "containers": [{ "name": "main", "peakMiB": peak }] });
            let gpu = json!({ "uuid": "GPU-0", "index": 0, "totalMiB": 24_000, "pods": [used] });
            serde_json::from_value(json!({ "gpus": [gpu] })).unwrap()
        };
        let peaks = || uses.take().iter().map(|it| it.peak).collect::<Vec<_>>();
        uses.reported("other", &report(20_000));
        assert_eq!(peaks(), []);
        uses.reported("n", &report(3000));
        assert_eq!(peaks(), [Mib(3000)]);
        uses.reported("n", &report(80_000));
        assert_eq!(peaks(), [Mib(24_000)]);
    }
}
