//! Disruption budgets.

use std::sync::Arc;

use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::core::ObjectMeta;

use crate::PodFacts;
use crate::selector::Selector;

/// The facts of a disruption budget.
#[derive(Clone, Debug)]
pub struct DisruptionBudget {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
    /// So many more of its pods may end now.
    pub allowed: i32,
    /// The selector of the covered pods; a budget without a selector does not cover any pod.
    selector: Option<Selector>,
}

impl DisruptionBudget {
    /// The facts of `object`.
    #[must_use]
    pub fn of(object: &PodDisruptionBudget) -> Self {
        let selector = object.spec.as_ref().and_then(|spec| spec.selector.as_ref());
        Self {
            allowed: object
                .status
                .as_ref()
                .map_or(0, |it| it.disruptions_allowed),
            selector: selector.map(Selector::of),
            ..Self::unreadable(&object.metadata)
        }
    }

    /// One that cannot be read: it protects every pod of its namespace.
    #[must_use]
    pub fn unreadable(meta: &ObjectMeta) -> Self {
        let text = |it: &Option<String>| it.as_deref().unwrap_or_default().into();
        Self {
            namespace: text(&meta.namespace),
            name: text(&meta.name),
            allowed: 0,
            selector: Some(Selector::default()),
        }
    }

    /// Does the budget cover the pod, which is in the budget's namespace?
    #[must_use]
    pub fn covers(&self, pod: &PodFacts) -> bool {
        let selector = self.selector.as_ref();
        !pod.labels.is_empty() && selector.is_some_and(|it| it.selects(&pod.labels))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::intree::Label;

    fn pod(labels: &[(&str, &str)]) -> PodFacts {
        let labels = labels.iter().map(|(key, value)| Label::new(key, value));
        PodFacts {
            labels: labels.collect(),
            ..PodFacts::new("default", "p", "p")
        }
    }

    fn covers(selector: &Value, labels: &[(&str, &str)]) -> bool {
        let status = json!({ "disruptionsAllowed": 0, "currentHealthy": 0, "desiredHealthy": 0, "expectedPods": 0 });
        let budget = json!({ "spec": { "selector": selector }, "status": status });
        let budget = DisruptionBudget::of(&serde_json::from_value(budget).expect("a budget"));
        budget.covers(&pod(labels))
    }

    #[test]
    fn budget_that_cannot_be_read_protects_all_pods_with_labels() {
        let budget = DisruptionBudget::unreadable(&ObjectMeta::default());
        assert!(budget.covers(&pod(&[("app", "a")])) && budget.allowed == 0);
    }

    #[test]
    fn selector_decides_which_pods_a_budget_covers() {
        let labels = [("app", "a"), ("tier", "web")];
        let expression = |key: &str, operator: &str, values: &[&str]| {
            let it = json!({ "key": key, "operator": operator, "values": values });
            json!({ "matchExpressions": [it] })
        };
        for (selector, expected) in [
            (json!({ "matchLabels": { "app": "a" } }), true),
            (
                json!({ "matchLabels": { "app": "a", "tier": "db" } }),
                false,
            ),
            (expression("app", "In", &["a", "b"]), true),
            (expression("app", "NotIn", &["a"]), false),
            (expression("zone", "NotIn", &["a"]), true),
            (expression("tier", "Exists", &[]), true),
            (expression("app", "DoesNotExist", &[]), false),
            (json!({}), true),
            (Value::Null, false),
        ] {
            assert_eq!(covers(&selector, &labels), expected, "{selector}");
        }
        // The API server finds no budget for a pod without labels.
        assert!(!covers(&json!({}), &[]));
    }
}
