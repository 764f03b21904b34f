//! Changes of the configuration while the ledger is in use.

use std::time::Duration;

use gpustow_api::PodFacts;

use crate::earmarks::Ended;
use crate::sight::Sight;
use crate::{Config, Ledger, MEANS};

impl Ledger {
    /// Goes on with another configuration. Whatever a feature that is off now has reserved is free again, and pods
    /// that are queued are ungated if there is no queue any more.
    pub fn configure(&mut self, config: Config) {
        self.config = config;
        self.scores.set_policy(config.policy);
        let off = MEANS.into_iter();
        let off = off.filter(|means| self.sight(Duration::ZERO).acts_after(*means).is_none());
        let ended: Vec<_> = off.flat_map(|means| self.earmarks.all_of(means)).collect();
        for uid in ended {
            self.end(&uid, Ended::Needless);
        }
        self.queue
            .set_queueing(config.queue, &mut self.earmarks, &self.books);
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
