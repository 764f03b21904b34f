//! `adopt --dry-run`: the translated pods of other GPU sharers, and the number of GPUs that they would take.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;

use anyhow::{Result, ensure};
use gpustow_admission::Cluster;
use gpustow_admission::adopt::{Sharer, Terms, has_foreign_resources};
use gpustow_api::config::GpustowConfigSpec;
use gpustow_api::{GpuNode, PodFacts, names};
use gpustow_inspect::Scope;
use gpustow_inspect::system::Seen;
use k8s_openapi::api::core::v1::{Container, Namespace, Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;

use crate::admitted::admitted;
use crate::answer::Answer;
use crate::bounds::stale;
use crate::global::Global;
use crate::output::Shown::{Always, Table, Wide};
use crate::output::{Column, Listing, Output, Screen, Value, column};
use crate::whatif::{Inventory, Rehearsal};

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct AdoptArgs {
    /// Change nothing. The command requires this flag
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// The unit of aliyun.com/gpu-mem in namespaces without the label gpustow.dev/adopt
    #[arg(long, default_value = "GiB", value_parser = ["GiB", "MiB"])]
    pub(crate) unit: String,
    /// MiB that each GPU has at least, in namespaces without the label gpustow.dev/adopt
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..=9_999_999))]
    pub(crate) mib_per_gpu: Option<u64>,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// A pod of another sharer, or the sum of all.
#[derive(Default)]
struct Row {
    pod: String,
    sharer: String,
    request: String,
    becomes: Option<String>,
    node: Option<String>,
    /// It would not be created.
    refused: Option<String>,
    /// The part of the request that is left out, or the result of all pods.
    note: Option<String>,
    /// Pods that are translated, refused and waiting, and GPUs that all hold now and would hold.
    sums: [Option<usize>; 5],
    /// A quota or a LimitRange, and no pod.
    is_bound: bool,
}

impl Row {
    fn is_translated(&self) -> bool {
        self.becomes.is_some() && !self.is_bound
    }

    fn is_refused(&self) -> bool {
        self.refused.is_some()
    }
}

/// Translates the pods of other sharers and places them with gpustow's pods.
pub(crate) async fn run(
    global: &Global,
    args: &AdoptArgs,
    out: &mut (dyn Write + Send),
    screen: Screen,
) -> Result<Answer> {
    ensure!(
        args.dry_run,
        "this command changes nothing: add --dry-run, then label the namespaces with {}",
        names::ADOPT_LABEL
    );
    let source = &global.source;
    let resource = &source.resource_name;
    let bounds = source.bounds().await?;
    let lists = source.lists().await?;
    let spec = match &lists.config {
        Seen::Read(config) => config.spec.clone(),
        Seen::NotThere | Seen::Unreadable => GpustowConfigSpec::default(),
    };
    let policy = spec.scheduling.policy;
    let cluster = Cluster {
        resource,
        spec: &spec,
        queue_from: &[],
    };
    let scope = global.scope_in(None);
    let pods: Vec<Pod> = lists.pods.into_iter().map(|it| it.pod).collect();
    let replicas = replicas(&lists.nodes);
    let labelled = labelled(&bounds.namespaces, &pods, replicas, args);
    let now = assigned(&pods, resource)
        .union(&foreign(&lists.gpunodes))
        .count();
    let mut all = translate(pods, &labelled, &scope, cluster)?;
    let gpunodes = moved(lists.gpunodes, &all.kept);
    let rehearsal = match gpunodes.iter().any(|it| it.status.is_some()) {
        true => {
            let left = foreign(&gpunodes);
            let inventory = Inventory::new(lists.nodes, gpunodes, all.pods, resource)?;
            let mut rehearsal = inventory.rehearse(policy);
            rehearsal.taken.extend(left);
            Some(rehearsal)
        }
        false => None,
    };
    let of_scope = |name: &str| scope.namespace.as_ref().is_none_or(|it| it == name);
    let terms = |name: &str| {
        let labels = labelled.get(name).filter(|_| of_scope(name))?;
        Terms::of(labels).ok().flatten()
    };
    all.rows
        .extend(stale(&bounds, terms, resource).into_iter().map(|it| {
            Row {
                sharer: terms(&it.namespace)
                    .map_or("-", |it| it.sharer.into())
                    .to_owned(),
                pod: it.object,
                request: it.says,
                becomes: it.becomes,
                note: Some(format!("{}: {}", it.problem, it.fix)),
                is_bound: true,
                ..Row::default()
            }
        }));
    listing(all.rows, rehearsal, now).print(&args.output, screen, out)
}

/// All pods; pods of other sharers as they would be created.
#[derive(Default)]
struct Translated {
    rows: Vec<Row>,
    pods: Vec<Pod>,
    /// Nodes with pods that keep their share from another sharer.
    kept: BTreeSet<String>,
}

/// Translates the pods of other sharers that are in scope.
fn translate(
    pods: Vec<Pod>,
    labelled: &BTreeMap<String, ObjectMeta>,
    scope: &Scope,
    cluster: Cluster<'_>,
) -> Result<Translated> {
    let mut all = Translated::default();
    for pod in pods {
        let namespace = pod.namespace().unwrap_or_default();
        let object = serde_json::to_value(&pod)?;
        let theirs = Sharer::of(&object).is_some() || has_foreign_resources(&object);
        let theirs = theirs && holds(&pod, cluster.resource);
        let Some(labels) = labelled.get(&namespace).filter(|_| theirs) else {
            all.pods.push(pod);
            continue;
        };
        let translated = scope.has(&pod).then(|| row(&pod, labels, cluster));
        let (row, new) = translated.unzip();
        all.rows.extend(row);
        let new = new.flatten();
        if new.is_none() {
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
            all.kept.extend(node);
        }
        all.pods.push(new.unwrap_or(pod));
    }
    Ok(all)
}

/// The labels of each namespace with pods of other sharers: its own, or else the labels that fit most of its pods.
fn labelled(
    namespaces: &[Namespace],
    pods: &[Pod],
    replicas: Option<u64>,
    args: &AdoptArgs,
) -> BTreeMap<String, ObjectMeta> {
    let mut labelled: BTreeMap<String, ObjectMeta> = BTreeMap::new();
    for namespace in namespaces {
        if namespace.labels().contains_key(names::ADOPT_LABEL) {
            labelled.insert(namespace.name_any(), namespace.metadata.clone());
        }
    }
    let mut sharers: BTreeMap<String, BTreeMap<Sharer, usize>> = BTreeMap::new();
    for pod in pods {
        let object = serde_json::to_value(pod).unwrap_or_default();
        if let Some(sharer) = Sharer::of(&object) {
            let of = sharers.entry(pod.namespace().unwrap_or_default());
            *of.or_default().entry(sharer).or_default() += 1;
        }
    }
    for (namespace, counts) in sharers {
        // Whole GPUs are a request of HAMi, too, and NVIDIA's own device plugin may serve them next to the others.
        let most = counts
            .into_iter()
            .max_by_key(|(sharer, count)| (*sharer != Sharer::Whole, *count));
        let Some((mut sharer, _)) = most else {
            continue;
        };
        let mut labels = BTreeMap::new();
        let mut label = |key: &str, value: &str| labels.insert(key.to_owned(), value.to_owned());
        if sharer == Sharer::Whole && replicas.is_some() {
            sharer = Sharer::TimeSlicing;
        }
        label(names::ADOPT_LABEL, sharer.into());
        if let Some(replicas) = replicas.filter(|_| sharer == Sharer::TimeSlicing) {
            label(names::ADOPT_REPLICAS_LABEL, &replicas.to_string());
        }
        if sharer == Sharer::Gpushare {
            label(names::ADOPT_UNIT_LABEL, &args.unit);
        }
        if let Some(mib) = args.mib_per_gpu {
            label(names::ADOPT_MIB_LABEL, &mib.to_string());
        }
        labelled.entry(namespace).or_insert_with(|| ObjectMeta {
            labels: Some(labels),
            ..ObjectMeta::default()
        });
    }
    labelled
}

/// The smallest number of shares that time-slicing makes of a GPU; none if no node's label has a number above 1.
fn replicas(nodes: &[Node]) -> Option<u64> {
    let said = nodes.iter().filter_map(|node| {
        let said = node.labels().get(names::NVIDIA_REPLICAS)?;
        said.parse().ok()
    });
    said.filter(|it| *it > 1).min()
}

/// It has not finished.
fn holds(pod: &Pod, resource: &str) -> bool {
    let facts = PodFacts::from_pod(pod, resource);
    facts.is_some_and(|it| !it.released && !it.deleting)
}

/// The row of a pod, and the pod as it would be created.
fn row(pod: &Pod, labels: &ObjectMeta, cluster: Cluster<'_>) -> (Row, Option<Pod>) {
    let terms = Terms::of(labels).ok().flatten();
    let sharer: &str = terms.map_or("-", |it| it.sharer.into());
    let mut row = Row {
        pod: full_name(pod),
        sharer: sharer.to_owned(),
        request: requests(pod),
        ..Row::default()
    };
    let mut new = pod.clone();
    new.status = None;
    if let Some(spec) = &mut new.spec {
        spec.node_name = None;
    }
    let new = match admitted(&new, cluster, labels, None) {
        Ok((new, _)) => new,
        Err(refused) => {
            row.refused = Some(refused.to_string());
            return (row, None);
        }
    };
    let facts = PodFacts::from_pod(&new, cluster.resource);
    let adopted = new.annotations().get(names::ADOPTED);
    let (Some(adopted), Some(facts)) = (adopted, facts) else {
        row.note = Some("keeps its request: the label translates none of it".to_owned());
        return (row, None);
    };
    let without = adopted.split_once(", without ");
    row.note = without.map(|(_, what)| format!("without {what}: compute is not limited"));
    row.becomes = Some(becomes(&new, &facts, cluster.resource));
    (row, Some(new))
}

fn full_name(pod: &Pod) -> String {
    format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any())
}

fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    let spec = pod.spec.iter();
    spec.flat_map(|it| it.init_containers.iter().flatten().chain(&it.containers))
}

/// The GPU resources in the limits of each container.
fn requests(pod: &Pod) -> String {
    let gpus = ["aliyun.com/gpu", "nvidia.com/gpu", "volcano.sh/vgpu"];
    let of = |container: &Container| {
        let limits = container.resources.clone().and_then(|it| it.limits);
        let limits = limits.into_iter().flatten();
        let limits = limits.filter(|(key, _)| gpus.iter().any(|begin| key.starts_with(begin)));
        let limits: Vec<_> = limits.map(|(key, it)| format!("{key} {}", it.0)).collect();
        (!limits.is_empty()).then(|| format!("{}: {}", container.name, limits.join(" ")))
    };
    containers(pod)
        .filter_map(of)
        .collect::<Vec<_>>()
        .join(", ")
}

/// The containers' requests of gpustow, and the GPUs that the pod chooses.
fn becomes(pod: &Pod, facts: &PodFacts, resource: &str) -> String {
    let exclusive = facts.asks.is_exclusive();
    let claims = facts.asks.claims().iter().zip(&*facts.containers);
    let claims = claims.map(|(claim, name)| {
        let gpus = if claim.gpus == 1 { "GPU" } else { "GPUs" };
        match exclusive {
            true => format!("{name}: {} whole {gpus}", claim.gpus),
            false if claim.percentage > 0 => format!("{name}: {claim}"),
            false if claim.gpus == 1 => format!("{name}: {resource} {}", claim.mib.0),
            false => {
                let all = claim.mib.0 * u64::from(claim.gpus);
                format!("{name}: {resource} {all} on {} {gpus}", claim.gpus)
            }
        }
    });
    let rules = [
        names::GPU_MODELS,
        names::NOT_GPU_MODELS,
        names::GPU_UUIDS,
        names::NOT_GPU_UUIDS,
    ];
    let rules = rules.iter().filter_map(|key| {
        let value = pod.annotations().get(*key)?;
        Some(format!("{key} {value}"))
    });
    claims.chain(rules).collect::<Vec<_>>().join(", ")
}

/// UUIDs of the GPUs that gpustow's pods hold now.
fn assigned(pods: &[Pod], resource: &str) -> BTreeSet<String> {
    let facts = pods
        .iter()
        .filter_map(|pod| PodFacts::from_pod(pod, resource));
    let held = facts.filter(|it| !it.released);
    let held = held.filter_map(|it| it.assignment?.ok());
    held.flat_map(|it| it.charges.clone())
        .map(|(uuid, _)| uuid.to_string())
        .collect()
}

/// UUIDs of the GPUs that pods hold by another sharer or a device plugin.
fn foreign(gpunodes: &[GpuNode]) -> BTreeSet<String> {
    let gpus = gpunodes
        .iter()
        .filter_map(|it| it.status.as_ref())
        .flat_map(|it| &it.gpus);
    let held = gpus.filter(|gpu| gpu.other_pods_mib > 0 || gpu.held_by.is_some());
    held.map(|gpu| gpu.uuid.clone()).collect()
}

/// The reports after the pods of other sharers have moved, except for nodes where some of them stay.
fn moved(mut gpunodes: Vec<GpuNode>, kept: &BTreeSet<String>) -> Vec<GpuNode> {
    for gpunode in &mut gpunodes {
        let name = gpunode.name_any();
        if let Some(status) = gpunode.status.as_mut().filter(|_| !kept.contains(&name)) {
            for gpu in &mut status.gpus {
                gpu.unmanaged_mib = gpu.unmanaged_mib.saturating_sub(gpu.other_pods_mib);
                gpu.other_pods_mib = 0;
                gpu.held_by = None;
            }
        }
    }
    gpunodes
}

fn listing(mut rows: Vec<Row>, rehearsal: Option<Rehearsal>, now: usize) -> Listing<Row> {
    if let Some(Rehearsal { nodes, .. }) = &rehearsal {
        for row in &mut rows {
            row.node = nodes.get(&row.pod).map(|node| node.to_string());
        }
    }
    rows.sort_by(|a, b| a.pod.cmp(&b.pod));
    let count = |of: fn(&Row) -> bool| rows.iter().filter(|row| of(row)).count();
    let (translated, refused) = (count(Row::is_translated), count(Row::is_refused));
    let waiting = match rehearsal {
        Some(_) => count(|row| row.is_translated() && row.node.is_none()),
        None => 0,
    };
    let bounds = count(|row| row.is_bound);
    let pods = rows.len() - bounds;
    let then = rehearsal.as_ref().map(|it| it.taken.len());
    for row in rows.iter_mut().filter(|row| !row.is_bound) {
        let counts = [row.is_translated(), row.is_refused()].map(|it| Some(usize::from(it)));
        row.sums[..2].copy_from_slice(&counts);
    }
    let total = Row {
        pod: "*".to_owned(),
        note: Some(match &rehearsal {
            Some(Rehearsal { taken, gpus, .. }) => format!(
                "{translated} of {pods} pods translated, {refused} refused, {waiting} without a GPU; all pods take {} of {gpus} \
                 GPUs, now {now}",
                taken.len()
            ),
            None => format!(
                "{translated} of {pods} pods translated, {refused} refused; no GpuNode reports GPUs yet, so none was placed"
            ),
        }),
        sums: [
            Some(translated),
            Some(refused),
            Some(waiting),
            Some(now),
            then,
        ],
        ..Row::default()
    };
    Listing {
        kind: "Adoption",
        columns: columns(),
        total: Some(total),
        rows,
        name: |row| match row.is_bound {
            true => row.pod.clone(),
            false => format!("pod/{}", row.pod),
        },
        empty: "No pod requests GPUs of gpushare, HAMi, Volcano or NVIDIA's device plugin.",
        answer: match refused + waiting + bounds {
            0 => Answer::Yes,
            _ => Answer::No,
        },
    }
}

fn columns() -> Vec<Column<Row>> {
    vec![
        column("POD", "pod", Always, |row| row.pod.clone().into()),
        column("ADOPT", "adopt", Always, |row| text(Some(&row.sharer))),
        column("REQUEST", "request", Always, |row| text(Some(&row.request))),
        column("BECOMES", "", Table, |row| match row.is_refused() {
            true => Value::Bad("refused".to_owned()),
            false => text(row.becomes.as_ref()),
        }),
        column("BECOMES", "becomes", Wide, |row| text(row.becomes.as_ref())),
        column("NODE", "node", Always, |row| text(row.node.as_ref())),
        column("NOTE", "note", Always, |row| {
            text(row.refused.as_ref().or(row.note.as_ref()))
        }),
        column("TRANSLATED", "translated", Wide, |row| row.sums[0].into()),
        column("REFUSED", "refused", Wide, |row| row.sums[1].into()),
        column("WAITING", "waiting", Wide, |row| row.sums[2].into()),
        column("GPUS-NOW", "gpusNow", Wide, |row| row.sums[3].into()),
        column("GPUS-THEN", "gpusThen", Wide, |row| row.sums[4].into()),
    ]
}

fn text(text: Option<&String>) -> Value {
    text.filter(|it| !it.is_empty()).cloned().into()
}
