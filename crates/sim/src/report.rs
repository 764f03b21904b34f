//! Runs of several seeds as one table or one JSON document.

use std::borrow::Borrow;
use std::collections::BTreeMap;

use serde::Serialize;

use crate::replay::{Run, Whole};

/// Levels of arrivals, in percent of the cards, that tables show.
pub const LEVELS: [u32; 5] = [90, 95, 100, 115, 130];
/// Percent of arrivals at which a partly full cluster is shown.
const PARTIAL: [u32; 5] = [20, 40, 60, 80, 100];

/// A mean over seeds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Mean {
    /// The mean.
    pub mean: f64,
    /// Standard deviation between seeds.
    pub sd: f64,
    /// Half the width of the 95 % confidence interval of the mean (Student's t).
    pub ci95: f64,
}

/// Student's t, two-sided 95 %, by degrees of freedom from one on.
const STUDENT: [f64; 12] = [
    12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18,
];

impl Mean {
    /// The mean of these values; all zero if there are none.
    #[must_use]
    pub fn of(values: &[f64]) -> Self {
        let n = values.len().max(1) as f64;
        let mean = values.iter().sum::<f64>() / n;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let sd = (squares / (n - 1.0).max(1.0)).sqrt();
        let t = match values.len() {
            0 | 1 => 0.0,
            count => STUDENT.get(count - 2).copied().unwrap_or(2.0),
        };
        Self {
            mean,
            sd,
            ci95: t * sd / n.sqrt(),
        }
    }
}

/// Demand that found no place.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Unplaced {
    /// Mean number of pods.
    pub pods: f64,
    /// Mean of the GPUs they asked for.
    pub gpus: f64,
}

/// One policy over all seeds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Seeds that were run to their end.
    pub runs: usize,
    /// Allocated, in percent of all cards, by percent of arrivals.
    pub allocation_pct: BTreeMap<u32, Mean>,
    /// Free cards of no use to the mix, in percent of all free cards, likewise.
    pub fragmentation_pct: BTreeMap<u32, Mean>,
    /// How whole the cluster is, by percent of arrivals and by the names in [`WHOLE`].
    pub whole: BTreeMap<u32, BTreeMap<&'static str, Mean>>,
    /// Demand turned away, in percent of all cards.
    pub unplaced_pct: Mean,
    /// The demand turned away, by kind of demand.
    pub unplaced: BTreeMap<&'static str, Unplaced>,
    /// Percent of arrivals at the first pod that was turned away; 0 where none was.
    pub first_rejection_pct: Mean,
    /// Decision time in microseconds by quantile, over all decisions of all seeds.
    pub decision_us: BTreeMap<&'static str, f64>,
}

impl Summary {
    /// The summary of the runs of one policy.
    #[must_use]
    pub fn of<R: Borrow<Run>>(runs: &[R]) -> Self {
        let runs: Vec<&Run> = runs.iter().map(Borrow::borrow).collect();
        let mean = |value: &dyn Fn(&Run) -> Option<f64>| {
            Mean::of(&runs.iter().copied().filter_map(value).collect::<Vec<_>>())
        };
        let levels = |of: &dyn Fn(&Run) -> BTreeMap<u32, f64>| -> BTreeMap<u32, Mean> {
            let maps: Vec<_> = runs.iter().copied().map(of).collect();
            let all: Vec<u32> = maps
                .first()
                .map_or_else(Vec::new, |m| m.keys().copied().collect());
            let shown = all.into_iter().filter(|level| level % 5 == 0);
            let at = |level| -> Vec<f64> {
                maps.iter()
                    .filter_map(|map| map.get(&level).copied())
                    .collect()
            };
            shown.map(|level| (level, Mean::of(&at(level)))).collect()
        };
        let mut unplaced: BTreeMap<&'static str, Unplaced> = BTreeMap::new();
        for (kind, (pods, milli)) in runs.iter().flat_map(|run| &run.unplaced) {
            let sum = unplaced.entry(kind).or_insert(Unplaced {
                pods: 0.0,
                gpus: 0.0,
            });
            sum.pods += *pods as f64 / runs.len() as f64;
            sum.gpus += *milli as f64 / 1000.0 / runs.len() as f64;
        }
        let whole = |level: u32| {
            let all = || runs.iter().filter_map(|run| run.whole.get(&level));
            let over = |of: fn(&Whole) -> f64| Mean::of(&all().map(of).collect::<Vec<_>>());
            (level, WHOLE.map(|(name, of)| (name, over(of))).into())
        };
        let seen = runs.first().into_iter().flat_map(|run| run.whole.keys());
        let tenths = seen.copied().filter(|level| level % 10 == 0);
        let mut times: Vec<u64> = runs
            .iter()
            .flat_map(|run| &run.decision_ns)
            .copied()
            .collect();
        times.sort_unstable();
        let quantile = |share: f64| {
            let index = (share * times.len() as f64) as usize;
            times
                .get(index.min(times.len().saturating_sub(1)))
                .map_or(0.0, |ns| *ns as f64 / 1e3)
        };
        Self {
            runs: runs.len(),
            allocation_pct: levels(&|run| run.allocated.clone()),
            fragmentation_pct: levels(&|run| run.fragmented.clone()),
            whole: tenths.map(whole).collect(),
            unplaced_pct: mean(&|run| Some(run.unplaced_pct)),
            unplaced,
            first_rejection_pct: mean(&|run| run.first_rejection),
            decision_us: [("p50", quantile(0.5)), ("p99", quantile(0.99))].into(),
        }
    }
}

/// A column of [`Whole`] under the name that JSON gives it.
type Column = (&'static str, fn(&Whole) -> f64);

/// The columns that describe a partly full cluster.
pub const WHOLE: [Column; 5] = [
    ("empty_nodes", |whole| whole.empty),
    ("empty_large_nodes", |whole| whole.empty_large),
    ("largest_free_gpus", |whole| whole.largest),
    ("running_gpus_pct", |whole| whole.running_pct),
    ("refused_large_pods_pct", |whole| whole.refused_pct),
];

/// The width of the column of names.
fn width<N: AsRef<str>>(summaries: &[(N, Summary)]) -> usize {
    let names = summaries.iter().map(|(name, _)| name.as_ref().len());
    names.max().unwrap_or(0).max(15) + 1
}

/// The whole nodes and GPUs of a partly full cluster as a table, one policy per line. The columns are empty nodes,
/// empty nodes of the largest kind, and most free GPUs on one node. Then come the percent of GPUs on nodes that run,
/// and the percent of 8-GPU pods turned away.
#[must_use]
pub fn whole_table<N: AsRef<str>>(summaries: &[(N, Summary)]) -> String {
    let width = width(summaries);
    let mut text = format!("{:<width$}", "empty nodes");
    for level in PARTIAL {
        text += &format!("{:>34}", format!("@{level}"));
    }
    text.push('\n');
    for (name, summary) in summaries {
        text += &format!("{:<width$}", name.as_ref());
        for level in PARTIAL {
            let shown = summary.whole.get(&level).map(|whole| {
                let mean = |name| whole.get(name).map_or(0.0, |mean: &Mean| mean.mean);
                let [empty, large, largest, running, refused] = WHOLE.map(|(name, _)| mean(name));
                format!("{empty:.1}/{large:.1}/{largest:.1}/{running:.1} %/{refused:.1} %")
            });
            text += &format!("{:>34}", shown.unwrap_or_default());
        }
        text.push('\n');
    }
    text
}

/// The summaries as a table, one policy per line.
#[must_use]
pub fn table<N: AsRef<str>>(summaries: &[(N, Summary)]) -> String {
    let width = width(summaries);
    let mut text = format!("{:<width$}", "policy");
    for level in LEVELS {
        text += &format!("{:>16}", format!("alloc@{level}"));
    }
    text += &format!(
        "{:>16}{:>12}{:>9}{:>9}{:>9}{:>10}{:>10}\n",
        "unplaced %", "1st refusal", "frag@80", "frag@90", "frag@100", "p50 us", "p99 us"
    );
    for (name, summary) in summaries {
        text += &format!("{:<width$}", name.as_ref());
        for level in LEVELS {
            let shown = summary.allocation_pct.get(&level);
            let shown = shown.map(|mean| format!("{:.2} ±{:.2}", mean.mean, mean.ci95));
            text += &format!("{:>16}", shown.unwrap_or_default());
        }
        let unplaced = summary.unplaced_pct;
        text += &format!(
            "{:>16}",
            format!("{:.2} ±{:.2}", unplaced.mean, unplaced.ci95)
        );
        text += &format!("{:>12.1}", summary.first_rejection_pct.mean);
        for level in [80, 90, 100] {
            let mean = summary
                .fragmentation_pct
                .get(&level)
                .map_or(0.0, |mean| mean.mean);
            text += &format!("{mean:>9.1}");
        }
        for quantile in ["p50", "p99"] {
            text += &format!(
                "{:>10.1}",
                summary.decision_us.get(quantile).unwrap_or(&0.0)
            );
        }
        text.push('\n');
    }
    text
}
