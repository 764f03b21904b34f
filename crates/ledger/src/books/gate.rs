//! What every question needs to know of a node first.

use std::time::Duration;

/// See the module's documentation.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Gate {
    /// When its report was seen to change last.
    pub(super) seen: Option<Duration>,
    /// For how long its kubelet has spoken without its agent.
    pub(super) silence: Duration,
    /// It has `PreferNoSchedule` taints.
    pub(super) tainted: bool,
}

impl Gate {
    /// Is there a report, and is it too old by both measures there are?
    pub(crate) fn is_stale(&self, now: Duration, stale_after: Duration) -> Option<bool> {
        let age = now.saturating_sub(self.seen?);
        Some(age.max(self.silence) > stale_after)
    }

    /// Has the node soft taints?
    pub(crate) fn is_tainted(&self) -> bool {
        self.tainted
    }
}
