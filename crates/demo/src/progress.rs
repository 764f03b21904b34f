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
#[derive(Debug, Default)]
pub(crate) struct Progress([AtomicU64; PolicyKind::ALL.len()]);

impl Progress {
    /// Each policy, and the virtual seconds that its cluster has lived.
    pub(crate) fn each(&self) -> impl Iterator<Item = (PolicyKind, &AtomicU64)> {
        PolicyKind::ALL.into_iter().zip(&self.0)
    }

    /// Writes `heading`, then a line each second until the sender is dropped. On a terminal the last line stays alone.
    pub(crate) fn tell(&self, heading: &str, end: &Receiver<()>) {
        // A closed standard error is no reason to stop.
        let _ = writeln!(stderr(), "{heading}");
        let (start, stop) = match stderr().is_terminal() {
            true => ("\r\x1b[K", ""),
            false => ("", "\n"),
        };
        while end.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
            let _ = write!(stderr(), "{start}{}{stop}", self.line());
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
        let progress = Progress::default();
        progress.0[1].store(5400, Ordering::Relaxed);
        let line = progress.line();
        let expected =
            "simulated of 12:00 h: tight 00:00, binpack 01:30, spread 00:00, first-fit 00:00";
        assert_eq!(line, expected);
    }
}
