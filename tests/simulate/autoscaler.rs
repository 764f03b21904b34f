//! An autoscaler that does not call extenders. It adds a node for a pod that kube-scheduler refused. The pod must fit
//! on a new node, but on no present or coming node. It compares sums of memory, so it sees the requests of the
//! extender's placeholders.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, anyhow};
use gpustow_api::intree::{self, Constraints};
use gpustow_api::{NodeFacts, names};
use rand::RngExt as _;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::cache::is_open;
use crate::check::{CARD, asks, ended, group};
use crate::disruptions::waits;
use crate::machine::Machine;
use crate::net::{NAMESPACE, locked};
use crate::preempt::nominated;
use crate::scheduler::{asked, name, uid};
use crate::server::{Copy, Kind, Objects};
use crate::world::{World, key};

/// Between two looks.
const LOOK: Duration = Duration::from_secs(10);
/// Until a node that was asked for registers, and until its agent runs.
const REGISTERS: std::ops::Range<u64> = 10..60;
const STARTS: std::ops::Range<u64> = 0..30;
/// GPUs of the kinds of nodes that it can add.
const KINDS: [usize; 3] = [1, 2, 4];
/// Nodes that it adds at most.
const MOST: usize = 3;
/// Below that of all pods, as the admission controller writes it.
const PRIORITY: i64 = -10;

/// A node that was asked for.
struct Coming {
    number: usize,
    name: String,
    gpus: usize,
    registers: Instant,
    starts: Instant,
}

#[derive(Default)]
pub(crate) struct Autoscaler {
    looked: Option<Instant>,
    coming: Vec<Coming>,
    /// GPUs of the nodes that it has added, by their names.
    added: BTreeMap<String, usize>,
}

/// Does the pod stand for others that need a node?
pub(crate) fn is_placeholder(pod: &Value) -> bool {
    pod["metadata"]["labels"][names::PLACEHOLDER].is_string()
}

/// Admits a pod that the extender creates: a placeholder gets its priority and phase. Every other pod is an error.
pub(crate) fn admit(pod: &mut Value) -> Result<(), String> {
    if !is_placeholder(pod) {
        return Err(format!("the extender creates {}", pod["metadata"]["name"]));
    }
    pod["spec"]["priority"] = json!(PRIORITY);
    pod["status"] = json!({ "phase": "Pending" });
    Ok(())
}

/// Do selectors and affinity of the pod allow the node?
pub(crate) fn allows(node: &Value, pod: &Value) -> bool {
    let node = serde_json::from_value(node.clone()).map(|node| NodeFacts::from_node(&node));
    let spec = serde_json::from_value(pod["spec"].clone()).map(|spec| Constraints::of(&spec));
    matches!((node, spec), (Ok(node), Ok(spec)) if intree::refuses(&node, &spec).is_none())
}

/// A node with this number of GPUs, before its agent's first report.
pub(crate) fn node(name: &str, gpus: usize) -> Value {
    let sum = json!({ "cpu": "64", "memory": "1Ti", "pods": "1000" });
    json!({
        "metadata": { "name": name, "labels": {
            names::HOSTNAME: name, names::INSTANCE_TYPE: format!("gpus-{gpus}"),
        } },
        "spec": {},
        "status": { "capacity": sum, "allocatable": sum, "conditions": [{ "type": "Ready", "status": "True" }] },
    })
}

/// A node, and how much memory is left of its sum.
struct Site {
    node: Value,
    left: u64,
}

/// The present nodes. For a node without GPU memory so far, the autoscaler's knowledge of its kind counts.
fn sites(objects: &Objects, added: &BTreeMap<String, usize>) -> Vec<Site> {
    let all = objects.all(Kind::Node).map(|node| {
        let name = name(node);
        let sum = node["status"]["allocatable"][names::GPU_MEM].as_str();
        let sum = sum.and_then(|text| text.parse().ok());
        let of_kind = added.get(&name).map(|gpus| *gpus as u64 * CARD);
        let here = objects.all(Kind::Pod);
        let here = here.filter(|pod| pod["spec"]["nodeName"] == *name && !ended(pod));
        let held: u64 = here.map(|pod| asked(pod)).sum();
        Site {
            node: Value::clone(node),
            left: sum.or(of_kind).unwrap_or(0_u64).saturating_sub(held),
        }
    });
    all.collect()
}

/// The pods that kube-scheduler refused.
fn refused(objects: &Objects) -> impl Iterator<Item = &Copy> {
    objects.all(Kind::Pod).filter(|pod| {
        let mut conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
        let refused =
            conditions.any(|it| it["type"] == "PodScheduled" && it["reason"] == "Unschedulable");
        refused && is_open(pod) && !ended(pod) && !pod["spec"]["nodeName"].is_string()
    })
}

impl World {
    /// Nodes that were asked for come, and others are asked for. A kubelet whose Node is gone registers again.
    pub(crate) fn scale(&mut self, calm: bool) -> Result<()> {
        if !self.on.provision {
            return Ok(());
        }
        self.collect();
        self.register()?;
        let now = Instant::now();
        let started = |coming: &mut Coming| coming.starts <= now;
        let started: Vec<Coming> = self.autoscaler.coming.extract_if(.., started).collect();
        for Coming { number, gpus, .. } in started {
            let seed = self.random.random();
            let machine = Machine::new(&self.server, number, gpus, seed)?;
            if !calm {
                machine.link.set_odds(self.odds());
            }
            self.machines.push(machine);
        }
        let due = self.autoscaler.looked.is_none_or(|at| at.elapsed() >= LOOK);
        if due {
            self.autoscaler.looked = Some(now);
            self.look();
        }
        Ok(())
    }

    fn register(&self) -> Result<()> {
        let now = Instant::now();
        let coming = self.autoscaler.coming.iter();
        let coming = coming.filter(|it| it.registers <= now).map(|it| &it.name);
        let machines = self.machines.iter().map(|it| &it.name);
        let mut server = locked(&self.server);
        for name in machines.chain(coming) {
            if let (Some(gpus), Err(_)) = (
                self.autoscaler.added.get(name),
                server.get(&key(Kind::Node, name)),
            ) {
                self.tell(format!("{name} registers"));
                let made = server.create(Kind::Node, "", node(name, *gpus));
                made.map_err(|refusal| anyhow!("{refusal:?}"))?;
            }
        }
        Ok(())
    }

    /// The garbage collector: a pod whose owner is gone goes with it.
    fn collect(&self) {
        let mut server = locked(&self.server);
        let orphans = server.all(Kind::Pod).filter(|pod| {
            let owner = &pod["metadata"]["ownerReferences"][0]["uid"];
            is_placeholder(pod)
                && !server
                    .all(Kind::Pod)
                    .any(|it| it["metadata"]["uid"] == *owner)
        });
        let orphans: Vec<String> = orphans.map(|pod| name(pod)).collect();
        for orphan in orphans {
            server.end((Kind::Pod, NAMESPACE.to_owned(), orphan));
        }
    }

    fn look(&mut self) {
        let mut asked_for = Vec::new();
        {
            let server = locked(&self.server);
            let mut sites = sites(&server, &self.autoscaler.added);
            let coming = self.autoscaler.coming.iter();
            let coming = coming.filter(|it| server.get(&key(Kind::Node, &it.name)).is_err());
            sites.extend(coming.map(|it| Site {
                node: node(&it.name, it.gpus),
                left: it.gpus as u64 * CARD,
            }));
            let before = self.machines.len() + self.autoscaler.coming.len();
            for pod in refused(&server) {
                let wants = asked(pod);
                let mut fits = sites.iter_mut();
                if let Some(site) = fits.find(|it| wants <= it.left && allows(&it.node, pod)) {
                    site.left -= wants;
                    continue;
                }
                let number = before + asked_for.len();
                let name = format!("n{number}");
                let suits = |gpus: &&usize| {
                    wants <= **gpus as u64 * CARD && allows(&template(&name, **gpus), pod)
                };
                let kind = KINDS.iter().find(suits);
                if let Some(&gpus) =
                    kind.filter(|_| self.autoscaler.added.len() + asked_for.len() < MOST)
                {
                    sites.push(Site {
                        node: template(&name, gpus),
                        left: gpus as u64 * CARD - wants,
                    });
                    asked_for.push((number, gpus, self::name(pod)));
                }
            }
        }
        for (number, gpus, pod) in asked_for {
            let name = format!("n{number}");
            self.tell(format!(
                "{name} with {gpus} GPUs is asked for because {pod} was refused"
            ));
            let seconds = |range| Duration::from_secs(range);
            let registers = Instant::now() + seconds(self.random.random_range(REGISTERS));
            let starts = registers + seconds(self.random.random_range(STARTS));
            self.autoscaler.added.insert(name.clone(), gpus);
            self.autoscaler.coming.push(Coming {
                number,
                name,
                gpus,
                registers,
                starts,
            });
        }
    }

    /// Placeholders that no pod needs any more, and pods that wait though the autoscaler can add a node for them.
    pub(crate) fn wrong_placeholders(&self) -> Vec<String> {
        let server = locked(&self.server);
        let mut wrong = Vec::new();
        let all = || server.all(Kind::Pod).filter(|pod| is_placeholder(pod));
        for placeholder in all() {
            let owner = &placeholder["metadata"]["ownerReferences"][0]["uid"];
            let mut pods = server.all(Kind::Pod);
            let owner = pods.find(|pod| uid(pod).as_str() == owner.as_str().unwrap_or_default());
            if owner.is_none_or(|pod| pod["spec"]["nodeName"].is_string() || ended(pod)) {
                wrong.push(format!("no pod needs {}", placeholder["metadata"]["name"]));
            }
        }
        let most = usize::try_from(self.on.spec().provision.max).unwrap_or(usize::MAX);
        if all().count() > most {
            wrong.push(format!("{} placeholders are there", all().count()));
        }
        wrong.extend(self.unserved(&server));
        wrong
    }

    /// Pods that wait though the autoscaler can add a node for them, where nothing else may make room.
    fn unserved(&self, server: &Objects) -> Vec<String> {
        let on = &self.on;
        let others = on.reclaim || on.preempt || on.reserve || on.defragment;
        if !on.provision || others || self.autoscaler.added.len() == MOST {
            return Vec::new();
        }
        let largest = KINDS.into_iter().max().unwrap_or(0);
        let alone = |pod: &&Copy| waits(pod) && group(pod).is_none() && nominated(pod).is_none();
        let waiting = server.all(Kind::Pod).filter(alone);
        let fits = waiting.filter(|pod| asks(pod).1 <= largest);
        fits.map(|pod| format!("{} waits, and no node is added", name(pod)))
            .collect()
    }
}

/// A new node as the autoscaler imagines it: with the labels that the administrator has configured.
fn template(name: &str, gpus: usize) -> Value {
    let mut node = node(name, gpus);
    node["metadata"]["labels"][names::GPU_MEMORY_LABEL] = json!(CARD.to_string());
    node["metadata"]["labels"][names::GPU_COUNT_LABEL] = json!(gpus.to_string());
    node
}
