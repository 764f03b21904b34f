//! The agent's Events while the API server does not take them.

use anyhow::{Result, ensure};
use axum::http::{Method, StatusCode, Uri};
use gpustow_testkit::{Action, ApiProxy, Case};
use kube::Client;

use crate::agent::AgentNode;
use crate::agent_token::agent_config;
use crate::support::{SOON, event, rig};

#[tokio::test]
async fn an_event_that_the_api_server_did_not_take_is_written_once_it_does() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "untold").await?;
    let mut node = AgentNode::start(rig.cluster, &case).await?;
    let proxy = ApiProxy::start(rig.cluster).await?;
    let events = |method: &Method, uri: &Uri| {
        method == Method::POST && uri.path().starts_with("/apis/events.k8s.io/")
    };
    let failing = proxy.rule(events, Action::Answer(StatusCode::SERVICE_UNAVAILABLE, ""));
    let mut config = agent_config(rig.cluster, &node.name).await?;
    config.cluster_url = proxy.url().parse()?;
    node.restart_with(Client::try_from(config)?, &[]).await?;
    let pod = node.gets_busy(&case).await?;
    failing.seen(3, SOON).await?;
    drop(failing);
    let note = event(&case.client, &pod, "OverGpuMemory").await?;
    ensure!(note.contains("Uses 8500 MiB"), "{note}");
    node.end().await;
    rig.end(case).await
}
