//! Preemption for a pod that free memory is too fragmented for: no card has enough of it, but the node's sum has, so
//! that kube-scheduler, which sees the sum alone, evicts nobody.
//!
//! The ledger chooses who is to end ([`Ledger::preempt_fragmented`]), keeps the room ([`crate::queue`]) and says who of
//! the chosen is needed still ([`Ledger::preemptions`]). It acts on nobody. It waits until kube-scheduler had its
//! chance, and leaves alone for a minute what kube-scheduler's own preemption answers: where a node's sum is short, and
//! pods of lower priority could change that. A pod whose room did not come, or was of no use, has no other end there
//! again, nor elsewhere before a pause. Pods end only on a node that kube-scheduler offered for the pod
//! ([`crate::evidence`]), and what a look may cost is bounded ([`search`]).

mod asking;
mod moves;
mod moving;
mod planning;
mod search;

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_pack::{Choice, Request};

use crate::Ledger;
use crate::books::{Node, Uid};
use crate::budget::Budget;
use crate::earmarks::{Beneficiary, Cause, Earmark, Ended};
use crate::evidence::Evidence;
use crate::known::Known;
use crate::maps::HashSet;
use crate::means::{self, Reserved};
use crate::trial::{Host, Trial};

pub use moves::{Move, Moves};
use moving::Step;
pub(crate) use moving::Tries;
use search::Chosen;
pub(crate) use search::Seen;

/// Kinds of waiting pods that one look thinks of.
const KINDS: usize = 16;
/// Nodes that a question of whether a pod fits elsewhere looks at.
const GAINS: usize = 64;
/// Who of these pods, the most important first, cannot end without breaking a disruption budget.
pub type Broken<'a> = &'a dyn Fn(&[Arc<PodFacts>]) -> Vec<Arc<str>>;

/// kube-scheduler's order: fewest broken budgets, lowest highest priority, smallest sum of priorities, fewest pods, the
/// most important of them started latest.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    broken: usize,
    highest: Option<i32>,
    weights: i128,
    victims: usize,
    started: Reverse<Option<i64>>,
}

impl Rank {
    pub(crate) fn of(victims: &[Arc<PodFacts>], broken: usize) -> Self {
        let priorities = || victims.iter().map(|pod| pod.priority);
        let highest = priorities().max();
        let weights = priorities().map(|priority| i128::from(priority) - i128::from(i32::MIN));
        let tops = victims.iter().filter(|pod| Some(pod.priority) == highest);
        Self {
            broken,
            highest,
            weights: weights.sum(),
            victims: victims.len(),
            started: Reverse(tops.map(|pod| pod.started).min()),
        }
    }
}

type Plan = means::Plan<Rank>;

/// What may be thought of on a node.
struct Site<'a> {
    pod: &'a PodFacts,
    request: &'a Request,
    name: &'a str,
    node: &'a Node,
    /// Those who leave already.
    leaving: HashSet<Uid>,
    /// So do those that the last report shows and that are bound there no more.
    ended: bool,
}

impl Ledger {
    /// Looks after the room that is kept for pods for which others end, and names the pods for which it is to be
    /// decided now who else ends. To be called every second or so.
    pub fn fragmented(&mut self, now: Duration) -> Vec<Arc<PodFacts>> {
        if !self.parts.config.preempt_fragmented && !self.parts.config.moves {
            return Vec::new();
        }
        self.expire(now);
        self.parts.earmarks.forget_controllers(now);
        let all = self.parts.earmarks.all_evictions();
        self.fragmented.keep_looked(&all);
        let mut budget = Budget::of_look();
        self.look_after_gangs(now);
        for uid in self.parts.earmarks.all_evictions_for_pods() {
            self.look_after_fragmented(&uid, now);
            self.look_at_gains(&uid, now, &mut budget);
        }
        self.parts.count_spent(budget.spent());
        let empties = self.emptying(now).is_some();
        self.parts
            .change(|it, books| it.end_needless_replacements(empties, books));
        if !self.parts.config.preempt_fragmented {
            return Vec::new();
        }
        let mut looked = self.fragmented.search(&self.parts);
        self.waits.note_cut(&mut looked.cut);
        for (uid, open) in looked.open {
            self.parts.ask_for_evidence(&uid, open, now);
        }
        for uid in looked.all_tried {
            if let Some(pod) = self.parts.books.pod(&uid) {
                self.parts.earmarks.all_tried(pod, Cause::Preempt, now);
            }
        }
        let gang = self.gang_that_may_preempt(now);
        looked.due.extend(gang);
        looked.due
    }

    /// Pods for which the search for others to end has cost enough since the last call, so that it found none.
    pub fn searches_cut(&mut self) -> Vec<Arc<PodFacts>> {
        let cut = self.waits.take_cut().into_iter();
        cut.filter_map(|uid| self.parts.books.pod(&uid).cloned())
            .collect()
    }

    /// Chooses who is to end for one of the pods that [`Ledger::fragmented`] named, and keeps the room. False if no other
    /// need or can end, or if the search goes on: the next look names the pod again.
    pub fn preempt_fragmented(&mut self, uid: &str, broken: Broken<'_>, now: Duration) -> bool {
        self.parts.now = now;
        if let Some(found) = self.preempt_for_gang(uid, broken, now) {
            return found;
        }
        let chosen = self.fragmented.choose(uid, broken, &self.parts);
        let Some(Chosen { pod, plan, began }) = chosen else {
            return false;
        };
        self.pursue(&pod.uid, Cause::Preempt, plan, now);
        self.fragmented.note_looked(&pod.uid, began);
        true
    }

    /// The pod for which it is to be decided now who moves, if there is one: the first in turn. To be called every second
    /// or so.
    pub fn due_to_move(&mut self, now: Duration) -> Option<Arc<PodFacts>> {
        self.parts.now = now;
        let moving = |uid: &Uid| self.parts.earmarks.find(uid, Cause::Defragment).is_some();
        if !self.parts.config.moves || self.parts.earmarks.all_evictions().iter().any(moving) {
            return None;
        }
        self.moving.due(&self.parts)
    }

    /// Chooses who moves for the pod that [`Ledger::due_to_move`] named, `most` at most and no pod whose end would break
    /// a disruption budget, and keeps the room for it and for their replacements. False if there is no such plan, or if the
    /// search goes on: the next look names the pod again.
    pub fn move_for(&mut self, uid: &str, broken: Broken<'_>, most: usize, now: Duration) -> bool {
        self.parts.now = now;
        let Some(search) = self.moving.take(uid, &self.parts.sight()) else {
            return false;
        };
        let (pod, began) = (search.pod.clone(), search.began());
        let step = self.moving.go_on(search, broken, most, &self.parts);
        match step {
            Step::NotNow => {}
            Step::Nothing => self.parts.earmarks.all_tried(&pod, Cause::Defragment, now),
            Step::Open(open) => self.parts.ask_for_evidence(&pod.uid, open, now),
            Step::Moves(moves) => {
                self.keep_moves(&pod, moves, began, now);
                return true;
            }
        }
        false
    }

    fn keep_moves(&mut self, pod: &PodFacts, moves: Moves, began: u64, now: Duration) {
        let plan = means::Plan {
            rank: (),
            node: moves.node,
            cards: moves.cards,
            waits_for: moves.moves.iter().map(|it| it.pod.uid.clone()).collect(),
            overtakes: Vec::new(),
        };
        self.pursue(&pod.uid, Cause::Defragment, plan, now);
        self.fragmented.note_looked(&pod.uid, began);
        self.keep_replacements(moves.moves, &Beneficiary::Pod(pod.uid.clone()), now);
    }

    /// Keeps the room for the replacements of pods that are evicted.
    pub(crate) fn keep_replacements(
        &mut self,
        moves: Vec<Move>,
        beneficiary: &Beneficiary,
        now: Duration,
    ) {
        let uids: Vec<Uid> = moves.iter().map(|it| it.pod.uid.clone()).collect();
        // One may come when the one before it has gone.
        let until = now + self.sight(now).grace(&uids) + 2 * self.parts.config.reclaim_for;
        for Move {
            pod: of,
            node,
            cards,
            ..
        } in moves
        {
            let Ok(request) = of.asks.readable() else {
                continue;
            };
            let cause = Cause::Replacement;
            let earmark = Earmark::of_cards(&node, cause, request, cards, Vec::new(), until);
            self.parts
                .change(|it, _| it.put_replacement(&of, beneficiary.clone(), earmark));
        }
    }

    /// Does the pod wait though what is free would suffice in sum, and would a node hold it if it were empty? Not if
    /// a pod leaves or may be preempted for it.
    #[must_use]
    pub fn waits_for_fragmented(&self, pod: &Arc<PodFacts>, now: Duration) -> bool {
        self.sight(now).waits_for_fragmented(pod)
    }

    /// What would give room to a pod that waits for pieces; none if nothing would.
    #[must_use]
    pub fn moves_for(&self, pod: &Arc<PodFacts>, now: Duration) -> Option<Moves> {
        self.sight(now).moves_within(pod, &mut Budget::of_plan())
    }

    /// Who is to end now, and for whom.
    #[must_use]
    pub fn preemptions(&self, now: Duration) -> Vec<Reserved> {
        let all = self.parts.earmarks.all_evictions_for_pods();
        let of_pods = all.iter().filter_map(|uid| self.preemption(uid, now));
        let gangs = self.parts.earmarks.gangs_with_evictions();
        let of_gangs = gangs.iter().flat_map(|gang| self.preemptions_of(gang, now));
        of_pods.chain(of_gangs).collect()
    }

    /// The same for one pod, unless it is of a gang.
    #[must_use]
    pub fn preemption(&self, uid: &str, now: Duration) -> Option<Reserved> {
        let earmark = self.parts.earmarks.eviction_for(uid)?;
        let earmark = Some(earmark).filter(|it| it.gang().is_none())?;
        let pod = self.parts.books.pod(uid)?;
        let outdated = self.sight(now).outdated(pod, earmark.node());
        let victims = match outdated.is_some() || self.may_fit_elsewhere(pod, now) {
            true => Vec::new(),
            false => self.sight(now).needed(pod, earmark).unwrap_or_default(),
        };
        Some(Reserved::of(pod, earmark, victims))
    }

    /// Goes on with the look at nodes that gained room since others were chosen to end for the pod: does it fit on one?
    fn look_at_gains(&mut self, uid: &Uid, now: Duration, budget: &mut Budget) {
        let (Some(pod), Some(mut looked)) =
            (self.parts.books.pod(uid), self.fragmented.looked(uid))
        else {
            return;
        };
        for (number, name) in self.parts.queue.gained_since(looked) {
            budget.charge(1);
            if budget.is_spent() || self.sight(now).fits_now_on(name, pod, budget) {
                break;
            }
            looked = number;
        }
        self.fragmented.note_looked(uid, looked);
    }

    /// Does the pod fit on a node that gained room since others were chosen to end for it? True, too, if there are more
    /// such nodes than a question may look at: the next look comes to them.
    fn may_fit_elsewhere(&self, pod: &PodFacts, now: Duration) -> bool {
        let looked = self.fragmented.looked(&pod.uid).unwrap_or_default();
        let mut budget = Budget::of_look();
        let mut gained = self.parts.queue.gained_since(looked).map(|(_, name)| name);
        let first = gained.by_ref().take(GAINS);
        let mut fits = first.map(|name| self.sight(now).fits_now_on(name, pod, &mut budget));
        let fits = fits.any(|fits| fits) || gained.next().is_some();
        self.parts.count_spent(budget.spent());
        fits
    }

    /// What is kept for one pod goes on, or ends.
    fn look_after_fragmented(&mut self, uid: &Uid, now: Duration) {
        let Some(earmark) = self.parts.earmarks.eviction_for(uid) else {
            return;
        };
        let wants = |pod: &Arc<PodFacts>| self.sight(now).wants(pod, earmark);
        let pod = self.parts.books.pod(uid).cloned().filter(wants);
        let how = match pod {
            None => Ended::Gone,
            Some(_) if self.sight(now).check(earmark.node()).is_err() => Ended::Unfit,
            Some(pod) if self.sight(now).needed(&pod, earmark).is_none() => Ended::Late,
            Some(pod) => {
                if let Some(open) = self.sight(now).outdated(&pod, earmark.node()) {
                    self.parts.ask_for_evidence(uid, open, now);
                }
                return;
            }
        };
        self.parts.end(uid, how);
    }
}

impl Known<'_> {
    /// May others end for this pod at all?
    fn may_preempt(&self, pod: &PodFacts) -> bool {
        let waited = self.has_waited(pod, self.config.preempt_after);
        pod.waiting && !pod.queued && waited && self.may_evict_for(Cause::Preempt, pod)
    }

    /// May others be evicted for the pod by this means?
    pub(crate) fn may_evict_for(&self, means: Cause, pod: &PodFacts) -> bool {
        !self.earmarks.pauses_evictions(pod, self.now) && self.not_now(means, pod).is_none()
    }

    /// Those of the chosen without whom the pod would not get its cards. None if it does not get them though all
    /// of them end, or if kube-scheduler refuses the node meanwhile. Pods that are gone have ended, whatever the last report
    /// says that they use: the agent's next report is awaited.
    fn needed(&self, pod: &PodFacts, earmark: &Earmark) -> Option<Vec<Arc<PodFacts>>> {
        let name = earmark.node();
        let mut site = self.site(pod, name)?;
        site.ended = true;
        if self.evidence(pod, name) == Evidence::Rejected {
            return None;
        }
        let cards: Vec<usize> = site
            .node
            .charges(earmark.cards())
            .into_iter()
            .map(|(card, _)| card)
            .collect();
        let chosen = earmark.waits_for().iter();
        let chosen = chosen.filter(|uid| site.node.bound().contains_key(*uid));
        let chosen = chosen.filter_map(|uid| self.books.pod(uid).cloned());
        let mut chosen: Vec<_> = chosen.filter(|pod| !pod.deleting).collect();
        chosen.sort_unstable_by_key(|pod| importance(pod));
        let mut budget = Budget::of(self.config);
        let (victims, _) = self.reprieve(&site, &chosen, &[], Some(&cards), &mut budget)?;
        Some(victims)
    }

    fn plan_of(
        &self,
        site: &Site<'_>,
        victims: Vec<Arc<PodFacts>>,
        broken: usize,
        choice: &Choice,
    ) -> Option<Plan> {
        Some(Plan {
            rank: Rank::of(&victims, broken),
            node: self.books.named_node(site.name)?.0.clone(),
            cards: site.node.by_uuid(&choice.placement.charges),
            waits_for: victims.iter().map(|pod| pod.uid.clone()).collect(),
            overtakes: Vec::new(),
        })
    }

    /// Who of these, given in order of importance, must end for the pod to fit on these cards,
    /// and where it then fits: all of them, less those, the protected first, then the most important, without whose
    /// end it fits. None if it does not fit though all end, or if that took too long to tell.
    fn reprieve(
        &self,
        site: &Site<'_>,
        others: &[Arc<PodFacts>],
        protected: &[Uid],
        only: Option<&[usize]>,
        budget: &mut Budget,
    ) -> Option<(Vec<Arc<PodFacts>>, Choice)> {
        let mut trial = self.trial().without_ended(site.ended);
        trial.leave(site.leaving.iter().cloned());
        trial.leave(others.iter().map(|pod| pod.uid.clone()));
        let fit = |trial: &mut Trial<'_>, budget: &mut Budget| {
            let found = trial.fit(site.pod, site.name, only, Host::Whole, budget);
            found.ok()
        };
        let mut choice = fit(&mut trial, budget)?;
        let (first, then): (Vec<_>, Vec<_>) =
            others.iter().partition(|pod| protected.contains(&pod.uid));
        let mut victims = Vec::new();
        for other in first.into_iter().chain(then) {
            trial.stay(&other.uid);
            match fit(&mut trial, budget) {
                Some(better) => choice = better,
                None if budget.is_spent() => return None,
                None => {
                    trial.leave([other.uid.clone()]);
                    victims.push(other.clone());
                }
            }
        }
        Some((victims, choice))
    }

    /// The node, if it may be thought of at all.
    fn site<'a>(&'a self, pod: &'a PodFacts, name: &'a str) -> Option<Site<'a>> {
        self.check(name).ok()?;
        let node = self.books.node(name).filter(|node| node.facts().is_some());
        Some(Site {
            pod,
            request: pod.asks.request()?,
            name,
            node: node?,
            leaving: self.leaving(name),
            ended: false,
        })
    }
}

/// The most important first, as kube-scheduler has it: high priority, then long life.
pub(crate) fn importance(pod: &PodFacts) -> (Reverse<i32>, i64, Uid) {
    (Reverse(pod.priority), pod.started, pod.uid.clone())
}
