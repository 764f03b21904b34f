//! `fit -f`: would this pod fit now?

use std::io::{Read as _, Write};
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use gpustow_inspect::Cluster;
use gpustow_policies::keys;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde::Deserialize as _;
use serde_json::{Value, json};

use crate::Answer;
use crate::output::Format;
use crate::why;

/// Answers for every pod of the file, each as if it were alone.
pub(crate) fn run(
    cluster: &Cluster,
    file: &Path,
    format: Format,
    out: &mut dyn Write,
) -> Result<Answer> {
    let mut answer = Answer::Yes;
    for (number, pod) in pods(file)?.iter().enumerate() {
        let facts = cluster.facts(pod).context("the pod cannot be read")?;
        if facts
            .request
            .as_ref()
            .is_ok_and(|request| request.is_empty())
        {
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
        let why = match unlimited(pod, cluster.resource()).or_else(|| unknown(cluster, pod)) {
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
    pod["metadata"]["name"] = name;
    pod["metadata"]["uid"] = json!("not-created");
    serde_json::from_value(pod).map(Some).context("not a pod")
}
