//! Decides whether the driver holds containers to their limits. The facts of node and card show where it could, and its
//! answers about containers show where it does. No I/O.

use std::sync::Arc;

use gpustow_api::Assignment;
use gpustow_api::gpunode::Condition;
use gpustow_api::limit::{Enforce, Support, WHOLE};
use gpustow_pack::Mib;

use crate::devices::{Ask, Card, Group, Limit};
use crate::pods::{NodePod, NodePods};

/// The means of a node to limit memory, in addition to its driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Means {
    /// Its container toolkit sets limits, by the operator's word.
    pub toolkit: bool,
    /// The agent sets limits itself.
    pub agent: bool,
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
    /// The limit that it should have.
    pub limit: Mib,
    /// The limit that it has.
    pub found: Option<Mib>,
}

/// The assignment of a pod whose containers the driver must limit.
fn by_driver(pod: &NodePod) -> Option<&Assignment> {
    let facts = &pod.facts;
    let request = facts.asks.request()?;
    let assignment = facts.assignment.as_ref()?.as_ref().ok()?;
    (pod.enforce == Enforce::Driver && !request.exclusive).then_some(assignment)
}

/// The containers that run, on each of their cards. A limit may be [`WHOLE`].
fn of_pod(pod: &NodePod) -> Vec<Limited> {
    let facts = &pod.facts;
    let Some(assignment) = by_driver(pod) else {
        return Vec::new();
    };
    let limits = pod.limits.iter().zip(&*facts.containers);
    let on_cards = limits.flat_map(|(limit, name)| {
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

/// For each card, the sum of the limits of the pod's containers there, if all of them are to have one. Where one may
/// use the whole card, all may.
fn of_slice(pod: &NodePod) -> Vec<Ask> {
    let facts = &pod.facts;
    let Some(assignment) = by_driver(pod).filter(|_| !facts.released) else {
        return Vec::new();
    };
    let limit = |name: &str| {
        let mut of = pod.limits.iter().zip(&*facts.containers);
        of.find(|(_, it)| ***it == *name).map(|(limit, _)| *limit)
    };
    let sum = |uuid: &str| {
        let holders = assignment.containers.iter();
        let holders = holders.filter(|(_, uuids)| uuids.iter().any(|it| **it == *uuid));
        holders.map(|(name, _)| limit(name)).sum::<Option<Mib>>()
    };
    let all = assignment.charges.iter().filter_map(|(uuid, _)| {
        let set = sum(uuid).filter(|sum| *sum > Mib::ZERO)?;
        Some(Ask {
            uuid: uuid.to_string(),
            of: Group::Pod(pod.cgroup.clone()),
            set: Some(set),
        })
    });
    all.collect()
}

/// A limit that follows its pod's annotation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The container with its present limit.
    pub now: Limited,
    /// Its limit at the look before.
    pub before: Mib,
}

/// The limits that the agent has seen since its start.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    means: Means,
    limited: Vec<Limited>,
    /// Containers that may use the whole card. The agent raises limits that were set before, where it sets limits.
    whole: Vec<Limited>,
    /// Containers whose limit changed between the last two looks.
    moved: Vec<Moved>,
    /// Limits of pods, which the agent sets in addition to the containers' own.
    slices: Vec<Ask>,
    /// Containers for which there was no answer of the driver.
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

    /// Takes in the driver's answers about the containers that run and are to have a limit.
    pub fn read(&mut self, pods: &NodePods, told: &[Limit]) {
        let mut before = std::mem::take(&mut self.limited);
        before.append(&mut self.whole);
        self.unread.clear();
        self.slices.clear();
        if self.means.agent {
            self.slices.extend(pods.iter().flat_map(of_slice));
        }
        for mut it in pods.iter().flat_map(of_pod) {
            let is = |told: &&Limit| told.uuid == it.uuid && told.container == it.container;
            let told = told.iter().find(is);
            it.found = told.and_then(|told| Some(Mib(told.bytes? >> 20)));
            match told {
                _ if it.limit == WHOLE => self.whole.push(it),
                Some(_) => self.limited.push(it),
                None => self.unread.push(it),
            }
        }
        let moved = self.limited.iter().chain(&self.whole);
        let moved = moved.filter_map(|now| {
            let same = |it: &&Limited| it.container == now.container && it.uuid == now.uuid;
            let before = before.iter().find(same)?.found?;
            let is = now.found.is_some_and(|found| found != before);
            is.then(|| Moved {
                now: now.clone(),
                before,
            })
        });
        self.moved = moved.collect();
        if self.missing().next().is_some() {
            self.doubted = true;
        } else if !self.limited.is_empty() {
            self.doubted = false;
        }
    }

    /// The limits to read or to set with the next look.
    #[must_use]
    pub fn asks(&self) -> Vec<Ask> {
        let whole = self.whole.iter().filter(|_| self.means.agent);
        let all = self.limited.iter().chain(&self.unread).chain(whole);
        let ask = all.map(|it| Ask {
            uuid: it.uuid.clone(),
            of: Group::Container(it.container.clone()),
            set: self.means.agent.then_some(it.limit),
        });
        // A pod's first, which is there before its containers are.
        self.slices.iter().cloned().chain(ask).collect()
    }

    /// Containers that run without their limit, or with another one. One that the agent raises step by step
    /// has its limit.
    pub fn missing(&self) -> impl Iterator<Item = &Limited> {
        self.limited.iter().filter(|it| match it.found {
            Some(found) if self.means.agent => found > it.limit,
            found => found != Some(it.limit),
        })
    }

    /// Containers whose limit the last look showed to have changed.
    pub fn moved(&self) -> impl Iterator<Item = &Moved> {
        self.moved.iter()
    }

    /// Would the driver hold a container to a limit on this card?
    #[must_use]
    pub fn support(&self, card: &Card) -> Support {
        match self.means {
            _ if card.place.parent.is_some() || card.on_demand.is_some() => Support::Mig,
            _ if card.memory.is_none() && card.failure.is_none() => Support::UnifiedMemory,
            _ if !card.can_limit => Support::Driver,
            Means { cgroup2: false, .. } => Support::Cgroup,
            Means {
                toolkit: false,
                agent: false,
                ..
            } => Support::Toolkit,
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
            let message = "A container ran without its limit, and none has been seen to have one since: correct the \
                           container toolkit, or see this agent's log where it sets limits, then restart this agent.";
            ("False", "NotSeenSince", message.to_owned())
        } else if !self.unread.is_empty() {
            let message = format!(
                "The driver does not report {} limits: does the agent see the host's cgroups (--cgroup)?",
                self.unread.len()
            );
            ("Unknown", "NotReadable", message)
        } else if self.means.toolkit || self.means.agent || !self.limited.is_empty() {
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
