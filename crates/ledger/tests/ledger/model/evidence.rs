//! Which nodes kube-scheduler shows for a pod in the model, and that others are disrupted on no other node.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{PodFacts, Regards};
use gpustow_pack::Mib;

use super::server::NODES;
use super::world::{World, require};

use crate::act::Act as _;

/// A node that kube-scheduler showed longer ago than this is no evidence.
const RECENT: Duration = Duration::from_secs(300);

/// kube-scheduler's own filters, and the nodes that it has shown.
#[derive(Default)]
pub(super) struct Shown {
    /// The nodes that it rejects for a pod, by their bits, for reasons that the ledger cannot see.
    rejects: HashMap<Arc<str>, u8>,
    /// Where the next window begins.
    next: usize,
    /// When it last showed a node for a pod, and after how many changes of where pods are.
    shown: HashMap<(Arc<str>, Arc<str>), (Duration, u64)>,
    /// The nodes of the pods, as far as the ledger knows.
    places: HashMap<Arc<str>, Arc<str>>,
    /// How often that has changed, and at which change last for each pod on each node.
    changes: u64,
    changed: HashMap<(Arc<str>, Arc<str>), u64>,
    /// The pods that others were disrupted for at the last step, and where.
    disrupted: BTreeSet<(Arc<str>, Arc<str>)>,
}

impl World {
    /// From here on kube-scheduler rejects the nodes of these bits for the pod.
    pub(super) fn reject(&mut self, uid: &Arc<str>, nodes: u8) {
        self.shown.rejects.insert(uid.clone(), nodes);
    }

    /// The same nodes as for another pod.
    pub(super) fn reject_as(&mut self, uid: &Arc<str>, other: &Arc<str>) {
        let rejects = self.shown.rejects.get(other).copied().unwrap_or(0);
        self.reject(uid, rejects);
    }

    /// The nodes that kube-scheduler shows the extender for the pod: all nodes that its own filters pass, or a window
    /// of them.
    pub(super) fn candidates(
        &mut self,
        pod: &PodFacts,
        nodes: &[&'static str],
    ) -> Vec<&'static str> {
        let admitted = |name: &&&'static str| self.admits(pod, name);
        let Some(window) = self.switches.window else {
            return nodes.iter().filter(admitted).copied().collect();
        };
        let begin = self.shown.next;
        let in_turn = (begin..begin + NODES.len()).map(|index| (index, NODES[index % NODES.len()]));
        let passed = in_turn.filter(|(_, name)| {
            nodes.contains(name) && self.admits(pod, name) && self.has_sum(pod, name)
        });
        let passed: Vec<(usize, &'static str)> = passed.take(window).collect();
        let full = passed.len() == window;
        if let Some((last, _)) = passed.last().filter(|_| full) {
            self.shown.next = (last + 1) % NODES.len();
        }
        passed.into_iter().map(|(_, name)| name).collect()
    }

    /// The next window begins with this node.
    pub(super) fn begin_window(&mut self, node: usize) {
        self.shown.next = node % NODES.len();
    }

    /// Do kube-scheduler's own filters pass the node, GPU memory apart?
    pub(super) fn admits(&self, pod: &PodFacts, name: &str) -> bool {
        !self.is_rejected(pod, name) && self.has_host(pod, name)
    }

    pub(super) fn is_rejected(&self, pod: &PodFacts, name: &str) -> bool {
        let rejects = self.shown.rejects.get(&pod.uid).copied().unwrap_or(0);
        let node = NODES.iter().position(|node| *node == name);
        node.is_some_and(|node| rejects & (1 << node) != 0)
    }

    /// In truth, has the node enough CPU and a slot left? Pods for which it has been chosen are assumed to be there.
    pub(super) fn has_host(&self, pod: &PodFacts, name: &str) -> bool {
        let here = self.server.pods.iter().filter(|it| {
            let assumed = || self.chosen.get(&it.uid).copied();
            let node = it.node.as_deref().or_else(assumed);
            it.uid != pod.uid && !it.released && node == Some(name)
        });
        let used: u64 = here.clone().map(cpu).sum();
        let pods = here.count() as u64;
        used + cpu(pod) <= self.cpu() && self.slots().is_none_or(|slots| pods < slots)
    }

    /// In truth, is the node's sum of GPU memory enough?
    pub(super) fn has_sum(&self, pod: &PodFacts, name: &str) -> bool {
        let Some(report) = self.server.reports.get(name) else {
            return false;
        };
        let assigned = |uuid: &str| self.server.assigned(name, uuid, &pod.uid);
        let left = report.gpus.iter().map(|gpu| {
            let all = gpu.capacity(Mib::ZERO).0;
            all.saturating_sub(assigned(&gpu.uuid).0)
        });
        let claims = pod.asks.claims().iter();
        let asked = claims.map(|claim| claim.mib.0 * u64::from(claim.gpus));
        asked.sum::<u64>() <= left.sum()
    }

    /// kube-scheduler asks about the pod on these nodes.
    pub(super) fn note_shown(&mut self, pod: &PodFacts, nodes: &[&'static str]) {
        self.see_places();
        for name in nodes {
            let key = (pod.uid.clone(), Arc::from(*name));
            let at = (self.now, self.shown.changes);
            self.shown.shown.insert(key, at);
        }
    }

    /// Looks where pods are, bound or assumed.
    pub(super) fn see_places(&mut self) {
        let bound = self.ledger.pods().filter(|pod| !pod.released);
        let bound = bound.filter_map(|pod| Some((pod.uid.clone(), pod.node.clone()?)));
        let assumed = self.shares().into_iter().map(|(uid, node, ..)| (uid, node));
        let places: HashMap<_, _> = assumed.chain(bound).collect();
        let before = std::mem::replace(&mut self.shown.places, places);
        let of = |map: &HashMap<Arc<str>, Arc<str>>, uid| map.get(uid).cloned();
        for uid in before.keys().chain(self.shown.places.keys()) {
            let (from, to) = (of(&before, uid), of(&self.shown.places, uid));
            if from != to {
                self.shown.changes += 1;
                let at = self.shown.changes;
                let both = from.into_iter().chain(to);
                let both = both.map(|node| ((uid.clone(), node), at));
                self.shown.changed.extend(both);
            }
        }
    }

    /// Has a pod come or left, since kube-scheduler showed the node, that decides whether the node is for the pod?
    fn is_outdated(&self, pod: &PodFacts, node: &str, shown: u64) -> bool {
        let regards = |at: &str| match pod.constraints.regards {
            Regards::NoPod => false,
            Regards::PodsOfNode => at == node,
            Regards::AllPods => true,
        };
        let mut changed = self.shown.changed.iter();
        changed.any(|((uid, at), change)| *uid != pod.uid && regards(at) && *change > shown)
    }

    /// When kube-scheduler last showed the node for the pod, or for another of its group: it asks about the first alone if
    /// the group does not fit.
    fn last_shown(&self, key: &(Arc<str>, Arc<str>)) -> Option<(Duration, u64)> {
        let group = self.ledger.pod(&key.0).and_then(|pod| pod.group.clone());
        let is_same = |uid: &Arc<str>| {
            let other = self.ledger.pod(uid).and_then(|pod| pod.group.clone());
            *uid == key.0 || group.is_some() && other == group
        };
        let shown = self.shown.shown.iter();
        let shown = shown.filter(|((uid, node), _)| *node == key.1 && is_same(uid));
        shown.map(|(_, at)| *at).max()
    }

    /// Others finish, move or give memory back for a pod only where kube-scheduler showed the node for it, and no pod has
    /// come or left since that it would regard.
    pub(super) fn check_evidence(&mut self) -> Result<(), String> {
        self.see_places();
        let mut disrupted = BTreeSet::new();
        if self.switches.disrupts() {
            let all = self.ledger.preemptions(self.now).into_iter();
            let all = all.filter(|it| !it.victims.is_empty());
            disrupted.extend(all.map(|it| (it.pod.uid.clone(), it.node)));
        }
        if self.switches.reclaim {
            let all = self.ledger.reclaims(self.now).into_iter();
            let all = all.filter(|it| !it.victims.is_empty());
            disrupted.extend(all.map(|it| (it.pod.uid.clone(), it.node)));
        }
        for key in &disrupted {
            let (shown, pod) = (self.last_shown(key), self.ledger.pod(&key.0));
            let outdated = |(_, at): (Duration, u64)| {
                let pod = pod.as_ref().filter(|pod| pod.group.is_none());
                pod.is_some_and(|pod| self.is_outdated(pod, &key.1, at))
            };
            require(!shown.is_some_and(outdated), || {
                format!("others are disrupted for {key:?}, and pods have come or left since")
            })?;
        }
        for key in disrupted.difference(&self.shown.disrupted) {
            let shown = self.last_shown(key);
            let recent = shown.is_some_and(|(shown, _)| self.now <= shown + RECENT);
            // kube-scheduler does not show a node whose sum is too small, and a late watch may still show such a sum. A
            // node without a fresh report is no such node.
            let pod = self.ledger.pod(&key.0);
            let short = pod.is_some_and(|pod| {
                self.ledger.is_behind(&pod, &key.1, self.now)
                    && !self.ledger.lacks_report(&key.1, self.now)
            });
            require(recent || short, || {
                format!("others are disrupted for {key:?}, shown at {shown:?}")
            })?;
        }
        self.shown.disrupted = disrupted;
        Ok(())
    }
}

/// The pod's request for its node's CPU.
pub(super) fn cpu(pod: &PodFacts) -> u64 {
    pod.asks.readable().map_or(0, |request| request.cpu_milli)
}
