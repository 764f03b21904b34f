//! `version`, with and without a cluster.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::objects::Files;

fn part(name: &str, container: &str, image: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "Pod",
        "metadata": { "namespace": "gpustow-system", "name": name, "uid": name },
        "spec": { "containers": [{ "name": container, "image": image }] } })
}

#[tokio::test]
async fn version_names_the_images_of_the_parts_in_the_cluster() -> Result<()> {
    let files = Files::new(
        "version",
        &[
            part("e-0", "extender", "gpustow:v0.1.0"),
            part("a-0", "agent", "gpustow-agent:v0.1.0"),
            part("a-1", "agent", "gpustow-agent:v0.1.0"),
            part("a-2", "agent", "gpustow-agent:v0.0.9"),
        ],
    )?;
    let (_, printed) = files.ask("version").await?;
    let own = env!("CARGO_PKG_VERSION");
    let wanted = format!(
        "kubectl-gpustow: v{own}\nextender: gpustow:v0.1.0 (1 pods)\n\
         agent: gpustow-agent:v0.0.9 (1 pods)\nagent: gpustow-agent:v0.1.0 (2 pods)\n"
    );
    ensure!(printed == wanted, "{printed}");
    Ok(())
}
