//! Whether the driver holds containers to their limits: where it would, by what is known of node and card, and
//! where it does, by what it says of each container. No I/O.

use std::sync::Arc;

use gpustow_api::gpunode::Condition;
use gpustow_api::limit::Support;
use gpustow_pack::Mib;

use crate::devices::{Ask, Card, Limit};
use crate::pods::{NodePod, NodePods};

/// What a node has beside its driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Means {
    /// Its container toolkit sets limits, by the operator's word.
    pub toolkit: bool,
    /// Its cgroups are of version 2, and the agent sees them.
    pub cgroup2: bool,
}

/// A container that should have a limit on a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limited {
    /// The pod's UID.
    pub uid: Arc<str>,
    /// Namespace, pod and container.
    pub names: [Arc<str>; 3],
    /// The container's id.
    pub container: Arc<str>,
    /// The card.
    pub uuid: String,
    /// What it should be held to.
    pub limit: Mib,
    /// What it is held to.
    pub found: Option<Mib>,
}

fn of_pod(pod: &NodePod) -> Vec<Limited> {
    let facts = &pod.facts;
    let (Ok(request), Some(Ok(assignment))) = (&facts.request, &facts.assignment) else {
        return Vec::new();
    };
    let asked = request.limits.iter().zip(&*facts.containers);
    let held = asked.filter(|(limit, _)| **limit > Mib::ZERO);
    let on_cards = held.flat_map(|(limit, name)| {
        let runs = pod.containers.iter();
        let runs = runs.filter(move |it| it.running && *it.name == **name);
        let cards = assignment.containers.iter();
        let cards = cards.filter(move |(it, _)| it == name);
        let cards = cards.flat_map(|(_, uuids)| uuids);
        runs.flat_map(move |container| {
            cards.clone().map(move |uuid| Limited {
                uid: facts.uid.clone(),
                names: [
                    facts.namespace.clone(),
                    facts.name.clone(),
                    container.name.clone(),
                ],
                container: container.id.clone(),
                uuid: uuid.to_string(),
                limit: *limit,
                found: None,
            })
        })
    });
    on_cards.collect()
}

/// What was seen of limits since the agent started.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    means: Means,
    limited: Vec<Limited>,
    /// Those of which the driver said nothing.
    unread: Vec<Limited>,
    /// A container ran without its limit, and none has been seen to have one since.
    doubted: bool,
}

impl Seen {
    /// Nothing yet, on a node with these means.
    #[must_use]
    pub fn new(means: Means) -> Self {
        Self {
            means,
            ..Self::default()
        }
    }

    /// Takes in what the driver said of the containers that run and are to have a limit.
    pub fn read(&mut self, pods: &NodePods, told: &[Limit]) {
        self.limited.clear();
        self.unread.clear();
        for mut it in pods.iter().flat_map(of_pod) {
            let is = |told: &&Limit| told.uuid == it.uuid && told.container == it.container;
            match told.iter().find(is) {
                Some(told) => {
                    it.found = told.bytes.map(|bytes| Mib(bytes >> 20));
                    self.limited.push(it);
                }
                None => self.unread.push(it),
            }
        }
        if self.missing().next().is_some() {
            self.doubted = true;
        } else if !self.limited.is_empty() {
            self.doubted = false;
        }
    }

    /// What the driver is to be asked with the next look.
    #[must_use]
    pub fn asks(&self) -> Vec<Ask> {
        let all = self.limited.iter().chain(&self.unread);
        let ask = all.map(|it| Ask {
            uuid: it.uuid.clone(),
            container: it.container.clone(),
        });
        ask.collect()
    }

    /// Containers that run without their limit, or with another one.
    pub fn missing(&self) -> impl Iterator<Item = &Limited> {
        self.limited.iter().filter(|it| it.found != Some(it.limit))
    }

    /// Would the driver hold a container to a limit on this card?
    #[must_use]
    pub fn support(&self, card: &Card) -> Support {
        match self.means {
            _ if card.place.parent.is_some() => Support::Mig,
            _ if card.memory.is_none() && card.failure.is_none() => Support::UnifiedMemory,
            _ if !card.can_limit => Support::Driver,
            Means { cgroup2: false, .. } => Support::Cgroup,
            Means { toolkit: false, .. } => Support::Toolkit,
            _ if self.doubted => Support::Missing,
            _ => Support::Holds,
        }
    }

    /// The condition, on nodes where limits are expected.
    #[must_use]
    pub fn condition(&self) -> Option<Condition> {
        let missing: Vec<String> = self.missing().map(|it| it.names.join("/")).collect();
        let (status, reason, message) = if !missing.is_empty() {
            let message = format!(
                "Without the limit that the driver should hold: {}",
                missing.join(", ")
            );
            ("False", "LimitMissing", message)
        } else if self.doubted {
            let message = "A container ran without its limit, and none has been seen to have one since: mend the \
                           container toolkit, then restart this agent.";
            ("False", "NotSeenSince", message.to_owned())
        } else if !self.unread.is_empty() {
            let message = format!(
                "The driver says nothing of {} limits: does the agent see the host's cgroups (--cgroup)?",
                self.unread.len()
            );
            ("Unknown", "NotReadable", message)
        } else if self.means.toolkit || !self.limited.is_empty() {
            let message = "Every container that the driver should limit has its limit.";
            ("True", "Held", message.to_owned())
        } else {
            return None;
        };
        Some(Condition {
            r#type: "LimitsHold".to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message,
        })
    }
}
