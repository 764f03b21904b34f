//! The turns of the means in a look, one by one.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_ledger::{Broken, Cause, Due, Ended, Ledger, Reserved, Shortage, Subject};

/// See the module's documentation.
pub(crate) trait Act {
    fn reclaim(&mut self, now: Duration);
    /// True if a reservation was given up.
    fn keep_reservations(&mut self, now: Duration) -> bool;
    /// The pods for which others may be preempted.
    fn fragmented(&mut self, now: Duration) -> Vec<Arc<PodFacts>>;
    fn preempt_fragmented(&mut self, uid: &str, broken: Broken<'_>, now: Duration) -> bool;
    fn due_to_move(&mut self, now: Duration) -> Option<Arc<PodFacts>>;
    fn move_for(&mut self, uid: &str, broken: Broken<'_>, most: usize, now: Duration) -> bool;
    fn due_to_empty(&mut self, now: Duration) -> Option<Arc<str>>;
    fn empty_node(&mut self, of: &Arc<str>, broken: Broken<'_>, most: usize, now: Duration)
    -> bool;
    fn reclaims(&self, now: Duration) -> Vec<Reserved>;
    fn reservations(&self) -> Vec<Reserved>;
    fn reservation(&self, uid: &str) -> Option<Reserved>;
    /// Who is evicted, for whom.
    fn preemptions(&self, now: Duration) -> Vec<Reserved>;
    fn shortages(&self, now: Duration) -> Vec<Shortage>;
}

impl Act for Ledger {
    fn reclaim(&mut self, now: Duration) {
        self.look(Cause::Reclaim, 0, now);
    }

    fn keep_reservations(&mut self, now: Duration) -> bool {
        let given_up = |ledger: &Self| -> u64 {
            let all = Ended::GIVEN_UP.iter();
            all.map(|how| ledger.given_up(*how)).sum()
        };
        let before = given_up(self);
        self.look(Cause::Reserve, 0, now);
        given_up(self) != before
    }

    fn fragmented(&mut self, now: Duration) -> Vec<Arc<PodFacts>> {
        self.look(Cause::Defragment, 0, now);
        let due = self.look(Cause::Preempt, 0, now).into_iter();
        due.filter_map(pod_of).collect()
    }

    fn preempt_fragmented(&mut self, uid: &str, broken: Broken<'_>, now: Duration) -> bool {
        let due = due(self, Cause::Preempt, uid);
        due.is_some_and(|due| self.choose(&due, broken, 0, now))
    }

    fn due_to_move(&mut self, now: Duration) -> Option<Arc<PodFacts>> {
        let mut due = self.look(Cause::Defragment, usize::MAX, now).into_iter();
        due.find_map(pod_of)
    }

    fn move_for(&mut self, uid: &str, broken: Broken<'_>, most: usize, now: Duration) -> bool {
        let due = due(self, Cause::Defragment, uid);
        due.is_some_and(|due| self.choose(&due, broken, most, now))
    }

    fn due_to_empty(&mut self, now: Duration) -> Option<Arc<str>> {
        let due = self.look(Cause::Defragment, usize::MAX, now).into_iter();
        let mut nodes = due.filter_map(|due| match due.subject {
            Subject::Pod(_) => None,
            Subject::Node(node) => Some(node),
        });
        nodes.next()
    }

    fn empty_node(
        &mut self,
        of: &Arc<str>,
        broken: Broken<'_>,
        most: usize,
        now: Duration,
    ) -> bool {
        let due = Due {
            cause: Cause::Defragment,
            subject: Subject::Node(of.clone()),
        };
        self.choose(&due, broken, most, now)
    }

    fn reclaims(&self, now: Duration) -> Vec<Reserved> {
        self.reserved(Cause::Reclaim, now)
    }

    fn reservations(&self) -> Vec<Reserved> {
        self.reserved(Cause::Reserve, Duration::ZERO)
    }

    fn reservation(&self, uid: &str) -> Option<Reserved> {
        let mut all = self.reservations().into_iter();
        all.find(|it| *it.pod.uid == *uid)
    }

    fn preemptions(&self, now: Duration) -> Vec<Reserved> {
        let mut all = self.reserved(Cause::Preempt, now);
        all.extend(self.reserved(Cause::Defragment, now));
        all
    }

    fn shortages(&self, now: Duration) -> Vec<Shortage> {
        let nodes = self.may_be_short();
        let each = nodes.iter().flat_map(|name| self.shortages_on(name, now));
        each.collect()
    }
}

fn pod_of(due: Due) -> Option<Arc<PodFacts>> {
    match due.subject {
        Subject::Pod(pod) => Some(pod),
        Subject::Node(_) => None,
    }
}

fn due(ledger: &Ledger, cause: Cause, uid: &str) -> Option<Due> {
    let subject = Subject::Pod(ledger.pod(uid)?);
    Some(Due { cause, subject })
}
