//! Which queued pods are ungated without room, because kube-scheduler may evict others for them.
//!
//! Pods with equal requests, constraints and priority are one *class*: a node helps all of them or none. So a class
//! looks at a node again only when the node has changed. The cost of one look is bounded ([`Budget::of_look`]), and the
//! next look goes on where it stopped. A round asks every class; the next round begins [`LOOK_EVERY`] later.
//!
//! A few pods are out for this at a time ([`MOST`]). A pod counts as long as it waits outside the queue and
//! kube-scheduler has nominated it nowhere, up to [`OUT_FOR`]. Then its class rests.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_books::{Books, Budget, Event, HashMap, HashSet, Host, Reason, Turn, Uid};
use gpustow_means::{Parts, Sight};
use gpustow_queue::{Changes, KindId, Ungate, is_queued};

use super::Wakes;

/// So many pods are out at a time.
const MOST: usize = 4;
/// Between two rounds.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// For so long a pod that gets nothing counts as out.
const OUT_FOR: Duration = Duration::from_secs(60);
/// A class whose pod was out for nothing rests for so long, and one that found nothing asks all nodes again.
const REST: Duration = Duration::from_secs(300);

/// Pods for which a node has the same effect.
type Class = (KindId, i32);

/// The knowledge of a class about the nodes.
#[derive(Debug, Default)]
struct Asked {
    /// To be looked at.
    nodes: Vec<Arc<str>>,
    /// Changes before this one were taken into `nodes`.
    seen: u64,
    /// When every node was taken into it.
    all_at: Duration,
    /// The last round in which no node was left.
    done_in: u64,
    rests_until: Duration,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Preemptors {
    /// Pods that were ungated for this, when, and their class.
    out: HashMap<Uid, (Duration, Class)>,
    classes: HashMap<Class, Asked>,
    changes: Changes,
    /// How many bound pods have each priority.
    bound: BTreeMap<i32, usize>,
    round: u64,
    /// The last pod of this round that was looked at; none between two rounds.
    after: Option<Turn>,
    /// Pods before it that joined since, or for which the work did not suffice.
    first: BTreeSet<Turn>,
    next_round: Duration,
    /// The cost of all looks.
    pub(super) spent: u64,
}

fn counted(pod: Option<&Arc<PodFacts>>) -> Option<i32> {
    let pod = pod.filter(|pod| pod.node.is_some() && !pod.released && !pod.deleting)?;
    Some(pod.priority)
}

impl Preemptors {
    pub(super) fn follow(&mut self, event: &Event) {
        match event {
            Event::Pod { old, new, .. } => {
                if let Some(before) = counted(old.as_ref())
                    && let Some(count) = self.bound.get_mut(&before)
                {
                    *count -= 1;
                    if *count == 0 {
                        self.bound.remove(&before);
                    }
                }
                if let Some(now) = counted(new.as_ref()) {
                    *self.bound.entry(now).or_default() += 1;
                }
                let turn = |pod: &Option<Arc<PodFacts>>| {
                    let queued = pod.as_ref().filter(|pod| is_queued(pod));
                    queued.map(|pod| Turn::of(pod))
                };
                if let Some(turn) = turn(new).filter(|it| turn(old).as_ref() != Some(it)) {
                    self.joined(turn);
                }
                let pods = old.iter().chain(new);
                pods.filter_map(|pod| pod.node.as_ref())
                    .for_each(|node| self.changed(node));
            }
            Event::Node { name, .. } | Event::Opened(name) => self.changed(name),
            Event::NodeGone(name) => self.changes.forget(name),
            _ => {}
        }
    }

    fn changed(&mut self, node: &Arc<str>) {
        if !self.classes.is_empty() {
            self.changes.note(node);
        }
    }

    /// A pod has joined the queue, or stands elsewhere there.
    fn joined(&mut self, turn: Turn) {
        if self.after.as_ref().is_some_and(|after| turn < *after) {
            self.first.insert(turn);
        }
    }

    /// No pod is queued.
    fn rest(&mut self) {
        self.classes.clear();
        self.changes = Changes::default();
        self.first.clear();
        self.after = None;
    }

    /// A pod is ungated for this.
    fn goes_out(&mut self, uid: &Uid, class: Class, now: Duration) {
        self.out.entry(uid.clone()).or_insert((now, class));
    }

    /// How many pods count as out.
    fn out(&mut self, books: &Books, now: Duration) -> usize {
        let classes = &mut self.classes;
        let mut count = 0;
        self.out.retain(|uid, (since, class)| {
            let pod = books
                .pod(uid)
                .filter(|pod| pod.node.is_none() && !pod.released);
            let Some(pod) = pod.filter(|pod| !pod.deleting) else {
                return false;
            };
            if pod.nominated.is_some() {
                return true;
            }
            let lasts = now.saturating_sub(*since) < OUT_FOR;
            count += usize::from(lasts);
            if !lasts && let Some(class) = classes.get_mut(class) {
                class.rests_until = now + REST;
            }
            lasts
        });
        count
    }

    /// The nodes that this class has not looked at are taken into its list.
    fn take_nodes(&mut self, class: Class, books: &Books, now: Duration) -> Option<&mut Asked> {
        let is_new = !self.classes.contains_key(&class);
        let known = self.classes.entry(class).or_default();
        if known.rests_until > now || known.done_in == self.round {
            return None;
        }
        if is_new || now >= known.all_at + REST {
            known.nodes = books.nodes().map(|(name, _)| name.clone()).collect();
            known.all_at = now;
        } else if known.nodes.is_empty() {
            let changed = self.changes.since(known.seen);
            known.nodes.extend(changed.map(|(_, node)| node.clone()));
        } else {
            return Some(known);
        }
        known.seen = self.changes.last();
        Some(known)
    }
}

/// The result of a look for one pod.
enum Found {
    /// kube-scheduler may evict others for it.
    Node,
    Nothing,
    /// There was not enough work left for the answer.
    NotYet,
}

impl Wakes {
    /// A pod is about to be ungated because it may preempt.
    pub(super) fn goes_out(&mut self, parts: &mut Parts, uid: &Uid) {
        let kind = parts.queue.waiting().kind_of(uid);
        if let Some(class) = kind.zip(parts.books.pod(uid)) {
            let class = (class.0, class.1.priority);
            self.preemptors.goes_out(uid, class, parts.now);
        }
    }

    /// Ungates a few pods at their turn for which others would be evicted. True if the round goes on.
    pub(super) fn find_preemptors(&mut self, parts: &mut Parts) -> bool {
        let (gated, preemptors) = (parts.queue.gated(), &mut self.preemptors);
        if !gated.is_on() || gated.is_empty() {
            preemptors.rest();
            return false;
        }
        let out = preemptors.out(&parts.books, parts.now);
        let waits = gated.leaving();
        let waits = waits.filter(|(_, why)| *why == Ungate::MayPreempt);
        let mut free = MOST.saturating_sub(out + waits.count());
        let lowest = preemptors.bound.keys().next().copied();
        let Some(lowest) = lowest.filter(|_| free > 0) else {
            return false;
        };
        if preemptors.after.is_none() {
            if parts.now < preemptors.next_round {
                return false;
            }
            preemptors.round += 1;
        }
        let mut budget = Budget::of_look();
        let mut goes_on = true;
        while free > 0 && !budget.is_spent() {
            let Some(turn) = self.next_preemptor(parts, lowest) else {
                self.end_round(parts);
                goes_on = false;
                break;
            };
            budget.charge(1);
            match self.look_for(parts, &turn, &mut budget) {
                Found::Node => {
                    free -= 1;
                    parts
                        .queue
                        .gated_mut()
                        .let_go(turn.uid(), Ungate::MayPreempt);
                }
                Found::Nothing => {}
                Found::NotYet => {
                    self.preemptors.first.insert(turn);
                }
            }
        }
        self.preemptors.spent += budget.spent();
        goes_on && free > 0
    }

    fn next_preemptor(&mut self, parts: &mut Parts, lowest: i32) -> Option<Turn> {
        let preemptors = &mut self.preemptors;
        if let Some(turn) = preemptors.first.pop_first() {
            return Some(turn);
        }
        let next = parts.queue.gated().after(preemptors.after.as_ref());
        let next = next.filter(|turn| turn.priority() > lowest)?.clone();
        preemptors.after = Some(next.clone());
        Some(next)
    }

    fn end_round(&mut self, parts: &mut Parts) {
        let waiting = parts.queue.waiting();
        let preemptors = &mut self.preemptors;
        preemptors.after = None;
        preemptors.next_round = parts.now + LOOK_EVERY;
        let classes = &mut preemptors.classes;
        classes.retain(|(kind, _), _| waiting.kind(*kind).is_some());
    }

    /// Looks at nodes for one queued pod, as far as the budget suffices.
    fn look_for(&mut self, parts: &mut Parts, turn: &Turn, budget: &mut Budget) -> Found {
        let uid = turn.uid();
        let gated = parts.queue.gated();
        let is_queued = gated.has_turn(turn) && !gated.is_leaving(uid);
        let pod = parts.books.pod(uid).filter(|pod| pod.preempts && is_queued);
        let kind = parts.queue.waiting().kind_of(uid);
        let free = !parts.queue.waiting().has_offer(uid) && !parts.books.is_unfenced(uid);
        let Some((pod, kind)) = pod.cloned().zip(kind).filter(|_| free) else {
            return Found::Nothing;
        };
        let class = (kind, pod.priority);
        let preemptors = &mut self.preemptors;
        let Some(known) = preemptors.take_nodes(class, &parts.books, parts.now) else {
            return Found::Nothing;
        };
        let mut nodes = std::mem::take(&mut known.nodes);
        let mut found = Found::Nothing;
        while let Some(name) = nodes.last() {
            let is_first = budget.is_whole();
            match evicts_on(&parts.sight(), name, &pod, budget) {
                // The next of the class looks here first.
                Ok(true) => {
                    found = Found::Node;
                    break;
                }
                // A node that a whole look is not enough for is left out.
                Err(_) if !is_first => {
                    found = Found::NotYet;
                    break;
                }
                _ => drop(nodes.pop()),
            }
        }
        let preemptors = &mut self.preemptors;
        if let Some(known) = preemptors.classes.get_mut(&class) {
            if nodes.is_empty() {
                known.done_in = preemptors.round;
            }
            known.nodes = nodes;
        }
        found
    }
}

/// Does the pod not fit on the node, and would it fit if all pods of lower priority were gone? [`Reason::NotYet`] if
/// the budget is spent before the answer.
fn evicts_on(
    sight: &Sight<'_>,
    name: &str,
    pod: &PodFacts,
    budget: &mut Budget,
) -> Result<bool, Reason> {
    if budget.is_spent() {
        return Err(Reason::NotYet);
    }
    budget.charge(1);
    let Some(node) = sight.books.node(name) else {
        return Ok(false);
    };
    if sight.check(name).is_err() || sight.books.excluded(name, &pod.constraints).is_some() {
        return Ok(false);
    }
    budget.charge(node.bound().len());
    let goes = |uid: &&Uid| {
        let lower = sight.books.pod(uid).filter(|it| it.priority < pod.priority);
        lower.is_some_and(|it| !it.deleting && it.assignment.is_some())
    };
    let mut gone: HashSet<Uid> = node.bound().keys().filter(goes).cloned().collect();
    if gone.is_empty() {
        return Ok(false);
    }
    gone.insert(pod.uid.clone());
    // On most nodes the others leave too little of every GPU, which is a cheaper question.
    let least = pod.asks.request().map(|request| request.least());
    let held = |card| node.held(node.uuid(card), |uid| !gone.contains(uid));
    let mut cards = node.view().cards.iter().enumerate();
    if cards.all(|(card, it)| Some(it.capacity.minus(held(card))) < least) {
        return Ok(false);
    }
    let mut fits = |gone| {
        let mut trial = sight.trial();
        trial.leave(gone);
        let fits = trial.fits(pod, name, Host::Beside, budget);
        fits.ok_or(Reason::NotYet)
    };
    Ok(fits(gone)? && !fits(HashSet::from_iter([pod.uid.clone()]))?)
}
