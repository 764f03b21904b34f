//! Conditions that hold after every write, according to the server's objects alone.

use std::collections::BTreeMap;

use gpustow_api::reserved::Reservation;
use gpustow_api::{Assignment, names};
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;

use crate::autoscaler::is_placeholder;
use crate::disruptions::waits;
use crate::empty::leaves_nearly_empty;
use crate::preempt::{nominated, priority};
use crate::scheduler::uid;
use crate::server::{Copy, Kind, Objects, Server};

/// MiB of every card.
pub(crate) const CARD: u64 = 80_000;

/// The label of pods that a disruption budget covers.
pub(crate) const GUARDED: &str = "example.com/guarded";

/// The label with the number of pods of a group that are scheduled together.
pub(crate) const MEMBERS: &str = "example.com/members";

/// The label of pods that never finish terminating.
pub(crate) const HANGS: &str = "example.com/hangs";

/// Does it never finish terminating?
pub(crate) fn hangs(pod: &Value) -> bool {
    pod["metadata"]["labels"][HANGS] == "yes"
}

/// The label that names the nodes, joined by `_`, that kube-scheduler rejects for a pod for reasons that the ledger cannot
/// see.
pub(crate) const REJECTS: &str = "example.com/rejects";

/// Does kube-scheduler reject the node for the pod?
pub(crate) fn rejects(pod: &Value, node: &str) -> bool {
    let nodes = pod["metadata"]["labels"][REJECTS].as_str();
    nodes.is_some_and(|nodes| nodes.split('_').any(|it| it == node))
}

/// The group of which so many are scheduled at the same time, or none.
pub(crate) fn group(pod: &Value) -> Option<(&str, usize)> {
    let labels = &pod["metadata"]["labels"];
    let members = labels[MEMBERS].as_str()?.parse().ok()?;
    let by_label = || labels[names::POD_GROUP_LABELS[0]].as_str();
    Some((pod_group(pod).or_else(by_label)?, members))
}

/// The name of its PodGroup.
pub(crate) fn pod_group(pod: &Value) -> Option<&str> {
    pod["spec"]["schedulingGroup"]["podGroupName"].as_str()
}

/// Does a disruption budget cover it?
pub(crate) fn guarded(pod: &Value) -> bool {
    pod["metadata"]["labels"][GUARDED] == "yes"
}

/// The errors in this write of a pod.
pub(crate) fn pod(objects: &Objects, before: Option<&Value>, after: &Value) -> Vec<String> {
    let name = &after["metadata"]["name"];
    let node = |pod: &Value| pod["spec"]["nodeName"].as_str().map(str::to_owned);
    let text = |pod: &Value| pod["metadata"]["annotations"][names::ASSIGNMENT].clone();
    let bound_before = before.and_then(node);
    let mut wrong = Vec::new();
    if let (Some(before), true) = (before, bound_before.is_some())
        && (node(before) != node(after) || text(before) != text(after))
    {
        wrong.push(format!("{name} was bound, and is bound otherwise now"));
    }
    let Some(node) = node(after).filter(|_| bound_before.is_none()) else {
        return wrong;
    };
    if is_placeholder(after) {
        wrong.push(format!("{name} is bound, a placeholder"));
    }
    match assignment(after) {
        None => wrong.push(format!("{name} is bound without an assignment")),
        Some(assignment) => {
            let cards = cards(objects, &node);
            for (uuid, _) in &assignment.charges {
                // A card that is gone may have been assigned from stale knowledge.
                let held = cards.get(&**uuid).map_or(0, |card| card.held);
                if !uuid.starts_with(&format!("GPU-{node}-")) || held > CARD {
                    wrong.push(format!(
                        "{name}: card {uuid} of {node} holds {held} MiB of {CARD}"
                    ));
                }
            }
        }
    }
    wrong
}

/// A card according to the server's objects, in MiB.
#[derive(Clone, Debug, Default)]
pub(crate) struct Card {
    /// Memory that pods may hold.
    pub(crate) size: u64,
    /// Memory that pods hold, and memory that they use beyond it.
    pub(crate) held: u64,
    pub(crate) lent: u64,
    /// Memory that others use.
    pub(crate) strangers: u64,
    pub(crate) healthy: bool,
}

impl Card {
    pub(crate) fn free(&self) -> u64 {
        let taken = self.held + self.lent + self.strangers;
        self.size.saturating_sub(taken)
    }
}

fn assignment(pod: &Value) -> Option<Assignment> {
    let text = pod["metadata"]["annotations"][names::ASSIGNMENT].as_str()?;
    Assignment::decode(text).ok()
}

/// Has it ended?
pub(crate) fn ended(pod: &Value) -> bool {
    matches!(
        pod["status"]["phase"].as_str(),
        Some("Succeeded" | "Failed")
    )
}

/// Does a gate hold it back?
pub(crate) fn gated(pod: &Value) -> bool {
    gates(pod).next().is_some()
}

/// A gate that is not gpustow's?
pub(crate) fn gated_by_others(pod: &Value) -> bool {
    gates(pod).any(|gate| gate != names::GATE)
}

fn gates(pod: &Value) -> impl Iterator<Item = &str> {
    let gates = pod["spec"]["schedulingGates"].as_array();
    gates
        .into_iter()
        .flatten()
        .filter_map(|gate| gate["name"].as_str())
}

/// Apart from a pod's status, the extender may change only one thing: it removes its gate. Returns every other change.
pub(crate) fn ungate(before: &Value, after: &Value) -> Option<String> {
    let mut ungated = before["spec"].clone();
    let gates = ungated["schedulingGates"].as_array_mut();
    gates?.retain(|gate| gate["name"] != names::GATE);
    let is_bound = before["spec"]["nodeName"].is_string();
    (is_bound || after["spec"] != ungated).then(|| {
        format!(
            "{}: the extender changed {}",
            before["metadata"]["name"], after["spec"]
        )
    })
}

/// The message of this condition, if it holds.
pub(crate) fn says<'p>(pod: &'p Value, of_type: &str) -> Option<&'p str> {
    let mut conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    conditions.find(|it| it["type"] == of_type && it["status"] == "True")?["message"].as_str()
}

/// The reason of the condition, if it is True.
pub(crate) fn reason<'p>(pod: &'p Value, of_type: &str) -> Option<&'p str> {
    let mut conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    conditions.find(|it| it["type"] == of_type && it["status"] == "True")?["reason"].as_str()
}

/// The node on which memory is reserved for the pod, according to the annotation.
pub(crate) fn reserved_on(pod: &Value) -> Option<String> {
    says(pod, names::RESERVED_CONDITION)?;
    let annotation = pod["metadata"]["annotations"][names::RESERVATION].as_str()?;
    Some(Reservation::decode(annotation)?.node)
}

/// The extender may delete only an exact copy of a bound pod that names the reason. A pod of higher priority must have
/// a reservation on that node. Returns the error in every other deletion.
pub(crate) fn preempted(objects: &Objects, pod: &Value, precondition: &Value) -> Option<String> {
    let Some(node) = pod["spec"]["nodeName"].as_str() else {
        return Some(format!(
            "{} is deleted before it is bound",
            pod["metadata"]["name"]
        ));
    };
    let mut others = objects.all(Kind::Pod);
    let wanted = others.any(|other| {
        priority(other) > priority(pod)
            && !other["spec"]["nodeName"].is_string()
            && reserved_on(other).as_deref() == Some(node)
    });
    let exact = precondition["uid"].is_string() && precondition["resourceVersion"].is_string();
    let marked = says(pod, names::DISRUPTION_TARGET).is_some();
    (!wanted || !exact || !marked).then(|| {
        format!(
            "{} on {node} is deleted: wanted {wanted}, marked {marked}, by its copy {exact}",
            pod["metadata"]["name"]
        )
    })
}

/// The extender may evict a pod that keeps within its request only to move it, and only if the pod may be moved and is
/// marked for it. Its node must be nearly empty, or have a reservation for another pod. Returns the error in every other
/// eviction.
pub(crate) fn evicted(objects: &Objects, pod: &Value) -> Option<String> {
    let node = pod["spec"]["nodeName"].as_str();
    let mut others = objects.all(Kind::Pod);
    let wanted = others.any(|other| {
        priority(other) >= priority(pod)
            && !other["spec"]["nodeName"].is_string()
            && reserved_on(other)
                .as_deref()
                .is_some_and(|it| Some(it) == node)
    });
    let marked = reason(pod, names::DISRUPTION_TARGET) == Some(names::DEFRAGMENTED);
    let moves = (wanted || leaves_nearly_empty(pod)) && marked && is_evictable(pod);
    (!moves).then(|| format!("{} is evicted within its request", pod["metadata"]["name"]))
}

/// Does its owner allow that it is evicted for others?
pub(crate) fn is_evictable(pod: &Value) -> bool {
    pod["metadata"]["annotations"][names::EVICTABLE] == "true"
}

/// The cards of a node, by UUID.
pub(crate) fn cards(objects: &Objects, node: &str) -> BTreeMap<String, Card> {
    cards_with(objects, objects, node, |_| true, |_| true)
}

/// The same by the report in `reported`, if only these pods were on the node. Memory of pods that the server does not show
/// there counts for the UIDs that `others` names.
pub(crate) fn cards_with(
    objects: &Objects,
    reported: &Objects,
    node: &str,
    stays: impl Fn(&Value) -> bool,
    others: impl Fn(&str) -> bool,
) -> BTreeMap<String, Card> {
    let gpus = gpus(reported, node);
    let mut cards: BTreeMap<String, Card> = gpus
        .iter()
        .map(|gpu| {
            let mib = |field: &str| gpu[field].as_u64().unwrap_or(0);
            let card = Card {
                size: mib("totalMiB") - mib("reservedMiB"),
                held: 0,
                lent: 0,
                strangers: mib("unmanagedMiB"),
                healthy: gpu["healthy"] == true && gpu["missing"] != true,
            };
            (gpu["uuid"].as_str().unwrap_or_default().to_owned(), card)
        })
        .collect();
    let here = objects.all(Kind::Pod);
    let here = here.filter(|pod| pod["spec"]["nodeName"] == *node && !ended(pod) && stays(pod));
    let mut shares: BTreeMap<(String, String), u64> = BTreeMap::new();
    for (pod, assignment) in here.filter_map(|pod| Some((pod, assignment(pod)?))) {
        for (uuid, mib) in &assignment.charges {
            cards.entry(uuid.to_string()).or_default().held += mib.0;
            shares.insert((uuid.to_string(), uid(pod)), mib.0);
        }
    }
    // Memory that a pod uses beyond its share, or without a share. After a restore of etcd, a pod still runs where it
    // was bound before.
    for (uuid, by, used) in uses(&gpus) {
        let counts = others(&by);
        let share = shares.get(&(uuid.clone(), by)).copied();
        if share.is_some() || counts {
            let card = cards.entry(uuid).or_default();
            card.lent += used.saturating_sub(share.unwrap_or(0));
        }
    }
    cards
}

/// The GPUs of a node's report.
fn gpus(objects: &Objects, node: &str) -> Vec<Value> {
    let report = objects.get(&(Kind::GpuNode, String::new(), node.to_owned()));
    let gpus = report
        .ok()
        .and_then(|it| it["status"]["gpus"].as_array().cloned());
    gpus.unwrap_or_default()
}

/// The pods' usage in a report: the card's UUID, the pod's UID, and MiB.
fn uses(gpus: &[Value]) -> impl Iterator<Item = (String, String, u64)> {
    gpus.iter().flat_map(|gpu| {
        let uuid = gpu["uuid"].as_str().unwrap_or_default();
        let pods = gpu["pods"].as_array().into_iter().flatten();
        pods.map(|it| {
            let uid = it["uid"].as_str().unwrap_or_default().to_owned();
            (uuid.to_owned(), uid, it["usedMiB"].as_u64().unwrap_or(0))
        })
    })
}

/// Does the pod use more of a card than it holds there, by the report of its node?
pub(crate) fn borrows(objects: &Objects, pod: &Value) -> bool {
    let node = pod["spec"]["nodeName"].as_str().unwrap_or_default();
    let charges = assignment(pod).map(|it| it.charges).unwrap_or_default();
    let (gpus, uid) = (gpus(objects, node), uid(pod));
    let mut its = uses(&gpus).filter(|(_, by, _)| *by == uid);
    its.any(|(uuid, _, used)| {
        let share = charges.iter().find(|(card, _)| **card == *uuid);
        used > share.map_or(0, |(_, mib)| mib.0)
    })
}

/// Has the node's agent sent a heartbeat within this number of seconds?
pub(crate) fn is_fresh(objects: &Objects, node: &str, seconds: i64) -> bool {
    let report = objects.get(&(Kind::GpuNode, String::new(), node.to_owned()));
    let heartbeat = report.ok().and_then(|it| {
        let text = it["status"]["heartbeat"].as_str()?;
        text.parse::<Timestamp>().ok()
    });
    heartbeat.is_some_and(|at| Timestamp::now().as_second() - at.as_second() < seconds)
}

/// Is room kept on the node for another pod that comes before this one?
pub(crate) fn is_kept(objects: &Objects, node: &str, pod: &Value) -> bool {
    objects.all(Kind::Pod).any(|other| {
        let kept = reserved_on(other).as_deref() == Some(node);
        (nominated(other) == Some(node) || kept)
            && other["metadata"]["uid"] != pod["metadata"]["uid"]
            && priority(other) >= priority(pod)
    })
}

/// How much a pod of the world asks of each of how many cards.
pub(crate) fn asks(pod: &Value) -> (u64, usize) {
    let number = |value: &Value| value.as_str().and_then(|text| text.parse().ok());
    let limits = &pod["spec"]["containers"][0]["resources"]["limits"];
    let mib: u64 = number(&limits[names::GPU_MEM]).unwrap_or(0);
    let gpus = number(&pod["metadata"]["annotations"][names::GPU_COUNT]).unwrap_or(1);
    let gpus = usize::try_from(gpus).unwrap_or(1);
    (mib / gpus as u64, gpus)
}

/// The pods of a group that have not ended and do not terminate.
fn of_group<'s>(objects: &'s Objects, name: &str) -> impl Iterator<Item = &'s Copy> {
    objects.all(Kind::Pod).filter(move |pod| {
        let ends = pod["metadata"]["deletionTimestamp"].is_string() || ended(pod);
        !ends && group(pod).is_some_and(|(other, _)| other == name)
    })
}

/// The names of pods that wait for others of their group that have ended.
pub(crate) fn broken_groups(objects: &Objects) -> Vec<String> {
    let waiting = objects
        .all(Kind::Pod)
        .filter(|pod| !pod["spec"]["nodeName"].is_string());
    let broken = waiting.filter(|pod| {
        group(pod).is_some_and(|(name, members)| of_group(objects, name).count() < members)
    });
    broken.map(|pod| crate::scheduler::name(pod)).collect()
}

/// Pods that wait though a node has the cards for them. Where places are kept, or pods move, any other that waits and is of
/// no lower priority may have them.
pub(crate) fn starving(objects: &Objects, places: bool) -> Vec<String> {
    let waiting = objects.all(Kind::Pod).filter(|pod| waits(pod));
    let first = waiting.filter(|pod| {
        let mut others = objects.all(Kind::Pod).filter(|it| waits(it));
        !places || others.all(|it| priority(it) < priority(pod) || uid(it) == uid(pod))
    });
    let fits = first.filter_map(|pod| {
        let (mib, gpus) = asks(pod);
        let room = |node: &Copy| {
            let name = node["metadata"]["name"].as_str().unwrap_or_default();
            let cards = cards(objects, name).into_values();
            let free = cards.filter(|it| it.healthy).map(move |it| it.free() / mib);
            free.collect::<Vec<_>>()
        };
        // Room that is kept for a pod that comes before it is not looked into.
        let open = |node: &&Copy| {
            let name = crate::scheduler::name(node);
            !is_kept(objects, &name, pod) && !rejects(pod, &name)
        };
        let nodes = || objects.all(Kind::Node).filter(open);
        if let Some((name, members)) = group(pod) {
            let bound = |it: &&Copy| it["spec"]["nodeName"].is_string();
            let (bound, unbound): (Vec<_>, Vec<_>) = of_group(objects, name).partition(bound);
            let wanted = match pod_group(pod) {
                Some(_) => members.saturating_sub(bound.len()),
                None => unbound.len(),
            };
            let room: u64 = nodes().flat_map(room).sum();
            if room < wanted as u64 {
                return None;
            }
        }
        let node = nodes().find(|node| {
            let enough = room(node).into_iter().filter(|times| *times > 0);
            enough.count() >= gpus
        })?;
        Some(format!(
            "{} waits for {mib} MiB on {gpus} cards and {} has them",
            pod["metadata"]["name"], node["metadata"]["name"]
        ))
    });
    fits.collect()
}

/// Contradictions between an extender's metrics and the server. The server does not show the GPUs that are reserved for
/// a pod that kube-scheduler assumes.
pub(crate) fn books<'a>(
    server: &Server,
    metrics: &'a str,
) -> impl Iterator<Item = String> + use<'a> {
    let mut holds: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    let mut assumed = 0;
    for node in server.all(Kind::Node) {
        let node = node["metadata"]["name"].as_str().unwrap_or_default();
        assumed += server.assumed_on(node).count();
        let more: u64 = server.assumed_on(node).map(|pod| asks(pod).0).sum();
        let cards = cards(server, node).into_iter();
        holds.extend(cards.map(|(uuid, card)| (uuid, (card.held, card.held + more))));
    }
    metrics.lines().filter_map(move |line| {
        let (series, value) = line.rsplit_once(' ')?;
        let value: f64 = value.parse().ok()?;
        let name = series.split('{').next()?;
        let (least, most) = match name {
            "gpustow_unfenced_pods" => (0.0, 0.0),
            "gpustow_assumed_pods" => (0.0, assumed as f64),
            "gpustow_extender_gpu_memory_requested_bytes" => {
                let (_, uuid) = series.split_once("gpu_uuid=\"")?;
                let held = holds.get(uuid.split('"').next()?);
                let (least, most) = held.copied().unwrap_or_default();
                let bytes = |mib: u64| mib as f64 * 1024.0 * 1024.0;
                (bytes(least), bytes(most))
            }
            _ => return None,
        };
        let right = least <= value && value <= most;
        (!right).then(|| format!("says {line}, and it is {least} to {most}"))
    })
}
