//! The output of `capacity` for autoscalers about instance types.

use anyhow::{Result, ensure};
use serde_json::json;

use crate::objects::{Files, healthy};

fn of_type(name: &str) -> Result<Files> {
    let mut objects = healthy().to_vec();
    objects[0]["metadata"]["labels"] = json!({ "node.kubernetes.io/instance-type": name });
    Files::new(&format!("capacity-{name}"), &objects)
}

#[tokio::test]
async fn capacity_lists_present_and_described_instance_types() -> Result<()> {
    let files = of_type("g5.xlarge")?;
    let (_, printed) = files
        .ask("capacity --instance-type g5.48xlarge=8x22731")
        .await?;
    let rows: Vec<Vec<&str>> = printed
        .lines()
        .map(|row| row.split_whitespace().collect())
        .collect();
    let heads = vec!["INSTANCE-TYPE", "NODES", "GPUS", "GPU-MIB", "NODE-MIB"];
    let described = vec!["g5.48xlarge", "0", "8", "22731", "181848"];
    let present = vec!["g5.xlarge", "1", "1", "24000", "24000"];
    ensure!(rows == [heads, described, present], "{printed}");
    Ok(())
}

#[tokio::test]
async fn capacity_prints_node_overlays_for_karpenter() -> Result<()> {
    let files = of_type("p5.48xlarge")?;
    let (_, printed) = files.ask("capacity --for karpenter").await?;
    let overlay: serde_json::Value = serde_yaml::from_str(printed.trim_start_matches("---\n"))?;
    let wanted = json!({
        "apiVersion": "karpenter.sh/v1alpha1",
        "kind": "NodeOverlay",
        "metadata": {"name": "gpustow.p5.48xlarge"},
        "spec": {
            "requirements": [{
                "key": "node.kubernetes.io/instance-type", "operator": "In", "values": ["p5.48xlarge"],
            }],
            "capacity": {"gpustow.dev/gpu-mem": "24000"},
        },
    });
    assert_eq!(overlay, wanted);
    Ok(())
}

#[tokio::test]
async fn capacity_prints_tags_for_cluster_autoscaler() -> Result<()> {
    let files = of_type("g6.xlarge")?;
    let (_, printed) = files.ask("capacity --for cluster-autoscaler").await?;
    let tag = "k8s.io/cluster-autoscaler/node-template";
    let wanted = format!(
        "g6.xlarge {tag}/resources/gpustow.dev/gpu-mem=24000\n\
         g6.xlarge {tag}/label/gpustow.dev/gpu-memory=24000\n\
         g6.xlarge {tag}/label/gpustow.dev/gpus=1\n"
    );
    assert_eq!(printed, wanted);
    Ok(())
}

#[tokio::test]
async fn capacity_without_instance_types_says_how_to_describe_them() -> Result<()> {
    let files = Files::new("capacity-none", &healthy())?;
    let (_, printed) = files.ask("capacity").await?;
    ensure!(
        printed.contains("node.kubernetes.io/instance-type"),
        "{printed}"
    );
    let failed = files.ask("capacity --for karpenter").await;
    let error = failed.err().map(|error| error.to_string());
    ensure!(
        error
            .as_ref()
            .is_some_and(|it| it.contains("--instance-type")),
        "{error:?}"
    );
    for bad in ["g5.xlarge", "g5.xlarge=0x100", "a b=1x1", "g5=1xlarge"] {
        let bad = bad.replace(' ', "/");
        let refused = files.ask(&format!("capacity --instance-type {bad}")).await;
        let error = refused.err().map(|error| error.to_string());
        ensure!(
            error.as_ref().is_some_and(|it| it.contains("COUNTxMIB")),
            "{error:?}"
        );
    }
    Ok(())
}
