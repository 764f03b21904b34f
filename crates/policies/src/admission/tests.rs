use std::convert::Infallible;
use std::future::ready;

use serde::Deserialize as _;
use serde_json::json;

use super::*;
use gpustow_api::version::VERSION;

use crate::manifests::generated;

/// The policy and its binding as the API server keeps them.
fn kept(name: &str) -> (Value, Value) {
    let Expected(all) = Expected::new(names::GPU_MEM);
    let (_, mut policy, binding) = all.into_iter().find(|it| it.0 == name).unwrap();
    let matches = &mut policy["matchConstraints"];
    matches["matchPolicy"] = json!("Equivalent");
    matches["namespaceSelector"] = json!({});
    matches["objectSelector"] = json!({});
    for rule in matches["resourceRules"].as_array_mut().unwrap() {
        rule["scope"] = json!("*");
    }
    (policy, binding)
}

/// All objects of the generated files.
fn objects() -> Vec<Value> {
    let files = generated(names::GPU_MEM).unwrap();
    let texts = files.iter().filter(|(path, _)| path.ends_with(".yaml"));
    // The parser never ends after text that is not a document.
    let documents = |text| {
        let documents = serde_yaml::Deserializer::from_str(text);
        documents.map_while(|it| Value::deserialize(it).ok())
    };
    texts.flat_map(|(_, text)| documents(text)).collect()
}

async fn told(policy: Option<Value>, version: &str, binding: Option<Value>) -> Option<String> {
    let object = |spec: Value| json!({ "metadata": { "annotations": { names::MADE_FOR: version } }, "spec": spec });
    let policy = policy.map(|spec| serde_json::from_value(object(spec)).unwrap());
    let binding = binding.map(|spec| serde_json::from_value(object(spec)).unwrap());
    let found = (policy, binding);
    let looked = Expected::new(names::GPU_MEM)
        .look(|_| ready(Ok::<_, Infallible>(found.clone())))
        .await;
    let (_, Ok(weak)) = looked
        .into_iter()
        .find(|it| it.0 == "gpustow-annotations")
        .unwrap();
    weak.map(|weak| weak.to_string())
}

#[tokio::test]
async fn every_policy_of_ours_is_generated_and_holds_as_the_api_server_keeps_it() {
    let Expected(all) = Expected::new(names::GPU_MEM);
    assert_eq!(all.len(), POLICIES.len());
    let (policy, binding) = kept("gpustow-annotations");
    assert_eq!(told(Some(policy), VERSION, Some(binding)).await, None);
}

#[test]
fn what_is_expected_is_what_is_generated() {
    let certificate = Expected::of_certificate(names::GPU_MEM);
    let line = Expected::of_queue(names::GPU_MEM);
    let all = Expected::new(names::GPU_MEM).and(certificate).and(line);
    assert_eq!(all.0.len(), POLICIES.len() + 2);
    let objects = objects();
    for (name, policy, binding) in all.0 {
        let of_kind = |kind: &str| {
            let is = |it: &&Value| it["kind"] == kind && it["metadata"]["name"] == name;
            objects.iter().find(is).map(|it| &it["spec"])
        };
        assert_eq!(of_kind("ValidatingAdmissionPolicy"), Some(&policy));
        assert_eq!(of_kind("ValidatingAdmissionPolicyBinding"), Some(&binding));
    }
}

#[tokio::test]
async fn a_policy_that_holds_less_is_told_and_a_later_one_is_not_open() {
    let (policy, binding) = kept("gpustow-annotations");
    let with = |path: &str, value: Value| {
        let mut changed = policy.clone();
        *changed.pointer_mut(path).unwrap() = value;
        changed
    };
    let bound = |key: &str, value: Value| {
        let mut changed = binding.clone();
        changed[key] = value;
        Some(changed)
    };
    let as_is = || Some(policy.clone());
    let at = |name: &str| {
        policy["variables"]
            .as_array()
            .unwrap()
            .iter()
            .position(|it| it["name"] == name)
            .unwrap()
    };
    let expression = |name: &str| format!("/variables/{}/expression", at(name));
    let rewritten = with("/validations/1/expression", json!("true"));
    let mut ignores = policy.clone();
    ignores["failurePolicy"] = json!("Ignore");
    let mut gutted = policy.clone();
    gutted["validations"].as_array_mut().unwrap().pop();
    let mut more = policy.clone();
    more["matchConstraints"]["excludeResourceRules"] = json!([{ "resources": ["pods"] }]);
    let narrow = json!({ "objectSelector": { "matchLabels": { "a": "b" } } });
    let differs = |path: &str| Some(format!("differs from this build: {path}"));
    for (policy, version, binding, expected) in [
        (None, VERSION, Some(binding.clone()), Some("is missing".to_owned())),
        (as_is(), VERSION, None, Some("has no binding".to_owned())),
        (as_is(), VERSION, bound("validationActions", json!(["Warn", "Audit"])), Some("does not deny: its binding differs".to_owned())),
        (as_is(), VERSION, bound("policyName", json!("another")), Some("does not deny: its binding differs".to_owned())),
        (as_is(), VERSION, bound("matchResources", narrow), Some("is narrowed by its binding".to_owned())),
        (Some(ignores), VERSION, Some(binding.clone()), Some("passes pods that it cannot judge: failurePolicy is Ignore".to_owned())),
        (Some(gutted), VERSION, Some(binding.clone()), differs("spec.validations")),
        (Some(more), VERSION, Some(binding.clone()), differs("spec.matchConstraints.excludeResourceRules")),
        (Some(rewritten.clone()), VERSION, Some(binding.clone()), differs("spec.validations[1].expression")),
        (Some(with(&expression("guarded"), json!("[]"))), VERSION, Some(binding.clone()), differs("spec.variables[guarded].expression")),
        // An administrator's.
        (Some(with(&expression("extenders"), json!(r#"["system:serviceaccount:mine:mine"]"#))), VERSION, Some(binding.clone()), None),
        (Some(rewritten.clone()), "9999.0.0", Some(binding.clone()), Some("is that of version 9999.0.0, later than this build: spec.validations[1].expression".to_owned())),
        (Some(rewritten), "0.0.1-rc.9999", Some(binding.clone()), differs("spec.validations[1].expression")),
    ] {
        assert_eq!(told(policy, version, binding).await, expected);
    }
    assert!(!Weakness::Newer(String::new(), String::new()).is_open());
    assert!(Weakness::Differs(String::new()).is_open());
}
