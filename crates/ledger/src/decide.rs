//! Filter and prioritize: which nodes would do, and which is best.

use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_api::facts::Taints;
use gpustow_pack::{Cost, Refusal, Request};

use crate::Ledger;
use crate::books::{AssumedPod, Node};
use crate::budget::Budget;
use crate::evidence::NodeSet;
use crate::gangs::Shortfall;
use crate::known::Known;
use crate::means::Reclaim;
use crate::reason::Reason;
use crate::scores::{ClassId, Slot};
use crate::trial::Host;

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
        let uid = &ask.pod.uid;
        if self.parts.books.is_gone(uid) {
            return refuse_all(candidates, Reason::Gone);
        }
        let bound = self
            .parts
            .books
            .pod(uid)
            .and_then(|known| known.node.as_ref());
        let binding = self.parts.books.assumed(uid).filter(|it| it.is_binding());
        if let Some(node) = bound.or(binding.map(AssumedPod::node)) {
            let only = candidates.iter().find(|name| **name == &**node);
            return match only {
                Some(name) => Filtered {
                    nodes: vec![name],
                    ..Filtered::default()
                },
                None => refuse_all(candidates, Reason::BindUnderWay),
            };
        }
        if self.parts.books.is_unfenced(uid) {
            return refuse_all(candidates, Reason::Unfenced);
        }
        // Before queued pods are offered room: the same prices decide for them and for this one.
        self.parts.scores.deciding(&self.parts.books);
        let behind = self.parts.queue.is_behind_queued(ask.pod);
        if behind
            && !candidates
                .iter()
                .any(|name| self.sight(now).goes_first(ask.pod, name))
        {
            self.wakes.look_at_queued(&mut self.parts);
        }
        self.begin_member(ask.pod, now);
        // It was asked for before, and no bind came.
        let change = self.parts.books.give_up(uid);
        self.follow(change);
        let seat = match self.seat(ask, candidates, now) {
            Ok(seat) => seat,
            Err(shortfall) => return self.refuse_gang(ask.pod, candidates, shortfall, now),
        };
        // The pods of a gang may take their places in an order in which their rules would not allow each of them.
        let seated = |name: &str, found| match (found, &seat) {
            (Err(Reason::Fit(Refusal::Neighbours)), Some(seat)) if seat.is_on(name) => {
                Ok((seat.cost(), false))
            }
            (found, _) => found,
        };
        let mut feasible: Vec<Key<'a>> = Vec::new();
        let mut refused = Vec::with_capacity(candidates.len());
        let class = self.parts.scores.class(&request, candidates.len());
        let tried = self.parts.shown.tried(uid).cloned();
        let tried = tried.as_ref();
        let decisive = !ask.cooperative || tried.is_some_and(|tried| tried.failures() >= 2);
        let mut take = |ledger: &Self, name: &'a str, (cost, tainted)| {
            if seat.as_ref().is_some_and(|seat| !seat.is_on(name)) {
                return;
            }
            let averse = ledger.sight(now).is_averse(name, tainted, ask.tolerates);
            let tried = tried.is_some_and(|tried| tried.has(name));
            let key = (tried, averse, cost, name);
            match feasible.first_mut() {
                Some(best) if decisive && *best <= key => {}
                Some(best) if decisive => *best = key,
                _ => feasible.push(key),
            }
        };
        // What takes a search is looked at after all that is remembered, each call from where the
        // last one stopped.
        let mut budget = Budget::of(&self.parts.config);
        let mut remembered = match searches(&request) {
            true => Budget::none(),
            false => Budget::of(&self.parts.config),
        };
        let mut unknown = Vec::new();
        let mut offered = NodeSet::default();
        for &name in candidates {
            let Some(slot) = self.parts.scores.slot(name) else {
                refused.push((name, Reason::NoReport));
                continue;
            };
            offered.insert(slot);
            if behind
                && self.wakes.is_for_queued(name, &self.parts.queue)
                && !self.sight(now).goes_first(ask.pod, name)
            {
                refused.push((name, Reason::Queued));
                continue;
            }
            let found = self.cost(slot, name, ask.pod, class, now, &mut remembered);
            match seated(name, found) {
                Ok(found) => take(self, name, found),
                Err(Reason::NotYet) => unknown.push((slot, name)),
                Err(reason) => refused.push((name, reason)),
            }
        }
        let mut stopped = None;
        self.parts.shown.in_turn(uid, &mut unknown);
        for (slot, name) in unknown {
            let found = self.cost(slot, name, ask.pod, class, now, &mut budget);
            match seated(name, found) {
                Ok(found) => take(self, name, found),
                Err(reason) => {
                    refused.push((name, reason));
                    if reason == Reason::NotYet {
                        stopped = stopped.or(Some(slot));
                    }
                }
            }
        }
        self.parts.shown.stopped_at(uid, stopped);
        feasible.sort_unstable();
        let Some(&(all_tried, _, _, best)) = feasible.first() else {
            let looked_at = refused.iter().filter(|(_, why)| *why != Reason::NotYet);
            let looked_at: Vec<&str> = looked_at.map(|(name, _)| *name).collect();
            self.note_offered(ask.pod, offered, candidates.len(), now);
            self.wait_refused(ask.pod, &looked_at, now);
            if stopped.is_some() {
                self.parts.queue.ask_again(uid);
            } else {
                let cured = |why| {
                    matches!(
                        why,
                        Reason::Fit(Refusal::NoRoom)
                            | Reason::Fit(Refusal::Neighbours)
                            | Reason::Reclaimed
                            | Reason::Nominated
                            | Reason::Reserved
                    )
                };
                let short = refused.iter().filter(|(_, why)| cured(*why));
                let short: Vec<&str> = short.map(|(name, _)| *name).collect();
                let wants = |why| cured(why) || why == Reason::Fit(Refusal::NoWholeCard);
                if refused.iter().any(|(_, why)| wants(*why)) {
                    self.parts.queue.is_short(uid);
                }
                Reclaim::at_once(&mut self.parts, ask.pod, &short);
            }
            for (name, reason) in &mut refused {
                *reason = self.sight(now).told(ask.pod, name, *reason);
            }
            return Filtered {
                refused,
                ..Filtered::default()
            };
        };
        refused.retain(|(_, reason)| *reason != Reason::NotYet);
        if all_tried {
            self.parts.shown.try_again(uid, candidates);
        }
        let choice = match seat {
            Some(seat) => Ok(seat.into_choice()),
            None => self.sight(now).choose(best, ask.pod),
        };
        match choice {
            Ok(choice) => {
                let ttl = match ask.slow {
                    true => self.parts.config.slow_reservation_ttl,
                    false => self.hold_gang(ask.pod, now),
                };
                self.reserve(ask.pod, best, &request, &choice, now + ttl);
            }
            Err(reason) => {
                self.note_offered(ask.pod, offered, candidates.len(), now);
                self.wait_refused(ask.pod, candidates, now);
                return refuse_all(candidates, reason);
            }
        }
        Filtered {
            nodes: feasible.into_iter().map(|(.., name)| name).collect(),
            refused,
            shortfall: None,
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
        let held = self
            .parts
            .books
            .assumed(uid)
            .map(|held| held.node().clone());
        let bound = || self.parts.books.pod(uid)?.node.clone();
        let own = held.or_else(bound);
        let tried = self.parts.shown.tried(uid).cloned();
        let class = self.parts.scores.class(request, nodes.len());
        let mut budget = Budget::of(&self.parts.config);
        let mut key = |name: &str| {
            let (cost, tainted) = if own.as_deref() == Some(name) {
                self.sight(now).cost_without(name, pod, &mut budget)?
            } else {
                let slot = self.parts.scores.slot(name)?;
                self.cost(slot, name, pod, class, now, &mut budget).ok()?
            };
            let tried = tried.as_ref().is_some_and(|tried| tried.has(name));
            Some((
                tried,
                self.sight(now).is_averse(name, tainted, tolerates),
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

    /// What the node would cost, from memory if such a node was asked about before, and whether it
    /// has soft taints.
    pub(crate) fn cost(
        &mut self,
        slot: Slot,
        name: &str,
        pod: &PodFacts,
        class: ClassId,
        now: Duration,
        budget: &mut Budget,
    ) -> Result<(Cost, bool), Reason> {
        let gate = self.sight(now).enter(slot)?;
        let request = pod.asks.readable();
        let request = request.map_err(|_| Reason::Fit(Refusal::TooComplex))?;
        let is_ruled = request.rules.is_some();
        let is_kept = || self.sight(now).is_kept_from(name, pod);
        if is_ruled || is_kept() {
            let choice = self.sight(now).trial().choose(pod, name, budget)?;
            return Ok((choice.cost, gate.is_tainted()));
        }
        let cost = self.parts.scores.cost(class, slot, request, budget)?;
        Ok((cost, gate.is_tainted()))
    }
}

impl Known<'_> {
    /// The cost of a node that holds memory for the pod already, as if it did not, and whether it has
    /// soft taints.
    fn cost_without(
        &self,
        name: &str,
        pod: &PodFacts,
        budget: &mut Budget,
    ) -> Option<(Cost, bool)> {
        let gate = self.enter(self.scores.slot(name)?).ok()?;
        let mut trial = self.trial();
        trial.leave([pod.uid.clone()]);
        let choice = trial.fit(pod, name, None, Host::Beside, budget).ok()?;
        Some((choice.cost, gate.is_tainted()))
    }

    /// Does the node rank last, because it is emptied, or has soft taints that the pod does not tolerate?
    pub(crate) fn is_averse(
        &self,
        name: &str,
        tainted: bool,
        tolerates: &dyn Fn(&Taints) -> bool,
    ) -> bool {
        if !tainted {
            return self.earmarks.empties(name);
        }
        let facts = self.books.node(name).and_then(Node::facts);
        let taints = facts.map(|facts| &facts.prefer_no_schedule);
        self.earmarks.empties(name)
            || taints.is_some_and(|taints| !taints.is_empty() && !tolerates(taints))
    }
}
