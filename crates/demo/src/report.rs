//! Figures in words: a row per way to share GPUs, and a summary.

use std::time::Duration;

use gpustow_pack::PolicyKind;
use gpustow_sim::report::Mean;

use super::Args;
use super::device_plugin::{Cluster, Sharing};
use super::picture::Picture;
use super::tally::Tally;
use super::workload::{RAMP, SPAN, Workload};
use super::world::World;

/// The results of one way to share the GPUs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Row {
    /// Its name.
    pub(crate) way: String,
    pub(crate) tally: Tally,
    pub(crate) running: usize,
    pub(crate) waiting: usize,
    pub(crate) mean_wait: Duration,
    /// Pods whose program found its GPU full.
    pub(crate) failed: usize,
}

/// The row of the compared policy; the device plugin's are before it, other policies after it.
const OURS: usize = Sharing::ALL.len();

fn ours(policy: PolicyKind) -> String {
    format!("gpustow {policy}")
}

impl Row {
    /// Looks at a world at its end.
    pub(crate) fn of(world: &World) -> Self {
        let picture = Picture::of(&world.server);
        let mut tally = world.tally().clone();
        tally.broken += picture.over_committed() + picture.lost;
        Self {
            way: ours(world.policy),
            running: picture.running,
            waiting: picture.waiting,
            mean_wait: tally.mean_wait(SPAN),
            failed: 0,
            tally,
        }
    }

    /// Looks at a cluster of the device plugin at its end.
    pub(crate) fn of_device_plugin(cluster: &Cluster<'_>) -> Self {
        Self {
            way: cluster.sharing.name().to_owned(),
            running: cluster.running(),
            waiting: cluster.tally.waiting(),
            mean_wait: cluster.tally.mean_wait(SPAN),
            failed: cluster.failed(),
            tally: cluster.tally.clone(),
        }
    }

    /// No GPU was over-committed and every pod is accounted for.
    fn is_sound(&self) -> bool {
        let tally = &self.tally;
        tally.broken == 0 && tally.arrived == tally.finished + self.running + self.waiting
    }

    fn at_once(&self) -> f64 {
        self.tally.mean_running().unwrap_or(0.0)
    }

    fn wait(&self) -> f64 {
        self.mean_wait.as_secs_f64() / 60.0
    }

    fn share(&self) -> f64 {
        100.0 * self.tally.mean_allocated().unwrap_or(0.0)
    }
}

/// A message about the first broken row, if there is one.
pub(crate) fn broken(rows: &[Row]) -> Option<String> {
    let row = rows.iter().find(|row| !row.is_sound())?;
    Some(format!(
        "{} is broken: {} times a GPU was over-committed or a pod was lost, or the counts of pods do not add up. \
         Please report this.",
        row.way, row.tally.broken
    ))
}

/// Hours and minutes.
pub(crate) fn clock(time: Duration) -> String {
    let minutes = time.as_secs() / 60;
    format!("{:02}:{:02}", minutes / 60, minutes % 60)
}

/// A heading and a line per row.
fn table(rows: &[Row]) -> Vec<String> {
    let line = |way: &str, cells: [String; 5]| {
        let mut line = format!("{way:18}");
        for (cell, column) in cells.into_iter().zip([12, 17, 14, 12, 22]) {
            line += &format!("{cell:>column$}");
        }
        line
    };
    let heading = [
        "pods at once",
        "mean wait, min",
        "pods failed",
        "pods done",
        "memory requested, %",
    ];
    let mut lines = vec![line("", heading.map(str::to_owned))];
    for row in rows {
        let or_dash = |value: Option<f64>| value.map_or("-".to_owned(), |it| format!("{it:.1}"));
        let cells = [
            or_dash(row.tally.mean_running()),
            format!("{:.1}", row.wait()),
            row.failed.to_string(),
            row.tally.finished.to_string(),
            or_dash(row.tally.mean_allocated().map(|share| 100.0 * share)),
        ];
        lines.push(line(&row.way, cells));
    }
    lines
}

/// The description of the simulation.
pub(crate) fn heading(args: &Args, workload: &Workload) -> String {
    let Args { nodes, seed, .. } = args;
    let (span, gpus, description) = (clock(SPAN), workload.gpus, &workload.description);
    let pods = workload.pods.len();
    format!(
        "{span} h with {pods} pods on {nodes} nodes with {gpus} GPUs, seed {seed}\n{description}"
    )
}

/// The text that stays on the terminal after one run.
pub(crate) fn summary(rows: &[Row]) -> String {
    let mut lines = table(rows);
    lines.push(format!(
        "\npods at once, memory requested: means from {} h on, of running pods on all GPUs. mean wait: simulated\n\
         time until a pod starts. pods failed: they found their GPU full, and started again.",
        clock(RAMP)
    ));
    if rows.iter().all(Row::is_sound) {
        lines.push("No GPU was over-committed, no pod was lost.".to_owned());
    }
    lines.extend(factor(&[rows.to_vec()]));
    lines.push("Next: make demo ARGS=\"--workload large\", or make cluster for a real control plane (docs/quickstart.md).".to_owned());
    lines.join("\n") + "\n"
}

/// The row of that name in each run.
fn each<'a>(all: &'a [Vec<Row>], way: &'a str) -> impl Iterator<Item = &'a Row> {
    all.iter()
        .filter_map(move |rows| rows.iter().find(|row| row.way == way))
}

/// How many times as many pods run with the compared policy as with whole GPUs.
fn factor(all: &[Vec<Row>]) -> Option<String> {
    let way = &all.first()?.get(OURS)?.way;
    let pairs = each(all, way).zip(each(all, Sharing::Whole.name()));
    let at_once: Vec<(f64, f64)> = pairs
        .map(|(row, whole)| (row.at_once(), whole.at_once()))
        .collect();
    if at_once.iter().any(|(_, whole)| *whole <= 0.0) {
        return None;
    }
    let factors: Vec<f64> = at_once.iter().map(|(ours, whole)| ours / whole).collect();
    let factor = Mean::of(&factors);
    Some(match at_once.as_slice() {
        [(ours, whole)] => format!(
            "{way} runs {:.1} times as many pods at once as whole GPUs: {ours:.1} and {whole:.1}.",
            factor.mean
        ),
        runs => format!(
            "{way} runs {:.2} ± {:.2} times as many pods at once as whole GPUs, over {} seeds.",
            factor.mean,
            factor.ci95,
            runs.len()
        ),
    })
}

/// How the first policy compares with another, seed by seed: minutes that its pods wait longer, and points of GPU memory
/// that it allocates more.
struct Against {
    other: String,
    wait: Mean,
    allocated: Mean,
}

impl Against {
    fn of(all: &[Vec<Row>], first: &str, other: &str) -> Self {
        let minus = |of: fn(&Row) -> f64| {
            let both = each(all, first).zip(each(all, other));
            let both = both.map(|(first, other)| of(first) - of(other));
            Mean::of(&both.collect::<Vec<_>>())
        };
        Self {
            other: other.to_owned(),
            wait: minus(Row::wait),
            allocated: minus(Row::share),
        }
    }

    /// The differences that exceed the spread of the seeds, if any does.
    fn verdict(&self) -> Option<String> {
        let exceeds = |mean: Mean| mean.mean.abs() > mean.ci95;
        let mut found = Vec::new();
        if exceeds(self.wait) {
            let longer = if self.wait.mean > 0.0 {
                "longer"
            } else {
                "less"
            };
            found.push(format!("waits {:.1} min {longer}", self.wait.mean.abs()));
        }
        if exceeds(self.allocated) {
            let more = if self.allocated.mean > 0.0 {
                "more"
            } else {
                "less"
            };
            found.push(format!(
                "allocates {:.1} points {more}",
                self.allocated.mean.abs()
            ));
        }
        (!found.is_empty()).then(|| format!("than {} it {}", self.other, found.join(" and ")))
    }
}

/// Where the first policy differs from the others by more than the spread of the seeds.
fn verdict(first: &str, others: &[Against], seeds: usize) -> String {
    let found: Vec<String> = others.iter().filter_map(Against::verdict).collect();
    match found.is_empty() {
        true => format!(
            "{first}: no difference from another policy exceeds the spread of {seeds} seeds."
        ),
        false => format!(
            "{first}, beyond the spread of {seeds} seeds: {}.",
            found.join("; ")
        ),
    }
}

/// Runs with several seeds: means with their 95 % intervals, a verdict where they allow one, and the factor.
pub(crate) fn over_seeds(all: &[Vec<Row>]) -> String {
    let Some(rows) = all.first() else {
        return String::new();
    };
    let mut lines = vec![
        format!("{} seeds, mean ± half of the 95 % interval\n", all.len()),
        format!(
            "{:17}{:>18}{:>20}{:>20}",
            "", "at once", "mean wait, min", "allocated, %"
        ),
    ];
    for Row { way, .. } in rows {
        let cell = |of: fn(&Row) -> f64| {
            let mean = Mean::of(&each(all, way).map(of).collect::<Vec<_>>());
            format!("{:.2} ± {:.2}", mean.mean, mean.ci95)
        };
        let (at_once, wait, share) = (cell(Row::at_once), cell(Row::wait), cell(Row::share));
        lines.push(format!("{way:17}{at_once:>18}{wait:>20}{share:>20}"));
    }
    if let Some([first, others @ ..]) = rows.get(OURS..)
        && !others.is_empty()
    {
        let others = others.iter();
        let others: Vec<Against> = others
            .map(|other| Against::of(all, &first.way, &other.way))
            .collect();
        lines.push(format!("\n{}", verdict(&first.way, &others, all.len())));
    }
    lines.extend(factor(all));
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn against(waits: &[f64], shares: &[f64]) -> Against {
        Against {
            other: "gpustow binpack".to_owned(),
            wait: Mean::of(waits),
            allocated: Mean::of(shares),
        }
    }

    #[test]
    fn verdict_names_only_what_exceeds_the_spread() {
        let level = against(&[-2.0, -1.0, 2.0], &[1.0, -1.0, 0.5]);
        assert_eq!(
            verdict("gpustow tight", &[level], 3),
            "gpustow tight: no difference from another policy exceeds the spread of 3 seeds."
        );
        let slow = against(&[2.0, 2.1, 1.9], &[-1.0, 1.0, 0.0]);
        assert_eq!(
            verdict("gpustow tight", &[slow], 3),
            "gpustow tight, beyond the spread of 3 seeds: than gpustow binpack it waits 2.0 min longer."
        );
        let better = against(&[0.0, 0.1, -0.1], &[3.9, 4.0, 4.1]);
        let text = verdict("gpustow tight", &[better], 3);
        assert!(
            text.ends_with("than gpustow binpack it allocates 4.0 points more."),
            "{text}"
        );
    }
}
