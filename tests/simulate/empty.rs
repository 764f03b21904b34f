//! Nodes that are emptied for an autoscaler: no pod waits, each pod that leaves has room on a fuller node, none comes back,
//! and in the end no node is left that could be emptied.

use std::time::Duration;

use anyhow::{Result, ensure};
use gpustow_api::names;
use rand::RngExt as _;
use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::check::{self, ended, guarded, is_evictable, is_fresh, rejects, says};
use crate::disruptions::waits;
use crate::net::locked;
use crate::scheduler::name;
use crate::server::{Copy, Kind, Objects};
use crate::users::owner;
use crate::world::World;

/// Every pod has run for ten minutes after this, and a look at all nodes has begun.
const STEADY: Duration = Duration::from_secs(700);
/// All nodes that could be emptied are, so long after that.
const EMPTIED: Duration = Duration::from_secs(600);
const STEP: Duration = Duration::from_secs(1);
/// An agent's report counts for so many seconds.
const FRESH: i64 = 60;

/// Was the pod evicted to empty its node?
pub(crate) fn leaves_nearly_empty(pod: &Value) -> bool {
    let why = says(pod, names::DISRUPTION_TARGET);
    why.is_some_and(|why| why.contains("which is nearly empty"))
}

/// Pods on the node that have not ended.
fn pods_on<'o>(objects: &'o Objects, node: &str) -> impl Iterator<Item = &'o Copy> {
    let here = move |pod: &&Copy| pod["spec"]["nodeName"] == *node && !ended(pod);
    objects.all(Kind::Pod).filter(here)
}

/// Thousandths of its GPU memory that are not free.
fn taken(objects: &Objects, node: &str) -> u64 {
    let cards = check::cards(objects, node).into_values();
    let (taken, all) = cards.fold((0, 0), |(taken, all), card| {
        (taken + card.size - card.free(), all + card.size)
    });
    taken * 1000 / all.max(1)
}

/// Is there a node with pods that stay and room for this pod?
fn fits_beside_others(objects: &Objects, pod: &Value, may: impl Fn(&str) -> bool) -> bool {
    let (mib, gpus) = check::asks(pod);
    objects.all(Kind::Node).map(|it| name(it)).any(|node| {
        let cards = check::cards(objects, &node).into_values();
        let cards = cards.filter(|card| card.healthy && card.free() >= mib);
        let leaves = |it: &&Copy| it["metadata"]["deletionTimestamp"].is_string();
        let stays = pods_on(objects, &node).any(|it| !leaves(&it));
        pod["spec"]["nodeName"] != *node && may(&node) && stays && cards.count() >= gpus
    })
}

/// Is it of use that this pod leaves, and does it harm no other?
pub(crate) fn helps(objects: &Objects, pod: &Value) -> bool {
    // The replacement of another that left waits for a moment.
    let mut waiting = objects.all(Kind::Pod).filter(|it| waits(it));
    waiting.all(|it| is_evictable(it)) && fits_beside_others(objects, pod, |_| true)
}

/// Nodes with one pod, which could run on a fuller node.
fn nearly_empty(objects: &Objects, was_emptied: impl Fn(&str) -> bool) -> Vec<String> {
    if objects.all(Kind::Pod).any(|pod| waits(pod)) {
        return Vec::new();
    }
    let all = objects.all(Kind::Node).map(|it| name(it));
    let all = all.filter(|node| is_fresh(objects, node, FRESH) && !was_emptied(node));
    let lone = all.filter_map(|node| {
        let mut here = pods_on(objects, &node);
        let pod = here.next().filter(|_| here.next().is_none())?;
        let leaves = pod["metadata"]["deletionTimestamp"].is_string();
        let may = is_evictable(pod) && !leaves && !guarded(pod);
        let holds = taken(objects, &node);
        let fuller = |other: &str| {
            let is_open = is_fresh(objects, other, FRESH) && !rejects(pod, other);
            is_open && taken(objects, other) > holds
        };
        let could = may && holds < 500 && fits_beside_others(objects, pod, fuller);
        could.then(|| format!("{} could leave {node}, which is nearly empty", name(pod)))
    });
    lone.collect()
}

impl World {
    /// Most pods end, and no pod waits any more. Nearly empty nodes are emptied, also when another replica takes over.
    pub(crate) async fn probe_emptied(&mut self) -> Result<()> {
        self.tell("most pods end");
        let all: Vec<(String, bool)> = {
            let server = locked(&self.server);
            let all = server.all(Kind::Pod).filter(|pod| !ended(pod));
            all.map(|pod| (name(pod), pod["spec"]["nodeName"].is_string()))
                .collect()
        };
        for (name, bound) in all {
            if !bound || self.random.random_bool(0.6) {
                self.end_pod(&name, bound);
            }
        }
        locked(&self.server).disruptions.emptied.clear();
        let mut takes_over = self.random.random_bool(0.5);
        let began = Instant::now();
        loop {
            if takes_over && !locked(&self.server).disruptions.emptied.is_empty() {
                takes_over = false;
                self.tell("the other replica takes over");
                // It does not know of pods that have left: their replacements may come back, and leave again.
                locked(&self.server).disruptions.emptied.clear();
                for replica in &self.replicas {
                    replica.lead(!replica.leads());
                }
            }
            self.live(true)?;
            sleep(STEP).await;
            self.check()?;
            let wrong = self.not_emptied();
            if began.elapsed() < STEADY {
                continue;
            }
            if wrong.is_empty() {
                return Ok(());
            }
            ensure!(began.elapsed() < STEADY + EMPTIED, "{}", wrong.join("; "));
        }
    }

    /// Nodes that could be emptied, and pods that came back to one that was.
    fn not_emptied(&self) -> Vec<String> {
        let server = locked(&self.server);
        let emptied = &server.disruptions.emptied;
        let was_emptied = |node: &str| emptied.values().any(|it| it == node);
        let mut wrong = nearly_empty(&server, was_emptied);
        let came_back = server.all(Kind::Pod).filter(|pod| {
            let left = owner(pod).and_then(|owner| emptied.get(&owner));
            let is_new = !pod["metadata"]["deletionTimestamp"].is_string() && !ended(pod);
            // Which nodes kube-scheduler rejects for it the extender does not know.
            let goes_anywhere = !pod["metadata"]["labels"][check::REJECTS].is_string();
            is_new && goes_anywhere && left.is_some_and(|node| pod["spec"]["nodeName"] == **node)
        });
        wrong.extend(came_back.map(|pod| format!("{} came back", name(pod))));
        wrong
    }
}
