//! Changes of the configuration while the ledger is in use.

use std::time::Duration;

use gpustow_api::PodFacts;

use crate::queue::Ended;
use crate::sight::Sight;
use crate::{Config, Ledger};

impl Ledger {
    /// Goes on with another configuration. Whatever a feature that is off now has reserved is free again, and pods
    /// that are queued are ungated if there is no queue any more.
    pub fn configure(&mut self, config: Config) {
        self.config = config;
        self.scores.set_policy(config.policy);
        let mut ended = Vec::new();
        if !config.reclaim {
            ended.extend(self.queue.all_reclaims());
        }
        if config.keep.is_none() {
            ended.extend(self.queue.all_reservations());
        }
        let mut fragmented = self.queue.all_evictions();
        fragmented.retain(|uid| match self.queue.is_defragmented_for(uid) {
            true => !config.moves,
            false => !config.preempt_fragmented,
        });
        ended.append(&mut fragmented);
        for uid in ended {
            self.queue.end(&uid, Ended::Needless, &self.books);
        }
        self.queue.set_queueing(config.queue, &self.books);
        let change = self.books.configure(config.stale_after, config.of_views());
        self.follow(change);
    }
}

impl Sight<'_> {
    /// Has the pod waited for so long since it was created? Yes if the time is unknown ([`Ledger::tell_time`]).
    pub(crate) fn has_waited(&self, pod: &PodFacts, after: Duration) -> bool {
        let after = i64::try_from(after.as_secs()).unwrap_or(i64::MAX);
        self.unix
            .is_none_or(|unix| unix.saturating_sub(pod.created) >= after)
    }
}
