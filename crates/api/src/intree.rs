//! kube-scheduler's own filters of a node, before it asks the extender, as far as a Pod and a Node alone decide.
//! Affinity between pods, topology spread, volumes, host ports and quotas do not count here. The ledger has the free
//! CPU, memory and room for pods of a node.
//!
//! An operator or field that is not known here refuses no node. At bind, kube-scheduler has filtered
//! already, and a refusal would come back for ever. Before that, a pod that is woken for nothing backs
//! off, and one that is not woken waits for minutes.

use k8s_openapi::api::core::v1::{
    Node, NodeSelectorRequirement, NodeSelectorTerm, Pod, PodSpec, Taint as NodeTaint,
    Toleration as PodToleration,
};

pub use crate::selector::Label;
use crate::selector::{Requirement, Selector};
use crate::{NodeFacts, Regards, names, regards};

/// Fewer nodes than that are never left out: `minFeasibleNodesToFind`.
pub const LEAST_NODES: usize = 100;
/// The lowest percentage of the adaptive mode: `minFeasibleNodesPercentageToFind`.
const LEAST_PERCENT: usize = 5;

/// kube-scheduler looks no further once so many of its nodes pass its own filters, and asks the extender about these alone:
/// `numFeasibleNodesToFind` of Kubernetes 1.34 to 1.38. The percentage is `percentageOfNodesToScore`; 0 is adaptive.
#[must_use]
pub fn nodes_to_find(percentage: usize, nodes: usize) -> usize {
    let percentage = match percentage {
        0 => 50_usize.saturating_sub(nodes / 125).max(LEAST_PERCENT),
        set => set,
    };
    let found = nodes.saturating_mul(percentage) / 100;
    found.max(LEAST_NODES).min(nodes)
}

/// The constraints that keep a pod off nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Constraints {
    /// `spec.nodeSelector`.
    selector: Box<[Label]>,
    /// The terms of the required node affinity, one of which must match.
    required: Option<Box<[Term]>>,
    tolerations: Box<[Toleration]>,
    /// The rules about other pods, which also decide.
    pub regards: Regards,
    /// The selectors of the pods that anti-affinity keeps off its node.
    pub(crate) kept_off: Box<[Selector]>,
}

/// A taint of a node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Taint {
    key: Box<str>,
    value: Box<str>,
    effect: Box<str>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Term {
    labels: Box<[Requirement]>,
    fields: Box<[Requirement]>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Toleration {
    key: Box<str>,
    operator: Box<str>,
    value: Box<str>,
    effect: Box<str>,
}

/// The taint that stands for a cordoned node.
const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";
const NO_SCHEDULE: &str = "NoSchedule";
const NO_EXECUTE: &str = "NoExecute";
pub(crate) const PREFER_NO_SCHEDULE: &str = "PreferNoSchedule";

/// Why kube-scheduler does not ask about the node, if it does not.
#[must_use]
pub fn refuses(node: &NodeFacts, pod: &Constraints) -> Option<&'static str> {
    refuses_but_for(node, pod, |_| false)
}

/// The same once the agent has removed the startup taint.
#[must_use]
pub fn refuses_once_started(node: &NodeFacts, pod: &Constraints) -> Option<&'static str> {
    refuses_but_for(node, pod, Taint::is_startup)
}

fn refuses_but_for(
    node: &NodeFacts,
    pod: &Constraints,
    ignored: impl Fn(&Taint) -> bool,
) -> Option<&'static str> {
    let tolerated =
        |taint: &Taint| ignored(taint) || pod.tolerations.iter().any(|it| it.covers(taint));
    if node.cordoned && !tolerated(&Taint::new(UNSCHEDULABLE, "", NO_SCHEDULE)) {
        Some("node is cordoned")
    } else if !pod.select(node) {
        Some("node selector or required node affinity does not match")
    } else if !node.taints.iter().all(tolerated) {
        Some("node has a taint that the pod does not tolerate")
    } else {
        None
    }
}

/// The label that the pod selects and the node lacks, or the node's taint that it does not tolerate.
#[must_use]
pub fn cause(node: &NodeFacts, pod: &Constraints) -> Option<String> {
    if node.cordoned {
        return None;
    }
    let lacks = |it: &&Label| node.label(&it.key) != Some(&*it.value);
    if let Some(Label { key, value }) = pod.selector.iter().find(lacks) {
        return Some(format!("{key}={value}"));
    }
    let keeps_off = |taint: &&Taint| !pod.tolerations.iter().any(|it| it.covers(taint));
    let taint = node.taints.iter().find(keeps_off)?;
    let value = match &*taint.value {
        "" => String::new(),
        value => format!("={value}"),
    };
    let is_it = pod.select(node);
    is_it.then(|| format!("{}{value}:{}", taint.key, taint.effect))
}

/// True if the filters treat both copies of a node alike.
#[must_use]
pub fn alike(old: &NodeFacts, new: &NodeFacts) -> bool {
    let amounts = |node: &NodeFacts| (node.cpu_milli, node.ram, node.pods, node.cordoned);
    amounts(old) == amounts(new) && old.taints == new.taints && old.labels == new.labels
}

impl Constraints {
    /// The constraints of `spec`.
    #[must_use]
    pub fn of(spec: &PodSpec) -> Self {
        let affinity = spec.affinity.as_ref();
        let required = affinity
            .and_then(|affinity| affinity.node_affinity.as_ref())
            .and_then(|node| {
                node.required_during_scheduling_ignored_during_execution
                    .as_ref()
            });
        let selector = spec.node_selector.iter().flatten();
        let tolerations = spec.tolerations.iter().flatten();
        Self {
            selector: selector
                .map(|(key, value)| Label::new(key, value))
                .collect(),
            required: required
                .map(|required| required.node_selector_terms.iter().map(Term::of).collect()),
            tolerations: tolerations.map(Toleration::of).collect(),
            regards: Regards::of(spec),
            kept_off: regards::kept_off(spec),
        }
    }

    fn select(&self, node: &NodeFacts) -> bool {
        let mut wanted = self.selector.iter();
        wanted.all(|wanted| node.label(&wanted.key) == Some(&*wanted.value))
            && self
                .required
                .as_ref()
                .is_none_or(|terms| terms.iter().any(|term| term.matches(node)))
    }
}

impl Taint {
    /// One.
    #[must_use]
    pub fn new(key: &str, value: &str, effect: &str) -> Self {
        Self {
            key: key.into(),
            value: value.into(),
            effect: effect.into(),
        }
    }

    /// One of a node.
    #[must_use]
    pub fn of(taint: &NodeTaint) -> Self {
        let value = taint.value.as_deref().unwrap_or_default();
        Self::new(&taint.key, value, &taint.effect)
    }

    /// Is it the one that the agent removes?
    #[must_use]
    pub fn is_startup(&self) -> bool {
        *self.key == *names::STARTUP_TAINT && *self.effect == *NO_SCHEDULE
    }
}

/// The taints of a node that keep pods off it.
pub(crate) fn hard_taints(node: &Node) -> Box<[Taint]> {
    let taints = node.spec.iter().filter_map(|spec| spec.taints.as_ref());
    let hard = |taint: &&NodeTaint| taint.effect == NO_SCHEDULE || taint.effect == NO_EXECUTE;
    taints.flatten().filter(hard).map(Taint::of).collect()
}

/// True if `pod` tolerates the `PreferNoSchedule` taint with this key and value.
pub(crate) fn tolerates_softly(pod: &Pod, key: &str, value: &str) -> bool {
    let taint = Taint::new(key, value, PREFER_NO_SCHEDULE);
    let specs = pod.spec.iter();
    let mut tolerations = specs.flat_map(|spec| spec.tolerations.iter().flatten());
    tolerations.any(|toleration| Toleration::of(toleration).covers(&taint))
}

impl Term {
    fn of(term: &NodeSelectorTerm) -> Self {
        let of = |it: &NodeSelectorRequirement| {
            Requirement::new(&it.key, &it.operator, it.values.iter().flatten())
        };
        let list =
            |list: &Option<Vec<NodeSelectorRequirement>>| list.iter().flatten().map(of).collect();
        Self {
            labels: list(&term.match_expressions),
            fields: list(&term.match_fields),
        }
    }

    fn matches(&self, node: &NodeFacts) -> bool {
        let on_label = |it: &Requirement| it.holds(node.label(&it.key));
        // A later API may have further fields.
        let on_field = |it: &Requirement| &*it.key != "metadata.name" || it.holds(Some(&node.name));
        (!self.labels.is_empty() || !self.fields.is_empty())
            && self.labels.iter().all(on_label)
            && self.fields.iter().all(on_field)
    }
}

impl Toleration {
    fn of(toleration: &PodToleration) -> Self {
        let text = |text: &Option<String>| text.as_deref().unwrap_or_default().into();
        Self {
            key: text(&toleration.key),
            operator: text(&toleration.operator),
            value: text(&toleration.value),
            effect: text(&toleration.effect),
        }
    }

    fn covers(&self, taint: &Taint) -> bool {
        let pair = || decimal(&taint.value).zip(decimal(&self.value));
        (self.effect.is_empty() || self.effect == taint.effect)
            && (self.key == taint.key || self.key.is_empty())
            && match &*self.operator {
                "" | "Equal" => self.value == taint.value,
                "Gt" => pair().is_some_and(|(taint, than)| taint > than),
                "Lt" => pair().is_some_and(|(taint, than)| taint < than),
                // `Exists`; for others see the module's documentation.
                _ => true,
            }
    }
}

/// The number in `text`, if it is in its shortest form: kube-scheduler does not accept another form in taints.
fn decimal(text: &str) -> Option<i64> {
    let number: i64 = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// The table of upstream's `TestNumFeasibleNodesToFind`, and the sizes of docs/benchmarks.md.
    #[test]
    fn nodes_to_find_is_what_kube_scheduler_looks_for() {
        let cases = [
            (0, 10, 10),
            (40, 10, 10),
            (0, 1000, 420),
            (40, 1000, 400),
            (0, 6000, 300),
            (40, 6000, 2400),
            (0, 5000, 500),
            (0, 15_000, 750),
            (5, 1000, 100),
            (5, 5000, 250),
            (10, 99, 99),
            (10, 100, 100),
            (10, 1213, 121),
            (100, 1213, 1213),
        ];
        for (percent, nodes, enough) in cases {
            assert_eq!(
                nodes_to_find(percent, nodes),
                enough,
                "{percent} % of {nodes}"
            );
        }
    }

    fn refused(node: Value, spec: Value) -> Option<&'static str> {
        let node: Node = serde_json::from_value(node).unwrap();
        let mut spec = spec;
        spec["containers"] = json!([]);
        let spec: PodSpec = serde_json::from_value(spec).unwrap();
        refuses(&NodeFacts::from_node(&node), &Constraints::of(&spec))
    }

    fn node(spec: Value) -> Value {
        let labels = json!({"zone": "a", "generation": "3"});
        json!({"metadata": {"name": "n", "labels": labels}, "spec": spec})
    }

    fn requires(terms: Value) -> Value {
        let required = "requiredDuringSchedulingIgnoredDuringExecution";
        json!({"affinity": {"nodeAffinity": {required: {"nodeSelectorTerms": terms}}}})
    }

    #[test]
    fn cause_is_the_label_or_the_taint() {
        let taints = json!({"taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}]});
        for (mut spec, named) in [
            (json!({}), Some("k=v:NoSchedule")),
            (
                json!({"nodeSelector": {"zone": "a", "rack": "1"}}),
                Some("rack=1"),
            ),
            (
                json!({"tolerations": [{"key": "k", "operator": "Exists"}]}),
                None,
            ),
        ] {
            let node: Node = serde_json::from_value(node(taints.clone())).unwrap();
            spec["containers"] = json!([]);
            let spec: PodSpec = serde_json::from_value(spec).unwrap();
            let found = cause(&NodeFacts::from_node(&node), &Constraints::of(&spec));
            assert_eq!(found.as_deref(), named);
        }
    }

    #[test]
    fn selectors_and_required_affinity_are_kube_schedulers() {
        let on = |key: &str, operator: &str, values: &[&str]| {
            let it = json!({"key": key, "operator": operator, "values": values});
            requires(json!([{"matchExpressions": [it]}]))
        };
        let named = |name: &str| {
            let it = json!({"key": "metadata.name", "operator": "In", "values": [name]});
            json!({"matchFields": [it]})
        };
        let fits = [
            json!({}),
            json!({"nodeSelector": {"zone": "a"}}),
            on("zone", "In", &["b", "a"]),
            on("rack", "NotIn", &["1"]),
            on("zone", "Exists", &[]),
            on("rack", "DoesNotExist", &[]),
            on("generation", "Gt", &["2"]),
            on("generation", "Lt", &["4"]),
            requires(json!([named("m"), named("n")])),
        ];
        for spec in fits {
            assert_eq!(refused(node(json!({})), spec.clone()), None, "{spec}");
        }
        let bars = [
            json!({"nodeSelector": {"zone": "b"}}),
            json!({"nodeSelector": {"rack": ""}}),
            on("zone", "In", &["b"]),
            on("zone", "NotIn", &["a"]),
            on("rack", "Exists", &[]),
            on("zone", "Gt", &["2"]),
            on("generation", "Lt", &["3"]),
            requires(json!([named("m")])),
            requires(json!([{}])),
            requires(json!([])),
        ];
        for spec in bars {
            let why = Some("node selector or required node affinity does not match");
            assert_eq!(refused(node(json!({})), spec.clone()), why, "{spec}");
        }
    }

    #[test]
    fn tolerations_compare_numbers_as_kube_scheduler_does() {
        let refuses = |taint: &str, operator: &str, value: &str| {
            let taints = json!({"taints": [{"key": "k", "value": taint, "effect": "NoSchedule"}]});
            let toleration = json!({"key": "k", "operator": operator, "value": value});
            refused(node(taints), json!({"tolerations": [toleration]})).is_some()
        };
        let most = i64::MAX.to_string();
        for (taint, operator, value) in [
            ("950", "Gt", "900"),
            ("-1", "Gt", "-2"),
            ("899", "Lt", "900"),
            ("0", "Lt", most.as_str()),
        ] {
            assert!(
                !refuses(taint, operator, value),
                "{taint} {operator} {value}"
            );
        }
        for (taint, operator, value) in [
            ("900", "Gt", "900"),
            ("900", "Lt", "900"),
            ("950", "Lt", "900"),
            ("high", "Gt", "900"),
            ("", "Lt", "900"),
            ("950", "Gt", "low"),
            ("0950", "Gt", "900"),
            ("950", "Gt", "9223372036854775808"),
        ] {
            assert!(
                refuses(taint, operator, value),
                "{taint} {operator} {value}"
            );
        }
    }

    #[test]
    fn what_a_later_kubernetes_may_mean_refuses_no_node() {
        let tainted = json!({"taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}]});
        let matches = json!({"key": "k", "operator": "Matches", "value": "w"});
        let later = json!({"tolerations": [matches]});
        assert_eq!(refused(node(tainted.clone()), later), None);
        // The known fields of the toleration still count.
        for (key, effect) in [("j", ""), ("k", "NoExecute")] {
            let matches = json!({"key": key, "operator": "Matches", "effect": effect});
            let spec = json!({"tolerations": [matches]});
            assert!(refused(node(tainted.clone()), spec).is_some());
        }
        let term = |expressions: &str, key: &str, operator: &str| {
            let it = json!({"key": key, "operator": operator, "values": ["b"]});
            requires(json!([{expressions: [it]}]))
        };
        for spec in [
            term("matchExpressions", "zone", "Matches"),
            term("matchFields", "metadata.name", "Matches"),
            term("matchFields", "metadata.uid", "In"),
        ] {
            assert_eq!(refused(node(json!({})), spec.clone()), None, "{spec}");
        }
    }

    #[test]
    fn taints_and_cordons_bar_those_who_do_not_tolerate_them() {
        let taint =
            |effect: &str| json!({"taints": [{"key": "k", "value": "v", "effect": effect}]});
        let tolerates = |toleration: Value| json!({"tolerations": [toleration]});
        let soft = refused(node(taint("PreferNoSchedule")), json!({}));
        assert_eq!(soft, None);
        for effect in ["NoSchedule", "NoExecute"] {
            let none = refused(node(taint(effect)), json!({}));
            assert_eq!(
                none,
                Some("node has a taint that the pod does not tolerate")
            );
            let good = [
                json!({"operator": "Exists"}),
                json!({"key": "k", "operator": "Exists", "effect": effect}),
                json!({"key": "k", "value": "v"}),
                json!({"key": "k", "operator": "Equal", "value": "v"}),
            ];
            for toleration in good {
                let spec = tolerates(toleration);
                assert_eq!(refused(node(taint(effect)), spec.clone()), None, "{spec}");
            }
            let bad = [
                json!({"key": "k", "value": "w"}),
                json!({"key": "j", "operator": "Exists"}),
                json!({"key": "k", "operator": "Exists", "effect": "PreferNoSchedule"}),
            ];
            for toleration in bad {
                let spec = tolerates(toleration);
                assert!(
                    refused(node(taint(effect)), spec.clone()).is_some(),
                    "{spec}"
                );
            }
        }
        let cordoned = json!({"unschedulable": true});
        let everything = tolerates(json!({"operator": "Exists"}));
        assert_eq!(
            refused(node(cordoned.clone()), json!({})),
            Some("node is cordoned")
        );
        assert_eq!(refused(node(cordoned), everything), None);
    }
}
