//! A look: the means have their turns, in one order, and decide on the actions that are due now.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::config::Action;
use gpustow_api::{Group, PodFacts};
use gpustow_books::{Budget, Cause, Ended};
use gpustow_means::{Demand, Demands, Emptying, Moves, OverLimit, Reserved, Shortage};

use crate::Ledger;

impl Ledger {
    /// One means has its turn, and may evict at most `most` pods. A look is a turn of each, in the order of
    /// [`crate::TURNS`], every second or so after [`Ledger::tell_time`].
    pub fn look(&mut self, means: Cause, most: usize, now: Duration) {
        self.expire(now);
        if let Some(means) = self.means.find_mut(means) {
            means.look(&mut self.parts, most);
        }
    }

    /// Pods for which the search for others to end has cost enough since the last call, so that it found none.
    pub fn searches_cut(&mut self) -> Vec<Arc<PodFacts>> {
        let cut = std::mem::take(&mut self.parts.cut).into_iter();
        cut.filter_map(|uid| self.parts.books.pod(&uid).cloned())
            .collect()
    }

    /// Pods that no node could hold if it were empty, as looks since the last call found: some of each kind, every few minutes.
    pub fn hopeless(&mut self) -> Vec<Arc<PodFacts>> {
        let hopeless = std::mem::take(&mut self.parts.hopeless).into_iter();
        let known = hopeless.filter_map(|uid| self.parts.books.pod(&uid).cloned());
        known.collect()
    }

    /// The memory that this means has reserved for pods, and the pods that leave it to them.
    #[must_use]
    pub fn reserved(&self, means: Cause, now: Duration) -> Vec<Reserved> {
        let means = self.means.find(means);
        means.map_or_else(Vec::new, |it| it.reserved(&self.sight(now)))
    }

    /// The demands on pods now, with these GPUs under pressure ([`Ledger::shortages_on`]).
    #[must_use]
    pub fn demands(&self, short: Vec<Shortage>, now: Duration) -> Demands {
        let mut all = Demands::of(short);
        let means = self.means.all().into_iter();
        means.for_each(|it| it.demand(&self.sight(now), &mut all));
        all
    }

    /// Must the victim still do that for the same beneficiary? The look that demanded it may be some requests old.
    #[must_use]
    pub fn still(&self, demand: &Demand, now: Duration) -> bool {
        let means = match demand.cause {
            Cause::Pressure | Cause::OverLimit => Cause::Reclaim,
            means => means,
        };
        let means = self.means.find(means);
        means.is_some_and(|it| it.still(&self.sight(now), demand))
    }

    /// Who is to finish for the gang now: for each of its pods that is not assumed. All of them finish, or none.
    #[must_use]
    pub fn preemptions_of(&self, gang: &Group, now: Duration) -> Vec<Reserved> {
        self.sight(now).preemptions_of(gang)
    }

    /// Gives up the earmarks of a gang: its victims cannot all finish.
    pub fn spare_for_gang(&mut self, gang: &Group) {
        self.parts.end_gang(gang, Ended::Late);
    }

    /// The node that is emptied, as long as that is of use and harms no pod.
    #[must_use]
    pub fn emptying(&self, now: Duration) -> Option<Emptying> {
        self.sight(now).emptying()
    }

    /// The node that would be emptied first, and the moves of its pods; none while a pod waits. The answer considers
    /// neither budgets for disruptions nor the rest of nodes.
    #[must_use]
    pub fn would_empty(&self, now: Duration) -> Option<Emptying> {
        self.sight(now).would_empty()
    }

    /// The nodes with GPUs that may be short: [`Ledger::shortages_on`] lists the short GPUs of each.
    #[must_use]
    pub fn may_be_short(&self) -> Vec<Arc<str>> {
        self.sight(Duration::ZERO).may_be_short()
    }

    /// The GPUs of one node that are short now.
    #[must_use]
    pub fn shortages_on(&self, name: &str, now: Duration) -> Vec<Shortage> {
        self.sight(now).shortages_on(name)
    }

    /// The pods that have been over their limits for too long, where memory is reclaimed at all.
    #[must_use]
    pub fn over_limits(&self, now: Duration) -> Vec<OverLimit> {
        self.means.reclaim.limits().over(&self.sight(now))
    }

    /// The action that may make this pod give memory back.
    #[must_use]
    pub fn action_on(&self, pod: &PodFacts) -> Action {
        self.sight(Duration::ZERO).action_on(pod)
    }

    /// Does the pod wait although the sum of free memory suffices and a node could hold it if it were empty? False if
    /// leaving pods make the room, or if other pods may be preempted for it.
    #[must_use]
    pub fn waits_for_fragmented(&self, pod: &Arc<PodFacts>, now: Duration) -> bool {
        self.sight(now).waits_for_fragmented(pod)
    }

    /// The moves that would give room to a pod that waits for pieces; none if no moves would.
    #[must_use]
    pub fn moves_for(&self, pod: &Arc<PodFacts>, now: Duration) -> Option<Moves> {
        self.sight(now).moves_within(pod, &mut Budget::of_plan())
    }

    /// The node on which the fewest pods must finish before this pod fits, and those pods. None if it would fit on
    /// no node that takes pods now, whichever of them finish.
    #[must_use]
    pub fn fewest_to_finish(
        &self,
        pod: &PodFacts,
        now: Duration,
    ) -> Option<(Arc<str>, Vec<Arc<PodFacts>>)> {
        let plan = self.sight(now).plan_reserve(pod, &mut Budget::of_plan());
        let (node, pods) = plan?;
        let pods = pods.iter().filter_map(|uid| self.parts.books.pod(uid));
        Some((node, pods.cloned().collect()))
    }

    /// How many reservations have ended like this.
    #[must_use]
    pub fn given_up(&self, how: Ended) -> u64 {
        self.parts.earmarks.count_ended(Cause::Reserve, how)
    }
}
