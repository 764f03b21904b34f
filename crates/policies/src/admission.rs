//! Compares our policies and their bindings in the cluster with the ones that this build would generate. The module
//! knows neither the caller nor the purpose of a policy.

use std::future::Future;

use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use serde::Serialize;
use serde_json::Value;
use thiserror::Error;

use gpustow_api::names;
use gpustow_api::version::is_later;

use crate::manifests::documents;

/// The policies that keep tenants and our own parts in bounds; each has a binding of its name.
const POLICIES: [&str; 5] = [
    "gpustow-admitted",
    "gpustow-agent",
    "gpustow-annotations",
    "gpustow-extender",
    "gpustow-placeholders",
];

/// A variable whose list an administrator may change: docs/own-scheduler.md describes the purpose.
const OPEN: [&str; 1] = ["extenders"];

/// Fields that the API server writes where a manifest leaves them out.
const DEFAULTS: [(&str, &str); 5] = [
    ("failurePolicy", r#""Fail""#),
    ("matchPolicy", r#""Equivalent""#),
    ("namespaceSelector", "{}"),
    ("objectSelector", "{}"),
    ("scope", r#""*""#),
];

/// The weakness of a policy.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Weakness {
    /// It was not applied.
    #[error("is missing")]
    Missing,
    /// It judges nothing.
    #[error("has no binding")]
    Unbound,
    /// It only warns.
    #[error("does not deny: its binding differs")]
    Toothless,
    /// It judges some requests only.
    #[error("is narrowed by its binding")]
    Narrowed,
    /// It passes objects that it fails to evaluate.
    #[error("passes pods that it cannot judge: failurePolicy is Ignore")]
    Ignores,
    /// It is another policy than this build's; the field that shows it.
    #[error("differs from this build: {0}")]
    Differs(String),
    /// It is a later version's, and may hold more; that version, and the field.
    #[error("is that of version {0}, later than this build: {1}")]
    Newer(String, String),
}

impl Weakness {
    /// May it let something pass that this build counts on?
    #[must_use]
    pub fn is_open(&self) -> bool {
        !matches!(self, Self::Newer(..))
    }
}

/// A policy and its binding as they are in the cluster, if they are.
pub type Found = (
    Option<ValidatingAdmissionPolicy>,
    Option<ValidatingAdmissionPolicyBinding>,
);

/// The policies that this build would generate, and their bindings.
#[derive(Debug)]
pub struct Expected(Vec<(&'static str, Value, Value)>);

impl Expected {
    /// Where pods ask for `resource`; nothing is expected for a name that no pod could ask for.
    #[must_use]
    pub fn new(resource: &str) -> Expected {
        Expected::of(resource, &POLICIES)
    }

    /// The policy for an extender that writes its webhook's certificate, alone.
    #[must_use]
    pub fn of_certificate(resource: &str) -> Expected {
        Expected::of(resource, &[names::WEBHOOK])
    }

    /// The policy that keeps gates on pods in the queue, alone.
    #[must_use]
    pub fn of_queue(resource: &str) -> Expected {
        Expected::of(resource, &[names::QUEUE])
    }

    /// These and others.
    #[must_use]
    pub fn and(mut self, others: Expected) -> Expected {
        self.0.extend(others.0);
        self
    }

    fn of(resource: &str, policies: &[&'static str]) -> Expected {
        let documents = documents(resource, policies);
        let objects: Vec<Value> = documents
            .iter()
            .filter_map(|text| serde_yaml::from_str(text).ok())
            .collect();
        let spec = |kind: &str, name: &str| {
            let is = |it: &&Value| it["kind"] == kind && it["metadata"]["name"] == name;
            Some(objects.iter().find(is)?["spec"].clone())
        };
        let expected = policies.iter().filter_map(|&name| {
            let policy = spec("ValidatingAdmissionPolicy", name)?;
            Some((
                name,
                policy,
                spec("ValidatingAdmissionPolicyBinding", name)?,
            ))
        });
        Expected(expected.collect())
    }

    /// Reads each policy by `read`. Returns its weakness, if it has one, or why it could not be read.
    pub async fn look<E, F>(
        &self,
        read: impl Fn(&'static str) -> F,
    ) -> Vec<(&'static str, Result<Option<Weakness>, E>)>
    where
        F: Future<Output = Result<Found, E>>,
    {
        let mut looked = Vec::new();
        for (name, policy, binding) in &self.0 {
            let found = read(name).await;
            looked.push((*name, found.map(|found| weakness(policy, binding, &found))));
        }
        looked
    }
}

fn weakness(policy: &Value, binding: &Value, found: &Found) -> Option<Weakness> {
    let Some((is, spec)) = found
        .0
        .as_ref()
        .and_then(|it| Some((it, it.spec.as_ref()?)))
    else {
        return Some(Weakness::Missing);
    };
    let Some(bound) = found.1.as_ref().and_then(|it| it.spec.as_ref()) else {
        return Some(Weakness::Unbound);
    };
    let mut actions = bound.validation_actions.iter().flatten();
    if binding["policyName"].as_str() != bound.policy_name.as_deref()
        || !actions.any(|it| it == "Deny")
    {
        return Some(Weakness::Toothless);
    }
    if bound.match_resources.is_some() {
        return Some(Weakness::Narrowed);
    }
    if spec.failure_policy.as_deref() == Some("Ignore") && policy["failurePolicy"] != "Ignore" {
        return Some(Weakness::Ignores);
    }
    let differs = difference("spec", policy, &json(spec))
        .or_else(|| difference("its binding's spec", binding, &json(bound)))?;
    let version = is.metadata.annotations.as_ref();
    let version = version.and_then(|all| all.get(names::MADE_FOR));
    Some(match version.filter(|it| is_later(it)) {
        Some(version) => Weakness::Newer(version.clone(), differs),
        None => Weakness::Differs(differs),
    })
}

fn json(value: &impl Serialize) -> Value {
    serde_json::to_value(value).unwrap_or_default()
}

/// The path of the first thing in which `is` is not as it should be, but for the API server's defaults.
fn difference(path: &str, should: &Value, is: &Value) -> Option<String> {
    match (should, is) {
        (Value::Object(should), Value::Object(is)) => {
            let missing = should.iter().find_map(|(key, value)| {
                let path = format!("{path}.{key}");
                difference(&path, value, is.get(key).unwrap_or(&Value::Null))
            });
            missing.or_else(|| {
                let more = is.iter().filter(|(key, _)| !should.contains_key(*key));
                let mut strange = more.filter(|(key, value)| {
                    let text = value.to_string();
                    !value.is_null() && !DEFAULTS.contains(&(key.as_str(), &text))
                });
                strange.next().map(|(key, _)| format!("{path}.{key}"))
            })
        }
        (Value::Array(should), Value::Array(is)) => {
            let pairs = should.iter().zip(is).enumerate();
            let other = pairs
                .filter(|(_, (should, _))| !OPEN.iter().any(|name| should["name"] == **name))
                .find_map(|(index, (should, is))| {
                    let name = should["name"].as_str().map(str::to_owned);
                    let name = name.unwrap_or_else(|| index.to_string());
                    difference(&format!("{path}[{name}]"), should, is)
                });
            other.or_else(|| (should.len() != is.len()).then(|| path.to_owned()))
        }
        // YAML's readers fold lines in different ways.
        (Value::String(should), Value::String(is)) => {
            let same = should.split_whitespace().eq(is.split_whitespace());
            (!same).then(|| path.to_owned())
        }
        _ => (should != is).then(|| path.to_owned()),
    }
}

#[cfg(test)]
mod tests;
