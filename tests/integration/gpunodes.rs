//! The API server's checks of a GpuNode: the schema holds every field to its bounds.

use anyhow::{Context as _, Result, ensure};
use gpustow_api::gpunode::{
    Condition, ContainerUse, Gpu, GpuNode, GpuNodeSpec, GpuNodeStatus, PodUse, Summary,
};
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::install::installed;

fn full() -> GpuNodeStatus {
    let card = |uuid: &str, index| Gpu {
        uuid: uuid.to_owned(),
        index,
        model: "NVIDIA H200".to_owned(),
        total_mib: 143_771,
        reserved_mib: 612,
        healthy: index == 0,
        reason: (index > 0).then(|| "XID 79".to_owned()),
        pods: vec![PodUse {
            uid: "u".to_owned(),
            used_mib: 5,
            high_mib: Some(6),
            settled_at: None,
            idle_since: Some("2026-01-01T00:00:00Z".to_owned()),
            mps: true,
            containers: vec![ContainerUse {
                name: "main".to_owned(),
                peak_mib: 6,
            }],
        }],
        unmanaged_mib: 7,
        ..Gpu::default()
    };
    GpuNodeStatus {
        heartbeat: Some("2026-01-01T00:00:00Z".to_owned()),
        driver: Some("580.95.05".to_owned()),
        summary: Summary {
            gpus: 2,
            healthy: 1,
            models: "NVIDIA H200".to_owned(),
            capacity_mib: 143_159,
            used_mib: 24,
        },
        headroom_mib: 0,
        gpus: vec![card("GPU-1", 0), card("MIG-2/3/4", 1)],
        conditions: vec![Condition {
            r#type: "Ready".to_owned(),
            status: "True".to_owned(),
            reason: "Ok".to_owned(),
            message: "All is well.".to_owned(),
        }],
    }
}

#[tokio::test]
async fn a_report_is_stored_as_written_and_each_field_has_bounds() -> Result<()> {
    let api = Api::<GpuNode>::all(installed().await?.admin()?);
    let node = GpuNode::new("reported", GpuNodeSpec::default());
    api.create(&PostParams::default(), &node).await?;
    let good = json!({ "status": full() });
    let params = PatchParams::default();
    let stored = api
        .patch_status("reported", &params, &Patch::Merge(&good))
        .await?;
    assert_eq!(stored.status.context("no status")?, full());

    let long = "x".repeat(1025);
    let dry_run = PatchParams {
        dry_run: true,
        ..params
    };
    for (path, bad) in [
        ("/heartbeat", json!("yesterday")),
        ("/driver", json!(&long)),
        ("/headroomMiB", json!(-1)),
        ("/summary/gpus", json!(257)),
        ("/summary/healthy", json!(3)),
        ("/summary/models", json!(&long)),
        ("/summary/capacityMiB", json!(-1)),
        ("/summary/usedMiB", json!(-1)),
        ("/gpus/0/uuid", json!("")),
        ("/gpus/0/uuid", json!("GPU-1,GPU-2")),
        ("/gpus/0/uuid", json!("MIG-2/3/4")),
        ("/gpus/0/index", json!(-1)),
        ("/gpus/0/model", json!(&long)),
        ("/gpus/0/totalMiB", json!(16_777_217)),
        ("/gpus/0/totalMiB", json!("many")),
        ("/gpus/0/totalMiB", Value::Null),
        ("/gpus/0/reservedMiB", json!(143_772)),
        ("/gpus/0/healthy", json!("yes")),
        ("/gpus/1/reason", json!(&long)),
        ("/gpus/0/unmanagedMiB", json!(-1)),
        ("/gpus/0/pods/0/uid", json!("")),
        ("/gpus/0/pods/0/usedMiB", json!(-1)),
        ("/conditions/0/type", json!("")),
        ("/conditions/0/status", json!("Maybe")),
        ("/conditions/0/reason", json!(&long)),
        ("/conditions/0/message", json!(&long)),
    ] {
        let mut status = good.clone();
        let field = status
            .pointer_mut(&format!("/status{path}"))
            .context(path)?;
        *field = bad;
        let answer = api
            .patch_status("reported", &dry_run, &Patch::Merge(&status))
            .await;
        ensure!(
            matches!(answer, Err(kube::Error::Api(_))),
            "{path}: {answer:?}"
        );
    }
    Ok(())
}
