//! Which pods of lower priority must finish so that enough of a gang fits at the same time.
//!
//! One plan is for the whole gang. Pods that are disrupted together are one [`Unit`]. The search spares a unit whose
//! end would break a disruption budget. Of a few units it tries every combination, by kube-scheduler's order of
//! victims. Of more units it spares the most important first, as kube-scheduler does. The cost of a plan is bounded.

use std::sync::Arc;

use gpustow_api::intree::Constraints;
use gpustow_api::{Group, PodFacts};
use gpustow_books::{Budget, Evidence, HashMap, HashSet, Node, Uid};
use gpustow_pack::Mib;

use crate::gangs::{Member, Roll, Seats};
use crate::preempt::{Rank, importance};
use crate::sight::Sight;

/// Nodes that a plan may use, in addition to one for each pod of the gang.
const NODES: usize = 16;
/// Pods of a gang for which others finish, at most, and sets of constraints that these have.
const PODS: usize = 256;
const KINDS: usize = 16;
/// So few units are tried in every combination.
const FEW: usize = 8;
/// Fits that one plan may try, in all looks together.
const FITS: usize = 4096;
/// Fits that one plan may try for each pod of a large gang.
const FITS_OF_POD: usize = 32;

/// Fits that the plan for a gang of `pods` pods may try.
fn most_fits(pods: usize) -> usize {
    FITS.max(FITS_OF_POD * pods)
}

/// The result of a look for a plan.
pub(super) enum Found {
    Plan(Plan),
    Nothing,
    /// kube-scheduler leaves it open like this whether it would place the pods where others could finish.
    Open(Evidence),
    /// The next look goes on.
    GoesOn,
}

/// Who is to finish for a gang, and where its pods then go.
pub(super) struct Plan {
    pub(super) seats: Seats,
    pub(super) victims: Vec<Arc<PodFacts>>,
    /// Pods that terminate already.
    pub(super) leaving: HashSet<Uid>,
}

/// A search for victims that goes on from one look to the next: first over all nodes, then over sets of units.
#[derive(Debug)]
pub(super) struct Hunt {
    pub(super) gang: Group,
    /// Nodes that were not looked at yet: the first of them all.
    left: usize,
    nodes: Vec<(Price, Arc<str>)>,
    open: Option<Evidence>,
    tried: Tried,
}

/// Sets of units that were tried.
#[derive(Debug, Default)]
struct Tried {
    units: Vec<Vec<Uid>>,
    leaving: HashSet<Uid>,
    /// By their units: do enough pods fit without them?
    sets: HashMap<Vec<usize>, bool>,
    fits: usize,
}

/// The rough cost of room on a node: whether pods must go, the lowest priority of the candidates, and their number.
type Price = (bool, Option<i32>, usize);

/// Does the gang have more pods, or more kinds of them, than one looks for victims for?
pub(super) fn is_too_large(roll: &Roll) -> bool {
    let kinds = roll.open().iter().map(|pod| &*pod.constraints);
    let kinds: HashSet<&Constraints> = kinds.collect();
    roll.open().len() > PODS || kinds.len() > KINDS
}

impl Hunt {
    /// Did the search end because the plan had cost enough?
    pub(super) fn is_cut(&self, roll: &Roll) -> bool {
        self.tried.fits >= most_fits(roll.open().len())
    }

    pub(super) fn of(gang: &Group, sight: &Sight<'_>) -> Self {
        Self {
            gang: gang.clone(),
            left: sight.books.nodes().len(),
            nodes: Vec::new(),
            open: None,
            tried: Tried::default(),
        }
    }
}

/// Pods that are disrupted together.
type Unit = Vec<Arc<PodFacts>>;

/// A search for victims among the units of the nodes that were chosen.
struct Search<'s, 'p> {
    sight: &'s Sight<'s>,
    members: Vec<Member<'p>>,
    wanted: usize,
    units: Vec<Unit>,
    tried: &'s mut Tried,
    budget: &'s mut Budget,
    /// No set was tried in this look yet.
    is_first: bool,
    /// The budget is spent.
    is_cut: bool,
}

impl Sight<'_> {
    /// Goes on to search who is to finish for the gang.
    pub(super) fn victims_for(&self, hunt: &mut Hunt, roll: &Roll, budget: &mut Budget) -> Found {
        let priorities = roll.open().iter().map(|pod| pod.priority);
        let priority = priorities.min().unwrap_or(i32::MIN);
        if !self.see_nodes(hunt, roll, priority, budget) {
            return Found::GoesOn;
        }
        let gang = &hunt.gang;
        let mut open = hunt.open;
        let nodes: Vec<Arc<str>> = hunt.nodes.iter().map(|(_, name)| name.clone()).collect();
        let alike = self.books.members(gang).count();
        budget.charge(nodes.len() * (8 + alike) / 8);
        let members = self.members_of(gang, roll, &nodes, &mut open);
        let units = self.units_on(&nodes, gang, priority);
        budget.charge(units.iter().map(Vec::len).sum());
        let leaving: HashSet<Uid> = nodes.iter().flat_map(|name| self.leaving(name)).collect();
        let uids = |unit: &Unit| unit.iter().map(|pod| pod.uid.clone()).collect();
        let uids: Vec<Vec<Uid>> = units.iter().map(uids).collect();
        let tried = &mut hunt.tried;
        if tried.units != uids || tried.leaving != leaving {
            (tried.units, tried.leaving) = (uids, leaving.clone());
            tried.sets.clear();
        }
        let mut search = Search {
            sight: self,
            members,
            wanted: roll.wanted(),
            units,
            tried,
            budget,
            is_first: true,
            is_cut: false,
        };
        let Some(victims) = search.victims() else {
            return match open {
                _ if search.is_cut => Found::GoesOn,
                Some(open) => Found::Open(open),
                None => Found::Nothing,
            };
        };
        let mut gone = leaving.clone();
        gone.extend(victims.iter().map(|pod| pod.uid.clone()));
        match search.seats_without(&gone) {
            Some(seats) if seats.count() >= search.wanted => Found::Plan(Plan {
                seats,
                victims,
                leaving,
            }),
            // The nodes have changed since.
            Some(_) => {
                search.tried.sets.clear();
                Found::GoesOn
            }
            None => Found::GoesOn,
        }
    }

    /// The pods, each with the nodes that are for it.
    fn members_of<'p>(
        &self,
        gang: &Group,
        roll: &'p Roll,
        nodes: &[Arc<str>],
        open: &mut Option<Evidence>,
    ) -> Vec<Member<'p>> {
        let mut members = Vec::new();
        let mut known: HashMap<&Arc<Constraints>, Arc<[Arc<str>]>> = HashMap::default();
        for pod in roll.open() {
            let mut look = || -> Arc<[Arc<str>]> {
                let mut among = Vec::new();
                for name in nodes {
                    match self.is_for_member(gang, pod, name) {
                        Evidence::Offered => among.push(name.clone()),
                        it if it.is_open() => *open = (*open).max(Some(it)),
                        _ => {}
                    }
                }
                among.into()
            };
            // kube-scheduler's answer is equal for pods with the same constraints, unless one was tried.
            let among = match self.shown.tried(&pod.uid) {
                Some(_) => look(),
                None => known.entry(&pod.constraints).or_insert_with(look).clone(),
            };
            members.push(Member::among(pod, among));
        }
        members
    }

    /// Goes on to look at nodes that a plan may use, and at whether others could be used if kube-scheduler would place the
    /// pods there. False if some are left.
    fn see_nodes(&self, hunt: &mut Hunt, roll: &Roll, priority: i32, budget: &mut Budget) -> bool {
        if hunt.left == 0 {
            return true;
        }
        let gang = &hunt.gang;
        let requests = roll.open().iter().filter_map(|pod| pod.asks.request());
        let least = requests.filter_map(|request| Some(request.hardest()?.mib));
        let least = least.min().unwrap_or_default();
        let mut kinds: Vec<&Arc<PodFacts>> = Vec::new();
        for pod in roll.open() {
            let is_known = |kind: &&Arc<PodFacts>| kind.constraints == pod.constraints;
            if !kinds.iter().any(is_known) {
                kinds.push(pod);
            }
        }
        let alike = kinds.len() * self.books.members(gang).count();
        while hunt.left > 0 {
            if budget.is_spent() {
                return false;
            }
            hunt.left -= 1;
            let Some((name, node)) = self.books.nth_node(hunt.left) else {
                continue;
            };
            budget.charge(1 + alike / 8);
            let failed = |pod: &Arc<PodFacts>| self.earmarks.avoids_node(pod, name);
            let is_there = node.facts().is_some() && self.check(name).is_ok();
            if !is_there || roll.open().iter().any(failed) {
                continue;
            }
            let mut evidence = kinds.iter().map(|pod| self.is_for_member(gang, pod, name));
            if evidence.any(|it| it == Evidence::Offered) {
                budget.charge(node.bound().len());
                let price = self.price(node, priority, least);
                hunt.nodes.extend(price.map(|price| (price, name.clone())));
            } else {
                let evidence = kinds.iter().map(|pod| self.is_for_member(gang, pod, name));
                let open = evidence.filter(|it| it.is_open()).max();
                hunt.open = hunt.open.max(open);
            }
        }
        hunt.nodes.sort_unstable();
        hunt.nodes.truncate(NODES + roll.open().len());
        true
    }

    /// The rough cost of room on a node. None if no pod of the gang would fit there even without all pods that may go.
    /// Such a node must not take another's place.
    fn price(&self, node: &Node, priority: i32, least: Mib) -> Option<Price> {
        let bound = node.bound().keys().filter_map(|uid| self.books.pod(uid));
        let goes = |pod: &&Arc<PodFacts>| {
            let unit = || self.books.disrupted_with(pod);
            pod.deleting
                || pod.priority < priority
                    && unit().is_some_and(|unit| {
                        unit.iter().all(|it| it.priority < priority)
                            && self.books.protected(&unit).is_empty()
                    })
        };
        let lower: Vec<&Arc<PodFacts>> = bound.filter(goes).collect();
        let has_room = node.view().largest() >= least;
        let may_have = || {
            let stays = |uid: &str| lower.iter().all(|pod| *pod.uid != *uid);
            !lower.is_empty() && node.view_of(stays).largest() >= least
        };
        (has_room || may_have()).then(|| {
            let priorities = lower.iter().map(|pod| pod.priority);
            (!has_room, priorities.min(), lower.len())
        })
    }

    /// The pods of lower priority on these nodes that may be disrupted, the most important first.
    fn units_on(&self, nodes: &[Arc<str>], gang: &Group, priority: i32) -> Vec<Unit> {
        let evicted = self.earmarks.all_evictions();
        let evicted = evicted
            .iter()
            .filter_map(|uid| self.earmarks.eviction_for(uid));
        let evicted: HashSet<&Uid> = evicted.flat_map(|it| it.waits_for()).collect();
        let may = |pod: &Arc<PodFacts>| {
            pod.priority < priority
                && pod.assignment.is_some()
                && !evicted.contains(&pod.uid)
                && pod.group.as_ref() != Some(gang)
        };
        let mut seen: HashSet<Uid> = HashSet::default();
        let mut units = Vec::new();
        for name in nodes {
            let bound = self.books.node(name).into_iter();
            for uid in bound.flat_map(|node| node.bound().keys()) {
                let Some(pod) = self.books.pod(uid).filter(|pod| !pod.deleting && may(pod)) else {
                    continue;
                };
                if seen.contains(uid) {
                    continue;
                }
                let Some(mut unit) = self.books.disrupted_with(pod) else {
                    continue;
                };
                unit.retain(|pod| !pod.deleting);
                seen.extend(unit.iter().map(|pod| pod.uid.clone()));
                if unit.iter().all(may) && self.books.protected(&unit).is_empty() {
                    unit.sort_unstable_by_key(|pod| importance(pod));
                    units.push(unit);
                }
            }
        }
        units.sort_unstable_by_key(|unit| unit.first().map(|pod| importance(pod)));
        units
    }
}

impl Search<'_, '_> {
    fn victims(&mut self) -> Option<Vec<Arc<PodFacts>>> {
        // Room that pods leave which terminate already is waited for.
        if self.fits_without(&[]) || self.is_cut {
            return None;
        }
        // Before any part of them is tried: do all of them suffice?
        let all: Vec<usize> = (0..self.units.len()).collect();
        if !self.fits_without(&all) {
            return None;
        }
        let best = match self.units.len() {
            0..=FEW => self.best_of_few(&all),
            _ => None,
        };
        match best {
            None if !self.is_cut => self.best_of_many(),
            best => best,
        }
    }

    fn victims_of(&self, units: &[usize]) -> Vec<Arc<PodFacts>> {
        let pods = units.iter().flat_map(|unit| &self.units[*unit]);
        let mut pods: Vec<_> = pods.cloned().collect();
        pods.sort_unstable_by_key(|pod| importance(pod));
        pods
    }

    /// Do enough pods fit without these units? False, too, if that is not known yet.
    fn fits_without(&mut self, units: &[usize]) -> bool {
        if let Some(fits) = self.tried.sets.get(units) {
            return *fits;
        }
        if self.is_over() {
            return false;
        }
        let mut gone = self.tried.leaving.clone();
        let pods = units.iter().flat_map(|unit| &self.units[*unit]);
        gone.extend(pods.map(|pod| pod.uid.clone()));
        let Some(seats) = self.seats_without(&gone) else {
            return false;
        };
        let fits = seats.count() >= self.wanted;
        self.tried.sets.insert(units.to_vec(), fits);
        fits
    }

    /// Has the plan cost enough, or this look?
    fn is_over(&self) -> bool {
        self.is_cut || self.tried.fits >= most_fits(self.members.len())
    }

    /// Seats without these pods. None if the search takes more than this look has left. The first search of a look gets
    /// a whole budget, and its seats count even if it was cut.
    fn seats_without(&mut self, gone: &HashSet<Uid>) -> Option<Seats> {
        let is_first = std::mem::take(&mut self.is_first);
        // However much the look has spent on nodes, it comes forward.
        let mut budget = match is_first {
            true => Budget::of_look(),
            false => Budget::of_rest(self.budget),
        };
        let (sight, members) = (self.sight, self.members.clone());
        let seats = sight.seats_for_all(members, self.wanted, gone, &mut budget);
        self.budget.charge_spent(&budget);
        self.tried.fits += seats.fits();
        self.is_cut = seats.is_cut() && seats.count() < self.wanted && !is_first;
        (!self.is_cut).then_some(seats)
    }

    /// The best of all combinations. None, too, if budgets allow none or the plan has cost enough.
    fn best_of_few(&mut self, all: &[usize]) -> Option<Vec<Arc<PodFacts>>> {
        let count = self.units.len();
        let set =
            |mask: u32| -> Vec<usize> { (0..count).filter(|it| mask >> it & 1 == 1).collect() };
        // No combination does without a unit without which all others do not suffice.
        let mut needed = 0;
        for unit in all {
            let others: Vec<usize> = all.iter().copied().filter(|it| it != unit).collect();
            needed |= u32::from(!self.fits_without(&others)) << unit;
            if self.is_over() {
                return None;
            }
        }
        let masks = (1..1_u32 << count).filter(|mask| needed & !mask == 0);
        let ranked = masks.map(|mask| {
            let victims = self.victims_of(&set(mask));
            let names: Vec<Uid> = victims.iter().map(|pod| pod.uid.clone()).collect();
            (Rank::of(&victims, 0), names, mask)
        });
        let mut ranked: Vec<_> = ranked.collect();
        ranked.sort_unstable();
        let mut too_few: Vec<u32> = Vec::new();
        for (_, _, mask) in ranked {
            let victims = self.victims_of(&set(mask));
            let is_more = |known: &u32| mask & !known == 0;
            if too_few.iter().any(is_more) || !self.sight.books.protected(&victims).is_empty() {
                continue;
            }
            if self.fits_without(&set(mask)) {
                return Some(victims);
            }
            if self.is_over() {
                return None;
            }
            too_few.push(mask);
        }
        None
    }

    /// Spares the most important that need not finish. Units that would break a budget together with less important ones
    /// are spared before.
    fn best_of_many(&mut self) -> Option<Vec<Arc<PodFacts>>> {
        let mut gone: Vec<usize> = Vec::new();
        for unit in (0..self.units.len()).rev() {
            gone.push(unit);
            if !self
                .sight
                .books
                .protected(&self.victims_of(&gone))
                .is_empty()
            {
                gone.pop();
            }
        }
        gone.reverse();
        if !self.fits_without(&gone) {
            return None;
        }
        let mut blocks = vec![gone.clone()];
        while let Some(block) = blocks.pop() {
            let rest: Vec<usize> = gone
                .iter()
                .copied()
                .filter(|it| !block.contains(it))
                .collect();
            if self.fits_without(&rest) {
                gone = rest;
            } else if self.is_over() {
                return None;
            } else if block.len() > 1 {
                let (first, then) = block.split_at(block.len() / 2);
                blocks.push(then.to_vec());
                blocks.push(first.to_vec());
            }
        }
        Some(self.victims_of(&gone))
    }
}
