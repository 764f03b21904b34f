//! A what-if: nodes as they would be if some pods were gone and others had come. Nothing changes by it.
//!
//! It counts everything, always: GPU memory, compute and MIG slices, CPU and memory of the host, and pod slots. It also
//! counts the rules of `gpu-affinity` and `gpu-anti-affinity`, and the room that is kept for others. It counts
//! anti-affinity on a node if kube-scheduler has not compared the node as it would be. Every fit is asked for here,
//! apart from the remembered answers of filter ([`crate::scores`]).

mod kept;
mod left;
mod neighbours;

use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_pack::{Choice, Mib, NodeGpus, Refusal, Request};

use crate::books::{Node, Uid};
use crate::budget::Budget;
use crate::known::Known;
use crate::maps::{HashMap, HashSet};
use crate::reason::Reason;
use crate::scores::Scores;
pub use left::{Host, Left};

/// The GPUs of a node that a pod gets, by index, and the memory that it is charged for each.
pub type Charges<'c> = &'c [(usize, Mib)];

/// See the module's documentation.
pub struct Trial<'k> {
    known: Known<'k>,
    gone: HashSet<Uid>,
    /// All pods are gone.
    is_empty: bool,
    /// Pods that reports show, but that are not bound to the node any more, are gone.
    ended: bool,
    /// GPUs, by UUID, where this pod, or every pod if none is named, has given back its use beyond its hold.
    repaid: Vec<(Arc<str>, Option<Uid>)>,
    /// Pods that start hold up others.
    starts: bool,
    /// Room that is kept for others counts as taken.
    keeps: bool,
    /// Room is kept for the pods that come before this pod, whichever pod is asked about.
    asker: Option<&'k PodFacts>,
    /// Of this node no more is left than that.
    most: Option<(Arc<str>, Left)>,
    spots: HashMap<Arc<str>, Spot<'k>>,
    /// The pods that have come, in their order.
    steps: Vec<Step>,
}

/// A node in a what-if.
struct Spot<'k> {
    node: &'k Node,
    left: Left,
    /// The pod from which room is kept in `left`; none if no room is kept.
    kept_from: Option<Uid>,
    /// Is room kept there at all?
    is_kept: bool,
    /// `left` is out of date, and is computed again before the next read.
    is_stale: bool,
    /// GPUs that all pods have left.
    cleared: Vec<usize>,
    /// The node when all pods have left it.
    empty: Option<Left>,
}

/// A pod has come.
struct Step {
    spot: usize,
    uid: Uid,
    request: Arc<Request>,
    charges: Vec<(usize, Mib)>,
    /// The node's `left` before the pod came, with room kept from `kept_from`.
    before: Left,
    kept_from: Option<Uid>,
}

/// A time in a what-if.
pub type Mark = usize;

impl<'k> Known<'k> {
    /// Begins a what-if: nodes as they are, and all room that is kept for others taken.
    pub fn trial(&self) -> Trial<'k> {
        Trial {
            known: *self,
            gone: HashSet::default(),
            is_empty: false,
            ended: false,
            repaid: Vec::new(),
            starts: false,
            keeps: true,
            asker: None,
            most: None,
            spots: HashMap::default(),
            steps: Vec::new(),
        }
    }

    /// The placement on one node, as filter saw it.
    pub fn choose(&self, name: &str, pod: &PodFacts) -> Result<Choice, Reason> {
        let trial = self.trial().while_others_start();
        trial.choose(pod, name, &mut Budget::all())
    }

    /// Could the node hold the pod if it were empty?
    pub fn could_hold(&self, name: &str, pod: &PodFacts, budget: &mut Budget) -> bool {
        self.books.excluded(name, &pod.constraints).is_none()
            && self.trial().empty().fits(pod, name, Host::Whole, budget) == Some(true)
    }
}

/// The assumptions. They must be set before a node is looked at, except [`Trial::leave`], [`Trial::stay`] and
/// [`Trial::clear`].
impl<'k> Trial<'k> {
    /// Pods that start hold up others, as they do now. Else all starts are over: they end without that anything is done.
    pub fn while_others_start(mut self) -> Self {
        self.starts = self.known.books.counts_starts();
        self
    }

    /// No room is kept for others.
    pub fn keeping_nothing(mut self) -> Self {
        self.keeps = false;
        self
    }

    /// All pods are gone, and no room is kept for others.
    pub fn empty(mut self) -> Self {
        self.is_empty = true;
        self.keeping_nothing()
    }

    /// Pods that reports show have ended if they are bound to the node no more: the agent's next report is awaited.
    pub fn without_ended(mut self, ended: bool) -> Self {
        self.ended = ended;
        self
    }

    /// Room is kept for the pods that come before this pod, whichever pod is asked about.
    pub fn for_all_of(mut self, asker: &'k PodFacts) -> Self {
        self.asker = Some(asker);
        self
    }

    /// Pods have given back all memory of these GPUs that they use beyond their holds.
    pub fn repaid(mut self, cards: impl Iterator<Item = Arc<str>>) -> Self {
        self.repaid = cards.map(|card| (card, None)).collect();
        self
    }

    /// Of this node no more is left than that.
    pub fn at_most(mut self, on: &Arc<str>, left: Left) -> Self {
        self.most = Some((on.clone(), left));
        self
    }

    /// This is left of the node, and no room is kept there.
    pub fn with(mut self, on: &str, left: &Left) -> Self {
        self.keeps = false;
        if let Some((name, node)) = self.known.books.named_node(on) {
            let spot = Spot::new(node, left.clone(), None);
            self.spots.insert(name.clone(), spot);
        }
        self
    }

    /// These pods are gone.
    pub fn leave(&mut self, pods: impl IntoIterator<Item = Uid>) {
        self.gone.extend(pods);
        self.changed();
    }

    /// This pod stays after all.
    pub fn stay(&mut self, pod: &str) {
        self.gone.swap_remove(pod);
        self.changed();
    }

    /// Is the pod gone in this what-if?
    pub fn has_left(&self, pod: &str) -> bool {
        self.gone.contains(pod)
    }

    fn changed(&mut self) {
        let spots = self.spots.values_mut();
        spots.for_each(|spot| spot.is_stale = true);
    }

    /// All pods have left this GPU of the node, except the pods that came in this what-if.
    pub fn clear(&mut self, on: &str, card: usize, budget: &mut Budget) {
        let Some((index, _, spot)) = self.spots.get_full_mut(on) else {
            return;
        };
        let empty = spot.empty.get_or_insert_with(|| {
            budget.charge_view(spot.node);
            let view = spot.node.view_of(|_| false);
            let mut empty = Left::of(spot.node, Arc::new(view), 0, |_| false);
            let steps = self.steps.iter().filter(|step| step.spot == index);
            steps.for_each(|step| empty.take(&step.request, &step.charges));
            empty
        });
        spot.cleared.push(card);
        spot.left.replace(card, empty);
    }

    /// GPUs of the node that are cordoned or left to ResourceClaims accept pods.
    pub fn uncordon(&mut self, on: &str, pod: &PodFacts) {
        if let Ok(spot) = self.spot(on, pod, &mut Budget::all()) {
            let Spot { node, left, .. } = &mut self.spots[spot];
            left.uncordon(node);
        }
    }
}

/// The results.
impl<'k> Trial<'k> {
    /// The best placement of the pod on the node, on `only` these GPUs if some are named.
    pub fn fit(
        &mut self,
        pod: &PodFacts,
        on: &str,
        only: Option<&[usize]>,
        host: Host,
        budget: &mut Budget,
    ) -> Result<Choice, Reason> {
        let spot = self.spot(on, pod, budget)?;
        self.fit_at(spot, pod, only, host, budget)
    }

    /// Does the pod fit on the node? None if the budget does not suffice for an answer.
    pub fn fits(
        &mut self,
        pod: &PodFacts,
        on: &str,
        host: Host,
        budget: &mut Budget,
    ) -> Option<bool> {
        match self.fit(pod, on, None, host, budget) {
            Ok(_) => Some(true),
            Err(Reason::NotYet) => None,
            Err(_) => Some(false),
        }
    }

    /// The pod's placement next to the room that is kept for others.
    ///
    /// # Errors
    /// The reason why the node as it is does not suffice, or else why its room is kept for others.
    pub fn choose(
        mut self,
        pod: &PodFacts,
        on: &str,
        budget: &mut Budget,
    ) -> Result<Choice, Reason> {
        self.keeps = false;
        let choice = self.fit(pod, on, None, Host::Beside, budget)?;
        self.keeps = true;
        let spot = self.spot(on, pod, budget)?;
        if !self.spots[spot].is_kept {
            return Ok(choice);
        }
        let found = self.fit_at(spot, pod, None, Host::Beside, budget);
        found.map_err(|reason| match reason {
            Reason::Fit(_) => self.known.kept_because(on, pod),
            other => other,
        })
    }

    /// Pods that come to the node start from now on.
    fn count_starts(&mut self, spot: usize) {
        self.spots[spot].left.count_starts();
    }

    /// The pod comes to the node and gets these GPUs.
    pub fn take(&mut self, pod: &PodFacts, on: &str, charges: Charges<'_>) {
        if let Ok(spot) = self.spot(on, pod, &mut Budget::all()) {
            self.take_at(spot, pod, charges);
        }
    }

    /// The free resources of a node for the pod.
    pub fn left(&mut self, pod: &PodFacts, on: &str, budget: &mut Budget) -> Result<&Left, Reason> {
        let spot = self.spot(on, pod, budget)?;
        Ok(self.at(spot))
    }

    /// The free resources of a node for a pod from which no room is kept.
    pub fn left_for_all(mut self, on: &str) -> Option<Left> {
        if let Some(spot) = self.spots.swap_remove(on) {
            return Some(spot.left);
        }
        let node = self.known.books.node(on)?;
        Some(self.as_supposed(node, &mut Budget::all()))
    }

    /// Now.
    pub fn mark(&self) -> Mark {
        self.steps.len()
    }

    /// Pods that came since then have not come.
    pub fn back_to(&mut self, mark: Mark) {
        for step in self.steps.drain(mark..).rev() {
            let spot = &mut self.spots[step.spot];
            spot.is_stale |= spot.kept_from != step.kept_from;
            spot.left = step.before;
        }
    }
}

/// The results for a node that was looked at before, by its index.
impl<'k> Trial<'k> {
    /// Looks at a node for a pod.
    pub fn spot(&mut self, on: &str, pod: &PodFacts, budget: &mut Budget) -> Result<usize, Reason> {
        let asker = self.asker.unwrap_or(pod);
        let kept_from = self.keeps.then_some(&asker.uid);
        if let Some((index, _, spot)) = self.spots.get_full(on)
            && !spot.is_stale
            && spot.kept_from.as_ref() == kept_from
        {
            return Ok(index);
        }
        let named = self.known.books.named_node(on);
        let (name, node) = named.ok_or(Reason::NoReport)?;
        let mut left = self.as_supposed(node, budget);
        let is_kept = self.keeps && self.keep(&mut left, name, asker, budget)?;
        if let Some((_, most)) = self.most.as_ref().filter(|(only, _)| only == name) {
            left.cap(most);
        }
        let mut spot = Spot::new(node, left, kept_from.cloned());
        spot.is_kept = is_kept;
        let (index, _) = self.spots.insert_full(name.clone(), spot);
        let spot = &mut self.spots[index];
        for step in self.steps.iter().filter(|step| step.spot == index) {
            spot.left.take(&step.request, &step.charges);
        }
        Ok(index)
    }

    fn as_supposed(&self, node: &Node, budget: &mut Budget) -> Left {
        if !self.is_empty && !self.ended && self.gone.is_empty() && self.repaid.is_empty() {
            return Left::of(node, node.shared(), node.count(), |_| true).starting(self.starts);
        }
        budget.charge_view(node);
        let counts = |uid: &str| !self.is_gone(node, uid);
        let repaid = |uuid: &str, uid: &str| {
            let mut repaid = self.repaid.iter();
            repaid
                .any(|(card, pod)| **card == *uuid && pod.as_ref().is_none_or(|pod| **pod == *uid))
        };
        let view = node.view_without_loans(counts, repaid);
        let left = Left::of(node, Arc::new(view), node.count_of(counts), counts);
        left.starting(self.starts)
    }

    fn is_gone(&self, node: &Node, uid: &str) -> bool {
        self.is_empty || self.gone.contains(uid) || self.ended && node.has_ended(uid)
    }

    /// The free resources of the node.
    pub fn at(&self, spot: usize) -> &Left {
        &self.spots[spot].left
    }

    /// Its name.
    pub fn name(&self, spot: usize) -> Option<&Arc<str>> {
        Some(self.spots.get_index(spot)?.0)
    }

    /// How many nodes were looked at.
    pub fn count(&self) -> usize {
        self.spots.len()
    }

    /// Does the pod fit on the node at this place of the list?
    pub fn fit_at(
        &self,
        spot: usize,
        pod: &PodFacts,
        only: Option<&[usize]>,
        host: Host,
        budget: &mut Budget,
    ) -> Result<Choice, Reason> {
        let request = pod.asks.readable();
        let request = request.map_err(|_| Reason::Fit(Refusal::TooComplex))?;
        let Spot { node, left, .. } = &self.spots[spot];
        if !left.has_host(request, host) {
            return Err(Reason::Fit(Refusal::NoRoom));
        }
        let part = only.map(|only| left.part(only));
        let view = part.as_ref().unwrap_or(left.view());
        let choice = match &request.rules {
            None => self.known.scores.fit_within(view, request, budget)?,
            Some(rules) => {
                let group = rules.affinity.as_ref();
                if group.is_some_and(|group| self.is_elsewhere(group, spot)) {
                    return Err(Reason::Fit(Refusal::Neighbours));
                }
                budget.charge_view(node);
                let traits = self.traits(spot, group);
                self.known
                    .scores
                    .fit_among(view, &traits, request, budget)?
            }
        };
        if matches!(host, Host::Whole) && self.is_kept_off(spot, pod) {
            return Err(Reason::Fit(Refusal::Neighbours));
        }
        Ok(choice)
    }

    /// The pod takes this on the node at this place of the list.
    pub fn take_at(&mut self, spot: usize, pod: &PodFacts, charges: Charges<'_>) {
        let Ok(request) = pod.asks.readable() else {
            return;
        };
        let Spot {
            left, kept_from, ..
        } = &mut self.spots[spot];
        let step = Step {
            spot,
            uid: pod.uid.clone(),
            request: request.clone(),
            charges: charges.to_vec(),
            before: left.clone(),
            kept_from: kept_from.clone(),
        };
        left.take(request, charges);
        self.steps.push(step);
    }
}

impl<'k> Spot<'k> {
    fn new(node: &'k Node, left: Left, kept_from: Option<Uid>) -> Self {
        Self {
            node,
            left,
            kept_from,
            is_kept: false,
            is_stale: false,
            cleared: Vec::new(),
            empty: None,
        }
    }
}

/// The free resources of a new node next to the pod. No pod is there yet, and no room is kept.
pub fn left_of_new(
    view: &NodeGpus,
    request: &Request,
    only: Option<&[usize]>,
    scores: &Scores,
) -> Option<NodeGpus> {
    let left = Left::of_new(view);
    left.has_host(request, Host::Whole).then_some(())?;
    let part = only.map(|only| left.part(only));
    let of = part.as_ref().unwrap_or(view);
    let choice = scores.fit_within(of, request, &mut Budget::all()).ok()?;
    let mut left = view.clone();
    left.take(request, &choice.placement.charges);
    Some(left)
}
