//! gpustow's own parts as the cluster runs them: its pods with their settings, its Leases, and the
//! version of the API server.

use std::collections::BTreeMap;

use gpustow_api::names;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod};

/// The extender's container in gpustow's pods.
pub const EXTENDER: &str = "extender";
/// The scheduler's.
pub const SCHEDULER: &str = "kube-scheduler";
/// The agent's.
pub const AGENT: &str = "agent";

/// Something that not everybody may read.
#[derive(Clone, Debug, Default)]
pub enum Seen<T> {
    /// The files do not have it.
    #[default]
    NotThere,
    /// The user may not read it.
    Unreadable,
    /// It was read.
    Read(T),
}

impl<T> Seen<Vec<T>> {
    /// Adds an object of a file.
    pub(crate) fn push(&mut self, one: T) {
        match self {
            Self::Read(all) => all.push(one),
            other => *other = Self::Read(vec![one]),
        }
    }
}

/// Data on gpustow's own parts.
#[derive(Clone, Debug, Default)]
pub struct System {
    /// By UID.
    pods: BTreeMap<String, Pod>,
    /// Those by which replicas agree who decides.
    pub leases: Seen<Vec<Lease>>,
    /// Minor version of the API server.
    pub minor: Option<u32>,
    /// Pods that look like an autoscaler's, by UID: their names.
    autoscalers: BTreeMap<String, String>,
    /// Pods that look like a scheduler or device plugin of another GPU sharer, by UID: their names, and whose they are.
    sharers: BTreeMap<String, (String, &'static str)>,
}

impl System {
    pub(crate) fn apply(&mut self, pod: &Pod) {
        if let Some(uid) = &pod.metadata.uid {
            let meta = &pod.metadata;
            let [namespace, name] =
                [&meta.namespace, &meta.name].map(|it| it.as_deref().unwrap_or_default());
            let name = || format!("{namespace}/{name}");
            if is_autoscaler(pod) {
                self.autoscalers.insert(uid.clone(), name());
            }
            if let Some(sharer) = sharer(pod) {
                self.sharers.insert(uid.clone(), (name(), sharer));
            }
        }
        if pod.metadata.namespace.as_deref() == Some(names::NAMESPACE)
            && let Some(uid) = &pod.metadata.uid
        {
            self.pods.insert(uid.clone(), pod.clone());
        }
    }

    pub(crate) fn delete(&mut self, uid: &str) {
        self.pods.remove(uid);
        self.autoscalers.remove(uid);
        self.sharers.remove(uid);
    }

    pub(crate) fn clear(&mut self) {
        self.pods.clear();
        self.autoscalers.clear();
        self.sharers.clear();
    }

    /// The pods with a container of this name, by name.
    pub fn pods_with<'a>(&'a self, container: &'a str) -> Vec<&'a Pod> {
        let mut pods: Vec<_> = self.pods.values().collect();
        pods.retain(|pod| self::container(pod, container).is_some());
        pods.sort_by_key(|pod| pod.metadata.name.clone());
        pods
    }

    /// A pod that looks like one of a Cluster Autoscaler or of Karpenter, with its namespace.
    pub fn autoscaler(&self) -> Option<&str> {
        self.autoscalers.values().next().map(String::as_str)
    }

    /// Pods that look like a scheduler or device plugin of another GPU sharer, and whose they are.
    pub fn sharers(&self) -> impl Iterator<Item = &(String, &'static str)> {
        self.sharers.values()
    }

    /// Does the extender run as pods of which none is ready?
    pub fn extender_is_down(&self) -> bool {
        let pods = self.pods_with(EXTENDER);
        !pods.is_empty() && !pods.iter().any(|pod| not_ready(pod, EXTENDER).is_none())
    }

    /// Is there a pod of an extender that has not finished?
    pub fn runs_extender(&self) -> bool {
        let runs = |pod: &&Pod| {
            let phase = pod.status.as_ref().and_then(|it| it.phase.as_deref());
            !matches!(phase, Some("Failed" | "Succeeded"))
        };
        self.pods_with(EXTENDER).iter().any(runs)
    }

    /// The agent's pod on the node.
    pub fn agent_on(&self, node: &str) -> Option<&Pod> {
        let on = |pod: &&&Pod| {
            pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(node)
        };
        self.pods_with(AGENT).iter().find(on).copied()
    }

    /// The Lease with this name. None if Leases could not be read.
    pub fn lease(&self, name: &str) -> Option<Option<&Lease>> {
        let Seen::Read(leases) = &self.leases else {
            return None;
        };
        let named = |lease: &&Lease| lease.metadata.name.as_deref() == Some(name);
        Some(leases.iter().find(named))
    }
}

/// The container of this name, sidecars included.
pub fn container<'a>(pod: &'a Pod, name: &str) -> Option<&'a Container> {
    let spec = pod.spec.as_ref()?;
    let sidecars = spec.init_containers.iter().flatten();
    let mut all = spec.containers.iter().chain(sidecars);
    all.find(|it| it.name == name)
}

/// Why the container is not ready, in Kubernetes' words. None if it is.
pub fn not_ready(pod: &Pod, name: &str) -> Option<String> {
    let status = pod.status.as_ref();
    let phase = status.and_then(|status| status.phase.clone());
    let found = status.and_then(|status| {
        let sidecars = status.init_container_statuses.iter().flatten();
        let mut all = status.container_statuses.iter().flatten().chain(sidecars);
        all.find(|it| it.name == name)
    });
    let reason = |status: &ContainerStatus| {
        let state = status.state.as_ref()?;
        let waiting = state.waiting.as_ref().and_then(|it| it.reason.clone());
        let ended = || state.terminated.as_ref().and_then(|it| it.reason.clone());
        waiting.or_else(ended)
    };
    match found {
        Some(status) if status.ready => None,
        Some(status) => Some(reason(status).unwrap_or_else(|| "not ready".to_owned())),
        None => Some(phase.unwrap_or_else(|| "not started".to_owned())),
    }
}

/// The value of the container's flag, or of the environment variable that stands for it.
pub fn setting(container: &Container, flag: &str) -> Option<String> {
    let words = container.command.iter().chain(&container.args).flatten();
    let mut words = words.peekable();
    while let Some(word) = words.next() {
        match word.strip_prefix("--").and_then(|it| it.strip_prefix(flag)) {
            Some("") => return words.peek().map(|value| (*value).clone()),
            Some(rest) if rest.starts_with('=') => return Some(rest[1..].to_owned()),
            _ => {}
        }
    }
    let variable = format!("GPUSTOW_{}", flag.replace('-', "_").to_uppercase());
    let variables = container.env.iter().flatten();
    variables
        .filter(|it| it.name == variable)
        .find_map(|it| it.value.clone())
}

/// The extenders' containers.
fn extenders<'p>(pods: impl IntoIterator<Item = &'p Pod>) -> impl Iterator<Item = &'p Container> {
    let ours = |pod: &&Pod| pod.metadata.namespace.as_deref() == Some(names::NAMESPACE);
    let ours = pods.into_iter().filter(ours);
    ours.filter_map(|pod| container(pod, EXTENDER))
}

/// Whose scheduler or device plugin a pod runs, by the last part of its images' names.
fn sharer(pod: &Pod) -> Option<&'static str> {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let mut images = containers.filter_map(|it| it.image.as_deref());
    images.find_map(|image| {
        if image.contains("/kai-scheduler/") {
            return Some("KAI");
        }
        let name = image.rsplit('/').next()?.split([':', '@']).next()?;
        match name {
            "k8s-gpushare-plugin" | "k8s-gpushare-schd-extender" => Some("gpushare"),
            "hami" => Some("HAMi"),
            "vc-scheduler" => Some("Volcano"),
            "volcano-vgpu-device-plugin" => Some("Volcano's vGPU"),
            "k8s-device-plugin" => Some("NVIDIA's device plugin"),
            _ => None,
        }
    })
}

/// By the label of its chart, or by its image.
fn is_autoscaler(pod: &Pod) -> bool {
    let known = |name: &str| name.ends_with("cluster-autoscaler") || name == "karpenter";
    let labels = pod.metadata.labels.iter().flatten();
    let mut labels = labels.filter(|(key, _)| *key == "app.kubernetes.io/name" || *key == "app");
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let mut images = containers.filter_map(|it| {
        let last = it.image.as_deref()?.rsplit('/').next()?;
        last.split([':', '@']).next()
    });
    labels.any(|(_, value)| known(value)) || images.any(known)
}

/// Does an extender make its webhook's certificate itself? It does if it serves a webhook without a given certificate.
pub(crate) fn makes_certificate<'p>(pods: impl IntoIterator<Item = &'p Pod>) -> bool {
    let serves = |it: &&Container| setting(it, "webhook-listen").is_some();
    let mut all = extenders(pods).filter(serves);
    all.any(|extender| setting(extender, "webhook-tls").is_none())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(place: &str, container: serde_json::Value) -> anyhow::Result<Pod> {
        let mut spec = json!({ "containers": [] });
        spec[place] = json!([container]);
        Ok(serde_json::from_value(json!({
            "metadata": { "namespace": "gpustow-system", "name": "p", "uid": "u" },
            "spec": spec,
        }))?)
    }

    #[test]
    fn an_extender_makes_its_certificate_if_its_pod_says_so() -> anyhow::Result<()> {
        let of = |args| {
            let container = json!({ "name": "extender", "args": args });
            anyhow::Ok(makes_certificate(&[pod("initContainers", container)?]))
        };
        let listens = "--webhook-listen=0.0.0.0:1";
        assert!(of(json!([listens]))?);
        assert!(!of(json!([listens, "--webhook-tls=/x"]))?);
        assert!(!of(json!(["--log=info"]))?);
        let env = json!([{ "name": "GPUSTOW_WEBHOOK_LISTEN", "value": "0.0.0.0:1" }]);
        let container = json!({ "name": "extender", "env": env });
        assert!(makes_certificate(&[pod("initContainers", container)?]));
        Ok(())
    }

    #[test]
    fn a_sidecar_is_ready_by_its_own_status() -> anyhow::Result<()> {
        let mut system = System::default();
        let mut pod = pod("initContainers", json!({ "name": "extender" }))?;
        for (status, down) in [
            (json!({}), true),
            (
                json!({ "initContainerStatuses": [{ "name": "extender", "ready": true, "image": "", "imageID": "", "restartCount": 0 }] }),
                false,
            ),
            (
                json!({ "initContainerStatuses": [{ "name": "extender", "ready": false, "image": "", "imageID": "", "restartCount": 9,
                "state": { "waiting": { "reason": "CrashLoopBackOff" } } }] }),
                true,
            ),
        ] {
            pod.status = serde_json::from_value(status)?;
            system.apply(&pod);
            assert_eq!(system.extender_is_down(), down);
        }
        assert_eq!(
            not_ready(&pod, EXTENDER).as_deref(),
            Some("CrashLoopBackOff")
        );
        Ok(())
    }
}
