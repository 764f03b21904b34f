//! Changes of the configuration while the ledger is in use.

use gpustow_books::Ended;

use crate::{Config, Ledger};

impl Ledger {
    /// Goes on with another configuration. Whatever a feature that is off now has reserved is free again, and pods
    /// that are queued are ungated if there is no queue any more.
    pub fn configure(&mut self, config: Config) {
        let fences = config.fence && !self.parts.config.fence;
        self.parts.config = config;
        // Without a fence, claims may have come to any of them.
        if fences {
            self.close_all();
        }
        self.parts.scores.set_policy(config.policy);
        let off = self.means.all().into_iter();
        let off = off.filter(|means| means.after(&config).is_none());
        let earmarks = &self.parts.earmarks;
        let ended: Vec<_> = off.flat_map(|it| earmarks.all_of(it.cause())).collect();
        for uid in ended {
            self.parts.end(&uid, Ended::Needless);
        }
        self.parts
            .queue
            .set_queueing(config.queue, &mut self.parts.earmarks, &self.parts.books);
        let change =
            self.parts
                .books
                .configure(config.stale_after, config.start_timeout, config.of_views());
        self.follow(change);
    }
}
