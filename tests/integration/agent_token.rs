//! An agent's token: the writes that the admission policy and RBAC allow, and no others.

use anyhow::{Result, bail, ensure};
use gpustow_api::gpunode::GpuNode;
use gpustow_api::names;
use gpustow_testkit::{Case, ControlPlane, client, eventually};
use kube::api::{Api, Patch, PatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
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
    Ok(Client::try_from(agent_config(cluster, node).await?)?)
}

/// The configuration of such a client.
pub(crate) async fn agent_config(cluster: &ControlPlane, node: &str) -> Result<Config> {
    let kubeconfig = Kubeconfig::read_from(cluster.agent_kubeconfig(node).await?)?;
    Ok(Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?)
}

/// A client with a token of an agent's that names no node.
pub(crate) async fn unbound_client(cluster: &ControlPlane) -> Result<Client> {
    let kubeconfig = cluster.kubeconfig(names::NAMESPACE, names::AGENT, None);
    client(&kubeconfig.await?).await
}

/// Two agents' tokens, each against everything that is another's.
#[tokio::test]
async fn an_agent_may_write_what_is_its_nodes_and_nothing_else() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "token").await?;
    policy_holds(rig.cluster).await?;
    for name in ["a", "b"] {
        case.node(name, &[8000]).create(&case.client).await?;
        let node = case.node_name(name);
        let pod = case.pod(&format!("pod-{name}"));
        let pod = pod.with(move |spec| spec.node_name = Some(node));
        pod.create(&case.client).await?;
        let events = format!(
            "/apis/events.k8s.io/v1/namespaces/{}/events",
            case.namespace
        );
        let mut event = event(&case, &case.node_name(name), "Pod");
        event["metadata"] = json!({ "name": format!("event-{name}") });
        post(&case.client, &events, &event).await?;
    }
    // Of no node yet.
    let gated = case.pod("pod-c").gpu_mem(1).with(|spec| {
        let gate = json!([{ "name": "example.com/wait" }]);
        spec.scheduling_gates = serde_json::from_value(gate).ok();
    });
    gated.create(&case.client).await?;
    for (mine, other) in [("a", "b"), ("b", "a")] {
        only_its_own(rig.cluster, &case, mine, other).await?;
    }
    let mine = case.node_name("a");
    let unbound = unbound_client(rig.cluster).await?;
    let path = format!(
        "/apis/{}/{}/gpunodes/{mine}/status",
        names::GROUP,
        names::VERSION
    );
    let report = json!({ "status": { "driver": "2" } });
    let answer = send(&unbound, "PATCH", &path, &report).await?;
    ensure!(answer.is_some_and(|answer| answer.contains("not bound to a node")));
    // Bound by hand, without an assignment: nothing to check.
    for name in ["pod-a", "pod-b", "pod-c"] {
        case.pods().delete(name, &Default::default()).await?;
    }
    rig.end(case).await
}

/// An Event as the agent of node `instance` writes it.
fn event(case: &Case, instance: &str, kind: &str) -> Value {
    json!({
        "apiVersion": "events.k8s.io/v1", "kind": "Event",
        "metadata": { "generateName": "e-", "namespace": case.namespace },
        "eventTime": "2026-01-01T00:00:00.000000Z", "type": "Warning",
        "reason": "R", "action": "A", "note": "n",
        "reportingController": names::AGENT, "reportingInstance": instance,
        "regarding": { "kind": kind, "name": "pod-a", "namespace": case.namespace },
    })
}

/// With the token of the agent of node `mine`.
async fn only_its_own(cluster: &ControlPlane, case: &Case, mine: &str, other: &str) -> Result<()> {
    let (pod, others_pod) = (format!("pod-{mine}"), format!("pod-{other}"));
    let others_event = format!("event-{other}");
    let my_event = format!("event-{mine}");
    let (mine, other) = (case.node_name(mine), case.node_name(other));
    let client = agent_client(cluster, &mine).await?;

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
    let finalizer = json!({ "metadata": { "finalizers": ["example.com/x"] } });
    let patches = [
        // path, patch, allowed
        (format!("{gpunodes}/{mine}/status"), report.clone(), true),
        (format!("{gpunodes}/{mine}"), label("a"), false),
        (format!("{gpunodes}/{mine}"), note("a"), false),
        (format!("{gpunodes}/{mine}"), finalizer.clone(), false),
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
        (format!("{pods}/{pod}/status"), note(names::CONFIRMED), true),
        (
            format!("{pods}/{others_pod}/status"),
            note(names::CONFIRMED),
            false,
        ),
        (format!("{pods}/{pod}/status"), note("a"), false),
        (
            format!("{pods}/{pod}/status"),
            note(names::ASSIGNMENT),
            false,
        ),
        (format!("{pods}/{pod}/status"), label("a"), false),
        (
            format!("{pods}/{pod}/status"),
            json!({ "status": { "phase": "Failed" } }),
            false,
        ),
        (format!("{pods}/{pod}"), label("a"), false),
        (format!("{pods}/{pod}/status"), finalizer.clone(), false),
        (
            format!("{pods}/pod-c/status"),
            note(names::CONFIRMED),
            false,
        ),
        (
            format!("{pods}/{pod}/ephemeralcontainers"),
            label("a"),
            false,
        ),
        (format!("{pods}/{pod}/resize"), label("a"), false),
        (format!("/api/v1/nodes/{mine}/status"), finalizer, false),
        (
            format!("{events}/{my_event}"),
            json!({ "series": { "count": 2, "lastObservedTime": "2026-01-01T00:00:00.000000Z" } }),
            true,
        ),
        (format!("{events}/{my_event}"), note("a"), false),
        (format!("{events}/{others_event}"), note("a"), false),
        (
            format!("{events}/{others_event}"),
            json!({ "reportingInstance": mine }),
            false,
        ),
    ];
    for (path, patch, allowed) in patches {
        let answer = send(&client, "PATCH", &path, &patch).await?;
        ensure!(is(&answer, allowed), "{path} {patch}: {answer:?}");
    }
    let gpunode = |name: &str| {
        json!({ "apiVersion": format!("{}/{}", names::GROUP, names::VERSION), "kind": "GpuNode",
                "metadata": { "name": name }, "spec": {} })
    };
    let object =
        |kind: &str| json!({ "apiVersion": "v1", "kind": kind, "metadata": { "name": "x" } });
    let of_namespace = |kind: &str| format!("/api/v1/namespaces/{}/{kind}", case.namespace);
    let lease = json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": { "name": "x" },
    });
    let leases = format!(
        "/apis/coordination.k8s.io/v1/namespaces/{}/leases",
        names::NAMESPACE
    );
    let policies = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies";
    let others = [
        ("POST", events.clone(), event(case, &mine, "Pod"), true),
        ("POST", events.clone(), event(case, &other, "Pod"), false),
        ("POST", events.clone(), event(case, &mine, "Secret"), false),
        ("POST", gpunodes.clone(), gpunode("another"), false),
        ("PUT", format!("{gpunodes}/{other}"), gpunode(&other), false),
        ("PUT", format!("{gpunodes}/{mine}"), gpunode(&mine), false),
        ("POST", pods.clone(), object("Pod"), false),
        (
            "POST",
            format!("{pods}/pod-c/binding"),
            object("Binding"),
            false,
        ),
        (
            "POST",
            format!("{pods}/{pod}/eviction"),
            object("Eviction"),
            false,
        ),
        ("POST", "/api/v1/nodes".to_owned(), object("Node"), false),
        ("POST", of_namespace("secrets"), object("Secret"), false),
        ("GET", of_namespace("secrets"), Value::Null, false),
        (
            "POST",
            of_namespace("configmaps"),
            object("ConfigMap"),
            false,
        ),
        ("GET", of_namespace("configmaps"), Value::Null, false),
        ("GET", of_namespace("events"), Value::Null, false),
        ("POST", leases.clone(), lease, false),
        ("GET", leases, Value::Null, false),
        (
            "DELETE",
            format!("{policies}/{}", names::AGENT),
            Value::Null,
            false,
        ),
        (
            "GET",
            format!("/api/v1/nodes/{mine}/proxy/"),
            Value::Null,
            false,
        ),
        ("DELETE", format!("{pods}/{pod}"), Value::Null, false),
        (
            "DELETE",
            format!("/api/v1/nodes/{mine}"),
            Value::Null,
            false,
        ),
        ("DELETE", format!("{gpunodes}/{mine}"), Value::Null, false),
        ("DELETE", format!("{events}/{my_event}"), Value::Null, false),
        ("GET", gpunodes.clone(), Value::Null, false),
        ("GET", pods.clone(), Value::Null, true),
        ("GET", format!("{gpunodes}/{mine}"), Value::Null, true),
    ];
    for (verb, path, body, allowed) in others {
        let answer = send(&client, verb, &path, &body).await?;
        ensure!(is(&answer, allowed), "{verb} {path}: {answer:?}");
    }
    Ok(())
}

/// Not merely wrong in form: refused by RBAC, the policy, or as not for any client to change.
fn is(answer: &Option<String>, allowed: bool) -> bool {
    answer.as_ref().map_or(allowed, |text| {
        !allowed
            && ["forbidden", "immutable"]
                .iter()
                .any(|word| text.contains(word))
    })
}

/// Makes an object as the administrator.
pub(crate) async fn post(client: &Client, path: &str, object: &Value) -> Result<()> {
    let request = axum::http::Request::post(path).header("content-type", "application/json");
    client
        .request_text(request.body(object.to_string().into_bytes())?)
        .await?;
    Ok(())
}

/// Changes an object.
pub(crate) async fn patch(client: &Client, path: &str, change: &Value) -> Result<()> {
    let merge = "application/merge-patch+json";
    let request = axum::http::Request::patch(path).header("content-type", merge);
    client
        .request_text(request.body(change.to_string().into_bytes())?)
        .await?;
    Ok(())
}

/// Sends a request without effect. Returns the API server's message if it refuses.
pub(crate) async fn send(
    client: &Client,
    verb: &str,
    path: &str,
    body: &Value,
) -> Result<Option<String>> {
    let kind = if verb == "PATCH" {
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
