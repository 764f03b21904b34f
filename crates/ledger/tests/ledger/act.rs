//! The turns of the means in a look, one by one.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_ledger::{Cause, Ended, Ledger, Reserved, Shortage};

/// See the module's documentation.
pub(crate) trait Act {
    fn reclaim(&mut self, now: Duration);
    /// True if a reservation was given up.
    fn keep_reservations(&mut self, now: Duration) -> bool;
    /// The pods for which others are preempted since this look.
    fn fragmented(&mut self, now: Duration) -> Vec<Arc<PodFacts>>;
    fn preempts_for(&self, uid: &str, now: Duration) -> bool;
    /// The pod for which others may be moved, at most so many.
    fn defragment(&mut self, most: usize, now: Duration) -> Option<Arc<PodFacts>>;
    /// The node that begins to be emptied.
    fn empty(&mut self, most: usize, now: Duration) -> Option<Arc<str>>;
    fn reclaims(&self, now: Duration) -> Vec<Reserved>;
    fn reservations(&self) -> Vec<Reserved>;
    fn reservation(&self, uid: &str) -> Option<Reserved>;
    /// Which pods are evicted, and for which pod.
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
        new_for(self, Cause::Preempt, 0, now)
    }

    fn preempts_for(&self, uid: &str, now: Duration) -> bool {
        let mut all = self.reserved(Cause::Preempt, now).into_iter();
        all.any(|it| *it.pod.uid == *uid)
    }

    fn defragment(&mut self, most: usize, now: Duration) -> Option<Arc<PodFacts>> {
        new_for(self, Cause::Defragment, most, now).pop()
    }

    fn empty(&mut self, most: usize, now: Duration) -> Option<Arc<str>> {
        let before = self.emptying(now).map(|it| it.node);
        self.look(Cause::Defragment, most, now);
        let node = self.emptying(now)?.node;
        (before.as_ref() != Some(&node)).then_some(node)
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

/// For which pods this look reserves room.
fn new_for(ledger: &mut Ledger, means: Cause, most: usize, now: Duration) -> Vec<Arc<PodFacts>> {
    let before = ledger.reserved(means, now);
    ledger.look(means, most, now);
    let is_new = |it: &Reserved| before.iter().all(|known| known.pod.uid != it.pod.uid);
    let all = ledger.reserved(means, now).into_iter().filter(is_new);
    all.map(|it| it.pod).collect()
}
