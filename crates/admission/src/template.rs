//! The pods that a Deployment, a Job or another object would make. Its author is warned of the reasons to refuse them:
//! only a controller sees those refusals.

use gpustow_api::BadRequest;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

use crate::{Act, Ask, Cluster, admit, auto};

/// Where objects have the template of their pods, and how people write that.
const TEMPLATES: [(&str, &str); 2] = [
    (
        "/spec/jobTemplate/spec/template",
        "spec.jobTemplate.spec.template",
    ),
    ("/spec/template", "spec.template"),
];

/// The warnings for the author of the object.
#[must_use]
pub fn warnings(object: &Value, cluster: Cluster<'_>, namespace: &ObjectMeta) -> Vec<String> {
    let found = TEMPLATES
        .iter()
        .find_map(|(path, at)| Some((object.pointer(path)?, at)));
    let Some((template, at)) = found else {
        return Vec::new();
    };
    let mut pod = json!({ "metadata": template["metadata"], "spec": template["spec"] });
    if pod["metadata"].is_null() {
        pod["metadata"] = json!({});
    }
    // Its amount is known when a pod is created.
    if auto::wants(&pod, cluster.resource) {
        return Vec::new();
    }
    let ask = Ask {
        pod: &pod,
        act: Act::Create,
        user: "",
    };
    let said = match admit(ask, cluster, namespace, None) {
        Ok(admitted) => admitted.warnings,
        Err(BadRequest { field, problem }) => vec![format!("{field}: {problem}")],
    };
    let said = said.into_iter();
    said.map(
        |it| match it.starts_with("spec.") || it.starts_with("metadata.") {
            true => format!("{at}.{it}"),
            false => it,
        },
    )
    .collect()
}
