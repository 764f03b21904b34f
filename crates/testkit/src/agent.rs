//! The node agent as a process.

use std::path::Path;

use anyhow::Result;

use crate::control_plane::ControlPlane;
use crate::net::{free_port, get};
use crate::process::{Launch, Process};

/// A running agent of one node.
#[derive(Debug)]
pub struct Agent {
    /// The process.
    pub process: Process,
    /// Where health and metrics are.
    pub health_url: String,
}

impl Agent {
    /// Starts `program`, the agent's binary, for a node that exists, with the token that its kubelet
    /// would give it.
    pub async fn start(
        cluster: &ControlPlane,
        program: &Path,
        node: &str,
        args: &[String],
    ) -> Result<Agent> {
        let kubeconfig = cluster.agent_kubeconfig(node).await?;
        let port = free_port()?;
        let no_kubelet = cluster.dir().join("kubelet.sock");
        let mut all = vec![
            format!("--node-name={node}"),
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--pod-resources={}", no_kubelet.display()),
            format!("--listen=127.0.0.1:{port}"),
        ];
        all.extend_from_slice(args);
        let process = Process::start(Launch {
            program: program.to_owned(),
            args: all,
            env: Vec::new(),
            log: cluster.dir().join(format!("agent-{node}.log")),
        })?;
        Ok(Agent {
            process,
            health_url: format!("http://127.0.0.1:{port}"),
        })
    }

    /// Waits until it has reported on its node.
    pub async fn wait_ready(&self) -> Result<()> {
        let ready = async || get(&self.health_url, "/readyz").await;
        self.process.until_ready(ready).await.map(drop)
    }

    /// Its metrics as it gives them.
    pub async fn metrics(&self) -> Result<String> {
        get(&self.health_url, "/metrics").await
    }
}
