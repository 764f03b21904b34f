//! The GpustowConfig on a real API server: its schema's refusals, the speed with which the extender follows it, and its
//! status.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::Parser as _;
use gpustow_api::config::{self, GpustowConfigStatus};
use gpustow_api::{GpustowConfig, names};
use gpustow_testkit::{Case, ControlPlane, configure, eventually};
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use kubectl_gpustow::{Args, Screen, run};
use serde_json::{Value, json};

use crate::fault_rig::{Replica, control_plane, turn};
use crate::support::{SOON, SYSTEM, repository};

const CARD: u64 = 8192;

fn configs(cluster: &ControlPlane) -> Result<Api<GpustowConfig>> {
    Ok(Api::all(cluster.admin()?))
}

/// Waits until the leader has written a status that is right.
async fn status(
    cluster: &ControlPlane,
    what: &str,
    right: impl Fn(&GpustowConfigStatus) -> bool,
) -> Result<GpustowConfigStatus> {
    let configs = configs(cluster)?;
    eventually(SOON, what, async || {
        let config = configs.get(config::NAME).await?;
        let status = config.status.unwrap_or_default();
        let follows = status.observed_generation == config.metadata.generation;
        ensure!(follows && right(&status), "{status:?}");
        Ok(status)
    })
    .await
}

fn reason<'s>(status: &'s GpustowConfigStatus, of_type: &str) -> &'s str {
    let condition = status.conditions.iter().find(|it| it.type_ == of_type);
    condition.map_or("", |it| &it.reason)
}

/// Has the replica lead: it takes over when it is first asked.
async fn lead(replica: &Replica, case: &Case) -> Result<()> {
    let pod = case.pod("first").gpu_mem(1).create(&case.client).await?;
    replica.place(&pod, &case.node_name("n")).await
}

#[tokio::test]
async fn schema_refuses_what_has_no_meaning_and_says_why() -> Result<()> {
    let cluster = control_plane().await?;
    let client = cluster.admin()?;
    for (field, says) in [
        (
            "reserve: {markNodes: true}",
            "markNodes needs reservations: set after to a time",
        ),
        (
            "defragment: {emptyNodes: true}",
            "emptyNodes evicts pods: set evictionsPerHour to more than 0",
        ),
        ("reserve: {maxPercent: 300}", "spec.reserve.maxPercent"),
        ("reserve: {after: soon}", "a time from 0s to 720h, or Off"),
        ("reserve: {after: 5s, giveUpAfter: 0s}", "a time from 1s"),
        ("reclaim: {action: evict}", "spec.reclaim.action"),
        ("queue: {mode: false}", "spec.queue.mode"),
        ("preempt: {after: -1s}", "a time from 0s"),
        ("scheduling: {policy: best}", "spec.scheduling.policy"),
        ("disruptions: {perMinute: 0}", "spec.disruptions.perMinute"),
        ("requests: {leastMiBPerGpu: 8Gi}", "leastMiBPerGpu"),
    ] {
        let spec: Value = serde_yaml::from_str(field)?;
        let object = json!({ "apiVersion": "gpustow.dev/v1alpha1", "kind": "GpustowConfig",
            "metadata": { "name": config::NAME }, "spec": spec });
        let params = PatchParams::apply("tests").force();
        let refused = configs(&cluster)?
            .patch(config::NAME, &params, &Patch::Apply(&object))
            .await;
        let refused = refused.err().with_context(|| format!("{field} is taken"))?;
        ensure!(refused.to_string().contains(says), "{field}: {refused}");
    }
    let other = json!({ "apiVersion": "gpustow.dev/v1alpha1", "kind": "GpustowConfig",
        "metadata": { "name": "other" }, "spec": {} });
    let refused = configs(&cluster)?
        .patch("other", &PatchParams::apply("tests"), &Patch::Apply(&other))
        .await;
    let refused = refused.err().context("another name is taken")?.to_string();
    ensure!(refused.contains("choose that name"), "{refused}");
    configure(&client, &[]).await
}

#[tokio::test]
async fn config_files_are_taken_as_they_are() -> Result<()> {
    let cluster = control_plane().await?;
    let defaults = GpustowConfig::default();
    for file in ["default", "notebooks-and-inference", "batch"] {
        let path = repository(&format!("manifests/config/{file}.yaml"));
        let path = path.display().to_string();
        let apply = [
            "apply",
            "--server-side",
            "--warnings-as-errors",
            "-f",
            &path,
        ];
        cluster.kubectl(&apply).await?;
        let taken = configs(&cluster)?.get(config::NAME).await?;
        ensure!(
            (taken.spec == defaults.spec) == (file == "default"),
            "{file}"
        );
        let delete = DeleteParams::default();
        configs(&cluster)?.delete(config::NAME, &delete).await?;
    }
    // The API server's defaults equal the programs' defaults without an object.
    let empty = json!({ "apiVersion": "gpustow.dev/v1alpha1", "kind": "GpustowConfig",
        "metadata": { "name": config::NAME }, "spec": {} });
    let params = PatchParams::apply("tests");
    let filled = configs(&cluster)?
        .patch(config::NAME, &params, &Patch::Apply(&empty))
        .await?;
    ensure!(filled.spec == defaults.spec, "{filled:?}");
    Ok(())
}

#[tokio::test]
async fn extender_follows_a_change_within_two_seconds_without_a_restart() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "follows", &[]).await?;
    let case = Case::new(turn.cluster, "follows").await?;
    case.node("n", &[CARD, CARD]).create(&case.client).await?;
    lead(&replica, &case).await?;
    for mode in ["Always", r#""Off""#] {
        configure(&case.client, &[format!("queue: {{mode: {mode}}}")]).await?;
        let configs = configs(turn.cluster)?;
        let wanted = mode == "Always";
        eventually(
            Duration::from_secs(2),
            "the change is in effect",
            async || {
                let config = configs.get(config::NAME).await?;
                let status = config.status.unwrap_or_default();
                ensure!(status.queue_from.is_empty() != wanted, "{status:?}");
                ensure!(status.observed_generation == config.metadata.generation);
                Ok(())
            },
        )
        .await?;
    }
    case.end().await
}

#[tokio::test]
async fn status_and_check_name_the_role_that_a_feature_lacks() -> Result<()> {
    let cluster = control_plane().await?;
    let role = repository("manifests/disruptions/rbac.yaml");
    let role = role.display().to_string();
    cluster.kubectl(&["delete", "-f", &role]).await?;
    let fields = [
        "queue: {mode: Auto}",
        "reclaim: {action: Evict}",
        "reserve: {after: 1m, markNodes: true}",
    ];
    let replica = Replica::start(&cluster, "lacks", &fields).await?;
    let case = Case::new(&cluster, "lacks").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    lead(&replica, &case).await?;
    let lacks = |status: &GpustowConfigStatus| {
        let missing = ["Queue", "Reclaim", "Reserve", config::WORKING];
        let missing = missing.map(|it| reason(status, it) == config::PERMISSION_MISSING);
        missing.iter().all(|it| *it)
    };
    let said = status(&cluster, "the roles are named", lacks).await?;
    // A scheduler's account may delete pods as it is.
    ensure!(reason(&said, "Preempt") == "On", "{said:?}");
    ensure!(reason(&said, "Defragment") == "Off", "{said:?}");
    let text = format!("{said:?}");
    ensure!(text.contains("gpustow-disruptions") && text.contains("gpustow-queue"));

    cluster
        .kubectl(&["create", "serviceaccount", "reader", "-n", SYSTEM])
        .await?;
    let account = format!("--serviceaccount={SYSTEM}:reader");
    let viewer = [
        "create",
        "clusterrolebinding",
        "reader",
        "--clusterrole=gpustow-viewer",
        &account,
    ];
    cluster.kubectl(&viewer).await?;
    let reader = cluster.kubeconfig(SYSTEM, "reader", None).await?;
    let reader = reader.display().to_string();
    let words = [
        "kubectl-gpustow",
        "--kubeconfig",
        &reader,
        "check",
        "-o",
        "csv",
    ];
    let mut found = Vec::new();
    run(Args::try_parse_from(words)?, &mut found, Screen::default()).await?;
    let found = String::from_utf8(found)?;
    for (feature, file) in [
        ("Queue", "manifests/queue/rbac.yaml"),
        ("Reclaim", "manifests/disruptions/rbac.yaml"),
        ("Reserve", "manifests/disruptions/rbac.yaml"),
    ] {
        let mut lines = found.lines();
        let line = lines.find(|line| line.contains(&format!("{feature} does not work")));
        ensure!(
            line.is_some_and(|line| line.contains(file)),
            "{feature}: {found}"
        );
    }

    cluster.kubectl(&["apply", "-f", &role]).await?;
    let works = |status: &GpustowConfigStatus| reason(status, "Reclaim") == "On";
    status(&cluster, "the role is found", works).await?;
    case.end().await
}

#[tokio::test]
async fn extender_keeps_the_last_valid_object_while_the_new_one_cannot_be_decoded() -> Result<()> {
    let cluster = control_plane().await?;
    let replica = Replica::start(&cluster, "valid", &["preempt: {after: 9s}"]).await?;
    let case = Case::new(&cluster, "valid").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    lead(&replica, &case).await?;
    status(&cluster, "the object is followed", |status| {
        reason(status, config::WORKING) == "AsConfigured"
    })
    .await?;
    // As if a later version had written the object: its schema knows more words.
    let crd = format!("crd/gpustowconfigs.{}", names::GROUP);
    let words = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/scheduling/properties/policy/enum/-";
    let patch = json!([{ "op": "add", "path": words, "value": "of-tomorrow" }]);
    let patch = format!("--patch={patch}");
    let args = ["patch", &crd, "--type=json", &patch];
    cluster.kubectl(&args).await?;
    configure(
        &case.client,
        &["scheduling: {policy: of-tomorrow}".to_owned()],
    )
    .await?;
    let get = ["get", "gpustowconfig", config::NAME, "-o", "json"];
    eventually(SOON, "the status says so", async || {
        let config: Value = serde_json::from_str(&cluster.kubectl(&get).await?)?;
        let status: GpustowConfigStatus = serde_json::from_value(config["status"].clone())?;
        let condition = status
            .conditions
            .iter()
            .find(|it| it.type_ == config::WORKING);
        let condition = condition.context("no condition")?;
        ensure!(condition.reason == config::UNREADABLE, "{condition:?}");
        ensure!(
            condition.message.contains("scheduling.policy"),
            "{condition:?}"
        );
        ensure!(status.observed_generation < config["metadata"]["generation"].as_i64());
        Ok(())
    })
    .await?;
    let metrics = replica.extender.metrics().await?;
    let series = r#"gpustow_undecodable_objects{resource="gpustowconfigs"} 1"#;
    ensure!(metrics.contains(series), "{metrics}");
    let told = ["get", "events", "-A", "-o", "jsonpath={.items[*].reason}"];
    eventually(SOON, "an Event says so", async || {
        ensure!(
            cluster
                .kubectl(&told)
                .await?
                .contains("GpuConfigUnreadable")
        );
        Ok(())
    })
    .await?;
    case.end().await
}
