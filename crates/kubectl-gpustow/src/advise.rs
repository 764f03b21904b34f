//! `advise`: the advised requests of workloads, from the histories that the extender keeps of them. Before gpustow is
//! installed, the histories are Prometheus' data on containers with whole GPUs.

mod patch;
mod prometheus;
mod row;

use std::collections::{BTreeMap, HashMap};
use std::io::Write;

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;
use gpustow_api::gpunode::PodUse;
use gpustow_api::owner::{self, Owner};
use gpustow_api::workload::{Against, ContainerHistory, name_of};
use gpustow_api::{GpuNode, GpuWorkload};
use gpustow_inspect::{Cluster, PodInfo, Scope, cluster};
use gpustow_pack::{Mib, PolicyKind};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt as _;

use crate::answer::Answer;
use crate::global::Global;
use crate::output::Shown::{Always, Table, Wide};
use crate::output::{Column, Listing, Output, Screen, Value, column};
use crate::whatif::Inventory;

pub(crate) use prometheus::Flags as Prometheus;
use prometheus::{Server, WholeGpus};
use row::row;

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct AdviseArgs {
    /// Only this workload, as KIND/NAME
    pub(crate) workload: Option<String>,
    /// Advise a quantile of all past minutes instead: the next day exceeds it more often
    #[arg(long)]
    pub(crate) quantile: Option<Quantile>,
    #[command(flatten)]
    pub(crate) prometheus: Prometheus,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Quantile {
    /// Exceeded in one minute of twenty so far.
    P95,
    /// Exceeded in one minute of a hundred so far.
    P99,
}

impl Quantile {
    /// Of a thousand minutes.
    pub(crate) fn permille(self) -> u32 {
        match self {
            Self::P95 => 950,
            Self::P99 => 990,
        }
    }
}

/// Why a history may be missing. An existing history counts nevertheless, as it does for pods without an amount.
const UNREADABLE: &str = "NVML does not tell what its processes use";
const NO_PROCESS: &str = "no process of it is on its GPU";
/// Up to this age in seconds, a pod may be without a history.
const YOUNG: u64 = 300;

/// A container of a workload.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Key {
    namespace: String,
    workload: Owner,
    container: String,
}

/// The facts of its pods.
#[derive(Clone, Debug, Default)]
struct Live {
    pods: u64,
    /// How many of them have each image.
    images: BTreeMap<String, u64>,
    /// MiB of each GPU, and on how many.
    requested: Option<(Mib, u64)>,
    exclusive: bool,
    /// Of how many GPUs, where each pod has them whole without gpustow.
    whole_gpus: u64,
    notes: Vec<String>,
}

impl Live {
    /// One more pod, with this image.
    fn see(&mut self, image: Option<String>) {
        self.pods += 1;
        *self.images.entry(image.unwrap_or_default()).or_default() += 1;
    }
}

/// By container, the histories of its images.
type Histories = BTreeMap<Key, Vec<ContainerHistory>>;

pub(crate) struct Row {
    key: Option<Key>,
    pods: u64,
    gpus: u64,
    requested: Option<Mib>,
    peak: Option<Mib>,
    request: Option<Mib>,
    limit: Option<Mib>,
    samples: u64,
    seconds: u64,
    frees: Option<Mib>,
    empty_gpus: Option<u64>,
    patch: Option<String>,
    notes: Vec<String>,
}

/// The rows of workloads, and the objects to place the pods again.
struct Known {
    rows: Vec<Row>,
    placed: Option<Placed>,
}

/// The objects by which all pods are placed again.
struct Placed {
    nodes: Vec<Node>,
    gpunodes: Vec<GpuNode>,
    pods: Vec<Pod>,
    policy: PolicyKind,
}

impl Placed {
    /// How many more GPUs are empty if containers request the advised amounts.
    fn empties(self, resource: &str, advised: &HashMap<&Key, Mib>) -> Result<u64> {
        let mut inventory = Inventory::new(self.nodes, self.gpunodes, self.pods, resource)?;
        let before = inventory.empty_gpus(self.policy);
        inventory.request(|pod, container| advised.get(&key(pod, container)).copied());
        Ok(inventory.empty_gpus(self.policy).saturating_sub(before) as u64)
    }
}

/// Reads the cluster, and its pods' workloads.
pub(crate) async fn run(
    global: &Global,
    args: &AdviseArgs,
    out: &mut (dyn Write + Send),
    screen: Screen,
) -> Result<Answer> {
    let permille = args.quantile.map(|it| it.permille());
    let known = match args.prometheus.server().await? {
        Some(server) => whole_gpus(global, &server, permille).await?,
        None => requests(global, permille).await?,
    };
    let Known { mut rows, placed } = known;
    if let Some(wanted) = &args.workload {
        keep(&mut rows, wanted)?;
    }
    rows.sort_by(|a, b| (b.frees, &a.key).cmp(&(a.frees, &b.key)));
    let advised: HashMap<&Key, Mib> = rows
        .iter()
        .filter(|row| row.frees.is_some())
        .filter_map(|row| Some((row.key.as_ref()?, row.request?)))
        .collect();
    let placed = placed.filter(|_| !advised.is_empty());
    let empties = placed.map(|it| it.empties(&global.source.resource_name, &advised));
    let empty_gpus = empties.transpose()?;
    listing(rows, empty_gpus).print(&args.output, screen, out)
}

/// By the histories of containers that request GPU memory.
async fn requests(global: &Global, permille: Option<u32>) -> Result<Known> {
    let source = &global.source;
    let lists = source.lists().await?;
    let (nodes, gpunodes) = (lists.nodes.clone(), lists.gpunodes.clone());
    let pods = lists.pods.iter().map(|it| it.pod.clone()).collect();
    let cluster = cluster(lists, &source.resource_name);
    let scope = global.scope(&cluster);
    let mut live: BTreeMap<Key, Live> = BTreeMap::new();
    for pod in cluster.pods_in(&scope) {
        if !pod.facts.released {
            look_at(&cluster, pod, &mut live);
        }
    }
    let mut histories = histories(source.workloads().await?, &scope);
    // Only pods have labels here.
    histories.retain(|key, _| scope.selector.is_none() || live.contains_key(key));
    Ok(Known {
        rows: rows(cluster.resource(), live, histories, permille),
        placed: Some(Placed {
            nodes,
            gpunodes,
            pods,
            policy: cluster.spec().scheduling.policy,
        }),
    })
}

/// By the use of whole GPUs.
async fn whole_gpus(global: &Global, server: &Server<'_>, permille: Option<u32>) -> Result<Known> {
    let source = &global.source;
    let (pods, own) = source.pods().await?;
    let scope = global.scope_in(own.as_ref());
    let mut live: BTreeMap<Key, Live> = BTreeMap::new();
    let pods = pods.iter().map(|it| &it.pod).filter(|pod| scope.has(pod));
    let pods: Vec<_> = pods
        .filter_map(|pod| WholeGpus::of(pod, &source.resource_name))
        .collect();
    for pod in &pods {
        for (container, gpus) in &pod.containers {
            let known = live.entry(key(pod.object, &container.name)).or_default();
            known.see(container.image.clone());
            known.whole_gpus = known.whole_gpus.max(*gpus);
        }
    }
    let found = server.histories(&pods, &scope).await?;
    for shared in &found.shared {
        if let Some(known) = live.get_mut(shared) {
            known
                .notes
                .push("shares its GPU, of which dcgm-exporter reports the sum".to_owned());
        }
    }
    Ok(Known {
        rows: rows(&source.resource_name, live, found.histories, permille),
        placed: None,
    })
}

fn key(pod: &Pod, container: &str) -> Key {
    Key {
        namespace: pod.namespace().unwrap_or_default(),
        workload: owner::workload(pod),
        container: container.to_owned(),
    }
}

/// Leaves the rows of one workload.
fn keep(rows: &mut Vec<Row>, wanted: &str) -> Result<()> {
    let (word, name) = wanted
        .split_once('/')
        .with_context(|| format!("{wanted}: write KIND/NAME, as deploy/web"))?;
    let kind = gpustow_inspect::owner::kind(word).unwrap_or(word);
    rows.retain(|row| {
        let key = row.key.as_ref();
        key.is_some_and(|it| {
            it.workload.kind.eq_ignore_ascii_case(kind) && it.workload.name == name
        })
    });
    if rows.is_empty() {
        bail!("no pod and no history of {wanted} here: try -n or -A");
    }
    Ok(())
}

/// The histories that the extender keeps, by container.
fn histories(workloads: Vec<GpuWorkload>, scope: &Scope) -> Histories {
    let mut histories = Histories::new();
    for workload in workloads {
        let namespace = workload.namespace().unwrap_or_default();
        let target = workload.spec.target_ref;
        let target = Owner {
            kind: target.kind,
            name: target.name,
        };
        // One that a person made under another name is not the extender's.
        let is_ours = workload.metadata.name == Some(name_of(&target));
        if !is_ours || scope.namespace.as_ref().is_some_and(|it| *it != namespace) {
            continue;
        }
        for history in workload.spec.containers {
            let key = Key {
                namespace: namespace.clone(),
                workload: target.clone(),
                container: history.name.clone(),
            };
            histories.entry(key).or_default().push(history);
        }
    }
    histories
}

/// A row for each container with pods or a history.
fn rows(
    resource: &str,
    mut live: BTreeMap<Key, Live>,
    histories: Histories,
    permille: Option<u32>,
) -> Vec<Row> {
    let mut rows = Vec::new();
    for (key, histories) in histories {
        let pods = live.remove(&key).unwrap_or_default();
        rows.push(row(key, resource, &pods, histories, permille));
    }
    let rest = live.into_iter();
    rows.extend(rest.map(|(key, pods)| row(key, resource, &pods, Vec::new(), permille)));
    rows
}

fn look_at(cluster: &Cluster, pod: &PodInfo, live: &mut BTreeMap<Key, Live>) {
    let facts = &pod.facts;
    let Some(request) = facts.asks.request() else {
        return;
    };
    let spec = pod.object.spec.iter();
    let all: Vec<_> = spec
        .flat_map(|spec| {
            spec.init_containers
                .iter()
                .flatten()
                .chain(&spec.containers)
        })
        .collect();
    let notes = notes(cluster, pod);
    for (name, claim) in facts.containers.iter().zip(&request.claims) {
        let known = live.entry(key(&pod.object, name)).or_default();
        let container = all.iter().find(|it| *it.name == **name);
        known.see(container.and_then(|it| it.image.clone()));
        known.requested = known.requested.max(Some((claim.mib, claim.gpus.into())));
        known.exclusive |= request.exclusive;
        for note in &notes {
            if !known.notes.contains(note) {
                known.notes.push(note.clone());
            }
        }
    }
}

/// The objections to a history of this pod.
fn notes(cluster: &Cluster, pod: &PodInfo) -> Vec<String> {
    let report = pod
        .facts
        .node
        .as_deref()
        .and_then(|it| cluster.reports.get(it));
    let Some(report) = report else {
        return Vec::new();
    };
    let mut notes = Vec::new();
    if pod.facts.asks.request().is_some_and(|it| it.is_relative()) {
        notes.push("requests a percentage of a GPU".to_owned());
    }
    let uid = &*pod.facts.uid;
    let used = || -> Vec<&PodUse> {
        let all = report.gpus.iter().flat_map(|gpu| &gpu.pods);
        all.filter(|used| used.uid == uid).collect()
    };
    if !report.is_readable() {
        notes.push(UNREADABLE.to_owned());
    }
    if used().iter().any(|used| used.mps) {
        notes.push(Against::Mps.to_string());
    }
    let assignment = pod.facts.assignment.iter().flatten();
    let mut cards = assignment.flat_map(|it| it.charges.iter());
    if cards.any(|(uuid, _)| uuid.starts_with("MIG-")) {
        notes.push(Against::Mig.to_string());
    }
    if used().is_empty() && pod.age(cluster.wall) > YOUNG {
        notes.push(NO_PROCESS.to_owned());
    }
    notes
}

fn listing(mut rows: Vec<Row>, empty_gpus: Option<u64>) -> Listing<Row> {
    let frees = rows.iter().filter_map(|row| row.frees);
    let total = Row {
        key: None,
        pods: rows.iter().map(|row| row.pods).sum(),
        gpus: 1,
        requested: None,
        peak: None,
        request: None,
        limit: None,
        samples: 0,
        seconds: 0,
        frees: Some(frees.sum()),
        empty_gpus,
        patch: None,
        notes: Vec::new(),
    };
    if let [row] = &mut rows[..] {
        row.empty_gpus = empty_gpus;
    }
    Listing {
        kind: "GpuAdvice",
        columns: columns(),
        total: (rows.len() > 1).then_some(total),
        rows,
        name: |row| {
            let key = row.key.as_ref();
            key.map_or_else(String::new, |it| workload(&it.workload))
        },
        empty: "No history of GPU memory here: the extender writes one ten minutes after a pod starts. Try -A.",
        answer: Answer::Yes,
    }
}

fn workload(owner: &Owner) -> String {
    format!("{}/{}", owner.kind.to_lowercase(), owner.name)
}

/// Of a row that is the sum of the others, a star.
fn text(row: &Row, of: fn(&Key) -> String) -> Value {
    Value::Text(row.key.as_ref().map_or_else(|| "*".to_owned(), of))
}

#[allow(clippy::cast_precision_loss, reason = "one digit is shown")]
fn days(row: &Row) -> f64 {
    row.seconds as f64 / 86_400.0
}

fn columns() -> Vec<Column<Row>> {
    vec![
        column("NAMESPACE", "namespace", Always, |row| {
            text(row, |it| it.namespace.clone())
        }),
        column("WORKLOAD", "workload", Always, |row| {
            text(row, |it| workload(&it.workload))
        }),
        column("CONTAINER", "container", Always, |row| {
            text(row, |it| it.container.clone())
        }),
        column("PODS", "pods", Always, |row| row.pods.into()),
        column("GPUS", "gpusPerPod", Wide, |row| row.gpus.into()),
        column("REQUESTED", "requestedBytes", Always, |row| {
            row.requested.into()
        }),
        column("PEAK", "peakBytes", Always, |row| row.peak.into()),
        column("ADVICE", "advisedBytes", Always, |row| {
            let of_pod = |it: Mib| Mib(it.0.saturating_mul(row.gpus));
            row.request.map(of_pod).into()
        }),
        column("LIMIT", "limitBytes", Always, |row| row.limit.into()),
        column("DAYS", "days", Always, |row| {
            (row.samples > 0).then(|| days(row)).into()
        }),
        column("MINUTES", "samples", Wide, |row| {
            (row.samples > 0).then_some(row.samples).into()
        }),
        column("FREES", "freesBytes", Always, |row| row.frees.into()),
        column("EMPTY-GPUS", "emptyGpus", Always, |row| {
            row.empty_gpus.into()
        }),
        column("NOTES", "", Table, |row| Value::things(&row.notes)),
        column("NOTES", "notes", Wide, |row| row.notes.clone().into()),
        column("PATCH", "patch", Wide, |row| row.patch.clone().into()),
    ]
}
