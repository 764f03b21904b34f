//! Which pods would have to move for one that waits though enough memory is free, in pieces: those whose owners let them
//! be moved, as few MiB of them as possible, each to a place that is free now.
//!
//! A pod that moves is evicted, and its controller makes another that goes to the place; no pod moves to room that
//! another move frees. A plan is the least of all wherever the pod has one claim, those that may move ask for one card
//! each, and the search ends within its bounds ([`SETS`], [`DESTINATIONS`], its budget): otherwise a lesser one may be
//! missed. A pod with a volume that may tie it to its node moves to other cards of that node alone. Affinity between pods
//! and topology spread are not looked at, and disruption budgets where the plan is carried out ([`super::moving`]).

use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_pack::{Mib, NodeGpus};

use super::Site;
use super::planning::{Planning, Unit, sets_of_cards};
use crate::books::{Node, Uid};
use crate::budget::Budget;
use crate::maps::HashSet;
use crate::queue::Cards;
use crate::sight::Sight;

/// Sets of pods that are thought of for one set of cards, the least first.
const SETS: usize = 4096;
/// Nodes with a place for a pod that moves, among which it gets one.
const DESTINATIONS: usize = 16;

/// What would give a pod room.
#[derive(Clone, Debug)]
pub struct Moves {
    /// Where the pod would go.
    pub node: Arc<str>,
    /// The cards that it would get, by UUID, and what it would hold of each.
    pub cards: Cards,
    /// Who would move from there, the largest first.
    pub moves: Vec<Move>,
}

/// A pod that would move.
#[derive(Clone, Debug)]
pub struct Move {
    /// Which.
    pub pod: Arc<PodFacts>,
    /// What it holds now, of cards of the node that the plan is about.
    pub from: Cards,
    /// Where its replacement would go.
    pub node: Arc<str>,
    /// The cards that that would get.
    pub cards: Cards,
}

impl Move {
    /// What moves.
    #[must_use]
    pub fn mib(&self) -> Mib {
        self.from.iter().map(|(_, mib)| *mib).sum()
    }
}

impl Moves {
    /// What moves in all.
    #[must_use]
    pub fn mib(&self) -> Mib {
        self.moves.iter().map(Move::mib).sum()
    }

    /// Fewest MiB, then fewest pods; then by name.
    pub(super) fn order(&self) -> impl Ord + '_ {
        (self.mib(), self.moves.len(), &*self.node, &self.cards)
    }
}

/// What is taken of nodes already while places are looked for: by node, cards, CPU and memory of the host.
struct Taken<'a> {
    node: &'a Arc<str>,
    charges: Vec<(usize, Mib)>,
    pod: &'a Arc<PodFacts>,
}

/// The node that pods leave.
struct Left<'a> {
    name: &'a str,
    /// As it is when they have left and the pod that waits is there. None if it is to be empty.
    then: Option<NodeGpus>,
}

impl Sight<'_> {
    /// The least that would have to leave these cards of a node, not more than `most`, and where it would go. None if the
    /// budget is spent: the unit of the planning says where the next look goes on.
    pub(super) fn moves_on(
        &self,
        site: &Site<'_>,
        only: &[usize],
        planning: &mut Planning,
        most: Option<Mib>,
        budget: &mut Budget,
    ) -> Option<Option<Moves>> {
        let mut may = self.evictable(site, only);
        budget.charge(site.node.bound().len());
        may.retain(|(_, pod)| !planning.spared.contains(&pod.uid));
        let weights: Vec<(Mib, Uid)> = may
            .iter()
            .map(|(mib, pod)| (*mib, pod.uid.clone()))
            .collect();
        let unit = planning.unit.take().filter(|unit| unit.may == weights);
        let mut unit = unit.unwrap_or_else(|| Unit::new(weights));
        while unit.looked < SETS {
            let Some((sum, set)) = unit.next() else {
                return Some(None);
            };
            if most.is_some_and(|most| sum > most) {
                return Some(None);
            }
            if set.len() > planning.most {
                continue;
            }
            let found = match budget.is_spent() {
                true => None,
                false => self.moves_of(site, only, &set, &may, budget),
            };
            if let Some(found) = found {
                return Some(Some(found));
            }
            if budget.is_spent() {
                unit.again = Some((sum, set));
                planning.unit = Some(unit);
                return None;
            }
        }
        Some(None)
    }

    /// The moves of this set of pods, if the pod that waits then fits and each of them finds a place.
    fn moves_of(
        &self,
        site: &Site<'_>,
        only: &[usize],
        set: &[usize],
        may: &[(Mib, Arc<PodFacts>)],
        budget: &mut Budget,
    ) -> Option<Moves> {
        let pods: Vec<_> = set.iter().rev().map(|&index| &may[index].1).collect();
        let gone: HashSet<_> = pods.iter().map(|pod| pod.uid.clone()).collect();
        let is_one = |card: usize| only.contains(&card);
        let choice = self.fits_on(site, &gone, &is_one, budget)?;
        let charges = choice.placement.charges;
        let is_gone = |uid: &str| gone.contains(uid);
        let then = self.view_without(site.name, site.node, site.pod, is_gone, budget);
        let mut then = then.ok()?;
        take(&mut then, &charges, site.pod);
        let left = Left {
            name: site.name,
            then: Some(then),
        };
        Some(Moves {
            node: self.books.named_node(site.name)?.0.clone(),
            cards: by_uuid(site.node, &charges),
            moves: self.moves_to(&left, &pods, budget)?,
        })
    }

    /// The moves by which these pods, the largest first, leave their node for fuller ones. None if they do not fit there at
    /// the same time, or if that took too long to tell.
    pub(crate) fn moves_off(
        &self,
        name: &str,
        pods: &[&Arc<PodFacts>],
        budget: &mut Budget,
    ) -> Option<Vec<Move>> {
        self.moves_to(&Left { name, then: None }, pods, budget)
    }

    fn moves_to(
        &self,
        left: &Left<'_>,
        pods: &[&Arc<PodFacts>],
        budget: &mut Budget,
    ) -> Option<Vec<Move>> {
        let mut taken = Vec::new();
        let found = self.find_places(left, pods, &mut taken, budget);
        found.then(|| taken.iter().map(|it| self.move_to(it)).collect())?
    }

    fn move_to(&self, taken: &Taken<'_>) -> Option<Move> {
        let assignment = taken.pod.assignment.as_ref()?.as_ref().ok()?;
        Some(Move {
            pod: taken.pod.clone(),
            from: assignment.charges.clone(),
            node: taken.node.clone(),
            cards: by_uuid(self.books.node(taken.node)?, &taken.charges),
        })
    }

    /// Those who may move from these cards, the smallest first, with what they hold.
    fn evictable(&self, site: &Site<'_>, only: &[usize]) -> Vec<(Mib, Arc<PodFacts>)> {
        let holds = |pod: &Arc<PodFacts>| {
            let hold = site.node.bound().get(&pod.uid)?;
            let mut cards = only.iter().map(|&card| hold.on(site.node.uuid(card)));
            cards.any(|mib| mib > Mib::ZERO).then_some(())?;
            let assignment = pod.assignment.as_ref()?.as_ref().ok()?;
            Some(assignment.charges.iter().map(|(_, mib)| *mib).sum())
        };
        let may = |pod: &Arc<PodFacts>| {
            let ends = pod.deleting || pod.released;
            let alone = self.books.is_disrupted_alone(pod);
            let one = pod.evictable.is_some() && alone && pod.asks.readable().is_ok();
            one && !ends && pod.priority <= site.pod.priority
        };
        let bound = site.node.bound().keys();
        let bound = bound
            .filter_map(|uid| self.books.pod(uid))
            .filter(|pod| may(pod));
        let mut found: Vec<_> = bound
            .filter_map(|pod| Some((holds(pod)?, pod.clone())))
            .collect();
        found.sort_unstable_by(|(a, one), (b, other)| (a, &one.uid).cmp(&(b, &other.uid)));
        found
    }

    /// Finds a place for each of the pods, all at the same time.
    fn find_places<'a>(
        &'a self,
        left: &Left<'_>,
        pods: &[&'a Arc<PodFacts>],
        taken: &mut Vec<Taken<'a>>,
        budget: &mut Budget,
    ) -> bool {
        let Some((pod, others)) = pods.split_first() else {
            return true;
        };
        budget.charge(self.books.nodes().len() / 8);
        let names = self.books.nodes().map(|(name, _)| name);
        let is_open = |name: &str| left.then.is_some() || self.is_fuller(name, left.name);
        let roomy = names.filter(|name| self.may_fit(name, pod) && is_open(name));
        let mut roomy: Vec<_> = roomy.collect();
        roomy.sort_unstable();
        let mut found = Vec::new();
        let mut destinations = 0;
        for name in roomy {
            if budget.is_spent() {
                return false;
            }
            let places = self.places_on(left, name, pod, taken, budget);
            destinations += usize::from(!places.is_empty());
            found.extend(places);
            if destinations == DESTINATIONS {
                break;
            }
        }
        found.sort_unstable_by(|(cost, it), (other_cost, other)| {
            (cost, it.node, &it.charges).cmp(&(other_cost, other.node, &other.charges))
        });
        for (_, place) in found {
            taken.push(place);
            if self.find_places(left, others, taken, budget) {
                return true;
            }
            taken.pop();
        }
        false
    }

    /// Where on one node a replacement of the pod would fit beside what is taken already.
    fn places_on<'a>(
        &'a self,
        left: &Left<'_>,
        name: &'a Arc<str>,
        pod: &'a Arc<PodFacts>,
        taken: &[Taken<'a>],
        budget: &mut Budget,
    ) -> Vec<(gpustow_pack::Cost, Taken<'a>)> {
        let mut view = || {
            // Its volume may be on its node alone.
            if pod.tied && **name != *left.name {
                return None;
            }
            let site = self.site(pod, name)?;
            let node = site.node;
            let here = || taken.iter().filter(|it| *it.node == *name);
            let pods = node.facts().and_then(|facts| facts.pods);
            let more = node.count() + here().count() as u64;
            let refused = self.books.refused_in_tree(name, pod).is_some();
            if refused || pods.is_some_and(|pods| more >= pods) {
                return None;
            }
            let mut view = self.view_without(name, node, pod, |_| false, budget).ok()?;
            if let Some(left) = left.then.as_ref().filter(|_| **name == *left.name) {
                // Nothing that is freed, and nothing that the pod gets which waits.
                for (card, then) in view.cards.iter_mut().zip(&left.cards) {
                    card.free = card.free.min(then.free);
                    card.compute.free = card.compute.free.min(then.compute.free);
                    if let Some((slices, then)) = card.slices.as_mut().zip(then.slices) {
                        slices.taken |= then.taken;
                    }
                }
                view.cpu_free_milli = view.cpu_free_milli.min(left.cpu_free_milli);
                view.ram_free = view.ram_free.min(left.ram_free);
            }
            for it in here() {
                take(&mut view, &it.charges, it.pod);
            }
            let short =
                view.cpu_free_milli < site.request.cpu_milli || view.ram_free < site.request.ram;
            let fits = !short
                && self
                    .fit_on(name, node, &view, pod, |_| false, budget)
                    .is_ok();
            fits.then_some((site, view))
        };
        let Some((site, view)) = view() else {
            return Vec::new();
        };
        let fits = |only: Vec<usize>| {
            let mut view = view.clone();
            for (index, card) in view.cards.iter_mut().enumerate() {
                card.usable &= only.contains(&index);
            }
            let choice = self
                .fit_on(name, site.node, &view, pod, |_| false, budget)
                .ok()?;
            let charges = choice.placement.charges;
            Some((
                choice.cost,
                Taken {
                    node: name,
                    charges,
                    pod,
                },
            ))
        };
        sets_of_cards(&site).into_iter().filter_map(fits).collect()
    }
}

/// Takes what a pod gets out of a view.
fn take(view: &mut NodeGpus, charges: &[(usize, Mib)], pod: &PodFacts) {
    if let Ok(request) = pod.asks.readable() {
        view.take(request, charges);
    }
}

fn by_uuid(node: &Node, charges: &[(usize, Mib)]) -> Cards {
    let charges = charges.iter();
    let by_uuid = charges.map(|&(card, mib)| (node.uuid(card).into(), mib));
    by_uuid.collect()
}
