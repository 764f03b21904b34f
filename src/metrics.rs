//! The extender's metrics for Prometheus. Sums over the cluster are taken from the ledger at the scrape. Nothing here
//! grows with the cluster unless `--metrics-per-gpu` asks for it.

mod calls;
mod cluster;
mod demand;
mod every;
mod models;
mod workloads;

use std::sync::{Arc, Mutex, PoisonError};

use gpustow_ledger::{self as ledger, Action, Assumed, Cause, NodeView, Queued, Ungate};
use gpustow_pack::Request;
use gpustow_policies::admission::Weakness;
use gpustow_serve::Scrape;
use k8s_openapi::jiff::Timestamp;
use prometheus::proto::MetricFamily;
use prometheus::{
    GaugeVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry,
    register_gauge_vec_with_registry, register_int_counter_vec_with_registry,
    register_int_counter_with_registry, register_int_gauge_vec_with_registry,
    register_int_gauge_with_registry,
};
use strum::VariantArray as _;

use crate::history::Figure;
use crate::provision;
use crate::queue::RESULTS;

pub(crate) use calls::{Calls, Verb};
pub use every::every_series;
use models::Models;

/// The extender's own series.
pub(crate) struct Metrics {
    registry: Registry,
    models: Mutex<Models>,
    pub(crate) calls: Calls,
    /// Nominations that were set.
    pub(crate) nominations: IntCounter,
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

/// The state that a scrape shows, most of it from the ledger.
pub(crate) struct Totals {
    /// Every node with GPUs.
    pub(crate) nodes: Vec<NodeView>,
    /// Reservations without and with a bind under way.
    pub(crate) assumed: Assumed,
    /// Reservations that ended without a bind.
    pub(crate) expirations: u64,
    /// How many reservations there are of memory that is not free yet, by cause; none of them if this replica does not lead.
    pub(crate) earmarks: Vec<(Cause, usize)>,
    /// How many of them ended, by cause and how.
    pub(crate) earmarks_ended: Vec<(Cause, ledger::Ended, u64)>,
    /// Pods that an earlier extender may still bind.
    pub(crate) unfenced: usize,
    /// The requests of the pods that wait for room, and whether each pod waits for others of its gang.
    pub(crate) waiting: Vec<(Arc<Request>, bool)>,
    /// When the oldest of them was created, in seconds since 1970.
    pub(crate) oldest: Option<i64>,
    /// How many pods are queued, and when the oldest of them was created.
    pub(crate) queued: Queued,
    /// How many placeholders there are.
    pub(crate) placeholders: usize,
    /// The admission policies that were read, each with its weakness, if it has one.
    pub(crate) policies: Vec<(&'static str, Option<Weakness>)>,
    /// The requests of containers, and the advised requests.
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
        gpustow_serve::about(&registry, "gpustow_build_info")?;
        let metrics = Self {
            calls: Calls::new(&registry)?,
            nominations: register_int_counter_with_registry!(
                "gpustow_nominations_total",
                "Nominations of pods that fit on a node that kube-scheduler had not shown",
                registry
            )?,
            disruptions: register_int_counter_vec_with_registry!(
                "gpustow_disruptions_total",
                "Disruptions. refused: by a disruption budget",
                &["cause", "action", "outcome"],
                registry
            )?,
            ungates: register_int_counter_vec_with_registry!(
                "gpustow_ungated_pods_total",
                "Pods removed from the queue, by cause and result",
                &["cause", "result"],
                registry
            )?,
            placeholders: register_int_counter_vec_with_registry!(
                "gpustow_placeholders_created_total",
                "Placeholders that the extender created, or that the API server refused",
                &["result"],
                registry
            )?,
            queue_on: register_int_gauge_with_registry!(
                "gpustow_queue_on",
                "1 if new pods are queued",
                registry
            )?,
            pressure: register_int_gauge_with_registry!(
                "gpustow_gpus_under_pressure",
                "GPUs on which a pod cannot grow to its request, or the headroom is not free, because others use more than they requested",
                registry
            )?,
            takeovers: register_int_counter_with_registry!(
                "gpustow_takeovers_total",
                "How often this replica became the leader",
                registry
            )?,
            watch_events: register_gauge_vec_with_registry!(
                "gpustow_watch_last_event_timestamp_seconds",
                "Last event of each watch",
                &["resource"],
                registry
            )?,
            undecodable: register_int_gauge_vec_with_registry!(
                "gpustow_undecodable_objects",
                "Objects that cannot be decoded; the log names object and field. Each takes its node out of use, except the GpustowConfig: its last valid version holds",
                &["resource"],
                registry
            )?,
            models: Mutex::default(),
            registry,
        };
        metrics.begin();
        Ok(metrics)
    }

    /// Shows series at 0 before their first event.
    fn begin(&self) {
        let begin = |counters: &IntCounterVec, values: &[&str]| {
            counters.with_label_values(values);
        };
        for cause in Cause::VARIANTS {
            for action in Action::of(*cause) {
                for outcome in ["done", "refused", "failed"] {
                    begin(&self.disruptions, &[cause.into(), action.into(), outcome]);
                }
            }
        }
        for why in Ungate::VARIANTS {
            for result in RESULTS {
                begin(&self.ungates, &[why.label(), result]);
            }
        }
        for result in [provision::CREATED, provision::REFUSED] {
            begin(&self.placeholders, &[result]);
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
        let now = Timestamp::now().as_duration().as_secs_f64();
        self.watch_events.with_label_values(&[resource]).set(now);
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
