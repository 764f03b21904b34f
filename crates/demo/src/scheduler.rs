//! As much of kube-scheduler as the demo needs: a queue by priority and age, the node-sum check,
//! and the calls of an extender. A refused pod sleeps until room is announced on it. It
//! schedules one pod at a time and waits for the bind, where kube-scheduler goes on to the next.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use gpustow_api::{NodeFacts, PodFacts, names};
use gpustow_simworld::{Extender, Kind, key_of, locked};
use k8s_openapi::api::core::v1::{Node, Pod};
use serde::Deserialize as _;
use serde_json::{Value, json};
use tokio::time::sleep;

use super::api_server::Shared;
use super::workload::prefers;

/// Before a pod is tried again whose bind failed, or an extender that answered with an error.
const BACKOFF: Duration = Duration::from_millis(50);

/// kube-scheduler's sums of requests: thousandths of a core, bytes of host memory, MiB of GPU memory.
#[derive(Clone, Copy, Default)]
struct Sums([u64; 3]);

impl Sums {
    fn of(pod: &PodFacts) -> Self {
        let request = pod.asks.readable();
        request.map_or(Self::default(), |request| {
            Self([request.cpu_milli, request.ram.0, request.in_sum().0])
        })
    }

    fn take(&mut self, part: Self) {
        self.0
            .iter_mut()
            .zip(part.0)
            .for_each(|(sum, part)| *sum = sum.saturating_sub(part));
    }

    fn give(&mut self, part: Self) {
        self.0
            .iter_mut()
            .zip(part.0)
            .for_each(|(sum, part)| *sum += part);
    }

    fn holds(&self, part: Self) -> bool {
        self.0.iter().zip(part.0).all(|(sum, part)| *sum >= part)
    }
}

/// A node and its free resources as sums.
struct NodeInfo {
    object: Arc<Value>,
    name: Arc<str>,
    free: Sums,
}

/// A pod and how it looked last.
struct PodInfo {
    object: Arc<Value>,
    facts: PodFacts,
}

/// The scheduler's state.
pub(crate) struct Scheduler {
    server: Shared,
    extender: Extender,
    nodes: Vec<NodeInfo>,
    /// By UID, all that exist.
    pods: BTreeMap<String, PodInfo>,
    /// Priority and UID, which counts upwards: the oldest first.
    queue: BTreeSet<(Reverse<i32>, String)>,
    /// UID, and whether the sums of the nodes refused it rather than the extender.
    asleep: BTreeMap<String, bool>,
    seen: u64,
    /// A pause before each look, so that the extender has received the events first. On paused time all is still by
    /// then.
    look: Duration,
}

impl Scheduler {
    /// One that will schedule the pods of `server` on the nodes that it has now.
    ///
    /// # Errors
    /// If a node cannot be read.
    pub(crate) fn new(server: Shared, extender: Extender, look: Duration) -> Result<Self> {
        let (seen, nodes) = {
            let server = locked(&server);
            let nodes: Vec<_> = server.all(Kind::Node).cloned().collect();
            (server.version(), nodes)
        };
        let nodes = nodes.into_iter().map(|object| {
            let node = Node::deserialize(&*object).context("a node")?;
            let allocatable = node.status.as_ref().and_then(|s| s.allocatable.as_ref());
            let gpu_mem = allocatable.and_then(|list| list.get(names::GPU_MEM));
            let gpu_mem = gpu_mem.map_or(Ok(0), |amount| amount.0.parse())?;
            let facts = NodeFacts::from_node(&node);
            Ok(NodeInfo {
                free: Sums([facts.cpu_milli, facts.ram.0, gpu_mem]),
                name: facts.name,
                object,
            })
        });
        Ok(Self {
            nodes: nodes.collect::<Result<_>>()?,
            server,
            extender,
            pods: BTreeMap::new(),
            queue: BTreeSet::new(),
            asleep: BTreeMap::new(),
            seen,
            look,
        })
    }

    /// Schedules until it is dropped.
    ///
    /// # Errors
    /// If the extender cannot be reached or talks nonsense.
    pub(crate) async fn run(mut self) -> Result<()> {
        let mut changed = locked(&self.server).news();
        loop {
            sleep(self.look).await;
            changed.borrow_and_update();
            self.observe()?;
            match self.queue.pop_first() {
                Some((_, uid)) => self.schedule(&uid).await?,
                None => changed.changed().await?,
            }
        }
    }

    /// Processes the writes since the last look.
    fn observe(&mut self) -> Result<()> {
        let changes = locked(&self.server).since(self.seen).map(<[_]>::to_vec);
        let changes = changes.map_err(|refusal| anyhow::anyhow!(refusal.2))?;
        for change in changes {
            self.seen = change.version;
            if change.kind != Kind::Pod {
                continue;
            }
            match (&change.before, &change.after) {
                (old, Some(new)) => {
                    let pod = Pod::deserialize(&**new).context("a pod")?;
                    let facts = PodFacts::from_pod(&pod, names::GPU_MEM).context("no UID")?;
                    let uid = facts.uid.to_string();
                    let sums = Sums::of(&facts);
                    let node = facts.node.clone();
                    let object = new.clone();
                    let before = self.pods.insert(uid.clone(), PodInfo { object, facts });
                    if let Some(node) = node {
                        self.asleep.remove(&uid);
                        if before.is_none_or(|before| before.facts.node.is_none()) {
                            self.free_of(&node, |free| free.take(sums));
                        }
                    } else if old.is_none() || room(old.as_deref()) != room(Some(new)) {
                        self.wake(&uid);
                    }
                }
                (Some(old), None) => {
                    let uid = old["metadata"]["uid"].as_str().unwrap_or_default();
                    self.asleep.remove(uid);
                    let gone = self.pods.remove(uid).map(|gone| gone.facts);
                    let Some((node, gone)) = gone.and_then(|it| Some((it.node.clone()?, it)))
                    else {
                        continue;
                    };
                    self.free_of(&node, |free| free.give(Sums::of(&gone)));
                    self.wake_by_sums();
                }
                (None, None) => {}
            }
        }
        Ok(())
    }

    fn free_of(&mut self, node: &str, change: impl FnOnce(&mut Sums)) {
        let mut nodes = self.nodes.iter_mut();
        if let Some(node) = nodes.find(|it| *it.name == *node) {
            change(&mut node.free);
        }
    }

    /// Room was given back: kube-scheduler tries those again that the sums refused and do no more.
    fn wake_by_sums(&mut self) {
        let by_sums = self.asleep.iter().filter(|(_, by_sums)| **by_sums);
        let fits = |uid: &&String| {
            let pod = self.pods.get(*uid);
            pod.is_some_and(|pod| !self.candidates(&pod.facts).is_empty())
        };
        let uids: Vec<String> = by_sums.map(|(uid, _)| uid).filter(fits).cloned().collect();
        uids.iter().for_each(|uid| self.wake(uid));
    }

    fn wake(&mut self, uid: &str) {
        self.asleep.remove(uid);
        if let Some(PodInfo { facts, .. }) = self.pods.get(uid) {
            self.queue.insert((Reverse(facts.priority), uid.to_owned()));
        }
    }

    async fn schedule(&mut self, uid: &str) -> Result<()> {
        let Some(PodInfo { object, facts }) = self.pods.get(uid) else {
            return Ok(());
        };
        let object = object.clone();
        if facts.node.is_some() {
            return Ok(());
        }
        let candidates = self.candidates(facts);
        if candidates.is_empty() {
            self.sleep(uid, &object, true);
            return Ok(());
        }
        let Some([passed, _]) = self.extender.filter(&object, &candidates).await else {
            self.try_later(uid).await;
            return Ok(());
        };
        // kube-scheduler counts an extender's scores tenfold, and gives a preferred node 200 points by NodeAffinity.
        let preferred = |name: &str| {
            let node = self.nodes.iter().find(|node| *node.name == *name);
            i64::from(node.is_some_and(|node| prefers(&object, &node.object))) * 20
        };
        let Some(node) = self.extender.best(&object, passed, preferred).await else {
            self.sleep(uid, &object, false);
            return Ok(());
        };
        if !self.extender.bind(&object, &node).await {
            self.try_later(uid).await;
        }
        Ok(())
    }

    async fn try_later(&mut self, uid: &str) {
        sleep(BACKOFF).await;
        self.wake(uid);
    }

    /// The nodes whose free sums fit the pod, as NodeResourcesFit computes them.
    fn candidates(&self, pod: &PodFacts) -> Vec<String> {
        let sums = Sums::of(pod);
        let fitting = self.nodes.iter().filter(|node| node.free.holds(sums));
        fitting.map(|node| node.name.to_string()).collect()
    }

    /// Sets the pod's condition to Unschedulable, as kube-scheduler does, and lets the pod wait.
    fn sleep(&mut self, uid: &str, pod: &Value, by_sums: bool) {
        self.asleep.insert(uid.to_owned(), by_sums);
        let refused =
            json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]);
        let patch = json!({"metadata": {"uid": uid}, "status": {"conditions": refused}});
        // The pod may be gone; the next look shows that.
        let _ = locked(&self.server).patch(key_of(Kind::Pod, pod), &patch, true, true);
    }
}

/// The message of the condition by which the extender announces room.
fn room(pod: Option<&Value>) -> Option<&Value> {
    let conditions = pod?.pointer("/status/conditions")?.as_array()?;
    let mut conditions = conditions.iter();
    conditions
        .find(|condition| condition["type"] == names::AVAILABLE_CONDITION)?
        .get("message")
}
