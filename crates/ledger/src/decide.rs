//! Filter and prioritize: which nodes would do, and which is best.

use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_api::facts::Taints;
use gpustow_books::{
    AssumedPod, Budget, Change, ClassId, Host, Node, NodeSet, Reason, Slot, Tried,
};
use gpustow_means::{Reclaim, Seat, Shortfall, Sight};
use gpustow_pack::{Cost, Refusal, Request};

use crate::{Ledger, explain};

/// One pod's question of where to go, for [`Ledger::filter`].
#[derive(Clone, Copy)]
pub struct Ask<'a> {
    /// The pod.
    pub pod: &'a PodFacts,
    /// It has soft preferences that kube-scheduler weighs: name every node that would do.
    pub cooperative: bool,
    /// It has volumes or resource claims to be prepared before its bind.
    pub slow: bool,
    /// Does it tolerate these `PreferNoSchedule` taints (key, value)?
    pub tolerates: &'a dyn Fn(&Taints) -> bool,
}

impl<'a> Ask<'a> {
    /// Of a pod without preferences and volumes, which tolerates every soft taint.
    #[must_use]
    pub fn of(pod: &'a PodFacts) -> Self {
        Self {
            pod,
            cooperative: false,
            slow: false,
            tolerates: &|_| true,
        }
    }
}

/// The answer to a filter call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filtered<'a> {
    /// The nodes that would do; the first holds the reservation. One, unless the pod is
    /// cooperative.
    pub nodes: Vec<&'a str>,
    /// The nodes that would not, and why, in no order. Feasible nodes that were not chosen are in neither list.
    pub refused: Vec<(&'a str, Reason)>,
    /// Too few of the pod's group fit with it.
    pub shortfall: Option<Shortfall>,
}

pub(crate) fn refuse_all<'a>(names: &[&'a str], reason: Reason) -> Filtered<'a> {
    Filtered {
        refused: names.iter().map(|name| (*name, reason)).collect(),
        ..Filtered::default()
    }
}

/// Is this more than a look at each card?
fn searches(request: &Request) -> bool {
    !matches!(request.claims.as_slice(), [claim] if claim.gpus <= 1)
}

/// How good a node is for a pod: lower is better.
type Key<'a> = (bool, bool, Cost, &'a str);

/// The candidates after the comparison.
#[derive(Default)]
pub(crate) struct Compared<'a> {
    /// Where something after this extender has refused the pod.
    tried: Option<Tried>,
    /// The best alone is of use.
    is_decisive: bool,
    /// The nodes that would do, the best first.
    feasible: Vec<Key<'a>>,
    refused: Vec<(&'a str, Reason)>,
    /// All that report.
    offered: NodeSet,
    /// The first that was not looked at, because the call had cost enough.
    stopped: Option<Slot>,
}

impl<'a> Compared<'a> {
    /// The candidates that would do, the best first.
    pub(crate) fn names(self) -> Vec<&'a str> {
        self.feasible.into_iter().map(|(.., name)| name).collect()
    }
}

impl Ledger {
    /// Chooses the best of the candidate nodes for a pod that asks for GPU memory, and reserves
    /// there until its bind.
    pub fn filter<'a>(
        &mut self,
        ask: &Ask<'_>,
        candidates: &[&'a str],
        now: Duration,
    ) -> Filtered<'a> {
        self.expire(now);
        let Ok(request) = ask.pod.asks.readable().cloned() else {
            return Filtered::default();
        };
        if let Some(answer) = self.answer_without_choice(&ask.pod.uid, candidates) {
            return answer;
        }
        self.meet(ask.pod);
        // Before queued pods are offered room: the same prices decide for them and for this one.
        self.parts.scores.deciding(&self.parts.books);
        let first = self.sight(now).goes_first(ask.pod);
        let goes_first = first.is_some_and(|node| candidates.contains(&&**node));
        if self.parts.queue.is_behind_queued(ask.pod) && !goes_first {
            self.wakes.look_at_queued(&mut self.parts);
        }
        self.begin_member(ask.pod, now);
        // It was asked for before, and no bind came.
        let change = self.parts.books.give_up(&ask.pod.uid);
        self.follow(change);
        let seat = match self.seat(ask, candidates, now) {
            Ok(seat) => seat,
            Err(shortfall) => return self.refuse_gang(ask.pod, candidates, shortfall, now),
        };
        let tried = self.parts.shown.tried(&ask.pod.uid);
        let failed = tried.is_some_and(|tried| tried.failures() >= 2);
        let mut found = Compared {
            is_decisive: failed || !ask.cooperative,
            ..Compared::default()
        };
        self.compare(&mut found, ask, candidates, seat.as_ref(), now);
        let Some(&(all_tried, _, _, best)) = found.feasible.first() else {
            return self.refuse(ask.pod, candidates, found, now);
        };
        if all_tried {
            self.parts.shown.try_again(&ask.pod.uid, candidates);
        }
        let choice = match seat {
            Some(seat) => Ok(seat.into_choice()),
            None => self.sight(now).choose(best, ask.pod),
        };
        let choice = match choice {
            Ok(choice) => choice,
            Err(reason) => {
                self.note_offered(ask.pod, found.offered, candidates.len(), now);
                self.wait_refused(ask.pod, candidates, now);
                return refuse_all(candidates, reason);
            }
        };
        let ttl = match ask.slow {
            true => self.parts.config.slow_reservation_ttl,
            false => self.hold_gang(ask.pod, now),
        };
        self.reserve(ask.pod, best, &request, &choice, now + ttl);
        let (mut refused, nodes) = (std::mem::take(&mut found.refused), found.names());
        refused.retain(|(_, reason)| *reason != Reason::NotYet);
        Filtered {
            nodes,
            refused,
            shortfall: None,
        }
    }

    /// The pod is or will be asked about: which pods start counts from the first on that starts alone.
    pub fn meet(&mut self, pod: &PodFacts) {
        let mut change = Change::default();
        self.parts.books.meet(pod, &mut change);
        self.follow(change);
    }

    /// The answer about a pod that is gone, bound, being bound or not fenced.
    fn answer_without_choice<'a>(&self, uid: &str, candidates: &[&'a str]) -> Option<Filtered<'a>> {
        let books = &self.parts.books;
        if books.is_gone(uid) {
            return Some(refuse_all(candidates, Reason::Gone));
        }
        let bound = books.pod(uid).and_then(|known| known.node.as_ref());
        let binding = books.assumed(uid).filter(|it| it.is_binding());
        if let Some(node) = bound.or(binding.map(AssumedPod::node)) {
            let only = candidates.iter().find(|name| **name == &**node);
            return Some(match only {
                Some(name) => Filtered {
                    nodes: vec![name],
                    ..Filtered::default()
                },
                None => refuse_all(candidates, Reason::BindUnderWay),
            });
        }
        let unfenced = books.is_unfenced(uid);
        unfenced.then(|| refuse_all(candidates, Reason::Unfenced))
    }

    /// Finds the candidates that would do, their costs, and the reasons against the others. Candidates that need a
    /// search come after all candidates with remembered results. Each call goes on where the last one stopped.
    pub(crate) fn compare<'a>(
        &mut self,
        found: &mut Compared<'a>,
        ask: &Ask<'_>,
        candidates: &[&'a str],
        seat: Option<&Seat>,
        now: Duration,
    ) {
        let uid = &ask.pod.uid;
        let Ok(request) = ask.pod.asks.readable() else {
            return;
        };
        let behind = self.parts.queue.is_behind_queued(ask.pod);
        let first = self.sight(now).goes_first(ask.pod).cloned();
        let class = self.parts.scores.class(request, candidates.len());
        let mut budget = Budget::of(&self.parts.config);
        let mut remembered = match searches(request) {
            true => Budget::none(),
            false => Budget::of(&self.parts.config),
        };
        found.tried = self.parts.shown.tried(uid).cloned();
        let mut unknown = Vec::new();
        for &name in candidates {
            let Some(slot) = self.parts.scores.slot(name) else {
                found.refused.push((name, Reason::NoReport));
                continue;
            };
            found.offered.insert(slot);
            if behind
                && self.wakes.is_for_queued(name, &self.parts.queue)
                && first.as_deref() != Some(name)
            {
                found.refused.push((name, Reason::Queued));
                continue;
            }
            match self.cost(slot, name, ask.pod, class, now, &mut remembered) {
                Err(Reason::NotYet) => unknown.push((slot, name)),
                cost => self.take(found, ask, seat, (name, cost), now),
            }
        }
        self.parts.shown.in_turn(uid, &mut unknown);
        for (slot, name) in unknown {
            let cost = self.cost(slot, name, ask.pod, class, now, &mut budget);
            if cost == Err(Reason::NotYet) {
                found.stopped = found.stopped.or(Some(slot));
            }
            self.take(found, ask, seat, (name, cost), now);
        }
        self.parts.shown.stopped_at(uid, found.stopped);
        found.feasible.sort_unstable();
    }

    /// Adds one candidate to the findings.
    fn take<'a>(
        &self,
        found: &mut Compared<'a>,
        ask: &Ask<'_>,
        seat: Option<&Seat>,
        (name, cost): (&'a str, Result<(Cost, bool), Reason>),
        now: Duration,
    ) {
        let (cost, tainted) = match (cost, seat) {
            (Ok(found), _) => found,
            // The pods of a gang may take their places in an order in which their rules would not allow each of them.
            (Err(Reason::Fit(Refusal::Neighbours)), Some(seat)) if seat.is_on(name) => {
                (seat.cost(), false)
            }
            (Err(reason), _) => return found.refused.push((name, reason)),
        };
        if seat.is_some_and(|seat| !seat.is_on(name)) {
            return;
        }
        let averse = is_averse(&self.sight(now), name, tainted, ask.tolerates);
        let tried = found.tried.as_ref().is_some_and(|it| it.has(name));
        let key = (tried, averse, cost, name);
        match found.feasible.first_mut() {
            Some(best) if found.is_decisive && *best <= key => {}
            Some(best) if found.is_decisive => *best = key,
            _ => found.feasible.push(key),
        }
    }

    /// No candidate would do.
    fn refuse<'a>(
        &mut self,
        pod: &PodFacts,
        candidates: &[&'a str],
        found: Compared<'a>,
        now: Duration,
    ) -> Filtered<'a> {
        let mut refused = found.refused;
        let looked_at = refused.iter().filter(|(_, why)| *why != Reason::NotYet);
        let looked_at: Vec<&str> = looked_at.map(|(name, _)| *name).collect();
        self.note_offered(pod, found.offered, candidates.len(), now);
        self.wait_refused(pod, &looked_at, now);
        if found.stopped.is_some() {
            self.parts.queue.ask_again(&pod.uid);
        } else {
            let short = refused.iter().filter(|(_, why)| why.is_cured_by_room());
            let short: Vec<&str> = short.map(|(name, _)| *name).collect();
            let is_whole = |why| why == Reason::Fit(Refusal::NoWholeCard);
            if !short.is_empty() || refused.iter().any(|(_, why)| is_whole(*why)) {
                self.parts.queue.is_short(&pod.uid);
            }
            Reclaim::at_once(&mut self.parts, pod, &short);
        }
        for (name, reason) in &mut refused {
            *reason = explain::told(&self.sight(now), pod, name, *reason);
        }
        Filtered {
            refused,
            ..Filtered::default()
        }
    }

    pub(crate) fn note_offered(
        &mut self,
        pod: &PodFacts,
        offered: NodeSet,
        candidates: usize,
        now: Duration,
    ) {
        let least = self.parts.config.least_nodes;
        self.parts
            .shown
            .note_offered(pod, offered, candidates, least, &self.parts.books, now);
    }

    /// The pod was refused just now on all of these nodes.
    pub(crate) fn wait_refused(&mut self, pod: &PodFacts, candidates: &[&str], now: Duration) {
        let claimed_until = now + self.parts.config.claim_ttl;
        self.parts
            .change(|it, books| it.earmark_for_nominated(pod, books, claimed_until));
        self.member_refused(pod);
        let (earmarks, books) = (&mut self.parts.earmarks, &self.parts.books);
        self.parts
            .queue
            .refused(pod, candidates, earmarks, books, &self.parts.config, now);
    }

    /// Scores nodes that [`Ledger::filter`] let pass, 0 to 10, best highest, in the order given.
    pub fn rank(
        &mut self,
        pod: &PodFacts,
        tolerates: &dyn Fn(&Taints) -> bool,
        nodes: &[&str],
        now: Duration,
    ) -> Vec<i64> {
        let Ok(request) = pod.asks.readable() else {
            return vec![0; nodes.len()];
        };
        let uid = &pod.uid;
        let held = self.parts.books.assumed(uid);
        let held = held.map(|held| held.node().clone());
        let bound = || self.parts.books.pod(uid)?.node.clone();
        let own = held.or_else(bound);
        let tried = self.parts.shown.tried(uid).cloned();
        let class = self.parts.scores.class(request, nodes.len());
        let mut budget = Budget::of(&self.parts.config);
        let mut key = |name: &str| {
            let (cost, tainted) = if own.as_deref() == Some(name) {
                cost_without(&self.sight(now), name, pod, &mut budget)?
            } else {
                let slot = self.parts.scores.slot(name)?;
                self.cost(slot, name, pod, class, now, &mut budget).ok()?
            };
            let tried = tried.as_ref().is_some_and(|tried| tried.has(name));
            Some((
                tried,
                is_averse(&self.sight(now), name, tainted, tolerates),
                cost,
            ))
        };
        let keys: Vec<Option<Key<'_>>> = nodes
            .iter()
            .map(|name| {
                let (tried, averse, cost) = key(name)?;
                Some((tried, averse, cost, *name))
            })
            .collect();
        let mut order: Vec<_> = keys.iter().flatten().collect();
        order.sort_unstable();
        let steps = order.len().max(2) - 1;
        let score = |key: &Key<'_>| {
            let place = order.binary_search(&key).unwrap_or(steps);
            i64::try_from(10 - (10 * place).div_ceil(steps).min(10)).unwrap_or(0)
        };
        keys.iter()
            .map(|key| key.as_ref().map_or(0, score))
            .collect()
    }

    /// The cost of the node, from memory if an equal node was asked about before, and whether the node has soft taints.
    pub(crate) fn cost(
        &mut self,
        slot: Slot,
        name: &str,
        pod: &PodFacts,
        class: ClassId,
        now: Duration,
        budget: &mut Budget,
    ) -> Result<(Cost, bool), Reason> {
        let sight = self.sight(now);
        let gate = sight.enter(slot)?;
        let request = pod.asks.readable();
        let request = request.map_err(|_| Reason::Fit(Refusal::TooComplex))?;
        if request.rules.is_some() || sight.is_kept_from(name, pod) {
            let trial = sight.trial().while_others_start();
            let choice = trial.choose(pod, name, budget)?;
            return Ok((choice.cost, gate.is_tainted()));
        }
        let cost = self.parts.scores.cost(class, slot, request, budget)?;
        Ok((cost, gate.is_tainted()))
    }
}

/// The cost of a node that holds memory for the pod already, as if it did not, and whether it has
/// soft taints.
fn cost_without(
    sight: &Sight<'_>,
    name: &str,
    pod: &PodFacts,
    budget: &mut Budget,
) -> Option<(Cost, bool)> {
    let gate = sight.enter(sight.scores.slot(name)?).ok()?;
    let mut trial = sight.trial().while_others_start();
    trial.leave([pod.uid.clone()]);
    let choice = trial.fit(pod, name, None, Host::Beside, budget).ok()?;
    Some((choice.cost, gate.is_tainted()))
}

/// Does the node rank last, because it is emptied, or has soft taints that the pod does not tolerate?
pub(crate) fn is_averse(
    sight: &Sight<'_>,
    name: &str,
    tainted: bool,
    tolerates: &dyn Fn(&Taints) -> bool,
) -> bool {
    if !tainted {
        return sight.earmarks.empties(name);
    }
    let facts = sight.books.node(name).and_then(Node::facts);
    let taints = facts.map(|facts| &facts.prefer_no_schedule);
    sight.earmarks.empties(name)
        || taints.is_some_and(|taints| !taints.is_empty() && !tolerates(taints))
}
