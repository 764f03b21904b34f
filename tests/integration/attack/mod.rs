//! The attack: accounts, their tricks, the doors of a real API server, and the required results. A row with another
//! result is a weakness, or a promise that docs/security.md no longer makes.

mod extender;
mod flood;
mod fragmented;
mod guard;
mod keys;
mod later;
mod marks;
mod openapi;
pub(crate) mod placeholders;
mod queue;
mod tenant;
mod walk;

use anyhow::{Result, ensure};
use gpustow_api::names;
use gpustow_testkit::{Case, ControlPlane, Options, client};
use kube::Client;
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use crate::agent_token::{policy_holds, post, send};
use crate::install::{install, installed_guard};

/// A control plane with all of gpustow's policies, the guard too where it can be had; its controllers
/// fill the roles that tenants have.
pub(crate) async fn besieged() -> Result<&'static ControlPlane> {
    static BESIEGED: OnceCell<ControlPlane> = OnceCell::const_new();
    BESIEGED
        .get_or_try_init(async || {
            let cluster = ControlPlane::start(Options {
                controllers: true,
                ..Options::default()
            })
            .await?;
            install(&cluster, "manifests/base").await?;
            placeholders::provision(&cluster).await?;
            policy_holds(&cluster).await?;
            if cluster.minor() >= 34 {
                installed_guard(&cluster).await?;
            }
            Ok(cluster)
        })
        .await
}

/// The required result of a row.
pub(crate) enum Verdict {
    /// The API server takes it.
    Taken,
    /// It refuses, with this text.
    Refused(&'static str),
}
pub(crate) use Verdict::{Refused, Taken};

/// One attempt: its description, its request, and the required result.
pub(crate) struct Row {
    trick: String,
    verb: &'static str,
    path: String,
    body: Value,
    verdict: Verdict,
}

pub(crate) fn row(
    trick: impl Into<String>,
    verb: &'static str,
    path: impl Into<String>,
    body: Value,
    verdict: Verdict,
) -> Row {
    let (trick, path) = (trick.into(), path.into());
    Row {
        trick,
        verb,
        path,
        body,
        verdict,
    }
}

/// Sends every row, without effect, and reports all rows with another result.
pub(crate) async fn run(who: &str, client: &Client, rows: Vec<Row>) -> Result<()> {
    let mut wrong = Vec::new();
    for row in rows {
        let answer = send(client, row.verb, &row.path, &row.body).await?;
        let ok = match (&row.verdict, &answer) {
            (Taken, None) => true,
            (Refused(text), Some(answer)) => answer.contains(text),
            _ => false,
        };
        if !ok {
            let answer = answer.unwrap_or_else(|| "taken".to_owned());
            wrong.push(format!(
                "{}: {} {}: {answer}",
                row.trick, row.verb, row.path
            ));
        }
    }
    ensure!(wrong.is_empty(), "{who}:\n{}", wrong.join("\n"));
    Ok(())
}

/// A client with the token of a ServiceAccount that exists.
pub(crate) async fn account(cluster: &ControlPlane, namespace: &str, name: &str) -> Result<Client> {
    client(&cluster.kubeconfig(namespace, name, None).await?).await
}

/// The path of the namespace's pods, or below it.
pub(crate) fn pods(case: &Case, rest: &str) -> String {
    format!("/api/v1/namespaces/{}/pods{rest}", case.namespace)
}

/// Makes the pod `name`, and binds it to a node if there is one.
pub(crate) async fn make(
    case: &Case,
    name: &str,
    annotations: Value,
    spec: Value,
    node: Option<&str>,
) -> Result<()> {
    let mut pod = crate::policies::pod(annotations, spec)?;
    pod.metadata.name = Some(name.to_owned());
    post(&case.client, &pods(case, ""), &serde_json::to_value(&pod)?).await?;
    if let Some(node) = node {
        let target = json!({ "apiVersion": "v1", "kind": "Node", "name": node });
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding",
            "metadata": { "name": name, "namespace": case.namespace }, "target": target,
        });
        post(
            &case.client,
            &pods(case, &format!("/{name}/binding")),
            &binding,
        )
        .await?;
    }
    Ok(())
}

/// A change of one annotation.
pub(crate) fn note(key: &str, value: impl Into<Value>) -> Value {
    json!({ "metadata": { "annotations": { key: value.into() } } })
}

/// So many annotations that mean nothing.
pub(crate) fn chaff(count: usize) -> Value {
    (0..count)
        .map(|index| (format!("{index:x}"), json!("")))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

/// The key by which NVIDIA's NRI plugin gives devices to this container.
pub(crate) fn cdi(container: &str) -> String {
    format!("{}{container}", names::CDI_OF)
}
