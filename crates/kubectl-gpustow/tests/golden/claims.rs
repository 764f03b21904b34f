//! The output for GPUs that pods share with ResourceClaims.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::objects::{Files, NOW, config, healthy, holder, node, report, waiting};

fn claims(mib: u64) -> Value {
    let claims = [
        json!({ "claim": "team/llm", "pod": "team/server", "heldMiB": mib }),
        json!({ "claim": "team/small", "pod": "team/probe", "heldMiB": 1024 }),
    ];
    json!({ "claims": claims, "unmanagedMiB": mib + 1024, "otherPodsMiB": mib + 1024 })
}

#[tokio::test]
async fn a_claim_is_shown_with_its_name_its_pod_and_what_it_holds() -> Result<()> {
    let [n, _] = healthy();
    let said = "0/1 nodes are available: 1 no single GPU has enough free memory.";
    let mut pod = waiting("p", said);
    pod["spec"]["containers"][0]["resources"]["limits"]["gpustow.dev/gpu-mem"] = json!("16000");
    let files = Files::new("claims", &[n, report("n", NOW, &claims(8192)), pod])?;
    for command in ["gpus -o wide", "why -n ops p"] {
        let (_, printed) = files.ask(command).await?;
        let text = "team/server 8Gi (claim team/llm)";
        ensure!(printed.contains(text), "{command}:\n{printed}");
    }
    let (_, printed) = files.ask("gpus -o json").await?;
    let printed: Value = serde_json::from_str(&printed)?;
    let holder =
        json!({ "pod": "team/server", "bytes": 8_589_934_592_u64, "through": "claim team/llm" });
    assert_eq!(printed["items"][0]["others"][0], holder);
    assert_eq!(
        printed["items"][0]["others"].as_array().map(Vec::len),
        Some(2)
    );
    // The memory of claims is not memory of an unknown process.
    let (_, rows) = files.check().await?;
    ensure!(
        !json!(rows).to_string().contains("no gpustow pod"),
        "{rows:#?}"
    );
    Ok(())
}

#[tokio::test]
async fn check_finds_claims_and_pods_that_hold_more_than_there_is() -> Result<()> {
    for (mib, over) in [(12_000, false), (13_000, true)] {
        let [n, _] = healthy();
        let objects = [
            n,
            report("n", NOW, &claims(mib)),
            holder("ours", "n", 10_000),
        ];
        let files = Files::new("over", &objects)?;
        let (_, rows) = files.check().await?;
        let problem = "ResourceClaims 13.7Gi (team/llm, team/small), which is 24Mi too much";
        ensure!(
            json!(rows).to_string().contains(problem) == over,
            "{mib}: {rows:#?}"
        );
        if over {
            files.finds("error", problem, "spec.claims.fence").await?;
        }
    }
    Ok(())
}

/// Two nodes whose GPUs a driver publishes; that of the first is fenced.
fn fenced() -> Vec<Value> {
    let slice = |name: &str| {
        json!({ "kind": "ResourceSlice", "metadata": { "name": name }, "spec": {
            "driver": "gpu.nvidia.com", "nodeName": name, "pool": { "name": name },
            "devices": [{ "name": "gpu-0", "attributes": { "uuid": { "string": format!("GPU-{name}") } } }],
        } })
    };
    let rule = json!({ "kind": "DeviceTaintRule",
        "metadata": { "name": "gpustow-1", "annotations": { "gpustow.dev/epoch": "3", "gpustow.dev/fenced-gpu": "GPU-n" } },
        "spec": {
            "deviceSelector": { "driver": "gpu.nvidia.com", "pool": "n", "device": "gpu-0" },
            "taint": { "key": "gpustow.dev/claims-fence", "effect": "NoSchedule" },
        } });
    let mut objects = healthy().to_vec();
    objects.extend([node("m", &json!({}), "24k"), report("m", NOW, &json!({}))]);
    objects.extend([
        slice("n"),
        slice("m"),
        rule,
        config(json!({ "claims": { "fence": true } })),
    ]);
    objects
}

#[tokio::test]
async fn gpus_that_are_left_to_claims_are_shown_and_take_no_pods() -> Result<()> {
    let mut objects = fenced();
    objects.push(holder("ours", "n", 23_000));
    let said = "0/2 nodes are available: 1 no single GPU has enough free memory, \
                1 the GPUs that it fits on are left to ResourceClaims.";
    objects.push(waiting("p", said));
    let files = Files::new("fenced", &objects)?;
    for (command, text) in [
        ("gpus m", "left to ResourceClaims"),
        (
            "why -n ops p",
            "the GPUs that it fits on are left to ResourceClaims",
        ),
    ] {
        let (_, printed) = files.ask(command).await?;
        ensure!(printed.contains(text), "{command}:\n{printed}");
    }
    let (_, printed) = files.ask("gpus n").await?;
    ensure!(!printed.contains("left to"), "{printed}");
    files
        .finds(
            "info",
            "pods may get 1 GPUs, and 1 are left to ResourceClaims",
            "devicetaintrules",
        )
        .await?;
    // Without the fence, they are the pods'.
    let is_config = |it: &Value| it["kind"] == "GpustowConfig";
    objects.retain(|it| !is_config(it));
    let files = Files::new("open", &objects)?;
    let (_, printed) = files.ask("gpus m").await?;
    ensure!(!printed.contains("left to"), "{printed}");
    Ok(())
}

#[tokio::test]
async fn check_finds_a_fence_that_the_api_server_cannot_keep() -> Result<()> {
    let mut objects = fenced();
    let condition = |kind: &str| {
        json!({ "type": kind, "status": "False", "reason": "NotServed", "message": "the API server serves no DeviceTaintRules",
                "lastTransitionTime": NOW })
    };
    let Some(config) = objects.last_mut() else {
        return Ok(());
    };
    config["status"] = json!({ "conditions": [condition("Working"), condition("Claims")] });
    let files = Files::new("unserved", &objects)?;
    files
        .finds(
            "error",
            "Claims does not work: the API server serves no DeviceTaintRules",
            "docs/claims.md",
        )
        .await?;
    Ok(())
}
