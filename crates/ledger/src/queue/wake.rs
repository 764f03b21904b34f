//! Which waiting pods to wake when room appears.
//!
//! kube-scheduler puts a refused pod to sleep and does not see our room: it must be told, and only
//! the pods that would fit should be, in the order in which the scheduler would take them.
//!
//! Nodes that gained room are offered one after the other: to the pods that fit there together, and
//! if nobody comes, to twice as many in each further round, so that pods that something else keeps
//! off the node do not keep the room from others for long. What one call may cost is bounded; the
//! next goes on where it stopped.

mod offering;

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_pack::Mib;

use super::Queue;
use super::gated::Ungate;
use super::kind::{Kind, KindId};
use super::waiting::FLUSH;
use crate::books::Uid;
use crate::budget::Budget;
use crate::sight::{Sight, Waking};
use crate::trial::{Host, Left};
use offering::Offering;

/// What one call may cost, in looks at a pod or a node.
const WORK: usize = 8192;
/// What a fit costs, for each container of the pod.
const FIT: usize = 8;
/// Queued pods that are offered room before a pod that is not queued is given some.
const AHEAD: usize = 64;

/// A look at every node for one pod, and so for its kind.
#[derive(Debug)]
struct Look {
    uid: Uid,
    kind: KindId,
    /// So many nodes are left to tell whether one could hold it if it were empty.
    all: usize,
    /// What it needs on one card.
    least: Mib,
    /// The last node with that much free that was looked at. Those with less are left: one that gains room is offered.
    seen: Option<(Mib, Arc<str>)>,
    /// Some of the kind may take room that a nomination keeps from others of it.
    found: bool,
    /// A node could hold it if it were empty.
    could: bool,
}

impl Queue {
    /// Must the room of this node still be offered to a queued pod, before this one?
    pub(crate) fn is_for_queued(&self, name: &str) -> bool {
        let wakes = &self.wakes;
        let offering = wakes.offering.as_ref();
        // Kinds that are to be looked for after this one may want any node.
        wakes.look.is_some()
            || !self.waiting.is_noted()
            || self.waiting.is_queued(name)
            || offering.is_some_and(|offering| *offering.node == *name)
    }

    /// Is the pod to be given only what no queued pod before it would take? That does not hold where
    /// [`goes_first`](Sight::goes_first) says so.
    pub(crate) fn is_behind_queued(&self, pod: &PodFacts) -> bool {
        self.gated.is_on() && self.gated.is_ahead_of(pod)
    }
}

impl Waking<'_> {
    /// See [`Ledger::wake`](crate::Ledger::wake).
    pub(crate) fn wake(&mut self, limit: usize) -> Vec<Arc<PodFacts>> {
        let seen = |uid: &str| self.books.pod(uid).is_some();
        for uid in self.queue.waiting.forget_unseen(seen, self.now) {
            self.shown.forget(&uid);
        }
        if let Some(unix) = self.unix {
            self.queue.grow_old(unix);
        }
        let mut woken = self.come_again(limit);
        self.queue.gated.tick(self.now);
        self.offer(limit, WORK, &mut woken);
        self.let_go(limit, &mut woken);
        woken
    }

    /// Before a pod is given room that was not queued, or has none reserved: queued pods are offered what
    /// came free since the last look. `wake` names whom it is for.
    pub(crate) fn look_at_queued(&mut self) {
        let mut ungated = Vec::new();
        self.offer(AHEAD, WORK / 4, &mut ungated);
        let uids = ungated.iter().map(|pod| pod.uid.clone());
        self.queue.unfinished.extend(uids);
        self.queue.wakes.unfinished |= !ungated.is_empty();
    }

    fn offer(&mut self, limit: usize, mut work: usize, woken: &mut Vec<Arc<PodFacts>>) {
        let interval = self.config.wake_again_after;
        let gated = &mut self.queue.gated;
        let more_joined = self.queue.waiting.tick(self.now, interval, gated);
        if self.queue.waiting.is_empty() {
            self.queue.wakes = Wakes::default();
        }
        while limit > woken.len() && self.queue.waiting.has_credit() {
            let before = woken.len();
            self.look_everywhere(&mut work);
            self.offer_room(limit, &mut work, woken);
            if work == 0 || woken.len() == before || !self.look_on() {
                break;
            }
        }
        let looks_on = self.queue.wakes.look.is_some() && self.queue.waiting.has_credit();
        self.queue.wakes.unfinished = work == 0 || more_joined || looks_on;
    }

    /// What was found for queued pods may have gone to others before them: there may be more. False if no pod is
    /// left for whom to look.
    fn look_on(&mut self) -> bool {
        let mut any = false;
        for kind in std::mem::take(&mut self.queue.wakes.found) {
            let queue = &mut self.queue;
            any |= queue.waiting.look_on(kind, &queue.gated, self.now);
        }
        any
    }

    /// At most `limit` pods that are to ask again at once.
    fn come_again(&mut self, limit: usize) -> Vec<Arc<PodFacts>> {
        let mut again = Vec::new();
        while again.len() < limit
            && let Some(uid) = self.queue.unfinished.pop()
        {
            let twice = |pod: &Arc<PodFacts>| pod.uid == uid;
            if self.queue.waiting().contains(&uid) && !again.iter().any(twice) {
                again.extend(self.sight().asleep(&uid));
            }
        }
        again
    }

    /// Finds room that was there before somebody waited for it, or that nobody came for.
    fn look_everywhere(&mut self, work: &mut usize) {
        let interval = self.config.wake_again_after;
        // Half of it is for room that has just appeared.
        let rest = *work / 2;
        while *work > rest {
            if let Some(mut look) = self.queue.wakes.look.take() {
                if !self.look(&mut look, work, rest) {
                    self.queue.wakes.look = Some(look);
                    return;
                }
                continue;
            }
            let Some((uid, kind)) = self.queue.waiting.next_due(self.now, interval) else {
                return;
            };
            *work -= 1;
            if let Some(kind) = kind.filter(|_| self.sight().asleep(&uid).is_some()) {
                let least = self.queue.waiting.kind(kind).map(Kind::least);
                self.queue.wakes.look = Some(Look {
                    uid,
                    kind,
                    all: self.books.nodes().len(),
                    least: least.unwrap_or_default(),
                    seen: None,
                    found: false,
                    could: false,
                });
            }
        }
    }

    /// True if there is nothing left to look at.
    fn look(&mut self, look: &mut Look, work: &mut usize, rest: usize) -> bool {
        let Some(pod) = self.sight().asleep(&look.uid) else {
            return true;
        };
        let again = self.now + self.config.wake_again_after;
        while *work > rest {
            if look.all > 0 {
                look.all -= 1;
                *work = work.saturating_sub(1 + price(&pod));
                let node = self.books.nth_node(look.all);
                if node.is_some_and(|(name, _)| {
                    self.sight().could_hold(name, &pod, &mut Budget::all())
                }) {
                    look.could = true;
                    look.all = 0;
                }
                continue;
            }
            let next = self.books.room_before(look.seen.as_ref(), look.least);
            look.seen = next.cloned();
            let Some((_, name)) = next else {
                let until = if look.found { again } else { self.now + FLUSH };
                self.looked(look, until);
                return true;
            };
            *work -= 1;
            if self.queue.waiting.is_barred(&look.uid, name) {
                continue;
            }
            if self.sight().may_fit(name, &pod)
                && let Some(left) = self.sight().unpromised(name)
                && self.sight().fits_one_of(look.kind, name, &left, &pod, work)
            {
                self.queue.waiting.room_on(name);
                if !self.earmarks.has_earmarks(name) {
                    look.could = true;
                    self.looked(look, again);
                    return true;
                }
                look.found = true;
            }
        }
        false
    }

    /// There is nothing left to look at. A queued pod that no node could hold is ungated.
    fn looked(&mut self, look: &Look, until: Duration) {
        self.queue.waiting.looked(look.kind, until, look.could);
        if until < self.now + FLUSH {
            self.queue.wakes.found.push(look.kind);
        }
        if !look.could
            && let Some(kind) = self.queue.waiting.kind(look.kind)
        {
            for turn in &kind.order {
                self.queue.gated.let_go(turn.uid(), Ungate::NoNode);
            }
        }
    }
}

impl Sight<'_> {
    /// Would this pod fit in what is left of the node's room, or another of its kind? Where a
    /// nomination keeps room, one of the kind may be the nominated one, or come before it.
    fn fits_one_of(
        &self,
        kind: KindId,
        name: &str,
        left: &Left,
        pod: &Arc<PodFacts>,
        work: &mut usize,
    ) -> bool {
        let mut fits = |pod: &PodFacts| {
            *work = work.saturating_sub(price(pod));
            self.fits(name, left, pod)
        };
        let waiting = &self.queue.waiting;
        fits(pod)
            || self.earmarks.has_earmarks(name) && {
                let highest = waiting.kind(kind).and_then(Kind::highest);
                let kept = self.earmarks.pods_with_earmarks(name);
                let kept = kept.filter(|uid| waiting.turn(kind, uid).is_some());
                let others = highest.into_iter().chain(kept);
                let others = others.filter(|uid| **uid != pod.uid);
                let mut others = others.filter_map(|uid| self.asleep(uid));
                others.any(|other| fits(&other))
            }
    }

    /// What can be said at little cost: false if filter, or kube-scheduler before it, would refuse.
    pub(crate) fn may_fit(&self, name: &str, pod: &PodFacts) -> bool {
        self.check(name).is_ok()
            && self
                .books
                .node(name)
                .zip(pod.asks.request())
                .is_some_and(|(node, request)| request.may_fit(node.view()))
            && self.books.refused_in_tree(name, pod).is_none()
    }

    /// Would the pod fit in what is left of the node's room?
    fn fits(&self, name: &str, left: &Left, pod: &PodFacts) -> bool {
        let mut trial = self.trial().with(name, left);
        trial.fits(pod, name, Host::Whole, &mut Budget::all()) == Some(true)
            && (!self.earmarks.has_earmarks(name) || self.choose(name, pod).is_ok())
    }

    /// A waiting pod that may be bound at all, by a scheduler that asks us.
    pub(crate) fn asleep(&self, uid: &str) -> Option<Arc<PodFacts>> {
        let facts = self.books.pod(uid)?;
        let free = !facts.queued || self.queue.gated.is_on() && !self.queue.gated.is_leaving(uid);
        let able = facts.may_be_placed() && free;
        (able && self.queue.waiting.is_asker(&facts.scheduler)).then(|| facts.clone())
    }
}

/// What is under way between two calls.
#[derive(Debug, Default)]
pub(super) struct Wakes {
    offering: Option<Offering>,
    look: Option<Look>,
    /// Room was found for these kinds since it was last offered.
    found: Vec<KindId>,
    pub(super) unfinished: bool,
}

/// What a fit of this pod costs.
fn price(pod: &PodFacts) -> usize {
    FIT * pod.containers.len().max(1).pow(2)
}
