//! A cluster's own nodes and pods under other policies, and with more or fewer nodes: every pod that
//! asks for GPU memory is placed anew, in the order in which kube-scheduler would take them, by the
//! ledger that the extender runs. Pods without GPU memory stay where they are. It does not know
//! affinity between pods, topology spread, volumes, quotas, or preemption.

mod report;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use gpustow_api::gpunode::GpuNodeStatus;
use gpustow_api::{GpuNode, NodeFacts, PodFacts};
use gpustow_ledger::{Ask, CardView, Config, Ledger, Outcome};
use gpustow_pack::{Mib, PolicyKind};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt as _;
use kubectl_gpustow::Lists;

use crate::progress::Progress;

pub use report::{Document, Scenario, whatif_table};

/// Nothing here depends on time: reports do not grow stale, reservations do not expire.
const NOW: Duration = Duration::ZERO;
/// The label by which pods are bound to one node.
const HOSTNAME: &str = "kubernetes.io/hostname";

/// Nodes to be added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Added {
    /// How many.
    pub count: usize,
    /// Copies of this node; without it, of the first of the commonest kind.
    pub like: Option<String>,
}

/// A node with GPUs.
#[derive(Clone, Debug)]
struct Member {
    node: Node,
    status: GpuNodeStatus,
    /// The pods on it that ask for no GPU memory: they only take CPU and host memory.
    others: Vec<Pod>,
}

impl Member {
    fn name(&self) -> String {
        self.node.name_any()
    }
}

/// A pod that asks for GPU memory.
#[derive(Clone, Debug)]
struct Asking {
    pod: Pod,
    /// As if it had never been scheduled.
    facts: PodFacts,
    /// Where it is now.
    node: Option<Arc<str>>,
}

/// What a replay is made from.
#[derive(Clone, Debug)]
pub struct Cluster {
    resource: String,
    members: Vec<Member>,
    /// In the scheduler's order.
    pods: Vec<Asking>,
    now: Placed,
}

/// Where everything is.
#[derive(Clone, Debug, Default)]
struct Placed {
    cards: Vec<CardView>,
    /// MiB that pods hold by node, and how many cards it has.
    nodes: BTreeMap<String, (Mib, usize)>,
    waiting: BTreeSet<String>,
}

fn full_name(facts: &PodFacts) -> String {
    format!("{}/{}", facts.namespace, facts.name)
}

impl Cluster {
    /// The cluster that was listed, in which gpu-mem is called `resource`.
    ///
    /// # Errors
    /// If no node has GPUs.
    pub fn new(lists: Lists, resource: &str) -> Result<Self> {
        let Lists {
            nodes,
            gpunodes,
            pods,
            ..
        } = lists;
        let status = |gpunode: GpuNode| Some((gpunode.name_any(), gpunode.status?));
        let mut statuses: BTreeMap<String, GpuNodeStatus> =
            gpunodes.into_iter().filter_map(status).collect();
        let mut members: Vec<Member> = nodes
            .into_iter()
            .filter_map(|node| {
                let status = statuses.remove(&node.name_any())?;
                Some(Member {
                    node,
                    status,
                    others: Vec::new(),
                })
            })
            .filter(|member| !member.status.gpus.is_empty())
            .collect();
        members.sort_by_key(Member::name);
        ensure!(
            !members.is_empty(),
            "no node reports GPUs: whatif needs nodes, gpunodes and pods"
        );
        let mut ledger = books(&members, PolicyKind::default(), resource);
        let mut asking = Vec::new();
        for pod in pods {
            let Some(facts) = PodFacts::from_pod(&pod, resource) else {
                continue;
            };
            if facts.released || facts.deleting {
                continue;
            }
            ledger.apply_pod(facts.clone());
            let node = facts.node.clone();
            if facts.request.as_ref().is_ok_and(|it| !it.is_empty()) {
                if node.is_some() || !facts.gated {
                    asking.push(Asking {
                        pod,
                        facts: unscheduled(facts),
                        node,
                    });
                }
            } else if let Some(node) = node
                && let Some(member) = members.iter_mut().find(|it| it.name() == *node)
            {
                member.others.push(pod);
            }
        }
        asking.sort_by_key(|it| {
            let facts = &it.facts;
            (Reverse(facts.priority), facts.created, full_name(facts))
        });
        let waiting = asking.iter().filter(|it| it.node.is_none());
        let waiting = waiting.map(|it| full_name(&it.facts)).collect();
        Ok(Self {
            resource: resource.to_owned(),
            now: placed(&ledger, waiting),
            members,
            pods: asking,
        })
    }

    /// Takes out the nodes whose pods hold the least GPU memory, and adds copies of others.
    ///
    /// # Errors
    /// If a node to copy is not there, or no node would be left.
    pub fn change(&mut self, added: &[Added], removed: usize) -> Result<()> {
        let mut new = Vec::new();
        for Added { count, like } in added {
            let like = match like {
                Some(name) => self.members.iter().find(|it| it.name() == *name),
                None => self.commonest(),
            };
            ensure!(
                like.is_some(),
                "--add-nodes: there is no GPU node {}",
                like_name(added)
            );
            for _ in 0..*count {
                new.extend(like.map(|like| copy(like, new.len() + 1)));
            }
        }
        let leave = self.emptiest(&self.now);
        self.without(&leave.into_iter().take(removed).collect());
        self.members.extend(new);
        ensure!(
            !self.members.is_empty(),
            "--remove-nodes: no GPU node would be left"
        );
        Ok(())
    }

    /// The first node of the kind that is there most often: a kind is a list of cards.
    fn commonest(&self) -> Option<&Member> {
        let kind = |member: &Member| -> Vec<(String, u64)> {
            let gpus = member.status.gpus.iter();
            gpus.map(|gpu| (gpu.model.clone(), gpu.total_mib)).collect()
        };
        let mut kinds: BTreeMap<_, usize> = BTreeMap::new();
        for member in &self.members {
            *kinds.entry(kind(member)).or_default() += 1;
        }
        let most = kinds.values().max()?;
        self.members
            .iter()
            .find(|member| kinds.get(&kind(member)) == Some(most))
    }

    /// The nodes by what pods hold there, the emptiest first.
    fn emptiest(&self, placed: &Placed) -> Vec<String> {
        let mut names: Vec<String> = self.members.iter().map(Member::name).collect();
        names.sort_by_key(|name| placed.nodes.get(name).map(|(held, _)| *held));
        names
    }

    fn without(&mut self, names: &BTreeSet<String>) {
        self.members
            .retain(|member| !names.contains(&member.name()));
    }

    /// What is there now.
    #[must_use]
    pub fn as_it_is(&self) -> Scenario {
        Scenario::new("as it is", None, &self.now, &self.now, self.pods.len())
    }

    /// At most so many times [`Cluster::replay`] places everything.
    #[must_use]
    pub fn replays(&self) -> usize {
        2 + self.members.len().max(1).ilog2() as usize
    }

    /// Everything placed anew under `policy`, and how many nodes could go without making more pods
    /// wait; `None` if Ctrl-C came first.
    #[must_use]
    pub fn replay(
        &self,
        title: &'static str,
        policy: PolicyKind,
        progress: &mut Progress,
    ) -> Option<Scenario> {
        let placed = self.place(policy, progress)?;
        let pods = self.pods.len();
        let mut scenario = Scenario::new(title, Some(policy), &self.now, &placed, pods);
        let order = self.emptiest(&placed);
        let bound = placed.waiting.len();
        // So many nodes can go; so many are too many.
        let (mut can, mut cannot) = (0, order.len());
        while cannot - can > 1 {
            let middle = can.midpoint(cannot);
            let mut fewer = self.clone();
            fewer.without(&order[..middle].iter().cloned().collect());
            if fewer.place(policy, progress)?.waiting.len() <= bound {
                can = middle;
            } else {
                cannot = middle;
            }
        }
        let cards = order[..can].iter();
        let cards = cards.filter_map(|name| placed.nodes.get(name));
        scenario.nodes_to_spare = Some(can);
        scenario.gpus_to_spare = Some(cards.map(|(_, cards)| cards).sum());
        Some(scenario)
    }

    fn place(&self, policy: PolicyKind, progress: &mut Progress) -> Option<Placed> {
        let mut ledger = books(&self.members, policy, &self.resource);
        for asking in &self.pods {
            ledger.apply_pod(asking.facts.clone());
        }
        ledger.learn();
        let names: Vec<String> = self.members.iter().map(Member::name).collect();
        let mut waiting = BTreeSet::new();
        for (number, Asking { pod, facts, .. }) in self.pods.iter().enumerate() {
            let what = || format!("{policy}, pod {number}");
            if !progress.goes_on(what, number as f64 / self.pods.len() as f64) {
                return None;
            }
            let nodes = self.members.iter().zip(&names);
            let candidates: Vec<&str> = nodes
                .filter(|(_, name)| ledger.refused_in_tree(name, facts).is_none())
                .map(|(_, name)| name.as_str())
                .collect();
            let ask = Ask {
                tolerates: &|taints| gpustow_api::facts::tolerates_prefer_no_schedule(pod, taints),
                ..Ask::of(facts)
            };
            let best = ledger.filter(&ask, &candidates, NOW).nodes.first().copied();
            match best.map(|node| ledger.begin_bind(facts, node, NOW)) {
                Some(Ok(_)) => ledger.end_bind(facts, Outcome::Bound, NOW),
                _ => drop(waiting.insert(full_name(facts))),
            }
        }
        progress.done();
        Some(placed(&ledger, waiting))
    }
}

fn like_name(added: &[Added]) -> String {
    let names = added.iter().filter_map(|added| added.like.clone());
    names.collect::<Vec<_>>().join(" or ")
}

/// The pod as it was when it was created.
fn unscheduled(facts: PodFacts) -> PodFacts {
    PodFacts {
        node: None,
        nominated: None,
        assignment: None,
        gated: false,
        waiting: false,
        ..facts
    }
}

/// A node like this one, with nothing on it but what runs on every node.
fn copy(like: &Member, number: usize) -> Member {
    let name = format!("added-{number}");
    let mut copy = like.clone();
    copy.node.metadata.name = Some(name.clone());
    if let Some(label) = copy
        .node
        .metadata
        .labels
        .as_mut()
        .and_then(|it| it.get_mut(HOSTNAME))
    {
        label.clone_from(&name);
    }
    for gpu in &mut copy.status.gpus {
        gpu.uuid = format!("{name}-{}", gpu.index);
        gpu.strangers_mib = 0;
        gpu.healthy = true;
    }
    copy.others.retain(|pod| {
        let owners = pod.owner_references().iter();
        owners.clone().any(|owner| owner.kind == "DaemonSet")
    });
    for pod in &mut copy.others {
        pod.metadata.uid = pod.metadata.uid.take().map(|uid| format!("{uid}-{name}"));
        if let Some(spec) = &mut pod.spec {
            spec.node_name = Some(name.clone());
        }
    }
    copy
}

/// A ledger with these nodes and no pod that asks for GPU memory.
fn books(members: &[Member], policy: PolicyKind, resource: &str) -> Ledger {
    let mut ledger = Ledger::new(Config {
        policy,
        ..Config::default()
    });
    for member in members {
        ledger.apply_node(NodeFacts::from_node(&member.node));
        let mut status = member.status.clone();
        for gpu in &mut status.gpus {
            // Live use goes where the pods go.
            gpu.pods.clear();
        }
        ledger.apply_gpunode(&member.name(), status, NOW);
        let others = member.others.iter();
        for facts in others.filter_map(|pod| PodFacts::from_pod(pod, resource)) {
            ledger.apply_pod(facts);
        }
    }
    ledger
}

fn placed(ledger: &Ledger, waiting: BTreeSet<String>) -> Placed {
    let mut placed = Placed {
        waiting,
        ..Placed::default()
    };
    for view in ledger.snapshot(NOW) {
        let held = view.cards.iter().map(|card| card.held).sum();
        placed
            .nodes
            .insert(view.name.to_string(), (held, view.cards.len()));
        placed.cards.extend(view.cards);
    }
    placed
}
