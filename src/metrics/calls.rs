//! Kube-scheduler's calls: their time, their errors and their results.

use std::time::Duration;

use gpustow_ledger::Reason;
use gpustow_serve::BUCKETS;
use prometheus::{
    Histogram, HistogramVec, IntCounterVec, Registry, register_histogram_vec_with_registry,
    register_histogram_with_registry, register_int_counter_vec_with_registry,
};
use strum::{IntoStaticStr, VariantNames};

use crate::bind::BindError;
use crate::failure::ErrorKind;

/// kube-scheduler's verbs; as a string, the `verb` label.
#[derive(Clone, Copy, Debug, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum Verb {
    Filter,
    Prioritize,
    Preempt,
    Bind,
}

/// The series of kube-scheduler's calls.
pub(crate) struct Calls {
    requests: HistogramVec,
    errors: IntCounterVec,
    refusals: IntCounterVec,
    bind_failures: IntCounterVec,
    /// Pods that waited for others to finish their start.
    pub(crate) start_wait: Histogram,
}

impl Calls {
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let calls = Self {
            requests: register_histogram_vec_with_registry!(
                "gpustow_extender_request_duration_seconds",
                "Time to answer kube-scheduler",
                &["verb"],
                BUCKETS.into(),
                registry
            )?,
            errors: register_int_counter_vec_with_registry!(
                "gpustow_extender_request_errors_total",
                "Calls of kube-scheduler that were not served. decode: the call cannot be read; api: the API server refused; internal: this replica is not ready or does not lead",
                &["verb", "error"],
                registry
            )?,
            refusals: register_int_counter_vec_with_registry!(
                "gpustow_extender_refusals_total",
                "Filter calls that placed nothing, by the reason of most nodes",
                &["reason"],
                registry
            )?,
            bind_failures: register_int_counter_vec_with_registry!(
                "gpustow_bind_failures_total",
                "Bind calls that did not bind, by reason",
                &["reason"],
                registry
            )?,
            start_wait: register_histogram_with_registry!(
                "gpustow_start_wait_seconds",
                "How long placed pods had waited because other pods were starting, by the annotation start: alone",
                vec![
                    1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0
                ],
                registry
            )?,
        };
        calls.begin();
        Ok(calls)
    }

    /// Shows series at 0 before their first event.
    fn begin(&self) {
        for verb in Verb::VARIANTS {
            self.requests.with_label_values(&[verb]);
            for error in ErrorKind::VARIANTS {
                self.errors.with_label_values(&[verb, error]);
            }
        }
        for reason in Reason::all() {
            self.refusals.with_label_values(&[reason.label()]);
        }
        for reason in BindError::VARIANTS {
            self.bind_failures.with_label_values(&[reason]);
        }
    }

    /// A request was answered, or was not served for this reason.
    pub(crate) fn answered(&self, verb: Verb, error: Option<ErrorKind>, took: Duration) {
        let verb: &str = verb.into();
        let took = took.as_secs_f64();
        self.requests.with_label_values(&[verb]).observe(took);
        if let Some(error) = error {
            self.errors.with_label_values(&[verb, error.into()]).inc();
        }
    }

    /// A filter call placed nothing: most nodes have this reason.
    pub(crate) fn refused(&self, reason: Reason) {
        self.refusals.with_label_values(&[reason.label()]).inc();
    }

    /// A bind call did not bind.
    pub(crate) fn not_bound(&self, error: &BindError) {
        let reason: &str = error.into();
        self.bind_failures.with_label_values(&[reason]).inc();
    }
}
