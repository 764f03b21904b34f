//! Pods for which an earlier extender's Binding may still arrive, because no extender could move their
//! resourceVersion.
//!
//! Only the sender of such a Binding knew its node. But the sender kept to its books, which contained every bound pod.
//! So the Binding lands where its pod fits next to the pods that are bound at the takeover, or nowhere. Its memory is
//! withheld on every node where it fits, until the pod changes, is bound or is gone. Until then the extender refuses
//! the pod: an earlier Binding may still place it elsewhere.

use std::sync::Arc;

use gpustow_api::{Assignment, PodFacts};
use gpustow_pack::{Claim, Mib};

use super::hold::{Charges, Hold};
use super::node::Node;
use super::{Books, Change, Uid};

/// The most that a Binding of the pod may charge on this node; none if the pod cannot come here.
fn charges(pod: &PodFacts, node: &Node) -> Option<Charges> {
    let request = pod.asks.request()?;
    let Some(status) = node.status() else {
        return Some(Charges::everywhere(request));
    };
    let cards = node.view().cards.iter().zip(&status.gpus);
    let cards = cards.map(|(card, gpu)| {
        let held = node.held(&gpu.uuid, |_| true);
        let free = match request.exclusive && held > Mib::ZERO {
            true => Mib::ZERO,
            false => card.capacity.minus(held),
        };
        (gpu.uuid.as_str(), card.capacity, free)
    });
    let mut charges = Vec::new();
    for (uuid, capacity, free) in cards.clone() {
        let fitting = request.claims.iter().map(|claim| claim.on(capacity));
        let most: Mib = fitting.filter(|mib| *mib <= free).sum();
        if most > Mib::ZERO {
            let most = if request.exclusive {
                free
            } else {
                most.min(free)
            };
            charges.push((Arc::from(uuid), most));
        }
    }
    let fits = |claim: &Claim| {
        let fitting = cards.clone();
        fitting
            .filter(|(_, capacity, free)| *free >= claim.on(*capacity))
            .count()
    };
    let mut claims = request.claims.iter();
    claims
        .all(|claim| fits(claim) >= claim.gpus as usize)
        .then(|| {
            Charges::Assigned(Some(Arc::new(Assignment {
                charges,
                containers: Vec::new(),
                exclusive: None,
                compute: 0,
                instance: None,
            })))
        })
}

impl Books {
    /// These pods, in these copies, could not be fenced when the epoch began. Memory that an earlier epoch withheld is
    /// given back.
    pub fn withhold(&mut self, pods: impl IntoIterator<Item = Arc<PodFacts>>) -> Change {
        let mut change = Change::default();
        let before: Vec<Uid> = self.unfenced.keys().cloned().collect();
        for uid in before {
            self.release_unfenced(&uid, &mut change);
        }
        for pod in pods {
            let same = |known: &Arc<PodFacts>| known.resource_version == pod.resource_version;
            if self.pod(&pod.uid).is_some_and(same) {
                self.drop_assumed(&pod.uid, &mut change);
                self.unfenced.insert(pod.uid.clone(), pod);
            }
        }
        let names: Vec<Arc<str>> = self.nodes.keys().cloned().collect();
        names
            .iter()
            .for_each(|name| self.withhold_on(name, &mut change));
        change
    }

    /// A node that nothing was known of may be where they land.
    pub(super) fn withhold_on(&mut self, name: &str, change: &mut Change) {
        let node = self.nodes.get_mut(name);
        let Some(node) = node.filter(|_| !self.unfenced.is_empty()) else {
            return;
        };
        node.withhold(Vec::new());
        // Each as if it were alone: any of them may come.
        let holds = self.unfenced.values();
        let holds = holds.filter_map(|pod| {
            let compute = pod.asks.request().map_or(0, |request| request.compute);
            let hold = Hold::of_charges(charges(pod, node)?, compute);
            Some((pod.uid.clone(), hold))
        });
        let holds = holds.collect();
        node.withhold(holds);
        self.touch(name, change);
    }

    /// This copy of a pod is known now: unless it is the one that could not be fenced, no earlier Binding
    /// of the pod can succeed.
    pub(super) fn fenced_by(&mut self, pod: &PodFacts, change: &mut Change) {
        let same = |then: &Arc<PodFacts>| then.resource_version == pod.resource_version;
        if !self.unfenced.get(&pod.uid).is_none_or(same) {
            self.release_unfenced(&pod.uid, change);
        }
    }

    pub(super) fn release_unfenced(&mut self, uid: &str, change: &mut Change) {
        if self.unfenced.swap_remove(uid).is_none() {
            return;
        }
        let nodes = self.nodes.iter_mut();
        let nodes =
            nodes.filter_map(|(name, node)| node.release_withheld(uid).then(|| name.clone()));
        let nodes: Vec<Arc<str>> = nodes.collect();
        nodes.iter().for_each(|name| self.touch(name, change));
    }

    /// Is it one that could not be fenced?
    pub fn is_unfenced(&self, uid: &str) -> bool {
        self.unfenced.contains_key(uid)
    }

    /// How many pods could not be fenced.
    pub fn unfenced(&self) -> usize {
        self.unfenced.len()
    }

    /// The highest epoch among the pods.
    pub fn highest_epoch(&self) -> u64 {
        let epochs = self.pods().filter_map(|pod| pod.epoch);
        epochs.max().unwrap_or(0)
    }
}
