//! The gpustow extender as a process.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context as _, Result};
use hyper::Request;
use hyper::header::CONTENT_TYPE;
use serde_json::Value;

use crate::config::configure;
use crate::control_plane::ControlPlane;
use crate::net::{free_port, get, send};
use crate::process::{Launch, Process, built};

/// The series of the ledger's held memory on each GPU, in bytes.
const HELD: &str = "gpustow_extender_gpu_memory_requested_bytes{";

/// How to start an extender.
#[derive(Clone, Debug, Default)]
pub struct ExtenderOptions {
    /// Further arguments.
    pub args: Vec<String>,
    /// Fields of the GpustowConfig ([`configure`]), which is written before the extender starts; none leaves it as it is.
    pub config: Option<Vec<String>>,
    /// Environment set on top of this process's own.
    pub env: Vec<(String, String)>,
}

/// A build of the extender for a benchmark, written `name=binary`.
#[derive(Clone, Debug)]
pub struct Build {
    /// The build's name in the table.
    pub name: String,
    /// The gpustow binary.
    pub program: PathBuf,
}

impl FromStr for Build {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (name, program) = text.split_once('=').context("give NAME=BINARY")?;
        let program = PathBuf::from(program);
        built(&program, "cargo build --release --bin gpustow")?;
        Ok(Self {
            name: name.to_owned(),
            program,
        })
    }
}

/// A running extender. Ports and arguments stay the same when its process is restarted.
#[derive(Debug)]
pub struct Extender {
    /// The process.
    pub process: Process,
    /// The value for `urlPrefix`.
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
        if let Some(fields) = &options.config {
            configure(&cluster.admin()?, fields).await?;
        }
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

    /// Waits until the extender reports that it is ready, after a restart for example.
    pub async fn wait_ready(&self) -> Result<()> {
        self.process
            .until_ready(async || get(&self.health_url, "/readyz").await)
            .await?;
        Ok(())
    }

    /// The HTTP status of `/readyz`.
    pub async fn ready(&self) -> Result<u16> {
        Ok(send(&self.health_url, Request::get("/readyz"), Vec::new())
            .await?
            .0)
    }

    /// Calls a verb as kube-scheduler does; status and body of the answer.
    pub async fn call(&self, verb: &str, body: impl Into<Vec<u8>>) -> Result<(u16, Value)> {
        let call = Request::post(format!("/{verb}")).header(CONTENT_TYPE, "application/json");
        let (status, answer) = send(&self.url, call, body.into()).await?;
        let answer = serde_json::from_slice(&answer)
            .with_context(|| format!("answer of /{verb}: {}", String::from_utf8_lossy(&answer)))?;
        Ok((status, answer))
    }

    /// Its metrics as it gives them.
    pub async fn metrics(&self) -> Result<String> {
        get(&self.health_url, "/metrics").await
    }

    /// The memory that its ledger holds on each card, reservations included, by UUID in MiB. It must have been started
    /// with `--metrics-per-gpu`.
    pub async fn held(&self) -> Result<BTreeMap<String, u64>> {
        let metrics = self.metrics().await?;
        let series = metrics.lines().filter_map(|line| line.strip_prefix(HELD));
        let one = |series: &str| {
            let (_, rest) = series.split_once("gpu_uuid=\"")?;
            let (uuid, rest) = rest.split_once('"')?;
            let bytes: u64 = rest.rsplit_once(' ')?.1.parse().ok()?;
            Some((uuid.to_owned(), bytes >> 20))
        };
        series
            .map(|series| one(series).with_context(|| format!("{HELD}{series}")))
            .collect()
    }
}
