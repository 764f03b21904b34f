//! Abuse of the permission to create placeholders by a compromised extender or agent: it tries a pod of every field
//! that this Kubernetes has.

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use gpustow_testkit::{Case, ControlPlane, eventually};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

use super::openapi::{Document, sample};
use super::{Refused, Row, account, besieged, make, pods, row, run};
use crate::agent_token::{agent_client, post};
use crate::policies::asks;
use crate::support::{ACCOUNT, SOON, SYSTEM, repository};

/// Fields whose value does not change the running process, or belongs to another row.
const FREE: [&str; 8] = [
    "affinity",
    "containers",
    "imagePullSecrets",
    "nodeSelector",
    "preemptionPolicy",
    "priority",
    "schedulerName",
    "tolerations",
];
const FREE_OF_CONTAINER: [&str; 4] = [
    "imagePullPolicy",
    "resources",
    "terminationMessagePath",
    "terminationMessagePolicy",
];

/// Gives the accounts of the extender the permission.
pub(crate) async fn provision(cluster: &ControlPlane) -> Result<()> {
    let path = repository("manifests/provision").display().to_string();
    cluster.kubectl(&["apply", "-k", &path]).await?;
    let account = format!("--as=system:serviceaccount:{SYSTEM}:{ACCOUNT}");
    let run = [
        "run",
        "probe",
        "--image=probe",
        "--dry-run=server",
        &account,
    ];
    eventually(SOON, "the policy is in force", async || {
        let said = cluster.kubectl(&run).await.err().context("created")?;
        let said = format!("{said:#}");
        ensure!(said.contains("creates no pods but placeholders"), "{said}");
        Ok(())
    })
    .await
}

/// A placeholder as the extender writes it for the pod `waits`.
async fn placeholder(case: &Case) -> Result<Value> {
    make(
        case,
        "waits",
        json!({}),
        json!({ "containers": [asks("main", "1")] }),
        None,
    )
    .await?;
    let owner = case.pods().get("waits").await?;
    let uid = owner.uid().context("no UID")?;
    let unknown = json!({ "key": names::KNOWN_LABEL, "operator": "DoesNotExist" });
    Ok(json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": format!("{}-{uid}", names::PLACEHOLDER_CLASS),
            "namespace": case.namespace,
            "labels": { names::PLACEHOLDER: "alone" },
            "annotations": { names::PLACEHOLDER_FOR: uid },
            "ownerReferences": [{ "apiVersion": "v1", "kind": "Pod", "name": "waits", "uid": uid }],
        },
        "spec": {
            "schedulerName": names::SCHEDULER,
            "priorityClassName": names::PLACEHOLDER_CLASS,
            "affinity": { "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{ "matchExpressions": [unknown] }],
            } } },
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsNonRoot": true, "runAsUser": 65534, "seccompProfile": { "type": "RuntimeDefault" },
            },
            "containers": [{
                "name": "placeholder",
                "image": names::PLACEHOLDER_IMAGE,
                "securityContext": { "allowPrivilegeEscalation": false, "capabilities": { "drop": ["ALL"] } },
                "resources": { "limits": { names::GPU_MEM: "1" } },
            }],
        },
    }))
}

/// The placeholder with a sample of each field of this schema at this place, without the fields in `free`.
fn samples(
    document: &Document,
    pod: &Value,
    (schema, place): (&str, &str),
    free: &[&str],
) -> Result<Vec<(String, Value)>> {
    let fields = document
        .schema(schema)
        .and_then(|it| it["properties"].as_object());
    let fields = fields.with_context(|| format!("{schema} is not in the document"))?;
    let not_free = fields
        .iter()
        .filter(|(field, _)| !free.contains(&field.as_str()));
    let samples = not_free.map(|(field, schema)| {
        let mut pod = pod.clone();
        let at = pod.pointer_mut(place).context("no such place")?;
        at[field.as_str()] = sample(document, field, schema, 0);
        Ok((format!("{place}/{field}"), pod))
    });
    samples.collect()
}

/// The spec that the API server would store for the pod; none if it refuses the pod.
async fn made(client: &Client, case: &Case, pod: &Value) -> Result<Option<Value>> {
    let url = format!("{}?dryRun=All", pods(case, ""));
    let request = axum::http::Request::post(url)
        .header("content-type", "application/json")
        .body(pod.to_string().into_bytes())?;
    match client.request::<Value>(request).await {
        Ok(made) => Ok(Some(made["spec"].clone())),
        Err(kube::Error::Api(_)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The findings of the review of docs/security.md, each in a form that the API server itself would accept.
fn found(case: &Case, pod: &Value) -> Vec<Row> {
    let changed = |place: &str, value: Value, field: &'static str| {
        let mut pod = pod.clone();
        let (at, name) = place.rsplit_once('/').unwrap_or_default();
        if let Some(at) = pod.pointer_mut(at) {
            at[name] = value;
        }
        row(place, "POST", pods(case, ""), pod, Refused(field))
    };
    let container = |field: &str| format!("/spec/containers/0/{field}");
    let secret = json!([{ "secretRef": { "name": "passwords" } }]);
    let root = json!({ "runAsUser": 0, "capabilities": { "add": ["SYS_ADMIN"] } });
    let port = json!([{ "containerPort": 80, "hostPort": 80 }]);
    vec![
        changed(
            "/spec/serviceAccountName",
            json!("boss"),
            "spec.serviceAccount",
        ),
        changed(&container("envFrom"), secret, "containers[0].envFrom"),
        changed(&container("securityContext"), root, "securityContext"),
        changed(&container("ports"), port, "containers[0].ports"),
        changed(&container("image"), json!("x"), "containers[0].image"),
        changed(
            &container("command"),
            json!(["sh"]),
            "containers[0].command",
        ),
        changed("/spec/hostPID", json!(true), "spec.hostPID"),
        changed("/spec/nodeName", json!("n"), "spec.nodeName"),
        changed("/metadata/finalizers", json!(["x.y/z"]), "finalizers"),
        changed("/metadata/name", json!("other"), "its name begins with"),
    ]
}

#[tokio::test]
async fn a_fallen_extender_creates_placeholders_as_it_writes_them_and_no_other_pod() -> Result<()> {
    let cluster = besieged().await?;
    let case = Case::new(cluster, "stands-in").await?;
    let boss = format!("--namespace={}", case.namespace);
    cluster
        .kubectl(&["create", "serviceaccount", "boss", &boss])
        .await?;
    case.node("n", &[8000]).create(&case.client).await?;
    let pod = placeholder(&case).await?;
    let document = Document::read(&case.client).await?;
    let of_pod = ("io.k8s.api.core.v1.PodSpec", "/spec");
    let mut every = samples(&document, &pod, of_pod, &FREE)?;
    let of_container = ("io.k8s.api.core.v1.Container", "/spec/containers/0");
    every.extend(samples(&document, &pod, of_container, &FREE_OF_CONTAINER)?);
    let scheduler = account(cluster, names::NAMESPACE, names::SCHEDULER).await?;
    let agent = agent_client(cluster, &case.node_name("n")).await?;
    let plain = made(&scheduler, &case, &pod).await?;
    let plain = plain.context("a placeholder is refused as the extender writes it")?;
    for (place, pod) in &every {
        // The API server refuses some for their own sake, or drops the field, before a policy sees them.
        let made_of_it = made(&scheduler, &case, pod).await?;
        let is_plain = made_of_it.as_ref().is_none_or(|it| *it == plain);
        ensure!(is_plain, "{place}: {made_of_it:?}");
        ensure!(
            made(&agent, &case, pod).await?.is_none(),
            "the agent: {place}"
        );
    }
    run("scheduler", &scheduler, found(&case, &pod)).await?;

    // It is bound nowhere.
    post(&scheduler, &pods(&case, ""), &pod).await?;
    let name = pod["metadata"]["name"].as_str().context("no name")?;
    let binding = json!({
        "apiVersion": "v1", "kind": "Binding", "metadata": { "name": name, "namespace": case.namespace },
        "target": { "apiVersion": "v1", "kind": "Node", "name": "n" },
    });
    for (who, client) in [("scheduler", &scheduler), ("administrator", &case.client)] {
        let refused = Refused("a placeholder goes to no node");
        let path = pods(&case, &format!("/{name}/binding"));
        run(
            who,
            client,
            vec![row("Binding", "POST", path, binding.clone(), refused)],
        )
        .await?;
    }

    case.end().await
}
