//! A replica that does not lead takes over for a queued pod only where it could ungate it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use axum::http::{Method, StatusCode};
use gpustow_api::names;
use gpustow_testkit::builders::delete;
use gpustow_testkit::{Action, Case, ControlPlane, eventually};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::fault_rig::{Replica, now};
use crate::queue::{CARD, LATE, held, is_held, open, still_held};
use crate::support::{SOON, bound, event_saying};

/// A policy that lets no gate off the pod, which bears the label `case=stuck`.
async fn stick(cluster: &ControlPlane, case: &Case, stuck: &Pod) -> Result<()> {
    let name = &case.namespace;
    let policy = json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name},
        "spec": {
            "matchConstraints": {"resourceRules": [{
                "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["UPDATE"],
            }]},
            "validations": [{
                "expression": "has(object.spec.schedulingGates)",
                "message": "the gate stays",
            }],
        },
    });
    let binding = json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": name},
        "spec": {
            "policyName": name,
            "validationActions": ["Deny"],
            "matchResources": {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}},
                "objectSelector": {"matchLabels": {"case": "stuck"}},
            },
        },
    });
    let both = json!({"apiVersion": "v1", "kind": "List", "items": [policy, binding]});
    cluster.apply(&both.to_string()).await?;
    let out = json!({"spec": {"schedulingGates": [{"$patch": "delete", "name": names::GATE}]}});
    let (params, out) = (PatchParams::default().dry_run(), Patch::Strategic(out));
    let name = stuck.metadata.name.as_deref().context("it has a name")?;
    eventually(SOON, "the policy is in force", async || {
        let tried = case.pods().patch(name, &params, &out).await;
        ensure!(tried.is_err_and(|error| error.to_string().contains("the gate stays")));
        Ok(())
    })
    .await
}

#[tokio::test]
async fn gate_that_a_policy_keeps_on_gives_the_standby_no_reason_to_take_over() -> Result<()> {
    let cluster = open().await?;
    let leader = Replica::start(&cluster, "leads", &["queue: {mode: Always}"]).await?;
    let _scheduler = leader.scheduler(&cluster).await?;
    let case = Case::new(&cluster, "stuck").await?;
    // Nothing fits before the policy is in force.
    let stuck = held(&case, "stuck").label("case", "stuck");
    let stuck = stuck.create(&case.client).await?;
    stick(&cluster, &case, &stuck).await?;
    case.node("n", &[CARD, CARD]).create(&case.client).await?;
    bound(&case.client, case.pod("first").gpu_mem(CARD)).await?;
    event_saying(&case.client, &stuck, "GpuPodQueued", "the gate stays").await?;

    let standby = Replica::start(&cluster, "stands-by", &["queue: {mode: Always}"]).await?;
    let path = format!("/api/v1/namespaces/{}/pods/stuck", case.namespace);
    let tries = standby.proxy.rule(
        move |method, uri| {
            let query = uri.query().unwrap_or_default();
            *method == Method::PATCH && uri.path() == path && query.contains("dryRun=All")
        },
        Action::DelayReply(Duration::ZERO),
    );
    // It tries the patch before it would take over, sees that it is refused, and tries again a while later.
    tries.answered(2, LATE).await?;
    assert_eq!(standby.takeovers().await?, 0);
    assert_eq!(leader.takeovers().await?, 1);
    still_held(&case, &[&stuck]).await?;
    case.end().await
}

#[tokio::test]
async fn standby_tries_again_after_the_answer_to_its_takeover_was_lost() -> Result<()> {
    let cluster = open().await?;
    let always = ["queue: {mode: Always}"];
    let leader = Replica::start(&cluster, "leads", &always).await?;
    let _scheduler = leader.scheduler(&cluster).await?;
    let case = Case::new(&cluster, "lost").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    let first = bound(&case.client, case.pod("first").gpu_mem(CARD)).await?;
    let path = format!("/api/v1/namespaces/{}/pods/waits", case.namespace);
    let _fails = leader.proxy.rule(
        move |method, uri| *method == Method::PATCH && uri.path() == path,
        Action::Answer(StatusCode::SERVICE_UNAVAILABLE, ""),
    );
    let waits = held(&case, "waits").create(&case.client).await?;
    delete(&case.client, &first, 0).await?;

    let standby = Replica::start(&cluster, "stands-by", &always).await?;
    let writes = AtomicUsize::new(0);
    let lost = standby.proxy.rule(
        move |method, uri| {
            *method == Method::PUT
                && uri.path().contains("/leases/")
                && writes.fetch_add(1, Ordering::SeqCst) == 0
        },
        Action::DropReply,
    );
    lost.answered(1, LATE).await?;
    eventually(LATE, "the standby leads", async || {
        ensure!(standby.takeovers().await? == 1);
        Ok(())
    })
    .await?;
    eventually(SOON, "the gate is off", async || {
        ensure!(!is_held(&now(&case, &waits).await?));
        Ok(())
    })
    .await?;
    case.end().await
}
