//! The search for pods that could end for another: one node after the other, and no more in one look than its budget
//! takes. The next look goes on where this one stopped.
//!
//! A *first* round over all nodes tells whether there is a plan at all: only then need disruption budgets be known. A
//! *second* round, over the nodes that had one, takes the best by kube-scheduler's order.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_pack::Mib;

use super::gangs::Waits;
use super::{Broken, KINDS, Plan, Site, importance};
use crate::books::Uid;
use crate::budget::Budget;
use crate::earmarks::Cause;
use crate::evidence::Evidence;
use crate::known::Known;
use crate::maps::HashMap;
use crate::parts::Parts;
use crate::reason::Reason;
use crate::sight::Sight;
use crate::turn::Turn;

/// So long a pod must have waited without room and without a nomination: kube-scheduler had its chance.
const CHANCE: Duration = Duration::from_secs(1);
/// So long it waits for kube-scheduler's own preemption, and for room that pods leave which terminate on other nodes:
/// what has not come by then evidently does not help.
const PATIENCE: Duration = Duration::from_secs(60);
/// A choice that is not gone on with for so long is forgotten.
const IDLE: Duration = Duration::from_secs(10);

/// What is under way between two looks.
#[derive(Debug, Default)]
pub(crate) struct Preempt {
    /// Since when pods have waited for room that is fragmented.
    since: HashMap<Uid, Duration>,
    /// Where the next look goes on among the kinds that wait.
    after: Option<Turn>,
    first: Option<Search>,
    /// The second rounds, with the time when each was gone on with.
    second: HashMap<Uid, (Search, Duration)>,
    /// What the second rounds of that time may still cost.
    budget: Option<(Duration, Budget)>,
    pub(super) gangs: Waits,
}

/// One round over nodes for one pod.
#[derive(Debug)]
struct Search {
    uid: Uid,
    /// Those that are left.
    nodes: Vec<Arc<str>>,
    /// Those that have a plan.
    with_plans: Vec<Arc<str>>,
    /// The clock of gains before the first node was looked at.
    began: u64,
    best: Option<Plan>,
    /// There is a plan where kube-scheduler leaves it open like this whether it would place the pod.
    open: Option<Evidence>,
    /// It has not waited for [`PATIENCE`] yet.
    patient: bool,
    /// It took more than one look.
    is_long: bool,
    /// A node was left out, because one look was not enough for it.
    is_cut: bool,
}

/// What is to be said of one node.
enum Verdict {
    Nothing,
    /// The pod fits there.
    Fits,
    /// It will, without any help of ours: no other ends anywhere meanwhile.
    Served,
    /// There is a plan where kube-scheduler leaves it open like this whether it would place the pod.
    Open(Evidence),
    Plan(Plan),
    /// The budget is spent.
    Spent,
}

/// How a round ends.
enum End {
    GoesOn,
    Fits,
    Served,
    Over,
}

impl Search {
    fn new(uid: Uid, nodes: Vec<Arc<str>>, began: u64, patient: bool) -> Self {
        Self {
            uid,
            nodes,
            with_plans: Vec::new(),
            began,
            best: None,
            open: None,
            patient,
            is_long: false,
            is_cut: false,
        }
    }
}

impl Preempt {
    /// Goes on with the first rounds. The pods for which a plan exists, in turn.
    pub(super) fn search(&mut self, parts: &mut Parts) -> Vec<Arc<PodFacts>> {
        let (now, sight) = (parts.now, parts.sight());
        let may = |uid: &Uid| {
            sight
                .books
                .pod(uid)
                .is_some_and(|pod| sight.may_preempt(pod))
        };
        self.since.retain(|uid, _| may(uid));
        let lasts = |at: Duration| now.saturating_sub(at) < IDLE;
        self.second.retain(|uid, (_, at)| may(uid) && lasts(*at));
        self.first = self.first.take().filter(|search| may(&search.uid));
        let (mut budget, mut kinds) = (Budget::of_look(), KINDS);
        while let Some(mut search) = parts.sight().next_search(self, &mut kinds) {
            match parts
                .sight()
                .go_on(&mut search, &|_| Vec::new(), &mut budget)
            {
                End::GoesOn => {
                    self.first = Some(search);
                    break;
                }
                End::Fits => {
                    self.since.insert(search.uid, now);
                }
                End::Served => {}
                End::Over if search.with_plans.is_empty() => {
                    parts.cut.extend(search.is_cut.then(|| search.uid.clone()));
                    match search.open {
                        Some(open) => parts.ask_for_evidence(&search.uid, open),
                        None => parts.all_tried(&search.uid, Cause::Preempt),
                    }
                }
                End::Over => {
                    let nodes = std::mem::take(&mut search.with_plans);
                    let second = Search::new(search.uid, nodes, search.began, search.patient);
                    self.second.insert(second.uid.clone(), (second, now));
                }
            }
        }
        parts.count_spent(budget.spent());
        let due = self
            .second
            .keys()
            .filter_map(|uid| parts.sight().asleep(uid));
        let mut due: Vec<_> = due.collect();
        due.sort_by_cached_key(|pod| Turn::of(pod));
        due
    }

    /// Goes on with the second round for a pod, and keeps the room if it ends with a plan.
    pub(super) fn preempt_for_pod(
        &mut self,
        parts: &mut Parts,
        uid: &str,
        broken: Broken<'_>,
    ) -> bool {
        let (now, sight) = (parts.now, parts.sight());
        let second = self.second.swap_remove_entry(uid);
        let may = |pod: &&Arc<PodFacts>| sight.may_preempt(pod);
        let Some(((uid, (mut search, _)), _)) = second.zip(sight.books.pod(uid).filter(may)) else {
            return false;
        };
        let left = self.budget.take();
        let left = left.filter(|(at, _)| *at == now).map(|(_, left)| left);
        let mut budget = left.unwrap_or_else(Budget::of_look);
        let before = budget.spent();
        let end = sight.go_on(&mut search, broken, &mut budget);
        sight.count_spent(budget.spent() - before);
        self.budget = Some((now, budget));
        let plan = match end {
            End::Fits | End::Served => None,
            End::GoesOn => {
                self.second.insert(uid, (search, now));
                return false;
            }
            // The node may have changed since it was looked at.
            End::Over if search.is_long => search.best.and_then(|plan| {
                let mut again = Search::new(uid.clone(), vec![plan.node], search.began, false);
                sight.go_on(&mut again, broken, &mut Budget::of_look());
                again.best
            }),
            End::Over => search.best,
        };
        let Some(plan) = plan else {
            return false;
        };
        parts.pursue(&uid, Cause::Preempt, plan);
        parts.earmarks.note_looked(&uid, search.began);
        true
    }
}

impl Sight<'_> {
    /// The round that is under way, or one for the next kind that has waited for long enough.
    fn next_search(&self, seen: &mut Preempt, kinds: &mut usize) -> Option<Search> {
        if let Some(search) = seen.first.take() {
            return Some(search);
        }
        let may = |uid: &str| {
            let pod = self.books.pod(uid);
            pod.is_some_and(|pod| self.may_preempt(pod)) && self.asleep(uid).is_some()
        };
        while *kinds > 0 {
            *kinds -= 1;
            // At the last kind the look ends, and the next one begins with the first again.
            let uid = self.next_without_more(&mut seen.after, may)?;
            let since = *seen.since.entry(uid.clone()).or_insert(self.now);
            let waited = self.now.saturating_sub(since);
            if waited < CHANCE || seen.second.contains_key(&uid) {
                continue;
            }
            let mut nodes = self.node_names();
            // Where an earlier extender began it is looked at first, which is at the end.
            let began = self
                .books
                .pod(&uid)
                .and_then(|pod| pod.reserved_on.as_ref());
            if let Some(at) = nodes.iter().position(|name| Some(name) == began) {
                let last = nodes.len() - 1;
                nodes.swap(at, last);
            }
            let patient = waited < PATIENCE;
            return Some(Search::new(uid, nodes, self.queue.gains(), patient));
        }
        None
    }
}

impl Known<'_> {
    /// Looks at nodes until all are seen or the budget is spent.
    fn go_on(&self, search: &mut Search, broken: Broken<'_>, budget: &mut Budget) -> End {
        let Some(pod) = self.books.pod(&search.uid) else {
            return End::Served;
        };
        while let Some(name) = search.nodes.pop() {
            let is_first = budget.is_whole();
            let verdict = match budget.is_spent() {
                true => Verdict::Spent,
                false => self.verdict(pod, &name, search, broken, budget),
            };
            match verdict {
                Verdict::Nothing => {}
                Verdict::Fits => return End::Fits,
                Verdict::Served => return End::Served,
                Verdict::Open(evidence) => search.open = search.open.max(Some(evidence)),
                Verdict::Plan(plan) => {
                    search.with_plans.push(name.clone());
                    let began = pod.reserved_on.as_ref() == Some(&name);
                    let best = &mut search.best;
                    if best.as_ref().is_none_or(|best| plan < *best) {
                        *best = Some(plan);
                    }
                    if began {
                        search.with_plans = vec![name];
                        return End::Over;
                    }
                }
                // A node that a whole look is not enough for is left out.
                Verdict::Spent if is_first => {
                    search.is_cut = true;
                    return End::GoesOn;
                }
                Verdict::Spent => {
                    search.nodes.push(name);
                    search.is_long = true;
                    return End::GoesOn;
                }
            }
        }
        End::Over
    }

    /// What could be done on one node.
    fn verdict(
        &self,
        pod: &Arc<PodFacts>,
        name: &Arc<str>,
        search: &Search,
        broken: Broken<'_>,
        budget: &mut Budget,
    ) -> Verdict {
        budget.charge(1);
        let evidence = self.evidence(pod, name);
        if evidence == Evidence::Rejected && !search.patient {
            return Verdict::Nothing;
        }
        let Some(site) = self.site(pod, name) else {
            return Verdict::Nothing;
        };
        let bound = site.node.bound();
        budget.charge(bound.len() / 8);
        if self.may_fit(name, pod) && evidence != Evidence::Rejected {
            match self.trial().choose(pod, name, budget) {
                Ok(_) => return Verdict::Fits,
                Err(Reason::NotYet) => return Verdict::Spent,
                Err(_) => {}
            }
        }
        if self.books.refused_in_tree(name, pod).is_some() || self.earmarks.avoids_node(pod, name) {
            return Verdict::Nothing;
        }
        let may_come = !site.leaving.is_empty() && evidence != Evidence::Rejected;
        if may_come && let Some((_, choice)) = self.reprieve(&site, &[], &[], None, budget) {
            // The pods that terminate make the room: the node is left out.
            let began = pod.reserved_on.as_ref() == Some(name);
            let plan = || self.plan_of(&site, Vec::new(), 0, &choice);
            return match began.then(plan).flatten() {
                Some(plan) => Verdict::Plan(plan),
                None if search.patient => Verdict::Served,
                None => Verdict::Nothing,
            };
        }
        // For a pod of a PodGroup kube-scheduler asks no extender for victims.
        if evidence == Evidence::Short && !self.books.comes_alone(pod) {
            let pods = bound.keys().filter_map(|uid| self.books.pod(uid));
            let mut pods = pods.filter(|pod| !pod.deleting);
            let helps = search.patient
                && pods.any(|other| other.priority < pod.priority)
                && self.preempt(pod, name, &[], &|_| false, budget).is_some();
            return match helps {
                true => Verdict::Served,
                false if budget.is_spent() => Verdict::Spent,
                false => Verdict::Nothing,
            };
        }
        let is_known = self.was_offered(pod, name);
        if !is_known && (!evidence.is_open() || search.open >= Some(evidence)) {
            return Verdict::Nothing;
        }
        let plans = self.plans_on(&site, broken, budget);
        let best = plans.into_iter().min();
        match best {
            _ if budget.is_spent() => Verdict::Spent,
            Some(plan) if is_known => Verdict::Plan(plan),
            Some(_) => Verdict::Open(evidence),
            None => Verdict::Nothing,
        }
    }

    /// The best plan on one node.
    pub(crate) fn plan_preempt(
        &self,
        pod: &PodFacts,
        name: &str,
        budget: &mut Budget,
    ) -> Option<Plan> {
        let site = self.site(pod, name)?;
        let plans = self.plans_on(&site, &|_| Vec::new(), budget);
        plans.into_iter().min()
    }

    /// Who could end on one node: for each of its cards, or for all of them where the pod asks for several.
    fn plans_on(&self, site: &Site<'_>, broken: Broken<'_>, budget: &mut Budget) -> Vec<Plan> {
        let mut lower = self.books.evictable(site.name, site.pod.priority);
        budget.charge(lower.len());
        if lower.is_empty() {
            return Vec::new();
        }
        lower.sort_unstable_by_key(|pod| importance(pod));
        let (sites, mib): (Vec<Option<usize>>, _) = match site.request.claims.as_slice() {
            [claim] if claim.gpus <= 1 => {
                let cards = 0..site.node.gpus().len();
                (cards.map(Some).collect(), claim.mib)
            }
            _ => (vec![None], Mib::ZERO),
        };
        let mut plans = Vec::new();
        for card in sites {
            let holds = |pod: &Arc<PodFacts>| {
                card.is_none_or(|card| {
                    let hold = site.node.bound().get(&pod.uid);
                    hold.is_some_and(|hold| hold.on(site.node.uuid(card)) > Mib::ZERO)
                })
            };
            let others = lower.iter().filter(|pod| holds(pod)).cloned();
            let others: Vec<_> = others.collect();
            if others.is_empty() || !self.could_take(site, card, mib, &others) {
                continue;
            }
            let only = card.as_ref().map(std::slice::from_ref);
            let protected = broken(&others);
            let found = self.reprieve(site, &others, &protected, only, budget);
            let plan = found.and_then(|(victims, choice)| {
                let is_it = |pod: &&Arc<PodFacts>| protected.contains(&pod.uid);
                let broken = victims.iter().filter(is_it).count();
                self.plan_of(site, victims, broken, &choice)
            });
            plans.extend(plan);
        }
        plans
    }

    /// Is the card large enough for so much if all of these leave it? Asked before a fit, which costs more.
    fn could_take(
        &self,
        site: &Site<'_>,
        card: Option<usize>,
        mib: Mib,
        others: &[Arc<PodFacts>],
    ) -> bool {
        let Some(card) = card else {
            return true;
        };
        let goes =
            |uid: &str| site.leaving.contains(uid) || others.iter().any(|other| *other.uid == *uid);
        let view = site.node.view().cards.get(card);
        view.is_some_and(|view| {
            let stays = site.node.held(site.node.uuid(card), |uid| !goes(uid));
            view.usable && view.capacity.minus(stays) >= mib
        })
    }
}
