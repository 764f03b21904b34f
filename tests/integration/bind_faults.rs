//! What goes wrong with a Binding and is not the pod's fault.

use anyhow::{Result, ensure};
use gpustow_testkit::{Case, eventually, wait_bound};
use kube::ResourceExt as _;
use kube::api::Request;
use serde_json::{Value, json};

use crate::fault_rig::{Replica, turn};
use crate::support::{SOON, node_of};

const CARD: u64 = 8192;

#[tokio::test]
async fn a_node_to_which_a_policy_refuses_bindings_keeps_no_pod_from_others() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "policy", &[]).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "policy").await?;
    for name in ["a", "b"] {
        case.node(name, &[CARD]).create(&case.client).await?;
    }
    let (a, b) = (case.node_name("a"), case.node_name("b"));
    let name = format!("no-bindings-to-{a}");
    let policy = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
        "metadata": { "name": name },
        "spec": {
            "matchConstraints": { "resourceRules": [{
                "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"],
                "resources": ["pods/binding"],
            }] },
            "validations": [{ "expression": format!("object.target.name != '{a}'") }],
        },
    });
    turn.cluster.apply(&policy.to_string()).await?;
    let binding = json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": { "name": name },
        "spec": { "policyName": name, "validationActions": ["Deny"] },
    });
    turn.cluster.apply(&binding.to_string()).await?;
    let probe = case.pod("probe").scheduler("nobody");
    let probe = probe.create(&case.client).await?;
    eventually(SOON, "the policy is in force", async || {
        let path = format!(
            "/api/v1/namespaces/{}/pods/{}/binding",
            case.namespace,
            probe.name_any()
        );
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding",
            "metadata": { "name": probe.name_any() },
            "target": { "kind": "Node", "name": a },
        });
        let params = kube::api::PostParams {
            dry_run: true,
            ..Default::default()
        };
        let post = Request::new(path).create(&params, binding.to_string().into_bytes())?;
        let answer = case.client.request::<Value>(post).await;
        ensure!(answer.is_err(), "a Binding is let through");
        Ok(())
    })
    .await?;

    let pod = case.pod("p").gpu_mem(CARD).create(&case.client).await?;
    let pod = wait_bound(&case.client, &pod, SOON).await?;
    assert_eq!(node_of(&pod), b);

    for kind in [
        "validatingadmissionpolicybinding",
        "validatingadmissionpolicy",
    ] {
        turn.cluster.kubectl(&["delete", kind, &name]).await?;
    }
    replica.settled(&case).await?;
    case.end().await
}
