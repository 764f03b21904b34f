//! Does a policy of ours hold what it promises? It looks at one policy and its binding, as they are in
//! the cluster. It does not know who asks, nor what a policy holds.

use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
    ValidatingAdmissionPolicySpec as Spec,
};
use serde::Deserialize as _;

use crate::manifests::generated;

/// The policies that keep tenants and our own parts in bounds; each has a binding of its name.
pub const POLICIES: [&str; 5] = [
    "gpustow-agent",
    "gpustow-annotations",
    "gpustow-extender",
    "gpustow-least",
    "gpustow-requests",
];

/// What is wrong with the policy `name` or its binding, if anything, where pods ask for `resource`.
#[must_use]
pub fn weakness(
    name: &str,
    resource: &str,
    policy: Option<&ValidatingAdmissionPolicy>,
    binding: Option<&ValidatingAdmissionPolicyBinding>,
) -> Option<&'static str> {
    let Some(is) = policy.and_then(|policy| policy.spec.as_ref()) else {
        return Some("is missing");
    };
    let Some(bound) = binding.and_then(|binding| binding.spec.as_ref()) else {
        return Some("has no binding");
    };
    let denies = bound.validation_actions.iter().flatten();
    if bound.policy_name.as_deref() != Some(name) || !denies.into_iter().any(|it| it == "Deny") {
        return Some("does not deny: its binding says otherwise");
    }
    if bound.match_resources.is_some() {
        return Some("is narrowed by its binding");
    }
    if is.failure_policy.as_deref() == Some("Ignore") {
        return Some("lets pass what it cannot judge: failurePolicy is Ignore");
    }
    let should = generated_policy(name, resource).and_then(|policy| policy.spec)?;
    let count = |spec: &Spec| spec.validations.as_ref().map_or(0, Vec::len);
    (count(is) < count(&should)).then_some("has fewer rules than that of this version")
}

/// The policy as this version's manifests have it.
fn generated_policy(name: &str, resource: &str) -> Option<ValidatingAdmissionPolicy> {
    let files = generated(resource).ok()?;
    let texts = files.iter().map(|(_, text)| text.as_str());
    let documents = texts.flat_map(serde_yaml::Deserializer::from_str);
    let objects = documents.filter_map(|it| serde_json::Value::deserialize(it).ok());
    objects
        .filter(|object| object["kind"] == "ValidatingAdmissionPolicy")
        .find(|object| object["metadata"]["name"] == name)
        .and_then(|object| serde_json::from_value(object).ok())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::names;

    fn binding(spec: Value) -> ValidatingAdmissionPolicyBinding {
        serde_json::from_value(json!({ "spec": spec })).unwrap()
    }

    #[test]
    fn every_policy_of_ours_is_generated_and_holds_as_it_is() {
        for name in POLICIES {
            let policy = generated_policy(name, names::GPU_MEM);
            assert!(policy.is_some(), "{name}");
            let denies = json!({ "policyName": name, "validationActions": ["Deny"] });
            let bound = binding(denies);
            let weak = weakness(name, names::GPU_MEM, policy.as_ref(), Some(&bound));
            assert_eq!(weak, None, "{name}");
        }
    }

    #[test]
    fn a_policy_that_holds_less_is_told() {
        let name = "gpustow-annotations";
        let policy = generated_policy(name, names::GPU_MEM).unwrap();
        let denies = || json!({ "policyName": name, "validationActions": ["Deny"] });
        let tell = |policy: Option<&ValidatingAdmissionPolicy>, spec: Option<Value>| {
            weakness(name, names::GPU_MEM, policy, spec.map(binding).as_ref())
        };
        assert_eq!(tell(None, Some(denies())), Some("is missing"));
        assert_eq!(tell(Some(&policy), None), Some("has no binding"));
        let warns = json!({ "policyName": name, "validationActions": ["Warn", "Audit"] });
        let not = Some("does not deny: its binding says otherwise");
        assert_eq!(tell(Some(&policy), Some(warns)), not);
        let mut narrow = denies();
        narrow["matchResources"] = json!({ "objectSelector": { "matchLabels": { "a": "b" } } });
        assert_eq!(
            tell(Some(&policy), Some(narrow)),
            Some("is narrowed by its binding")
        );
        let mut ignores = policy.clone();
        ignores.spec.as_mut().unwrap().failure_policy = Some("Ignore".to_owned());
        let lets_pass = Some("lets pass what it cannot judge: failurePolicy is Ignore");
        assert_eq!(tell(Some(&ignores), Some(denies())), lets_pass);
        let mut gutted = policy.clone();
        gutted
            .spec
            .as_mut()
            .unwrap()
            .validations
            .as_mut()
            .unwrap()
            .pop();
        let other = Some("has fewer rules than that of this version");
        assert_eq!(tell(Some(&gutted), Some(denies())), other);
    }
}
