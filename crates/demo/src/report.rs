//! Figures in words: a row per policy, and the summary.

use std::sync::PoisonError;
use std::time::Duration;

use gpustow_pack::PolicyKind;

use super::Args;
use super::picture::Picture;
use super::workload::RAMP;
use super::world::{Tally, World};
use gpustow_sim::report::Mean;

/// Minutes, or points, that are no difference.
const LEVEL: f64 = 0.05;

/// What one policy has come to.
#[derive(Clone, Debug, Default)]
pub(crate) struct Row {
    pub(crate) policy: PolicyKind,
    pub(crate) tally: Tally,
    pub(crate) running: usize,
    pub(crate) waiting: usize,
    /// Share of all GPU memory that is promised now, 0 to 1.
    pub(crate) allocated: f64,
    pub(crate) mean_wait: Duration,
    pub(crate) filter: Quantiles,
    pub(crate) bind: Quantiles,
}

/// Median and 99th percentile.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Quantiles(Duration, Duration);

impl Quantiles {
    fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        let at = |hundredths: usize| {
            let last = times.len().saturating_sub(1);
            times
                .get(last * hundredths / 100)
                .copied()
                .unwrap_or_default()
        };
        Self(at(50), at(99))
    }

    fn text(self) -> String {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        format!("{:.2} / {:.2} ms", ms(self.0), ms(self.1))
    }
}

impl Row {
    /// Looks at a world at virtual time `now`.
    pub(crate) fn of(world: &World, now: Duration) -> Self {
        let picture = Picture::of(&world.store);
        let mut tally = world.tally().clone();
        tally.broken += picture.over_committed() + picture.lost;
        let (filter, bind) = {
            let latencies = world
                .latencies
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            (latencies.filter.clone(), latencies.bind.clone())
        };
        Self {
            policy: world.policy,
            running: picture.running,
            waiting: picture.waiting.len(),
            allocated: picture.allocated(),
            mean_wait: tally.mean_wait(now),
            filter: Quantiles::of(filter),
            bind: Quantiles::of(bind),
            tally,
        }
    }

    /// No card was over-committed and every pod is accounted for.
    pub(crate) fn is_sound(&self) -> bool {
        let tally = &self.tally;
        tally.broken == 0 && tally.arrived == tally.finished + self.running + self.waiting
    }
}

/// Hours and minutes.
pub(crate) fn clock(time: Duration) -> String {
    let minutes = time.as_secs() / 60;
    format!("{:02}:{:02}", minutes / 60, minutes % 60)
}

/// A heading and a line per policy, with as many columns as `width` has room for; the first is the one that
/// is shown.
pub(crate) fn table(rows: &[Row], width: usize) -> Vec<String> {
    let heading = [
        "policy",
        "allocated",
        "waiting",
        "mean wait",
        "filter p50 / p99",
        "bind p50 / p99",
    ];
    let line = |cells: [&str; 6]| {
        let [policy, others @ ..] = cells;
        let mut line = format!("{policy:10}");
        for (cell, column) in others.into_iter().zip([10, 8, 11, 19, 19]) {
            if line.len() + column <= width {
                line += &format!("{cell:>column$}");
            }
        }
        line
    };
    let mut lines = vec![line(heading)];
    for row in rows {
        let mean = row.tally.mean_allocated();
        let mean = mean.map_or("-".to_owned(), |mean| format!("{:.1} %", mean * 100.0));
        lines.push(line([
            row.policy.name(),
            &mean,
            &row.waiting.to_string(),
            &format!("{:.1} min", row.mean_wait.as_secs_f64() / 60.0),
            &row.filter.text(),
            &row.bind.text(),
        ]));
    }
    lines
}

/// How the default policy compares with one of the others: minutes that it waits longer, and points of
/// GPU memory that it allocates more.
struct Against {
    other: PolicyKind,
    wait: Mean,
    allocated: Mean,
}

fn wait(row: &Row) -> f64 {
    row.mean_wait.as_secs_f64() / 60.0
}

fn share(row: &Row) -> f64 {
    100.0 * row.tally.mean_allocated().unwrap_or(0.0)
}

/// The default policy against every other, run by run.
fn against_others(all: &[Vec<Row>]) -> Vec<Against> {
    let others = PolicyKind::ALL.into_iter();
    let others = others.filter(|policy| *policy != PolicyKind::default());
    let minus = |other: PolicyKind, of: fn(&Row) -> f64| {
        let of_run = |rows: &Vec<Row>, policy| {
            let row = rows.iter().find(|row| row.policy == policy);
            row.map(of)
        };
        let both = all
            .iter()
            .filter_map(|rows| Some(of_run(rows, PolicyKind::default())? - of_run(rows, other)?));
        Mean::of(&both.collect::<Vec<_>>())
    };
    let against = |other| Against {
        other,
        wait: minus(other, wait),
        allocated: minus(other, share),
    };
    others.map(against).collect()
}

/// Where the default policy is behind another by more than the 95 % interval, and why; a line.
fn verdict(others: &[Against]) -> String {
    let ours = PolicyKind::default();
    let behind = others.iter().filter_map(|against| {
        let Against {
            other,
            wait,
            allocated,
        } = against;
        let mut how = Vec::new();
        if wait.mean - wait.ci95 > LEVEL {
            how.push(format!("waits {:.1} min longer", wait.mean));
        }
        if allocated.mean + allocated.ci95 < -LEVEL {
            how.push(format!("allocates {:.1} points less", -allocated.mean));
        }
        (!how.is_empty()).then(|| format!("than {other} it {}", how.join(" and ")))
    });
    let behind: Vec<String> = behind.collect();
    match behind.is_empty() {
        true => format!("{ours}: no other policy waits less or allocates more."),
        false => format!(
            "{ours} is not first: {}. It judges by the pods seen so far what is worth keeping free; on few cards \
             of different sizes the tightest card does as well or better (docs/packing.md).",
            behind.join(", ")
        ),
    }
}

/// Runs with several seeds: means with their 95 % intervals, and how the first policy, which is shown,
/// compares with each other one, seed by seed.
pub(crate) fn over_seeds(all: &[Vec<Row>]) -> String {
    let policies = all.first().map_or(0, Vec::len);
    let values = |at: usize, of: fn(&Row) -> f64| -> Vec<f64> {
        let rows = all.iter().filter_map(|rows| rows.get(at));
        rows.map(of).collect()
    };
    let mut text = format!(
        "\n{} seeds; the differences are seed by seed\n{:12}{:>18}{:>20}{:>22}{:>22}\n",
        all.len(),
        "policy",
        "allocated, %",
        "mean wait, min",
        "allocated: shown −",
        "wait: shown −"
    );
    for at in 0..policies {
        let name = all.first().and_then(|rows| rows.get(at));
        let name = name.map_or("", |row| row.policy.name());
        let minus = |of: fn(&Row) -> f64| {
            let both = values(0, of).into_iter().zip(values(at, of));
            Mean::of(&both.map(|(shown, other)| shown - other).collect::<Vec<_>>())
        };
        let cell = |mean: Mean| format!("{:.2} ± {:.2}", mean.mean, mean.ci95);
        let signed = |mean: Mean| match at {
            0 => String::new(),
            _ => format!("{:+.2} ± {:.2}", mean.mean, mean.ci95),
        };
        text += &format!(
            "{name:12}{:>18}{:>20}{:>22}{:>22}\n",
            cell(Mean::of(&values(at, share))),
            cell(Mean::of(&values(at, wait))),
            signed(minus(share)),
            signed(minus(wait)),
        );
    }
    text + &verdict(&against_others(all)) + "\n"
}

/// What stays on the terminal.
pub(crate) fn summary(args: &Args, gpus: usize, now: Duration, rows: &[Row]) -> String {
    let mut lines = Vec::new();
    let mut say = |line: String| lines.push(line);
    let Args {
        seed, nodes, pods, ..
    } = args;
    let passed = clock(now);
    say(format!(
        "gpustow demo: {passed} h with {pods} pods on {nodes} nodes with {gpus} GPUs, seed {seed}\n"
    ));
    table(rows, usize::MAX).into_iter().for_each(&mut say);
    say(format!(
        "\nallocated: GPU memory promised to pods, mean from {} on. waiting: at the end. Waits are in\n\
         simulated time; filter and bind are real, over HTTP. One run on few nodes says little about a\n\
         policy: --seeds 10 compares them with their spread, docs/packing.md on recorded workloads.\n",
        clock(RAMP)
    ));
    for row in rows {
        let Row {
            policy,
            running,
            waiting,
            tally,
            ..
        } = row;
        let Tally {
            arrived, finished, ..
        } = tally;
        say(format!(
            "{policy}: {arrived} pods arrived, {finished} finished, {running} running, {waiting} waiting"
        ));
    }
    if args.seeds == 1 {
        say(verdict(&against_others(&[rows.to_vec()])));
    }
    if rows.iter().all(Row::is_sound) {
        say("No card was over-committed, no pod was lost.".to_owned());
    } else {
        for row in rows.iter().filter(|row| !row.is_sound()) {
            let broken = row.tally.broken;
            say(format!(
                "BROKEN under {}: over-committed cards or lost pods were seen {broken} times, or the \
                 pods above do not add up. Please report this.",
                row.policy
            ));
        }
    }
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn against(other: PolicyKind, waits: &[f64], shares: &[f64]) -> Against {
        Against {
            other,
            wait: Mean::of(waits),
            allocated: Mean::of(shares),
        }
    }

    #[test]
    fn it_says_where_the_default_policy_is_behind() {
        let level = against(PolicyKind::FirstFit, &[-2.0, -1.0, 0.0], &[1.0, -1.0, 0.0]);
        let ahead = against(PolicyKind::Spread, &[-2.0, -1.9, -2.1], &[4.0, 4.1, 3.9]);
        let text = verdict(&[level, ahead]);
        assert_eq!(text, "tight: no other policy waits less or allocates more.");
        let slow = against(PolicyKind::Binpack, &[2.0, 2.1, 1.9], &[-1.0, 1.0, 0.0]);
        let text = verdict(&[slow]);
        assert!(text.contains("not first: than binpack it waits 2.0 min longer."));
        let less = against(PolicyKind::Binpack, &[0.0], &[-0.3]);
        let text = verdict(&[less]);
        assert!(text.contains("not first: than binpack it allocates 0.3 points less."));
    }
}
