//! Advice is tried before it is given: this test follows each piece of advice with a pod, and the pod runs.
//!
//! The advice is read from the sources. `advice.yaml` lists the steps, and under `byHand` the advice that rows do not
//! follow, with the reason.

use std::path::Path;

use anyhow::{Context as _, Result, anyhow, ensure};
use gpustow_api::gpunode::Gpu;
use gpustow_api::{events, names};
use gpustow_ledger::Reason;
use gpustow_testkit::builders::set_running;
use gpustow_testkit::{Case, eventually, node_of, wait_bound, wait_gone, wait_refused};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Namespace, Pod, Taint};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt as _};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::cli::{Reader, deployment};
use crate::mig::makes_instances;
use crate::support::{SOON, bound, repository, rig};

/// Files with advice for people.
const SOURCES: [&str; 8] = [
    "crates/admission/src",
    "crates/api/src/request",
    "crates/api/src/request.rs",
    "crates/api/src/limit.rs",
    "crates/kubectl-gpustow/src/why.rs",
    "crates/kubectl-gpustow/src/why/nearest.rs",
    "crates/kubectl-gpustow/src/check.rs",
    "crates/kubectl-gpustow/src/check",
];

/// How advice begins.
const VERBS: [&str; 24] = [
    "apply", "ask", "correct", "create", "delete", "drain", "end", "keep", "label", "leave", "let",
    "name", "raise", "remove", "request", "see", "set", "shorten", "split", "start", "tolerate",
    "use", "wait", "write",
];

/// The fields that are merged into a pod.
#[derive(Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Change {
    notes: Map<String, Value>,
    labels: Map<String, Value>,
    limits: Map<String, Value>,
    container: Map<String, Value>,
    spec: Map<String, Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Table {
    rows: Vec<Row>,
    /// Parts of the advice that rows do not follow, with the reason. Each was compared with the test or page that is
    /// named.
    by_hand: Vec<(String, String)>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    wrong: Change,
    right: Change,
    node: Option<String>,
    /// The sharer from which the namespace moves.
    adopt: Option<String>,
    says: Option<String>,
    #[serde(default)]
    own: bool,
}

/// Null removes.
fn merge(into: &mut Value, from: &Map<String, Value>) {
    for (key, value) in from {
        match value {
            Value::Null => drop(into.as_object_mut().map(|it| it.remove(key))),
            Value::Object(more) => merge(&mut into[key], more),
            value => into[key] = value.clone(),
        }
    }
}

impl Change {
    fn apply(&self, pod: &mut Value) {
        merge(&mut pod["metadata"]["annotations"], &self.notes);
        merge(&mut pod["metadata"]["labels"], &self.labels);
        merge(&mut pod["spec"], &self.spec);
        let container = &mut pod["spec"]["containers"][0];
        merge(container, &self.container);
        merge(&mut container["resources"]["limits"], &self.limits);
    }

    /// The parts that a person writes: of each key its value or, if the value is long, the key.
    fn written(&self) -> Vec<(String, String)> {
        let mut found = Vec::new();
        let metadata = [&self.notes, &self.labels];
        for fields in metadata
            .into_iter()
            .chain([&self.limits, &self.container, &self.spec])
        {
            leaves("", &Value::Object(fields.clone()), &mut found);
        }
        found
    }
}

fn leaves(key: &str, value: &Value, found: &mut Vec<(String, String)>) {
    match value {
        Value::Object(fields) => fields
            .iter()
            .for_each(|(key, value)| leaves(key, value, found)),
        Value::Array(items) => items.iter().for_each(|it| leaves(key, it, found)),
        Value::String(text) => found.push((key.to_owned(), text.clone())),
        _ => {}
    }
}

/// The nodes to which rows send pods.
async fn nodes(case: &Case) -> Result<()> {
    let holds = |gpu: &mut Gpu| gpu.memory_limit = Some("Holds".to_owned());
    let unified = |gpu: &mut Gpu| {
        (gpu.total_mib, gpu.healthy) = (0, false);
        gpu.reason = Some("shares the host's memory: set --unified-memory-mib".to_owned());
    };
    type Kind<'k> = (&'k str, &'k [u64], &'k dyn Fn(&mut Gpu));
    let kinds: [Kind<'_>; 7] = [
        ("n", &[81920; 4], &holds),
        ("unlimited", &[81920], &|_| {}),
        ("mps", &[40960], &|gpu| gpu.mps = true),
        ("mig", &[80000], &makes_instances),
        ("tainted", &[8192], &|_| {}),
        ("half", &[8192], &|_| {}),
        ("unified", &[8192], &unified),
    ];
    for (name, cards, change) in kinds {
        let node = case.node(name, cards).label("advice", name);
        // kube-scheduler asks about each.
        let node = node.advertise(1_000_000).with_status(|status| {
            for gpu in &mut status.gpus {
                gpu.model = "NVIDIA A100".to_owned();
                change(gpu);
            }
        });
        let taints = [Taint {
            key: "advice".to_owned(),
            value: Some("closed".to_owned()),
            effect: "NoSchedule".to_owned(),
            ..Taint::default()
        }];
        let node = node.with_node(|node| {
            if name == "tainted" {
                node.spec.get_or_insert_default().taints = Some(taints.into());
            }
        });
        node.create(&case.client).await?;
    }
    let holder = case
        .pod("holder")
        .gpu_mem(4096)
        .label("holder", "yes")
        .node_selector("advice", "half");
    bound(&case.client, holder).await.map(drop)
}

/// The message about the faulty pod: from admission, or for a waiting pod, once it `lacks` nothing.
async fn said(
    case: &Case,
    reader: &Reader,
    pod: &Value,
    lacks: impl Fn(&str) -> Option<String>,
) -> Result<String> {
    let whole = |message: String| match lacks(&message) {
        Some(part) => Err(anyhow!("{part}: {message}")),
        None => Ok(message),
    };
    let pod: Pod = serde_json::from_value(pod.clone())?;
    let made = match case.pods().create(&PostParams::default(), &pod).await {
        Ok(made) => made,
        Err(kube::Error::Api(status)) => return whole(status.message),
        Err(error) => return Err(error.into()),
    };
    let asks = gpustow_api::request(&made, names::GPU_MEM)?;
    if !asks.0.is_empty() {
        wait_refused(&case.client, &made, "", SOON).await?;
    }
    let ours = format!("--namespace={}", case.namespace);
    let why = eventually(SOON, "`why` has the advice", async || {
        whole(match reader.ask(&["why", "p", &ours]).await {
            Ok((_, why)) => why,
            Err(error) => format!("{error:#}"),
        })
    })
    .await;
    leave(case, &made).await?;
    why
}

async fn leave(case: &Case, pod: &Pod) -> Result<()> {
    let at_once = DeleteParams::default().grace_period(0);
    case.pods().delete("p", &at_once).await?;
    wait_gone(&case.client, pod, SOON).await
}

/// A namespace whose pods request GPUs of another sharer.
async fn moved(from: &str) -> Result<Case> {
    let case = Case::new(rig().await?.cluster, "advice-moves").await?;
    let label = json!({ "metadata": { "labels": { names::ADOPT_LABEL: from } } });
    let namespaces = Api::<Namespace>::all(case.client.clone());
    let params = PatchParams::default();
    namespaces
        .patch(&case.namespace, &params, &Patch::Merge(label))
        .await?;
    Ok(case)
}

/// Does the wrong thing, then the right one, in the namespace of `case`.
async fn follow(nodes: &Case, case: &Case, reader: &Reader, row: &Row) -> Result<String> {
    let node = row.node.as_deref().unwrap_or("n");
    let pod = nodes
        .pod("p")
        .gpu_mem(1024)
        .node_selector("advice", node)
        .build();
    let mut pod = serde_json::to_value(pod)?;
    pod["metadata"] =
        json!({ "name": "p", "namespace": case.namespace, "annotations": {}, "labels": {} });
    // The API server makes equal amounts in both from limits.
    merge(
        &mut pod["spec"]["containers"][0]["resources"],
        &Map::from_iter([("requests".to_owned(), Value::Null)]),
    );
    row.wrong.apply(&mut pod);
    let was = row.wrong.written();
    let lacks = |said: &str| {
        let text = row.says.iter().find(|text| !said.contains(&***text));
        if let Some(text) = text {
            return Some(format!("it does not say {text:?}"));
        }
        let unnamed = row.right.written().into_iter().find(|(key, value)| {
            let is_new = was.iter().all(|(it, _)| it != key);
            let (_, key) = key.rsplit_once('/').unwrap_or(("", key));
            !(row.own || said.contains(value) || is_new && said.contains(key))
        });
        unnamed.map(|(key, value)| format!("it names neither {key} nor {value}"))
    };
    let said = said(case, reader, &pod, lacks).await?;
    row.right.apply(&mut pod);
    let pod: Pod = serde_json::from_value(pod)?;
    let pod = case.pods().create(&PostParams::default(), &pod).await;
    let pod = pod.with_context(|| format!("as advised: {said}"))?;
    let run = wait_bound(&case.client, &pod, SOON).await;
    run.with_context(|| format!("as advised: {said}"))?;
    leave(case, &pod).await?;
    Ok(said)
}

/// The literals of a source file, without the literals of its tests.
fn literals(text: &str) -> Vec<String> {
    let product = text.split("#[cfg(test)]\nmod").next().unwrap_or_default();
    let code = product
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    let code: Vec<_> = code.collect();
    let code = code.join("\n").replace("'\"'", "").replace("\\\"", "\u{1}");
    let texts = code.split('"').skip(1).step_by(2);
    let texts = texts.map(|it| {
        let lines = it.split("\\\n").map(|line| line.trim_start_matches(' '));
        lines.collect::<String>().replace('\u{1}', "\"")
    });
    texts.collect()
}

fn files(path: &Path) -> Result<Vec<String>> {
    if path.is_dir() {
        let mut all = Vec::new();
        for entry in std::fs::read_dir(path)? {
            all.extend(files(&entry?.path())?);
        }
        return Ok(all);
    }
    let is_test = path.file_name().is_some_and(|it| it == "tests.rs");
    Ok(match is_test {
        true => Vec::new(),
        false => vec![std::fs::read_to_string(path)?],
    })
}

fn is_advice(text: &str) -> bool {
    let parts = [": ", "; ", ". ", ", or "]
        .iter()
        .flat_map(|it| text.split(it));
    let first = |part: &str| {
        part.split([' ', ','])
            .next()
            .unwrap_or_default()
            .to_lowercase()
    };
    text.contains(' ') && parts.map(first).any(|word| VERBS.contains(&&*word))
}

/// Is the text one that this literal makes?
fn is_of(text: &str, literal: &str) -> bool {
    let fixed = literal.split('{').enumerate().map(|(nth, it)| match nth {
        0 => it,
        _ => it.split_once('}').map_or(it, |(_, rest)| rest),
    });
    let mut rest = text;
    for part in fixed {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    true
}

/// All advice. Each piece has the text that the pod's message must contain if a row follows the advice.
fn all() -> Result<Vec<(String, String)>> {
    let mut all = Vec::new();
    for source in SOURCES {
        for text in files(&repository(source))? {
            let texts = literals(&text).into_iter().filter(|it| is_advice(it));
            all.extend(texts.map(|it| (format!("{source}: {it}"), it)));
        }
    }
    let of_reason = |it: Reason| {
        let advice = format!("{}: {}", it.label(), it.advice());
        (advice, it.text().to_owned())
    };
    all.extend(Reason::all().map(of_reason));
    let of_event = |it: events::Known| {
        let advice = format!("{} {}: {}", it.about, it.reason, it.advice);
        (advice, it.reads.to_owned())
    };
    all.extend(events::ALL.map(of_event));
    let asks_nothing = |advice: &str| {
        let (_, rest) = advice.split_once(": ").unwrap_or_default();
        rest.starts_with("Wait") || rest.starts_with("Nothing")
    };
    all.retain(|(advice, _)| !asks_nothing(advice));
    Ok(all)
}

#[tokio::test]
async fn advice_is_followed_and_the_pod_runs() -> Result<()> {
    let case = Case::new(rig().await?.cluster, "advice").await?;
    nodes(&case).await?;
    let reader = Reader::new(&case).await?;
    let table = include_str!("advice.yaml").replace("$NODE", &case.node_name("n"));
    let table = table.replace("$UUID", &case.uuid("n", 0));
    let Table { rows, by_hand } = serde_yaml::from_str(&table)?;
    let (mut heard, mut wrong) = (Vec::new(), Vec::new());
    for (nth, row) in rows.iter().enumerate() {
        let moves = match &row.adopt {
            Some(from) => Some(moved(from).await?),
            None => None,
        };
        let own = moves.as_ref().unwrap_or(&case);
        match follow(&case, own, &reader, row).await {
            Ok(said) => heard.push(said),
            Err(error) => wrong.push(format!("row {nth}: {error:#}")),
        }
        own.clear(Some("holder!=yes"), SOON).await?;
        if let Some(moves) = moves {
            moves.end().await?;
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    let mut by_hand: Vec<_> = by_hand.into_iter().map(|(part, _)| (part, 0)).collect();
    for (advice, text) in all()? {
        if heard.iter().any(|said| is_of(said, &text)) {
            continue;
        }
        match by_hand
            .iter_mut()
            .find(|(part, _)| advice.contains(&part[..]))
        {
            Some((_, count)) => *count += 1,
            None => wrong.push(advice),
        }
    }
    let stale = by_hand.iter().filter(|(_, count)| *count == 0);
    wrong.extend(stale.map(|(part, _)| format!("byHand has {part:?} for nothing")));
    ensure!(wrong.is_empty(), "no row follows\n{}", wrong.join("\n"));
    case.end().await
}

/// A rollout that starts its new pod first waits for the old one, if that holds the GPU. The advice lets it end.
#[tokio::test]
async fn rollout_that_waits_for_its_own_pod_goes_on_as_advised() -> Result<()> {
    let case = Case::new(rig().await?.cluster, "rollout").await?;
    case.node("n", &[8192]).create(&case.client).await?;
    let reader = Reader::new(&case).await?;
    let object = deployment("web", &case.pod("web").gpu_mem(8192).build());
    let deployments = Api::<Deployment>::namespaced(case.client.clone(), &case.namespace);
    let made = serde_json::from_value(object)?;
    deployments.create(&PostParams::default(), &made).await?;
    let pods = async || anyhow::Ok(case.pods().list(&ListParams::default()).await?.items);
    let old = eventually(SOON, "the first pod", async || {
        pods().await?.pop().context("none")
    })
    .await?;
    let old = set_ready(&case.client, &wait_bound(&case.client, &old, SOON).await?).await?;
    let patch = async |patch: Value| {
        let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
        deployments.patch("web", &params, &patch).await
    };
    patch(json!({ "spec": { "template": { "metadata": { "labels": { "version": "2" } } } } }))
        .await?;
    let is_new = |it: &Pod| it.metadata.uid != old.metadata.uid;
    let new = eventually(SOON, "the second pod", async || {
        pods().await?.into_iter().find(is_new).context("none")
    });
    let new = new.await?;
    wait_refused(&case.client, &new, "", SOON).await?;
    let ours = format!("--namespace={}", case.namespace);
    let (_, why) = reader.ask(&["why", "deploy/web", &ours]).await?;
    for part in [
        &old.name_any(),
        "an earlier pod of its Deployment web",
        "maxSurge: 0 and maxUnavailable: 1",
    ] {
        ensure!(why.contains(part), "{why}");
    }
    patch(json!({ "spec": { "strategy": { "rollingUpdate": { "maxSurge": 0, "maxUnavailable": 1 } } } })).await?;
    eventually(SOON, "the second pod runs", async || {
        let all = pods().await?;
        let runs = |it: &Pod| {
            it.metadata
                .labels
                .as_ref()?
                .get("version")
                .and(node_of(it).map(drop))
        };
        ensure!(
            all.iter().any(|it| runs(it).is_some()),
            "{} pods",
            all.len()
        );
        Ok(())
    })
    .await?;
    deployments.delete("web", &DeleteParams::default()).await?;
    case.end().await
}

/// Reports the pod as ready, as a kubelet would.
async fn set_ready(client: &Client, pod: &Pod) -> Result<Pod> {
    let running = set_running(client, pod).await?;
    let ready = [json!({ "type": "Ready", "status": "True" })];
    let status = json!({ "status": { "conditions": ready } });
    let namespace = running.namespace().context("no namespace")?;
    let pods = Api::<Pod>::namespaced(client.clone(), &namespace);
    let patch = Patch::Strategic(status);
    Ok(pods
        .patch_status(&running.name_any(), &PatchParams::default(), &patch)
        .await?)
}
