//! The resources of a node that are left for a pod.

use std::sync::Arc;

use gpustow_pack::{Bytes, NodeGpus, Request, Rules, Starts};

use super::Charges;
use crate::books::Node;

/// How much of CPU, host memory and pod slots a pod must find.
#[derive(Clone, Copy, Debug)]
pub enum Host {
    /// All that it requests, if the node's are known. kube-scheduler has not compared the node as it would be: anti-affinity
    /// counts too.
    Whole,
    /// At most the amount that would be free without room kept for others. kube-scheduler has compared the rest, with
    /// its own view.
    Beside,
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Left {
    view: Arc<NodeGpus>,
    /// So many pods more.
    pods: u64,
    /// CPU, host memory and slots if nothing were kept for others.
    free: (u64, Bytes, u64),
    /// Of each GPU with MPS, so many pods more may compute there; empty if no GPU has it.
    clients: Vec<usize>,
    /// The rules of pods that have come or for which room is kept, and their GPUs.
    rules: Vec<(Arc<Rules>, Vec<usize>)>,
    /// The node's CPU, host memory and slots are known.
    is_known: bool,
    /// Pods that start hold up others.
    starts: bool,
}

impl Left {
    /// Of this view of a node, on which those pods are that `counts` accepts: `there` in number.
    pub(super) fn of(
        node: &Node,
        view: Arc<NodeGpus>,
        there: u64,
        counts: impl Fn(&str) -> bool,
    ) -> Self {
        let most = node.facts().and_then(|facts| facts.pods);
        let pods = most.map_or(u64::MAX, |most| most.saturating_sub(there));
        let gpus = node.gpus().iter();
        let clients = match gpus.clone().any(|gpu| gpu.mps) {
            true => gpus.map(|gpu| node.clients_left(gpu, &counts)).collect(),
            false => Vec::new(),
        };
        Self {
            clients,
            is_known: node.facts().is_some(),
            ..Self::with(view, pods)
        }
    }

    /// Of a node that is yet to come.
    pub(super) fn of_new(view: &NodeGpus) -> Self {
        Self::with(Arc::new(view.clone()), u64::MAX)
    }

    fn with(view: Arc<NodeGpus>, pods: u64) -> Self {
        Self {
            free: (view.cpu_free_milli, view.ram_free, pods),
            view,
            pods,
            clients: Vec::new(),
            rules: Vec::new(),
            is_known: true,
            starts: false,
        }
    }

    /// Do pods that start hold up others? Else their starts are over.
    pub(super) fn starting(mut self, starts: bool) -> Self {
        self.starts = starts;
        if !starts && self.view.has_starts() {
            let view = Arc::make_mut(&mut self.view);
            let cards = view.cards.iter_mut();
            cards.for_each(|card| card.starts = Starts::None);
        }
        self
    }

    /// Pods that come start.
    pub(super) fn count_starts(&mut self) {
        self.starts = true;
    }

    /// The node as it would be.
    pub fn view(&self) -> &NodeGpus {
        &self.view
    }

    /// So many pods more fit by their number.
    pub fn pods(&self) -> u64 {
        self.pods
    }

    pub(super) fn rules(&self) -> impl Iterator<Item = (&Rules, &[usize])> {
        self.rules.iter().map(|(rules, cards)| (&**rules, &**cards))
    }

    /// A cheap estimate: false if a pod with this request does not fit.
    pub fn may_fit(&self, request: &Request) -> bool {
        self.has_host(request, Host::Whole) && request.may_fit(&self.view)
    }

    pub(super) fn has_host(&self, request: &Request, host: Host) -> bool {
        let (cpu, ram) = (request.cpu_milli, request.ram);
        let (cpu, ram, pods) = match host {
            Host::Whole if self.is_known => (cpu, ram, 1),
            Host::Whole => (0, Bytes::ZERO, 1),
            Host::Beside => {
                let (cpu_free, ram_free, pods_free) = self.free;
                (cpu.min(cpu_free), ram.min(ram_free), pods_free.min(1))
            }
        };
        self.view.cpu_free_milli >= cpu && self.view.ram_free >= ram && self.pods >= pods
    }

    /// The view with these GPUs alone.
    pub(super) fn part(&self, only: &[usize]) -> NodeGpus {
        let mut view = NodeGpus::clone(&self.view);
        for (index, card) in view.cards.iter_mut().enumerate() {
            card.usable &= only.contains(&index);
        }
        view
    }

    /// A pod comes.
    pub(super) fn take(&mut self, request: &Request, charges: Charges<'_>) {
        Arc::make_mut(&mut self.view).take(request, charges);
        self.pods = self.pods.saturating_sub(1);
        if self.starts {
            let cards = &mut Arc::make_mut(&mut self.view).cards;
            for (card, _) in charges {
                if let Some(card) = cards.get_mut(*card) {
                    card.starts = card.starts.max(Starts::of(request.alone));
                }
            }
        }
        for (card, _) in charges.iter().filter(|_| request.compute > 0) {
            self.take_clients(*card, 1);
        }
        if let Some(rules) = &request.rules {
            let cards = charges.iter().map(|(card, _)| *card);
            self.rules.push((rules.clone(), cards.collect()));
        }
    }

    fn take_clients(&mut self, card: usize, count: usize) {
        let Some(clients) = self.clients.get_mut(card) else {
            return;
        };
        *clients = clients.saturating_sub(count);
        if *clients == 0
            && let Some(card) = Arc::make_mut(&mut self.view).cards.get_mut(card)
        {
            card.compute.free = 0;
        }
    }

    /// This GPU is as it is there.
    pub(super) fn replace(&mut self, card: usize, other: &Self) {
        let view = Arc::make_mut(&mut self.view);
        if let Some((old, new)) = view.cards.get_mut(card).zip(other.view.cards.get(card)) {
            *old = *new;
        }
        if let Some((old, new)) = self.clients.get_mut(card).zip(other.clients.get(card)) {
            *old = *new;
        }
    }

    pub(super) fn uncordon(&mut self, node: &Node) {
        let view = Arc::make_mut(&mut self.view);
        for (card, gpu) in view.cards.iter_mut().zip(node.gpus()) {
            card.usable = gpu.healthy;
        }
    }

    /// Neither more than this nor more than that is left.
    pub(super) fn cap(&mut self, other: &Self) {
        let view = Arc::make_mut(&mut self.view);
        for (card, most) in view.cards.iter_mut().zip(&other.view.cards) {
            card.free = card.free.min(most.free);
            card.compute.free = card.compute.free.min(most.compute.free);
            card.starts = card.starts.max(most.starts);
            if let Some((slices, most)) = card.slices.as_mut().zip(most.slices) {
                slices.taken |= most.taken;
            }
        }
        view.cpu_free_milli = view.cpu_free_milli.min(other.view.cpu_free_milli);
        view.ram_free = view.ram_free.min(other.view.ram_free);
        self.pods = self.pods.min(other.pods);
        for (clients, most) in self.clients.iter_mut().zip(&other.clients) {
            *clients = (*clients).min(*most);
        }
        self.rules.extend_from_slice(&other.rules);
    }
}
