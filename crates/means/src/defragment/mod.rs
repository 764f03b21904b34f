//! Evicts pods that can run elsewhere, for one that waits for memory which is free in pieces ([`moves`]), or so that a nearly
//! empty node can be removed ([`empty`]): room is kept for the pod and for the replacement of each, until they have come or
//! the time is over. Pods are evicted for one pod at a time.

mod asking;
mod empty;
mod moves;
mod planning;

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_books::{Beneficiary, Budget, Cause, Config, Evidence, HashMap, HashSet, Turn, Uid};

use crate::demand::{Action, Demand, Demands, Purpose, Reserved};
use crate::means::{Makes, Means, Plan, still_evicts};
use crate::parts::Parts;
use crate::preempt::KINDS;
use crate::sight::Sight;
use asking::{Asked, Asking};
pub use empty::Emptying;
use empty::Rounds;
pub use moves::{Move, Moves};
use planning::Planning;

/// The time that a pod must have waited: free pieces may join up by themselves.
const CHANCE: Duration = Duration::from_secs(5);
/// Between two searches for the same pod.
const REST: Duration = Duration::from_secs(30);
/// Plans that one look makes because disruption budgets forbid those before. The next look goes on.
const PLANS: usize = 8;

/// The time that a pod waits for room that others leave, or could be made to leave. Room that has not come by then
/// evidently does not help.
const PATIENCE: Duration = Duration::from_secs(60);

/// A pod that waits.
#[derive(Debug)]
struct Wait {
    since: Duration,
    /// When moves are looked for next.
    next: Duration,
    /// Pods that disruption budgets protect, if the last search found only plans with such pods.
    spared: HashSet<Uid>,
}

/// The state between two looks.
#[derive(Debug, Default)]
pub struct Defragment {
    waits: HashMap<Uid, Wait>,
    /// Where the next look goes on among the kinds that wait.
    after: Option<Turn>,
    asking: Option<Asking>,
    /// The search for moves for a pod that waits for pieces.
    planning: Option<Planning>,
    emptied: Rounds,
}

/// The result of a step of the search.
enum Step {
    /// The search goes on, or begins again later.
    NotNow,
    /// No other pod can be moved for it.
    Nothing,
    /// kube-scheduler leaves it open like this whether it would place the pod.
    Open(Evidence),
    /// These.
    Moves(Moves),
}

impl Means for Defragment {
    fn cause(&self) -> Cause {
        Cause::Defragment
    }

    fn after(&self, config: &Config) -> Option<Duration> {
        config.defragment.then_some(Duration::ZERO)
    }

    fn look(&mut self, parts: &mut Parts, most: usize) {
        parts.look_after_evictions(Cause::Defragment);
        let empties = parts.sight().emptying().is_some();
        parts.change(|it, books| it.end_needless_replacements(empties, books));
        if most == 0 || !parts.config.defragment {
            return;
        }
        let begun = parts.earmarks.evictions_for_pods(Cause::Defragment);
        let planning = match begun.is_empty() {
            true => self.ask(parts),
            false => None,
        };
        match planning {
            Some(planning) => self.plan_moves(planning, most, parts),
            None => self.emptied.go_on(parts, most),
        }
    }

    fn plan(&self, known: &Sight<'_>, pod: &Arc<PodFacts>, budget: &mut Budget) -> Option<Makes> {
        let moves = known.moves_within(pod, budget)?;
        let pods = moves.moves.iter().map(|it| it.pod.uid.clone());
        Some((moves.node, pods.collect()))
    }

    fn reserved(&self, sight: &Sight<'_>) -> Vec<Reserved> {
        sight.evictions(Cause::Defragment)
    }

    fn demand(&self, sight: &Sight<'_>, all: &mut Demands) {
        all.evict(self.reserved(sight), Action::Evict);
        let Some(Emptying { node, moves }) = sight.emptying() else {
            return;
        };
        all.all.extend(moves.into_iter().map(|it| Demand {
            victim: it.pod,
            cause: Cause::Defragment,
            action: Action::Evict,
            node: node.clone(),
            purpose: Purpose::Autoscaler,
            gang: None,
            cards: Vec::new(),
        }));
    }

    fn still(&self, sight: &Sight<'_>, demand: &Demand) -> bool {
        if demand.purpose.pod().is_some() {
            return still_evicts(sight, demand);
        }
        let emptying = sight.emptying().filter(|it| it.node == demand.node);
        let mut moves = emptying.iter().flat_map(|it| &it.moves);
        moves.any(|it| it.pod.uid == demand.victim.uid)
    }
}

impl Defragment {
    /// The node is gone: another of its name begins afresh.
    pub fn forget(&mut self, node: &str) {
        self.emptied.forget(node);
    }

    /// The search for moves for the first pod in turn that waits for pieces, if there is one. Goes on with the question.
    fn ask(&mut self, parts: &Parts) -> Option<Planning> {
        let sight = parts.sight();
        let may = |uid: &str| {
            let pod = sight.books.pod(uid);
            pod.is_some_and(|pod| sight.may_be_moved_for(pod)) && sight.asleep(uid).is_some()
        };
        self.waits.retain(|uid, _| may(uid));
        let mut planning = self.planning.take().filter(|it| may(&it.uid));
        self.asking = self.asking.take().filter(|asking| may(&asking.uid));
        let (mut budget, mut kinds) = (Budget::of_look(), KINDS);
        while planning.is_none()
            && let Some(mut asking) = sight.next_asking(self, &mut kinds, &may)
        {
            let Some(pod) = sight.books.pod(&asking.uid) else {
                continue;
            };
            match sight.ask_on(pod, &mut asking, &mut budget) {
                Asked::GoesOn => {
                    self.asking = Some(asking);
                    break;
                }
                Asked::Yes => {
                    let wait = self.waits.get_mut(&asking.uid);
                    let spared = wait.map(|wait| std::mem::take(&mut wait.spared));
                    let nodes = sight.node_names();
                    let mut begun = Planning::new(asking.uid, asking.began, nodes, true);
                    begun.spared = spared.unwrap_or_default();
                    planning = Some(begun);
                }
                Asked::No => {}
            }
        }
        sight.count_spent(budget.spent());
        planning
    }

    /// Goes on with the search for the least moves for a pod, and keeps the room for it and for the replacements.
    fn plan_moves(&mut self, planning: Planning, most: usize, parts: &mut Parts) {
        let sight = parts.sight();
        let Some(pod) = sight.books.pod(&planning.uid).cloned() else {
            return;
        };
        let began = planning.began;
        match self.go_on(&pod, planning, most, &sight) {
            Step::NotNow => {}
            Step::Nothing => parts.all_tried(&pod.uid, Cause::Defragment),
            Step::Open(open) => parts.ask_for_evidence(&pod.uid, open),
            Step::Moves(moves) => {
                let plan = Plan {
                    rank: (),
                    node: moves.node,
                    cards: moves.cards,
                    waits_for: moves.moves.iter().map(|it| it.pod.uid.clone()).collect(),
                    overtakes: Vec::new(),
                };
                parts.pursue(&pod.uid, Cause::Defragment, plan);
                parts.earmarks.note_looked(&pod.uid, began);
                parts.keep_replacements(moves.moves, &Beneficiary::Pod(pod.uid.clone()));
            }
        }
    }

    /// Goes on with the search for the least moves that no disruption budget forbids.
    fn go_on(
        &mut self,
        pod: &Arc<PodFacts>,
        mut planning: Planning,
        most: usize,
        sight: &Sight<'_>,
    ) -> Step {
        let (mut budget, now) = (Budget::of_look(), sight.now);
        let mut found = Step::NotNow;
        planning.most = most;
        while planning.plans < PLANS {
            let before = budget.spent();
            let is_over = sight.plan_on(pod, &mut planning, &mut budget);
            sight.count_spent(budget.spent() - before);
            if !is_over {
                self.planning = Some(planning);
                return Step::NotNow;
            }
            let Some(plan) = planning.best.take() else {
                found = planning.open.map_or(Step::Nothing, Step::Open);
                break;
            };
            let protected = sight.books.protected(plan.moves.iter().map(|it| &it.pod));
            if protected.is_empty() {
                let may = !plan.moves.is_empty() && plan.moves.len() <= most;
                // Nodes may have changed since they were looked at.
                let holds = !planning.is_long || sight.is_plan_still(pod, &plan);
                if may && holds {
                    return Step::Moves(plan);
                }
                break;
            }
            planning = planning.without(protected, sight.node_names());
        }
        // kube-scheduler answers soon where it was asked to try the pod again.
        let goes_on = planning.plans == PLANS;
        let rest = match planning.open.is_some() || goes_on {
            true => CHANCE,
            false => REST,
        };
        if let Some(wait) = self.waits.get_mut(&pod.uid) {
            wait.next = now + rest;
            if goes_on {
                wait.spared = planning.spared;
            }
        }
        found
    }
}

impl Sight<'_> {
    /// The question that is under way, or one for the next kind that is due.
    fn next_asking(
        &self,
        tries: &mut Defragment,
        kinds: &mut usize,
        may: &dyn Fn(&str) -> bool,
    ) -> Option<Asking> {
        if let Some(asking) = tries.asking.take() {
            return Some(asking);
        }
        while *kinds > 0 {
            *kinds -= 1;
            // At the last kind the look ends, and the next one begins with the first again.
            let uid = self.next_without_more(&mut tries.after, 1, may).pop()?;
            let wait = tries.waits.entry(uid.clone()).or_insert_with(|| Wait {
                since: self.now,
                next: self.now + CHANCE,
                spared: HashSet::default(),
            });
            if wait.next <= self.now {
                let patient = self.now.saturating_sub(wait.since) < PATIENCE;
                let began = self.queue.gains();
                return Some(Asking::new(uid, began, self.node_names(), patient));
            }
        }
        None
    }
}

impl Sight<'_> {
    /// May others move for this pod at all?
    fn may_be_moved_for(&self, pod: &PodFacts) -> bool {
        (pod.waiting || pod.queued) && self.may_evict_for(Cause::Defragment, pod)
    }
}
