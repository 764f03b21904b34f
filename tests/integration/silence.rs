//! Nodes whose agent falls silent, as `kubectl describe node` shows it.

use std::path::Path;

use anyhow::{Result, ensure};
use gpustow_testkit::{Case, Extender, ExtenderOptions, eventually};
use serde_json::json;

use crate::fault_rig::control_plane;
use crate::support::{ACCOUNT, SOON, SYSTEM, gpustow, node_event};

#[tokio::test]
async fn a_node_whose_agent_falls_silent_has_an_event() -> Result<()> {
    // A control plane of its own. On another, nodes of other cases fall silent at once, and only some of them get an
    // Event.
    let cluster = control_plane().await?;
    let case = Case::new(&cluster, "silent").await?;
    let kubeconfig = cluster.kubeconfig(SYSTEM, ACCOUNT, None).await?;
    let options = ExtenderOptions {
        config: Some(vec!["scheduling: {staleAfter: 6s}".to_owned()]),
        ..ExtenderOptions::default()
    };
    let program: &Path = gpustow();
    let extender = Extender::start(&cluster, program, &kubeconfig, options).await?;
    // Asked once, it decides.
    let pod = case.pod("p").gpu_mem(1).create(&case.client).await?;
    let body = json!({ "Pod": pod, "Nodes": null, "NodeNames": [] });
    eventually(SOON, "the extender decides", async || {
        let (status, answer) = extender.call("filter", body.to_string()).await?;
        ensure!(status == 200 && answer["Error"] == "", "{answer}");
        Ok(())
    })
    .await?;
    // A report that no agent repeats.
    case.node("n", &[8192]).create(&case.client).await?;
    let note = node_event(&case.client, &case.node_name("n"), "GpuAgentSilent").await?;
    ensure!(note.contains("has not reported for 6 s"), "{note}");
    case.end().await
}
