//! How long pods wait for others to finish their start.

use std::sync::Arc;

use dashmap::DashMap;
use gpustow_ledger::Reason;
use gpustow_pack::Refusal;
use tokio::time::Instant;

use crate::metrics::Metrics;

/// Pods remembered; beyond that all are forgotten.
const MEMORY: usize = 20_000;

/// By pod UID: when filter refused it for a start, the first time.
#[derive(Default)]
pub(crate) struct Turns(DashMap<Arc<str>, Instant>);

impl Turns {
    /// Filter refused the pod.
    pub(crate) fn refused(&self, uid: &Arc<str>, refused: &[(&str, Reason)]) {
        let starting = Reason::Fit(Refusal::Starting);
        if !refused.iter().any(|(_, reason)| *reason == starting) {
            return;
        }
        if self.0.len() >= MEMORY {
            self.0.clear();
        }
        self.0.entry(uid.clone()).or_insert_with(Instant::now);
    }

    /// It has its GPUs.
    pub(crate) fn placed(&self, uid: &str, metrics: &Metrics) {
        if let Some((_, since)) = self.0.remove(uid) {
            let waited = since.elapsed().as_secs_f64();
            metrics.calls.start_wait.observe(waited);
        }
    }
}
