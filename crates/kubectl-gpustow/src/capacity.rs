//! `capacity`: the resources of a new node of an instance type, as autoscalers need them while no such node exists.

use std::collections::BTreeMap;
use std::io::Write;
use std::str::FromStr;

use anyhow::{Result, bail};
use clap::ValueEnum;
use gpustow_api::names;
use gpustow_inspect::Cluster;
use gpustow_pack::Mib;
use serde_json::{Value as Json, json};

use crate::answer::Answer;
use crate::output::Shown::Always;
use crate::output::{Listing, Output, Screen, column};

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CapacityArgs {
    /// An instance type that the cluster does not have: its GPUs, and the MiB that pods may hold of each. May be repeated
    #[arg(long = "instance-type", value_name = "NAME=COUNTxMIB")]
    pub(crate) instance_types: Vec<Kind>,
    /// Print this autoscaler's input instead of the table
    #[arg(long = "for", value_name = "AUTOSCALER")]
    pub(crate) autoscaler: Option<Autoscaler>,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// For which autoscaler the capacity is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Autoscaler {
    /// NodeOverlays, to apply to the cluster.
    Karpenter,
    /// Tags of node groups, as `KEY=VALUE` after the instance type.
    ClusterAutoscaler,
}

/// The GPUs of nodes of one instance type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    instance_type: String,
    /// Present nodes; none if the user described the type.
    nodes: u64,
    gpus: u64,
    /// The memory that pods may hold on the smallest GPU.
    smallest: Mib,
    /// The memory that pods may hold on all GPUs.
    all: Mib,
}

impl FromStr for Kind {
    type Err = String;

    /// `NAME=COUNTxMIB`.
    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('=').and_then(|(name, gpus)| {
            let (count, mib) = gpus.split_once('x')?;
            Some((name, count.parse::<u64>().ok()?, mib.parse::<u64>().ok()?))
        });
        match parts {
            Some((name, gpus @ 1..=256, mib @ 1..=16_777_216)) if is_label_value(name) => {
                Ok(Self {
                    instance_type: name.to_owned(),
                    nodes: 0,
                    gpus,
                    smallest: Mib(mib),
                    all: Mib(gpus * mib),
                })
            }
            _ => Err(format!(
                "{text:?} is not NAME=COUNTxMIB, for example g5.xlarge=1x22731"
            )),
        }
    }
}

fn is_label_value(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    (1..=63).contains(&text.len()) && text.chars().all(plain)
}

/// By instance type. Of nodes that differ, the smallest counts: an autoscaler must not expect more than comes.
fn kinds(cluster: &Cluster, described: &[Kind]) -> Vec<Kind> {
    let mut kinds: BTreeMap<String, Kind> = BTreeMap::new();
    for view in cluster.views() {
        let labels = cluster.nodes.get(&*view.name);
        let labels = labels.and_then(|node| node.metadata.labels.as_ref());
        let Some(name) = labels.and_then(|labels| labels.get(names::INSTANCE_TYPE)) else {
            continue;
        };
        let capacities = || view.cards.iter().map(|card| card.capacity);
        let Some(smallest) = capacities().min() else {
            continue;
        };
        let (gpus, all) = (view.cards.len() as u64, capacities().sum::<Mib>());
        let kind = kinds.entry(name.clone()).or_insert_with(|| Kind {
            instance_type: name.clone(),
            nodes: 0,
            gpus,
            smallest,
            all,
        });
        kind.nodes += 1;
        kind.gpus = kind.gpus.min(gpus);
        kind.smallest = kind.smallest.min(smallest);
        kind.all = kind.all.min(all);
    }
    for kind in described {
        let own = kinds.entry(kind.instance_type.clone());
        own.or_insert_with(|| kind.clone());
    }
    kinds.into_values().collect()
}

/// Prints the instance types of the cluster and the types that the user describes.
pub(crate) fn run(
    cluster: &Cluster,
    args: &CapacityArgs,
    screen: Screen,
    out: &mut dyn Write,
) -> Result<Answer> {
    let kinds = kinds(cluster, &args.instance_types);
    let resource = cluster.resource();
    let Some(autoscaler) = args.autoscaler else {
        return listing(kinds).print(&args.output, screen, out);
    };
    if kinds.is_empty() {
        bail!(
            "no node with GPUs has the label {}: describe the instance types with --instance-type NAME=COUNTxMIB",
            names::INSTANCE_TYPE
        );
    }
    for kind in &kinds {
        match autoscaler {
            Autoscaler::Karpenter => {
                write!(
                    out,
                    "---\n{}",
                    serde_yaml::to_string(&overlay(kind, resource))?
                )?;
            }
            Autoscaler::ClusterAutoscaler => {
                for (key, value) in tags(kind, resource) {
                    writeln!(out, "{} {key}={value}", kind.instance_type)?;
                }
            }
        }
    }
    Ok(Answer::Yes)
}

fn listing(kinds: Vec<Kind>) -> Listing<Kind> {
    Listing {
        kind: "InstanceTypeList",
        columns: vec![
            column("INSTANCE-TYPE", "instanceType", Always, |kind| {
                kind.instance_type.clone().into()
            }),
            column("NODES", "nodes", Always, |kind| kind.nodes.into()),
            column("GPUS", "gpus", Always, |kind| kind.gpus.into()),
            column("GPU-MIB", "gpuMiB", Always, |kind| kind.smallest.0.into()),
            column("NODE-MIB", "nodeMiB", Always, |kind| kind.all.0.into()),
        ],
        rows: kinds,
        total: None,
        name: |kind| kind.instance_type.clone(),
        empty: "No node with GPUs has the label node.kubernetes.io/instance-type.",
        answer: Answer::Yes,
    }
}

/// [Karpenter's NodeOverlay](https://karpenter.sh/docs/concepts/nodeoverlays/).
fn overlay(kind: &Kind, resource: &str) -> Json {
    let name = kind.instance_type.to_ascii_lowercase().replace('_', "-");
    json!({
        "apiVersion": "karpenter.sh/v1alpha1",
        "kind": "NodeOverlay",
        "metadata": {"name": format!("gpustow.{name}")},
        "spec": {
            "requirements": [
                {"key": names::INSTANCE_TYPE, "operator": "In", "values": [kind.instance_type]},
            ],
            "capacity": {resource: kind.all.0.to_string()},
        },
    })
}

/// Cluster Autoscaler's tags of a node group without nodes.
fn tags(kind: &Kind, resource: &str) -> [(String, String); 3] {
    let key =
        |part: &str, name: &str| format!("k8s.io/cluster-autoscaler/node-template/{part}/{name}");
    [
        (key("resources", resource), kind.all.0.to_string()),
        (
            key("label", names::GPU_MEMORY_LABEL),
            kind.smallest.0.to_string(),
        ),
        (key("label", names::GPU_COUNT_LABEL), kind.gpus.to_string()),
    ]
}
