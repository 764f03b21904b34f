//! `fit -f`: would this pod fit now?

use std::io::{Read as _, Write};
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use gpustow_api::{BadRequest, GpuWorkload};
use gpustow_inspect::{Cluster, load};
use gpustow_policies::{auto, keys};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::ResourceExt as _;
use serde::Deserialize as _;
use serde_json::{Value, json};

use crate::Answer;
use crate::args::Global;
use crate::output::Format;
use crate::why;

/// Answers for every pod of the file, each as if it were alone.
pub(crate) async fn run(
    global: &Global,
    file: &Path,
    format: Format,
    out: &mut (dyn Write + Send),
) -> Result<Answer> {
    let cluster = load(&global.source).await?;
    let cluster = &cluster;
    let mut pods = pods(file)?;
    let wants = |pod: &Pod| auto::wants(pod, cluster.resource());
    let known = match pods.iter().any(wants) {
        true => Some(Known::read(global).await?),
        false => None,
    };
    let mut answer = Answer::Yes;
    for (number, pod) in pods.iter_mut().enumerate() {
        let admitted = match known.as_ref().filter(|_| wants(pod)) {
            Some(known) => known.admit(pod, cluster, global.namespace.as_deref())?,
            None => Ok(()),
        };
        let pod = &*pod;
        let facts = cluster.facts(pod).context("the pod cannot be read")?;
        if admitted.is_ok() && facts.asks.is_nothing() {
            match keys::unasked(pod.annotations(), cluster.resource()) {
                Some(missing) => bail!("{}: {missing}", facts.name),
                None => bail!(
                    "{}: no container asks for {}, so it fits wherever kube-scheduler says",
                    facts.name,
                    cluster.resource()
                ),
            }
        }
        if number > 0 {
            writeln!(out, "{}", if format == Format::Yaml { "---" } else { "" })?;
        }
        let wrong = admitted.err().map(|refusal| refusal.to_string());
        let wrong = wrong.or_else(|| unlimited(pod, cluster.resource()));
        let why = match wrong.or_else(|| unknown(cluster, pod)) {
            Some(refusal) => why::refused(cluster, &facts, refusal),
            None => why::waiting(cluster, pod, &facts),
        };
        let why = why.into_fit();
        if why.answer() == Answer::No {
            answer = Answer::No;
        }
        why.print(format, out)?;
    }
    Ok(answer)
}

/// What the API server asks when a pod leaves its amount to the history.
struct Known {
    namespaces: Vec<Namespace>,
    workloads: Vec<GpuWorkload>,
}

impl Known {
    async fn read(global: &Global) -> Result<Self> {
        Ok(Self {
            namespaces: global.source.namespaces().await?,
            workloads: global.source.workloads().await?,
        })
    }

    /// Gives the pod its amount, or what the API server would say.
    fn admit(
        &self,
        pod: &mut Pod,
        cluster: &Cluster,
        named: Option<&str>,
    ) -> Result<std::result::Result<(), BadRequest>> {
        let own = pod.metadata.namespace.as_deref().or(named);
        let name = own.or(cluster.namespace.as_deref()).unwrap_or("default");
        let namespace = self
            .namespaces
            .iter()
            .find(|it| it.metadata.name.as_deref() == Some(name));
        let namespace = namespace.with_context(|| {
            format!(
                "no namespace {name}: it says what a pod with {}: auto gets; try -n",
                cluster.resource()
            )
        })?;
        Ok(auto::admit(
            pod,
            namespace,
            &self.workloads,
            cluster.resource(),
        ))
    }
}

/// What the policies say of annotations that gpustow does not have.
fn unknown(cluster: &Cluster, pod: &Pod) -> Option<String> {
    let annotations = pod.metadata.annotations.as_ref()?;
    let known = keys::known(annotations, cluster.resource());
    known.err().map(|refusal| refusal.to_string())
}

/// What the API server says of an extended resource that is requested without a limit as large.
fn unlimited(pod: &Pod, resource: &str) -> Option<String> {
    let spec = pod.spec.as_ref()?;
    let kinds = [
        (
            "initContainers",
            spec.init_containers.as_deref().unwrap_or_default(),
        ),
        ("containers", &spec.containers),
    ];
    let mut containers = kinds.iter().flat_map(|(kind, list)| {
        list.iter()
            .enumerate()
            .map(move |(at, container)| (kind, at, container))
    });
    containers.find_map(|(kind, at, container)| {
        let resources = container.resources.as_ref()?;
        let amount = resources.requests.as_ref()?.get(resource)?;
        let limit = resources
            .limits
            .as_ref()
            .and_then(|list| list.get(resource));
        (limit != Some(amount)).then(|| {
            format!(
                "spec.{kind}[{at}].resources.limits[{resource}]: the API server refuses a request \
                 without a limit that equals it: write limits alone"
            )
        })
    })
}

fn pods(file: &Path) -> Result<Vec<Pod>> {
    let name = || file.display().to_string();
    let text = if file == Path::new("-") {
        let mut text = String::new();
        std::io::stdin()
            .read_to_string(&mut text)
            .context("stdin")?;
        text
    } else {
        std::fs::read_to_string(file).with_context(name)?
    };
    let mut pods = Vec::new();
    for document in serde_yaml::Deserializer::from_str(&text) {
        let object = Value::deserialize(document).with_context(name)?;
        if !object.is_null() {
            pods.extend(pod(&object).with_context(name)?);
        }
    }
    match pods.is_empty() {
        true => bail!(
            "{}: neither a Pod nor a workload with a pod template",
            name()
        ),
        false => Ok(pods),
    }
}

/// The Pod, or the one that a workload's template would make.
fn pod(object: &Value) -> Result<Option<Pod>> {
    let is_pod = object.get("kind").and_then(Value::as_str) == Some("Pod");
    let templates = ["/spec/template", "/spec/jobTemplate/spec/template"];
    let mut found = templates.iter().filter_map(|path| object.pointer(path));
    let Some(source) = is_pod.then_some(object).or_else(|| found.next()) else {
        return Ok(None);
    };
    let mut pod = json!({
        "metadata": source.get("metadata").cloned().unwrap_or_else(|| json!({})),
        "spec": source.get("spec").cloned().unwrap_or_else(|| json!({})),
    });
    let name = object
        .pointer("/metadata/name")
        .cloned()
        .unwrap_or_else(|| json!("unnamed"));
    if !is_pod {
        // The history is that of the workload.
        pod["metadata"]["namespace"] = object["metadata"]["namespace"].clone();
        pod["metadata"]["ownerReferences"] = json!([{
            "apiVersion": object["apiVersion"], "kind": object["kind"], "name": name, "uid": "not-created", "controller": true,
        }]);
    }
    pod["metadata"]["name"] = name;
    pod["metadata"]["uid"] = json!("not-created");
    serde_json::from_value(pod).map(Some).context("not a pod")
}
