//! Prometheus' text format, and the series that every program exposes about itself.

use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use prometheus::core::Collector;
use prometheus::proto::{Metric, MetricFamily};
use prometheus::{Encoder, Gauge, GaugeVec, Opts, Registry, TextEncoder};

/// Borders of histograms, in seconds. They hold the targets (0.3 ms, 1 ms): classic quantiles are
/// exact only there.
pub const BUCKETS: [f64; 16] = [
    0.000_05, 0.000_1, 0.000_2, 0.000_3, 0.000_5, 0.000_75, 0.001, 0.001_5, 0.002_5, 0.005, 0.01,
    0.05, 0.1, 0.5, 2.0, 10.0,
];

/// The commit that this program was built from.
static REVISION: OnceLock<&str> = OnceLock::new();

/// Sets the commit that [`about`] reports. Each `main` passes the commit, because a library that read it would be
/// compiled again for every commit. Only the first call counts.
pub fn set_revision(revision: Option<&'static str>) {
    let _ = REVISION.set(revision.unwrap_or("unknown"));
}

/// Registers the version of this binary as `name`, and when this process started.
///
/// # Errors
/// If `registry` has such series already.
pub fn about(registry: &Registry, name: &str) -> Result<(), prometheus::Error> {
    let help = "Version of this binary; always 1";
    let info = GaugeVec::new(Opts::new(name, help), &["version", "revision"])?;
    let revision = REVISION.get().copied().unwrap_or("unknown");
    info.with_label_values(&[env!("CARGO_PKG_VERSION"), revision])
        .set(1.0);
    registry.register(Box::new(info))?;
    let started = Gauge::new(
        "process_start_time_seconds",
        "When this process started, in seconds since 1970",
    )?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    started.set(now.unwrap_or_default().as_secs_f64());
    registry.register(Box::new(started))
}

/// Series that a scrape builds from the present objects. The series of a deleted object disappear.
#[derive(Debug, Default)]
pub struct Scrape(Vec<MetricFamily>);

impl Scrape {
    /// A gauge for each of these labels' values; amounts for the same ones add up.
    ///
    /// # Errors
    /// If Prometheus does not accept the names.
    pub fn gauges<const N: usize, V: AsRef<str> + std::fmt::Debug>(
        &mut self,
        name: &str,
        help: &str,
        labels: [&str; N],
        values: impl IntoIterator<Item = ([V; N], f64)>,
    ) -> Result<(), prometheus::Error> {
        let gauges = GaugeVec::new(Opts::new(name, help), &labels)?;
        for (labels, value) in values {
            gauges.with_label_values(&labels).add(value);
        }
        self.add(&gauges);
        Ok(())
    }

    /// Adds the series that `collector` shows at the moment.
    pub fn add(&mut self, collector: &impl Collector) {
        let families = collector.collect().into_iter();
        let shown = families.filter(|family| !family.get_metric().is_empty());
        self.0.extend(shown.map(|mut family| {
            let values = |metric: &Metric| -> Vec<String> {
                let labels = metric.get_label().iter();
                labels.map(|label| label.value().to_owned()).collect()
            };
            family.mut_metric().sort_by_cached_key(values);
            family
        }));
    }

    /// These series together with the registry's own series, in the registry's order: by name, then by the labels'
    /// values.
    #[must_use]
    pub fn beside(self, registry: &Registry) -> Vec<MetricFamily> {
        let mut families = registry.gather();
        families.extend(self.0);
        families.sort_by(|a, b| a.name().cmp(b.name()));
        families
    }
}

/// The answer to a scrape.
#[must_use]
pub fn exposition(gathered: Result<Vec<MetricFamily>, prometheus::Error>) -> Response {
    let mut text = Vec::new();
    match gathered.and_then(|families| TextEncoder::new().encode(&families, &mut text)) {
        Ok(()) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_come_in_the_order_of_names_and_values() {
        let registry = Registry::new();
        let kept = Gauge::new("b", "kept").unwrap();
        registry.register(Box::new(kept)).unwrap();
        let mut scrape = Scrape::default();
        let values = ["z", "", "m", "a"].map(|value| ([value], 1.0));
        scrape.gauges("c", "pulled", ["of"], values).unwrap();
        scrape.gauges("a", "pulled", [], [([""; 0], 1.0)]).unwrap();
        let text = TextEncoder::new().encode_to_string(&scrape.beside(&registry));
        let text = text.unwrap();
        let series: Vec<&str> = text.lines().filter(|it| !it.starts_with('#')).collect();
        assert_eq!(
            series,
            [
                "a 1",
                "b 0",
                "c{of=\"\"} 1",
                "c{of=\"a\"} 1",
                "c{of=\"m\"} 1",
                "c{of=\"z\"} 1",
            ]
        );
    }
}
