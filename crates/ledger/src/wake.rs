//! Which waiting pods to wake when room appears.
//!
//! kube-scheduler puts a refused pod to sleep and does not see our room: it must be told, and only
//! the pods that would fit should be, in the order in which the scheduler would take them.
//!
//! Pods with equal requests form a queue, and a queue whose first pod does not fit is not looked at
//! further. So a call costs (different requests) × (nodes that gained room), whatever the number of
//! waiting pods, and that product is bounded: what is left over is left to the next call.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_pack::{NodeGpus, Request};
use hashbrown::{HashMap, HashSet};

use crate::Ledger;
use crate::node::Uid;

/// A pod that is never seen in a watch is forgotten after this long.
const UNSEEN_FOR: Duration = Duration::from_secs(60);
/// At most this many questions (request, node) about room that appeared in one call.
const QUESTIONS: usize = 4096;
/// A request that fitted nowhere is tried against the whole cluster again after this many times
/// the usual interval; room that appears is not missed meanwhile.
const EXHAUSTED: u32 = 32;

/// The pods that wait, and the nodes where room appeared since the last wake-up.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    pods: HashMap<Uid, Wait>,
    queues: HashMap<Arc<Request>, Queue>,
    gained: HashSet<Arc<str>>,
    /// Those that only a filter call has told of so far: since when.
    unseen: HashMap<Uid, Duration>,
}

/// The scheduler's order: priority, then age.
type Place = (Reverse<i32>, i64, Uid);

/// One pod's history of wake-ups.
#[derive(Debug)]
struct Wait {
    place: Place,
    request: Arc<Request>,
    /// It may be woken without new room from here on.
    next: Duration,
    woken: u32,
    /// It was woken for room on this node and has not asked since: until then it is its own.
    promised: Option<(Arc<str>, Duration)>,
}

/// Pods with equal requests.
#[derive(Debug, Default)]
struct Queue {
    order: BTreeSet<Place>,
    /// When it was last tried against the whole cluster; `None` until the first call after it
    /// came into being.
    swept: Option<Duration>,
    /// Nothing fitted then, and nobody joined since.
    exhausted: bool,
}

impl Waiting {
    fn insert(&mut self, pod: &PodFacts) {
        let Ok(request) = &pod.request else { return };
        match self.pods.get_mut(&pod.uid) {
            Some(wait) if wait.request == *request => return,
            Some(_) => self.remove(&pod.uid),
            None => {}
        }
        let place = (Reverse(pod.priority), pod.created, pod.uid.clone());
        let queue = self.queues.entry(request.clone()).or_default();
        queue.order.insert(place.clone());
        queue.exhausted = false;
        let wait = Wait {
            place,
            request: request.clone(),
            next: Duration::ZERO,
            woken: 0,
            promised: None,
        };
        self.pods.insert(pod.uid.clone(), wait);
    }

    pub(crate) fn remove(&mut self, uid: &str) {
        let Some(Wait { place, request, .. }) = self.pods.remove(uid) else {
            return;
        };
        if let Some(queue) = self.queues.get_mut(&request) {
            queue.order.remove(&place);
            if queue.order.is_empty() {
                self.queues.remove(&request);
            }
        }
    }

    pub(crate) fn room_on(&mut self, node: &str) {
        if !self.pods.is_empty() {
            self.gained.insert(node.into());
        }
    }

    fn promise(&mut self, uid: &str, node: Arc<str>, now: Duration, interval: Duration) {
        if let Some(wait) = self.pods.get_mut(uid) {
            wait.next = now + interval * (1 << wait.woken.min(5));
            wait.woken += 1;
            wait.promised = Some((node, now + interval));
        }
    }

    /// The pod after `place` in its queue, or the first.
    fn after(&self, request: &Arc<Request>, place: Option<&Place>) -> Option<Place> {
        use std::ops::Bound::{Excluded, Unbounded};
        let order = &self.queues.get(request)?.order;
        let from = place.map_or(Unbounded, Excluded);
        order.range((from, Unbounded)).next().cloned()
    }
}

/// Room that this call has promised already.
type Scratch = HashMap<Arc<str>, NodeGpus>;

impl Ledger {
    /// Number of pods that were refused, or lost their reservation, and still wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.pods.len()
    }

    /// What the waiting pods ask for, one entry per pod.
    pub fn waiting_requests(&self) -> impl Iterator<Item = Arc<Request>> {
        self.waiting.pods.values().map(|wait| wait.request.clone())
    }

    /// When the pod that has existed longest among those that wait was created, in seconds since
    /// 1970.
    #[must_use]
    pub fn oldest_waiting(&self) -> Option<i64> {
        self.waiting.pods.values().map(|wait| wait.place.1).min()
    }

    /// Does this pod wait for room?
    #[must_use]
    pub fn is_waiting(&self, uid: &str) -> bool {
        self.waiting.pods.contains_key(uid)
    }

    /// A pod that may be asleep, unless it holds a reservation: waking it would move its
    /// resourceVersion under its bind.
    pub(crate) fn wait(&mut self, pod: &PodFacts) {
        if !self.reservations.contains_key(&pod.uid) {
            self.waiting.insert(pod);
        }
    }

    /// A pod that was refused just now.
    pub(crate) fn wait_refused(&mut self, pod: &PodFacts, now: Duration) {
        self.claim(pod, now);
        self.wait(pod);
        if let Some(wait) = self.waiting.pods.get_mut(&pod.uid) {
            wait.promised = None;
        }
        if !self.pods.contains_key(&pod.uid) {
            self.waiting.unseen.entry(pod.uid.clone()).or_insert(now);
        }
    }

    /// The pods to wake now, at most `limit`: where room appeared, those that would fit in it
    /// together, in the scheduler's order; and those that have waited since their last wake-up
    /// though they would fit.
    pub fn wake(&mut self, limit: usize, now: Duration) -> Vec<Arc<PodFacts>> {
        self.expire(now);
        self.forget_unseen(now);
        let mut woken = Vec::new();
        if self.waiting.pods.is_empty() {
            self.waiting.gained.clear();
            return woken;
        }
        let mut scratch = Scratch::new();
        self.wake_where_room_appeared(limit, now, &mut scratch, &mut woken);
        self.wake_what_was_missed(limit, now, &mut scratch, &mut woken);
        woken
    }

    fn forget_unseen(&mut self, now: Duration) {
        let Self {
            waiting,
            pods,
            tried,
            ..
        } = self;
        let mut lost = Vec::new();
        waiting.unseen.retain(|uid, since| {
            let late = now.saturating_sub(*since) >= UNSEEN_FOR;
            if !pods.contains_key(uid) && late {
                lost.push(uid.clone());
            }
            !pods.contains_key(uid) && !late
        });
        for uid in lost {
            waiting.remove(&uid);
            tried.remove(&uid);
        }
    }

    fn wake_where_room_appeared(
        &mut self,
        limit: usize,
        now: Duration,
        scratch: &mut Scratch,
        woken: &mut Vec<Arc<PodFacts>>,
    ) {
        let at_once = (QUESTIONS / self.waiting.queues.len().max(1)).max(1);
        let nodes: Vec<_> = self.waiting.gained.iter().take(at_once).cloned().collect();
        if nodes.is_empty() {
            return;
        }
        let requests = self.waiting.queues.keys();
        let mut heads: BTreeMap<Place, Arc<Request>> = requests
            .filter_map(|request| Some((self.waiting.after(request, None)?, request.clone())))
            .collect();
        while let Some((place, request)) = heads.pop_first() {
            let mut refused = false;
            if let Some(pod) = self.asleep(&place.2) {
                if let Some(node) = self.promised(&pod.uid, now) {
                    if nodes.contains(&node) {
                        self.takes(&pod, &[node], scratch, now);
                    }
                } else if woken.len() == limit {
                    return;
                } else if let Some(node) = self.takes(&pod, &nodes, scratch, now) {
                    self.promise(&pod.uid, node, now);
                    woken.push(pod);
                } else {
                    refused = true;
                }
            }
            let next = match refused {
                true => self.next_nominated(&request, &place),
                false => self.waiting.after(&request, Some(&place)),
            };
            if let Some(next) = next {
                heads.insert(next, request);
            }
        }
        for node in &nodes {
            self.waiting.gained.remove(node);
        }
    }

    /// The next pod of a queue that room is kept for: it may fit where one before it does not.
    fn next_nominated(&self, request: &Arc<Request>, place: &Place) -> Option<Place> {
        let nominated = self.nominated.values().flatten();
        let waits = nominated.filter_map(|uid| self.waiting.pods.get(uid));
        let behind = waits.filter(|wait| wait.request == *request && wait.place > *place);
        behind.map(|wait| &wait.place).min().cloned()
    }

    /// Tries one queue whose time has come against the whole cluster.
    fn wake_what_was_missed(
        &mut self,
        limit: usize,
        now: Duration,
        scratch: &mut Scratch,
        woken: &mut Vec<Arc<PodFacts>>,
    ) {
        let interval = self.config.wake_again_after;
        let is_due = |queue: &mut Queue| {
            let times = if queue.exhausted { EXHAUSTED } else { 1 };
            now.saturating_sub(*queue.swept.get_or_insert(now)) >= interval * times
        };
        let queues = self.waiting.queues.iter_mut();
        let due =
            queues.filter_map(|(request, queue)| is_due(queue).then_some((queue.swept, request)));
        let Some(request) = due
            .min_by_key(|(swept, _)| *swept)
            .map(|(_, request)| request.clone())
        else {
            return;
        };
        let nodes: Vec<_> = self.nodes.keys().cloned().collect();
        let (mut place, mut exhausted) = (None, false);
        loop {
            place = self.waiting.after(&request, place.as_ref());
            let Some(place) = &place else { break };
            let is_due = self
                .waiting
                .pods
                .get(&place.2)
                .is_some_and(|w| w.next <= now);
            let Some(pod) = self.asleep(&place.2).filter(|_| is_due) else {
                continue;
            };
            if woken.len() == limit {
                return;
            }
            if let Some(node) = self.takes(&pod, &nodes, scratch, now) {
                self.promise(&pod.uid, node, now);
                woken.push(pod);
            } else if pod.nominated.is_none() {
                exhausted = scratch.is_empty();
                break;
            }
        }
        if let Some(queue) = self.waiting.queues.get_mut(&request) {
            queue.swept = Some(now);
            queue.exhausted = exhausted;
        }
    }

    /// A waiting pod that may be bound at all.
    fn asleep(&self, uid: &str) -> Option<Arc<PodFacts>> {
        let facts = &self.pods.get(uid)?.facts;
        let able = facts.node.is_none() && !facts.gated && !facts.deleting;
        able.then(|| facts.clone())
    }

    fn promise(&mut self, uid: &str, node: Arc<str>, now: Duration) {
        let interval = self.config.wake_again_after;
        self.waiting.promise(uid, node, now, interval);
    }

    fn promised(&self, uid: &str, now: Duration) -> Option<Arc<str>> {
        let (node, until) = self.waiting.pods.get(uid)?.promised.as_ref()?;
        (*until > now).then(|| node.clone())
    }

    /// Takes the room for `pod` on the first of `nodes` that has it, and names it.
    fn takes(
        &mut self,
        pod: &PodFacts,
        nodes: &[Arc<str>],
        scratch: &mut Scratch,
        now: Duration,
    ) -> Option<Arc<str>> {
        let request = pod.request.as_ref().ok()?;
        let class = self.class(request);
        for name in nodes {
            let Some(slot) = self.answers.slot(name) else {
                continue;
            };
            if self.cost(slot, name, pod, request, class, now).is_err() {
                continue;
            }
            let Some(node) = self.nodes.get(name) else {
                continue;
            };
            let view = scratch.get(name).unwrap_or(&*node.view);
            let Ok(choice) = self.fit(view, request) else {
                continue;
            };
            let view = scratch
                .entry(name.clone())
                .or_insert_with(|| NodeGpus::clone(&node.view));
            for (card, mib) in choice.placement.charges {
                view.cards[card].free = view.cards[card].free.minus(mib);
            }
            return Some(name.clone());
        }
        None
    }
}
