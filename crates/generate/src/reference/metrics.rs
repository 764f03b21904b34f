//! Metrics with their labels' values, from the registries of the programs.

use std::collections::BTreeMap;

use anyhow::Result;
use prometheus::proto::{MetricFamily, MetricType};

use super::{Table, code, sentence, titled};

/// Labels whose values the cluster chooses, whatever the sample has.
const OPEN: [&str; 5] = ["gpu", "gpu_uuid", "model", "revision", "version"];
/// The text that replaces such a value in a sample.
const ANY: &str = "…";
const ALERTS: &str = include_str!("../../../../manifests/alerts/gpustow.rules.yaml");

/// The page.
pub(super) fn page(dashboard: &str) -> Result<String> {
    let intro = "A stable series is one that gpustow's alerts or its dashboard use: its name and its labels change only with a minor \
                 version whose [notes](https://github.com/gpustow/gpustow/blob/main/CHANGELOG.md) announce it. The others may change \
                 with any version. A label without values gets them from the cluster. [Monitoring](../metrics.md) shows how to scrape \
                 and read them.";
    let title = "Metrics of extender and agent";
    let mut page = titled(title, "the programs' registries", intro);
    let programs = [
        ("extender", gpustow::every_series()?),
        ("agent", gpustow_agent::metrics::every_series()?),
    ];
    for (program, families) in programs {
        let mut table = Table::new(["metric", "type", "labels", "meaning", "stable"]);
        for family in &families {
            let name = family.name();
            let used = |text: &str| {
                text.split(|it: char| !it.is_alphanumeric() && it != '_')
                    .any(|it| stem(it) == name)
            };
            let stable = used(ALERTS) || used(dashboard);
            table.row([
                code(name),
                kind(family).to_owned(),
                labels(family),
                sentence(family.help()),
                if stable { "yes" } else { "no" }.to_owned(),
            ]);
        }
        page += &format!("\n## Of the {program}\n{}", table.0);
    }
    Ok(page)
}

/// The name of the metric whose part this series is.
fn stem(series: &str) -> &str {
    let parts = ["_bucket", "_count", "_sum"];
    let stem = parts.iter().find_map(|part| series.strip_suffix(part));
    stem.unwrap_or(series)
}

fn kind(family: &MetricFamily) -> &'static str {
    match family.get_field_type() {
        MetricType::COUNTER => "counter",
        MetricType::HISTOGRAM => "histogram",
        _ => "gauge",
    }
}

/// Each label with the values that gpustow chooses, in their order.
fn labels(family: &MetricFamily) -> String {
    let mut all: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for label in family.get_metric().iter().flat_map(|it| it.get_label()) {
        let values = all.entry(label.name()).or_default();
        let value = label.value();
        let is_known = value == ANY || values.contains(&value) || OPEN.contains(&label.name());
        if !is_known && !value.is_empty() {
            values.push(value);
        }
    }
    let all = all
        .into_iter()
        .map(|(label, mut values)| match values.is_empty() {
            true => code(label),
            false => {
                values.sort_unstable();
                let values: Vec<_> = values.into_iter().map(code).collect();
                format!("{}: {}", code(label), values.join(", "))
            }
        });
    all.collect::<Vec<_>>().join("; ")
}
