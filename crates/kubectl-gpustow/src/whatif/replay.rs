//! A cluster's own nodes and pods under other policies, and with more or fewer nodes: every pod that
//! asks for GPU memory is placed again, in the order in which kube-scheduler would take them, by the
//! ledger that the extender runs. Pods without GPU memory stay where they are. It does not know
//! affinity between pods, topology spread, volumes, quotas, or preemption.

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

/// Nothing here depends on time: reports do not grow stale, reservations do not expire.
const NOW: Duration = Duration::ZERO;
/// The label by which pods are bound to one node.
const HOSTNAME: &str = "kubernetes.io/hostname";

/// Nodes to be added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Added {
    /// How many.
    pub(crate) count: usize,
    /// Copies of this node; without it, of the first of the commonest kind.
    pub(crate) like: Option<String>,
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

/// The data for a replay.
#[derive(Clone, Debug)]
pub(crate) struct Inventory {
    resource: String,
    members: Vec<Member>,
    /// In the scheduler's order.
    pods: Vec<Asking>,
    now: Placed,
}

/// The cluster in one shape under one policy.
#[derive(Clone, Debug)]
pub(super) struct Scenario {
    /// Which nodes: as they are, or changed.
    pub(super) title: &'static str,
    /// None for the pods where they are now.
    pub(super) policy: Option<PolicyKind>,
    pub(super) nodes: usize,
    pub(super) gpus: usize,
    /// Pods that have their GPU memory.
    pub(super) placed: usize,
    /// Pods that wait, by namespace and name.
    pub(super) waiting: BTreeSet<String>,
    /// Pods that have a place now and wait here.
    pub(super) newly_waiting: Vec<String>,
    /// Pods that wait now and have a place here.
    pub(super) newly_placed: Vec<String>,
    /// The memory that pods hold.
    pub(super) allocated: Mib,
    /// The memory that pods may hold.
    pub(super) capacity: Mib,
    /// GPUs that no pod holds anything on.
    pub(super) empty: usize,
    /// The largest piece that is free on one GPU.
    pub(super) largest: Mib,
    /// Nodes, and their GPUs, that could go, the emptiest first, without making more pods wait; found by
    /// bisection.
    pub(super) to_spare: Option<(usize, usize)>,
}

impl Scenario {
    fn new(
        title: &'static str,
        policy: Option<PolicyKind>,
        now: &Placed,
        then: &Placed,
        pods: usize,
    ) -> Self {
        let cards = &then.cards;
        let free = cards
            .iter()
            .filter(|card| card.healthy)
            .map(|card| card.free);
        Self {
            title,
            policy,
            nodes: then.nodes.len(),
            gpus: cards.len(),
            placed: pods - then.waiting.len(),
            newly_waiting: then.waiting.difference(&now.waiting).cloned().collect(),
            newly_placed: now.waiting.difference(&then.waiting).cloned().collect(),
            waiting: then.waiting.clone(),
            allocated: cards.iter().map(|card| card.held).sum(),
            capacity: cards.iter().map(|card| card.capacity).sum(),
            empty: cards.iter().filter(|card| card.held == Mib::ZERO).count(),
            largest: free.max().unwrap_or_default(),
            to_spare: None,
        }
    }
}

/// Where the pods would be if all were placed again.
#[derive(Clone, Debug)]
pub(crate) struct Rehearsal {
    /// The node of each pod that has one, by namespace and name.
    pub(crate) nodes: BTreeMap<String, Arc<str>>,
    /// UUIDs of the GPUs that pods would hold.
    pub(crate) taken: BTreeSet<String>,
    pub(crate) gpus: usize,
}

/// Where everything is.
#[derive(Clone, Debug, Default)]
struct Placed {
    cards: Vec<CardView>,
    /// The node of each pod that was placed, by namespace and name.
    pods: BTreeMap<String, Arc<str>>,
    /// MiB that pods hold by node, and how many cards it has.
    nodes: BTreeMap<String, (Mib, usize)>,
    waiting: BTreeSet<String>,
}

fn full_name(facts: &PodFacts) -> String {
    format!("{}/{}", facts.namespace, facts.name)
}

impl Inventory {
    /// The cluster that was listed, in which gpu-mem is called `resource`.
    pub(crate) fn new(
        nodes: Vec<Node>,
        gpunodes: Vec<GpuNode>,
        pods: Vec<Pod>,
        resource: &str,
    ) -> Result<Self> {
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
            "no node reports GPUs: this command needs nodes, gpunodes and pods"
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
            if facts.requests_memory() {
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

    /// Has containers request so many MiB of each GPU, by the pod and the container's name; others stay as they are.
    pub(crate) fn request(&mut self, advised: impl Fn(&Pod, &str) -> Option<Mib>) {
        for Asking { pod, facts, .. } in &mut self.pods {
            facts.asks.change(|request| {
                for (claim, name) in request.claims.iter_mut().zip(&*facts.containers) {
                    claim.mib = advised(pod, name).unwrap_or(claim.mib);
                }
            });
        }
    }

    /// All pods placed again.
    pub(crate) fn rehearse(&self, policy: PolicyKind) -> Rehearsal {
        let Placed { cards, pods, .. } = self.place(policy);
        let gpus = cards.len();
        let held = cards.into_iter().filter(|card| card.held > Mib::ZERO);
        Rehearsal {
            nodes: pods,
            taken: held.map(|card| card.uuid).collect(),
            gpus,
        }
    }

    /// How many GPUs no pod would hold anything on, if all were placed again.
    pub(crate) fn empty_gpus(&self, policy: PolicyKind) -> usize {
        let cards = self.place(policy).cards;
        cards.iter().filter(|card| card.held == Mib::ZERO).count()
    }

    /// Takes out the nodes whose pods hold the least GPU memory, and adds copies of others.
    pub(super) fn change(&mut self, added: &[Added], removed: usize) -> Result<()> {
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

    /// The nodes by the memory of their pods, the emptiest first.
    fn emptiest(&self, placed: &Placed) -> Vec<String> {
        let mut names: Vec<String> = self.members.iter().map(Member::name).collect();
        names.sort_by_key(|name| placed.nodes.get(name).map(|(held, _)| *held));
        names
    }

    fn without(&mut self, names: &BTreeSet<String>) {
        self.members
            .retain(|member| !names.contains(&member.name()));
    }

    /// The present state.
    pub(super) fn as_it_is(&self) -> Scenario {
        Scenario::new("now", None, &self.now, &self.now, self.pods.len())
    }

    /// At most so many times [`Self::replay`] places everything.
    pub(super) fn replays(&self) -> usize {
        2 + self.members.len().max(1).ilog2() as usize
    }

    /// Everything placed again under `policy`, and how many nodes could go without making more pods
    /// wait. `begins` is called whenever everything is about to be placed.
    pub(super) fn replay(
        &self,
        title: &'static str,
        policy: PolicyKind,
        begins: &mut dyn FnMut(),
    ) -> Scenario {
        begins();
        let placed = self.place(policy);
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
            begins();
            if fewer.place(policy).waiting.len() <= bound {
                can = middle;
            } else {
                cannot = middle;
            }
        }
        let cards = order[..can].iter();
        let cards = cards.filter_map(|name| placed.nodes.get(name));
        scenario.to_spare = Some((can, cards.map(|(_, cards)| cards).sum()));
        scenario
    }

    fn place(&self, policy: PolicyKind) -> Placed {
        let mut ledger = books(&self.members, policy, &self.resource);
        for asking in &self.pods {
            ledger.apply_pod(asking.facts.clone());
        }
        ledger.learn();
        let names: Vec<String> = self.members.iter().map(Member::name).collect();
        let (mut pods, mut waiting) = (BTreeMap::new(), BTreeSet::new());
        for Asking { pod, facts, .. } in &self.pods {
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
            match best.filter(|node| ledger.begin_bind(facts, node, NOW).is_ok()) {
                Some(node) => {
                    ledger.end_bind(facts, Outcome::Bound, NOW);
                    pods.insert(full_name(facts), Arc::from(node));
                }
                None => drop(waiting.insert(full_name(facts))),
            }
        }
        Placed {
            pods,
            ..placed(&ledger, waiting)
        }
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
        queued: false,
        waiting: false,
        ..facts
    }
}

/// A node like this one, with the pods of DaemonSets alone.
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
        gpu.unmanaged_mib = 0;
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
