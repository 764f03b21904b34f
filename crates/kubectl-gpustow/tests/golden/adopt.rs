//! The rehearsal of a move from other GPU sharers.

use anyhow::{Context as _, Result, ensure};
use kubectl_gpustow::Answer;
use serde_json::{Value, json};

use crate::objects::{Files, NOW, config, node};

fn namespace(name: &str, labels: &Value) -> Value {
    json!({ "kind": "Namespace", "metadata": { "name": name, "labels": labels } })
}

/// A node with two GPUs of 24000 MiB, which other sharers' pods hold.
fn gpus(name: &str, other_pods_mib: u64) -> [Value; 2] {
    let gpu = |index: u64| {
        json!({ "uuid": format!("GPU-{name}-{index}"), "index": index, "model": "NVIDIA A10", "totalMiB": 24000,
            "unmanagedMiB": other_pods_mib, "otherPodsMiB": other_pods_mib })
    };
    let report = json!({ "kind": "GpuNode", "metadata": { "name": name }, "spec": {},
        "status": { "heartbeat": NOW, "gpus": [gpu(0), gpu(1)] } });
    [node(name, &json!({}), "48000"), report]
}

/// A pod of another sharer that runs on a node.
fn pod(namespace: &str, name: &str, node: &str, annotations: &Value, limits: &Value) -> Value {
    json!({ "kind": "Pod",
        "metadata": { "namespace": namespace, "name": name, "uid": format!("{namespace}-{name}"), "annotations": annotations },
        "spec": { "nodeName": node, "schedulerName": "default-scheduler", "containers": [
            { "name": "main", "resources": { "limits": limits, "requests": limits } }] },
        "status": { "phase": "Running" } })
}

/// Total and rows, as JSON.
async fn rehearsed(files: &Files, flags: &str) -> Result<(Answer, Value, Vec<Value>)> {
    let (answer, text) = files
        .ask(&format!("adopt --dry-run {flags} -o json"))
        .await?;
    let list: Value = serde_json::from_str(&text)?;
    let rows = list["items"].as_array().cloned().context(text)?;
    Ok((answer, list["total"].clone(), rows))
}

fn becomes(rows: &[Value], pod: &str) -> Value {
    let row = rows.iter().find(|row| row["pod"] == pod);
    row.map_or(Value::Null, |row| row["becomes"].clone())
}

#[tokio::test]
async fn pods_of_every_sharer_are_translated_and_placed_together() -> Result<()> {
    let none = json!({});
    let a10 = json!({ "nvidia.com/use-gputype": "A10" });
    let [node, report] = gpus("n", 20_000);
    let objects = [
        node,
        report,
        config(json!({ "scheduling": { "policy": "binpack" } })),
        namespace(
            "old",
            &json!({ "gpustow.dev/adopt": "gpushare", "gpustow.dev/adopt-unit": "MiB" }),
        ),
        namespace("new", &json!({})),
        namespace("train", &json!({})),
        pod(
            "old",
            "a",
            "n",
            &none,
            &json!({ "aliyun.com/gpu-mem": "9000" }),
        ),
        pod(
            "new",
            "b",
            "n",
            &a10,
            &json!({ "nvidia.com/gpu": "1", "nvidia.com/gpumem": "8000", "nvidia.com/gpucores": "30" }),
        ),
        pod("train", "c", "n", &none, &json!({ "nvidia.com/gpu": "1" })),
    ];
    let files = Files::new("adopt", &objects)?;
    let (answer, total, rows) = rehearsed(&files, "").await?;
    assert_eq!(becomes(&rows, "old/a"), "main: gpustow.dev/gpu-mem 9000");
    assert_eq!(
        becomes(&rows, "new/b"),
        "main: gpustow.dev/gpu-mem 8000, gpustow.dev/gpu-models *A10*"
    );
    assert_eq!(becomes(&rows, "train/c"), "main: 1 whole GPU");
    let sharers: Vec<_> = rows.iter().map(|row| row["adopt"].clone()).collect();
    assert_eq!(sharers, ["hami", "gpushare", "whole"]);
    ensure!(rows.iter().all(|row| row["node"] == "n"), "{rows:#?}");
    let note = &rows[0]["note"];
    assert_eq!(note, "without nvidia.com/gpucores: compute is not limited");
    for (sum, count) in [
        ("translated", 3),
        ("refused", 0),
        ("waiting", 0),
        ("gpusNow", 2),
        ("gpusThen", 2),
    ] {
        assert_eq!(total[sum], count, "{sum}");
    }
    assert_eq!(answer, Answer::Yes);
    let (_, table) = files.ask("adopt --dry-run").await?;
    let sums = "0 refused, 0 without a GPU; all pods take 2 of 2 GPUs, now 2";
    ensure!(table.contains(sums), "{table}");
    Ok(())
}

#[tokio::test]
async fn cluster_with_ten_pods_on_each_gpu_moves_with_all_of_them() -> Result<()> {
    let limits = json!({ "nvidia.com/gpu": "1" });
    let mut objects = vec![namespace("serving", &json!({}))];
    for name in ["a", "b", "c", "d"] {
        let [mut node, report] = gpus(name, 20_000);
        node["metadata"]["labels"]["nvidia.com/gpu.replicas"] = json!("10");
        objects.extend([node, report]);
        objects.extend((0..20).map(|it| {
            let pod_name = format!("{name}-{it}");
            pod("serving", &pod_name, name, &json!({}), &limits)
        }));
    }
    let files = Files::new("adopt-time-slicing", &objects)?;
    let (answer, total, rows) = rehearsed(&files, "").await?;
    assert_eq!(rows[0]["adopt"], "time-slicing");
    assert_eq!(rows[0]["becomes"], "main: 10 % of a GPU, at least 102 MiB");
    for (sum, count) in [("translated", 80), ("refused", 0), ("waiting", 0)] {
        assert_eq!(total[sum], count, "{sum}");
    }
    assert_eq!(answer, Answer::Yes);
    Ok(())
}

#[tokio::test]
async fn pods_that_would_be_refused_or_wait_are_named_and_keep_what_they_hold() -> Result<()> {
    let none = json!({});
    let of = |part: &str| json!({ "nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": part });
    let [node, report] = gpus("n", 20_000);
    let objects = [
        node,
        report,
        namespace("typo", &json!({ "gpustow.dev/adopt": "nvshare" })),
        pod("hami", "half", "n", &none, &of("50")),
        pod("hami", "more", "n", &none, &of("500")),
        pod(
            "typo",
            "a",
            "n",
            &none,
            &json!({ "aliyun.com/gpu-mem": "1" }),
        ),
        pod(
            "team",
            "large",
            "n",
            &none,
            &json!({ "aliyun.com/gpu-mem": "5" }),
        ),
    ];
    let files = Files::new("adopt-refused", &objects)?;
    let (answer, total, rows) = rehearsed(&files, "").await?;
    let note = |pod: &str| {
        let row = rows.iter().find(|row| row["pod"] == pod);
        row.and_then(|row| row["note"].as_str()).unwrap_or_default()
    };
    ensure!(
        note("hami/more").contains("for a percentage that is not 1 to 100"),
        "{rows:#?}"
    );
    ensure!(note("typo/a").contains("nvshare is no sharer"), "{rows:#?}");
    // 20000 of 24000 MiB of each GPU stay with pods that are refused.
    assert_eq!(total["waiting"], 2);
    assert_eq!(
        (&total["refused"], &total["gpusThen"]),
        (&json!(2), &json!(2))
    );
    assert_eq!(answer, Answer::No);
    // Of another namespace alone, and with the size of the GPUs.
    let (answer, total, rows) = rehearsed(&files, "-n hami --mib-per-gpu 24000").await?;
    assert_eq!(
        becomes(&rows, "hami/half"),
        "main: 50 % of a GPU, at least 12000 MiB"
    );
    assert_eq!((rows.len(), &total["waiting"]), (2, &json!(1)));
    assert_eq!(answer, Answer::No);
    Ok(())
}

#[tokio::test]
async fn requests_are_translated_before_agents_run_and_nothing_runs_without_the_flag() -> Result<()>
{
    let objects = [pod(
        "a",
        "b",
        "n",
        &json!({}),
        &json!({ "volcano.sh/vgpu-number": "2" }),
    )];
    let files = Files::new("adopt-early", &objects)?;
    let (answer, total, rows) = rehearsed(&files, "").await?;
    assert_eq!(becomes(&rows, "a/b"), "main: 2 whole GPUs");
    assert_eq!((answer, &total["gpusThen"]), (Answer::Yes, &Value::Null));
    let refused = files.ask("adopt").await.err().context("adopt ran")?;
    ensure!(refused.to_string().contains("add --dry-run"), "{refused}");
    Ok(())
}

fn quota(namespace: &str, hard: &Value) -> Value {
    json!({ "kind": "ResourceQuota", "metadata": { "namespace": namespace, "name": "gpus" }, "spec": { "hard": hard } })
}

fn range(namespace: &str, limits: &Value) -> Value {
    json!({ "kind": "LimitRange", "metadata": { "namespace": namespace, "name": "gpus" },
        "spec": { "limits": [limits] } })
}

#[tokio::test]
async fn rehearsal_and_check_name_what_quotas_and_limit_ranges_become() -> Result<()> {
    let whole = json!({ "nvidia.com/gpu": "1" });
    let label = |sharer: &str| json!({ "gpustow.dev/adopt": sharer });
    let objects = [
        namespace("whole", &label("whole")),
        namespace(
            "sized",
            &json!({ "gpustow.dev/adopt": "whole", "gpustow.dev/adopt-mib-per-gpu": "24000" }),
        ),
        namespace("share", &label("gpushare")),
        namespace("hami", &label("hami")),
        namespace("done", &label("whole")),
        namespace("stays", &json!({})),
        pod("later", "a", "n", &json!({}), &whole),
        quota(
            "whole",
            &json!({ "requests.nvidia.com/gpu": "4", "cpu": "8" }),
        ),
        quota("sized", &json!({ "requests.nvidia.com/gpu": "4" })),
        quota("share", &json!({ "requests.aliyun.com/gpu-mem": "20" })),
        quota(
            "hami",
            &json!({ "requests.nvidia.com/gpu": "4", "requests.nvidia.com/gpumem": "9000" }),
        ),
        quota(
            "done",
            &json!({ "requests.nvidia.com/gpu": "4", "requests.gpustow.dev/gpu-mem": "4096" }),
        ),
        quota("stays", &json!({ "requests.nvidia.com/gpu": "4" })),
        quota("later", &json!({ "requests.nvidia.com/gpu": "1" })),
        range(
            "whole",
            &json!({ "type": "Container", "max": { "nvidia.com/gpu": "1" } }),
        ),
        range(
            "stays",
            &json!({ "type": "Container", "max": { "gpustow.dev/gpu-mem": "24576" } }),
        ),
    ];
    let files = Files::new("adopt-bounds", &objects)?;
    let (answer, total, rows) = rehearsed(&files, "").await?;
    assert_eq!(answer, Answer::No);
    assert_eq!(total["translated"], 1);
    for (namespace, mib) in [
        ("whole", 4096),
        ("sized", 96_000),
        ("share", 20_480),
        ("hami", 9000),
        ("later", 1024),
    ] {
        let row = becomes(&rows, &format!("resourcequota/{namespace}/gpus"));
        assert_eq!(row, format!("requests.gpustow.dev/gpu-mem {mib}"));
    }
    let row = rows
        .iter()
        .find(|row| row["pod"] == "limitrange/whole/gpus");
    let note = row.map_or(Value::Null, |row| row["note"].clone());
    ensure!(
        note.to_string().contains("remove nvidia.com/gpu from it"),
        "{rows:#?}"
    );
    // Objects that hold as before are not named.
    let named = rows.iter().filter_map(|row| row["pod"].as_str());
    let named: Vec<_> = named
        .filter(|it| it.contains("/done/") || it.contains("/stays/"))
        .collect();
    ensure!(named.is_empty(), "{named:?}");
    let (_, names) = files.ask("adopt --dry-run -n whole -o name").await?;
    assert_eq!(names, "limitrange/whole/gpus\nresourcequota/whole/gpus\n");

    let (_, found) = files.check().await?;
    for (object, level, problem, fix) in [
        (
            "resourcequota/whole/gpus",
            "warning",
            "it counts no pod",
            "requests.gpustow.dev/gpu-mem 4096",
        ),
        (
            "limitrange/whole/gpus",
            "warning",
            "translates refused",
            "remove nvidia.com/gpu from it",
        ),
        (
            "limitrange/stays/gpus",
            "warning",
            "gives 24576 MiB of GPU memory to each container",
            "set default: {gpustow.dev/gpu-mem: \"0\"}",
        ),
    ] {
        let row = found.iter().find(|row| row["object"] == object);
        let row = row.context(format!("{object}: {found:#?}"))?;
        let has = |key: &str, text: &str| row[key].as_str().is_some_and(|it| it.contains(text));
        ensure!(
            row["level"] == level && has("problem", problem) && has("fix", fix),
            "{row:#?}"
        );
    }
    Ok(())
}
