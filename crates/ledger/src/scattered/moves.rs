//! Which pods would have to move for one that waits though enough memory is free, in pieces: those whose owners let them
//! be moved, as few MiB of them as possible, each to a place that is free now.
//!
//! Whoever moves is evicted, and its controller makes another that goes to the place; nobody moves to room that another
//! move frees. A plan is the least of all wherever the pod has one claim, those that may move ask for one card each, and
//! the search ends within its bounds ([`SETS`], [`LOOKS`]): otherwise a lesser one may be missed. Affinity between pods and
//! topology spread are not looked at, and disruption budgets where the plan is carried out ([`super::moving`]).

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_pack::{Mib, NodeGpus};

use super::Site;
use crate::Ledger;
use crate::books::{Node, Uid};
use crate::budget::Budget;
use crate::maps::HashSet;
use crate::preempt::{asked_in_sum, left_in_sum};

/// Sets of pods that are thought of for one set of cards, the least first.
const SETS: usize = 4096;
/// Looks at a node that one plan may take.
const LOOKS: usize = 200_000;
/// Sets of cards of one node among which a pod of several gets its own; of more, the policy's choice alone.
const CHOICES: usize = 70;

/// Memory of cards, by UUID.
type Cards = Vec<(Box<str>, Mib)>;

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
    /// Where its successor would go.
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
    fn order(&self) -> impl Ord + '_ {
        (self.mib(), self.moves.len(), &*self.node, &self.cards)
    }
}

/// What is taken of nodes already while places are looked for: by node, cards, CPU and memory of the host.
struct Taken<'a> {
    node: &'a Arc<str>,
    charges: Vec<(usize, Mib)>,
    pod: &'a Arc<PodFacts>,
}

/// The node that pods leave, as it is when they have left and the pod that waits is there.
struct Left<'a> {
    name: &'a str,
    then: NodeGpus,
}

impl Ledger {
    /// Does the pod wait though what is free would suffice in sum, and would a node hold it if it were empty? Not if
    /// somebody leaves or may be preempted for it.
    #[must_use]
    pub fn waits_for_pieces(&self, pod: &Arc<PodFacts>, now: Duration) -> bool {
        let Ok(request) = &pod.request else {
            return false;
        };
        let is_free = pod.node.is_none() && !pod.released && !pod.deleting && !pod.gated;
        if !is_free || request.is_empty() || self.may_fit_now(pod, now) {
            return false;
        }
        let sites: Vec<_> = self
            .books
            .nodes()
            .filter_map(|(name, _)| self.site(pod, name, now))
            .filter(|site| self.excluded(site.name, &pod.constraints).is_none())
            .collect();
        // What is asked of every pod that waits, every second, is asked in the order of what it costs.
        let free: Mib = sites.iter().map(|site| site.node.view().free()).sum();
        if asked_in_sum(request) > free.0 {
            return false;
        }
        let could = |site: &Site<'_>| {
            let empty = site.node.view_of(|_| false);
            self.scores.fit(&empty, request).is_ok()
        };
        if !sites.iter().any(could) {
            return false;
        }
        let mut budget = Budget::of(&self.config);
        let mut open = sites
            .iter()
            .filter(|site| self.refused_in_tree(site.name, pod).is_none());
        !open.any(|site| self.is_served(site, &mut budget, now))
    }

    /// What would give room to a pod that waits for pieces; none if nothing would.
    #[must_use]
    pub fn moves_for(&self, pod: &Arc<PodFacts>, now: Duration) -> Option<Moves> {
        self.least_moves(pod, &HashSet::default(), &mut LOOKS.clone(), now)
    }

    /// The same, without those that are to be spared, within so many looks at nodes.
    pub(super) fn least_moves(
        &self,
        pod: &Arc<PodFacts>,
        spared: &HashSet<Uid>,
        looks: &mut usize,
        now: Duration,
    ) -> Option<Moves> {
        if !self.waits_for_pieces(pod, now) {
            return None;
        }
        let mut best: Option<Moves> = None;
        for (name, _) in self.nodes_by_name() {
            let Some(site) = self.site(pod, name, now) else {
                continue;
            };
            let in_vain = self.queue.was_preempted_in_vain(&pod.uid, name);
            if in_vain || self.refused_in_tree(name, pod).is_some() {
                continue;
            }
            for only in sets_of_cards(&site) {
                let most = best.as_ref().map(Moves::mib);
                let Some(found) = self.moves_on(&site, &only, spared, most, now, looks) else {
                    continue;
                };
                if best
                    .as_ref()
                    .is_none_or(|best| found.order() < best.order())
                {
                    best = Some(found);
                }
            }
        }
        best
    }

    fn nodes_by_name(&self) -> Vec<(&Arc<str>, &Node)> {
        let mut nodes: Vec<_> = self.books.nodes().collect();
        nodes.sort_unstable_by_key(|(name, _)| *name);
        nodes
    }

    /// Does room come without anybody's moving: do those who leave make it, or those who may be preempted?
    fn is_served(&self, site: &Site<'_>, budget: &mut Budget, now: Duration) -> bool {
        if self.reprieve(site, &[], &[], &|_| true, budget).is_some() {
            return true;
        }
        let left = left_in_sum(site.node, site.node.view(), |_| true);
        let is_asked = left < asked_in_sum(site.request) || self.config.preempt_scattered;
        is_asked
            && site.pod.preempts
            && self
                .preempt(site.pod, site.name, &[], &|_| false, budget, now)
                .is_some()
    }

    /// The least that would have to leave these cards of a node, not more than `most`, and where it would go.
    fn moves_on(
        &self,
        site: &Site<'_>,
        only: &[usize],
        spared: &HashSet<Uid>,
        most: Option<Mib>,
        now: Duration,
        looks: &mut usize,
    ) -> Option<Moves> {
        let mut may = self.movable(site, only);
        may.retain(|(_, pod)| !spared.contains(&pod.uid));
        let weights = may.iter().map(|(mib, _)| *mib).collect();
        for (sum, set) in Sets::new(weights).take(SETS) {
            if most.is_some_and(|most| sum > most) || *looks == 0 {
                return None;
            }
            *looks -= 1;
            let pods: Vec<_> = set.iter().rev().map(|&index| &may[index].1).collect();
            let gone: HashSet<_> = pods.iter().map(|pod| pod.uid.clone()).collect();
            let mut budget = Budget::all();
            let is_one = |card: usize| only.contains(&card);
            let Some(choice) = self.fits_on(site, &gone, &is_one, &mut budget) else {
                continue;
            };
            let charges = choice.placement.charges;
            let is_gone = |uid: &str| gone.contains(uid);
            let then = self.view_without(site.name, site.node, site.pod, is_gone, &mut budget);
            let mut left = Left {
                name: site.name,
                then: then.ok()?,
            };
            take(&mut left.then, &charges, site.pod);
            let mut taken = Vec::new();
            if self.find_places(&left, &pods, &mut taken, now, looks) {
                let moves = taken.into_iter().filter_map(|it| self.move_to(&it));
                return Some(Moves {
                    node: self.books.named_node(site.name)?.0.clone(),
                    cards: by_uuid(site.node, &charges),
                    moves: moves.collect(),
                });
            }
        }
        None
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
    fn movable(&self, site: &Site<'_>, only: &[usize]) -> Vec<(Mib, Arc<PodFacts>)> {
        let holds = |pod: &Arc<PodFacts>| {
            let hold = site.node.bound().get(&pod.uid)?;
            let mut cards = only.iter().map(|&card| hold.on(site.node.uuid(card)));
            cards.any(|mib| mib > Mib::ZERO).then_some(())?;
            let assignment = pod.assignment.as_ref()?.as_ref().ok()?;
            Some(assignment.charges.iter().map(|(_, mib)| *mib).sum())
        };
        let may = |pod: &Arc<PodFacts>| {
            let ends = pod.deleting || pod.released;
            let one = pod.movable.is_some() && pod.group.is_none() && pod.request.is_ok();
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
        now: Duration,
        looks: &mut usize,
    ) -> bool {
        let Some((pod, others)) = pods.split_first() else {
            return true;
        };
        let mut found = Vec::new();
        for (name, node) in self.nodes_by_name() {
            if *looks == 0 {
                return false;
            }
            *looks -= 1;
            found.extend(self.places_on(left, name, node, pod, taken, now));
        }
        found.sort_unstable_by(|(cost, it), (other_cost, other)| {
            (cost, it.node, &it.charges).cmp(&(other_cost, other.node, &other.charges))
        });
        for (_, place) in found {
            taken.push(place);
            if self.find_places(left, others, taken, now, looks) {
                return true;
            }
            taken.pop();
        }
        false
    }

    /// Where on one node a successor of the pod would fit beside what is taken already.
    fn places_on<'a>(
        &'a self,
        left: &Left<'_>,
        name: &'a Arc<str>,
        node: &'a Node,
        pod: &'a Arc<PodFacts>,
        taken: &[Taken<'a>],
        now: Duration,
    ) -> Vec<(gpustow_pack::Cost, Taken<'a>)> {
        let view = || {
            let site = self.site(pod, name, now)?;
            let here = || taken.iter().filter(|it| *it.node == *name);
            let pods = node.facts().and_then(|facts| facts.pods);
            let more = node.count() + here().count() as u64;
            let refused = self.refused_in_tree(name, pod).is_some();
            if refused || pods.is_some_and(|pods| more >= pods) {
                return None;
            }
            let mut budget = Budget::all();
            let mut view = self
                .view_without(name, node, pod, |_| false, &mut budget)
                .ok()?;
            if **name == *left.name {
                // Nothing that is freed, and nothing that the pod gets which waits.
                for (card, then) in view.cards.iter_mut().zip(&left.then.cards) {
                    card.free = card.free.min(then.free);
                }
                view.cpu_free_milli = view.cpu_free_milli.min(left.then.cpu_free_milli);
                view.ram_free = view.ram_free.min(left.then.ram_free);
            }
            for it in here() {
                take(&mut view, &it.charges, it.pod);
            }
            let short =
                view.cpu_free_milli < site.request.cpu_milli || view.ram_free < site.request.ram;
            (!short && self.scores.fit(&view, site.request).is_ok()).then_some((site, view))
        };
        let Some((site, view)) = view() else {
            return Vec::new();
        };
        let fits = |only: Vec<usize>| {
            let mut view = view.clone();
            for (index, card) in view.cards.iter_mut().enumerate() {
                card.usable &= only.contains(&index);
            }
            let choice = self.scores.fit(&view, site.request).ok()?;
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
    for &(card, mib) in charges {
        if let Some(card) = view.cards.get_mut(card) {
            card.free = card.free.minus(mib);
        }
    }
    if let Ok(request) = &pod.request {
        view.cpu_free_milli = view.cpu_free_milli.saturating_sub(request.cpu_milli);
        view.ram_free = view.ram_free.minus(request.ram);
    }
}

fn by_uuid(node: &Node, charges: &[(usize, Mib)]) -> Cards {
    let charges = charges.iter();
    let by_uuid = charges.map(|&(card, mib)| (node.uuid(card).into(), mib));
    by_uuid.collect()
}

/// Among which sets of a node's cards a place for the pod is looked for: all of as many cards as its one claim wants, or
/// one set of all cards, of which the policy chooses.
fn sets_of_cards(site: &Site<'_>) -> Vec<Vec<usize>> {
    let all = site.node.gpus().len();
    let [claim] = site.request.claims.as_slice() else {
        return vec![(0..all).collect()];
    };
    let mut sets = vec![Vec::new()];
    for _ in 0..claim.gpus {
        let longer = |set: &Vec<usize>| {
            let next = set.last().map_or(0, |last| last + 1);
            let set = set.clone();
            (next..all).map(move |card| [&set[..], &[card]].concat())
        };
        sets = sets.iter().flat_map(longer).collect();
        if sets.len() > CHOICES {
            return vec![(0..all).collect()];
        }
    }
    sets
}

/// Sets of things by what they weigh together, the lightest first; the weights are in ascending order.
struct Sets {
    weights: Vec<Mib>,
    next: BinaryHeap<Reverse<(Mib, usize, Vec<usize>)>>,
}

impl Sets {
    fn new(weights: Vec<Mib>) -> Self {
        let first = weights.first().map(|&mib| Reverse((mib, 1, vec![0])));
        Self {
            next: first.into_iter().collect(),
            weights,
        }
    }
}

impl Iterator for Sets {
    type Item = (Mib, Vec<usize>);

    fn next(&mut self) -> Option<Self::Item> {
        let Reverse((sum, count, set)) = self.next.pop()?;
        let (&last, rest) = set.split_last()?;
        if let Some(&mib) = self.weights.get(last + 1) {
            let longer = [&set[..], &[last + 1]].concat();
            let other = [rest, &[last + 1]].concat();
            let without = sum.minus(self.weights[last]);
            self.next.push(Reverse((sum + mib, count + 1, longer)));
            self.next.push(Reverse((without + mib, count, other)));
        }
        Some((sum, set))
    }
}
