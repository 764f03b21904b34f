//! Which waiting pods to wake when room appears.
//!
//! kube-scheduler puts a refused pod to sleep and does not see our room: it must be told, and only
//! the pods that would fit should be, in the order in which the scheduler would take them.
//!
//! Nodes that gained room are offered one after the other: to the pods that fit there together, and
//! if nobody comes, to twice as many in each further round, so that pods that something else keeps
//! off the node do not keep the room from others for long. What one call may cost is bounded; the
//! next goes on where it stopped.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_pack::{Mib, NodeGpus, Request};

use crate::Ledger;
use crate::node::Uid;
use crate::waiting::{FLUSH, KindId, Need, Turn};

/// What one call may cost, in looks at a pod or a node.
const WORK: usize = 8192;
/// What a fit costs, for each container of the pod.
const FIT: usize = 8;

/// A node whose room is being offered.
#[derive(Debug)]
struct Offering {
    node: Arc<str>,
    /// Its room less what was promised.
    left: NodeGpus,
    /// How many more may be offered all of it.
    extra: u32,
    /// The kinds whose first pods stand behind this have not been looked at.
    after: Option<Turn>,
    /// The next pods of the others.
    next: BTreeMap<Turn, KindId>,
}

/// A look at every node for one pod, and so for its kind.
#[derive(Debug)]
struct Look {
    uid: Uid,
    kind: KindId,
    nodes: Vec<Arc<str>>,
}

impl Ledger {
    /// Number of pods that were refused, or lost their reservation, and still wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// What the waiting pods ask for, one entry per pod.
    pub fn waiting_requests(&self) -> impl Iterator<Item = Arc<Request>> {
        self.waiting.requests()
    }

    /// When the pod that has existed longest among those that wait was created, in seconds since
    /// 1970.
    #[must_use]
    pub fn oldest_waiting(&self) -> Option<i64> {
        self.waiting.oldest()
    }

    /// Does this pod wait for room?
    #[must_use]
    pub fn is_waiting(&self, uid: &str) -> bool {
        self.waiting.contains(uid)
    }

    /// A pod that may be asleep, unless it holds a reservation: waking it would move its
    /// resourceVersion under its bind.
    pub(crate) fn wait(&mut self, pod: &PodFacts) {
        if !self.reservations.contains_key(&pod.uid) {
            self.waiting.insert(pod);
        }
    }

    /// A pod that was refused just now on all of these nodes.
    pub(crate) fn wait_refused(&mut self, pod: &PodFacts, candidates: &[&str], now: Duration) {
        self.claim(pod, now);
        self.release_group(pod);
        self.wait(pod);
        let asked = |node: &str| candidates.contains(&node);
        self.waiting.refused(&pod.uid, asked);
        if !self.pods.contains_key(&pod.uid) {
            self.waiting.unseen(&pod.uid, now);
        }
    }

    /// The pods to wake now, at most `limit`: for room that appeared, those that would fit in it
    /// together, in the scheduler's order; and those that have waited since their last wake-up
    /// though they would fit.
    pub fn wake(&mut self, limit: usize, now: Duration) -> Vec<Arc<PodFacts>> {
        self.expire(now);
        let pods = &self.pods;
        let lost = self
            .waiting
            .forget_unseen(|uid| pods.contains_key(uid), now);
        for uid in lost {
            self.tried.remove(&uid);
        }
        let more_joined = self.waiting.tick(now, self.config.wake_again_after);
        let mut woken = self.come_again(limit);
        let mut work = WORK;
        if self.waiting.is_empty() {
            self.wakes = Wakes::default();
        }
        if limit > 0 && self.waiting.has_credit() {
            self.look_everywhere(&mut work, now);
            self.offer_room(limit, &mut work, now, &mut woken);
        }
        self.wakes.unfinished = work == 0 || more_joined;
        woken
    }

    /// Did the last [`Ledger::wake`] stop because of what it cost?
    #[must_use]
    pub fn wakes_on(&self) -> bool {
        self.wakes.unfinished
    }

    /// This pod, one of those that [`Ledger::wake`] named, could not be woken.
    pub fn wake_failed(&mut self, uid: &str) {
        self.waiting.take_back(uid);
    }

    /// Finds room that was there before somebody waited for it, or that nobody came for.
    fn look_everywhere(&mut self, work: &mut usize, now: Duration) {
        let interval = self.config.wake_again_after;
        // Half of it is for room that has just appeared.
        let rest = *work / 2;
        while *work > rest {
            if let Some(mut look) = self.wakes.look.take() {
                if !self.look(&mut look, work, rest, now) {
                    self.wakes.look = Some(look);
                    return;
                }
                continue;
            }
            let Some((uid, kind)) = self.waiting.next_due(now, interval) else {
                return;
            };
            *work -= 1;
            if let Some(kind) = kind.filter(|_| self.asleep(&uid).is_some()) {
                let nodes = self.nodes.keys().cloned().collect();
                self.wakes.look = Some(Look { uid, kind, nodes });
            }
        }
    }

    /// True if there is nothing left to look at.
    fn look(&mut self, look: &mut Look, work: &mut usize, rest: usize, now: Duration) -> bool {
        let need = self.waiting.need(look.kind);
        let (Some(pod), Some(need)) = (self.asleep(&look.uid), need) else {
            return true;
        };
        while *work > rest {
            let Some(name) = look.nodes.pop() else {
                self.waiting.looked(look.kind, now + FLUSH);
                return true;
            };
            *work -= 1;
            if self.may_fit(&name, &pod, need, now) {
                *work = work.saturating_sub(price(&pod));
                let left = self.unpromised(&name, now);
                if left.is_some_and(|left| self.fits(&name, &left, &pod)) {
                    self.waiting.room_on(&name);
                    let again = now + self.config.wake_again_after;
                    self.waiting.looked(look.kind, again);
                    return true;
                }
            }
        }
        false
    }

    fn offer_room(
        &mut self,
        limit: usize,
        work: &mut usize,
        now: Duration,
        woken: &mut Vec<Arc<PodFacts>>,
    ) {
        while *work > 0 && woken.len() < limit && self.waiting.has_credit() {
            let under_way = self.wakes.offering.take();
            let Some(mut offering) = under_way.or_else(|| self.next_offering(work, now)) else {
                return;
            };
            if self.offer(&mut offering, limit, work, now, woken) {
                self.waiting.offers().done(&offering.node);
            } else {
                self.wakes.offering = Some(offering);
            }
        }
    }

    /// The node that gained room first, unless that helps nobody.
    fn next_offering(&mut self, work: &mut usize, now: Duration) -> Option<Offering> {
        while *work > 0 {
            let node = self.waiting.offers().next()?;
            *work -= 1;
            let least = self.waiting.least().unwrap_or_default();
            let room = |view: &NodeGpus| largest(view) >= least;
            if let Some(left) = self.unpromised(&node, now).filter(room) {
                let extra = self.waiting.offers().extra(&node);
                return Some(Offering {
                    node,
                    left,
                    extra,
                    after: None,
                    next: BTreeMap::new(),
                });
            }
            self.waiting.offers().done(&node);
        }
        None
    }

    /// A node's room less what is promised there; `None` if nobody may go there.
    fn unpromised(&self, name: &str, now: Duration) -> Option<NodeGpus> {
        self.check(name, now).ok()?;
        let mut left = NodeGpus::clone(&self.nodes.get(name)?.view);
        for uid in self.waiting.promised_on(name) {
            if let Some(pod) = self.pods.get(uid)
                && let Ok(request) = &pod.facts.request
            {
                self.take(&mut left, request);
            }
        }
        Some(left)
    }

    /// Takes room for a request, if there is any.
    fn take(&self, left: &mut NodeGpus, request: &Request) -> bool {
        let choice = self.scores.fit(left, request);
        let charges = choice.map(|choice| choice.placement.charges);
        for &(card, mib) in charges.iter().flatten() {
            left.cards[card].free = left.cards[card].free.minus(mib);
        }
        if charges.is_ok() {
            left.cpu_free_milli = left.cpu_free_milli.saturating_sub(request.cpu_milli);
            left.ram_free = left.ram_free.minus(request.ram);
        }
        charges.is_ok()
    }

    /// Offers a node's room in the order of turns. False if it has to stop before the end.
    fn offer(
        &mut self,
        offering: &mut Offering,
        limit: usize,
        work: &mut usize,
        now: Duration,
        woken: &mut Vec<Arc<PodFacts>>,
    ) -> bool {
        let interval = self.config.wake_again_after;
        loop {
            let least = self.waiting.least().unwrap_or_default();
            if offering.extra == 0 && largest(&offering.left) < least {
                return true;
            }
            if *work == 0 || woken.len() == limit || !self.waiting.has_credit() {
                return false;
            }
            *work -= 1;
            let Some((turn, kind)) = self.next_turn(offering) else {
                return true;
            };
            let next = match self.answer(offering, kind, &turn.3, work, now) {
                Answer::Comes(pod) => {
                    self.waiting
                        .promise(&pod.uid, &offering.node, now, interval);
                    woken.push(pod);
                    self.waiting.after(kind, &turn)
                }
                Answer::Passes => self.waiting.after(kind, &turn),
                Answer::None => self.next_nominated(kind, &turn),
            };
            if let Some(next) = next {
                offering.next.insert(next, kind);
            }
        }
    }

    fn next_turn(&self, offering: &mut Offering) -> Option<(Turn, KindId)> {
        let head = self.waiting.head_after(offering.after.as_ref());
        let next = offering.next.first_key_value();
        match (head, next) {
            (Some((head, kind)), next) if next.is_none_or(|(next, _)| head < next) => {
                let (head, kind) = (head.clone(), kind);
                offering.after = Some(head.clone());
                Some((head, kind))
            }
            _ => offering.next.pop_first(),
        }
    }

    /// What one pod makes of the offer.
    fn answer(
        &self,
        offering: &mut Offering,
        kind: KindId,
        uid: &Uid,
        work: &mut usize,
        now: Duration,
    ) -> Answer {
        let name = &offering.node;
        if self.waiting.is_spoken_for(uid, name) {
            return Answer::Passes;
        }
        let Some(pod) = self.asleep(uid) else {
            return Answer::Passes;
        };
        let Some(need) = self.waiting.need(kind) else {
            return Answer::None;
        };
        let alone = offering.extra > 0;
        if !(need.may_fit(&offering.left) || alone) || !self.may_fit(name, &pod, need, now) {
            return Answer::None;
        }
        *work = work.saturating_sub(price(&pod));
        let Ok(request) = &pod.request else {
            return Answer::None;
        };
        let is_alone = || self.choose(name, &pod, request).is_ok();
        if self.fits(name, &offering.left, &pod) {
            self.take(&mut offering.left, request);
            Answer::Comes(pod)
        } else if alone && is_alone() {
            offering.extra -= 1;
            Answer::Comes(pod)
        } else {
            Answer::None
        }
    }

    /// What can be said at little cost: false if filter, or kube-scheduler before it, would refuse.
    fn may_fit(&self, name: &str, pod: &PodFacts, need: Need, now: Duration) -> bool {
        self.check(name, now).is_ok()
            && self
                .nodes
                .get(name)
                .is_some_and(|node| need.may_fit(&node.view))
            && self.refused_in_tree(name, pod).is_none()
    }

    /// Would the pod fit in what is left of the node's room?
    fn fits(&self, name: &str, left: &NodeGpus, pod: &PodFacts) -> bool {
        let Ok(request) = &pod.request else {
            return false;
        };
        let free = left.cpu_free_milli >= request.cpu_milli && left.ram_free >= request.ram;
        let known = self
            .nodes
            .get(name)
            .is_some_and(|node| node.facts.is_some());
        (free || !known)
            && self.scores.fit(left, request).is_ok()
            && (self.nominated.is_empty() || self.choose(name, pod, request).is_ok())
    }

    /// The next pod of a kind that room is kept for: it may fit where one before it does not.
    fn next_nominated(&self, kind: KindId, turn: &Turn) -> Option<Turn> {
        let nominated = self.nominated.values().flatten();
        let turns = nominated.filter_map(|uid| self.waiting.turn(kind, uid));
        turns.filter(|behind| *behind > turn).min().cloned()
    }

    /// A waiting pod that may be bound at all, by a scheduler that asks us.
    pub(crate) fn asleep(&self, uid: &str) -> Option<Arc<PodFacts>> {
        let facts = &self.pods.get(uid)?.facts;
        let able = facts.node.is_none() && !facts.gated && !facts.deleting;
        (able && self.waiting.is_asker(&facts.scheduler)).then(|| facts.clone())
    }
}

/// What is under way between two calls.
#[derive(Debug, Default)]
pub(crate) struct Wakes {
    offering: Option<Offering>,
    look: Option<Look>,
    unfinished: bool,
}

/// What a pod makes of an offer.
enum Answer {
    /// It is to be woken.
    Comes(Arc<PodFacts>),
    /// The offer is not for this pod, but may be for others of its kind.
    Passes,
    /// Nor is it for others.
    None,
}

/// The largest piece of free memory on a card of the node.
fn largest(view: &NodeGpus) -> Mib {
    let cards = view.cards.iter().filter(|card| card.usable);
    cards.map(|card| card.free).max().unwrap_or_default()
}

/// What a fit of this pod costs.
fn price(pod: &PodFacts) -> usize {
    FIT * pod.containers.len().max(1).pow(2)
}
