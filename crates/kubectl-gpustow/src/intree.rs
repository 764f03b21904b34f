//! What kube-scheduler's own filters say of a node before it asks the extender: those that a Pod
//! and a Node alone can tell. Affinity between pods, topology spread, volumes, host ports and
//! quotas are not looked at.

use gpustow_api::PodFacts;
use gpustow_ledger::Ledger;
use k8s_openapi::api::core::v1::{
    Node, NodeSelectorRequirement, NodeSelectorTerm, Pod, PodSpec, Taint, Toleration,
};
use kube::ResourceExt as _;

/// Why the node is not asked about, if it is not.
#[must_use]
pub fn refuses(node: &Node, pod: &Pod) -> Option<&'static str> {
    let spec = pod.spec.as_ref()?;
    let node_spec = node.spec.as_ref();
    if node_spec.is_some_and(|node| node.unschedulable == Some(true)) {
        Some("node is cordoned")
    } else if !selected(node, spec) {
        Some("node selector or required node affinity does not match")
    } else if !tolerated(node_spec.and_then(|node| node.taints.as_deref()), spec) {
        Some("node has a taint that the pod does not tolerate")
    } else {
        None
    }
}

/// Why the node has no CPU or RAM for the pod, if it has none.
#[must_use]
pub fn lacks(ledger: &Ledger, node: &str, pod: &PodFacts) -> Option<&'static str> {
    let request = pod.request.as_ref().ok()?;
    let (cpu_milli, ram) = ledger.left(node)?;
    if request.cpu_milli > cpu_milli {
        Some("not enough CPU")
    } else if request.ram > ram {
        Some("not enough memory of the host")
    } else {
        None
    }
}

fn selected(node: &Node, spec: &PodSpec) -> bool {
    let labels = node.labels();
    let mut wanted = spec.node_selector.iter().flatten();
    if !wanted.all(|(key, value)| labels.get(key) == Some(value)) {
        return false;
    }
    let affinity = spec
        .affinity
        .as_ref()
        .and_then(|affinity| affinity.node_affinity.as_ref());
    let required = affinity.and_then(|node| {
        node.required_during_scheduling_ignored_during_execution
            .as_ref()
    });
    required.is_none_or(|required| {
        required
            .node_selector_terms
            .iter()
            .any(|term| matches(node, term))
    })
}

fn matches(node: &Node, term: &NodeSelectorTerm) -> bool {
    let labels = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    let name = node.name_any();
    (!labels.is_empty() || !fields.is_empty())
        && labels
            .iter()
            .all(|it| holds(it, node.labels().get(&it.key)))
        && fields
            .iter()
            .all(|it| it.key == "metadata.name" && holds(it, Some(&name)))
}

fn holds(wanted: &NodeSelectorRequirement, value: Option<&String>) -> bool {
    let values = wanted.values.as_deref().unwrap_or_default();
    let number = |text: Option<&String>| text.and_then(|text| text.parse::<i64>().ok());
    match wanted.operator.as_str() {
        "In" => value.is_some_and(|value| values.contains(value)),
        "NotIn" => value.is_none_or(|value| !values.contains(value)),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => number(value)
            .zip(number(values.first()))
            .is_some_and(|(a, b)| a > b),
        "Lt" => number(value)
            .zip(number(values.first()))
            .is_some_and(|(a, b)| a < b),
        _ => false,
    }
}

fn tolerated(taints: Option<&[Taint]>, spec: &PodSpec) -> bool {
    let tolerations = spec.tolerations.as_deref().unwrap_or_default();
    let hard = |taint: &&Taint| taint.effect == "NoSchedule" || taint.effect == "NoExecute";
    let mut taints = taints.unwrap_or_default().iter().filter(hard);
    taints.all(|taint| {
        tolerations
            .iter()
            .any(|toleration| tolerates(toleration, taint))
    })
}

fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let (key, effect) = (text(&toleration.key), text(&toleration.effect));
    let exists = toleration.operator.as_deref() == Some("Exists");
    (effect.is_empty() || effect == taint.effect)
        && (key == taint.key || key.is_empty() && exists)
        && (exists || text(&toleration.value) == text(&taint.value))
}
