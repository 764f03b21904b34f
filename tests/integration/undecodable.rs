//! One object that cannot be read must not keep the others away.

use anyhow::{Context as _, Result, ensure};
use gpustow_api::GpuNode;
use gpustow_testkit::{Case, ControlPlane, eventually};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt as _;
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use kube::core::ApiResource;
use serde_json::json;

use crate::fault_rig::{Replica, control_plane};
use crate::support::SOON;

const CARD: u64 = 8192;

/// Writes a report without the size of its cards, as an agent might have done when its field had
/// another name; the schema of today is back afterwards.
async fn report_by_an_older_schema(cluster: &ControlPlane, node: &str) -> Result<()> {
    let crds = Api::<CustomResourceDefinition>::all(cluster.admin()?);
    let name = GpuNode::crd_name();
    let today = crds.get(name).await?;
    let mut older = today.clone();
    let version = older.spec.versions.first_mut().context("no version")?;
    let anything = json!({
        "openAPIV3Schema": { "type": "object", "x-kubernetes-preserve-unknown-fields": true },
    });
    version.schema = Some(serde_json::from_value(anything)?);
    let params = PatchParams::default();
    let spec = |crd: &CustomResourceDefinition| Patch::Merge(json!({ "spec": crd.spec }));
    crds.patch(name, &params, &spec(&older)).await?;
    let resource = ApiResource::erase::<GpuNode>(&());
    let nodes = Api::<DynamicObject>::all_with(cluster.admin()?, &resource);
    let report = json!({ "status": { "gpus": [{ "uuid": "GPU-old", "index": 0, "memory": 1 }] } });
    let old = async || {
        let written = nodes
            .patch_status(node, &params, &Patch::Merge(&report))
            .await?;
        let card = &written.data["status"]["gpus"][0];
        ensure!(card["totalMiB"].is_null() && card["memory"] == 1, "{card}");
        Ok(())
    };
    eventually(SOON, "the older schema is in force", old).await?;
    crds.patch(name, &params, &spec(&today)).await?;
    let again = json!({ "status": { "gpus": [{ "uuid": "GPU-new", "index": 0, "memory": 1 }] } });
    let dry_run = PatchParams {
        dry_run: true,
        ..PatchParams::default()
    };
    let held = async || {
        let refused = nodes
            .patch_status(node, &dry_run, &Patch::Merge(&again))
            .await;
        ensure!(refused.is_err(), "a report of the older schema is taken");
        Ok(())
    };
    eventually(SOON, "today's schema is in force", held).await
}

async fn undecodable(replica: &Replica) -> Result<String> {
    let metrics = replica.extender.metrics().await?;
    let line = |line: &str| {
        let count = line.strip_prefix("gpustow_undecodable_objects{resource=\"gpunodes\"} ")?;
        Some(count.to_owned())
    };
    metrics.lines().find_map(line).context("no such series")
}

#[tokio::test]
async fn a_gpunode_of_an_older_schema_costs_its_own_node_alone() -> Result<()> {
    let cluster = control_plane().await?;
    let replica = Replica::start(&cluster, "older", &[]).await?;
    let case = Case::new(&cluster, "older").await?;
    let old = case.node("old", &[CARD]);
    old.create(&case.client).await?;
    case.node("new", &[CARD]).create(&case.client).await?;
    let (old_name, new_name) = (case.node_name("old"), case.node_name("new"));
    let pod = case.pod("p").gpu_mem(CARD).create(&case.client).await?;
    replica.until_fits(&pod, &old_name).await?;

    report_by_an_older_schema(&cluster, &old_name).await?;
    // Under a running extender, and in the first list of another life.
    for restart in [false, true] {
        if restart {
            replica.restart().await?;
        }
        eventually(SOON, "the node has no report", async || {
            let refused = replica.filter(&pod, &old_name).await;
            let refused = refused.err().context("it passes")?.to_string();
            ensure!(refused.contains("no GPU report"), "{refused}");
            Ok(())
        })
        .await?;
        assert_eq!(undecodable(&replica).await?, "1");
        let log = replica.extender.process.read_log()?;
        let mut lines = log.lines().filter(|line| line.contains(&old_name));
        assert!(lines.any(|line| line.contains("status.gpus[0]") && line.contains("totalMiB")));
        replica.until_fits(&pod, &new_name).await?;
    }
    replica.bind(&pod, &new_name).await?;

    // Deleted, it is written again.
    cluster.kubectl(&["delete", "gpunode", &old_name]).await?;
    old.report(&case.client).await?;
    let next = case.pod("q").gpu_mem(CARD).create(&case.client).await?;
    replica.place(&next, &old_name).await?;
    assert_eq!(undecodable(&replica).await?, "0");
    case.end().await
}
