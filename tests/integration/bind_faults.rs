//! Faults of a Binding that are not the pod's fault.

use anyhow::{Result, ensure};
use gpustow_testkit::builders::delete;
use gpustow_testkit::{Action, Case, eventually, wait_bound, wait_gone};
use kube::ResourceExt as _;
use kube::api::Request;
use serde_json::{Value, json};

use crate::fault_rig::{Replica, control_plane, now, turn};
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
    let probe = case.pod("probe").scheduler("none");
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

/// The pod is read back because the reply to its Binding was lost; that answer comes after the pod
/// has gone.
#[tokio::test]
async fn a_pod_that_is_read_back_after_its_end_holds_nothing() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "late", &[]).await?;
    let case = Case::new(turn.cluster, "late").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    let n = case.node_name("n");
    let pod = case.pod("p").gpu_mem(CARD).create(&case.client).await?;
    replica.until_fits(&pod, &n).await?;
    let path = format!("/api/v1/namespaces/{}/pods/p", case.namespace);
    let get = replica.proxy.rule(
        move |method, uri| method.as_str() == "GET" && uri.path() == path,
        Action::HoldReply,
    );
    let post = replica.on_first_bind(&pod, Action::DropReply)?;
    let meanwhile = async {
        post.answered(1, SOON).await?;
        get.answered(1, SOON).await?;
        delete(&case.client, &pod, 0).await?;
        wait_gone(&case.client, &pod, SOON).await?;
        replica.settled(&case).await?;
        get.release();
        anyhow::Ok(())
    };
    let (_, meanwhile) = tokio::join!(replica.bind(&pod, &n), meanwhile);
    meanwhile?;
    replica.settled(&case).await?;
    let next = case.pod("next").gpu_mem(CARD).create(&case.client).await?;
    replica.place(&next, &n).await?;
    case.end().await
}

/// etcd is put back under a running extender, so that a pod which it has seen bound is not.
#[tokio::test]
async fn no_answer_says_of_a_pod_that_it_is_bound_when_the_api_server_was_restored() -> Result<()> {
    let cluster = control_plane().await?;
    let replica = Replica::start(&cluster, "restored", &[]).await?;
    let case = Case::new(&cluster, "restored").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    let n = case.node_name("n");
    let pod = case.pod("p").gpu_mem(CARD).create(&case.client).await?;
    replica.until_fits(&pod, &n).await?;
    let snapshot = cluster.snapshot().await?;
    let place = async || replica.place(&pod, &n).await;
    eventually(4 * SOON, "the pod is bound", place).await?;
    replica.settled(&case).await?;

    cluster.restore(&snapshot).await?;
    eventually(4 * SOON, "the pod is not bound any more", async || {
        ensure!(node_of(&now(&case, &pod).await?).is_empty(), "bound");
        Ok(())
    })
    .await?;
    // As a kube-scheduler asks that has restarted.
    eventually(4 * SOON, "the pod is bound once more", place).await?;
    assert_eq!(node_of(&now(&case, &pod).await?), n);
    replica.settled(&case).await?;
    case.end().await
}
