//! `check`: drift between assignments, GPUs, agents and the scheduler's configuration, and the fix.

mod bounds;
pub(crate) mod bundle;
mod cards;
mod claims;
mod configuration;
mod marks;
mod parts;
mod queue;
mod sharers;

use std::collections::{BTreeMap, BTreeSet};

use gpustow_api::faults::NodeFault;
use gpustow_api::{Asks, names, quantity};
use gpustow_inspect::{Bounds, Cluster, PodInfo, age, memory, owner::Owners, state, system::Seen};
use gpustow_ledger::{NodeView, Problem};
use gpustow_pack::Mib;

use crate::answer::Answer;
use crate::lists::indices;
use crate::output::Shown::{Always, Wide};
use crate::output::{Listing, Value, column};

/// Objects with one and the same problem that are named one by one.
const NAMED: usize = 3;

/// Where the pages are that a fix names.
const PAGES: &str = "https://github.com/gpustow/gpustow/blob/main/docs/";

/// Seconds after which a pod should have been seen on its GPU, or by a scheduler.
const PATIENCE: u64 = 300;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    Error,
    Warning,
    Info,
}

#[derive(Debug)]
pub(crate) struct Finding {
    level: Level,
    /// The objects with this problem and this fix, by name.
    objects: Vec<String>,
    problem: String,
    fix: String,
}

impl Finding {
    /// For people: of many the first, and how many more.
    fn object(&self) -> String {
        match self.objects.as_slice() {
            [first, rest @ ..] if rest.len() >= NAMED => format!("{first} and {} more", rest.len()),
            all => all.join(", "),
        }
    }
}

/// By level, problem and fix: the objects.
#[derive(Default)]
struct Findings(BTreeMap<(Level, String, String), BTreeSet<String>>);

impl Findings {
    fn add(
        &mut self,
        level: Level,
        object: impl Into<String>,
        problem: impl Into<String>,
        fix: impl Into<String>,
    ) {
        // The pages are not part of the plugin.
        let fix = fix.into().replace("docs/", PAGES);
        let key = (level, problem.into(), fix);
        self.0.entry(key).or_default().insert(object.into());
    }
}

/// Everything that needs a person, errors first. `webhook` is the webhook's problem. `bounds` are the namespaces'
/// rules, if the user may read them. The answer is no if there is more than information.
pub(crate) fn run(
    cluster: &Cluster,
    webhook: Option<String>,
    bounds: Option<&Bounds>,
) -> Listing<Finding> {
    let mut findings = Findings::default();
    if let Some(problem) = webhook {
        findings.add(
            Level::Error,
            format!(
                "mutatingwebhookconfiguration/{}",
                names::WEBHOOK_CONFIGURATION
            ),
            problem,
            "check that the extenders run and that caBundle has their certificate: docs/webhook.md",
        );
    }
    parts::look(cluster, &mut findings);
    let owners = Owners::of(cluster);
    for view in cluster.views() {
        node(cluster, &view, &mut findings);
        for problem in &view.problems {
            of_ledger(cluster, &view, problem, &mut findings);
        }
        for card in &view.cards {
            cards::look(cluster, &owners, &view, card, &mut findings);
        }
    }
    cluster
        .pods
        .values()
        .for_each(|pod| of_pod(cluster, pod, &mut findings));
    queue::look(cluster, &mut findings);
    sharers::look(cluster, &mut findings);
    marks::look(cluster, &mut findings);
    bounds::look(cluster, bounds, &mut findings);
    configuration::look(cluster, &mut findings);
    policies(cluster, &mut findings);
    let rows = findings.0.into_iter();
    let rows = rows.map(|((level, problem, fix), objects)| Finding {
        level,
        objects: objects.into_iter().collect(),
        problem,
        fix,
    });
    let mut rows: Vec<_> = rows.collect();
    rows.sort_by(|a, b| (a.level, &a.objects, &a.problem).cmp(&(b.level, &b.objects, &b.problem)));
    let bad = rows.iter().any(|row| row.level < Level::Info);
    Listing {
        kind: "GpuFindingList",
        columns: vec![
            column("LEVEL", "level", Always, |row| match row.level {
                Level::Error => Value::Bad("error".to_owned()),
                Level::Warning => Value::Bad("warning".to_owned()),
                Level::Info => "info".into(),
            }),
            column("OBJECT", "object", Always, |row| row.object().into()),
            column("PROBLEM", "problem", Always, |row| {
                row.problem.clone().into()
            }),
            column("FIX", "fix", Always, |row| row.fix.clone().into()),
            column("OBJECTS", "objects", Wide, |row| row.objects.clone().into()),
        ],
        rows,
        total: None,
        name: |row| row.objects.join("\n"),
        empty: "Nothing is wrong.",
        answer: if bad { Answer::No } else { Answer::Yes },
    }
}

fn node(cluster: &Cluster, view: &NodeView, findings: &mut Findings) {
    let object = format!("node/{}", view.name);
    let Some(report) = cluster.reports.get(&*view.name) else {
        findings.add(
            Level::Error,
            object,
            "pods hold GPU memory here and no agent reports its GPUs",
            "start the agent on this node",
        );
        return;
    };
    if view.stale {
        let silent = cluster.report_age(&view.name).map(age);
        let silent = silent.map_or_else(|| "never".to_owned(), |age| format!("{age} ago"));
        findings.add(
            Level::Warning,
            object.clone(),
            format!("its agent reported {silent}: no new pod goes here"),
            parts::look_at_agent(cluster, &view.name),
        );
    }
    if let Some(unread) = state::unread(cluster, &view.name) {
        let fix = unread.fault.map(NodeFault::fix);
        findings.add(
            Level::Warning,
            object.clone(),
            format!(
                "its agent reads none of its GPUs: {}; no new pod goes here",
                unread.message
            ),
            fix.map_or_else(|| parts::look_at_agent(cluster, &view.name), str::to_owned),
        );
    }
    // A missing card is in the view only for the pods that hold it.
    let cards = view.cards.iter();
    let cards = cards.filter(|card| !state::is_missing(cluster, &view.name, &card.uuid));
    let capacity: Mib = cards.map(|card| card.capacity).sum();
    let status = cluster
        .nodes
        .get(&*view.name)
        .and_then(|node| node.status.as_ref());
    let Some(status) = status else {
        findings.add(
            Level::Warning,
            object,
            "GPUs are reported for a node that does not exist",
            format!("kubectl delete gpunode {}", view.name),
        );
        return;
    };
    let allocatable = status.allocatable.as_ref();
    let said = allocatable.and_then(|list| list.get(cluster.resource()));
    let said = said.map_or(Mib::ZERO, |amount| Mib(quantity::rounded_up(amount, 1)));
    if said < capacity || said > capacity && report.gpus.is_empty() {
        findings.add(
            Level::Warning,
            object,
            format!(
                "kube-scheduler counts {} of {}, its GPUs have {}",
                memory(said),
                cluster.resource(),
                memory(capacity)
            ),
            format!(
                "look at the log of {}: it sets the node's capacity",
                names::AGENT
            ),
        );
    }
}

fn of_ledger(cluster: &Cluster, view: &NodeView, problem: &Problem, findings: &mut Findings) {
    let gpu = |uuid: &str| indices(cluster, Some(&view.name), [uuid].into_iter()).join("");
    match problem {
        Problem::Unassigned { pod } => findings.add(
            Level::Error,
            format!("pod/{pod}"),
            format!(
                "bound to {} without a GPU, by a scheduler that does not ask gpustow",
                view.name
            ),
            format!("delete it and set schedulerName: {}", names::SCHEDULER),
        ),
        Problem::Broken { pod, error } => findings.add(
            Level::Error,
            format!("pod/{pod}"),
            format!("its assignment cannot be read, so it counts on every GPU: {error}"),
            "delete the pod; its owner makes a new one",
        ),
        Problem::CardGone { pod, uuid } => findings.add(
            Level::Error,
            format!("pod/{pod}"),
            format!("assigned GPU {uuid}, which {} no longer has", view.name),
            "delete the pod; its owner makes a new one",
        ),
        Problem::Forged { pod } => findings.add(
            Level::Error,
            format!("pod/{pod}"),
            "its assignment does not match its request: forged, or the request was changed after it was bound",
            format!("delete the pod; find out who writes {}", names::ASSIGNMENT),
        ),
        Problem::Twice { uuid, other } => findings.add(
            Level::Warning,
            format!("node/{}", view.name),
            format!("GPU {uuid} is reported by node {other} too"),
            format!("one of the two {}s is false: look at both nodes", names::AGENT),
        ),
        Problem::UnknownCordon { gpu } => findings.add(
            Level::Warning,
            format!("node/{}", view.name),
            format!("{} names {gpu:?}, which is no GPU of the node", names::CORDONED_GPUS),
            "write UUIDs as `kubectl gpustow gpus -o wide` shows them, joined by commas",
        ),
        Problem::Overcommitted {
            uuid,
            held,
            capacity,
        } => findings.add(
            Level::Error,
            format!("node/{}", view.name),
            format!(
                "GPU {}: {} promised of {}",
                gpu(uuid),
                memory(*held),
                memory(*capacity)
            ),
            "delete a pod of this GPU; find who changed assignments or headroom",
        ),
    }
}

fn of_pod(cluster: &Cluster, pod: &PodInfo, findings: &mut Findings) {
    let facts = &pod.facts;
    let object = || format!("pod/{}", pod.full_name());
    let old = pod.age(cluster.wall) > PATIENCE;
    if let Asks::Unreadable(bad) = &facts.asks {
        findings.add(
            Level::Error,
            object(),
            bad.to_string(),
            "correct the pod and create it again",
        );
    } else if pod.waits() && old && !facts.gated && !facts.queued && pod.scheduler_said().is_none()
    {
        findings.add(
            Level::Warning,
            object(),
            "no scheduler has looked at it",
            format!(
                "is scheduler {} running? it is named in schedulerName",
                facts.scheduler
            ),
        );
    }
    let phase = pod
        .object
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    let seen = facts
        .node
        .as_deref()
        .and_then(|node| cluster.reports.get(node))
        .is_none_or(|node| {
            node.gpus
                .iter()
                .flat_map(|gpu| &gpu.pods)
                .any(|used| *used.uid == *facts.uid)
        });
    let assigned = facts.assignment.as_ref().is_some_and(Result::is_ok) && !facts.released;
    if assigned && phase == Some("Running") && old && !seen && pod.confirmed().is_none() {
        findings.add(
            Level::Info,
            object(),
            "has a GPU and was never seen on it",
            "is it idle, or does its container not see the GPU?",
        );
    }
}

fn policies(cluster: &Cluster, findings: &mut Findings) {
    match &cluster.policies {
        Seen::NotThere => {}
        Seen::Unreadable => findings.add(
            Level::Info,
            "admission",
            "the admission policies were not checked: you may not read them",
            "ask for the ClusterRole gpustow-viewer",
        ),
        Seen::Read(weak) => {
            for (policy, weak) in weak {
                let object = format!("validatingadmissionpolicy/{policy}");
                if weak.is_open() {
                    findings.add(
                        Level::Error,
                        object,
                        format!("{weak}; writes that it should refuse may succeed"),
                        "apply gpustow's manifests again; docs/security.md lists the effects",
                    );
                } else {
                    findings.add(
                        Level::Info,
                        object,
                        weak.to_string(),
                        "use the plugin of that version",
                    );
                }
            }
        }
    }
}
