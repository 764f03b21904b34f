//! Filter calls about pods of gangs (`gangs` of [`gpustow_means`]).

use std::iter;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Group, PodFacts};
use gpustow_books::{Budget, NodeSet, Reason};
use gpustow_means::{GangView, Member, Seat, Shortfall};

use crate::Ledger;
use crate::decide::{Ask, Compared, Filtered, refuse_all};

impl Ledger {
    /// A filter call about a pod begins, and so perhaps a cycle of its gang.
    pub(crate) fn begin_member(&mut self, pod: &PodFacts, now: Duration) {
        let Some(gang) = self.parts.books.gang(pod).filter(|gang| gang.is_in_tree()) else {
            return;
        };
        if self.gangs.ask(gang, &pod.uid, now) {
            let change = self.parts.books.release_group(gang);
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
        let Some(gang) = self.parts.books.gang(pod).filter(|gang| gang.is_in_tree()) else {
            return Ok(None);
        };
        let Some(roll) = self
            .sight(now)
            .roll(gang, Some(pod), self.gangs.asked(gang))
        else {
            return Ok(None);
        };
        if let Some(shortfall) = self.gangs.given_up(gang) {
            return Err(shortfall.clone());
        }
        let wanted = roll.wanted().min(roll.open().len());
        if wanted == 0 {
            return Ok(None);
        }
        let tried = self.parts.shown.tried(&pod.uid);
        if let Some(seat) = self.gangs.take_seat(gang, &pod.uid)
            && candidates.contains(&&**seat.node())
            && tried.is_none_or(|tried| !tried.has(seat.node()))
            && self.sight(now).is_free(&seat, pod)
        {
            return Ok(Some(seat));
        }
        let nodes = self.best_nodes(ask, candidates, now);
        let sight = self.sight(now);
        let others = || roll.open().iter().filter(|it| it.uid != pod.uid);
        let plan_for = |nodes: Vec<Arc<str>>, heeds: bool| {
            let others = others().map(|it| Member::anywhere(it).heeding(heeds));
            let members = iter::once(Member::among(pod, nodes)).chain(others);
            sight.seats(members.collect(), wanted, &mut Budget::all())
        };
        let plan = |nodes: Vec<Arc<str>>| {
            let heeding = plan_for(nodes.clone(), true);
            let rejects = || others().any(|it| sight.passed(it).is_some());
            // The nodes that kube-scheduler has rejected may have changed: a plan that ignores the rejection is better
            // than none.
            match heeding.count() >= wanted || !rejects() {
                true => heeding,
                false => plan_for(nodes, false),
            }
        };
        // A node where the pod's bind was refused is for when no other will do.
        let untried = self.parts.shown.tried(&pod.uid).map(|tried| {
            let untried = nodes.iter().filter(|name| !tried.has(name));
            untried.cloned().collect::<Vec<_>>()
        });
        let untried = untried.filter(|it| !it.is_empty() && it.len() < nodes.len());
        let first = untried
            .map(&plan)
            .filter(|it| it.count() >= wanted && it.has(&pod.uid));
        let mut found = first.unwrap_or_else(|| plan(nodes));
        let shortfall = roll.shortfall_of(gang, &found);
        if found.count() < wanted {
            self.end_cycle(gang, Some(shortfall.clone()));
            return Err(shortfall);
        }
        let (own, is_cut) = (found.take(&pod.uid), found.is_cut());
        self.gangs.keep_seats(gang, found);
        let sight = self.sight(now);
        let fits = |name: &&str| sight.may_fit(name, pod) && sight.choose(name, pod).is_ok();
        // The others need the room, unless the search did not come to this one.
        match own.is_none() && !is_cut && candidates.iter().any(fits) {
            true => Err(shortfall),
            false => Ok(own),
        }
    }

    /// The gang of a pod without a node, if a PodGroup describes the gang or should.
    #[must_use]
    pub fn gang(&self, pod: &PodFacts, now: Duration) -> Option<GangView> {
        self.sight(now).gang_view(pod)
    }

    /// The candidates that would do, best first.
    fn best_nodes(&mut self, ask: &Ask<'_>, candidates: &[&str], now: Duration) -> Vec<Arc<str>> {
        let mut found = Compared::default();
        if !ask.pod.requests_memory() {
            return Vec::new();
        }
        self.compare(&mut found, ask, candidates, None, now);
        let sight = self.sight(now);
        let mut nodes = found.names();
        let first = sight.goes_first(ask.pod);
        nodes.sort_by_key(|name| first.is_none_or(|first| **first != **name));
        let known = nodes.iter().filter_map(|name| sight.books.named_node(name));
        known.map(|(name, _)| name.clone()).collect()
    }

    /// The gang is given up for this cycle: it holds nothing.
    fn end_cycle(&mut self, gang: &Group, shortfall: Option<Shortfall>) {
        self.gangs.give_up(gang, shortfall);
        let change = self.parts.books.release_group(gang);
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
        let slots = candidates
            .iter()
            .filter_map(|name| self.parts.scores.slot(name));
        slots.for_each(|slot| offered.insert(slot));
        self.note_offered(pod, offered, candidates.len(), now);
        self.wait_refused(pod, candidates, now);
        self.parts.queue.is_short(&pod.uid);
        Filtered {
            shortfall: Some(shortfall),
            ..refuse_all(candidates, Reason::Gang)
        }
    }

    /// A pod was refused. The others of its group are not scheduled without it, unless enough of them are left.
    pub(crate) fn member_refused(&mut self, pod: &PodFacts) {
        let Some(gang) = self.parts.books.gang(pod).cloned() else {
            return;
        };
        let roll = self
            .sight(Duration::ZERO)
            .roll(&gang, None, self.gangs.asked(&gang));
        match roll {
            Some(roll) if gang.is_in_tree() && roll.wanted() <= roll.open().len() => {}
            roll => self.end_cycle(&gang, roll.map(|it| it.shortfall(&gang, it.open().len()))),
        }
    }

    /// The time for which a pod holds the room that it gets. The room of the rest of its gang lasts as long.
    pub(crate) fn hold_gang(&mut self, pod: &PodFacts, now: Duration) -> Duration {
        let Some(gang) = self.parts.books.gang(pod).filter(|gang| gang.is_in_tree()) else {
            return self.parts.config.reservation_ttl;
        };
        let hold = self.gangs.hold(gang);
        for uid in self.parts.books.assumed_of(gang) {
            self.parts.books.hold_until(&uid, now + hold);
        }
        hold
    }

    /// kube-scheduler binds a pod of a gang: all of them have passed, and their binds are coming.
    pub(crate) fn gang_binds(&mut self, pod: &PodFacts, now: Duration) {
        let Some(gang) = self.parts.books.gang(pod).filter(|gang| gang.is_in_tree()) else {
            return;
        };
        if self.gangs.bind(gang) {
            for uid in self.parts.books.assumed_of(gang) {
                let until = now + self.parts.config.reservation_ttl;
                self.parts.books.hold_until(&uid, until);
            }
        }
    }
}
