//! Pods for which an earlier extender's Binding may still arrive, because nobody could move their
//! resourceVersion.
//!
//! Where such a Binding would land, only its sender knew; but it kept to its books, and of those every
//! pod that is bound was a part. So it lands where its pod fits beside the pods that are bound when the
//! next extender takes over, or nowhere. There its memory is held for nobody, until the pod changes,
//! is bound or is gone. Until then the pod is refused: it could land twice as far as anybody knows.

use std::sync::Arc;

use gpustow_api::{Assignment, PodFacts};
use gpustow_pack::Mib;

use crate::Ledger;
use crate::node::{Charges, Hold, Node, Uid};

/// What a Binding of the pod may bring to this node at most; none if it cannot come here.
fn charges(pod: &PodFacts, node: &Node) -> Option<Charges> {
    let request = pod.request.as_ref().ok()?;
    let Some(report) = &node.report else {
        return Some(Charges::everywhere(request));
    };
    let cards = node.view.cards.iter().zip(&report.status.gpus);
    let cards = cards.map(|(card, gpu)| {
        let held = node.held(&gpu.uuid, |_| true);
        let free = match request.exclusive && held > Mib::ZERO {
            true => Mib::ZERO,
            false => card.capacity.minus(held),
        };
        (gpu.uuid.as_str(), free)
    });
    let mut charges = Vec::new();
    for (uuid, free) in cards.clone() {
        let fitting = request.claims.iter().map(|claim| claim.mib);
        let most: Mib = fitting.filter(|mib| *mib <= free).sum();
        if most > Mib::ZERO {
            let most = if request.exclusive {
                free
            } else {
                most.min(free)
            };
            charges.push((Box::from(uuid), most));
        }
    }
    let fits = |mib: Mib| cards.clone().filter(|(_, free)| *free >= mib).count();
    let mut claims = request.claims.iter();
    claims
        .all(|claim| fits(claim.mib) >= claim.gpus as usize)
        .then(|| {
            Charges::Assigned(Some(Arc::new(Assignment {
                charges,
                containers: Vec::new(),
                exclusive: None,
            })))
        })
}

impl Ledger {
    /// Nobody could fence these pods, as they are here, when the epoch began. To be called when the
    /// list of pods is in that was asked for after that, before the first decision; what an earlier
    /// epoch withheld is given back.
    pub fn withhold(&mut self, pods: impl IntoIterator<Item = Arc<PodFacts>>) {
        let before: Vec<Uid> = self.unfenced.keys().cloned().collect();
        before.iter().for_each(|uid| self.release_unfenced(uid));
        for pod in pods {
            let same = |known: &PodFacts| known.resource_version == pod.resource_version;
            let known = self.pods.get(&pod.uid);
            if !known.is_some_and(|known| same(&known.facts)) {
                continue;
            }
            self.drop_reservation(&pod.uid);
            self.unfenced.insert(pod.uid.clone(), pod);
        }
        let names: Vec<Arc<str>> = self.nodes.keys().cloned().collect();
        names.iter().for_each(|name| self.withhold_on(name));
    }

    /// A node that nothing was known of may be where they land.
    pub(crate) fn withhold_on(&mut self, name: &str) {
        let Some(node) = self
            .nodes
            .get_mut(name)
            .filter(|_| !self.unfenced.is_empty())
        else {
            return;
        };
        node.withheld.clear();
        // Each as if it were alone: any of them may come.
        let holds = self.unfenced.values();
        let holds = holds.filter_map(|pod| {
            let hold = Hold {
                charges: charges(pod, node)?,
                exclusive: false,
                cpu_milli: 0,
                ram: Mib::ZERO,
            };
            Some((pod.uid.clone(), hold))
        });
        node.withheld = holds.collect();
        self.touch(name);
    }

    /// The pod is not what it was when nobody could fence it: no earlier Binding of it can succeed.
    pub(crate) fn release_unfenced(&mut self, uid: &str) {
        if self.unfenced.remove(uid).is_none() {
            return;
        }
        let nodes = self.nodes.iter_mut();
        let nodes = nodes.filter_map(|(name, node)| {
            node.withheld.remove(uid)?;
            Some(name.clone())
        });
        let nodes: Vec<_> = nodes.collect();
        nodes.iter().for_each(|name| self.touch(name));
    }

    /// Is it one that nobody could fence?
    pub(crate) fn is_unfenced(&self, uid: &str) -> bool {
        self.unfenced.contains_key(uid)
    }

    /// How many pods nobody could fence.
    #[must_use]
    pub fn unfenced(&self) -> usize {
        self.unfenced.len()
    }

    /// The highest epoch that a pod bears.
    #[must_use]
    pub fn highest_epoch(&self) -> u64 {
        let epochs = self.pods.values().filter_map(|known| known.facts.epoch);
        epochs.max().unwrap_or(0)
    }
}
