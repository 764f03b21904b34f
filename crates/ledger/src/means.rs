//! The means by which room is made for a pod that waits: reclaim, reserve, preempt and defragment.
//!
//! Each looks for plans in its own way and compares them by a rank of its own. A plan is of one kind, is compared in one
//! written order, and is pursued in one way: an earmark.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Group, PodFacts};
use gpustow_pack::Mib;

use crate::Ledger;
use crate::books::Uid;
use crate::earmarks::{Cards, Cause, Earmark, Ended};
use crate::known::Known;
use crate::maps::HashSet;
use crate::reclaim::Borrower;

/// Where others could leave a pod what it requests. Of two plans the lesser is better: by rank, then by name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Plan<R> {
    /// What it asks of others.
    pub(super) rank: R,
    pub(super) node: Arc<str>,
    /// The GPUs that the pod gets, by UUID, and what it will hold of each.
    pub(super) cards: Cards,
    /// The pods that give memory back, are evicted, or must finish.
    pub(super) waits_for: Vec<Uid>,
    /// Pods of lower priority that lose their reservations.
    pub(super) overtakes: Vec<Uid>,
}

/// Memory that is reserved for a pod that waits.
#[derive(Clone, Debug)]
pub struct Reserved {
    /// The pod that gets it.
    pub pod: Arc<PodFacts>,
    /// By which means.
    pub cause: Cause,
    /// Where.
    pub node: Arc<str>,
    /// When that is given up.
    pub until: Duration,
    /// The GPUs that the pod is to get, by UUID, and what it will hold of each.
    pub cards: Vec<(Arc<str>, Mib)>,
    /// The pods that must still finish or give memory back. Empty once the pod fits, or will when others have left.
    pub victims: Vec<Arc<PodFacts>>,
    /// What victims that must give memory back use, by the report that was last seen.
    pub borrowers: Vec<Borrower>,
    /// It is a part of the room of this gang: the victims for all its pods finish together, or none.
    pub gang: Option<Group>,
}

impl Reserved {
    pub(crate) fn of(pod: &Arc<PodFacts>, earmark: &Earmark, victims: Vec<Arc<PodFacts>>) -> Self {
        Self {
            pod: pod.clone(),
            cause: earmark.cause(),
            node: earmark.node().clone(),
            until: earmark.until(),
            cards: earmark.cards().to_vec(),
            victims,
            borrowers: Vec::new(),
            gang: earmark.gang().cloned(),
        }
    }
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
    PreemptsNobody,
    /// Another means has reserved room for it.
    HasRoom,
    /// Its last bind may still arrive.
    Unfenced,
    /// Pods that terminate leave room for it.
    ExpectsRoom,
    /// It must have existed for so long.
    TooYoung(Duration),
}

impl Known<'_> {
    /// Does the pod want still what was earmarked for it?
    pub(crate) fn wants(&self, pod: &PodFacts, earmark: &Earmark) -> bool {
        let same = pod.asks.request().is_some_and(|it| earmark.is_for(it));
        same && pod.may_be_placed() && self.books.assumed(&pod.uid).is_none()
    }

    /// How long the room of a plan is awaited.
    fn lasts<R>(&self, means: Cause, plan: &Plan<R>) -> Duration {
        let leaving = match means {
            Cause::Reserve => return self.config.keep_for,
            Cause::Preempt => self.leaving(&plan.node),
            _ => HashSet::default(),
        };
        let all: Vec<Uid> = leaving.iter().chain(&plan.waits_for).cloned().collect();
        self.config.reclaim_for + self.grace(&all)
    }

    /// Why a means makes no room for the pod, if that follows from the pod. How old it must be is asked elsewhere.
    pub(crate) fn not_now(&self, means: Cause, pod: &PodFacts) -> Option<NotNow> {
        let of_gang = || {
            let gang = self.books.gang(pod);
            match means {
                Cause::Reserve => false,
                Cause::Reclaim => gang.is_some_and(Group::is_in_tree),
                _ => gang.is_some() && !self.books.comes_alone(pod),
            }
        };
        // A reservation is given up for what another means makes.
        let has_room = || match means {
            Cause::Reserve => self.earmarks.earmark(&pod.uid).is_some(),
            _ => self.earmarks.has_more_than_reservation(&pod.uid),
        };
        Some(match () {
            () if !pod.may_be_placed() => NotNow::NotPlaced,
            () if self.books.assumed(&pod.uid).is_some() => NotNow::Assumed,
            () if self.earmarks.is_nominated(pod) => NotNow::Nominated,
            () if of_gang() => NotNow::OfGang,
            () if means == Cause::Preempt && !pod.preempts => NotNow::PreemptsNobody,
            () if has_room() => NotNow::HasRoom,
            () if self.books.is_unfenced(&pod.uid) => NotNow::Unfenced,
            () if means != Cause::Reserve && self.expects_room(pod) => NotNow::ExpectsRoom,
            () => return None,
        })
    }
}

impl Ledger {
    /// Earmarks the room of a plan for the pod.
    pub(super) fn pursue<R>(&mut self, uid: &Uid, means: Cause, plan: Plan<R>, now: Duration) {
        let pod = self.parts.books.pod(uid);
        let Some(request) = pod.and_then(|pod| pod.asks.request().cloned()) else {
            return;
        };
        for other in &plan.overtakes {
            self.parts.end(other, Ended::Overtaken);
        }
        let until = now + self.sight(now).lasts(means, &plan);
        let Plan {
            node,
            cards,
            waits_for,
            ..
        } = plan;
        let earmark = Earmark::of_cards(&node, means, &request, cards, waits_for, until);
        self.parts.change(|it, books| it.put(uid, earmark, books));
    }
}
