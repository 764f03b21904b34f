//! Counts that grow while virtual time passes. Every pod that arrived is waiting, running or finished.

use std::collections::BTreeMap;
use std::time::Duration;

use super::workload::RAMP;

/// The counts of one cluster.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) arrived: usize,
    pub(crate) finished: usize,
    /// GPUs found over-committed, and bound pods found without GPUs, over all looks.
    pub(crate) broken: usize,
    /// Virtual time that the pods waited which have started.
    waited: Duration,
    /// When the pods arrived that wait.
    waiting: BTreeMap<String, Duration>,
    /// Seconds since the ramp, and the sums over them.
    seconds: f64,
    allocated: f64,
    running: f64,
    /// Virtual time up to which they are summed.
    until: Duration,
}

impl Tally {
    pub(crate) fn arrive(&mut self, pod: &str, now: Duration) {
        self.arrived += 1;
        self.waiting.insert(pod.to_owned(), now);
    }

    pub(crate) fn start(&mut self, pod: &str, now: Duration) {
        let arrived = self.waiting.remove(pod).unwrap_or(now);
        self.waited += now.saturating_sub(arrived);
    }

    /// Until `now` this share of the GPU memory was allocated, and so many pods ran.
    pub(crate) fn pass(&mut self, now: Duration, allocated: f64, running: usize) {
        let passed = now.saturating_sub(self.until.max(RAMP)).as_secs_f64();
        self.seconds += passed;
        self.allocated += allocated * passed;
        self.running += running as f64 * passed;
        self.until = now;
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Mean virtual time from arrival to start, pods that still wait at `now` included.
    pub(crate) fn mean_wait(&self, now: Duration) -> Duration {
        let still = self.waiting.values().map(|at| now.saturating_sub(*at));
        let all = self.waited + still.sum::<Duration>();
        all.div_f64(self.arrived.max(1) as f64)
    }

    /// Mean share of the GPU memory that pods held since the ramp, 0 to 1; none before its end.
    pub(crate) fn mean_allocated(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.allocated / self.seconds)
    }

    /// Mean number of pods that ran at once since the ramp; none before its end.
    pub(crate) fn mean_running(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.running / self.seconds)
    }
}
