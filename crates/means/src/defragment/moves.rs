//! The choice of pods that move for a waiting pod when enough memory is free, but in pieces. Only pods whose owners
//! allow it move: as few MiB as possible, each to a place that is free now.
//!
//! A pod that moves is evicted, and its controller creates a replacement that goes to the place. No pod moves to room
//! that another move frees. A plan is the least of all if the pod has one claim and each movable pod requests one card.
//! The search must also end within its bounds ([`SETS`], [`DESTINATIONS`], its budget): otherwise it may miss a lesser
//! plan. A pod with a volume that may tie it to its node moves to other cards of that node alone. The search ignores
//! affinity between pods and topology spread. Disruption budgets are checked where the plan is carried out ([`super`]).

use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_books::{Beneficiary, Budget, Cards, Cause, Earmark, Host, Trial, Uid};
use gpustow_pack::{Cost, Mib};

use super::planning::{Planning, Unit, sets_of_cards};
use crate::parts::Parts;
use crate::preempt::Site;
use crate::sight::Sight;

/// Sets of pods that are thought of for one set of cards, the least first.
const SETS: usize = 4096;
/// Nodes with a place for a pod that moves, among which it gets one.
const DESTINATIONS: usize = 16;

/// The moves that would give a pod room.
#[derive(Clone, Debug)]
pub struct Moves {
    /// Where the pod would go.
    pub node: Arc<str>,
    /// The cards that the pod would get, by UUID, with its memory on each.
    pub cards: Cards,
    /// Who would move from there, the largest first.
    pub moves: Vec<Move>,
}

/// A pod that would move.
#[derive(Clone, Debug)]
pub struct Move {
    /// Which.
    pub pod: Arc<PodFacts>,
    /// The memory that the pod holds now, by card of its present node.
    pub from: Cards,
    /// Where its replacement would go.
    pub node: Arc<str>,
    /// The cards that that would get.
    pub cards: Cards,
}

impl Move {
    /// The memory that moves.
    #[must_use]
    pub fn mib(&self) -> Mib {
        self.from.iter().map(|(_, mib)| *mib).sum()
    }
}

impl Moves {
    /// The memory of all moves together.
    #[must_use]
    pub fn mib(&self) -> Mib {
        self.moves.iter().map(Move::mib).sum()
    }

    /// Fewest MiB, then fewest pods; then by name.
    pub(super) fn order(&self) -> impl Ord + '_ {
        (self.mib(), self.moves.len(), &*self.node, &self.cards)
    }
}

impl Sight<'_> {
    /// The least moves off these cards of a node, of at most `most` MiB, with their destinations. None if the budget is
    /// spent: the unit of the planning records where the next look goes on.
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
        let mut then = self.trial();
        then.leave(pods.iter().map(|pod| pod.uid.clone()));
        let choice = then.fit(site.pod, site.name, Some(only), Host::Whole, budget);
        let charges = choice.ok()?.placement.charges;
        then.take(site.pod, site.name, &charges);
        let (name, _) = self.books.named_node(site.name)?;
        // On their own node they get nothing that is freed, and nothing that the pod gets which waits.
        let most = then.left(site.pod, name, budget).ok()?.clone();
        let trial = self.trial().at_most(name, most);
        Some(Moves {
            node: name.clone(),
            cards: site.node.by_uuid(&charges),
            moves: Places::find_all(self, name, false, trial, &pods, budget)?,
        })
    }

    /// The moves by which these pods, the largest first, leave their node for fuller ones. None if they do not fit
    /// there at the same time, or if the budget is spent before the answer.
    pub(crate) fn moves_off(
        &self,
        name: &str,
        pods: &[&Arc<PodFacts>],
        budget: &mut Budget,
    ) -> Option<Vec<Move>> {
        Places::find_all(self, name, true, self.trial(), pods, budget)
    }

    /// The pods that may move from these cards, the smallest first, with the memory that they hold.
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
}

/// Looks for places for pods that leave a node, all at the same time.
struct Places<'k> {
    sight: &'k Sight<'k>,
    from: &'k str,
    /// They go to fuller nodes, for theirs is to be empty.
    empties: bool,
    trial: Trial<'k>,
    found: Vec<Move>,
}

/// A place on a node: its cost, the node's name, and the charged memory by GPU index.
type Place<'k> = (Cost, &'k Arc<str>, Vec<(usize, Mib)>);

impl<'k> Places<'k> {
    fn find_all(
        sight: &'k Sight<'k>,
        from: &'k str,
        empties: bool,
        trial: Trial<'k>,
        pods: &[&Arc<PodFacts>],
        budget: &mut Budget,
    ) -> Option<Vec<Move>> {
        let mut places = Self {
            sight,
            from,
            empties,
            trial,
            found: Vec::new(),
        };
        places.find(pods, budget).then_some(places.found)
    }

    fn find(&mut self, pods: &[&Arc<PodFacts>], budget: &mut Budget) -> bool {
        let Some((pod, others)) = pods.split_first() else {
            return true;
        };
        let sight = self.sight;
        let Some(Ok(held)) = &pod.assignment else {
            return false;
        };
        budget.charge(sight.books.nodes().len() / 8);
        let names = sight.books.nodes().map(|(name, _)| name);
        let is_open = |name: &str| !self.empties || sight.is_fuller(name, self.from);
        let roomy = names.filter(|name| sight.may_fit(name, pod) && is_open(name));
        let mut roomy: Vec<_> = roomy.collect();
        roomy.sort_unstable();
        let mut found = Vec::new();
        let mut destinations = 0;
        for name in roomy {
            if budget.is_spent() {
                return false;
            }
            let places = self.on(name, pod, budget);
            destinations += usize::from(!places.is_empty());
            found.extend(places);
            if destinations == DESTINATIONS {
                break;
            }
        }
        found.sort_unstable();
        for (_, name, charges) in found {
            let mark = self.trial.mark();
            self.trial.take(pod, name, &charges);
            let node = sight.books.node(name);
            self.found.push(Move {
                pod: (*pod).clone(),
                from: held.charges.clone(),
                node: name.clone(),
                cards: node.map_or_else(Cards::new, |node| node.by_uuid(&charges)),
            });
            if self.find(others, budget) {
                return true;
            }
            self.found.pop();
            self.trial.back_to(mark);
        }
        false
    }

    /// The places on one node where a replacement of the pod would fit together with earlier replacements.
    fn on(&mut self, name: &'k Arc<str>, pod: &PodFacts, budget: &mut Budget) -> Vec<Place<'k>> {
        // Its volume may be on its node alone.
        let is_tied = pod.tied && **name != *self.from;
        let refused = self.sight.books.refused_in_tree(name, pod);
        let (is_open, trial) = (!is_tied && refused.is_none(), &mut self.trial);
        let mut fits = || trial.fits(pod, name, Host::Whole, budget) == Some(true);
        let site = self.sight.site(pod, name).filter(|_| is_open && fits());
        let sets = site.map(|site| sets_of_cards(&site)).unwrap_or_default();
        let fits = sets.iter().filter_map(|only| {
            let choice = trial.fit(pod, name, Some(only), Host::Whole, budget);
            let choice = choice.ok()?;
            Some((choice.cost, name, choice.placement.charges))
        });
        fits.collect()
    }
}

impl Parts {
    /// Keeps the room for the replacements of pods that are evicted.
    pub(crate) fn keep_replacements(&mut self, moves: Vec<Move>, beneficiary: &Beneficiary) {
        let uids: Vec<Uid> = moves.iter().map(|it| it.pod.uid.clone()).collect();
        // One may come when the one before it has gone.
        let until = self.now + self.sight().grace(&uids) + 2 * self.config.reclaim_for;
        for Move {
            pod, node, cards, ..
        } in moves
        {
            let Ok(request) = pod.asks.readable() else {
                continue;
            };
            let cause = Cause::Replacement;
            let earmark = Earmark::of_cards(&node, cause, request, cards, Vec::new(), until);
            self.change(|it, _| it.put_replacement(&pod, beneficiary.clone(), earmark));
        }
    }
}
