//! The common parts of all means.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Group, PodFacts};
use gpustow_books::{Budget, Cards, Cause, Config, Earmark, Ended, HashSet, Uid};

use crate::demand::{Demand, Demands, Reserved};
use crate::parts::Parts;
use crate::sight::Sight;

/// One way to make room.
pub trait Means {
    /// Why it makes room.
    fn cause(&self) -> Cause;

    /// How old a pod must be for it; none if it is off.
    fn after(&self, config: &Config) -> Option<Duration>;

    /// Takes its turn in a look: it decides about other pods, and keeps the room. It may evict at most `most` pods.
    fn look(&mut self, parts: &mut Parts, most: usize);

    /// Until when it pauses for the pod, for a reason of its own.
    fn pauses(&self, _: &PodFacts, _: Duration) -> Option<Duration> {
        None
    }

    /// The pods that would leave room, and their node, regardless of kube-scheduler's answers about nodes.
    fn plan(&self, known: &Sight<'_>, pod: &Arc<PodFacts>, budget: &mut Budget) -> Option<Makes>;

    /// The memory that the means has reserved for pods.
    fn reserved(&self, sight: &Sight<'_>) -> Vec<Reserved>;

    /// Adds the present demands of the means on pods.
    fn demand(&self, sight: &Sight<'_>, all: &mut Demands);

    /// Does this demand of the means still hold?
    fn still(&self, sight: &Sight<'_>, demand: &Demand) -> bool {
        still_evicts(sight, demand)
    }
}

/// A node, and the pods that would leave room there.
pub(crate) type Makes = (Arc<str>, Vec<Uid>);

/// A place where others could leave room for a pod's request. Of two plans the lesser is better: by rank, then by name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Plan<R> {
    /// The burden of the plan on others.
    pub rank: R,
    /// Where.
    pub node: Arc<str>,
    /// The GPUs that the pod gets, by UUID, with its memory on each.
    pub cards: Cards,
    /// The pods that give memory back, are evicted, or must finish.
    pub waits_for: Vec<Uid>,
    /// Pods of lower priority that lose their reservations.
    pub overtakes: Vec<Uid>,
}

/// Why a means does not act for a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotNow {
    /// Scheduling gates hold the pod, or it is bound or being deleted.
    NotPlaced,
    /// It was filtered, and its bind is awaited.
    Assumed,
    /// kube-scheduler nominated it to a node.
    Nominated,
    /// Room for one pod of a gang is of no use: the gang is looked at as a whole.
    OfGang,
    /// Its `preemptionPolicy` is `Never`.
    NeverPreempts,
    /// Another means has reserved room for it.
    HasRoom,
    /// Its last bind may still arrive.
    Unfenced,
    /// Pods that terminate leave room for it.
    ExpectsRoom,
    /// It must have existed for so long.
    TooYoung(Duration),
}

impl Sight<'_> {
    /// Does the pod still want the room that was earmarked for it?
    pub(crate) fn wants(&self, pod: &PodFacts, earmark: &Earmark) -> bool {
        let same = pod.asks.request().is_some_and(|it| earmark.is_for(it));
        same && pod.may_be_placed() && self.books.assumed(&pod.uid).is_none()
    }

    /// How long the room of a plan is awaited.
    fn lasts<R>(&self, means: Cause, plan: &Plan<R>) -> Duration {
        let leaving = match means {
            Cause::Reserve => return self.config.reserve_give_up_after,
            Cause::Preempt => self.leaving(&plan.node),
            _ => HashSet::default(),
        };
        let all: Vec<Uid> = leaving.iter().chain(&plan.waits_for).cloned().collect();
        self.config.reclaim_for + self.grace(&all)
    }

    /// Why a means makes no room for the pod, if that follows from the pod. How old it must be is asked elsewhere.
    pub fn not_now(&self, means: Cause, pod: &PodFacts) -> Option<NotNow> {
        let of_gang = || {
            let gang = self.books.gang(pod);
            match means {
                Cause::Reserve => false,
                Cause::Reclaim => gang.is_some_and(Group::is_in_tree),
                _ => gang.is_some() && !self.books.comes_alone(pod),
            }
        };
        // A reservation is given up for room that another means makes.
        let has_room = || match means {
            Cause::Reserve => self.earmarks.earmark(&pod.uid).is_some(),
            _ => self.earmarks.has_more_than_reservation(&pod.uid),
        };
        Some(match () {
            () if !pod.may_be_placed() => NotNow::NotPlaced,
            () if self.books.assumed(&pod.uid).is_some() => NotNow::Assumed,
            () if self.earmarks.is_nominated(pod) => NotNow::Nominated,
            () if of_gang() => NotNow::OfGang,
            () if means == Cause::Preempt && !pod.preempts => NotNow::NeverPreempts,
            () if has_room() => NotNow::HasRoom,
            () if self.books.is_unfenced(&pod.uid) => NotNow::Unfenced,
            () if means != Cause::Reserve && self.expects_room(pod) => NotNow::ExpectsRoom,
            () => return None,
        })
    }
}

impl Parts {
    /// Earmarks the room of a plan for the pod.
    pub(crate) fn pursue<R>(&mut self, uid: &Uid, means: Cause, plan: Plan<R>) {
        let pod = self.books.pod(uid);
        let Some(request) = pod.and_then(|pod| pod.asks.request().cloned()) else {
            return;
        };
        for other in &plan.overtakes {
            self.end(other, Ended::Overtaken);
        }
        let until = self.now + self.sight().lasts(means, &plan);
        let (node, cards, waits_for) = (plan.node, plan.cards, plan.waits_for);
        let earmark = Earmark::of_cards(&node, means, &request, cards, waits_for, until);
        self.change(|it, books| it.put(uid, earmark, books));
    }

    /// Nothing is left that this means could try for the pod: a later look tries all of it again.
    pub(crate) fn all_tried(&mut self, uid: &Uid, means: Cause) {
        if let Some(pod) = self.books.pod(uid) {
            self.earmarks.all_tried(pod, means, self.now);
        }
    }

    /// Continues the pod's earmark, with other pods if needed, or ends it. `holds` returns the pods to ask instead, if
    /// others are asked, or the reason why the earmark ends.
    pub(crate) fn look_after(
        &mut self,
        uid: &Uid,
        means: Cause,
        holds: impl Fn(&Sight<'_>, &PodFacts, &Earmark) -> Result<Option<Vec<Uid>>, Ended>,
    ) {
        let sight = self.sight();
        let Some(earmark) = self.earmarks.find(uid, means) else {
            return;
        };
        let pod = self.books.pod(uid).filter(|pod| sight.wants(pod, earmark));
        let outdated = pod.and_then(|pod| sight.outdated(pod, earmark.node()));
        match pod.map(|pod| holds(&sight, pod, earmark)) {
            None => self.end(uid, Ended::Gone),
            Some(Err(how)) => self.end(uid, how),
            // Pods leave for one that can come, or not at all.
            Some(Ok(_)) if let Some(open) = outdated => self.ask_for_evidence(uid, open),
            Some(Ok(None)) => {}
            Some(Ok(Some(others))) => self.change(|it, _| it.reclaim_from(uid, others)),
        }
    }
}

/// Is the pod evicted still for the one that is to have the room?
pub(crate) fn still_evicts(sight: &Sight<'_>, demand: &Demand) -> bool {
    let of_it = demand.purpose.uid().and_then(|uid| sight.eviction(uid));
    let of_it = of_it.filter(|it| it.node == demand.node);
    of_it.is_some_and(|it| it.victims.iter().any(|pod| pod.uid == demand.victim.uid))
}

pub(crate) fn best<R: Ord>(plans: impl Iterator<Item = Plan<R>>) -> Option<Makes> {
    plans.min().map(|plan| (plan.node, plan.waits_for))
}
