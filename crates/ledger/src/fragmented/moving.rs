//! Has pods move for one that waits for memory which is free in pieces ([`super::moves`]): room is kept for it and for the
//! replacement of each, until they have come or the time is over. One pod is moved for at a time.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;

use super::asking::{Asked, Asking};
use super::planning::Planning;
use super::{Broken, KINDS, Moves};
use crate::books::Uid;
use crate::budget::Budget;
use crate::earmarks::Cause;
use crate::evidence::Evidence;
use crate::known::Known;
use crate::maps::{HashMap, HashSet};
use crate::parts::Parts;
use crate::sight::Sight;
use crate::turn::Turn;

/// So long a pod must have waited: what is free may be joined up by itself.
const CHANCE: Duration = Duration::from_secs(5);
/// Between two searches for the same pod.
const REST: Duration = Duration::from_secs(30);
/// Plans that one look makes because disruption budgets forbid those before. The next look goes on.
const PLANS: usize = 8;

/// So long the pod waits for room that others leave, or could be made to leave: what has not come by then evidently does
/// not help.
const PATIENCE: Duration = Duration::from_secs(60);
/// A plan that is not gone on with for so long is forgotten.
const IDLE: Duration = Duration::from_secs(10);

/// A pod that waits.
#[derive(Debug)]
struct Wait {
    since: Duration,
    /// When moves are looked for next.
    next: Duration,
    /// Pods that disruption budgets protect, if the last search found nothing but those.
    spared: HashSet<Uid>,
}

/// What is under way between two looks.
#[derive(Debug, Default)]
pub(crate) struct Tries {
    waits: HashMap<Uid, Wait>,
    /// Where the next look goes on among the kinds that wait.
    after: Option<Turn>,
    asking: Option<Asking>,
    /// The pod that waits for pieces, and when its plan was gone on with.
    planning: Option<(Planning, usize, Duration)>,
}

/// The search for the least moves, and how many plans disruption budgets have forbidden.
pub(super) struct Plans {
    pub(super) pod: Arc<PodFacts>,
    planning: Planning,
    plans: usize,
}

impl Plans {
    /// The clock of gains before the pod was found to fit on no node.
    pub(super) fn began(&self) -> u64 {
        self.planning.began
    }
}

/// What came of a step of the search.
pub(super) enum Step {
    /// The search goes on, or begins again later.
    NotNow,
    /// No other pod can be moved for it.
    Nothing,
    /// kube-scheduler leaves it open like this whether it would place the pod.
    Open(Evidence),
    /// These.
    Moves(Moves),
}

impl Tries {
    /// The pod for which it is to be decided now who moves, if there is one: the first in turn.
    pub(super) fn due(&mut self, parts: &Parts) -> Option<Arc<PodFacts>> {
        let (sight, now) = (&parts.sight(), parts.now);
        let may = |uid: &str| {
            let pod = sight.books.pod(uid);
            pod.is_some_and(|pod| sight.may_be_moved_for(pod)) && sight.asleep(uid).is_some()
        };
        self.waits.retain(|uid, _| may(uid));
        let lasts = |at: Duration| now.saturating_sub(at) < IDLE;
        let planning = self.planning.take();
        self.planning = planning.filter(|(planning, _, at)| may(&planning.uid) && lasts(*at));
        self.asking = self.asking.take().filter(|asking| may(&asking.uid));
        let mut budget = Budget::of_look();
        let mut kinds = KINDS;
        while self.planning.is_none()
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
                    let nodes = sight.nodes_to_see();
                    let wait = self.waits.get_mut(&asking.uid);
                    let spared = wait.map(|wait| std::mem::take(&mut wait.spared));
                    let mut planning = Planning::new(asking.uid, asking.began, nodes, true);
                    planning.spared = spared.unwrap_or_default();
                    self.planning = Some((planning, 0, now));
                }
                Asked::No => {}
            }
        }
        parts.count_spent(budget.spent());
        let (planning, ..) = self.planning.as_ref()?;
        sight.books.pod(&planning.uid).cloned()
    }

    /// The search for the least moves for this pod, if it goes on.
    pub(super) fn take(&mut self, uid: &str, sight: &Known<'_>) -> Option<Plans> {
        let is_it = |planning: &Planning| *planning.uid == *uid;
        let (planning, plans, _) = self.planning.take_if(|(it, ..)| is_it(it))?;
        let may = |pod: &&Arc<PodFacts>| sight.may_be_moved_for(pod);
        let pod = sight.books.pod(uid).filter(may)?.clone();
        Some(Plans {
            pod,
            planning,
            plans,
        })
    }

    /// Goes on with the search for the least moves that no disruption budget forbids.
    pub(super) fn go_on(
        &mut self,
        search: Plans,
        broken: Broken<'_>,
        most: usize,
        parts: &Parts,
    ) -> Step {
        let (sight, now) = (&parts.sight(), parts.now);
        let Plans {
            pod,
            mut planning,
            mut plans,
        } = search;
        let mut budget = Budget::of_look();
        let mut found = Step::NotNow;
        planning.most = most;
        while plans < PLANS {
            let before = budget.spent();
            let is_over = sight.plan_on(&pod, &mut planning, &mut budget);
            parts.count_spent(budget.spent() - before);
            if !is_over {
                self.planning = Some((planning, plans, now));
                return Step::NotNow;
            }
            let Some(plan) = planning.best.take() else {
                found = planning.open.map_or(Step::Nothing, Step::Open);
                break;
            };
            let pods: Vec<_> = plan.moves.iter().map(|it| it.pod.clone()).collect();
            let forbidden = broken(&pods);
            if forbidden.is_empty() {
                let may = !pods.is_empty() && pods.len() <= most;
                // Nodes may have changed since they were looked at.
                let holds = !planning.is_long || sight.is_plan_still(&pod, &plan);
                if may && holds {
                    return Step::Moves(plan);
                }
                break;
            }
            plans += 1;
            let spared = planning.spared.into_iter().chain(forbidden).collect();
            let nodes = sight.nodes_to_see();
            planning = Planning::new(pod.uid.clone(), planning.began, nodes, true);
            (planning.spared, planning.most) = (spared, most);
        }
        // kube-scheduler answers soon where it was asked to try the pod again.
        let goes_on = plans == PLANS;
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
        tries: &mut Tries,
        kinds: &mut usize,
        may: &dyn Fn(&str) -> bool,
    ) -> Option<Asking> {
        if let Some(asking) = tries.asking.take() {
            return Some(asking);
        }
        while *kinds > 0 {
            *kinds -= 1;
            // At the last kind the look ends, and the next one begins with the first again.
            let uid = self.next_without_more(&mut tries.after, may)?;
            let wait = tries.waits.entry(uid.clone()).or_insert_with(|| Wait {
                since: self.now,
                next: self.now + CHANCE,
                spared: HashSet::default(),
            });
            if wait.next <= self.now {
                let patient = self.now.saturating_sub(wait.since) < PATIENCE;
                let began = self.queue.gains();
                return Some(Asking::new(uid, began, self.nodes_to_see(), patient));
            }
        }
        None
    }
}

impl Known<'_> {
    /// May others move for this pod at all?
    fn may_be_moved_for(&self, pod: &PodFacts) -> bool {
        (pod.waiting || pod.queued) && self.may_evict_for(Cause::Defragment, pod)
    }
}
