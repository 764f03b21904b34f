//! What every question needs to know of a node first.

use std::time::Duration;

/// See the module's documentation. Filter reads thousands of these for one answer: it is small.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gate {
    /// When its report was seen to change last, in ns; [`NEVER`] without a report.
    seen: u64,
    /// For how many seconds its kubelet has spoken without its agent.
    silence: u32,
    /// It has `PreferNoSchedule` taints.
    tainted: bool,
}

const NEVER: u64 = u64::MAX;
/// In ns.
const SECOND: u64 = 1_000_000_000;

/// More than five centuries are [`NEVER`] as well.
fn nanos(time: Duration) -> u64 {
    let seconds = time.as_secs().saturating_mul(SECOND);
    seconds.saturating_add(time.subsec_nanos().into())
}

impl Gate {
    pub(super) fn new(seen: Option<Duration>, silence: u64, tainted: bool) -> Self {
        Self {
            seen: seen.map_or(NEVER, nanos),
            silence: u32::try_from(silence).unwrap_or(u32::MAX),
            tainted,
        }
    }

    /// Is there a report, and is it too old by both measures there are?
    pub(crate) fn is_stale(&self, now: Duration, stale_after: Duration) -> Option<bool> {
        if self.seen == NEVER {
            return None;
        }
        let age = nanos(now).saturating_sub(self.seen);
        let silence = u64::from(self.silence) * SECOND;
        Some(age.max(silence) > nanos(stale_after))
    }

    /// Has the node soft taints?
    pub(crate) fn is_tainted(&self) -> bool {
        self.tainted
    }
}

impl Default for Gate {
    fn default() -> Self {
        Self::new(None, 0, false)
    }
}
