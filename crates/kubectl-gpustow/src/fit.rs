//! `fit -f`: would this pod fit now?

use std::io::{Read as _, Write};
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use gpustow_admission::{Cluster as Admitting, auto, keys, reads_namespace};
use gpustow_api::workload::name_of;
use gpustow_api::{GpuWorkload, PodFacts};
use gpustow_inspect::Cluster;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;
use serde::Deserialize as _;
use serde_json::{Value, json};

use crate::admitted::{admitted, asked};
use crate::answer::Answer;
use crate::global::Global;
use crate::output::Format;
use crate::why::{self, Why};

/// Answers for every pod of the file, each as if it were alone.
pub(crate) async fn run(
    global: &Global,
    file: &Path,
    format: &Format,
    out: &mut (dyn Write + Send),
) -> Result<Answer> {
    let pods = pods(file)?;
    let mut named = pods
        .iter()
        .filter_map(|it| it.metadata.namespace.as_deref());
    let mut cluster = global.cluster_or_own(named.next()).await?;
    let mut answer = Answer::Yes;
    for (number, pod) in pods.iter().enumerate() {
        let own = pod.metadata.namespace.as_deref();
        let own = own.or(global.namespace.as_deref());
        let named = own.or(cluster.namespace.as_deref()).unwrap_or("default");
        if let Some(facts) = cluster.facts(pod) {
            cluster.ledger.meet(&facts);
        }
        let why = match cluster.left_out {
            None => of_all(global, &cluster, pod, named).await?,
            Some(_) => of_own(global, &cluster, pod, named).await?,
        };
        if number > 0 {
            writeln!(out, "{}", if *format == Format::Yaml { "---" } else { "" })?;
        }
        let why = why.into_fit();
        if answer != Answer::No && why.answer() != Answer::Yes {
            answer = why.answer();
        }
        why.print(format, out)?;
    }
    Ok(answer)
}

/// The answer by all that is in the cluster.
async fn of_all(global: &Global, cluster: &Cluster, pod: &Pod, named: &str) -> Result<Why> {
    let known = Known::read(global, cluster, pod, named).await?;
    let outcome = admitted(pod, of(cluster), &known.namespace, known.history.as_ref());
    let (created, warnings) = match &outcome {
        Ok((created, warnings)) => (created, &warnings[..]),
        Err(_) => (pod, &[][..]),
    };
    let facts = cluster.facts(created).context("the pod cannot be read")?;
    let wrong = match &outcome {
        Err(wrong) => Some(wrong.to_string()),
        Ok(_) => {
            asks(cluster, created, &facts)?;
            let said = asked(&global.source, created, named).await?;
            said.and_then(Result::err)
        }
    };
    let mut why = match wrong {
        Some(refusal) => why::refused(cluster, &facts, refusal),
        None => why::waiting(cluster, created, &facts),
    };
    why.unknown = warnings.to_vec();
    Ok(why)
}

/// The answer for a user who may not list the cluster: the API server's answer, which may be a refusal.
async fn of_own(global: &Global, cluster: &Cluster, pod: &Pod, named: &str) -> Result<Why> {
    let said = asked(&global.source, pod, named).await?;
    let said = said.with_context(|| format!("you may not create pods in namespace {named}"))?;
    let object = said.as_ref().unwrap_or(pod);
    let facts = cluster.facts(object).context("the pod cannot be read")?;
    if said.is_ok() {
        asks(cluster, object, &facts)?;
    }
    Ok(why::own::fit(cluster, &facts, said))
}

/// Fails for a pod that asks for no GPU memory.
fn asks(cluster: &Cluster, pod: &Pod, facts: &PodFacts) -> Result<()> {
    let resource = cluster.resource();
    if !facts.asks.is_nothing() {
        return Ok(());
    }
    match keys::unasked(pod.annotations(), resource) {
        Some(missing) => bail!("{}: {missing}", facts.name),
        None => bail!(
            "{}: no container asks for {resource}, so kube-scheduler alone places it",
            facts.name
        ),
    }
}

/// How the cluster admits pods. Whether it would be queued is no part of the question.
fn of(cluster: &Cluster) -> Admitting<'_> {
    Admitting {
        resource: cluster.resource(),
        spec: cluster.spec(),
        queue_from: &[],
    }
}

/// The objects that decide the answer in addition to the pod.
#[derive(Default)]
struct Known {
    namespace: ObjectMeta,
    /// That of the pod's workload, if the pod leaves its amount to it.
    history: Option<GpuWorkload>,
}

impl Known {
    async fn read(global: &Global, cluster: &Cluster, pod: &Pod, named: &str) -> Result<Self> {
        let object = serde_json::to_value(pod)?;
        if !reads_namespace(&object, of(cluster)) {
            let namespace = ObjectMeta {
                name: Some(named.to_owned()),
                ..ObjectMeta::default()
            };
            return Ok(Self {
                namespace,
                history: None,
            });
        }
        let all = global.source.namespaces().await?.into_iter();
        let mut all = all.map(|it| it.metadata);
        let namespace = all.find(|it| it.name.as_deref() == Some(named));
        let resource = cluster.resource();
        if namespace.is_none() && auto::wants(&object, resource) {
            bail!("no namespace {named}: it decides the amount of {resource}: auto; try -n");
        }
        let namespace = namespace.unwrap_or_default();
        Ok(Self {
            history: match auto::reads_history(&object, &namespace, resource) {
                true => {
                    let name = name_of(&auto::workload(&object));
                    let mut all = global.source.workloads().await?.into_iter();
                    all.find(|it| it.name_any() == name && it.namespace().as_deref() == Some(named))
                }
                false => None,
            },
            namespace,
        })
    }
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
