//! The output for GPUs that an administrator has cordoned.

use anyhow::{Result, ensure};
use serde_json::json;

use crate::objects::{Files, healthy, waiting};

#[tokio::test]
async fn a_cordoned_gpu_is_shown_as_such() -> Result<()> {
    let mut objects = healthy().to_vec();
    objects[0]["metadata"]["annotations"] = json!({ "gpustow.dev/cordoned-gpus": "GPU-n,GPU-m" });
    let said = "0/1 nodes are available: 1 the GPUs that it fits on are cordoned.";
    objects.push(waiting("p", said));
    let files = Files::new("cordoned", &objects)?;
    for (command, text) in [
        ("gpus", "cordoned"),
        ("nodes", "1 cordoned"),
        ("why -n ops p", "the GPUs that it fits on are cordoned"),
    ] {
        let (_, printed) = files.ask(command).await?;
        ensure!(printed.contains(text), "{command}:\n{printed}");
    }
    let (_, printed) = files.ask("gpus").await?;
    ensure!(!printed.contains("unhealthy"), "{printed}");
    files
        .finds(
            "warning",
            "gpustow.dev/cordoned-gpus names \"GPU-m\"",
            "write UUIDs",
        )
        .await?;
    Ok(())
}
