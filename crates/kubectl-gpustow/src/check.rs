//! `check`: drift between assignments, GPUs, agents and the scheduler's configuration, and the mend.

use gpustow_api::names;
use gpustow_ledger::{CardView, NodeView, Problem};
use gpustow_pack::Mib;
use serde::Deserialize as _;
use serde_json::Value as Json;

use crate::Answer;
use crate::cluster::{Cluster, PodInfo, SILENT_AFTER};
use crate::lists::indices;
use crate::output::{Column, Listing, Place, Value, age, memory};
use crate::source::Policies;

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
    object: String,
    problem: String,
    mend: String,
}

#[derive(Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn add(
        &mut self,
        level: Level,
        object: impl Into<String>,
        problem: impl Into<String>,
        mend: impl Into<String>,
    ) {
        let (object, problem, mend) = (object.into(), problem.into(), mend.into());
        self.0.push(Finding {
            level,
            object,
            problem,
            mend,
        });
    }
}

/// Everything that needs a person, errors first. The answer is no if there is more than
/// information.
pub(crate) fn run(cluster: &Cluster) -> Listing<Finding> {
    let mut findings = Findings::default();
    for view in cluster.views() {
        node(cluster, &view, &mut findings);
        for problem in &view.problems {
            of_ledger(cluster, &view, problem, &mut findings);
        }
        for card in &view.cards {
            of_card(cluster, &view, card, &mut findings);
        }
    }
    cluster
        .pods
        .values()
        .for_each(|pod| of_pod(cluster, pod, &mut findings));
    scheduler(cluster, &mut findings);
    policies(cluster, &mut findings);
    let Findings(mut rows) = findings;
    rows.sort_by(|a, b| (a.level, &a.object, &a.problem).cmp(&(b.level, &b.object, &b.problem)));
    let bad = rows.iter().any(|row| row.level < Level::Info);
    Listing {
        kind: "GpuFindingList",
        columns: vec![
            column("LEVEL", "level", |row| match row.level {
                Level::Error => Value::Bad("error".to_owned()),
                Level::Warning => Value::Bad("warning".to_owned()),
                Level::Info => Value::Text("info".to_owned()),
            }),
            column("OBJECT", "object", |row| Value::Text(row.object.clone())),
            column("PROBLEM", "problem", |row| Value::Text(row.problem.clone())),
            column("MEND", "mend", |row| Value::Text(row.mend.clone())),
        ],
        rows,
        total: None,
        name: |row| row.object.clone(),
        empty: "Nothing is wrong.",
        answer: if bad { Answer::No } else { Answer::Yes },
    }
}

fn column(head: &'static str, key: &'static str, value: fn(&Finding) -> Value) -> Column<Finding> {
    Column {
        head,
        key,
        place: Place::Always,
        value,
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
    if let Some(silent) = cluster.report_age(&view.name)
        && silent > SILENT_AFTER
    {
        findings.add(
            Level::Warning,
            object.clone(),
            format!(
                "its agent reported {} ago: no new pod goes here",
                age(silent)
            ),
            format!("look at the log of {} on this node", names::AGENT),
        );
    }
    let capacity: Mib = view.cards.iter().map(|card| card.capacity).sum();
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
    let said = said
        .and_then(|quantity| quantity.0.parse().ok())
        .map_or(Mib::ZERO, Mib);
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
            "its assignment is not what it asks for: forged, or the request was changed after it was bound",
            format!("delete the pod; find out who writes {}", names::ASSIGNMENT),
        ),
        Problem::Twice { uuid, other } => findings.add(
            Level::Warning,
            format!("node/{}", view.name),
            format!("GPU {uuid} is reported by node {other} too"),
            format!("one of the two {}s is not what it says: look at both nodes", names::AGENT),
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

fn of_card(cluster: &Cluster, view: &NodeView, card: &CardView, findings: &mut Findings) {
    let object = || format!("node/{}", view.name);
    let report = cluster.reports.get(&*view.name);
    let gpu = report.and_then(|report| report.gpus.iter().find(|gpu| gpu.uuid == card.uuid));
    let Some(gpu) = gpu else { return };
    if !card.healthy {
        let reason = gpu.reason.as_deref().unwrap_or("no reason given");
        findings.add(
            Level::Warning,
            object(),
            format!("GPU {} takes no pods: {reason}", card.index),
            "drain the node, then reset or replace the GPU",
        );
    }
    if card.strangers > Mib(2048) {
        findings.add(
            Level::Warning,
            object(),
            format!(
                "GPU {}: {} used by processes of no gpustow pod",
                card.index,
                memory(card.strangers)
            ),
            "nvidia-smi on the node names them",
        );
    }
    for used in &gpu.pods {
        let amount = Mib(used.used_mib);
        let Some(pod) = cluster.pods.get(used.uid.as_str()) else {
            findings.add(
                Level::Warning,
                object(),
                format!(
                    "GPU {}: {} held by pod {}, which is gone",
                    card.index,
                    memory(amount),
                    used.uid
                ),
                "end the process on the node",
            );
            continue;
        };
        let assignment = pod
            .facts
            .assignment
            .as_ref()
            .and_then(|it| it.as_ref().ok());
        let charged = assignment.map_or(Mib::ZERO, |assignment| {
            let here = assignment
                .charges
                .iter()
                .filter(|(uuid, _)| **uuid == *card.uuid);
            here.map(|&(_, mib)| mib).sum()
        });
        let on_node = pod.facts.node.as_deref() == Some(&*view.name);
        if assignment.is_some() && (charged == Mib::ZERO || !on_node) {
            findings.add(
                Level::Error,
                format!("pod/{}", pod.full_name()),
                format!(
                    "uses {} on {} GPU {}, which is not its own",
                    memory(amount),
                    view.name,
                    card.index
                ),
                format!("does its image or command set {}?", names::VISIBLE_DEVICES),
            );
        } else if amount.0 > charged.0 + charged.0 / 20 && charged > Mib::ZERO {
            let level = if card.free == Mib::ZERO {
                Level::Warning
            } else {
                Level::Info
            };
            findings.add(
                level,
                format!("pod/{}", pod.full_name()),
                format!("uses {} of {} asked for", memory(amount), memory(charged)),
                format!("raise its {}", cluster.resource()),
            );
        }
    }
}

fn of_pod(cluster: &Cluster, pod: &PodInfo, findings: &mut Findings) {
    let facts = &pod.facts;
    let object = || format!("pod/{}", pod.full_name());
    let old = pod.age(cluster.wall) > PATIENCE;
    if let Err(bad) = &facts.request {
        findings.add(
            Level::Error,
            object(),
            bad.to_string(),
            "correct the pod and create it again",
        );
    } else if pod.waits() && old && !facts.gated && pod.scheduler_said().is_none() {
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
        Policies::NotThere => {}
        Policies::Unreadable => findings.add(
            Level::Info,
            "admission",
            "the admission policies were not checked: you may not read them",
            "ask for the ClusterRole gpustow-viewer",
        ),
        Policies::Read(weak) => {
            for (policy, problem) in weak {
                findings.add(
                    Level::Error,
                    format!("validatingadmissionpolicy/{policy}"),
                    format!("{problem}: what it holds off is open"),
                    "apply gpustow's manifests again; docs/security.md says what may have come in",
                );
            }
        }
    }
}

fn scheduler(cluster: &Cluster, findings: &mut Findings) {
    let Some(configs) = &cluster.configs else {
        findings.add(
            Level::Info,
            "configuration",
            "the scheduler's configuration was not checked: you may not read it",
            format!(
                "ask for the right to list ConfigMaps in {}",
                names::NAMESPACE
            ),
        );
        return;
    };
    for config in configs {
        let name = config.metadata.name.as_deref().unwrap_or_default();
        for text in config.data.iter().flat_map(|data| data.values()) {
            for document in serde_yaml::Deserializer::from_str(text) {
                if let Ok(value) = Json::deserialize(document)
                    && value["kind"] == "KubeSchedulerConfiguration"
                {
                    configuration(&format!("configmap/{name}"), &value, cluster, findings);
                }
            }
        }
    }
}

/// What must hold of the scheduler's configuration.
fn configuration(object: &str, config: &Json, cluster: &Cluster, findings: &mut Findings) {
    let list = |value: &Json, key: &str| value[key].as_array().cloned().unwrap_or_default();
    let ours = list(config, "extenders").into_iter().find_map(|extender| {
        let resources = list(&extender, "managedResources");
        let resource = resources
            .iter()
            .find(|it| it["name"] == cluster.resource())?
            .clone();
        Some((extender, resource))
    });
    let Some((extender, resource)) = ours else {
        findings.add(
            Level::Error,
            object,
            format!("no extender manages {}", cluster.resource()),
            "take extenders from scheduler-config/gpustow-scheduler.yaml",
        );
        return;
    };
    let mut wrong = |is: bool, setting: &str, why: &str| {
        if is {
            findings.add(Level::Error, object, why, format!("set {setting}"));
        }
    };
    let on = |value: &Json| value == true;
    wrong(
        !on(&extender["nodeCacheCapable"]),
        "nodeCacheCapable: true",
        "the extender is sent whole nodes and answers with an error",
    );
    wrong(
        on(&extender["ignorable"]),
        "ignorable: false",
        "pods are bound without a GPU while the extender is down",
    );
    wrong(
        extender["weight"] != 1,
        "weight: 1",
        "the extender's scores outweigh the pods' own preferences",
    );
    wrong(
        on(&resource["ignoredByScheduler"]),
        "ignoredByScheduler: false",
        "kube-scheduler does not count the node's memory itself",
    );
    for verb in ["filterVerb", "preemptVerb", "bindVerb"] {
        wrong(
            extender[verb].as_str().is_none_or(str::is_empty),
            &format!("{verb}, as in scheduler-config/"),
            &format!("the extender is not called: {verb} is missing"),
        );
    }
    for profile in list(config, "profiles") {
        let share = profile
            .get("percentageOfNodesToScore")
            .or(config.get("percentageOfNodesToScore"));
        if share.is_none_or(|share| *share != 100) && profile["schedulerName"] == names::SCHEDULER {
            findings.add(
                Level::Warning,
                object,
                "the extender is shown some of the nodes only and packs worse",
                "set percentageOfNodesToScore: 100 in the profile",
            );
        }
    }
}
