//! Every door of this API server by which pods come to be, or by which pods and nodes are changed. A walk over the API
//! server's own description finds the doors of a new Kubernetes. The test tries and names them until a person has
//! looked at them.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use gpustow_testkit::Case;
use kube::Client;
use serde_json::{Value, json};

use super::openapi::Document;
use super::{Refused, besieged, make, note, row, run};
use crate::agent_token::{agent_client, patch, send};
use crate::policies::asks;

/// Doors of pods and nodes that a person has looked at.
const DOORS: [&str; 14] = [
    // Held by the policies.
    "v1 pods",
    "v1 pods/ephemeralcontainers",
    "v1 pods/status",
    "v1 pods/binding",
    "v1 bindings",
    "v1 nodes",
    "v1 nodes/status",
    // CPU and memory alone, and no metadata.
    "v1 pods/resize",
    // Ends a pod: RBAC.
    "v1 pods/eviction",
    // Into running processes, not into the object: RBAC.
    "v1 pods/attach",
    "v1 pods/exec",
    "v1 pods/portforward",
    "v1 pods/proxy",
    "v1 nodes/proxy",
];

/// Kinds of which a controller makes pods: those come through the first door.
const MAKERS: [&str; 8] = [
    "v1 podtemplates",
    "v1 replicationcontrollers",
    "apps/v1 daemonsets",
    "apps/v1 deployments",
    "apps/v1 replicasets",
    "apps/v1 statefulsets",
    "batch/v1 cronjobs",
    "batch/v1 jobs",
];

#[tokio::test]
async fn every_door_that_is_there_has_been_looked_at() -> Result<()> {
    let client = besieged().await?.admin()?;
    let (mut doors, mut makers) = (BTreeSet::new(), BTreeSet::new());
    for (api, document) in all(&client).await? {
        for (path, verbs) in document.paths() {
            let Some(door) = Door::of(&api, path, verbs) else {
                continue;
            };
            let reached = document.reached(&door.brings);
            let brings = |kind: &str| reached.iter().any(|it| it.ends_with(kind));
            let status = [".PodStatus", ".NodeStatus", ".Binding"];
            if door.is_of("pods") || door.is_of("nodes") || status.into_iter().any(brings) {
                doors.insert(door.name);
            } else if brings(".PodTemplateSpec") && door.is_whole {
                makers.insert(door.name);
            }
        }
    }
    ensure!(
        doors.contains("v1 pods/status"),
        "nothing is found: {doors:?}"
    );
    let new = |found: BTreeSet<String>, known: &[&str]| {
        let new = found.into_iter().filter(|it| !known.contains(&it.as_str()));
        new.collect::<Vec<_>>()
    };
    let (doors, makers) = (new(doors, &DOORS), new(makers, &MAKERS));
    ensure!(
        doors.is_empty() && makers.is_empty(),
        "new in this Kubernetes: who may write gpustow's keys and fields through {doors:?}, and are pods \
         of {makers:?} judged? Say so here, and hold them"
    );
    Ok(())
}

/// A path of the document through which something may be written.
struct Door {
    /// Group, version and resource, and the subresource if it is one.
    name: String,
    /// The bodies of its writing requests.
    brings: Value,
    /// Is it the resource itself?
    is_whole: bool,
}

impl Door {
    fn of(api: &str, path: &str, verbs: &Value) -> Option<Door> {
        let rest = path.split_once(&format!("/{api}/"))?.1;
        let rest = rest.strip_prefix("namespaces/{namespace}/").unwrap_or(rest);
        let parts = rest.split('/').filter(|part| !part.starts_with('{'));
        let parts: Vec<_> = parts.collect();
        let writes = ["post", "put", "patch"].map(|verb| &verbs[verb]);
        if parts.first() == Some(&"watch") || writes.iter().all(|it| it.is_null()) {
            return None;
        }
        let bodies = writes.map(|verb| verb["requestBody"].clone());
        Some(Door {
            name: format!("{api} {}", parts.join("/")),
            brings: Value::Array(bodies.into()),
            is_whole: parts.len() == 1,
        })
    }

    fn is_of(&self, resource: &str) -> bool {
        let own = self.name.strip_prefix("v1 ").unwrap_or_default();
        own.split('/').next() == Some(resource)
    }
}

/// The document of each group of this API server.
async fn all(client: &Client) -> Result<Vec<(String, Document)>> {
    let request = axum::http::Request::get("/openapi/v3").body(Vec::new())?;
    let index: Value = client.request(request).await?;
    let mut all = Vec::new();
    for (path, at) in index["paths"].as_object().context("no groups")? {
        let url = at["serverRelativeURL"].as_str().context("no address")?;
        if let Some((_, api)) = path.split_once('/').filter(|(_, api)| api.contains('v')) {
            all.push((api.to_owned(), Document::read_at(client, url).await?));
        }
    }
    Ok(all)
}

/// Whatever takes a Binding.
#[tokio::test]
async fn no_binding_but_the_extenders_brings_cards() -> Result<()> {
    let cluster = besieged().await?;
    let case = Case::new(cluster, "any-binding").await?;
    make(
        &case,
        "waits",
        json!({}),
        json!({ "containers": [asks("main", "1")] }),
        None,
    )
    .await?;
    let mut rows = Vec::new();
    for (api, document) in all(&case.client).await? {
        for (path, verbs) in document.paths() {
            let taken = document.reached(&verbs["post"]["requestBody"]);
            if !taken.iter().any(|it| it.ends_with(".Binding")) {
                continue;
            }
            let path = path.replace("{namespace}", &case.namespace);
            let forged = json!({
                "apiVersion": api, "kind": "Binding",
                "metadata": { "name": "waits", "annotations": { names::ASSIGNMENT: "x" } },
                "target": { "apiVersion": "v1", "kind": "Node", "name": "n" },
            });
            let refused = Refused("only gpustow's extender may write it");
            let path = path.replace("{name}", "waits");
            rows.push(row("a forged Binding", "POST", path, forged, refused));
        }
    }
    ensure!(rows.len() >= 2, "nothing is found");
    run("admin", &case.client, rows).await?;
    case.end().await
}

/// Whatever is below a node.
#[tokio::test]
async fn an_agent_changes_nothing_else_of_a_node_through_any_door() -> Result<()> {
    let cluster = besieged().await?;
    let case = Case::new(cluster, "any-node-door").await?;
    let startup = json!({ "key": names::STARTUP_TAINT, "effect": "NoSchedule" });
    let harder = json!({ "key": names::STARTUP_TAINT, "effect": "NoExecute" });
    let foreign = json!({ "key": "a", "effect": "NoSchedule" });
    let tainted = |taints: &[&Value]| json!({ "spec": { "taints": taints } });
    for name in ["mine", "other"] {
        let taints = serde_json::from_value(json!([startup, harder, foreign]))?;
        let node = case.node(name, &[8000]);
        let node = node.with_node(|node| node.spec.get_or_insert_default().taints = Some(taints));
        node.create(&case.client).await?;
    }
    let (mine, other) = (case.node_name("mine"), case.node_name("other"));
    let agent = agent_client(cluster, &mine).await?;
    let document = Document::read(&case.client).await?;
    let doors = document.doors("/api/v1/nodes/{name}")?;
    ensure!(doors.contains(&"/status".to_owned()), "{doors:?}");
    let strays = [
        (&mine, note("a", "b")),
        (&mine, json!({ "metadata": { "labels": { "a": "b" } } })),
        (&mine, json!({ "spec": { "unschedulable": true } })),
        (&mine, json!({ "spec": { "podCIDR": "10.0.0.0/24" } })),
        // Others' taints, the same taint with another effect, and a taint in another's place.
        (&mine, tainted(&[])),
        (&mine, tainted(&[&startup, &harder])),
        (&mine, tainted(&[&startup, &foreign])),
        (&mine, tainted(&[&foreign])),
        (&mine, tainted(&[&startup, &startup, &harder, &foreign])),
        (
            &mine,
            tainted(&[&json!({ "key": "a", "effect": "NoExecute" })]),
        ),
        (&other, tainted(&[&harder, &foreign])),
        (
            &other,
            json!({ "metadata": { "labels": { names::GPU_COUNT_LABEL: "9" } } }),
        ),
        (
            &other,
            json!({ "status": { "capacity": { names::GPU_MEM: "9" } } }),
        ),
    ];
    let of = |node: &Value| {
        [
            &node["metadata"]["labels"],
            &node["metadata"]["annotations"],
            &node["spec"],
            &node["status"]["capacity"],
        ]
        .map(Value::clone)
    };
    for door in doors {
        for (node, stray) in &strays {
            let path = format!("/api/v1/nodes/{node}");
            let before = of(&document.get(&case.client, &path).await?);
            let answer = patch(&agent, &format!("{path}{door}"), stray).await;
            let after = of(&document.get(&case.client, &path).await?);
            ensure!(before == after, "{door} took {stray}: {answer:?}");
        }
    }
    // Only this, and only there.
    let path = format!("/api/v1/nodes/{mine}");
    patch(&agent, &path, &tainted(&[&harder, &foreign])).await?;
    let taints = &document.get(&case.client, &path).await?["spec"]["taints"];
    ensure!(*taints == json!([harder, foreign]), "{taints}");
    let back = tainted(&[&startup, &harder, &foreign]);
    let answer = send(&agent, "PATCH", &path, &back).await?;
    ensure!(answer.is_some(), "it put the taint on its node");
    // Our accounts may not make calls through the proxy of a node or a pod.
    for path in [
        format!("/api/v1/nodes/{mine}/proxy/pods"),
        format!("/api/v1/nodes/{mine}/proxy/exec"),
    ] {
        let answer = send(&agent, "POST", &path, &json!({})).await?;
        ensure!(
            answer.is_some_and(|answer| answer.contains("forbidden")),
            "{path}"
        );
    }
    case.end().await
}
