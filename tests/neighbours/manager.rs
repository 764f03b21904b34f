//! A controller with webhooks, installed by its own manifests and run as a process next to the API server.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use gpustow_testkit::{Launch, Process, certificate, eventually, free_port, get};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::Api;
use serde::Deserialize as _;
use serde_json::{Value, json};

use crate::site::{Neighbour, SOON, Site};

/// The controller, by the name of its module.
pub(crate) struct Manager<'a> {
    pub(crate) name: &'a str,
    /// `apiVersion` of its configuration.
    pub(crate) config_version: &'a str,
    /// The controller's configuration, apart from its addresses and certificates.
    pub(crate) config: Value,
    pub(crate) args: &'a [&'a str],
    /// It makes its own certificate and has the API server trust that. Otherwise it is given one.
    pub(crate) makes_certificate: bool,
}

impl Manager<'_> {
    /// Starts it, and waits until it is ready.
    pub(crate) async fn start(self, site: &Site) -> Result<Process> {
        let Self { name, .. } = self;
        let (system, service) = (format!("{name}-system"), format!("{name}-webhook-service"));
        let secret = format!("{name}-webhook-server-cert");
        let neighbour = Neighbour::built(name).await?;
        let (port, health) = (free_port()?, free_port()?);
        let overlay = neighbour.source.join("config/default");
        let overlay = overlay.to_str().context("a path in UTF-8")?;
        let rendered = site.cluster.kubectl(&["kustomize", overlay]).await?;
        let certificates = site.cluster.dir().join(name);
        std::fs::create_dir(&certificates)?;
        let authority = certificate(&certificates, &format!("{service}.{system}.svc"))?;
        let reached = json!({ "port": port, "authority": ByteString(authority.into_bytes()) });
        let mut manifests = Vec::new();
        for document in serde_yaml::Deserializer::from_str(&rendered) {
            manifests.extend(beside(Value::deserialize(document)?, &service, &reached));
        }
        let file = certificates.join("manifests.json");
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": manifests });
        std::fs::write(&file, list.to_string())?;
        let file = file.display().to_string();
        let apply = ["apply", "--server-side", "-f", &file];
        site.cluster.kubectl(&apply).await?;

        let mut config = json!({
            "apiVersion": self.config_version, "kind": "Configuration",
            "health": { "healthProbeBindAddress": format!("127.0.0.1:{health}") },
            "metrics": { "bindAddress": "0" },
            "webhook": { "host": "127.0.0.1", "port": port, "certDir": certificates },
            "leaderElection": { "leaderElect": false },
            "internalCertManagement": {
                "enable": self.makes_certificate,
                "webhookServiceName": service, "webhookSecretName": secret,
            },
        });
        for (key, value) in self.config.as_object().into_iter().flatten() {
            config[key] = value.clone();
        }
        let file = certificates.join("config.json");
        std::fs::write(&file, config.to_string())?;
        let kubeconfig = site.cluster.admin_kubeconfig().display().to_string();
        let args = self.args.iter().map(ToString::to_string);
        let process = Process::start(Launch {
            program: neighbour.program,
            args: args
                .chain([format!("--config={}", file.display())])
                .collect(),
            env: vec![("KUBECONFIG".to_owned(), kubeconfig)],
            log: site.cluster.dir().join(format!("{name}.log")),
        })?;
        if self.makes_certificate {
            mount(site, &system, &secret, &certificates).await?;
        }
        let url = format!("http://127.0.0.1:{health}");
        let ready = async || get(&url, "/readyz").await;
        eventually(SOON, "the controller is ready", ready).await?;
        Ok(process)
    }
}

/// Writes the Secret's data into the folder, as a kubelet does.
async fn mount(site: &Site, namespace: &str, name: &str, folder: &Path) -> Result<()> {
    let secrets = Api::<Secret>::namespaced(site.case.client.clone(), namespace);
    let data = eventually(SOON, "the controller has a certificate", async || {
        let data = secrets.get(name).await?.data.unwrap_or_default();
        ensure!(data.contains_key("tls.crt"), "not yet");
        Ok(data)
    });
    for (key, bytes) in data.await? {
        std::fs::write(folder.join(key), bytes.0)?;
    }
    Ok(())
}

/// The manifest as applied for a controller that runs as a process with this port and authority. `None` if it is not
/// applied.
fn beside(mut manifest: Value, service: &str, reached: &Value) -> Option<Value> {
    let kind = manifest["kind"].as_str()?.to_owned();
    let name = manifest["metadata"]["name"].as_str()?.to_owned();
    let reach = |client: &mut Value| {
        client["service"]["port"] = reached["port"].clone();
        client["caBundle"] = reached["authority"].clone();
    };
    match kind.as_str() {
        "Deployment" | "APIService" => return None,
        "Service" if name == service => {
            manifest["spec"] = json!({ "type": "ExternalName", "externalName": "localhost" });
        }
        "MutatingWebhookConfiguration" | "ValidatingWebhookConfiguration" => {
            for webhook in manifest["webhooks"].as_array_mut()? {
                reach(&mut webhook["clientConfig"]);
            }
        }
        "CustomResourceDefinition" => {
            if let Some(client) = manifest.pointer_mut("/spec/conversion/webhook/clientConfig") {
                reach(client);
            }
        }
        _ => {}
    }
    Some(manifest)
}
