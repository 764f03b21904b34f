//! How far the simulation is, on standard error, once a second.

use std::io::{IsTerminal as _, Write as _, stderr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use gpustow_pack::PolicyKind;

use super::report::clock;
use super::workload::SPAN;

/// Between two lines.
const PERIOD: Duration = Duration::from_secs(1);

/// How far the cluster of each policy is.
#[derive(Debug)]
pub(crate) struct Progress(Vec<(PolicyKind, AtomicU64)>);

impl Progress {
    pub(crate) fn of(policies: &[PolicyKind]) -> Self {
        let each = policies.iter().map(|policy| (*policy, AtomicU64::new(0)));
        Self(each.collect())
    }

    /// Each policy, and the virtual seconds that its cluster has lived.
    pub(crate) fn each(&self) -> impl Iterator<Item = (PolicyKind, &AtomicU64)> {
        self.0.iter().map(|(policy, lived)| (*policy, lived))
    }

    /// Writes a line at once and each second until the sender is dropped. On a terminal the last line stays alone.
    pub(crate) fn tell(&self, end: &Receiver<()>) {
        let (start, stop) = match stderr().is_terminal() {
            true => ("\r\x1b[K", ""),
            false => ("", "\n"),
        };
        loop {
            // A closed standard error is no reason to stop.
            let _ = write!(stderr(), "{start}{}{stop}", self.line());
            if end.recv_timeout(PERIOD) != Err(RecvTimeoutError::Timeout) {
                break;
            }
        }
        let _ = write!(stderr(), "{start}");
    }

    fn line(&self) -> String {
        let lived = |(policy, seconds): (PolicyKind, &AtomicU64)| {
            let lived = Duration::from_secs(seconds.load(Ordering::Relaxed));
            format!("{policy} {}", clock(lived))
        };
        let lived: Vec<String> = self.each().map(lived).collect();
        format!("simulated of {} h: {}", clock(SPAN), lived.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_names_each_policy_and_its_time() {
        let progress = Progress::of(&PolicyKind::ALL);
        progress.0[1].1.store(5400, Ordering::Relaxed);
        let line = progress.line();
        let expected =
            "simulated of 12:00 h: tight 00:00, binpack 01:30, spread 00:00, first-fit 00:00";
        assert_eq!(line, expected);
    }
}
