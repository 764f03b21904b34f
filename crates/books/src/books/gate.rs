//! The data of a node that every question checks first.

use std::time::Duration;

/// See the module's documentation. Filter reads thousands of these for one answer: it is small.
#[derive(Clone, Copy, Debug, Default)]
pub struct Gate {
    /// It has a report.
    reported: bool,
    /// When that was seen to change last, in ns.
    seen: u64,
    /// For how many seconds its kubelet has spoken without its agent.
    silence: u32,
    /// It has `PreferNoSchedule` taints.
    tainted: bool,
}

/// In ns.
const SECOND: u64 = 1_000_000_000;

/// More than five centuries count as five.
fn nanos(time: Duration) -> u64 {
    let seconds = time.as_secs().saturating_mul(SECOND);
    seconds.saturating_add(time.subsec_nanos().into())
}

impl Gate {
    pub(super) fn new(seen: Option<Duration>, silence: u64, tainted: bool) -> Self {
        Self {
            reported: seen.is_some(),
            seen: seen.map_or(0, nanos),
            silence: u32::try_from(silence).unwrap_or(u32::MAX),
            tainted,
        }
    }

    /// Is there a report, and is it too old by both measures there are?
    pub fn is_stale(&self, now: Duration, stale_after: Duration) -> Option<bool> {
        let age = nanos(now).saturating_sub(self.seen);
        let silence = u64::from(self.silence) * SECOND;
        self.reported
            .then_some(age.max(silence) > nanos(stale_after))
    }

    /// Has the node soft taints?
    pub fn is_tainted(&self) -> bool {
        self.tainted
    }
}
