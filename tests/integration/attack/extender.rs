//! Attempts of a compromised extender, scheduler or agent.

use anyhow::{Context as _, Result};
use gpustow_api::names;
use gpustow_testkit::{Case, ControlPlane};
use serde_json::{Value, json};

use super::keys::keys;
use super::openapi::{Document, sample};
use super::{Refused, Row, Taken, account, besieged, chaff, make, note, pods, row, run};
use crate::agent_token::{agent_client, patch};
use crate::policies::asks;

const NOT_OURS: &str = "not the extender's to write";

fn asking() -> Value {
    json!({ "containers": [asks("main", "1")] })
}

/// The extender's ServiceAccount of the overlay for the cluster's own scheduler.
async fn extender_alone(cluster: &ControlPlane) -> Result<kube::Client> {
    let namespace = format!("--namespace={}", names::NAMESPACE);
    cluster
        .kubectl(&["create", "serviceaccount", names::EXTENDER, &namespace])
        .await?;
    let to = format!("--serviceaccount={}:{}", names::NAMESPACE, names::EXTENDER);
    let role = "--clusterrole=gpustow-extender";
    cluster
        .kubectl(&["create", "clusterrolebinding", names::EXTENDER, role, &to])
        .await?;
    account(cluster, names::NAMESPACE, names::EXTENDER).await
}

fn lease(namespace: &str, name: &str) -> (String, Value) {
    let path = format!("/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases");
    let lease = json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": { "name": name, "namespace": namespace },
        "spec": { "holderIdentity": "x" },
    });
    (path, lease)
}

fn condition(kind: &str) -> Value {
    json!({ "status": { "conditions": [{ "type": kind, "status": "False", "reason": "R" }] } })
}

#[tokio::test]
async fn a_fallen_extender_writes_what_it_is_there_for_and_nothing_else() -> Result<()> {
    let cluster = besieged().await?;
    let case = Case::new(cluster, "fallen").await?;
    make(&case, "bound", json!({}), asking(), Some("n")).await?;
    make(&case, "waits", json!({}), asking(), None).await?;
    make(
        &case,
        "plain",
        chaff(2000),
        json!({ "containers": [{ "name": "a" }] }),
        Some("n"),
    )
    .await?;
    let claims = format!(
        "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims",
        case.namespace
    );
    let claim = |annotations: Value| {
        json!({ "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
                "metadata": { "name": "c", "annotations": annotations }, "spec": { "devices": {} } })
    };
    crate::agent_token::post(&case.client, &claims, &claim(json!({}))).await?;
    let (kube_system, of_scheduler) = lease("kube-system", "kube-scheduler");
    crate::agent_token::post(&case.client, &kube_system, &of_scheduler).await?;
    let read = axum::http::Request::get(format!("{kube_system}/kube-scheduler"));
    let of_scheduler: Value = case.client.request(read.body(Vec::new())?).await?;
    let (ours, our_lease) = lease(names::NAMESPACE, "probe");
    let status = |pod: &str, change: Value, verdict| {
        row(
            format!("{pod} {change}"),
            "PATCH",
            pods(&case, &format!("/{pod}/status")),
            change,
            verdict,
        )
    };
    let labels = json!({ "metadata": { "labels": { "app": "theirs" } } });
    let finalizers = json!({ "metadata": { "finalizers": ["x.y/z"] } });
    let doors = |who: &str| {
        let mut rows = vec![
            status("waits", note(names::EPOCH, "7"), Taken),
            status("waits", note(names::FENCE, "x"), Taken),
            status("waits", note(names::RESERVATION, "x"), Taken),
            status("waits", condition(names::AVAILABLE_CONDITION), Taken),
            status("waits", condition(names::RESERVED_CONDITION), Taken),
            status("bound", condition(names::RECLAIM_CONDITION), Taken),
            status("waits", note(names::ASSIGNMENT, "x"), Refused(NOT_OURS)),
            status("bound", note(names::ASSIGNMENT, "x"), Refused(NOT_OURS)),
            status(
                "bound",
                note("devices.gpustow.dev/main", "all"),
                Refused(NOT_OURS),
            ),
            status("bound", note("example.com/own", "x"), Refused(NOT_OURS)),
            status(
                "plain",
                note("0", "x"),
                Refused("not the extender's to write where a pod asks for nothing"),
            ),
            status("bound", labels.clone(), Refused(NOT_OURS)),
            status("bound", finalizers.clone(), Refused(NOT_OURS)),
            status(
                "bound",
                condition("Ready"),
                Refused("status.conditions: the extender writes"),
            ),
            row(
                "metadata",
                "PATCH",
                pods(&case, "/bound"),
                labels.clone(),
                Refused("forbidden"),
            ),
            row(
                "a Lease of its own",
                "POST",
                &ours,
                our_lease.clone(),
                if who == "scheduler" {
                    Taken
                } else {
                    Refused("forbidden")
                },
            ),
            row(
                "another's Lease",
                "POST",
                kube_system.clone(),
                lease("kube-system", "kube-controller-manager").1,
                Refused("forbidden"),
            ),
            row(
                "a node's Lease",
                "POST",
                lease("kube-node-lease", "n").0,
                lease("kube-node-lease", "n").1,
                Refused("forbidden"),
            ),
            row(
                "the scheduler's Lease",
                "PUT",
                format!("{kube_system}/kube-scheduler"),
                of_scheduler.clone(),
                Refused("forbidden"),
            ),
            row(
                "a claim",
                "POST",
                &claims,
                claim(json!({})),
                Refused("forbidden"),
            ),
            row(
                "another's claim",
                "DELETE",
                format!("{claims}/c"),
                Value::Null,
                Refused("forbidden"),
            ),
            row(
                "a pod",
                "POST",
                pods(&case, ""),
                json!({ "metadata": { "name": "x" }, "spec": { "containers": [{ "name": "c", "image": "i" }] } }),
                Refused("creates no pods but placeholders"),
            ),
            row(
                "a policy",
                "DELETE",
                "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/gpustow-extender",
                Value::Null,
                Refused("forbidden"),
            ),
            row(
                "secrets",
                "GET",
                format!("/api/v1/namespaces/{}/secrets", case.namespace),
                Value::Null,
                Refused("forbidden"),
            ),
        ];
        if who == "scheduler" {
            rows.push(status("waits", condition("PodScheduled"), Taken));
            rows.push(status("bound", condition("DisruptionTarget"), Taken));
            rows.push(status(
                "waits",
                json!({ "status": { "nominatedNodeName": "n" } }),
                Taken,
            ));
            let mut own =
                claim(json!({ "resource.kubernetes.io/extended-resource-claim": "true" }));
            own["metadata"]["name"] = json!("own");
            // Before 1.36, Kubernetes' own role of schedulers does not include this right.
            let own_verdict = match cluster.minor() {
                36.. => Taken,
                _ => Refused("cannot create resource"),
            };
            let trick = "the scheduler's own claim";
            rows.push(row(trick, "POST", &claims, own, own_verdict));
        }
        rows
    };
    let scheduler = account(cluster, names::NAMESPACE, names::SCHEDULER).await?;
    let extender = extender_alone(cluster).await?;
    run("scheduler", &scheduler, doors("scheduler")).await?;
    run("extender", &extender, doors("extender")).await?;

    // All fields of this Kubernetes, not only the fields that a person remembered.
    let document = Document::read(&case.client).await?;
    let allowed = [
        "conditions",
        "nominatedNodeName",
        "resourceClaimStatuses",
        "extendedResourceClaimStatus",
        "nodeAllocatableResourceClaimStatuses",
    ];
    for client in [&scheduler, &extender] {
        let (path, which) = (pods(&case, "/bound/status"), "io.k8s.api.core.v1.PodStatus");
        document.only(client, &path, which, &allowed).await?;
    }
    case.end().await
}

#[tokio::test]
async fn a_fallen_agent_lies_about_its_own_cards_alone_and_in_bounds() -> Result<()> {
    let cluster = besieged().await?;
    let case = Case::new(cluster, "agent").await?;
    case.node("n", &[8000]).create(&case.client).await?;
    let node = case.node_name("n");
    make(&case, "bound", json!({}), asking(), Some(&node)).await?;
    let agent = agent_client(cluster, &node).await?;
    let status = format!("/api/v1/nodes/{node}/status");
    let capacity = |amount: &str| json!({ "status": { "capacity": { names::GPU_MEM: amount } } });
    let confirmed = |length: usize| note(names::CONFIRMED, "x".repeat(length));
    let events = format!(
        "/apis/events.k8s.io/v1/namespaces/{}/events",
        case.namespace
    );
    let event = |more: Value| {
        let mut event = json!({
            "apiVersion": "events.k8s.io/v1", "kind": "Event",
            "metadata": { "generateName": "e-", "namespace": case.namespace },
            "eventTime": "2026-01-01T00:00:00.000000Z", "type": "Warning",
            "reason": "R", "action": "A", "note": "n",
            "reportingController": names::AGENT, "reportingInstance": node,
            "regarding": { "kind": "Pod", "name": "bound", "namespace": case.namespace },
        });
        for (key, value) in more.as_object().into_iter().flatten() {
            event[key] = value.clone();
        }
        event
    };
    let big = json!({ "metadata": { "generateName": "e-", "annotations": { "a": "x".repeat(200_000) } } });
    let plain = "an agent writes plain Events";
    let mut rows: Vec<Row> = vec![
        row(
            "a confirmation",
            "PATCH",
            pods(&case, "/bound/status"),
            confirmed(4096),
            Taken,
        ),
        row(
            "a long confirmation",
            "PATCH",
            pods(&case, "/bound/status"),
            confirmed(4097),
            Refused("longer than 4096"),
        ),
        row("an Event", "POST", &events, event(json!({})), Taken),
        row(
            "an Event with a relation",
            "POST",
            &events,
            event(json!({ "related": { "kind": "Secret", "name": "s" } })),
            Refused(plain),
        ),
        row("a fat Event", "POST", &events, event(big), Refused(plain)),
    ];
    for (amount, verdict) in [
        ("4294967296", Taken),
        ("4294967297", Refused("which no node has")),
        ("9223372036854775807", Refused("which no node has")),
        ("1e30", Refused("which no node has")),
    ] {
        rows.push(row(amount, "PATCH", &status, capacity(amount), verdict));
    }
    run("agent", &agent, rows).await?;
    let document = Document::read(&case.client).await?;
    let which = "io.k8s.api.core.v1.NodeStatus";
    document.only(&agent, &status, which, &["capacity"]).await?;
    document
        .only(
            &agent,
            &pods(&case, "/bound/status"),
            "io.k8s.api.core.v1.PodStatus",
            &[],
        )
        .await?;
    // Bound by hand, without an assignment.
    let at_once = kube::api::DeleteParams::default().grace_period(0);
    case.pods().delete("bound", &at_once).await?;
    case.end().await
}

/// New doors of new Kubernetes are tried without anybody knowing of them.
#[tokio::test]
async fn only_the_extender_writes_its_keys_through_any_door_that_there_is() -> Result<()> {
    let cluster = besieged().await?;
    let case = Case::new(cluster, "any-door").await?;
    make(&case, "bound", json!({}), asking(), Some("n")).await?;
    let document = Document::read(&case.client).await?;
    let doors = document.doors("/api/v1/namespaces/{namespace}/pods/{name}")?;
    assert!(doors.contains(&"/status".to_owned()), "{doors:?}");
    for door in doors {
        for key in keys() {
            let before = document.get(&case.client, &pods(&case, "/bound")).await?;
            let path = pods(&case, &format!("/bound{door}"));
            let answer = patch(&case.client, &path, &note(&key, "x")).await;
            let after = document.get(&case.client, &pods(&case, "/bound")).await?;
            let written = |pod: &Value| pod["metadata"]["annotations"].clone();
            assert_eq!(written(&before), written(&after), "{door}: {answer:?}");
        }
    }
    let schema = document
        .schema("io.k8s.api.core.v1.PodStatus")
        .context("no PodStatus")?;
    let phase = schema["properties"]["phase"].clone();
    assert_eq!(
        sample(&document, "phase", &phase, 0),
        json!("Failed"),
        "what is tried means something"
    );
    case.end().await
}
