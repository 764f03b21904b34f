//! The output for pods that have their GPUs from another sharer.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::objects::{Files, healthy};

/// A node whose GPU a pod of gpushare, a pod of HAMi and a process of the host share.
fn shared() -> Vec<Value> {
    let [mut node, mut report] = healthy();
    node["status"]["capacity"] = json!({ "aliyun.com/gpu-mem": "24000" });
    let gpu = &mut report["status"]["gpus"][0];
    for (key, mib) in [
        ("unmanagedMiB", 15_500),
        ("otherPodsMiB", 15_000),
        ("hostMiB", 500),
    ] {
        gpu[key] = json!(mib);
    }
    let pod = |name: &str, limits: Value, annotations: Value| {
        json!({ "kind": "Pod",
            "metadata": { "namespace": "old", "name": name, "uid": name, "annotations": annotations },
            "spec": { "nodeName": "n", "containers": [{ "name": "main", "resources": { "limits": limits } }] },
            "status": { "phase": "Running" } })
    };
    let gpushare = json!({ "ALIYUN_COM_GPU_MEM_IDX": "0", "ALIYUN_COM_GPU_MEM_POD": "12000", "ALIYUN_COM_GPU_MEM_DEV": "24000" });
    let hami = json!({ "hami.io/vgpu-devices-allocated": "GPU-n,NVIDIA-L4,3000,0:;" });
    let plugin = json!({ "kind": "Pod", "metadata": { "namespace": "kube-system", "name": "plugin", "uid": "plugin" },
        "spec": { "nodeName": "n", "containers": [{ "name": "a", "image": "example.com/acs/k8s-gpushare-plugin:v2" }] },
        "status": { "phase": "Running" } });
    let class = json!({ "kind": "DeviceClass", "apiVersion": "resource.k8s.io/v1", "metadata": { "name": "memory" },
        "spec": { "extendedResourceName": "gpustow.dev/gpu-mem" } });
    let runs = |name: &str, image: &str| {
        json!({ "kind": "Pod", "metadata": { "namespace": "kube-system", "name": name, "uid": name },
            "spec": { "nodeName": "n", "containers": [{ "name": "a", "image": image }] },
            "status": { "phase": "Running" } })
    };
    vec![
        node,
        report,
        pod("a", json!({ "aliyun.com/gpu-mem": "12000" }), gpushare),
        pod(
            "b",
            json!({ "nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000" }),
            hami,
        ),
        pod("c", json!({ "nvidia.com/gpu": "1" }), json!({})),
        plugin,
        class,
        runs("volcano", "docker.io/volcanosh/vc-scheduler:v1.13.0"),
        runs("nvidia", "nvcr.io/nvidia/k8s-device-plugin:v0.18.0"),
        runs(
            "kai",
            "ghcr.io/kai-scheduler/kai-scheduler/scheduler:v0.18.0",
        ),
    ]
}

#[tokio::test]
async fn every_holder_of_a_gpu_is_named_with_its_share() -> Result<()> {
    let files = Files::new("owners", &shared())?;
    let owners = [
        "old/a 11.7Gi (gpushare)",
        "old/b 2.9Gi (hami)",
        "host processes 500Mi",
    ];
    let (_, table) = files.ask("gpus").await?;
    let (_, top) = files.ask("top -1").await?;
    let (_, json) = files.ask("gpus -o json").await?;
    let json: Value = serde_json::from_str(&json)?;
    let others = json!([
        { "pod": "old/a", "bytes": 12_000_u64 << 20, "through": "gpushare" },
        { "pod": "old/b", "bytes": 3_000_u64 << 20, "through": "hami" },
        { "bytes": 500_u64 << 20 },
    ]);
    assert_eq!(json["items"][0]["others"], others);
    let mut waiting = shared();
    waiting.push(json!({ "kind": "Pod", "metadata": { "namespace": "new", "name": "p", "uid": "p" },
        "spec": { "containers": [{ "name": "main", "resources": { "limits": { "gpustow.dev/gpu-mem": "20000" } } }] } }));
    let files = Files::new("owners-why", &waiting)?;
    let (_, why) = files.ask("why p -n new").await?;
    ensure!(
        why.contains(&format!("not gpustow's: {}", owners.join(", "))),
        "{why}"
    );
    for owner in owners {
        ensure!(table.contains(owner), "{table}");
        ensure!(top.contains(owner), "{top}");
    }
    Ok(())
}

#[tokio::test]
async fn check_says_which_sharers_run_and_in_which_unit_they_count() -> Result<()> {
    let files = Files::new("sharers", &shared())?;
    let rehearse = "kubectl gpustow adopt --dry-run";
    for sharer in ["gpushare", "hami"] {
        let problem = format!("has its GPU memory from {sharer}");
        find(&files, "info", &problem, rehearse).await?;
    }
    find(
        &files,
        "info",
        "aliyun.com/gpu-mem is counted in MiB here",
        "gpustow.dev/adopt-unit=MiB",
    )
    .await?;
    for sharer in ["gpushare", "Volcano", "KAI", "NVIDIA's device plugin"] {
        let problem = format!("is a part of {sharer}, which");
        find(&files, "info", &problem, "remove it when the last").await?;
    }
    find(
        &files,
        "info",
        "its requests of aliyun.com/gpu-mem seem to be in MiB: the largest is 12000",
        "label it gpustow.dev/adopt-unit=MiB",
    )
    .await?;
    find(
        &files,
        "warning",
        "maps gpustow.dev/gpu-mem to its devices",
        "spec.extendedResourceName",
    )
    .await?;
    let (_, rows) = files.check().await?;
    let unknown = rows.iter().any(|row| {
        row["problem"]
            .as_str()
            .unwrap_or_default()
            .contains("belong to no gpustow pod")
    });
    ensure!(!unknown, "{rows:#?}");
    let mut objects = shared();
    objects[2]["metadata"]["annotations"] = json!({});
    let files = Files::new("unreadable", &objects)?;
    find(
        &files,
        "warning",
        "what gpushare gave it cannot be read",
        "create it again",
    )
    .await
}

/// `check` has this row, whatever else it prints.
async fn find(files: &Files, level: &str, problem: &str, fix: &str) -> Result<()> {
    let (_, rows) = files.check().await?;
    let found = rows.iter().any(|row| {
        let has = |key: &str, text: &str| row[key].as_str().is_some_and(|it| it.contains(text));
        row["level"] == level && has("problem", problem) && has("fix", fix)
    });
    ensure!(found, "no {problem:?} in {rows:#?}");
    Ok(())
}
