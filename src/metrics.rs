//! What Prometheus sees of the extender. Sums over the cluster are taken from the ledger at the
//! scrape; nothing here grows with the cluster unless `--metrics-per-gpu` asks for it.

mod cluster;
mod demand;
mod every;
mod models;
mod workloads;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use gpustow_ledger::{self as ledger, Assumed, NodeView, Queued, Reason, Ungate};
use gpustow_pack::Request;
use gpustow_policies::admission::Weakness;
use gpustow_serve::{BUCKETS, Scrape};
use prometheus::proto::MetricFamily;
use prometheus::{
    GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry,
};
use strum::{IntoStaticStr, VariantArray as _, VariantNames};

use crate::bind::BindError;
use crate::disruptions::{Action, Cause};
use crate::failure::ErrorKind;
use crate::history::Figure;
use crate::provision;
use crate::queue::RESULTS;

pub use every::every_series;
use models::Models;

/// kube-scheduler's verbs; as a string, the `verb` label.
#[derive(Clone, Copy, Debug, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum Verb {
    Filter,
    Prioritize,
    Preempt,
    Bind,
}

/// The extender's own series.
pub(crate) struct Metrics {
    registry: Registry,
    models: Mutex<Models>,
    requests: HistogramVec,
    errors: IntCounterVec,
    /// Filter calls that placed nothing, by the reason of most nodes.
    pub(crate) refusals: IntCounterVec,
    /// Bind calls.
    pub(crate) binds: IntCounter,
    /// Those that did not bind, by reason.
    pub(crate) bind_failures: IntCounterVec,
    /// From the bind call to its outcome.
    pub(crate) bind_seconds: Histogram,
    /// Waiting pods told of room.
    pub(crate) woken: IntCounter,
    nominations: IntCounterVec,
    disruptions: IntCounterVec,
    /// Gates taken off, by cause and result.
    ungates: IntCounterVec,
    placeholders: IntCounterVec,
    /// New pods are queued.
    pub(crate) queue_on: IntGauge,
    pressure: IntGauge,
    /// Epochs taken.
    pub(crate) takeovers: IntCounter,
    watch_events: GaugeVec,
    undecodable: IntGaugeVec,
}

/// What is taken from the ledger at a scrape.
pub(crate) struct Totals {
    /// Every node with GPUs.
    pub(crate) nodes: Vec<NodeView>,
    /// Reservations without and with a bind under way.
    pub(crate) assumed: Assumed,
    /// Reservations that ended without a bind.
    pub(crate) expirations: u64,
    /// How many reservations there are of memory that is not free yet, by cause; none of them if this replica does not lead.
    pub(crate) earmarks: Vec<(ledger::Cause, usize)>,
    /// How many of them ended, by cause and how.
    pub(crate) earmarks_ended: Vec<(ledger::Cause, ledger::Ended, u64)>,
    /// Pods that an earlier extender may still bind.
    pub(crate) unfenced: usize,
    /// What the pods that wait for room ask for, and which of them wait for others of their gang.
    pub(crate) waiting: Vec<(Arc<Request>, bool)>,
    /// When the oldest of them was created, in seconds since 1970.
    pub(crate) oldest: Option<i64>,
    /// How many pods are queued, and when the oldest of them was created.
    pub(crate) queued: Queued,
    /// How many placeholders there are.
    pub(crate) placeholders: usize,
    /// The admission policies that were read, and what is wrong with each, if anything.
    pub(crate) policies: Vec<(&'static str, Option<Weakness>)>,
    /// What containers request, and what they should.
    pub(crate) figures: Arc<[Figure]>,
    /// This replica leads.
    pub(crate) leads: bool,
    /// Export each card too.
    pub(crate) per_gpu: bool,
}

impl Metrics {
    /// Registers every series.
    ///
    /// # Errors
    /// If two series clash, which is a mistake in this file.
    pub(crate) fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let buckets =
            |name: &str, help: &str| HistogramOpts::new(name, help).buckets(BUCKETS.into());
        let counters = |name: &str, help: &str, labels: &[&str]| {
            IntCounterVec::new(Opts::new(name, help), labels)
        };
        let requests = HistogramVec::new(
            buckets(
                "gpustow_extender_request_duration_seconds",
                "Time to answer kube-scheduler",
            ),
            &["verb"],
        )?;
        let errors = counters(
            "gpustow_extender_request_errors_total",
            "Calls of kube-scheduler that were not served. decode: the call cannot be read; api: the API server refused; internal: this replica is not ready or does not lead",
            &["verb", "error"],
        )?;
        let refusals = counters(
            "gpustow_extender_refusals_total",
            "Filter calls that placed nothing, by the reason of most nodes",
            &["reason"],
        )?;
        let binds = IntCounter::new("gpustow_binds_total", "Bind calls")?;
        let bind_failures = counters(
            "gpustow_bind_failures_total",
            "Bind calls that did not bind, by reason",
            &["reason"],
        )?;
        let bind_seconds = Histogram::with_opts(buckets(
            "gpustow_bind_duration_seconds",
            "Time of bind calls, POST included",
        ))?;
        let woken = IntCounter::new(
            "gpustow_wakeups_total",
            "Wake-ups of waiting pods because memory became available",
        )?;
        let nominations = counters(
            "gpustow_nominations_total",
            "Nominations of pods that fit on a node that kube-scheduler had not shown. ended: it is of no use any more; failed: the write failed",
            &["result"],
        )?;
        let disruptions = counters(
            "gpustow_disruptions_total",
            "Disruptions. refused: by a disruption budget",
            &["cause", "action", "outcome"],
        )?;
        let ungates = counters(
            "gpustow_ungated_pods_total",
            "Pods removed from the queue, by cause and result",
            &["cause", "result"],
        )?;
        let placeholders = counters(
            "gpustow_placeholders_created_total",
            "Placeholders that the extender created, or that the API server refused",
            &["result"],
        )?;
        let queue_on = IntGauge::new("gpustow_queue_on", "1 if new pods are queued")?;
        let pressure = IntGauge::new(
            "gpustow_gpus_under_pressure",
            "GPUs on which a pod cannot grow to its request, or the headroom is not free, because others use more than they requested",
        )?;
        let takeovers = IntCounter::new(
            "gpustow_takeovers_total",
            "How often this replica became the leader",
        )?;
        let watch_events = GaugeVec::new(
            Opts::new(
                "gpustow_watch_last_event_timestamp_seconds",
                "Last event of each watch",
            ),
            &["resource"],
        )?;
        let undecodable = IntGaugeVec::new(
            Opts::new(
                "gpustow_undecodable_objects",
                "Objects that cannot be decoded; the log names object and field. Each takes its node out of use, except the GpustowConfig: its last valid version holds",
            ),
            &["resource"],
        )?;
        for verb in Verb::VARIANTS {
            requests.with_label_values(&[verb]);
            for error in ErrorKind::VARIANTS {
                errors.with_label_values(&[verb, error]);
            }
        }
        Reason::all().for_each(|reason| drop(refusals.with_label_values(&[reason.label()])));
        for (cause, actions) in Cause::VARIANTS.iter().map(|cause| (cause, cause.actions())) {
            let cause: &str = cause.into();
            for action in actions {
                for outcome in ["done", "refused", "failed"] {
                    disruptions.with_label_values(&[cause, action.into(), outcome]);
                }
            }
        }
        for (why, result) in Ungate::ALL.into_iter().zip(std::iter::repeat(RESULTS)) {
            result
                .iter()
                .for_each(|result| drop(ungates.with_label_values(&[why.label(), *result])));
        }
        for result in [provision::CREATED, provision::REFUSED] {
            placeholders.with_label_values(&[result]);
        }
        for result in ["set", "ended", "failed"] {
            nominations.with_label_values(&[result]);
        }
        for reason in BindError::VARIANTS {
            bind_failures.with_label_values(&[reason]);
        }
        registry.register(Box::new(requests.clone()))?;
        registry.register(Box::new(errors.clone()))?;
        registry.register(Box::new(refusals.clone()))?;
        registry.register(Box::new(binds.clone()))?;
        registry.register(Box::new(bind_failures.clone()))?;
        registry.register(Box::new(bind_seconds.clone()))?;
        registry.register(Box::new(woken.clone()))?;
        registry.register(Box::new(nominations.clone()))?;
        registry.register(Box::new(disruptions.clone()))?;
        registry.register(Box::new(ungates.clone()))?;
        registry.register(Box::new(placeholders.clone()))?;
        registry.register(Box::new(queue_on.clone()))?;
        registry.register(Box::new(pressure.clone()))?;
        registry.register(Box::new(takeovers.clone()))?;
        registry.register(Box::new(watch_events.clone()))?;
        registry.register(Box::new(undecodable.clone()))?;
        gpustow_serve::about(&registry, "gpustow_build_info")?;
        Ok(Self {
            registry,
            models: Mutex::default(),
            requests,
            errors,
            refusals,
            binds,
            bind_failures,
            bind_seconds,
            woken,
            nominations,
            disruptions,
            ungates,
            placeholders,
            queue_on,
            pressure,
            takeovers,
            watch_events,
            undecodable,
        })
    }

    /// A request was answered, or was not served for this reason.
    pub(crate) fn answered(&self, verb: Verb, error: Option<ErrorKind>, took: Duration) {
        let verb: &str = verb.into();
        let took = took.as_secs_f64();
        self.requests.with_label_values(&[verb]).observe(took);
        if let Some(error) = error {
            let errors = &self.errors;
            errors.with_label_values(&[verb, error.into()]).inc();
        }
    }

    /// A disruption was done, or was not.
    pub(crate) fn disrupted(&self, cause: Cause, action: Action, outcome: &str) {
        let labels = [cause.into(), action.into(), outcome];
        self.disruptions.with_label_values(&labels).inc();
    }

    /// So many GPUs are under pressure now.
    pub(crate) fn under_pressure(&self, count: usize) {
        self.pressure.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// A nomination was set or ended, or could not be.
    pub(crate) fn nominated(&self, result: &str) {
        self.nominations.with_label_values(&[result]).inc();
    }

    /// A gate was taken off for this cause, or not.
    pub(crate) fn ungated(&self, why: Ungate, result: &str) {
        self.ungates.with_label_values(&[why.label(), result]).inc();
    }

    /// A placeholder was created, or was not.
    pub(crate) fn provisioned(&self, result: &str) {
        self.placeholders.with_label_values(&[result]).inc();
    }

    /// A watch delivered something.
    pub(crate) fn watch_event(&self, resource: &str) {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        self.watch_events
            .with_label_values(&[resource])
            .set(now.as_secs_f64());
    }

    /// So many objects of a kind cannot be decoded.
    pub(crate) fn undecodable(&self, resource: &str, count: usize) {
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        self.undecodable.with_label_values(&[resource]).set(count);
    }

    /// Every series at this moment.
    ///
    /// # Errors
    /// If a series cannot be made, which is a mistake in these files.
    pub(crate) fn gather(&self, totals: &Totals) -> Result<Vec<MetricFamily>, prometheus::Error> {
        if !totals.leads {
            self.under_pressure(0);
        }
        let mut scrape = Scrape::default();
        let mut models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        models.meet(&totals.nodes);
        cluster::cluster(&mut scrape, totals, &models)?;
        demand::demand(&mut scrape, totals, &models)?;
        workloads::workloads(&mut scrape, &totals.figures)?;
        Ok(scrape.beside(&self.registry))
    }
}
