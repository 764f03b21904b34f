//! Do gpustow's own parts run: the extender, its scheduler and the agents?

use std::collections::BTreeSet;

use gpustow_api::{config, names};
use gpustow_inspect::{
    Cluster, PodInfo, Right, state,
    system::{self, AGENT, EXTENDER, SCHEDULER, Seen},
};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt as _;

use super::{Findings, Level};

/// Labels for which the DaemonSet of agents looks, with the value if it wants one.
const GPU_LABELS: [(&str, Option<&str>); 6] = [
    ("nvidia.com/gpu.present", Some("true")),
    ("feature.node.kubernetes.io/pci-10de.present", Some("true")),
    ("cloud.google.com/gke-accelerator", None),
    ("kubernetes.azure.com/accelerator", Some("nvidia")),
    ("k8s.amazonaws.com/accelerator", None),
    (
        "karpenter.k8s.aws/instance-gpu-manufacturer",
        Some("nvidia"),
    ),
];
/// By this label the GPU Operator sends agents away.
const DEPLOY: &str = "nvidia.com/gpu.deploy.client";

pub(super) fn look(cluster: &Cluster, findings: &mut Findings) {
    let waiting = cluster.waiting();
    extender(cluster, &waiting, findings);
    leader(cluster, &waiting, findings);
    features(cluster, findings);
    scheduler(cluster, findings);
    agents(cluster, findings);
}

/// Does an extender run, and does kube-scheduler reach it?
fn extender(cluster: &Cluster, waiting: &[&PodInfo], findings: &mut Findings) {
    let said = waiting.iter().filter_map(|pod| pod.scheduler_said());
    let unreached = said.filter(|said| state::is_unreached(said)).count();
    if cluster.system.extender_is_down() {
        let pods = cluster.system.pods_with(EXTENDER);
        let why: BTreeSet<_> = pods
            .iter()
            .filter_map(|pod| system::not_ready(pod, EXTENDER))
            .collect();
        let why = why.into_iter().collect::<Vec<_>>().join(", ");
        findings.add(
            Level::Error,
            "extender",
            format!(
                "none of its {} pods is ready ({why}): pods that ask for GPU memory wait",
                pods.len()
            ),
            format!(
                "kubectl logs -n {} -c {EXTENDER} deployment/{}",
                names::NAMESPACE,
                names::SCHEDULER
            ),
        );
    } else if unreached > 0 {
        let wait = match unreached {
            1 => "pod waits",
            _ => "pods wait",
        };
        findings.add(
            Level::Error,
            "extender",
            format!("{unreached} {wait} because kube-scheduler does not reach it"),
            format!("kubectl get pods -n {}", names::NAMESPACE),
        );
    }
}

/// Which extender decides?
fn leader(cluster: &Cluster, waiting: &[&PodInfo], findings: &mut Findings) {
    let patient = waiting.iter().any(|pod| {
        pod.age(cluster.wall) > super::PATIENCE && !pod.facts.gated && !pod.facts.queued
    });
    let Some(lease) = cluster.system.lease(names::EXTENDER) else {
        if matches!(cluster.system.leases, Seen::Unreadable) {
            findings.add(
                Level::Info,
                "extender",
                "who decides was not checked: you may not read the Leases",
                "ask for the ClusterRole gpustow-viewer",
            );
        }
        return;
    };
    // An extender takes the Lease when it is first asked about a pod.
    let problem = match lease {
        None => Some("none has ever decided: its Lease is not there, and pods wait".to_owned()),
        Some(lease) if lease.annotations().contains_key(names::LEFT_CLEANLY) => {
            Some("the last one left, none has been asked since, and pods wait".to_owned())
        }
        Some(lease) => {
            let holder = lease
                .spec
                .as_ref()
                .and_then(|spec| spec.holder_identity.clone());
            let holder = holder.unwrap_or_default();
            let known = cluster.system.pods_with(EXTENDER);
            let gone = !known.is_empty() && !known.iter().any(|pod| pod.name_any() == holder);
            gone.then(|| format!("the one that decides, {holder}, is gone, and pods wait"))
        }
    };
    if let Some(problem) = problem.filter(|_| patient) {
        let fix = "does kube-scheduler call an extender? `kubectl describe pod` of a waiting pod shows the answer";
        findings.add(Level::Error, "extender", problem, fix);
    }
}

/// Does every feature work that the GpustowConfig turns on?
fn features(cluster: &Cluster, findings: &mut Findings) {
    let object = format!("gpustowconfig/{}", config::NAME);
    let status = match &cluster.config {
        Seen::Read(config) => config.status.as_ref(),
        Seen::NotThere => None,
        Seen::Unreadable => {
            return findings.add(
                Level::Info,
                object,
                "the configuration was not read: the defaults are assumed",
                "ask for the ClusterRole gpustow-viewer",
            );
        }
    };
    let conditions = status.map_or(&[][..], |status| &status.conditions);
    for condition in conditions.iter().filter(|it| it.status == "False") {
        let (problem, fix) = match condition.reason.as_str() {
            config::PERMISSION_MISSING if condition.type_ != config::WORKING => {
                let Some(right) = Right::of_feature(&condition.type_, cluster.spec()) else {
                    continue;
                };
                (
                    format!("{} does not work: {}", condition.type_, condition.message),
                    format!(
                        "kubectl apply -f manifests/{}/rbac.yaml; with Helm, turn the feature on in its values (config) and upgrade",
                        right.component
                    ),
                )
            }
            config::NOT_SERVED if condition.type_ != config::WORKING => (
                format!("{} does not work: {}", condition.type_, condition.message),
                "upgrade the cluster, or turn the feature off: docs/claims.md".to_owned(),
            ),
            config::UNREADABLE => (
                condition.message.clone(),
                "correct the object, or install the same version everywhere".to_owned(),
            ),
            _ => continue,
        };
        findings.add(Level::Error, object.clone(), problem, fix);
    }
}

fn scheduler(cluster: &Cluster, findings: &mut Findings) {
    let object = format!("deployment/{}", names::SCHEDULER);
    if let Some(problem) = state::leaderless(cluster) {
        let fix = format!(
            "kubectl logs -n {} -c {SCHEDULER} {object}",
            names::NAMESPACE
        );
        findings.add(Level::Error, object.clone(), problem, fix);
    }
    let Some(wanted) = cluster.system.minor else {
        return;
    };
    let found = cluster
        .system
        .pods_with(SCHEDULER)
        .into_iter()
        .filter_map(minor);
    let wrong: BTreeSet<u32> = found.filter(|minor| *minor != wanted).collect();
    for minor in wrong {
        findings.add(
            Level::Warning,
            object.clone(),
            format!("kube-scheduler is of Kubernetes 1.{minor}, the API server of 1.{wanted}"),
            format!(
                "set newTag in manifests/base/kustomization.yaml to the cluster's own version, v1.{wanted}.x; with Helm, run helm \
                 upgrade, which chooses it"
            ),
        );
    }
}

/// Minor version of the pod's kube-scheduler, as its image's tag has it.
fn minor(pod: &Pod) -> Option<u32> {
    let image = system::container(pod, SCHEDULER)?.image.as_deref()?;
    let (_, tag) = image.split('@').next()?.rsplit_once(":v1.")?;
    tag.split('.').next()?.parse().ok()
}

/// Nodes that should have an agent's report and do not.
fn agents(cluster: &Cluster, findings: &mut Findings) {
    let dumb = cluster.nodes.values().filter_map(|node| {
        let unreported = !cluster.reports.contains_key(&node.name_any());
        Some((node.name_any(), gpus_by(node).filter(|_| unreported)?))
    });
    let dumb: Vec<_> = dumb.collect();
    for (name, sign) in &dumb {
        findings.add(
            Level::Warning,
            format!("node/{name}"),
            format!("it has GPUs by {sign}, and no agent has reported them"),
            look_at_agent(cluster, name),
        );
    }
    if !cluster.reports.is_empty() {
        return;
    }
    let fix = if cluster.system.pods_with(AGENT).is_empty() && dumb.is_empty() {
        "no node has a label that the agents look for: install NVIDIA's GPU feature discovery, or \
         kubectl label node NODE nvidia.com/gpu.present=true"
            .to_owned()
    } else {
        format!(
            "kubectl describe daemonset -n {} {}",
            names::NAMESPACE,
            names::AGENT
        )
    };
    findings.add(
        Level::Error,
        format!("daemonset/{}", names::AGENT),
        "no agent has ever reported a GPU: no GpuNode exists, so no pod gets GPU memory",
        fix,
    );
}

/// The node's label or capacity which shows that it has GPUs.
fn gpus_by(node: &Node) -> Option<String> {
    let labels = node.labels();
    if labels.get(DEPLOY).is_some_and(|value| value != "true") {
        return None;
    }
    let label = GPU_LABELS.iter().find_map(|(key, wanted)| {
        let value = labels.get(*key)?;
        wanted
            .is_none_or(|wanted| wanted == value)
            .then(|| format!("its label {key}={value}"))
    });
    let capacity = || {
        let all = node.status.as_ref()?.capacity.as_ref()?;
        let count = all.get(names::NVIDIA_GPU).filter(|count| count.0 != "0")?;
        Some(format!("its capacity of {} {}", count.0, names::NVIDIA_GPU))
    };
    label.or_else(capacity)
}

/// Where to look for the reason that a node's agent is silent.
pub(super) fn look_at_agent(cluster: &Cluster, node: &str) -> String {
    let namespace = names::NAMESPACE;
    let Some(pod) = cluster.system.agent_on(node) else {
        return format!(
            "no pod of {} runs there: kubectl describe daemonset -n {namespace} {}",
            names::AGENT,
            names::AGENT
        );
    };
    let name = pod.name_any();
    match system::not_ready(pod, AGENT) {
        Some(why) => format!("its agent's pod is {why}: kubectl logs -n {namespace} {name}"),
        None => format!("kubectl logs -n {namespace} {name}"),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use anyhow::Context as _;
    use serde_json::Value;

    use super::*;

    /// The same labels, so that `check` misses no node on which an agent should be.
    #[test]
    fn agents_are_looked_for_where_the_daemonset_puts_them() -> anyhow::Result<()> {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../manifests/agent/daemonset.yaml");
        let text = std::fs::read_to_string(path)?;
        let manifest: Value = serde_yaml::from_str(&text)?;
        let terms = manifest
            .pointer("/spec/template/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms")
            .and_then(Value::as_array)
            .context("no terms")?;
        let mut wanted = Vec::new();
        for term in terms {
            let expressions = term["matchExpressions"]
                .as_array()
                .context("no expressions")?;
            let others = expressions.iter().filter(|it| it["key"] != DEPLOY);
            wanted.extend(others.map(|it| (it["key"].as_str(), it["values"][0].as_str())));
        }
        let known: Vec<_> = GPU_LABELS
            .iter()
            .map(|(key, value)| (Some(*key), *value))
            .collect();
        assert_eq!(known, wanted);
        Ok(())
    }

    #[test]
    fn a_schedulers_minor_is_read_off_its_image() -> anyhow::Result<()> {
        for (image, wanted) in [
            ("registry.k8s.io/kube-scheduler:v1.36.3", Some(36)),
            (
                "localhost:5000/kube-scheduler:v1.35.0@sha256:0123",
                Some(35),
            ),
            ("registry.k8s.io/kube-scheduler@sha256:0123", None),
            ("registry.k8s.io/kube-scheduler:latest", None),
        ] {
            let pod = serde_json::from_value(serde_json::json!({
                "spec": { "containers": [{ "name": "kube-scheduler", "image": image }] },
            }))?;
            assert_eq!(minor(&pod), wanted, "{image}");
        }
        Ok(())
    }
}
