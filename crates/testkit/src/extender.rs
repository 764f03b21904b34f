//! The gpustow extender as a process.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::control_plane::ControlPlane;
use crate::net::{free_port, get};
use crate::process::{Launch, Process};

/// How to start an extender.
#[derive(Clone, Debug, Default)]
pub struct ExtenderOptions {
    /// Further arguments.
    pub args: Vec<String>,
    /// Environment set on top of this process's own.
    pub env: Vec<(String, String)>,
}

/// A running extender. Ports and arguments stay the same when its process is restarted.
#[derive(Debug)]
pub struct Extender {
    /// The process.
    pub process: Process,
    /// What goes into `urlPrefix`.
    pub url: String,
    /// Where health and metrics are.
    pub health_url: String,
}

impl Extender {
    /// Starts `program`, the gpustow binary, with the identity in `kubeconfig`, and waits until it
    /// is ready.
    pub async fn start(
        cluster: &ControlPlane,
        program: &Path,
        kubeconfig: &Path,
        options: ExtenderOptions,
    ) -> Result<Extender> {
        let extender = Extender::launch(cluster, program, kubeconfig, options)?;
        extender.wait_ready().await?;
        Ok(extender)
    }

    /// The same without waiting.
    pub fn launch(
        cluster: &ControlPlane,
        program: &Path,
        kubeconfig: &Path,
        options: ExtenderOptions,
    ) -> Result<Extender> {
        let (port, health) = (free_port()?, free_port()?);
        let mut args = vec![
            format!("--listen=127.0.0.1:{port}"),
            format!("--health-listen=127.0.0.1:{health}"),
            format!("--kubeconfig={}", kubeconfig.display()),
        ];
        args.extend(options.args);
        let log = cluster.dir().join(format!("extender-{port}.log"));
        let program = PathBuf::from(program);
        let process = Process::start(Launch {
            program,
            args,
            env: options.env,
            log,
        })?;
        Ok(Extender {
            process,
            url: format!("http://127.0.0.1:{port}"),
            health_url: format!("http://127.0.0.1:{health}"),
        })
    }

    /// Waits until it says that it is ready, after a restart for example.
    pub async fn wait_ready(&self) -> Result<()> {
        self.process
            .until_ready(async || get(&self.health_url, "/readyz").await)
            .await?;
        Ok(())
    }

    /// Its metrics as it gives them.
    pub async fn metrics(&self) -> Result<String> {
        get(&self.health_url, "/metrics").await
    }
}
