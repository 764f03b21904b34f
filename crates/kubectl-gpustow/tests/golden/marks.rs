//! The output of `check` for nodes that an extender marked for autoscalers.

use anyhow::{Result, ensure};
use gpustow_api::names;
use serde_json::json;

use crate::objects::{Files, healthy, part};

#[tokio::test]
async fn check_finds_marks_that_no_extender_takes_off() -> Result<()> {
    let mut objects = healthy().to_vec();
    let node = objects.iter_mut().find(|it| it["kind"] == "Node");
    let node = node.ok_or_else(|| anyhow::anyhow!("no node"))?;
    let name = node["metadata"]["name"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    let [_, (who, key)] = names::SPARE_NODE;
    node["metadata"]["labels"][names::RESERVED_LABEL] = json!(who);
    let problem = "autoscalers never remove this node";
    for found in [true, false] {
        let mut objects = objects.clone();
        // An extender unmarks them, whatever is configured.
        objects.extend((!found).then(|| part("e", "initContainers", "extender", &[], true)));
        let files = Files::new("marks", &objects)?;
        let (_, rows) = files.check().await?;
        let is_there = json!(rows).to_string().contains(problem);
        ensure!(is_there == found, "{rows:#?}");
        if found {
            let fix = format!("kubectl annotate node {name} {key}- && kubectl label node {name}");
            files.finds("warning", problem, &fix).await?;
        }
    }
    Ok(())
}
