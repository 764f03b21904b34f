//! An agent's token: what the admission policy and RBAC let it write, and nothing else.

use anyhow::{Result, bail, ensure};
use gpustow_api::gpunode::GpuNode;
use gpustow_api::names;
use gpustow_testkit::{Case, ControlPlane, client, eventually};
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};

use crate::support::{SOON, rig};

/// Waits until the agents' policy is in force.
pub(crate) async fn policy_holds(cluster: &ControlPlane) -> Result<()> {
    let client = unbound_client(cluster).await?;
    eventually(SOON, "the agents' policy is in force", async || {
        let nodes = Api::<GpuNode>::all(client.clone());
        let dry = PatchParams::apply(names::AGENT).dry_run();
        let node = GpuNode::new("probe", Default::default());
        match nodes.patch("probe", &dry, &Patch::Apply(&node)).await {
            Err(kube::Error::Api(status)) if status.message.contains("not bound to a node") => {
                Ok(())
            }
            other => bail!("{other:?}"),
        }
    })
    .await
}

/// A client with the token that the kubelet of this node gives to its agent.
pub(crate) async fn agent_client(cluster: &ControlPlane, node: &str) -> Result<Client> {
    client(&cluster.agent_kubeconfig(node).await?).await
}

/// A client with a token of an agent's that names no node.
async fn unbound_client(cluster: &ControlPlane) -> Result<Client> {
    let kubeconfig = cluster.kubeconfig(names::NAMESPACE, names::AGENT, None);
    client(&kubeconfig.await?).await
}

/// One agent's token against everything that is another's.
#[tokio::test]
async fn an_agent_may_write_what_is_its_nodes_and_nothing_else() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "token").await?;
    policy_holds(rig.cluster).await?;
    let (mine, other) = (case.node("a", &[8000]), case.node("b", &[8000]));
    for node in [&mine, &other] {
        node.create(&case.client).await?;
    }
    let (mine, other) = (case.node_name("a"), case.node_name("b"));
    let pod = |name: &str, node: &str| {
        let node = node.to_owned();
        case.pod(name).with(move |spec| spec.node_name = Some(node))
    };
    pod("pod-a", &mine).create(&case.client).await?;
    pod("pod-b", &other).create(&case.client).await?;
    let client = agent_client(rig.cluster, &mine).await?;

    let pods = format!("/api/v1/namespaces/{}/pods", case.namespace);
    let events = format!(
        "/apis/events.k8s.io/v1/namespaces/{}/events",
        case.namespace
    );
    let gpunodes = format!("/apis/{}/{}/gpunodes", names::GROUP, names::VERSION);
    let label = |key: &str| json!({ "metadata": { "labels": { key: "x" } } });
    let note = |key: &str| json!({ "metadata": { "annotations": { key: "x" } } });
    let amount = |list: &str, key: &str| json!({ "status": { list: { key: "5" } } });
    let report = json!({ "status": { "driver": "1" } });
    let patches = [
        // path, patch, allowed
        (format!("{gpunodes}/{mine}/status"), report.clone(), true),
        (format!("{gpunodes}/{mine}"), label("a"), true),
        (format!("{gpunodes}/{other}/status"), report, false),
        (format!("{gpunodes}/{other}"), label("a"), false),
        (
            format!("/api/v1/nodes/{mine}/status"),
            amount("capacity", names::GPU_MEM),
            true,
        ),
        (
            format!("/api/v1/nodes/{mine}/status"),
            label(names::GPU_MODEL_LABEL),
            true,
        ),
        (
            format!("/api/v1/nodes/{other}/status"),
            amount("capacity", names::GPU_MEM),
            false,
        ),
        (
            format!("/api/v1/nodes/{other}/status"),
            label(names::GPU_MODEL_LABEL),
            false,
        ),
        (
            format!("/api/v1/nodes/{mine}/status"),
            amount("capacity", "cpu"),
            false,
        ),
        (
            format!("/api/v1/nodes/{mine}/status"),
            amount("capacity", names::NVIDIA_GPU),
            false,
        ),
        (
            format!("/api/v1/nodes/{mine}/status"),
            amount("allocatable", names::GPU_MEM),
            false,
        ),
        (
            format!("/api/v1/nodes/{mine}/status"),
            json!({ "status": { "conditions": [] } }),
            false,
        ),
        (
            format!("/api/v1/nodes/{mine}/status"),
            json!({ "status": { "phase": "Pending" } }),
            false,
        ),
        (
            format!("/api/v1/nodes/{mine}/status"),
            label("node-role.kubernetes.io/x"),
            false,
        ),
        (format!("/api/v1/nodes/{mine}/status"), note("a"), false),
        (
            format!("/api/v1/nodes/{mine}"),
            label(names::GPU_MODEL_LABEL),
            false,
        ),
        (
            format!("/api/v1/nodes/{mine}"),
            json!({ "spec": { "unschedulable": true } }),
            false,
        ),
        (format!("{pods}/pod-a/status"), note(names::CONFIRMED), true),
        (
            format!("{pods}/pod-b/status"),
            note(names::CONFIRMED),
            false,
        ),
        (format!("{pods}/pod-a/status"), note("a"), false),
        (
            format!("{pods}/pod-a/status"),
            note(names::ASSIGNMENT),
            false,
        ),
        (format!("{pods}/pod-a/status"), label("a"), false),
        (
            format!("{pods}/pod-a/status"),
            json!({ "status": { "phase": "Failed" } }),
            false,
        ),
        (format!("{pods}/pod-a"), label("a"), false),
    ];
    for (path, patch, allowed) in patches {
        let answer = send(&client, "PATCH", &path, &patch).await?;
        ensure!(answer.is_none() == allowed, "{path} {patch}: {answer:?}");
    }
    let event = |instance: &str, kind: &str| {
        json!({
            "apiVersion": "events.k8s.io/v1", "kind": "Event",
            "metadata": { "generateName": "e-", "namespace": case.namespace },
            "eventTime": "2026-01-01T00:00:00.000000Z", "type": "Warning",
            "reason": "R", "action": "A", "note": "n",
            "reportingController": names::AGENT, "reportingInstance": instance,
            "regarding": { "kind": kind, "name": "pod-a", "namespace": case.namespace },
        })
    };
    let secret = json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "s" } });
    let gpunode = |name: &str| {
        json!({ "apiVersion": format!("{}/{}", names::GROUP, names::VERSION), "kind": "GpuNode",
                "metadata": { "name": name }, "spec": {} })
    };
    let others = [
        ("POST", events.clone(), event(&mine, "Pod"), true),
        ("POST", events.clone(), event(&other, "Pod"), false),
        ("POST", events, event(&mine, "Secret"), false),
        ("POST", gpunodes.clone(), gpunode("another"), false),
        (
            "POST",
            pods.clone(),
            json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "x" } }),
            false,
        ),
        (
            "POST",
            format!("/api/v1/namespaces/{}/secrets", case.namespace),
            secret,
            false,
        ),
        (
            "GET",
            format!("/api/v1/namespaces/{}/secrets", case.namespace),
            Value::Null,
            false,
        ),
        ("DELETE", format!("{pods}/pod-a"), Value::Null, false),
        (
            "DELETE",
            format!("/api/v1/nodes/{mine}"),
            Value::Null,
            false,
        ),
        ("DELETE", format!("{gpunodes}/{mine}"), Value::Null, false),
        ("GET", pods.clone(), Value::Null, true),
        ("GET", format!("{gpunodes}/{mine}"), Value::Null, true),
    ];
    for (verb, path, body, allowed) in others {
        let answer = send(&client, verb, &path, &body).await?;
        ensure!(answer.is_none() == allowed, "{verb} {path}: {answer:?}");
    }
    let unbound = unbound_client(rig.cluster).await?;
    let path = format!("{gpunodes}/{mine}/status");
    let answer = send(
        &unbound,
        "PATCH",
        &path,
        &json!({ "status": { "driver": "2" } }),
    )
    .await?;
    ensure!(answer.is_some_and(|answer| answer.contains("not bound to a node")));
    // Bound by hand, without an assignment: nothing to check.
    for name in ["pod-a", "pod-b"] {
        case.pods().delete(name, &Default::default()).await?;
    }
    rig.end(case).await
}

/// Sends a request without effect; what the API server answers if it refuses.
async fn send(client: &Client, verb: &str, path: &str, body: &Value) -> Result<Option<String>> {
    let merge = verb == "PATCH";
    let kind = if merge {
        "application/merge-patch+json"
    } else {
        "application/json"
    };
    let dry = if verb == "GET" { "" } else { "?dryRun=All" };
    let body = if body.is_null() {
        Vec::new()
    } else {
        body.to_string().into_bytes()
    };
    let request = kube::api::Request::new(path).list(&Default::default())?;
    let (mut parts, _) = request.into_parts();
    parts.method = verb.parse()?;
    parts.uri = format!("{path}{dry}").parse()?;
    parts.headers.insert("content-type", kind.parse()?);
    let request = axum::http::Request::from_parts(parts, body);
    match client.request_text(request).await {
        Ok(_) => Ok(None),
        Err(kube::Error::Api(status)) => Ok(Some(status.message)),
        Err(error) => Err(error.into()),
    }
}
