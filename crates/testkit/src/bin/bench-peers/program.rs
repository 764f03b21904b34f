//! The common part of the programs: how each is built, installed and asked, and the GPUs that its pods hold.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use anyhow::{Context as _, Error, Result, ensure};
use clap::ValueEnum;
use gpustow_testkit::{Case, PodBuilder, Process, device_class, node_of};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::ResourceExt as _;
use kube::api::{Api, PostParams};
use tokio::task::JoinSet;

use crate::{Args, CARDS, PART, Site, Size, dra, kai, kubernetes, volcano};

/// CPU and memory of a node: the openb trace has such nodes of 8 GPUs.
const HOST: [(&str, &str); 2] = [("cpu", "128"), ("memory", "768Gi")];
/// Lines of a log that an error shows.
const TAIL: usize = 12;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum)]
pub(crate) enum Program {
    /// kube-scheduler alone, by a node's sum
    Plain,
    /// kube-scheduler with the extender
    Gpustow,
    /// kube-scheduler with claims of dynamic resource allocation, by its default scores
    Dra,
    /// The same with MostAllocated
    DraMostAllocated,
    /// Volcano with its deviceshare plugin
    Volcano,
    /// KAI Scheduler
    Kai,
}

/// Where a peer's programs and its source are; nothing for ours.
#[derive(Default)]
pub(crate) struct Built {
    pub(crate) bin: PathBuf,
    pub(crate) source: PathBuf,
}

/// Processes of a program by name, and the tasks that simulate its other components.
pub(crate) struct Running {
    pub(crate) processes: Vec<(&'static str, Process)>,
    /// Where the metrics of its extender are, if it has one.
    pub(crate) extender: Option<String>,
    /// It ends with the program.
    pub(crate) _players: JoinSet<Result<()>>,
}

/// The resources that pods hold, by the fields that their program wrote on them.
pub(crate) struct Books {
    pub(crate) bound: usize,
    pub(crate) unbound: usize,
    pub(crate) nodes: usize,
    /// GPUs with a pod; none if no component chooses GPUs.
    pub(crate) gpus: usize,
    /// MiB that the bound pods request.
    pub(crate) mib: u64,
    /// Pods that take all GPUs of a node, and how many of them are not bound.
    pub(crate) of_node: (usize, usize),
    /// GPUs and nodes whose pods request more than there is.
    pub(crate) over: Vec<String>,
    /// Bound pods to which no GPU of their node is assigned, or too little of it.
    pub(crate) without: Vec<String>,
}

impl Program {
    pub(crate) fn chosen(only: &[Self]) -> Vec<Self> {
        let all = Self::value_variants().iter().copied();
        all.filter(|it| only.is_empty() || only.contains(it))
            .collect()
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Plain => "kube-scheduler alone",
            Self::Gpustow => "gpustow",
            Self::Dra => "DRA",
            Self::DraMostAllocated => "DRA, `MostAllocated`",
            Self::Volcano => "Volcano vGPU 1.14.1",
            Self::Kai => "KAI Scheduler 0.12.0",
        }
    }

    pub(crate) async fn build(self, args: &Args) -> Result<Built> {
        let peer = match self {
            Self::Plain | Self::Gpustow | Self::Dra | Self::DraMostAllocated => {
                return Ok(Built::default());
            }
            Self::Volcano => "volcano",
            Self::Kai => "kai",
        };
        let script = args.repository.join("tests/peers/build.sh");
        let output = tokio::process::Command::new(&script).arg(peer).output();
        let output = output.await.with_context(|| script.display().to_string())?;
        let said = String::from_utf8_lossy(&output.stderr);
        let last: Vec<&str> = said.lines().collect();
        let last = last[last.len().saturating_sub(TAIL)..].join("; ");
        ensure!(output.status.success(), "{last}");
        let said = String::from_utf8(output.stdout)?;
        let (bin, source) = said.trim_end().split_once('\n').context(said.clone())?;
        Ok(Built {
            bin: bin.into(),
            source: source.into(),
        })
    }

    /// Creates the objects that the program needs in the cluster.
    pub(crate) async fn install(self, site: &Site<'_>, build: &Built) -> Result<()> {
        match self {
            Self::Plain => Ok(()),
            Self::Gpustow => kubernetes::install(site).await,
            Self::Dra | Self::DraMostAllocated => device_class(&site.case.client).await,
            Self::Volcano => volcano::install(site, build).await,
            Self::Kai => kai::install(site, build).await,
        }
    }

    pub(crate) async fn start(self, site: &Site<'_>, build: &Built) -> Result<Running> {
        match self {
            Self::Plain => kubernetes::alone(site).await,
            Self::Gpustow => kubernetes::with_gpustow(site).await,
            Self::Dra => dra::start(site, false).await,
            Self::DraMostAllocated => dra::start(site, true).await,
            Self::Volcano => volcano::start(site, build),
            Self::Kai => kai::start(site, build),
        }
    }

    /// Takes the steps that the program needs to work correctly, once it has bound a pod.
    pub(crate) async fn settle(self, site: &Site<'_>) -> Result<()> {
        match self {
            Self::Volcano => volcano::settle(site).await,
            _ => Ok(()),
        }
    }

    /// Do its pods request GPUs by claims?
    pub(crate) fn claims(self) -> bool {
        matches!(self, Self::Dra | Self::DraMostAllocated)
    }

    /// Creates a node with the GPUs as the program's agent registers them.
    pub(crate) async fn node(self, case: &Case, name: String, part: &str) -> Result<()> {
        let builder = case.node(&name, &CARDS).label(PART, part);
        let builder = builder.with_node(|node| give(node, HOST));
        let uuids = (0..CARDS.len()).map(|card| case.uuid(&name, card));
        if self.claims() {
            case.publish(&name, &CARDS).await?;
        }
        let resources = match self {
            Self::Gpustow => return builder.create(&case.client).await.map(drop),
            Self::Plain => kubernetes::resources(),
            Self::Dra | Self::DraMostAllocated => Vec::new(),
            Self::Volcano => volcano::resources(),
            Self::Kai => kai::resources(),
        };
        let mut node = builder.node;
        match self {
            Self::Volcano => volcano::register(&mut node, uuids),
            Self::Kai => kai::register(&mut node),
            _ => {}
        }
        give(&mut node, resources);
        let nodes = Api::<Node>::all(case.client.clone());
        nodes.create(&PostParams::default(), &node).await?;
        Ok(())
    }

    /// Has the pod request GPUs.
    pub(crate) fn request(self, pod: PodBuilder, name: &str, size: Size) -> PodBuilder {
        match self {
            Self::Plain | Self::Gpustow => kubernetes::request(pod, size),
            Self::Dra | Self::DraMostAllocated => pod.claim(name),
            Self::Volcano => volcano::request(pod, size),
            Self::Kai => kai::request(pod, size),
        }
    }

    /// The GPUs of its node that the pod holds, and the MiB that it holds of each.
    fn holds(self, pod: &Pod, node: &str) -> Result<Option<Vec<(String, u64)>>> {
        match self {
            Self::Plain => Ok(None),
            Self::Gpustow => kubernetes::holds(pod, node).map(Some),
            Self::Dra | Self::DraMostAllocated => dra::holds(pod).map(Some),
            Self::Volcano => volcano::holds(pod, node).map(Some),
            Self::Kai => kai::holds(pod).map(Some),
        }
    }

    pub(crate) fn books(self, site: &Site<'_>, pods: &[Pod]) -> Books {
        let mut held: BTreeMap<(&str, String), u64> = BTreeMap::new();
        let mut requested: BTreeMap<&str, u64> = BTreeMap::new();
        let (mut over, mut without) = (Vec::new(), Vec::new());
        let (mut unbound, mut of_node) = (0, (0, 0));
        for pod in pods {
            let Some(size) = site.size_of(pod) else {
                continue;
            };
            of_node.0 += usize::from(size.is_node());
            let Some(node) = node_of(pod) else {
                unbound += 1;
                of_node.1 += usize::from(size.is_node());
                continue;
            };
            *requested.entry(node).or_default() += size.all_mib();
            match self.holds(pod, node) {
                Ok(None) => {}
                Ok(Some(gpus)) => {
                    let enough = gpus.iter().filter(|(_, mib)| *mib >= size.mib).count();
                    if (enough as u64) < size.gpus {
                        let name = pod.name_any();
                        let Size {
                            gpus: count, mib, ..
                        } = size;
                        without.push(format!(
                            "{name} requests {count} x {mib} MiB and holds {gpus:?}"
                        ));
                    }
                    for (gpu, of_it) in gpus {
                        *held.entry((node, gpu)).or_default() += size.mib.max(of_it);
                    }
                }
                Err(problem) => without.push(format!("{}: {problem:#}", pod.name_any())),
            }
        }
        for ((node, gpu), mib) in &held {
            if *mib > CARDS[0] {
                over.push(format!("{gpu} of {node} has {mib} MiB of pods"));
            }
        }
        let nodes: BTreeSet<&str> = requested.keys().copied().collect();
        for &node in &nodes {
            let gpus = held.keys().filter(|(of, _)| *of == node).count();
            let mib = requested.get(node).copied().unwrap_or_default();
            if gpus > CARDS.len() || mib > CARDS.iter().sum() {
                over.push(format!("{node} has {mib} MiB of pods on {gpus} GPUs"));
            }
        }
        Books {
            bound: pods.len() - unbound,
            unbound,
            nodes: nodes.len(),
            gpus: held.len(),
            mib: requested.values().sum(),
            of_node,
            over,
            without,
        }
    }
}

/// Gives a node so much of each resource.
fn give<T: ToString>(node: &mut Node, resources: impl IntoIterator<Item = (&'static str, T)>) {
    let status = node.status.get_or_insert_default();
    let capacity = status.capacity.get_or_insert_default();
    let resources = resources.into_iter();
    capacity.extend(resources.map(|(key, amount)| (key.to_owned(), Quantity(amount.to_string()))));
    status.allocatable = status.capacity.clone();
}

impl Running {
    /// CPU used so far by each process, in seconds.
    pub(crate) fn cpu(&self) -> Result<Vec<(&'static str, f64)>> {
        let all = self.processes.iter();
        all.map(|(name, process)| Ok((*name, process.cpu()?)))
            .collect()
    }

    /// The most memory that each process had, in MiB.
    pub(crate) fn memory(&self) -> Result<Vec<(&'static str, f64)>> {
        let all = self.processes.iter();
        all.map(|(name, process)| Ok((*name, process.most_resident()?)))
            .collect()
    }

    /// Kills and starts each process but the webhook, of which another replica answers in a cluster.
    pub(crate) fn restart(&self) -> Result<()> {
        let mut all = self.processes.iter().filter(|(name, _)| *name != "webhook");
        all.clone().for_each(|(_, process)| process.kill9());
        all.try_for_each(|(_, process)| process.restart())
    }

    /// The error with how each process does.
    pub(crate) fn with_logs(&self, problem: Error) -> Error {
        let mut text = format!("{problem:#}");
        for (name, process) in &self.processes {
            let state = match process.exited() {
                Ok(Some(status)) => format!("exited with {status}"),
                _ => "runs".to_owned(),
            };
            let log = process.read_log().unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            // Of a program in Go that panics, the trace comes last.
            let panic = lines.iter().position(|line| line.contains("panic"));
            let from = panic.unwrap_or(lines.len().saturating_sub(TAIL));
            let shown: Vec<&str> = lines.into_iter().skip(from).take(TAIL).collect();
            text += &format!("\n{name} {state}; its log says:\n{}", shown.join("\n"));
        }
        Error::msg(text)
    }
}
