//! Gangs: users make pods of PodGroups, and kube-scheduler looks at all pods of one in a cycle, as from Kubernetes 1.37 on.

use std::sync::Arc;
use std::time::Duration;

use rand::RngExt as _;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::cache::{Cache, Place, is_open};
use crate::check::{self, pod_group};
use crate::net::{NAMESPACE, locked};
use crate::scheduler::{Scheduler, name};
use crate::server::{Copy, Kind};
use crate::world::{World, key};

/// A PodGroup that is made after its pods comes within so many milliseconds.
const LATE: u64 = 5000;

/// kube-scheduler's knowledge of the pods of a PodGroup.
struct Muster {
    /// The pods that kube-scheduler may look at, in its order.
    open: Vec<Copy>,
    /// How many are bound, or assumed to be.
    placed: usize,
    /// How many must be placed.
    wanted: usize,
}

impl Cache {
    /// How many pods of the group must be placed. None if there is no such PodGroup.
    fn wanted(&self, group: &str) -> Option<usize> {
        let wanted = &self.groups.get(group)?["spec"]["schedulingPolicy"]["gang"]["minCount"];
        usize::try_from(wanted.as_u64().unwrap_or(0)).ok()
    }

    fn of_group<'c>(&'c self, group: &'c str) -> impl Iterator<Item = (&'c String, &'c Copy)> {
        let pods = self.pods.iter();
        pods.filter(move |(_, pod)| pod_group(pod) == Some(group))
    }

    /// None if there is no such PodGroup.
    fn muster(&self, group: &str) -> Option<Muster> {
        let wanted = self.wanted(group)?;
        let (placed, unplaced): (Vec<_>, Vec<_>) = self.of_group(group).partition(|(uid, pod)| {
            pod["spec"]["nodeName"].is_string() || self.assumed.contains_key(*uid)
        });
        let open = unplaced.into_iter().map(|(_, pod)| pod);
        Some(Muster {
            open: open.filter(|pod| is_open(pod)).cloned().collect(),
            placed: placed.len(),
            wanted,
        })
    }

    /// Are there enough pods of its group to look at them?
    pub(crate) fn is_complete(&self, pod: &Value) -> bool {
        pod_group(pod).is_none_or(|group| {
            let wanted = self.wanted(group);
            wanted.is_some_and(|wanted| self.of_group(group).count() >= wanted)
        })
    }
}

impl Scheduler {
    /// Looks at all pods of a group that wait. If too few fit, it reverts that in its own memory alone.
    pub(crate) async fn cycle(self: Arc<Self>, group: &str) {
        let muster = locked(&self.cache).muster(group);
        let Some(Muster {
            open,
            placed,
            wanted,
        }) = muster
        else {
            return;
        };
        let (mut fit, mut refused) = (Vec::new(), Vec::new());
        for (index, pod) in open.iter().enumerate() {
            let nodes = self.window(pod);
            let passed = match nodes.is_empty() {
                true => None,
                false => self.filter(pod, &nodes).await.map(|[passed, _]| passed),
            };
            match passed.filter(|nodes| !nodes.is_empty()) {
                Some(nodes) => {
                    let node = self.best(pod, nodes).await;
                    self.assume(pod, &node);
                    fit.push((pod.clone(), node));
                }
                None => refused.push(pod),
            }
            if placed + fit.len() + open.len() - index - 1 < wanted {
                break;
            }
        }
        if placed + fit.len() < wanted {
            self.story
                .tell(format!("{} of {wanted} of {group} fit", placed + fit.len()));
            for pod in &open {
                self.fail(pod);
            }
            for pod in &open {
                self.say_refused(pod).await;
            }
            return;
        }
        for pod in refused {
            self.put(pod, Place::Refused(Instant::now()));
            self.say_refused(pod).await;
        }
        for (pod, node) in fit {
            self.clone().bind(pod, node);
        }
    }
}

impl World {
    /// Makes the pod one of so many of a gang, of which some may not be needed, and whose PodGroup may come late.
    pub(crate) fn gang(&mut self, pod: &mut Value, members: usize) {
        let group = format!("of-p{}", self.pods + 1);
        let wanted = self.random.random_range(2..=members);
        pod["spec"]["schedulingGroup"] = json!({ "podGroupName": group });
        pod["metadata"]["labels"][check::MEMBERS] = json!(wanted.to_string());
        let late = match self.random.random_bool(0.3) {
            true => self.random.random_range(0..LATE),
            false => 0,
        };
        let object = json!({
            "metadata": { "name": group },
            "spec": { "schedulingPolicy": { "gang": { "minCount": wanted } } },
        });
        let from = Instant::now() + Duration::from_millis(late);
        self.gangs.push((from, object));
        if late == 0 {
            self.make_pod_groups();
        }
    }

    /// Creates the due PodGroups that do not exist, as after a restore of etcd.
    pub(crate) fn make_pod_groups(&self) {
        let mut server = locked(&self.server);
        for (_, object) in self
            .gangs
            .iter()
            .filter(|(from, _)| *from <= Instant::now())
        {
            if server.get(&key(Kind::PodGroup, &name(object))).is_err() {
                // No other has its name.
                let _ = server.create(Kind::PodGroup, NAMESPACE, object.clone());
            }
        }
    }
}
