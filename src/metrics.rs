//! What Prometheus sees of the extender. Sums over the cluster are taken from the ledger at the
//! scrape; nothing here grows with the cluster unless `--metrics-per-gpu` asks for it.

mod demand;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use gpustow_ledger::{NodeView, Problem, Reason};
use gpustow_pack::{Mib, Request};
use prometheus::{
    Encoder, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec,
    IntGaugeVec, Opts, Registry, TextEncoder,
};

/// Seconds. The borders hold the targets (0.3 ms, 1 ms): classic quantiles are exact only there.
const BUCKETS: [f64; 16] = [
    0.000_05, 0.000_1, 0.000_2, 0.000_3, 0.000_5, 0.000_75, 0.001, 0.001_5, 0.002_5, 0.005, 0.01,
    0.05, 0.1, 0.5, 2.0, 10.0,
];

/// kube-scheduler's verbs.
pub(crate) const VERBS: [&str; 4] = ["filter", "prioritize", "preempt", "bind"];

/// The extender's own series.
pub(crate) struct Metrics {
    registry: Registry,
    /// Duration of requests by verb and result.
    pub(crate) requests: HistogramVec,
    /// Filter calls that placed nothing, by the reason of most nodes.
    pub(crate) refusals: IntCounterVec,
    /// Bind calls that did not bind, by reason.
    pub(crate) bind_failures: IntCounterVec,
    /// From the bind call to its outcome.
    pub(crate) bind_seconds: Histogram,
    /// Waiting pods told of room.
    pub(crate) woken: IntCounter,
    /// Epochs taken.
    pub(crate) takeovers: IntCounter,
    watch_events: GaugeVec,
}

/// What is taken from the ledger at a scrape.
pub(crate) struct Totals<'a> {
    /// Every node with GPUs.
    pub(crate) nodes: &'a [NodeView],
    /// Reservations without and with a bind under way.
    pub(crate) reservations: (usize, usize),
    /// What the pods that wait for room ask for.
    pub(crate) waiting: Vec<Arc<Request>>,
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
        let requests = HistogramVec::new(
            HistogramOpts::new(
                "gpustow_extender_request_duration_seconds",
                "Time to answer kube-scheduler, by verb and result",
            )
            .buckets(BUCKETS.to_vec()),
            &["verb", "result"],
        )?;
        let refusals = counters(
            "gpustow_extender_refusals_total",
            "Filter calls that placed nothing, by most common reason",
            "reason",
        )?;
        let bind_failures = counters(
            "gpustow_bind_failures_total",
            "Bind calls that did not bind, by reason",
            "reason",
        )?;
        let bind_seconds = Histogram::with_opts(
            HistogramOpts::new(
                "gpustow_bind_duration_seconds",
                "Time of bind calls, POST included",
            )
            .buckets(BUCKETS.to_vec()),
        )?;
        let woken = IntCounter::new(
            "gpustow_wakeups_total",
            "Waiting pods told that room appeared",
        )?;
        let takeovers =
            IntCounter::new("gpustow_takeovers_total", "Epochs that this replica took")?;
        let watch_events = GaugeVec::new(
            Opts::new(
                "gpustow_watch_last_event_timestamp_seconds",
                "Last event of each watch",
            ),
            &["resource"],
        )?;
        let info = IntGaugeVec::new(
            Opts::new("gpustow_build_info", "Version of this binary; always 1"),
            &["version"],
        )?;
        info.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        for verb in VERBS {
            requests.with_label_values(&[verb, "ok"]);
            requests.with_label_values(&[verb, "error"]);
        }
        Reason::all().for_each(|reason| drop(refusals.with_label_values(&[reason.label()])));
        registry.register(Box::new(requests.clone()))?;
        registry.register(Box::new(refusals.clone()))?;
        registry.register(Box::new(bind_failures.clone()))?;
        registry.register(Box::new(bind_seconds.clone()))?;
        registry.register(Box::new(woken.clone()))?;
        registry.register(Box::new(takeovers.clone()))?;
        registry.register(Box::new(watch_events.clone()))?;
        registry.register(Box::new(info))?;
        Ok(Self {
            registry,
            requests,
            refusals,
            bind_failures,
            bind_seconds,
            woken,
            takeovers,
            watch_events,
        })
    }

    /// A request was answered.
    pub(crate) fn answered(&self, verb: &str, ok: bool, took: Duration) {
        let result = if ok { "ok" } else { "error" };
        self.requests
            .with_label_values(&[verb, result])
            .observe(took.as_secs_f64());
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

    /// The exposition, in Prometheus' text format.
    ///
    /// # Errors
    /// If a series cannot be encoded.
    pub(crate) fn render(&self, totals: &Totals<'_>) -> Result<String, prometheus::Error> {
        let scrape = Registry::new();
        cluster(&scrape, totals)?;
        if totals.per_gpu {
            per_gpu(&scrape, totals.nodes)?;
        }
        let mut families = self.registry.gather();
        families.extend(scrape.gather());
        let mut text = Vec::new();
        TextEncoder::new().encode(&families, &mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

fn counters(name: &str, help: &str, label: &str) -> Result<IntCounterVec, prometheus::Error> {
    IntCounterVec::new(Opts::new(name, help), &[label])
}

fn gauges(
    registry: &Registry,
    name: &str,
    help: &str,
    labels: &[&str],
) -> Result<IntGaugeVec, prometheus::Error> {
    let gauges = IntGaugeVec::new(Opts::new(name, help), labels)?;
    registry.register(Box::new(gauges.clone()))?;
    Ok(gauges)
}

fn bytes(mib: Mib) -> i64 {
    i64::try_from(mib.bytes()).unwrap_or(i64::MAX)
}

fn cluster(registry: &Registry, totals: &Totals<'_>) -> Result<(), prometheus::Error> {
    let reservations = gauges(
        registry,
        "gpustow_reservations",
        "Pods between filter and bound",
        &["state"],
    )?;
    let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
    reservations
        .with_label_values(&["reserved"])
        .set(count(totals.reservations.0));
    reservations
        .with_label_values(&["binding"])
        .set(count(totals.reservations.1));
    demand::demand(
        registry,
        totals.nodes,
        totals.waiting.iter().map(|it| &**it),
    )?;

    let problems = gauges(
        registry,
        "gpustow_problems",
        "What needs a person's attention, as `kubectl gpustow` names it",
        &["kind"],
    )?;
    for kind in Problem::LABELS {
        problems.with_label_values(&[kind]).set(0);
    }
    for problem in totals.nodes.iter().flat_map(|node| &node.problems) {
        problems.with_label_values(&[problem.label()]).inc();
    }

    let gpus = gauges(
        registry,
        "gpustow_gpus",
        "GPUs by model and state",
        &["model", "state"],
    )?;
    let memory = |what: &str, help: &str| {
        gauges(
            registry,
            &format!("gpustow_cluster_memory_{what}_bytes"),
            help,
            &["model"],
        )
    };
    let capacity = memory("capacity", "GPU memory that pods may hold")?;
    let requested = memory("requested", "GPU memory promised to pods")?;
    let room = memory("room", "GPU memory that new pods may take")?;
    let strangers = memory("unattributed", "GPU memory used outside of gpustow's pods")?;
    let mut sums: BTreeMap<&str, [Mib; 4]> = BTreeMap::new();
    for node in totals.nodes {
        for card in &node.cards {
            let state = match (node.stale, card.healthy) {
                (true, _) => "stale",
                (false, true) => "ready",
                (false, false) => "unhealthy",
            };
            gpus.with_label_values(&[card.model.as_str(), state]).inc();
            let free = if state == "ready" {
                card.free
            } else {
                Mib::ZERO
            };
            let sum = sums.entry(&card.model).or_default();
            let amounts = [card.capacity, card.held, free, card.strangers];
            sum.iter_mut()
                .zip(amounts)
                .for_each(|(sum, amount)| *sum = *sum + amount);
        }
    }
    for (model, sum) in sums {
        for (gauge, amount) in [&capacity, &requested, &room, &strangers]
            .into_iter()
            .zip(sum)
        {
            gauge.with_label_values(&[model]).set(bytes(amount));
        }
    }
    Ok(())
}

fn per_gpu(registry: &Registry, nodes: &[NodeView]) -> Result<(), prometheus::Error> {
    let labels = ["node", "gpu_uuid", "gpu", "model"];
    let gauge = |what: &str, help: &str| {
        gauges(
            registry,
            &format!("gpustow_extender_gpu_memory_{what}_bytes"),
            help,
            &labels,
        )
    };
    let capacity = gauge("capacity", "GPU memory that pods may hold on this GPU")?;
    let requested = gauge("requested", "GPU memory promised to pods on this GPU")?;
    let room = gauge("room", "GPU memory that new pods may take on this GPU")?;
    for node in nodes {
        for card in &node.cards {
            let index = card.index.to_string();
            let labels = [
                &*node.name,
                card.uuid.as_str(),
                index.as_str(),
                card.model.as_str(),
            ];
            capacity
                .with_label_values(&labels)
                .set(bytes(card.capacity));
            requested.with_label_values(&labels).set(bytes(card.held));
            room.with_label_values(&labels).set(bytes(card.free));
        }
    }
    Ok(())
}
