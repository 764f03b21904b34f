//! The pods that wait for room, in the order of their offers, and the results of the offers so far.
//!
//! Pods with equal requests and equal constraints are of one *kind*: by memory, CPU and labels a
//! node takes all of them or none, unless a nomination keeps room there. Whatever else
//! kube-scheduler's own filters know is learnt from wake-ups without result: such a pod is *barred* from the
//! node until one of the two changes or its pause is over, and stands behind all pods with fewer
//! wake-ups without result.

mod offering;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{PodFacts, QueueFrom, names};
use gpustow_books::{HashMap, HashSet, Offered, Turn, Uid};
use gpustow_pack::{Mib, Request};

use super::gated::{Gated, Ungate};
use super::kind::{Key, Kind, KindId};
use super::offers::{End, Offers};
pub(crate) use offering::Call;
use offering::pause;

/// A pod that is never seen in a watch is forgotten after this long.
const UNSEEN_FOR: Duration = Duration::from_secs(60);
/// kube-scheduler itself tries every pod again after so long: no pause of ours is longer.
pub const FLUSH: Duration = Duration::from_secs(300);
/// Pods that joined are noted so many at a time.
const JOINS: usize = 1024;
/// Kinds that one look compares.
const KINDS: usize = 2048;

/// The pods that wait, and the nodes that gained room.
#[derive(Debug, Default)]
pub struct Waiting {
    pods: HashMap<Uid, Wait>,
    ids: HashMap<Key, KindId>,
    kinds: HashMap<KindId, Kind>,
    last_id: KindId,
    /// The first pod of every kind.
    heads: BTreeMap<Turn, KindId>,
    /// How many kinds want so much on one card at least.
    needs: BTreeMap<Mib, usize>,
    /// Pods for which a look at every node is due, and when.
    due: BTreeSet<(Duration, Uid)>,
    /// Pods that joined and were not noted by a tick yet.
    joined: VecDeque<Uid>,
    /// Pods that are known only from a filter call, with the time of that call.
    unseen: HashMap<Uid, Duration>,
    offers: Offers,
    offered: Offered,
    /// Changes of nodes so far, and the last one of each that other filters than ours may heed.
    changes: u64,
    changed: HashMap<Arc<str>, u64>,
    /// Schedulers that are known to ask us, in addition to our own. Pods of other schedulers would wake for nothing.
    askers: HashSet<Arc<str>>,
}

/// One pod's history of wake-ups.
#[derive(Debug)]
struct Wait {
    turn: Turn,
    kind: KindId,
    due: Option<Duration>,
    bars: Vec<Bar>,
    woken: bool,
    /// kube-scheduler showed only some of the nodes that passed its own filters when it was refused last.
    sampled: bool,
    /// The next look at every node leaves out the nodes that the pod is barred from.
    keeps_bars: bool,
    /// How often it was refused without being asked about the node that is offered to it.
    unshown: u32,
}

/// A pod woke without result for room on a node when so many changes had been seen.
#[derive(Debug)]
struct Bar {
    node: Arc<str>,
    at: u64,
}

impl Waiting {
    pub fn len(&self) -> usize {
        self.pods.len()
    }

    pub fn is_empty(&self) -> bool {
        self.pods.is_empty()
    }

    pub fn contains(&self, uid: &str) -> bool {
        self.pods.contains_key(uid)
    }

    pub fn requests(&self) -> impl Iterator<Item = (&Uid, Arc<Request>)> {
        let request = |wait: &Wait| Some(self.kinds.get(&wait.kind)?.key.0.clone());
        let pods = self.pods.iter();
        pods.filter_map(move |(uid, wait)| Some((uid, request(wait)?)))
    }

    /// Where each of them stands.
    pub fn turns(&self) -> impl Iterator<Item = &Turn> {
        self.pods.values().map(|wait| &wait.turn)
    }

    /// The creation time of the oldest.
    pub fn oldest(&self) -> Option<i64> {
        self.pods.values().map(|wait| wait.turn.created()).min()
    }

    /// This scheduler asks us.
    pub(crate) fn asks_us(&mut self, scheduler: &Arc<str>) {
        if !self.is_asker(scheduler) {
            self.askers.insert(scheduler.clone());
        }
    }

    pub fn is_asker(&self, scheduler: &str) -> bool {
        scheduler == names::SCHEDULER || self.askers.contains(scheduler)
    }

    /// A pod that may be asleep joins, unless it waits already.
    pub fn insert(&mut self, pod: &PodFacts) {
        let Some(request) = pod.asks.request() else {
            return;
        };
        self.offered.forget(&pod.uid);
        let key = (request.clone(), pod.constraints.clone());
        let kind = self.ids.get(&key).copied();
        match self.pods.get(&pod.uid) {
            Some(wait) if Some(wait.kind) == kind => return,
            Some(_) => self.remove(&pod.uid),
            None => {}
        }
        let kind = kind.filter(|kind| self.kinds.contains_key(kind));
        let kind = kind.unwrap_or_else(|| self.new_kind(key));
        let turn = Turn::of(pod);
        self.enter(kind, turn.clone());
        let wait = Wait {
            turn,
            kind,
            due: None,
            bars: Vec::new(),
            woken: false,
            sampled: false,
            keeps_bars: false,
            unshown: 0,
        };
        self.pods.insert(pod.uid.clone(), wait);
        self.joined.push_back(pod.uid.clone());
    }

    fn new_kind(&mut self, key: Key) -> KindId {
        self.last_id += 1;
        let kind = Kind::new(key.clone());
        *self.needs.entry(kind.least()).or_default() += 1;
        self.ids.insert(key, self.last_id);
        self.kinds.insert(self.last_id, kind);
        self.last_id
    }

    fn enter(&mut self, id: KindId, turn: Turn) {
        let Some(kind) = self.kinds.get_mut(&id) else {
            return;
        };
        let first = kind.order.first().cloned();
        if first.as_ref().is_none_or(|first| turn < *first) {
            first.and_then(|first| self.heads.remove(&first));
            self.heads.insert(turn.clone(), id);
        }
        kind.order.insert(turn);
    }

    fn leave(&mut self, id: KindId, turn: &Turn) {
        let Some(kind) = self.kinds.get_mut(&id) else {
            return;
        };
        kind.order.remove(turn);
        if self.heads.remove(turn).is_some()
            && let Some(first) = kind.order.first()
        {
            self.heads.insert(first.clone(), id);
        }
    }

    /// A pod waits no more, for whatever reason.
    pub fn remove(&mut self, uid: &str) {
        self.offered.forget(uid);
        self.settle(uid, End::Open);
        let Some(wait) = self.pods.swap_remove(uid) else {
            return;
        };
        self.leave(wait.kind, &wait.turn);
        if let Some(due) = wait.due {
            self.due.remove(&(due, wait.turn.uid().clone()));
        }
        let empty = |kind: &Kind| kind.order.is_empty();
        if self.kinds.get(&wait.kind).is_some_and(empty)
            && let Some(kind) = self.kinds.swap_remove(&wait.kind)
        {
            self.ids.swap_remove(&kind.key);
            if let Some(kinds) = self.needs.get_mut(&kind.least()) {
                *kinds -= 1;
                if *kinds == 0 {
                    self.needs.remove(&kind.least());
                }
            }
        }
        if self.pods.is_empty() {
            self.offers.clear();
            self.joined.clear();
            self.changed.clear();
        }
    }

    /// Only a filter call has shown this pod so far.
    pub(crate) fn unseen(&mut self, uid: &Uid, now: Duration) {
        self.unseen.entry(uid.clone()).or_insert(now);
    }

    /// Is the pod known only from a filter call?
    pub(crate) fn is_unseen(&self, uid: &str) -> bool {
        self.unseen.contains_key(uid)
    }

    /// The pods that no watch has shown in time, which wait no more.
    pub fn forget_unseen(&mut self, seen: impl Fn(&str) -> bool, now: Duration) -> Vec<Uid> {
        let mut lost = Vec::new();
        self.unseen.retain(|uid, since| {
            let late = now.saturating_sub(*since) >= UNSEEN_FOR;
            if !seen(uid) && late {
                lost.push(uid.clone());
            }
            !seen(uid) && !late
        });
        lost.iter().for_each(|uid| self.remove(uid));
        lost
    }

    /// The nodes whose room is offered.
    pub fn offers(&mut self) -> &mut Offers {
        &mut self.offers
    }

    /// The pods that room is offered to.
    pub fn offered(&self) -> &Offered {
        &self.offered
    }

    /// The node's room was offered to all that it is for.
    pub fn offer_done(&mut self, node: &str) {
        if self.offered.on(node).is_empty() {
            self.offers.done(node);
        }
    }

    /// Is the node's room yet to be offered?
    pub fn is_queued(&self, node: &str) -> bool {
        self.offers.is_queued(node)
    }

    /// May a pod be woken now?
    pub fn has_credit(&self) -> bool {
        self.offers.has_credit()
    }

    /// A node gained room.
    pub fn room_on(&mut self, node: &str) {
        if !self.pods.is_empty() {
            self.offers.gain(node);
        }
    }

    /// A node has changed in a way that other filters than ours may heed: no pod is barred from it.
    pub(crate) fn opened(&mut self, node: &Arc<str>) {
        if !self.pods.is_empty() {
            self.changes += 1;
            self.changed.insert(node.clone(), self.changes);
            self.offers.gain(node);
        }
    }

    /// The effect of time alone: credit grows, offers end, and pods that joined become due. Pods that were not asked
    /// about, or not for every node, become due at once. True if more have joined than one call notes.
    pub fn tick(&mut self, now: Duration, interval: Duration, gated: &mut Gated) -> bool {
        self.offers.grow(now);
        for uid in self
            .joined
            .drain(..JOINS.min(self.joined.len()))
            .collect::<Vec<_>>()
        {
            let sampled = self.pods.get(&uid).is_some_and(|wait| wait.sampled);
            if !gated.has(&uid) && !sampled {
                self.be_due(&uid, now + interval);
                continue;
            }
            self.be_due(&uid, now);
            let id = self.pods.get(&uid).map(|wait| wait.kind);
            if let Some(kind) = id.and_then(|id| self.kinds.get_mut(&id)) {
                if kind.hopeless {
                    gated.let_go(&uid, Ungate::NoNode);
                } else if kind.looked <= now + interval {
                    kind.looked = now;
                }
            }
        }
        while let Some(uid) = self.offers.ended(now) {
            if self.has_offer(&uid) && !self.offered.may_come(&uid, now) {
                self.is_useless(&uid);
            }
        }
        !self.joined.is_empty()
    }

    fn be_due(&mut self, uid: &str, at: Duration) {
        if let Some(wait) = self.pods.get_mut(uid) {
            let uid = wait.turn.uid().clone();
            if let Some(old) = wait.due.replace(at) {
                self.due.remove(&(old, uid.clone()));
            }
            self.due.insert((at, uid));
        }
    }

    /// The next pod whose pause is over: it is barred from none any more, unless it looks for others. Its kind, if a look at
    /// every node is due for that.
    pub fn next_due(&mut self, now: Duration, interval: Duration) -> Option<(Uid, Option<KindId>)> {
        let uid = self.due.first().filter(|(at, _)| *at <= now)?.1.clone();
        let wait = self.pods.get_mut(&uid)?;
        if !std::mem::take(&mut wait.keeps_bars) {
            wait.bars.clear();
        }
        let (id, next) = (wait.kind, now + pause(wait.turn.useless(), interval));
        let looked = self.kinds.get(&id).map_or(now, |kind| kind.looked);
        self.be_due(&uid, next.max(looked));
        Some((uid, (looked <= now).then_some(id)))
    }

    /// Every node was looked at for this kind, or one that has room was found. Could one hold it if it were empty?
    pub fn looked(&mut self, kind: KindId, until: Duration, could: bool) {
        if let Some(kind) = self.kinds.get_mut(&kind) {
            kind.looked = until;
            kind.hopeless = !could;
        }
    }

    /// Looks at every node once more for a pod of this kind that was offered nothing so far, and that is queued
    /// or was refused on some nodes alone. False if there is none.
    pub fn look_on(&mut self, id: KindId, gated: &Gated, now: Duration) -> bool {
        let Some(kind) = self.kinds.get_mut(&id) else {
            return false;
        };
        let new = kind.order.iter().take_while(|turn| turn.useless() == 0);
        let sampled = |uid: &Uid| self.pods.get(uid).is_some_and(|wait| wait.sampled);
        let mut new = new
            .map(Turn::uid)
            .filter(|uid| gated.has(uid) || sampled(uid));
        let Some(uid) = new.find(|uid| self.offered.to(uid).is_none()).cloned() else {
            return false;
        };
        kind.looked = now;
        self.be_due(&uid, now);
        true
    }

    /// The pod was refused where only the room was wanting.
    pub fn is_short(&mut self, uid: &str) {
        let kind = self.pods.get(uid).map(|wait| wait.kind);
        if let Some(kind) = kind.and_then(|kind| self.kinds.get_mut(&kind)) {
            kind.short = true;
        }
    }

    /// Which new pods would take room that pods wait for. All, if these are of very many kinds.
    pub fn queue_from(&self) -> Vec<QueueFrom> {
        let mut wanting = self.kinds.values().filter(|kind| kind.wants_room());
        if self.kinds.len() > KINDS {
            return wanting.next().map(|_| QueueFrom::ALL).into_iter().collect();
        }
        QueueFrom::fewest(wanting.filter_map(Kind::queue_from).collect())
    }

    /// Have all who joined been noted?
    pub fn is_noted(&self) -> bool {
        self.joined.is_empty()
    }

    /// The kind of a pod that waits.
    pub fn kind_of(&self, uid: &str) -> Option<KindId> {
        Some(self.pods.get(uid)?.kind)
    }

    pub fn kind(&self, id: KindId) -> Option<&Kind> {
        self.kinds.get(&id)
    }

    /// The smallest amount of memory that a kind needs on one card.
    pub fn least(&self) -> Option<Mib> {
        self.needs.keys().next().copied()
    }

    /// The first pod of a kind whose first pod stands after `turn`.
    pub fn head_after(&self, turn: Option<&Turn>) -> Option<(&Turn, KindId)> {
        use std::ops::Bound::{Excluded, Unbounded};
        let from = turn.map_or(Unbounded, Excluded);
        let (turn, kind) = self.heads.range((from, Unbounded)).next()?;
        Some((turn, *kind))
    }

    /// Of each of `limit` kinds that have one, the first pod that is offered nothing and that `skip` does not name: from
    /// the kind on that stands after `from`, which is moved on, and is none at the end.
    pub fn firsts(
        &self,
        from: &mut Option<Turn>,
        limit: usize,
        skip: impl Fn(&str) -> bool,
    ) -> Vec<Uid> {
        let is_free = |turn: &&Turn| !skip(turn.uid()) && self.offered.to(turn.uid()).is_none();
        let mut firsts = Vec::new();
        while firsts.len() < limit {
            let Some((head, id)) = self.head_after(from.as_ref()) else {
                *from = None;
                break;
            };
            let kind = self.kinds.get(&id);
            let first = kind.and_then(|kind| kind.order.iter().find(is_free));
            firsts.extend(first.map(|turn| turn.uid().clone()));
            *from = Some(head.clone());
        }
        firsts
    }

    /// Where a pod of this kind stands.
    pub fn turn(&self, kind: KindId, uid: &str) -> Option<&Turn> {
        let wait = self.pods.get(uid).filter(|wait| wait.kind == kind)?;
        Some(&wait.turn)
    }
}
