//! Divides the memory of a card among its users: pure arithmetic over the data of NVML, `/proc` and the API server.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gpustow_api::gpunode::ClaimUse;
use gpustow_pack::Mib;

use crate::devices::{Card, Limit, Process};
use crate::pods::{NodePod, NodePods};
use crate::processes::Who;

/// Bytes of one card by user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CardUse {
    /// Pod UID and container name to bytes, for pods with an assignment. The name is empty for a
    /// process whose container is not known yet.
    pub pods: BTreeMap<(Arc<str>, Arc<str>), u64>,
    /// Pods without an assignment: the memory that they use or, if that is more, the promises of another sharer to
    /// them.
    pub other_pods: u64,
    /// The memory that each pod without an assignment uses, by UID.
    pub of_others: BTreeMap<Arc<str>, u64>,
    /// Processes of no pod.
    pub host: u64,
    /// In use by no process that could be named.
    pub unmanaged: u64,
    /// UIDs of pods none of whose processes has done anything on the card since the last look.
    pub idle: BTreeSet<Arc<str>>,
    /// UIDs of pods with a client of MPS among their processes.
    pub mps: BTreeSet<Arc<str>>,
    /// UIDs of pods with a process that is none.
    pub beside_mps: BTreeSet<Arc<str>>,
    /// Processes that `/proc` does not show.
    pub unseen: usize,
    /// False if the driver does not report how much each process uses.
    pub measured: bool,
}

impl CardUse {
    /// Divides the memory in use on `card`. For a container in `told`, the figure there replaces the sum over its
    /// processes. The driver may not show some of these processes.
    pub fn of(
        card: &Card,
        pods: &NodePods,
        told: &[Limit],
        mut who: impl FnMut(u32) -> Who,
    ) -> Self {
        let mut is = Self {
            measured: card.processes.is_some(),
            ..Self::default()
        };
        let mut named = 0u64;
        let mut awake = BTreeSet::new();
        for process in card.processes.iter().flatten() {
            let used = process.used.unwrap_or_default();
            is.measured &= process.used.is_some();
            match who(process.pid) {
                Who::Gone => {
                    is.unseen += 1;
                    continue;
                }
                Who::Host => is.host = is.host.saturating_add(used),
                Who::Pod(owner) => match pods.of_cgroup(&owner.pod).filter(|pod| holds(pod)) {
                    None => is.add_other(pods.of_cgroup(&owner.pod), used),
                    Some(pod) => {
                        let name = owner.container.and_then(|id| pod.container(&id).cloned());
                        if process.busy != Some(false) {
                            awake.insert(pod.facts.uid.clone());
                        }
                        is.add(pod, name, process);
                    }
                },
            }
            named = named.saturating_add(used);
        }
        is.idle.retain(|uid| !awake.contains(uid));
        for it in told.iter().filter(|it| it.uuid == card.uuid) {
            let owner = pods.iter().find_map(|pod| {
                Some((pod.facts.uid.clone(), pod.container(&it.container)?.clone()))
            });
            if let (Some(owner), Some(used @ 1..)) = (owner, it.used) {
                let sum = is.pods.entry(owner).or_default();
                named = named.saturating_sub(*sum).saturating_add(used);
                *sum = used;
            }
        }
        let used = card.memory.map_or(named, |memory| memory.used);
        let unused = pods.iter().map(|pod| {
            let total = card.memory.map_or(0, |memory| memory.total);
            let bytes = pods.promised(pod, (&card.uuid, card.index), total);
            let used = is.of_others.get(&pod.facts.uid);
            bytes.saturating_sub(used.copied().unwrap_or_default())
        });
        let unused = unused.fold(0, u64::saturating_add);
        is.other_pods = is.other_pods.saturating_add(unused);
        is.unmanaged = used.saturating_sub(named);
        if !is.measured {
            // Memory that was not measured may well belong to these pods, up to their assignments and promises.
            let promised = pods.iter().map(|pod| {
                let bytes = pod.assigned(&card.uuid).bytes();
                bytes.saturating_sub(is.pod(&pod.facts.uid))
            });
            let promised = promised.fold(unused, u64::saturating_add);
            is.unmanaged = is.unmanaged.saturating_sub(promised);
        }
        is
    }

    /// Counts a process of a pod with an assignment.
    fn add(&mut self, pod: &NodePod, container: Option<Arc<str>>, process: &Process) {
        let uid = &pod.facts.uid;
        if process.busy == Some(false) {
            self.idle.insert(uid.clone());
        }
        let users = match process.mps {
            true => &mut self.mps,
            false => &mut self.beside_mps,
        };
        users.insert(uid.clone());
        let key = (uid.clone(), container.unwrap_or_else(|| "".into()));
        let sum = self.pods.entry(key).or_default();
        *sum = sum.saturating_add(process.used.unwrap_or_default());
    }

    /// Counts memory of a pod without an assignment, which may be unknown.
    fn add_other(&mut self, pod: Option<&NodePod>, used: u64) {
        self.other_pods = self.other_pods.saturating_add(used);
        if let Some(pod) = pod {
            let sum = self.of_others.entry(pod.facts.uid.clone()).or_default();
            *sum = sum.saturating_add(used);
        }
    }

    /// Charges the memory of the card that claims hold but their pods do not use.
    pub fn charge(&mut self, claims: &[ClaimUse], pods: &NodePods) {
        let held = claims.iter().map(|it| Mib(it.held_mib).bytes());
        let held = held.fold(0, u64::saturating_add);
        let name = |pod: &NodePod| format!("{}/{}", pod.facts.namespace, pod.facts.name);
        let theirs = pods.iter().filter(|pod| {
            let name = name(pod);
            claims.iter().any(|it| it.pod == name)
        });
        let used = theirs.filter_map(|pod| self.of_others.get(&pod.facts.uid));
        let unused = held.saturating_sub(used.fold(0, |sum: u64, it| sum.saturating_add(*it)));
        self.other_pods = self.other_pods.saturating_add(unused);
        if !self.measured {
            self.unmanaged = self.unmanaged.saturating_sub(unused);
        }
    }

    /// Bytes of all containers of a pod.
    #[must_use]
    pub fn pod(&self, uid: &str) -> u64 {
        let shares = self.pods.iter().filter(|((pod, _), _)| **pod == *uid);
        shares.fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// Bytes of each container of a pod. Processes whose container is not known yet are left out, unless only one
    /// container can use the card. Nothing if the driver does not report how much each process uses.
    pub fn containers(&self, uid: &str, pods: &NodePods) -> Vec<(Arc<str>, u64)> {
        let asking = pods.get(uid).map(|pod| pod.facts.containers.clone());
        let only = asking.filter(|names| names.len() == 1);
        let only: Option<Arc<str>> = only.and_then(|names| Some((**names.first()?).into()));
        let mut found: BTreeMap<Arc<str>, u64> = BTreeMap::new();
        let shares = self.pods.iter().filter(|_| self.measured);
        for ((_, name), bytes) in shares.filter(|((pod, _), _)| **pod == *uid) {
            let name = Some(name).filter(|name| !name.is_empty());
            if let Some(name) = name.or(only.as_ref()) {
                let sum = found.entry(name.clone()).or_default();
                *sum = sum.saturating_add(*bytes);
            }
        }
        found.into_iter().collect()
    }

    /// True if a process of the pod, or of one container of it, is on the card.
    #[must_use]
    pub fn has(&self, uid: &str, container: Option<&str>) -> bool {
        self.pods.keys().any(|(pod, name)| {
            **pod == *uid
                && container.is_none_or(|container| **name == *container || name.is_empty())
        })
    }
}

/// A pod whose assignment cannot be read is gpustow's, too: it is charged for its whole request.
fn holds(pod: &NodePod) -> bool {
    pod.facts.assignment.is_some()
}
