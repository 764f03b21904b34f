//! The output for GPUs with MPS and for pods with a share of their compute.

use anyhow::{Result, ensure};
use serde_json::json;

use crate::objects::{Files, healthy, waiting};

#[tokio::test]
async fn compute_of_a_gpu_and_what_a_pod_lacks_of_it_are_shown() -> Result<()> {
    let mut objects = healthy().to_vec();
    objects[1]["status"]["gpus"][0]["mps"] = json!(true);
    let assignment = json!({ "version": 1, "gpus": [{ "uuid": "GPU-n", "mib": 2048 }],
        "containers": { "main": ["GPU-n"] }, "computePercent": 70 });
    let share = |mut pod: serde_json::Value, percent: &str| {
        pod["metadata"]["annotations"] = json!({ "gpustow.dev/compute-percent": percent });
        pod
    };
    let mut bound = share(waiting("bound", ""), "70");
    bound["metadata"]["annotations"]["gpustow.dev/assignment"] = json!(assignment.to_string());
    bound["spec"]["nodeName"] = json!("n");
    bound["status"] = json!({ "phase": "Running" });
    let said = "0/1 nodes are available: 1 not enough free compute on any one GPU with the memory.";
    objects.extend([bound, share(waiting("large", said), "40")]);
    objects.push(waiting("plain", said));
    let files = Files::new("compute", &objects)?;
    for (command, text) in [
        ("gpus -o json", "\"availableComputePercent\": 30"),
        ("gpus -o wide", "COMPUTE%"),
        (
            "why -n ops large",
            "not enough free compute on any one GPU with the memory",
        ),
        ("why -n ops large", "30 % of compute free"),
        (
            "why -n ops plain",
            "GPUs with MPS take only pods with compute-percent",
        ),
        ("why -n ops plain", "has MPS, for pods with compute-percent"),
    ] {
        let (_, printed) = files.ask(command).await?;
        ensure!(printed.contains(text), "{command}:\n{printed}");
    }
    Ok(())
}
