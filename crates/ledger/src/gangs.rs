//! Gangs: pods of a PodGroup of which kube-scheduler binds `minCount` at the same time, or none.
//!
//! kube-scheduler asks about the pods of a gang one after the other, in one *cycle*, and no call says that it has given
//! the gang up. So a cycle ends here when a pod is asked about that this cycle has had, or when too few of the gang are
//! left to reach `minCount`: then nothing is held for any of them. The first call of a cycle plans for all pods that are
//! known ([`plan`]); if too few fit, it is refused, and nothing is held at all.

mod plan;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Group, GroupPolicy, PodFacts};

use crate::books::{Uid, may_come};
use crate::decide::refuse_all;
use crate::maps::HashMap;
use crate::queue::NodeSet;
use crate::sight::Sight;
use crate::{Ask, Filtered, Ledger, Reason};
use plan::Member;
pub(crate) use plan::{Seat, Seats};

/// For the next call about a gang, or its first bind: kube-scheduler takes some milliseconds.
const HOLD: Duration = Duration::from_secs(2);
/// The same after a cycle that ended without a bind: something that is not asked here refused the gang.
const HOLD_AGAIN: Duration = Duration::from_millis(500);
/// A cycle is forgotten when nothing was heard of its gang for so long.
const FORGOTTEN: Duration = Duration::from_secs(60);
/// Cycles that are remembered before old ones are looked for.
const CYCLES: usize = 256;

/// How many pods of a group fit at the same time, and how many must.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortfall {
    /// The group.
    pub group: Group,
    /// So many fit, those that are bound among them.
    pub fit: usize,
    /// So many must.
    pub of: usize,
}

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { group, fit, of } = self;
        write!(f, "group {group}: {fit} of {of} fit")
    }
}

/// kube-scheduler's cycles, by gang.
#[derive(Debug, Default)]
pub(crate) struct Cycles(HashMap<Group, Cycle>);

/// One cycle, or the last one.
#[derive(Debug, Default)]
struct Cycle {
    /// The pods that were asked about.
    asked: BTreeSet<Uid>,
    /// Where the others are to go.
    seats: HashMap<Uid, Seat>,
    /// kube-scheduler has begun to bind.
    binds: bool,
    /// Cycles that ended without a bind, one after the other.
    failed: bool,
    heard: Duration,
}

/// Who of a gang is where.
struct Roll {
    min_count: usize,
    /// Bound, or assumed.
    placed: usize,
    /// They request no GPU memory: kube-scheduler does not ask about them here.
    others: usize,
    /// Those that may come and have no place.
    open: Vec<Arc<PodFacts>>,
}

impl Roll {
    /// So many of those that have no place must get one.
    fn wanted(&self) -> usize {
        self.min_count.saturating_sub(self.placed + self.others)
    }

    /// So many of them get one.
    fn shortfall(&self, gang: &Group, count: usize) -> Shortfall {
        Shortfall {
            group: gang.clone(),
            fit: self.min_count.saturating_sub(self.wanted()) + count,
            of: self.min_count,
        }
    }
}

impl Ledger {
    /// A filter call about a pod begins, and so perhaps a cycle of its gang.
    pub(crate) fn begin_member(&mut self, pod: &PodFacts, now: Duration) {
        let Some(gang) = self.books.gang(pod).filter(|gang| gang.is_in_tree()) else {
            return;
        };
        let known = &mut self.gangs.0;
        if known.len() >= CYCLES {
            known.retain(|_, cycle| now.saturating_sub(cycle.heard) < FORGOTTEN);
        }
        let cycle = known.entry(gang.clone()).or_default();
        cycle.heard = now;
        if cycle.asked.insert(pod.uid.clone()) {
            return;
        }
        let bound = std::mem::take(&mut cycle.binds);
        cycle.failed = !bound;
        cycle.asked = [pod.uid.clone()].into();
        cycle.seats.clear();
        if !bound {
            let change = self.books.release_group(gang);
            self.follow(change);
        }
    }

    /// Where the pod of a gang is to go among these nodes, so that enough of the others fit; none if that does not matter.
    ///
    /// # Errors
    /// If too few fit.
    pub(crate) fn seat(
        &mut self,
        ask: &Ask<'_>,
        candidates: &[&str],
        now: Duration,
    ) -> Result<Option<Seat>, Shortfall> {
        let pod = ask.pod;
        let Some(gang) = self.books.gang(pod).filter(|gang| gang.is_in_tree()) else {
            return Ok(None);
        };
        let Some(roll) = self
            .sight(now)
            .roll(gang, Some(pod), self.gangs.asked(gang))
        else {
            return Ok(None);
        };
        let wanted = roll.wanted().min(roll.open.len());
        if wanted == 0 {
            return Ok(None);
        }
        if let Some(cycle) = self.gangs.0.get_mut(gang)
            && let Some(seat) = cycle.seats.swap_remove(&pod.uid)
            && candidates.contains(&&*seat.node)
            && self.sight(now).is_free(&seat, pod)
        {
            return Ok(Some(seat));
        }
        let nodes = self.best_nodes(ask, candidates, now);
        let sight = self.sight(now);
        let mut members = vec![Member::among(pod, nodes)];
        let others = roll.open.iter().filter(|it| it.uid != pod.uid);
        members.extend(others.map(|it| Member::anywhere(it)));
        let Seats { mut seats, count } = sight.seats(members, wanted);
        let shortfall = roll.shortfall(gang, count);
        if count < wanted {
            self.end_cycle(gang);
            return Err(shortfall);
        }
        let own = seats.swap_remove(&pod.uid);
        if let Some(cycle) = self.gangs.0.get_mut(gang) {
            cycle.seats = seats;
        }
        match own {
            Some(seat) => Ok(Some(seat)),
            // The others need the room.
            None if self.sight(now).fits_among(pod, candidates) => Err(shortfall),
            None => Ok(None),
        }
    }

    /// Too few of the pod's gang fit now.
    #[must_use]
    pub fn shortfall(&self, pod: &PodFacts, now: Duration) -> Option<Shortfall> {
        self.sight(now).seats_of_gang(pod)?.err()
    }

    /// The candidates that would do, best first.
    fn best_nodes(&mut self, ask: &Ask<'_>, candidates: &[&str], now: Duration) -> Vec<Arc<str>> {
        let pod = ask.pod;
        let Ok(request) = pod.request.clone() else {
            return Vec::new();
        };
        let class = self.scores.class(&request);
        let mut budget = crate::Budget::of(&self.config);
        let tried = self.queue.tried(&pod.uid).cloned();
        let behind = self.queue.is_behind_queued(pod);
        let mut found = Vec::new();
        for &name in candidates {
            let first = self.queue.goes_first(pod, name);
            if behind && self.queue.is_for_queued(name) && !first {
                continue;
            }
            let Some(slot) = self.scores.slot(name) else {
                continue;
            };
            if let Ok((cost, tainted)) = self.cost(slot, name, pod, class, now, &mut budget) {
                let averse = tainted && self.sight(now).is_averse(name, ask.tolerates);
                let tried = tried.as_ref().is_some_and(|tried| tried.has(name));
                found.push((!first, tried, averse, cost, name));
            }
        }
        found.sort_unstable();
        let names = found.into_iter().map(|(.., name)| name);
        let known = names.filter_map(|name| self.books.named_node(name));
        known.map(|(name, _)| name.clone()).collect()
    }

    /// The gang is given up for this cycle: it holds nothing.
    fn end_cycle(&mut self, gang: &Group) {
        if let Some(cycle) = self.gangs.0.get_mut(gang) {
            cycle.asked.clear();
            cycle.seats.clear();
        }
        let change = self.books.release_group(gang);
        self.follow(change);
    }

    /// Refuses a pod because too few of its gang fit.
    pub(crate) fn refuse_gang<'a>(
        &mut self,
        pod: &PodFacts,
        candidates: &[&'a str],
        shortfall: Shortfall,
        now: Duration,
    ) -> Filtered<'a> {
        let mut offered = NodeSet::default();
        let slots = candidates.iter().filter_map(|name| self.scores.slot(name));
        slots.for_each(|slot| offered.insert(slot));
        self.note_offered(pod, offered, candidates.len(), now);
        self.wait_refused(pod, candidates, now);
        self.queue.is_short(&pod.uid);
        Filtered {
            shortfall: Some(shortfall),
            ..refuse_all(candidates, Reason::Gang)
        }
    }

    /// A pod was refused. The others of its group are not scheduled without it, unless enough of them are left.
    pub(crate) fn member_refused(&mut self, pod: &PodFacts) {
        let Some(gang) = self.books.gang(pod).cloned() else {
            return;
        };
        let roll = self
            .sight(Duration::ZERO)
            .roll(&gang, None, self.gangs.asked(&gang));
        match roll {
            Some(roll) if gang.is_in_tree() && roll.wanted() <= roll.open.len() => {}
            _ => self.end_cycle(&gang),
        }
    }

    /// How long a pod that is given room holds it. What the rest of its gang holds lasts as long.
    pub(crate) fn hold_gang(&mut self, pod: &PodFacts, now: Duration) -> Duration {
        let Some(gang) = self.books.gang(pod).filter(|gang| gang.is_in_tree()) else {
            return self.config.reservation_ttl;
        };
        let failed = self.gangs.0.get(gang).is_some_and(|cycle| cycle.failed);
        let hold = if failed { HOLD_AGAIN } else { HOLD };
        for uid in self.books.assumed_of(gang) {
            self.books.hold_until(&uid, now + hold);
        }
        hold
    }

    /// kube-scheduler binds a pod of a gang: all of them have passed, and their binds are coming.
    pub(crate) fn gang_binds(&mut self, pod: &PodFacts, now: Duration) {
        let Some(gang) = self.books.gang(pod).filter(|gang| gang.is_in_tree()) else {
            return;
        };
        if let Some(cycle) = self.gangs.0.get_mut(gang)
            && !cycle.binds
        {
            (cycle.binds, cycle.failed) = (true, false);
            for uid in self.books.assumed_of(gang) {
                let until = now + self.config.reservation_ttl;
                self.books.hold_until(&uid, until);
            }
        }
    }
}

impl Cycles {
    fn asked(&self, gang: &Group) -> Option<&BTreeSet<Uid>> {
        self.0.get(gang).map(|cycle| &cycle.asked)
    }
}

impl Sight<'_> {
    /// Are both of one gang whose pods are placed together?
    pub(crate) fn is_of_gang(&self, pod: &PodFacts, other: &PodFacts) -> bool {
        pod.group == other.group && self.books.gang(pod).is_some_and(Group::is_in_tree)
    }

    /// Who of the gang is where, if it is known how many must be placed. Of the pods without a place `asking` counts, and
    /// those about which this cycle has not been asked yet.
    fn roll(
        &self,
        gang: &Group,
        asking: Option<&PodFacts>,
        asked: Option<&BTreeSet<Uid>>,
    ) -> Option<Roll> {
        let GroupPolicy::Gang(min_count) = self.books.pod_group(gang)?.policy else {
            return None;
        };
        let mut roll = Roll {
            min_count,
            placed: 0,
            others: 0,
            open: Vec::new(),
        };
        for pod in self.books.members(gang) {
            let is_asking = asking.is_some_and(|it| it.uid == pod.uid);
            if pod.node.is_some() || !is_asking && self.books.reservation(&pod.uid).is_some() {
                roll.placed += 1;
            } else if pod.deleting || is_asking {
            } else if !pod.requests_memory() {
                roll.others += usize::from(!pod.gated);
            } else if may_come(pod) && !asked.is_some_and(|asked| asked.contains(&pod.uid)) {
                roll.open.push(pod.clone());
            }
        }
        if let Some(asking) = asking {
            roll.open.insert(0, Arc::new(asking.clone()));
        }
        Some(roll)
    }

    /// Do enough of the pod's gang fit now, as far as is known?
    pub(crate) fn has_seats(&self, pod: &PodFacts) -> bool {
        self.seats_of_gang(pod).is_none_or(|seats| seats.is_ok())
    }

    /// Seats for the pod's gang if enough of it fit now, or how many do; none if it is of no gang whose size is known.
    pub(crate) fn seats_of_gang(&self, pod: &PodFacts) -> Option<Result<Seats, Shortfall>> {
        let gang = self.books.gang(pod).filter(|gang| gang.is_in_tree())?;
        let roll = self.roll(gang, Some(pod), None)?;
        let wanted = roll.wanted().min(roll.open.len());
        let members = roll.open.iter().map(|it| Member::anywhere(it)).collect();
        let seats = self.seats(members, wanted);
        Some(match seats.count < wanted {
            true => Err(roll.shortfall(gang, seats.count)),
            false => Ok(seats),
        })
    }
}
