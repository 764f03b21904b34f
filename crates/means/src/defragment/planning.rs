//! The search for the least moves: one set of pods after the other, and no more in one look than its budget takes. The next
//! look goes on where this one stopped.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_books::{Budget, Cards, Evidence, HashSet, Host, Trial, Uid};
use gpustow_pack::Mib;

use super::{Move, Moves};
use crate::preempt::Site;
use crate::sight::Sight;

/// Sets of cards of one node among which a pod of several gets its own; of more, the policy's choice alone.
const CHOICES: usize = 70;

/// A search under way.
#[derive(Debug)]
pub(super) struct Planning {
    pub(super) uid: Uid,
    /// The clock of gains before the pod was found to fit on no node.
    pub(super) began: u64,
    /// Nodes that are left.
    nodes: Vec<Arc<str>>,
    /// Of the node at the end.
    sets_left: Option<Vec<Vec<usize>>>,
    /// Of the set of cards at the end.
    pub(super) unit: Option<Unit>,
    pub(super) best: Option<Moves>,
    /// Pods that disruption budgets protect.
    pub(super) spared: HashSet<Uid>,
    /// Plans that disruption budgets forbid.
    pub(super) plans: usize,
    /// So many may move at most.
    pub(super) most: usize,
    /// Only on nodes that kube-scheduler offered.
    with_evidence: bool,
    /// There is a plan where kube-scheduler leaves it open like this whether it would place the pod.
    pub(super) open: Option<Evidence>,
    /// It took more than one look.
    pub(super) is_long: bool,
}

/// The sets of pods that could leave one set of cards.
#[derive(Debug)]
pub(super) struct Unit {
    /// The pods that may move, the smallest first, with their memory.
    pub(super) may: Vec<(Mib, Uid)>,
    sets: Sets,
    /// The set at which the last look stopped.
    pub(super) again: Option<(Mib, Vec<usize>)>,
    pub(super) looked: usize,
}

impl Unit {
    pub(super) fn new(may: Vec<(Mib, Uid)>) -> Self {
        Self {
            sets: Sets::new(may.iter().map(|(mib, _)| *mib).collect()),
            may,
            again: None,
            looked: 0,
        }
    }

    pub(super) fn next(&mut self) -> Option<(Mib, Vec<usize>)> {
        if let Some(again) = self.again.take() {
            return Some(again);
        }
        self.looked += 1;
        self.sets.next()
    }
}

impl Planning {
    pub(super) fn new(uid: Uid, began: u64, nodes: Vec<Arc<str>>, with_evidence: bool) -> Self {
        Self {
            uid,
            began,
            nodes,
            sets_left: None,
            unit: None,
            best: None,
            spared: HashSet::default(),
            plans: 0,
            most: usize::MAX,
            with_evidence,
            open: None,
            is_long: false,
        }
    }

    /// The same search from the start, without pods that a disruption budget protects.
    pub(super) fn without(self, protected: Vec<Uid>, nodes: Vec<Arc<str>>) -> Self {
        Self {
            spared: self.spared.into_iter().chain(protected).collect(),
            plans: self.plans + 1,
            most: self.most,
            ..Self::new(self.uid, self.began, nodes, self.with_evidence)
        }
    }

    /// How far it is: nodes, sets of cards and sets of pods.
    fn progress(&self) -> (usize, Option<usize>, Option<usize>) {
        let sets = self.sets_left.as_ref().map(Vec::len);
        let looked = self.unit.as_ref().map(|unit| unit.looked);
        (self.nodes.len(), sets, looked)
    }

    fn leave_node(&mut self) {
        self.nodes.pop();
        (self.unit, self.sets_left) = (None, None);
    }

    fn next_cards(&mut self) -> Option<Vec<usize>> {
        self.sets_left.as_mut()?.pop()
    }
}

impl Sight<'_> {
    /// The moves that would give room to a pod that waits for pieces; none if no moves would.
    pub fn moves_within(&self, pod: &Arc<PodFacts>, budget: &mut Budget) -> Option<Moves> {
        if !self.waits_for_fragmented(pod) {
            return None;
        }
        let mut planning = Planning::new(pod.uid.clone(), 0, self.node_names(), false);
        self.plan_on(pod, &mut planning, budget);
        planning.best
    }

    /// Goes on with the search for the least moves. True at its end.
    pub(super) fn plan_on(
        &self,
        pod: &Arc<PodFacts>,
        planning: &mut Planning,
        budget: &mut Budget,
    ) -> bool {
        let before = budget.is_whole().then(|| planning.progress());
        while let Some(name) = planning.nodes.pop() {
            if !budget.is_spent() && self.plan_on_node(pod, &name, planning, budget) {
                (planning.unit, planning.sets_left) = (None, None);
                continue;
            }
            planning.nodes.push(name);
            planning.is_long = true;
            // A node that a whole look brings no further is left out.
            if before == Some(planning.progress()) {
                planning.leave_node();
            }
            return false;
        }
        true
    }

    /// Does a plan that took several looks hold still?
    pub(super) fn is_plan_still(&self, pod: &Arc<PodFacts>, plan: &Moves) -> bool {
        let budget = &mut Budget::all();
        let stays = |it: &Move| {
            let known = self.books.pod(&it.pod.uid);
            known.is_some_and(|known| !known.deleting && known.assignment == it.pod.assignment)
        };
        self.site(pod, &plan.node).is_some()
            && self.was_offered(pod, &plan.node)
            && plan.moves.iter().all(stays)
            && self.are_places_free(pod, plan, budget).is_some()
    }

    /// None if one of the places of a plan is taken.
    fn are_places_free(&self, pod: &PodFacts, plan: &Moves, budget: &mut Budget) -> Option<()> {
        let come = |trial: &mut Trial<'_>, pod: &PodFacts, node: &str, cards: &Cards| {
            let charges = self.books.node(node)?.charges(cards);
            (charges.len() == cards.len()).then_some(())?;
            let only: Vec<usize> = charges.iter().map(|(card, _)| *card).collect();
            let found = trial.fit(pod, node, Some(&only), Host::Whole, &mut Budget::all());
            found.ok()?;
            trial.take(pod, node, &charges);
            Some(())
        };
        let mut then = self.trial();
        then.leave(plan.moves.iter().map(|it| it.pod.uid.clone()));
        come(&mut then, pod, &plan.node, &plan.cards)?;
        let most = then.left(pod, &plan.node, budget).ok()?.clone();
        let mut trial = self.trial().at_most(&plan.node, most);
        let mut moves = plan.moves.iter();
        moves.try_for_each(|it| come(&mut trial, &it.pod, &it.node, &it.cards))
    }

    /// True if all of the node was looked at.
    fn plan_on_node(
        &self,
        pod: &Arc<PodFacts>,
        name: &Arc<str>,
        planning: &mut Planning,
        budget: &mut Budget,
    ) -> bool {
        budget.charge(1);
        let Some(site) = self.site(pod, name) else {
            return true;
        };
        let is_offered = self.was_offered(pod, name);
        let evidence = self.evidence(pod, name);
        let may = !planning.with_evidence
            || is_offered
            || evidence.is_open() && planning.open < Some(evidence);
        let failed = self.earmarks.avoids_node(pod, name);
        // Where a pod leaves and makes the room, no other moves.
        let comes =
            !site.leaving.is_empty() && self.reprieve(&site, &[], &[], None, budget).is_some();
        if !may || failed || comes || self.books.refused_in_tree(name, pod).is_some() {
            return true;
        }
        if planning.sets_left.is_none() {
            planning.sets_left = Some(sets_of_cards(&site));
        }
        while let Some(only) = planning.next_cards() {
            let most = planning.best.as_ref().map(Moves::mib);
            let found = self.moves_on(&site, &only, planning, most, budget);
            if budget.is_spent() && found.is_none() {
                planning.sets_left.get_or_insert_default().push(only);
                return false;
            }
            planning.unit = None;
            let Some(found) = found.flatten() else {
                continue;
            };
            if planning.with_evidence && !is_offered {
                planning.open = Some(evidence);
                return true;
            }
            let best = &mut planning.best;
            if best
                .as_ref()
                .is_none_or(|best| found.order() < best.order())
            {
                *best = Some(found);
            }
        }
        true
    }
}

/// Among which sets of a node's cards a place for the pod is looked for: all of as many cards as its one claim wants, or
/// one set of all cards, of which the policy chooses.
pub(super) fn sets_of_cards(site: &Site<'_>) -> Vec<Vec<usize>> {
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

/// Sets of things in order of their total weight, the lightest first. The given weights are in ascending order.
#[derive(Debug)]
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
