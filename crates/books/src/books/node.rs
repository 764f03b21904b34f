//! One node: the report of its agent, the holds of its pods, and the view that follows from both.

mod view;

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::NodeFacts;
use gpustow_api::gpunode::{Gpu, GpuNodeStatus};
use gpustow_api::intree::Taint;
use gpustow_pack::mig::Slices;
use gpustow_pack::{Card, Links, Mib, ModelId, NodeGpus, Starts};

use super::gate::Gate;
use super::hold::Hold;
use super::index::Marks;
use super::twins::{self, Elsewhere};
use crate::maps::{HashMap, HashSet};

/// A pod's UID.
pub type Uid = Arc<str>;

/// The agent's last report, and when the ledger saw it change.
#[derive(Clone, Debug)]
struct Report {
    status: GpuNodeStatus,
    seen: Duration,
    models: Vec<ModelId>,
    links: Option<Arc<Links>>,
}

/// How firm it is that a pod holds something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// By a bound pod.
    Bound,
    /// By a pod that is to be bound.
    Reserved,
    /// By memory that is withheld for a pod that an earlier extender may still bind.
    Withheld,
}

/// A node and everything on it.
#[derive(Debug, Default)]
pub struct Node {
    facts: Option<NodeFacts>,
    report: Option<Report>,
    bound: HashMap<Uid, Hold>,
    reserved: HashMap<Uid, Hold>,
    /// For pods that an earlier extender may still bind here: see [`super::unfenced`].
    withheld: HashMap<Uid, Hold>,
    /// The UUIDs of the cards that pods may have, where others are left to ResourceClaims.
    open: HashSet<Arc<str>>,
    /// The holds of pods on this node's cards through other nodes that report these cards too.
    elsewhere: Elsewhere,
    /// The view for a new pod; follows from the fields above.
    view: Arc<NodeGpus>,
    /// The node's marks in the index of nodes; they follow from the fields above, too.
    marks: Marks,
    settings: Settings,
}

/// Have slices become free?
fn has_more(new: Option<Slices>, old: Option<Slices>) -> bool {
    let used = |slices: Slices| slices.blocked | slices.taken;
    match (new, old) {
        (Some(new), Some(old)) => new.geometry != old.geometry || used(old) & !used(new) != 0,
        (new, old) => new.is_some() != old.is_some(),
    }
}

/// The settings on which a view depends, in addition to its node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// The memory use of pods affects the placement of others: true if memory is lent and reclaimed.
    weighs_use: bool,
    /// Hundredths of its compute that pods may hold together of a card with MPS.
    compute: u16,
    /// Pods may have only those cards that were opened for them: the others are left to ResourceClaims.
    fence: bool,
}

impl Settings {
    pub fn new(weighs_use: bool, compute: u16, fence: bool) -> Self {
        Self {
            weighs_use,
            compute,
            fence,
        }
    }
}

impl Node {
    /// The Node object, once the watch has shown it.
    pub fn facts(&self) -> Option<&NodeFacts> {
        self.facts.as_ref()
    }

    pub(super) fn set_facts(&mut self, facts: Option<NodeFacts>) {
        self.facts = facts;
    }

    /// The agent's last report.
    pub fn status(&self) -> Option<&GpuNodeStatus> {
        self.report.as_ref().map(|report| &report.status)
    }

    /// The cards that the agent reported last.
    pub fn gpus(&self) -> &[Gpu] {
        self.status().map_or(&[], |status| &status.gpus)
    }

    /// The agent reports a new status; `models` are the models of its cards. Returns the models of the report before.
    pub(super) fn report(
        &mut self,
        status: GpuNodeStatus,
        seen: Duration,
        models: Vec<ModelId>,
    ) -> Option<Vec<ModelId>> {
        let links = status.links();
        let report = Report {
            status,
            seen,
            models,
            links,
        };
        Some(self.report.replace(report)?.models)
    }

    /// There is no report any more.
    pub(super) fn forget_report(&mut self) -> Option<Vec<ModelId>> {
        Some(self.report.take()?.models)
    }

    /// The view for a new pod.
    pub fn view(&self) -> &NodeGpus {
        &self.view
    }

    /// The view for a new pod, shared with nodes whose view is equal.
    pub(crate) fn shared(&self) -> Arc<NodeGpus> {
        self.view.clone()
    }

    pub(super) fn shared_view(&mut self) -> &mut Arc<NodeGpus> {
        &mut self.view
    }

    /// The card of this UUID as the view has it.
    pub(super) fn card(&self, uuid: &str) -> Option<&Card> {
        let index = self.gpus().iter().position(|gpu| *gpu.uuid == *uuid)?;
        self.view.cards.get(index)
    }

    /// The UUIDs of the cards, in the view's order.
    pub(super) fn uuids(&self) -> Vec<&str> {
        (0..self.view.cards.len())
            .map(|card| self.uuid(card))
            .collect()
    }

    /// The pods that are assumed here: their binds are awaited.
    pub fn assumed(&self) -> impl Iterator<Item = &Uid> {
        self.reserved.keys()
    }

    /// The pods that are bound here.
    pub fn bound(&self) -> &HashMap<Uid, Hold> {
        &self.bound
    }

    /// Every hold, with its pod and its firmness.
    pub fn shares(&self) -> impl Iterator<Item = (&Uid, &Hold, Share)> {
        let bound = self
            .bound
            .iter()
            .map(|(uid, hold)| (uid, hold, Share::Bound));
        let reserved = self.reserved.iter();
        let reserved = reserved.map(|(uid, hold)| (uid, hold, Share::Reserved));
        let withheld = self.withheld.iter();
        let withheld = withheld.map(|(uid, hold)| (uid, hold, Share::Withheld));
        bound.chain(reserved).chain(withheld)
    }

    /// A pod is bound here. True if that changes the pod's hold.
    pub(super) fn bind(&mut self, uid: &Uid, hold: Hold) -> bool {
        let changes = self.bound.get(uid) != Some(&hold);
        if changes {
            self.bound.insert(uid.clone(), hold);
        }
        changes
    }

    /// The pod is bound here no more. True if it was.
    pub(super) fn unbind(&mut self, uid: &str) -> bool {
        self.bound.swap_remove(uid).is_some()
    }

    /// The pod starts like this. Gives back how it did before.
    pub(super) fn set_starts(&mut self, uid: &str, starts: Starts) -> Option<Starts> {
        let hold = self.bound.get_mut(uid);
        let hold = hold.or_else(|| self.reserved.get_mut(uid))?;
        Some(std::mem::replace(&mut hold.starts, starts))
    }

    /// How pods start on a card, among the pods that `counts` accepts.
    fn starts_on(&self, uuid: &str, counts: impl Fn(&str) -> bool) -> Starts {
        let starting = self.holds().filter(|(_, hold)| hold.starts > Starts::None);
        let on = starting.filter(|(uid, hold)| counts(uid) && hold.on(uuid) > Mib::ZERO);
        on.map(|(_, hold)| hold.starts).max().unwrap_or_default()
    }

    pub(super) fn reserve(&mut self, uid: &Uid, hold: Hold) {
        self.reserved.insert(uid.clone(), hold);
    }

    pub(super) fn release(&mut self, uid: &str) {
        self.reserved.swap_remove(uid);
    }

    /// For pods that an earlier extender may still bind here this is held, and nothing else.
    pub(super) fn withhold(&mut self, holds: Vec<(Uid, Hold)>) {
        self.withheld = holds.into_iter().collect();
    }

    /// True if something was withheld for the pod.
    pub(super) fn release_withheld(&mut self, uid: &str) -> bool {
        self.withheld.swap_remove(uid).is_some()
    }

    /// True if nothing is known that would be lost.
    pub(super) fn is_empty(&self) -> bool {
        self.facts.is_none()
            && self.report.is_none()
            && self.bound.is_empty()
            && self.reserved.is_empty()
            && self.withheld.is_empty()
    }

    /// The data that every question checks first.
    pub fn gate(&self) -> Gate {
        let taints = self.facts.as_ref().map(|facts| &facts.prefer_no_schedule);
        Gate::new(
            self.report.as_ref().map(|report| report.seen),
            self.silence(),
            taints.is_some_and(|taints| !taints.is_empty()),
        )
    }

    /// For how many seconds the kubelet has spoken without the agent, by the node's own clock: we may have
    /// seen a report only just now that was written long ago.
    fn silence(&self) -> u64 {
        let written = self
            .report
            .as_ref()
            .and_then(|report| report.status.written());
        let kubelet = self.facts.as_ref().and_then(|facts| facts.heartbeat);
        let seconds = kubelet
            .zip(written)
            .map_or(0, |(kubelet, agent)| kubelet.saturating_sub(agent));
        u64::try_from(seconds).unwrap_or(0)
    }

    /// Pods that are bound here, are about to be, or may be.
    pub fn count(&self) -> u64 {
        (self.bound.len() + self.reserved.len() + self.withheld.len()) as u64
    }

    /// The number of these pods that `counts` accepts.
    pub(crate) fn count_of(&self, counts: impl Fn(&str) -> bool) -> u64 {
        self.holds().filter(|(uid, _)| counts(uid)).count() as u64
    }

    fn holds(&self) -> impl Iterator<Item = (&Uid, &Hold)> {
        let held = self.bound.iter().chain(&self.reserved);
        held.chain(&self.withheld)
    }

    /// MiB that is held on a card for the pods that `counts` accepts.
    pub fn held(&self, uuid: &str, counts: impl Fn(&str) -> bool) -> Mib {
        self.holds()
            .filter(|(uid, _)| counts(uid))
            .map(|(_, hold)| hold.on(uuid))
            .sum()
    }

    /// MiB that kube-scheduler counts in the sum of the node for the pods that `counts` accepts.
    pub fn in_sum(&self, counts: impl Fn(&str) -> bool) -> Mib {
        let holds = self.holds().filter(|(uid, _)| counts(uid));
        holds.map(|(_, hold)| hold.in_sum).sum()
    }

    /// MiB of a card that is promised, through whichever node.
    pub fn promised(&self, uuid: &str) -> Mib {
        self.held(uuid, |_| true) + self.elsewhere.on(uuid).held
    }

    /// Hundredths of a card's compute that are promised, through whichever node.
    pub(super) fn compute_promised(&self, uuid: &str) -> u16 {
        let elsewhere = self.elsewhere.on(uuid).compute;
        elsewhere.saturating_add(self.compute_held(uuid, |_| true))
    }

    /// Hundredths of a card's compute that are held for the pods that `counts` accepts.
    pub(crate) fn compute_held(&self, uuid: &str, counts: impl Fn(&str) -> bool) -> u16 {
        let holds = self.holds().filter(|(uid, _)| counts(uid));
        holds.fold(0, |sum, (_, hold)| {
            sum.saturating_add(hold.compute_on(uuid))
        })
    }

    /// Memory slices of a card that are held for the pods that `counts` accepts.
    pub(super) fn slices_held(&self, uuid: &str, counts: impl Fn(&str) -> bool) -> u8 {
        let holds = self.holds().filter(|(uid, _)| counts(uid));
        holds.fold(0, |mask, (_, hold)| mask | hold.slices_on(uuid))
    }

    /// The slices of a card on which MIG instances are made, if only the pods that `counts` accepts were there. An instance
    /// stays in the way after its pod, until the agent has ended it.
    pub(super) fn slices_of(&self, gpu: &Gpu, counts: impl Fn(&str) -> bool) -> Option<Slices> {
        let mig = gpu.mig.as_ref()?;
        let slices = mig.slices()?;
        let holds = |uid: &str| self.holds().any(|(it, _)| **it == *uid);
        let left = mig.instances.iter().filter(|it| {
            let pod = it.pod.as_deref();
            pod.is_some_and(|uid| !holds(uid))
        });
        let held = self.slices_held(&gpu.uuid, counts) | self.elsewhere.on(&gpu.uuid).slices;
        Some(Slices {
            taken: left.fold(held, |mask, it| mask | it.mask()),
            ..slices
        })
    }

    /// The share of a card that pods hold through this node.
    pub(super) fn share_of(&self, uuid: &str) -> twins::Share {
        let whole = |(_, hold): (_, &Hold)| hold.exclusive && hold.on(uuid) > Mib::ZERO;
        twins::Share {
            held: self.held(uuid, |_| true),
            whole: self.holds().any(whole),
            compute: self.compute_held(uuid, |_| true),
            slices: self.slices_held(uuid, |_| true),
            starts: self.starts_on(uuid, |_| true),
        }
    }

    /// Sets the holds on its cards through other nodes. True if that changes them.
    pub(super) fn share_with(&mut self, elsewhere: Elsewhere) -> bool {
        let old = std::mem::replace(&mut self.elsewhere, elsewhere);
        old != self.elsewhere
    }

    /// True if an administrator has cordoned the GPU, which does not get new pods.
    pub fn cordons(&self, gpu: &Gpu) -> bool {
        self.facts.as_ref().is_some_and(|facts| facts.cordons(gpu))
    }

    /// True if the card is left to ResourceClaims.
    pub fn leaves(&self, gpu: &Gpu) -> bool {
        self.settings.fence && !self.open.contains(&*gpu.uuid)
    }

    /// Pods may have these cards. True if that is new.
    pub(super) fn open(&mut self, open: HashSet<Arc<str>>) -> bool {
        let is_new = self.open != open;
        self.open = open;
        is_new
    }

    /// Pods may not have this card. True if they could before.
    pub(super) fn close(&mut self, uuid: &str) -> bool {
        self.open.swap_remove(uuid)
    }

    /// Recomputes the view. True if a card has more room than before.
    pub(super) fn refresh(&mut self, settings: Settings) -> bool {
        self.settings = settings;
        let view = self.view_of(|_| true);
        let gained = view.cards.len() > self.view.cards.len()
            || view.cards.iter().zip(&self.view.cards).any(|(new, old)| {
                let more = new.free > old.free
                    || new.capacity > old.capacity
                    || new.limit > old.limit
                    || new.compute.free > old.compute.free
                    || new.starts < old.starts
                    || has_more(new.slices, old.slices)
                    || (new.compute.capacity == 0) != (old.compute.capacity == 0);
                new.usable && (!old.usable || more)
            });
        if view != *self.view {
            self.view = Arc::new(view);
        }
        let lends = |gpu: &Gpu| self.borrowers(gpu).next().is_some();
        self.marks = Marks {
            largest: self.view.largest(),
            lends: self.gpus().iter().any(lends),
            may_be_short: self.gpus().iter().any(|gpu| self.may_be_short(gpu)),
            in_sum: self.facts().map(|_| self.left_in_sum(&self.view, |_| true)),
            arrives: self.arrives(),
        };
        gained
    }

    /// The free sum that kube-scheduler would see if only the pods that `counts` accepts held memory. It is the sum
    /// over the cards of this view without the requests of these pods.
    pub fn left_in_sum(&self, view: &NodeGpus, counts: impl Fn(&str) -> bool) -> Mib {
        let all: Mib = view.cards.iter().map(|card| card.capacity).sum();
        all.minus(self.in_sum(counts))
    }

    fn arrives(&self) -> bool {
        self.facts().is_some_and(|facts| {
            let awaits = || facts.taints.iter().any(Taint::is_startup);
            !facts.cordoned && (self.report.is_none() || awaits())
        })
    }

    pub(super) fn marks(&self) -> Marks {
        self.marks
    }

    /// Does a pod use more of a card that it holds than it asked for?
    pub fn lends(&self) -> bool {
        self.marks.lends
    }

    /// Charges of cards by UUID as the view has them; of cards that it has not, nothing.
    pub fn charges(&self, cards: &[(Arc<str>, Mib)]) -> Vec<(usize, Mib)> {
        let index = |uuid: &str| self.gpus().iter().position(|gpu| *gpu.uuid == *uuid);
        let charges = cards.iter();
        charges
            .filter_map(|(uuid, mib)| Some((index(uuid)?, *mib)))
            .collect()
    }

    /// The same the other way round.
    pub fn by_uuid(&self, charges: &[(usize, Mib)]) -> Vec<(Arc<str>, Mib)> {
        let charges = charges.iter();
        let by_uuid = charges.map(|&(card, mib)| (self.uuid(card).into(), mib));
        by_uuid.collect()
    }

    /// Does the last report show memory of the pod, which is bound to the node no more?
    pub(crate) fn has_ended(&self, uid: &str) -> bool {
        let shown = self.gpus().iter().flat_map(|gpu| &gpu.pods);
        !self.bound().contains_key(uid) && shown.into_iter().any(|it| it.uid == uid)
    }

    /// The memory of the GPU that the last report shows for pods that are not bound to the node any more.
    pub fn ended_in(&self, gpu: &Gpu) -> Mib {
        let shown = gpu.pods.iter();
        let ended = shown.filter(|shown| !self.bound().contains_key(shown.uid.as_str()));
        ended.map(|used| Mib(used.used_mib)).sum()
    }

    /// The UUID of the card at `index` of the view.
    pub fn uuid(&self, index: usize) -> &str {
        let report = self.report.as_ref();
        report
            .and_then(|report| report.status.gpus.get(index))
            .map_or("", |gpu| &gpu.uuid)
    }
}
