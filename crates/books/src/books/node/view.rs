//! The free resources of a node, with all of its pods or with some.

use gpustow_api::gpunode::Gpu;
use gpustow_pack::{Bytes, Card, Compute, Lending, Mib, NodeGpus};

use super::super::hold::Hold;
use super::super::lending::lending;
use super::Node;

/// Clients that MPS lets compute on a GPU at a time: each pod is one at least.
const CLIENTS: usize = 48;

impl Node {
    /// The view as it would be if only the pods that `counts` accepts were there.
    pub fn view_of(&self, counts: impl Fn(&str) -> bool) -> NodeGpus {
        self.view_without_loans(counts, |_, _| false)
    }

    /// As [`Node::view_of`], if no pod that `repaid` accepts used more of a card than it holds there.
    pub(crate) fn view_without_loans(
        &self,
        counts: impl Fn(&str) -> bool,
        repaid: impl Fn(&str, &str) -> bool,
    ) -> NodeGpus {
        let cards = self.report.iter().flat_map(|report| {
            let headroom = Mib(report.status.headroom_mib);
            let gpus = report.status.gpus.iter().zip(&report.models);
            gpus.map(move |(gpu, &model)| (gpu, model, gpu.capacity(headroom)))
        });
        let cards = cards.map(|(gpu, model, capacity)| {
            let excess = self.excess(gpu, &counts, |uid| repaid(&gpu.uuid, uid));
            let taken = self.held(&gpu.uuid, &counts) + Mib(gpu.unmanaged_mib) + excess;
            let elsewhere = self.elsewhere.on(&gpu.uuid);
            let taken = taken + elsewhere.held;
            let whole = self
                .holds()
                .any(|(uid, hold)| hold.exclusive && counts(uid) && hold.on(&gpu.uuid) > Mib::ZERO);
            let slices = self.slices_of(gpu, &counts);
            Card {
                capacity,
                free: match &slices {
                    Some(slices) => slices.free(),
                    None if whole || elsewhere.whole => Mib::ZERO,
                    None => capacity.minus(taken),
                },
                model,
                usable: gpu.healthy
                    && !self.cordons(gpu)
                    && !self.leaves(gpu)
                    && gpu.mig.is_some() == slices.is_some(),
                slices,
                starts: self.starts_on(&gpu.uuid, &counts).max(elsewhere.starts),
                limit: gpu.limit(),
                lending: match self.settings.weighs_use {
                    true => lending(gpu, capacity, |uid| {
                        let hold = self.hold(uid).filter(|_| counts(uid));
                        hold.map(|hold| hold.on(&gpu.uuid))
                    }),
                    false => Lending::default(),
                },
                compute: match gpu.mps {
                    true => self.compute_of(gpu, &counts),
                    false => Compute::default(),
                },
            }
        });
        let cards = cards.collect();
        let holds = || {
            self.holds()
                .filter(|(uid, _)| counts(uid))
                .map(|(_, hold)| hold)
        };
        let cpu = holds().fold(0u64, |sum, hold| sum.saturating_add(hold.cpu_milli));
        let (cpu_all, ram_all) = self
            .facts
            .as_ref()
            .map_or((0, Bytes::ZERO), |facts| (facts.cpu_milli, facts.ram));
        NodeGpus {
            cards,
            cpu_free_milli: cpu_all.saturating_sub(cpu),
            ram_free: ram_all.minus(holds().map(|hold| hold.ram).sum()),
            links: self.report.as_ref().and_then(|report| report.links.clone()),
        }
    }

    /// The memory of a card that pods use beyond their holds. Only pods that `counts` accepts count, without borrowers
    /// that `repaid` accepts.
    fn excess(
        &self,
        gpu: &Gpu,
        counts: impl Fn(&str) -> bool,
        repaid: impl Fn(&str) -> bool,
    ) -> Mib {
        // A pod that uses memory and holds none of it is a stranger until the agent reports otherwise:
        // the processes of a pod that was deleted by force may live on.
        let counted = gpu.pods.iter().filter(|used| counts(&used.uid));
        let excess = counted.map(|used| {
            let hold = self.hold(&used.uid);
            let held = hold.map_or(Mib::ZERO, |hold| hold.on(&gpu.uuid));
            Mib(used.used_mib).minus(held)
        });
        let lent = self.borrowers(gpu).filter(|(uid, ..)| counts(uid));
        let back = lent.filter(|(uid, ..)| repaid(uid));
        let back = back.map(|(_, held, used)| used.minus(held));
        excess.sum::<Mib>().minus(back.sum())
    }

    fn hold(&self, uid: &str) -> Option<&Hold> {
        self.bound.get(uid).or_else(|| self.reserved.get(uid))
    }

    /// The compute of a card with MPS, if only the pods that `counts` accepts were there.
    fn compute_of(&self, gpu: &Gpu, counts: impl Fn(&str) -> bool) -> Compute {
        let capacity = self.settings.compute;
        let elsewhere = self.elsewhere.on(&gpu.uuid).compute;
        let taken = self.compute_held(&gpu.uuid, &counts);
        let free = capacity.saturating_sub(taken.saturating_add(elsewhere));
        Compute {
            capacity,
            free: if self.clients_left(gpu, counts) > 0 {
                free
            } else {
                0
            },
        }
    }

    /// How many more pods may compute on a card with MPS, if only the pods that `counts` accepts were there.
    pub(crate) fn clients_left(&self, gpu: &Gpu, counts: impl Fn(&str) -> bool) -> usize {
        let shares = self.holds().filter(|(uid, _)| counts(uid));
        let shares = shares.filter(|(_, hold)| hold.compute_on(&gpu.uuid) > 0);
        CLIENTS.saturating_sub(shares.count())
    }
}
