//! Pods to which another policy adds a container.

use anyhow::{Result, ensure};
use gpustow_testkit::eventually;
use serde_json::{Value, json};

use crate::install::{installed, try_create};
use crate::policies::{asks, devices, path_of, pod};
use crate::support::SOON;

/// Adds a container to pods with a label.
fn injecting(name: &str) -> Value {
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingAdmissionPolicy",
        "metadata": { "name": name },
        "spec": {
            "failurePolicy": "Fail",
            "reinvocationPolicy": "Never",
            "matchConstraints": {
                "objectSelector": { "matchLabels": { "injected-by": name } },
                "resourceRules": [{
                    "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"],
                }],
            },
            "mutations": [{ "patchType": "JSONPatch", "jsonPatch": { "expression":
                "object.spec.containers.exists(c, c.name == 'injected') ? [] : [JSONPatch{op: 'add', \
                 path: '/spec/containers/-', value: {'name': 'injected', 'image': 'registry.k8s.io/pause:3.10'}}]"
            } }],
        },
    })
}

/// The API server calls policies in the order of their names or in another one.
#[tokio::test]
async fn a_container_that_another_policy_adds_gets_no_devices() -> Result<()> {
    let cluster = installed().await?;
    let client = cluster.admin()?;
    for name in ["aa-injects", "zz-injects"] {
        let binding = json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingAdmissionPolicyBinding",
            "metadata": { "name": name },
            "spec": { "policyName": name },
        });
        for object in [injecting(name), binding] {
            cluster.apply(&object.to_string()).await?;
        }
        let mut pod = pod(json!({}), json!({ "containers": [asks("main", "8192")] }))?;
        pod.metadata.labels = Some([("injected-by".to_owned(), name.to_owned())].into());
        let mut made = eventually(SOON, "a container is added", async || {
            let made = try_create(&client, &pod).await?;
            ensure!(devices(&made).len() == 2, "one container alone");
            Ok(made)
        })
        .await?;
        let expected = [
            ("main".to_owned(), vec![path_of("main")]),
            ("injected".to_owned(), vec!["void".to_owned()]),
        ];
        assert_eq!(devices(&made), expected, "{name}");
        made.metadata.uid = None;
        made.metadata.managed_fields = None;
        let copy = try_create(&client, &made).await?;
        assert_eq!(copy.spec, made.spec, "{name}");
    }
    Ok(())
}
