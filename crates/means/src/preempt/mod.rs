//! Preemption for a pod that free memory is too fragmented for: no card has enough of it, but the node's sum has, so
//! that kube-scheduler, which sees the sum alone, evicts no pod.
//!
//! The ledger chooses the pods that end, keeps the room, and names the chosen pods that are still needed. It does not
//! act on pods. It waits until kube-scheduler had its chance. For a minute it leaves nodes to kube-scheduler's own
//! preemption where the sum is short but lower-priority pods could help. If a pod's room did not come or was of no use,
//! no other pod ends for it there again. No pod ends for it elsewhere before a pause. Pods end only on a node that
//! kube-scheduler offered for the pod (`Shown` of the books). The cost of a look is bounded ([`search`]).

mod gangs;
mod search;

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_books::{
    Budget, Cause, Config, Earmark, Ended, Evidence, HashSet, Host, Node, Trial, Uid,
};
use gpustow_pack::{Choice, Request};

use crate::demand::{Action, Demands, Reserved};
use crate::means::{Makes, Means, best};
use crate::parts::Parts;
use crate::sight::Sight;
pub use search::Preempt;

/// Kinds of waiting pods that one look thinks of.
pub(super) const KINDS: usize = 16;
/// Nodes that a question of whether a pod fits elsewhere looks at.
const GAINS: usize = 64;
/// kube-scheduler's order: fewest broken budgets, lowest highest priority, smallest sum of priorities, fewest pods, the
/// most important of them started latest.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    /// kube-scheduler leaves it open like this whether it would place the pod there.
    open: Option<Reverse<Evidence>>,
    broken: usize,
    highest: Option<i32>,
    weights: i128,
    victims: usize,
    started: Reverse<Option<i64>>,
}

impl Rank {
    /// How many of the victims a disruption budget protects.
    pub(crate) fn broken(&self) -> i64 {
        i64::try_from(self.broken).unwrap_or(i64::MAX)
    }

    pub(crate) fn of(victims: &[Arc<PodFacts>], broken: usize) -> Self {
        let priorities = || victims.iter().map(|pod| pod.priority);
        let highest = priorities().max();
        let weights = priorities().map(|priority| i128::from(priority) - i128::from(i32::MIN));
        let tops = victims.iter().filter(|pod| Some(pod.priority) == highest);
        Self {
            open: None,
            broken,
            highest,
            weights: weights.sum(),
            victims: victims.len(),
            started: Reverse(tops.map(|pod| pod.started).min()),
        }
    }
}

type Plan = crate::means::Plan<Rank>;

/// A node that is considered for a pod.
pub(super) struct Site<'a> {
    pub(super) pod: &'a PodFacts,
    pub(super) request: &'a Request,
    pub(super) name: &'a str,
    pub(super) node: &'a Node,
    /// The pods that already leave.
    pub(super) leaving: HashSet<Uid>,
    /// Pods that the last report shows but that are no longer bound there leave, too.
    ended: bool,
}

impl Means for Preempt {
    fn cause(&self) -> Cause {
        Cause::Preempt
    }

    fn after(&self, config: &Config) -> Option<Duration> {
        config.preempt_fragmented.then_some(config.preempt_after)
    }

    /// Looks after the room that is kept for pods for which others end, and chooses who else ends.
    fn look(&mut self, parts: &mut Parts, _: usize) {
        parts.earmarks.forget_controllers(parts.now);
        parts.look_after_gangs();
        parts.look_after_evictions(Cause::Preempt);
        if parts.config.preempt_fragmented {
            self.search(parts);
            self.search_for_gang(parts);
        }
    }

    fn plan(&self, known: &Sight<'_>, pod: &Arc<PodFacts>, budget: &mut Budget) -> Option<Makes> {
        let nodes = known.open_to(pod);
        best(nodes.filter_map(|name| known.plan_preempt(pod, name, budget)))
    }

    fn reserved(&self, sight: &Sight<'_>) -> Vec<Reserved> {
        let gangs = sight.earmarks.gangs_with_evictions();
        let mut all = sight.evictions(Cause::Preempt);
        all.extend(gangs.iter().flat_map(|gang| sight.preemptions_of(gang)));
        all
    }

    fn demand(&self, sight: &Sight<'_>, all: &mut Demands) {
        all.evict(self.reserved(sight), Action::Delete);
    }
}

/// Evictions, for preemption and defragmentation.
impl Parts {
    /// Looks after the earmarks of this means for room that evicted pods leave, apart from gangs. Also goes on with the
    /// look at nodes that gained room since: does the pod fit on one?
    pub(crate) fn look_after_evictions(&mut self, means: Cause) {
        let mut budget = Budget::of_look();
        for uid in self.earmarks.evictions_for_pods(means) {
            self.look_after(&uid, means, |known, pod, it| known.needs_evictions(pod, it));
            let sight = self.sight();
            let earmark = self.earmarks.eviction_for(&uid);
            let Some((pod, earmark)) = self.books.pod(&uid).zip(earmark) else {
                continue;
            };
            let mut looked = earmark.looked();
            for (number, name) in sight.queue.gained_since(looked) {
                budget.charge(1);
                if budget.is_spent() || sight.fits_now_on(name, pod, &mut budget) {
                    break;
                }
                looked = number;
            }
            self.earmarks.note_looked(&uid, looked);
        }
        self.count_spent(budget.spent());
    }
}

impl Sight<'_> {
    /// The pods that this means evicts now, with the pods that get their room, apart from gangs.
    pub(crate) fn evictions(&self, means: Cause) -> Vec<Reserved> {
        let all = self.earmarks.evictions_for_pods(means).into_iter();
        all.filter_map(|uid| self.eviction(&uid)).collect()
    }

    /// The pods that are evicted now for one pod, unless that pod is of a gang.
    pub(crate) fn eviction(&self, uid: &str) -> Option<Reserved> {
        let earmark = self.earmarks.eviction_for(uid)?;
        let earmark = Some(earmark).filter(|it| it.gang().is_none())?;
        let pod = self.books.pod(uid)?;
        let outdated = self.outdated(pod, earmark.node());
        let victims = match outdated.is_some() || self.may_fit_elsewhere(pod, earmark.looked()) {
            true => Vec::new(),
            false => self.needed(pod, earmark).unwrap_or_default(),
        };
        Some(Reserved::of(pod, earmark, victims))
    }

    /// Does the pod fit on a node that gained room since others were chosen to end for it? True, too, if there are more
    /// such nodes than a question may look at: the next look comes to them.
    fn may_fit_elsewhere(&self, pod: &PodFacts, looked: u64) -> bool {
        let mut budget = Budget::of_look();
        let mut gained = self.queue.gained_since(looked).map(|(_, name)| name);
        let first = gained.by_ref().take(GAINS);
        let mut fits = first.map(|name| self.fits_now_on(name, pod, &mut budget));
        let fits = fits.any(|fits| fits) || gained.next().is_some();
        self.count_spent(budget.spent());
        fits
    }
}

impl Sight<'_> {
    /// The reason why the pod's earmark ends, if it does.
    fn needs_evictions(
        &self,
        pod: &PodFacts,
        earmark: &Earmark,
    ) -> Result<Option<Vec<Uid>>, Ended> {
        self.check(earmark.node()).map_err(|_| Ended::Unfit)?;
        self.needed(pod, earmark).map(|_| None).ok_or(Ended::Late)
    }

    /// May others end for this pod at all?
    fn may_preempt(&self, pod: &PodFacts) -> bool {
        let waited = self.has_waited(pod, self.config.preempt_after);
        pod.waiting && !pod.queued && waited && self.may_evict_for(Cause::Preempt, pod)
    }

    /// May others be evicted for the pod by this means?
    pub fn may_evict_for(&self, means: Cause, pod: &PodFacts) -> bool {
        !self.earmarks.pauses_evictions(pod, self.now) && self.not_now(means, pod).is_none()
    }

    /// The chosen pods that must still end for the pod to get its cards. None if the pod does not get them though all
    /// chosen pods end, or if kube-scheduler refuses the node meanwhile. Pods that are gone have ended, whatever usage
    /// the last report shows: the agent's next report is awaited.
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

    /// The pods that must end for the pod to fit on these cards, and its place then. `others` is in order of
    /// importance. From all of them, the search spares each pod without whose end the pod fits: the protected first,
    /// then the most important. None if the pod does not fit though all end, or if the budget is spent before the
    /// answer.
    pub(super) fn reprieve(
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
    pub(super) fn site<'a>(&'a self, pod: &'a PodFacts, name: &'a str) -> Option<Site<'a>> {
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
