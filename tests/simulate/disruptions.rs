//! Pods that finish, move or give memory back for others: that it is of use, that kube-scheduler showed the node for the
//! pod that it is for, and that it is one node at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::iter::once;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::names;
use serde_json::Value;
use tokio::time::Instant;

use crate::autoscaler::is_placeholder;
use crate::check::{self, Card, asks, ended, gated_by_others, group, rejects, says};
use crate::empty::{self, leaves_nearly_empty};
use crate::net::{Link, NAMESPACE};
use crate::preempt::priority;
use crate::scheduler::{asked, name, uid};
use crate::server::{Copy, Kind, Objects, Server};
use crate::users::owner;

/// A node that kube-scheduler showed longer ago than this is no evidence.
const RECENT: Duration = Duration::from_secs(300);
/// After victims on one node, no others for the same pod on another node for so long.
const APART: Duration = Duration::from_secs(60);
/// An agent's report counts for so long, before it may be called stale.
const FRESH: i64 = 100;

/// Where pods were disrupted for another one, which, and since when.
struct Done {
    node: String,
    victims: BTreeSet<String>,
    since: Instant,
    by: By,
}

/// The component that disrupts pods.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    /// kube-scheduler, as the extender with this link has agreed.
    Scheduler(usize),
    /// The extender, for fragmented memory.
    Extender,
    /// The extender, which reclaims borrowed memory.
    Reclaim,
}

#[derive(Default)]
pub(crate) struct Disruptions {
    /// When kube-scheduler last showed the extender a node for a pod, by UID.
    shown: BTreeMap<(String, String), Instant>,
    /// By the UID of the pod that it was done for.
    done: BTreeMap<String, Done>,
    /// Where kube-scheduler assumes pods to be, by UID.
    assumed: BTreeMap<String, String>,
    /// Which nodes were emptied, by the controllers of the pods that left.
    pub(crate) emptied: BTreeMap<String, String>,
}

impl Disruptions {
    /// kube-scheduler asks about the pod on these nodes.
    pub(crate) fn note_shown(&mut self, uid: &str, nodes: &[String]) {
        for node in nodes {
            let key = (uid.to_owned(), node.clone());
            self.shown.insert(key, Instant::now());
        }
    }

    /// kube-scheduler assumes the pod to be on this node, or on none any more.
    pub(crate) fn assume(&mut self, uid: &str, node: Option<&str>) {
        match node {
            Some(node) => drop(self.assumed.insert(uid.to_owned(), node.to_owned())),
            None => drop(self.assumed.remove(uid)),
        }
    }

    /// Were others disrupted for this pod?
    pub(crate) fn are_for(&self, uid: &str) -> bool {
        self.done.contains_key(uid)
    }

    fn is_shown(&self, pod: &Value, node: &str) -> bool {
        let shown = self.shown.get(&(uid(pod), node.to_owned()));
        shown.is_some_and(|at| at.elapsed() < RECENT)
    }
}

/// Does the pod wait for a node?
pub(crate) fn waits(pod: &Value) -> bool {
    !ended(pod)
        && !is_placeholder(pod)
        && !gated_by_others(pod)
        && !pod["spec"]["nodeName"].is_string()
        && !pod["metadata"]["deletionTimestamp"].is_string()
}

/// The pod that such a message names first.
fn named<'o>(objects: &'o Objects, text: &str) -> Option<&'o Copy> {
    let words = text.split([' ', ',']);
    let mut names = words.filter_map(|word| word.strip_prefix(NAMESPACE)?.strip_prefix('/'));
    let name = names.next()?;
    objects
        .all(Kind::Pod)
        .find(|pod| pod["metadata"]["name"] == *name)
}

/// Could the pod run on the node, by the report in `reported`, if these pods and all that terminate were gone? Memory of
/// pods that are not there counts for the UIDs that `others` names.
fn gains_beside(
    objects: &Objects,
    reported: &Objects,
    pod: &Value,
    node: &str,
    gone: &BTreeSet<String>,
    others: impl Fn(&str) -> bool,
) -> bool {
    let leaves = |it: &Value| it["metadata"]["deletionTimestamp"].is_string();
    let stays = |it: &Value| !gone.contains(&uid(it)) && !leaves(it);
    let cards = check::cards_with(objects, reported, node, stays, others);
    let (mib, gpus) = asks(pod);
    let have = cards
        .values()
        .filter(|card| card.healthy && card.free() >= mib);
    have.count() >= gpus
}

/// Could the pod run on the victim's node if some pods were gone? These are the victim, and the other pods from which
/// memory is reclaimed for the same pod.
fn repays(objects: &Objects, reported: &Objects, pod: &Value, victim: &Value) -> bool {
    let node = victim["spec"]["nodeName"].as_str().unwrap_or_default();
    let gone = victims(objects, pod, victim);
    !rejects(pod, node) && gains(objects, reported, pod, node, &gone)
}

fn gains(
    objects: &Objects,
    reported: &Objects,
    pod: &Value,
    node: &str,
    gone: &BTreeSet<String>,
) -> bool {
    gains_beside(objects, reported, pod, node, gone, |_| false)
}

/// Is the node's sum too small for the pod and the assumed pods together? kube-scheduler does not show such a node.
fn is_short(objects: &Objects, pod: &Value, node: &str, assumed: u64) -> bool {
    let cards = check::cards(objects, node);
    let left = |card: &Card| card.size.saturating_sub(card.held);
    cards.values().map(left).sum::<u64>() < asked(pod) + assumed
}

/// The server's present and past objects that a process with a view of this age may see now.
pub(crate) fn views(server: &Server, age: Duration) -> impl Iterator<Item = &Objects> {
    server.past.within(age).chain(once(&***server))
}

/// Does this hold for some pair of pods and agent's report, each no older than `age`? Each kind has a watch of its own, so
/// that either may be the older one.
fn may_hold(
    server: &Server,
    node: &str,
    age: Duration,
    holds: impl Fn(&Objects, &Objects) -> bool,
) -> bool {
    let key = (Kind::GpuNode, String::new(), node.to_owned());
    let mut all: Vec<&Objects> = views(server, age).collect();
    // The newest is the most likely.
    all.reverse();
    let mut reports = all.clone();
    reports.dedup_by_key(|objects| objects.get(&key).ok());
    all.iter()
        .any(|objects| reports.iter().any(|reported| holds(objects, reported)))
}

/// Pods on the victim's node that finish for this one: marked pods, and pods that its condition names.
fn victims(objects: &Objects, pod: &Value, victim: &Value) -> BTreeSet<String> {
    let text = says(pod, names::RESERVED_CONDITION).unwrap_or_default();
    let told: Vec<&str> = text.split([' ', ',', '.']).collect();
    let named = |it: &Value| told.contains(&&*format!("{NAMESPACE}/{}", name(it)));
    let marked = |it: &Value| says(it, names::DISRUPTION_TARGET).is_some();
    let here = objects.all(Kind::Pod);
    let here = here.filter(|it| it["spec"]["nodeName"] == victim["spec"]["nodeName"]);
    let all = here.filter(|it| named(it) || marked(it)).map(|it| uid(it));
    all.chain(once(uid(victim))).collect()
}

/// The errors in the end or move of a bound pod, requested by a process with a view of this age.
pub(crate) fn unwanted(server: &Server, victim: &Value, age: Duration) -> Vec<String> {
    let node = victim["spec"]["nodeName"].as_str().unwrap_or_default();
    let for_room = says(victim, names::DISRUPTION_TARGET).unwrap_or_default();
    let back = says(victim, names::RECLAIM_CONDITION);
    let helps = |objects: &Objects, reported: &Objects| {
        let pod = named(objects, for_room).filter(|pod| waits(pod));
        pod.is_some_and(|pod| {
            let gone = victims(objects, pod, victim);
            gains(objects, reported, pod, node, &gone)
        })
    };
    // A new leader has overwritten its predecessor's message. If the pod that waited is gone, another may take its
    // turn.
    let due = |objects: &Objects, reported: &Objects| {
        let text = back.filter(|_| check::borrows(reported, victim));
        text.is_some_and(|text| match named(objects, text) {
            Some(pod) if !text.contains("waits for this memory") => {
                pod["spec"]["nodeName"] == *node && !ended(pod)
            }
            None if !text.contains(&format!(" {NAMESPACE}/")) => true,
            _ => {
                let mut others = objects.all(Kind::Pod).filter(|pod| waits(pod));
                others.any(|pod| repays(objects, reported, pod, victim))
            }
        })
    };
    let mut wrong = Vec::new();
    let who = name(victim);
    let empties = |objects: &Objects| leaves_nearly_empty(victim) && empty::helps(objects, victim);
    let of_use = |objects: &Objects, reported: &Objects| {
        helps(objects, reported) || due(objects, reported) || empties(objects)
    };
    if !may_hold(server, node, age, of_use) {
        let text = format!(
            "{who} on {node} is disrupted without a gain: {for_room:?}, {back:?}, by a view of {age:?}"
        );
        wrong.push(text);
    }
    if let Some(pod) = beneficiary(server, victim) {
        let assumed = server.assumed_on(node).map(|it| asked(it)).sum();
        // A recent shortage counts, as a node that was shown recently does: a pod may end while the eviction is on its
        // way.
        let lately = age.max(RECENT);
        let short = || views(server, lately).any(|objects| is_short(objects, pod, node, assumed));
        // Of a group kube-scheduler shows the nodes for the first pod that does not fit, and asks no further.
        let alike = server.all(Kind::Pod);
        let mut alike = alike.filter(|it| group(pod).is_some() && group(it) == group(pod));
        let shown = |it: &Copy| server.disruptions.is_shown(it, node);
        if !shown(pod) && !alike.any(shown) && !short() {
            let pod = name(pod);
            wrong.push(format!(
                "{who} is disrupted for {pod} on {node}, which was not shown for it"
            ));
        }
    }
    wrong
}

/// The pod that waits for the memory that this one holds or borrows, according to this pod's conditions.
fn beneficiary<'s>(server: &'s Server, victim: &Value) -> Option<&'s Copy> {
    let for_room = says(victim, names::DISRUPTION_TARGET);
    let back = says(victim, names::RECLAIM_CONDITION)
        .filter(|text| text.contains("waits for this memory"));
    named(server, for_room.or(back)?)
}

impl Server {
    /// Pods that kube-scheduler assumes to be on the node and that are not bound yet.
    pub(crate) fn assumed_on(&self, node: &str) -> impl Iterator<Item = &Copy> {
        let unbound = |pod: &&Copy| !pod["spec"]["nodeName"].is_string();
        let here = move |pod: &&Copy| {
            let assumed = self.disruptions.assumed.get(&uid(pod));
            assumed.is_some_and(|it| it == node)
        };
        self.all(Kind::Pod).filter(unbound).filter(here)
    }

    /// The extender has disrupted this pod.
    pub(crate) fn disrupted(&mut self, victim: &Value) {
        if let Some(owner) = owner(victim).filter(|_| leaves_nearly_empty(victim)) {
            let node = victim["spec"]["nodeName"].as_str().unwrap_or_default();
            self.disruptions.emptied.insert(owner, node.to_owned());
        }
        let Some(pod) = beneficiary(self, victim).cloned() else {
            return;
        };
        let node = victim["spec"]["nodeName"].as_str().unwrap_or_default();
        let by = match says(victim, names::DISRUPTION_TARGET) {
            Some(_) => By::Extender,
            None => By::Reclaim,
        };
        self.disrupt(&pod, node, &[uid(victim)], by);
    }

    /// kube-scheduler evicts these pods for the pod, by the answer of the extender with this link.
    pub(crate) fn evicts(&mut self, pod: &Value, node: &str, victims: &[String], link: &Arc<Link>) {
        let gone = victims.iter().cloned().collect();
        let gain =
            |objects: &Objects, reported: &Objects| gains(objects, reported, pod, node, &gone);
        if !may_hold(self, node, link.view(), gain) {
            let pod = name(pod);
            self.wrong.push(format!(
                "{victims:?} are evicted for {pod} on {node} without a gain"
            ));
        }
        let by = By::Scheduler(Arc::as_ptr(link).addr());
        self.disrupt(pod, node, victims, by);
    }

    /// Victims on a second node are useless if the victims on the first node would have sufficed all the time.
    fn disrupt(&mut self, pod: &Value, node: &str, victims: &[String], by: By) {
        let before = self.disruptions.done.remove(&uid(pod));
        let (since, mut all) = match before {
            Some(done) if done.node == node => (done.since, done.victims),
            Some(done) => {
                let sufficed = |objects: &Objects| {
                    // Memory is reclaimed when the agent reports it, however late, and the extender's own acts rest on
                    // that.
                    let reported = done.by == By::Reclaim || !matches!(by, By::Scheduler(_));
                    let others = |uid: &str| reported || !done.victims.contains(uid);
                    gains_beside(objects, objects, pod, &done.node, &done.victims, others)
                        && check::is_fresh(objects, &done.node, FRESH)
                        && !check::is_kept(objects, &done.node, pod)
                };
                let age = done.since.elapsed();
                // The server does not show the memory that the other pods of a group are assumed to hold.
                let mut may = age > APART || group(pod).is_some() || rejects(pod, &done.node);
                // Another that may take the room is assumed to have it.
                let takes = |it: &Copy| uid(it) != uid(pod) && priority(it) >= priority(pod);
                may |= self.assumed_on(&done.node).any(takes);
                // Or the extender may keep the room for a waiting pod, in the queue or not, and not have written that
                // yet.
                let waits_there = |it: &Copy| {
                    let fits = || gains(self, self, it, &done.node, &done.victims);
                    waits(it) && (self.disruptions.is_shown(it, &done.node) || fits())
                };
                may |= self.all(Kind::Pod).any(|it| takes(it) && waits_there(it));
                // Of a nomination that is cleared another replica knows nothing.
                may |= matches!((done.by, by), (By::Scheduler(a), By::Scheduler(b)) if a != b);
                if !may && views(self, age).all(sufficed) {
                    let (pod, first) = (name(pod), &done.node);
                    let after = format!("{:?} on {first} {age:?} before", done.victims);
                    self.wrong.push(format!(
                        "{victims:?} on {node} are victims for {pod}, after {after}"
                    ));
                }
                (Instant::now(), BTreeSet::new())
            }
            None => (Instant::now(), BTreeSet::new()),
        };
        all.extend(victims.iter().cloned());
        let done = Done {
            node: node.to_owned(),
            victims: all,
            since,
            by,
        };
        self.disruptions.done.insert(uid(pod), done);
    }
}
