//! Where the facts come from: an API server, or files that kubectl wrote.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context as _, Result, bail, ensure};
use gpustow_api::{GpuNode, names};
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ListParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde::Deserialize as _;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::args::Global;
use crate::cluster::Cluster;

/// Objects per answer of a List, as kubectl asks for them.
const CHUNK: u32 = 500;

/// Lists everything once.
pub(crate) async fn load(global: &Global) -> Result<Cluster> {
    if let Some(path) = &global.from {
        return read(path, &global.resource_name);
    }
    let mut cluster = Cluster::new(&global.resource_name);
    let (client, namespace) = client(global).await?;
    cluster.namespace = Some(namespace);
    let configs = Api::namespaced(client.clone(), names::NAMESPACE);
    let (nodes, gpunodes, pods, configs) = tokio::join!(
        list(Api::<Node>::all(client.clone()), "nodes"),
        list(Api::<GpuNode>::all(client.clone()), "gpunodes"),
        list(Api::<Pod>::all(client.clone()), "pods"),
        list(configs, "configmaps"),
    );
    cluster.reset_nodes(nodes?);
    cluster.reset_gpunodes(gpunodes?);
    cluster.reset_pods(pods?);
    cluster.configs = configs.ok();
    cluster.wall = Timestamp::now();
    Ok(cluster)
}

/// A client with the user's own rights, and the namespace of the context.
pub(crate) async fn client(global: &Global) -> Result<(Client, String)> {
    let options = KubeConfigOptions {
        context: global.context.clone(),
        ..Default::default()
    };
    let mut config = match &global.kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path)
                .with_context(|| format!("--kubeconfig {}", path.display()))?;
            Config::from_custom_kubeconfig(file, &options).await
        }
        None => Config::from_kubeconfig(&options).await,
    }
    .context("no way to the cluster: does `kubectl get nodes` work?")?;
    if global.impersonate.is_some() {
        config.auth_info.impersonate = global.impersonate.clone();
    }
    let namespace = config.default_namespace.clone();
    Ok((
        Client::try_from(config).context("cannot set up the client")?,
        namespace,
    ))
}

async fn list<K>(api: Api<K>, what: &'static str) -> Result<Vec<K>>
where
    K: Clone + DeserializeOwned + std::fmt::Debug,
{
    let mut params = ListParams::default().limit(CHUNK);
    let mut all = Vec::new();
    loop {
        let chunk = api
            .list(&params)
            .await
            .map_err(|error| explained(error, what))?;
        all.extend(chunk.items);
        match chunk.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(all),
        }
    }
}

fn explained(error: kube::Error, what: &str) -> anyhow::Error {
    let mend = match &error {
        kube::Error::Api(status) if status.code == 403 => {
            ": you need the right to list pods, nodes and gpunodes in the whole cluster, as the \
             ClusterRole gpustow-viewer has it"
        }
        kube::Error::Api(status) if status.code == 404 && what == "gpunodes" => {
            ": gpustow is not installed in this cluster"
        }
        _ => "",
    };
    anyhow::Error::new(error).context(format!("cannot list {what}{mend}"))
}

/// When a file, or the youngest of a folder, was written last.
pub(crate) fn written(path: &Path) -> Option<SystemTime> {
    let files = files(path).ok()?;
    let times = files
        .iter()
        .filter_map(|file| fs::metadata(file).ok()?.modified().ok());
    times.max()
}

/// The file, or all JSON and YAML files of the folder.
fn files(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let known = |path: &PathBuf| {
        path.extension()
            .is_some_and(|it| it == "json" || it == "yaml" || it == "yml")
    };
    let entries = fs::read_dir(path).with_context(|| path.display().to_string())?;
    let paths: std::io::Result<Vec<_>> = entries.map(|entry| Ok(entry?.path())).collect();
    let mut files: Vec<_> = paths?.into_iter().filter(known).collect();
    files.sort();
    ensure!(
        !files.is_empty(),
        "{}: no JSON or YAML file in it",
        path.display()
    );
    Ok(files)
}

/// Reads a file, or all JSON and YAML files of a folder.
pub(crate) fn read(path: &Path, resource: &str) -> Result<Cluster> {
    let mut cluster = Cluster::new(resource);
    let mut objects = Objects::default();
    for file in &files(path)? {
        let name = || file.display().to_string();
        let text = fs::read_to_string(file).with_context(name)?;
        if file.extension().is_some_and(|it| it == "json") {
            objects
                .add(serde_json::from_str(&text).with_context(name)?)
                .with_context(name)?;
            continue;
        }
        for document in serde_yaml::Deserializer::from_str(&text) {
            objects
                .add(Value::deserialize(document).with_context(name)?)
                .with_context(name)?;
        }
    }
    // The files' own time: ages do not depend on when they are read.
    let heartbeats = objects.gpunodes.iter().filter_map(|node| {
        node.status
            .as_ref()?
            .heartbeat
            .as_ref()?
            .parse::<Timestamp>()
            .ok()
    });
    cluster.wall = heartbeats.max().unwrap_or_else(Timestamp::now);
    cluster.reset_nodes(objects.nodes);
    cluster.reset_gpunodes(objects.gpunodes);
    cluster.reset_pods(objects.pods);
    cluster.configs = Some(objects.configs);
    Ok(cluster)
}

#[derive(Default)]
struct Objects {
    nodes: Vec<Node>,
    gpunodes: Vec<GpuNode>,
    pods: Vec<Pod>,
    configs: Vec<ConfigMap>,
}

impl Objects {
    fn add(&mut self, mut object: Value) -> Result<()> {
        if let Some(Value::Array(items)) = object.get_mut("items").map(Value::take) {
            return items.into_iter().try_for_each(|item| self.add(item));
        }
        let kind = object
            .get("kind")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned();
        match kind.as_str() {
            "Node" => self.nodes.push(serde_json::from_value(object)?),
            "GpuNode" => self.gpunodes.push(serde_json::from_value(object)?),
            "Pod" => self.pods.push(serde_json::from_value(object)?),
            "ConfigMap" => self.configs.push(serde_json::from_value(object)?),
            "" => bail!("an object without a kind"),
            _ => {}
        }
        Ok(())
    }
}
