//! Pods whose requests were translated get their GPUs.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use gpustow_api::names;
use gpustow_testkit::builders::{delete, set_running};
use gpustow_testkit::{Case, eventually, wait_bound};
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::adopt_rig::{adopting, annotation, of};
use crate::fault_rig::{Replica, turn};
use crate::support::{SOON, assignment};

/// Labels the case's namespace.
async fn label(case: &Case, labels: Value) -> Result<()> {
    let patch = Patch::Merge(json!({ "metadata": { "labels": labels } }));
    let params = PatchParams::default();
    let namespaces = Api::<Namespace>::all(case.client.clone());
    namespaces.patch(&case.namespace, &params, &patch).await?;
    Ok(())
}

#[tokio::test]
async fn pod_of_gpushare_is_bound_to_a_gpu_with_room() -> Result<()> {
    let cluster = adopting().await?;
    let replica = Replica::start(cluster, "adopt", &[]).await?;
    let _scheduler = replica.scheduler(cluster).await?;
    let case = Case::new(cluster, "adopt").await?;
    case.node("n", &[2048, 8192]).create(&case.client).await?;
    label(&case, json!({ names::ADOPT_LABEL: "gpushare" })).await?;
    let asked = of(
        &case.namespace,
        json!({}),
        &[("main", json!({names::GPUSHARE_MEM: "3"}))],
    )?;
    let made = case.pods().create(&PostParams::default(), &asked).await?;
    let bound = wait_bound(&case.client, &made, SOON).await?;
    let charges = assignment(&bound)?.charges;
    assert_eq!(charges.iter().map(|it| it.1.0).collect::<Vec<_>>(), [3072]);
    replica.settled(&case).await?;
    case.end().await
}

/// The plugin's rehearsal of the same dump is a case of its own crate.
#[tokio::test]
async fn eighty_pods_of_eight_gpus_in_ten_shares_each_all_run() -> Result<()> {
    const GPUS: usize = 8;
    const SHARES: usize = 10;
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "shares", &[]).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "shares").await?;
    let node = case.node("n", &[81_559; GPUS]).headroom(480);
    node.create(&case.client).await?;
    let pods = GPUS * SHARES;
    // As `kubectl get pods -o json` shows them.
    let dump = (0..pods).map(|nth| {
        json!({
            "metadata": { "name": format!("web-{nth}"), "namespace": case.namespace },
            "spec": { "nodeName": case.node_name("n"), "schedulerName": "default-scheduler", "containers": [{
                "name": "main", "image": "web", "resources": { "limits": { "nvidia.com/gpu": "1" } },
            }] },
            "status": { "phase": "Running" },
        })
    });
    let dump = json!({ "items": dump.collect::<Vec<_>>() });
    let labels = json!({
        names::ADOPT_LABEL: "time-slicing", names::ADOPT_REPLICAS_LABEL: SHARES.to_string(),
    });
    label(&case, labels).await?;
    // Their controllers create them again.
    let all = case.pods();
    for old in dump["items"].as_array().into_iter().flatten() {
        let mut new = json!({ "metadata": old["metadata"], "spec": old["spec"] });
        new["spec"]["nodeName"] = Value::Null;
        let new = serde_json::from_value(new)?;
        eventually(SOON, "it is translated", async || {
            let made = all.create(&PostParams::default(), &new).await?;
            let adopted = annotation(&made, names::ADOPTED) == Some("time-slicing");
            if !adopted {
                delete(&case.client, &made, 0).await?;
            }
            ensure!(adopted, "the webhook has not heard of the label");
            Ok(())
        })
        .await?;
    }
    let mut each: BTreeMap<String, usize> = BTreeMap::new();
    for nth in 0..pods {
        let pod = all.get(&format!("web-{nth}")).await?;
        let bound = wait_bound(&case.client, &pod, 2 * SOON).await?;
        set_running(&case.client, &bound).await?;
        for (uuid, _) in assignment(&bound)?.charges {
            *each.entry(uuid.to_string()).or_default() += 1;
        }
    }
    assert_eq!(each.into_values().collect::<Vec<_>>(), [SHARES; GPUS]);
    replica.settled(&case).await?;
    case.end().await
}
