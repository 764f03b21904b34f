//! gpustow's webhook next to a control plane: an extender that no scheduler calls.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use gpustow_api::names;
use serde_json::{Value, json};

use crate::certificate::certificate;
use crate::control_plane::ControlPlane;
use crate::net::free_port;
use crate::process::{Launch, Process};

/// Where it is served here.
const ADDRESS: &str = "127.0.0.1";
const KIND: &str = "mutatingwebhookconfiguration";

/// An extender that serves the webhook of the manifests, at an address instead of behind a Service.
#[derive(Debug)]
pub struct Webhook {
    /// The extender.
    pub process: Process,
    /// Where its certificate lies.
    pub folder: PathBuf,
    port: u16,
}

impl Webhook {
    /// Starts `program`, the gpustow binary, with these further arguments, and has the installed configuration call it.
    ///
    /// # Errors
    /// gpustow is not installed, or the process cannot start.
    pub async fn start(cluster: &ControlPlane, program: &Path, args: &[String]) -> Result<Self> {
        let (port, health) = (free_port()?, free_port()?);
        let folder = cluster.dir().join(format!("webhook-{port}"));
        std::fs::create_dir_all(&folder)?;
        let authority = certificate(&folder, ADDRESS)?;
        let account = |name| cluster.kubeconfig(names::NAMESPACE, name, None);
        let kubeconfig = match account(names::SCHEDULER).await {
            Ok(found) => found,
            Err(_) => account(names::EXTENDER).await?,
        };
        let own = [
            format!("--kubeconfig={}", kubeconfig.display()),
            "--listen=127.0.0.1:0".to_owned(),
            format!("--health-listen={ADDRESS}:{health}"),
            format!("--webhook-listen={ADDRESS}:{port}"),
            format!("--webhook-tls={}", folder.display()),
            format!("--identity=webhook-{port}"),
            // Which it may not read: so it never leads.
            format!("--lease={}/webhook", names::NAMESPACE),
        ];
        let process = Process::start(Launch {
            program: program.to_owned(),
            args: [&own[..], args].concat(),
            env: Vec::new(),
            log: cluster.dir().join(format!("webhook-{port}.log")),
        })?;
        let webhook = Self {
            process,
            folder,
            port,
        };
        webhook.trusted(cluster, &authority).await?;
        Ok(webhook)
    }

    /// Starts a webhook that runs as long as the control plane.
    ///
    /// # Errors
    /// As [`Webhook::start`].
    pub async fn keep(cluster: &ControlPlane, program: &Path) -> Result<()> {
        cluster.keep(Self::start(cluster, program, &[]).await?.process);
        Ok(())
    }

    /// Writes the authorities into the configuration, as an administrator does, and this address.
    ///
    /// # Errors
    /// gpustow is not installed.
    pub async fn trusted(&self, cluster: &ControlPlane, authorities: &str) -> Result<()> {
        let found = cluster
            .kubectl(&["get", KIND, names::WEBHOOK_CONFIGURATION, "--output=json"])
            .await?;
        let found: Value = serde_json::from_str(&found)?;
        let bundle = k8s_openapi::ByteString(authorities.as_bytes().to_vec());
        let webhooks = found["webhooks"].as_array();
        let patch = webhooks.context("no webhooks")?.iter().enumerate();
        let patch: Value = patch
            .map(|(index, it)| {
                let called = &it["clientConfig"];
                let path = called["service"]["path"].as_str();
                let path = path.or_else(|| {
                    let url = called["url"].as_str()?;
                    url.rfind('/').map(|at| &url[at..])
                });
                let url = format!("https://{ADDRESS}:{}{}", self.port, path.unwrap_or_default());
                let path = format!("/webhooks/{index}/clientConfig");
                json!({ "op": "replace", "path": path, "value": { "url": url, "caBundle": bundle } })
            })
            .collect();
        let patch = format!("--patch={patch}");
        let args = [
            "patch",
            KIND,
            names::WEBHOOK_CONFIGURATION,
            "--type=json",
            &patch,
        ];
        cluster.kubectl(&args).await.map(drop)
    }
}
