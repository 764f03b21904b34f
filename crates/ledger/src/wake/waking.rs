//! Which waiting pods to wake when room appears.
//!
//! kube-scheduler puts a refused pod to sleep and does not see our room, so the extender must wake the pod. Only the
//! pods that would fit should be woken, in the order in which the scheduler would take them.
//!
//! Nodes that gained room are offered one after the other, to the pods that fit there together. If no pod comes, each
//! further round offers the node to twice as many pods. So pods with another obstacle soon stop keeping the room from
//! others. The cost of one call is bounded; the next call goes on where it stopped.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_books::{Budget, Left, Turn, Uid};
use gpustow_means::{Parts, Sight};
use gpustow_pack::Mib;
use gpustow_queue::{FLUSH, Kind, KindId, Ungate};

use super::Wakes;
use super::left::{fits, price, unoffered};

/// So many are let through without room before the first of them is seen to have gone.
const STUCK: usize = 256;
/// The most that one call may cost, in looks at a pod or a node.
const WORK: usize = 8192;
/// The most pods of a kind that get an Event that no node could hold them.
const TOLD: usize = 16;
/// Queued pods that are offered room before a pod that is not queued is given some.
const AHEAD: usize = 64;

/// A look at every node for one pod, and so for its kind.
#[derive(Debug)]
pub(super) struct Look {
    uid: Uid,
    kind: KindId,
    /// The nodes that are left for the question whether one could hold the pod if it were empty.
    all: usize,
    /// The memory that the pod needs on one card.
    least: Mib,
    /// The last node with that much free memory that was looked at. Nodes with less free memory are left: a node that
    /// gains room is offered.
    seen: Option<(Mib, Arc<str>)>,
    /// Some of the kind may take room that a nomination keeps from others of it.
    found: bool,
    /// A node could hold it if it were empty.
    could: bool,
}

impl Wakes {
    /// See [`crate::Ledger::wake`].
    pub(crate) fn wake(&mut self, parts: &mut Parts, limit: usize) -> Vec<Arc<PodFacts>> {
        let seen = |uid: &str| parts.books.pod(uid).is_some();
        for uid in parts.queue.waiting_mut().forget_unseen(seen, parts.now) {
            parts.shown.forget(&uid);
        }
        if let Some(unix) = parts.unix {
            parts.queue.grow_old(unix);
        }
        let mut woken = self.come_again(parts, limit);
        parts.queue.gated_mut().tick(parts.now);
        self.offer(parts, limit, WORK, &mut woken);
        self.let_go(parts, limit, &mut woken);
        woken
    }

    /// Offers queued pods the room that came free since the last look. It runs before a pod gets room that was not
    /// queued, or is without reserved room. `wake` names the pods that get the offer.
    pub(crate) fn look_at_queued(&mut self, parts: &mut Parts) {
        let mut ungated = Vec::new();
        self.offer(parts, AHEAD, WORK / 4, &mut ungated);
        let uids = ungated.iter().map(|pod| pod.uid.clone());
        uids.for_each(|uid| parts.queue.ask_again(&uid));
        self.unfinished |= !ungated.is_empty();
    }

    fn offer(
        &mut self,
        parts: &mut Parts,
        limit: usize,
        mut work: usize,
        woken: &mut Vec<Arc<PodFacts>>,
    ) {
        let interval = parts.config.wake_again_after;
        let more_joined = parts.queue.tick(parts.now, interval);
        if parts.queue.waiting().is_empty() {
            self.rest();
        }
        while limit > woken.len() && parts.queue.waiting().has_credit() {
            let before = woken.len();
            self.look_everywhere(parts, &mut work);
            self.offer_room(parts, limit, &mut work, woken);
            if work == 0 || woken.len() == before || !self.look_on(parts) {
                break;
            }
        }
        let looks_on = self.look.is_some() && parts.queue.waiting().has_credit();
        self.unfinished = work == 0 || more_joined || looks_on;
    }

    /// Room that was found for queued pods may have gone to others before them: there may be more. False if no pod is
    /// left to look for.
    fn look_on(&mut self, parts: &mut Parts) -> bool {
        let mut any = false;
        for kind in std::mem::take(&mut self.found) {
            any |= parts.queue.look_on(kind, parts.now);
        }
        any
    }

    /// At most `limit` pods that are to ask again at once.
    fn come_again(&mut self, parts: &mut Parts, limit: usize) -> Vec<Arc<PodFacts>> {
        let mut again = Vec::new();
        while again.len() < limit
            && let Some(uid) = parts.queue.next_unfinished()
        {
            let twice = |pod: &Arc<PodFacts>| pod.uid == uid;
            if parts.queue.waiting().contains(&uid) && !again.iter().any(twice) {
                again.extend(parts.sight().asleep(&uid));
            }
        }
        again
    }

    /// Finds room that was there before a pod waited for it, or that no pod came for.
    fn look_everywhere(&mut self, parts: &mut Parts, work: &mut usize) {
        let interval = parts.config.wake_again_after;
        // Half of it is for room that has just appeared.
        let rest = *work / 2;
        while *work > rest {
            if let Some(mut look) = self.look.take() {
                if !self.look(parts, &mut look, work, rest) {
                    self.look = Some(look);
                    return;
                }
                continue;
            }
            let Some((uid, kind)) = parts.queue.waiting_mut().next_due(parts.now, interval) else {
                return;
            };
            *work -= 1;
            if let Some(kind) = kind.filter(|_| parts.sight().asleep(&uid).is_some()) {
                let least = parts.queue.waiting().kind(kind).map(Kind::least);
                self.look = Some(Look {
                    uid,
                    kind,
                    all: parts.books.nodes().len(),
                    least: least.unwrap_or_default(),
                    seen: None,
                    found: false,
                    could: false,
                });
            }
        }
    }

    /// True if there is nothing left to look at.
    fn look(&mut self, parts: &mut Parts, look: &mut Look, work: &mut usize, rest: usize) -> bool {
        let Some(pod) = parts.sight().asleep(&look.uid) else {
            return true;
        };
        let again = parts.now + parts.config.wake_again_after;
        while *work > rest {
            if look.all > 0 {
                look.all -= 1;
                *work = work.saturating_sub(1 + price(&pod));
                let node = parts.books.nth_node(look.all);
                if node.is_some_and(|(name, _)| {
                    parts.sight().could_hold(name, &pod, &mut Budget::all())
                }) {
                    look.could = true;
                    look.all = 0;
                }
                continue;
            }
            let next = parts.books.room_before(look.seen.as_ref(), look.least);
            look.seen = next.cloned();
            let Some((_, name)) = next else {
                let until = if look.found { again } else { parts.now + FLUSH };
                self.looked(parts, look, until);
                return true;
            };
            *work -= 1;
            if parts.queue.waiting().is_barred(&look.uid, name) {
                continue;
            }
            if parts.sight().may_fit(name, &pod)
                && let Some(left) = unoffered(&parts.sight(), name)
                && fits_one_of(&parts.sight(), look.kind, name, &left, &pod, work)
            {
                parts.queue.waiting_mut().room_on(name);
                if !parts.earmarks.has_earmarks(name) {
                    look.could = true;
                    self.looked(parts, look, again);
                    return true;
                }
                look.found = true;
            }
        }
        false
    }

    /// There is nothing left to look at. Queued pods that no node could hold are ungated, and the first pods of the
    /// kind get an Event.
    fn looked(&mut self, parts: &mut Parts, look: &Look, until: Duration) {
        parts.queue.looked(look.kind, until, look.could);
        if !look.could {
            let kind = parts.queue.waiting().kind(look.kind).into_iter();
            let uids = kind.flat_map(Kind::turns).map(Turn::uid);
            parts.hopeless.extend(uids.take(TOLD).cloned());
        }
        if until < parts.now + FLUSH {
            self.found.push(look.kind);
        }
    }

    /// At most `limit` pods in all that are let through without room.
    pub(super) fn let_go(
        &mut self,
        parts: &mut Parts,
        limit: usize,
        woken: &mut Vec<Arc<PodFacts>>,
    ) {
        self.unfinished |= self.find_preemptors(parts);
        let mut free = STUCK.saturating_sub(parts.queue.gated().stuck());
        while free > 0
            && woken.len() < limit
            && let Some((uid, why)) = parts.queue.gated_mut().next_leaving(parts.now)
        {
            free -= 1;
            if why == Ungate::MayPreempt {
                self.goes_out(parts, &uid);
            }
            let waits = |pod: &&Arc<PodFacts>| pod.queued && parts.books.assumed(&uid).is_none();
            woken.extend(parts.books.pod(&uid).filter(waits).cloned());
        }
    }
}

/// Would this pod, or another of its kind, fit in the room that is left on the node? Where a nomination keeps room, a
/// pod of the kind may be the nominated one, or come before it.
fn fits_one_of(
    sight: &Sight<'_>,
    kind: KindId,
    name: &str,
    left: &Left,
    pod: &Arc<PodFacts>,
    work: &mut usize,
) -> bool {
    let mut fits = |pod: &PodFacts| {
        *work = work.saturating_sub(price(pod));
        fits(sight, name, left, pod)
    };
    let waiting = sight.queue.waiting();
    fits(pod)
        || sight.earmarks.has_earmarks(name) && {
            let highest = waiting.kind(kind).and_then(Kind::highest);
            let kept = sight.earmarks.pods_with_earmarks(name);
            let kept = kept.filter(|uid| waiting.turn(kind, uid).is_some());
            let others = highest.into_iter().chain(kept);
            let others = others.filter(|uid| **uid != pod.uid);
            let mut others = others.filter_map(|uid| sight.asleep(uid));
            others.any(|other| fits(&other))
        }
}
