//! Pods that sleep in the model, and the news about the memory that they requested.

use gpustow_api::{Memory, PodFacts, Sleep};

use super::server::NODES;
use super::shortages::{free, wanted};
use super::world::{World, pick, require};

/// Does the pod need its memory, and does it know that it is free?
fn has_word(pod: &PodFacts) -> bool {
    pod.wants_all() && pod.sleep.and_then(|it| it.told) == Some(Memory::Free)
}

impl World {
    /// A pod sleeps, or wakes once it knows that others may borrow its memory.
    pub(super) fn sleep(&mut self, pod: usize) {
        let Some(index) = pick(&self.server.pods, pod) else {
            return;
        };
        let sleep = self.server.pods[index].sleep;
        let told = sleep.and_then(|it| it.told);
        let asleep = sleep.is_none_or(|it| !it.asleep);
        if asleep || told == Some(Memory::Asleep) {
            let sleep = Some(Sleep { asleep, told });
            self.server.write(index, |pod| pod.sleep = sleep);
        }
    }

    /// Does the extender's work of every second: it informs pods whether their memory is free, in copies that have not
    /// changed.
    pub(super) fn tell_of_memory(&mut self) -> Result<(), String> {
        let version = |pod: &PodFacts| pod.resource_version.parse().unwrap_or(0);
        let ledger = &self.ledger;
        self.lending.told.retain(|uid, written| {
            let known = ledger.pod(uid);
            known.is_some_and(|pod| version(&pod) < *written)
        });
        if self.restored {
            return Ok(());
        }
        let told = |uid: &str| self.lending.told.contains_key(uid);
        for news in self.ledger.memory_news(told, self.now) {
            let uid = &news.pod.uid;
            let index = self.server.find(uid).filter(|index| {
                self.server.pods[*index].resource_version == news.pod.resource_version
            });
            let Some(index) = index else { continue };
            let sleep = self.server.pods[index].sleep;
            let sleep = sleep.map(|it| Sleep {
                told: Some(news.memory),
                ..it
            });
            self.server.write(index, |pod| pod.sleep = sleep);
            if news.memory == Memory::Free {
                self.lending.told.insert(uid.clone(), self.server.number());
                self.check_told(&news.pod)?;
            }
        }
        Ok(())
    }

    /// The free memory covers this pod's memory and the memory of other informed pods that have not allocated it yet.
    fn check_told(&self, pod: &PodFacts) -> Result<(), String> {
        let truth = |it: &PodFacts| self.server.find(&it.uid).map(|it| &self.server.pods[it]);
        let node = pod.node.as_deref().unwrap_or_default();
        for gpu in self.known.get(node).iter().flat_map(|it| &it.gpus) {
            let there = self.there(node, gpu);
            if wanted(&there, |it| it.uid == pod.uid) > 0 {
                let wanted = wanted(&there, |it| truth(it).is_some_and(has_word));
                let free = free(gpu, &there);
                require(wanted <= free, || {
                    format!("{} is told, {free} of {wanted} are free", pod.uid)
                })?;
            }
        }
        Ok(())
    }

    /// All borrowers give back: every pod that wakes is informed of it, if nothing else uses its memory.
    pub(super) fn check_sleepers_end(&mut self) -> Result<(), String> {
        if !self.switches.sleepers {
            return Ok(());
        }
        for (name, mut report) in self.server.reports.clone() {
            for gpu in &mut report.gpus {
                for it in self.there(name, gpu) {
                    let mut pods = gpu.pods.iter_mut();
                    let its = pods.find(|used| used.uid == *it.pod.uid && it.held > 0);
                    its.into_iter()
                        .for_each(|used| used.used_mib = used.used_mib.min(it.held));
                }
            }
            report.heartbeat = Some(format!("{:?}", self.now));
            self.server.set_report(name, Some(report));
        }
        self.deliver_nodes();
        // First the pods that were informed before, then the pods that get the rest.
        for _ in 0..2 {
            self.tell_of_memory()?;
            self.deliver_pods(usize::MAX);
        }
        for name in NODES.iter().filter(|name| self.is_there(name)) {
            let report = self.known.get(name);
            let gpus = report.iter().flat_map(|it| &it.gpus);
            let full = |uuid: &str| {
                let gpu = gpus.clone().find(|gpu| gpu.uuid == uuid && gpu.healthy);
                gpu.is_none_or(|gpu| {
                    let there = self.there(name, gpu);
                    wanted(&there, PodFacts::wants_all) > free(gpu, &there)
                })
            };
            for pod in &self.server.pods {
                let here = pod.node.as_deref() == Some(*name) && !pod.released && !pod.deleting;
                let Some(Ok(assignment)) = pod.assignment.as_ref().filter(|_| here) else {
                    continue;
                };
                let free = !assignment.charges.iter().any(|(uuid, _)| full(uuid));
                require(!pod.wants_all() || has_word(pod) || !free, || {
                    format!("{} wakes and is not told: {:?}", pod.uid, pod.sleep)
                })?;
            }
        }
        Ok(())
    }

    /// Is the node there, with an agent that reports the use of its pods?
    fn is_there(&self, name: &str) -> bool {
        self.server.has_node(name) && self.is_fresh(name) && self.is_readable(name)
    }
}
