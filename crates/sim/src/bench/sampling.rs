//! What kube-scheduler's sampling of nodes costs gpustow's packing: the tables of docs/packing.md.

use std::collections::{BTreeMap, HashSet};
use std::ops::RangeInclusive;
use std::path::Path;

use anyhow::Result;
use gpustow_pack::PolicyKind;

use super::goals::OURS;
use super::queue::{self, Outcome, Study};
use super::scenarios::Openb;
use super::{DEFAULT_LIST, lists};
use crate::churn::Plan;
use crate::hosts::{Host, Job, Models};
use crate::protocol::{Mode, Workload};
use crate::replay::{Placer as _, Run};
use crate::report::Mean;
use crate::stowed::{Settings, Stowed};
use crate::synthetic;
use crate::window::{Enough, InUse, Sampled, Window};

/// What is compared with every node. The last one is 5 % of the openb trace's nodes, without kube-scheduler's least of 100.
const WINDOWS: [Enough; 5] = [
    Enough::Percent(0),
    Enough::Percent(20),
    Enough::Percent(10),
    Enough::Percent(5),
    Enough::Nodes(60),
];
/// Nodes of the generated cluster.
const GENERATED: usize = 1200;
/// Loads of the clusters that pods leave.
const LOADS: [f64; 7] = [0.05, 0.2, 0.5, 0.8, 0.95, 1.05, 1.3];
/// Levels of arrivals at which packing is compared, in percent.
const STEP: u32 = 5;
/// Levels at which a partly full cluster is shown.
const PARTLY: [u32; 5] = [5, 20, 40, 60, 80];
/// Pods of the nearly empty cluster, and what they ask for in turn: as `bench-cluster` has them.
const BACKLOG: usize = 600;
const REQUESTS: [u64; 6] = [4_096, 8_192, 10_240, 16_384, 24_576, 40_960];
const CARD: u64 = 81_920;

/// A cluster with its pods, and its runs by window, the full view first.
struct Row {
    name: String,
    studies: Vec<usize>,
}

#[derive(Default)]
struct Grid {
    studies: Vec<Study>,
    replays: Vec<Row>,
    churns: Vec<Row>,
}

fn windows() -> impl Iterator<Item = Window> {
    let sampled = WINDOWS.into_iter().map(|enough| Window {
        enough,
        ..Window::default()
    });
    std::iter::once(Window::default()).chain(sampled)
}

impl Grid {
    fn replay(&mut self, name: &str, workload: &Workload) {
        let first = self.studies.len();
        self.studies.extend(windows().map(|window| {
            let mut workload = workload.clone();
            workload.window = window;
            Study::Replay(Box::new(workload))
        }));
        self.replays.push(Row {
            name: name.to_owned(),
            studies: (first..self.studies.len()).collect(),
        });
    }

    fn churn(&mut self, name: &str, plan: &Plan) {
        let first = self.studies.len();
        self.studies.extend(windows().map(|window| {
            Study::Churn(Box::new(Plan {
                window,
                ..plan.clone()
            }))
        }));
        self.churns.push(Row {
            name: name.to_owned(),
            studies: (first..self.studies.len()).collect(),
        });
    }

    fn of(openb: Option<&Openb>) -> Result<Self> {
        let mut grid = Self::default();
        if let Some(openb) = openb {
            grid.openb(openb)?;
        }
        let nodes = synthetic::nodes(GENERATED);
        let generated = Workload::new(nodes, synthetic::pods(), Mode::Units)?;
        grid.replay(&format!("generated, {GENERATED} nodes"), &generated);
        Ok(grid)
    }

    fn openb(&mut self, openb: &Openb) -> Result<()> {
        for (list, pods) in &openb.lists {
            self.replay(list, &openb.workload(pods.clone(), Mode::Units)?);
        }
        for mode in [Mode::MibPaper, Mode::MibGuess] {
            let pods = openb.list(DEFAULT_LIST)?.to_vec();
            let name = format!("{DEFAULT_LIST}, GPUs of several sizes ({mode})");
            self.replay(&name, &openb.workload(pods, mode)?);
        }
        for nodes in [60, 300] {
            let pods = openb.list(DEFAULT_LIST)?.to_vec();
            let mut workload = openb.workload(pods, Mode::Units)?;
            workload.nodes = nodes;
            self.replay(&format!("{DEFAULT_LIST}, {nodes} nodes"), &workload);
        }
        for load in LOADS {
            let plan = openb.churn(DEFAULT_LIST, 300, load)?;
            self.churn(&format!("{DEFAULT_LIST}, 300 nodes, load {load}"), &plan);
        }
        for (list, load) in [("multigpu20", 0.95), ("gpushare100", 0.8)] {
            let plan = openb.churn(list, 300, load)?;
            self.churn(&format!("{list}, 300 nodes, load {load}"), &plan);
        }
        Ok(())
    }
}

/// Values by seed.
type Values = BTreeMap<u64, f64>;

fn values(
    outcomes: &[(crate::baselines::Choice, u64, Outcome)],
    of: impl Fn(&Outcome) -> Option<f64>,
) -> Values {
    let seeds = outcomes.iter();
    seeds
        .filter_map(|(_, seed, outcome)| Some((*seed, of(outcome)?)))
        .collect()
}

/// The mean difference to the full view, seed by seed.
fn difference(full: &Values, window: &Values) -> Mean {
    let both = window
        .iter()
        .filter_map(|(seed, value)| Some(value - full.get(seed)?));
    Mean::of(&both.collect::<Vec<_>>())
}

fn shown(mean: Mean) -> String {
    format!("{:+.2} ± {:.2}", mean.mean, mean.ci95)
}

fn plain(values: &Values) -> String {
    let mean = Mean::of(&values.values().copied().collect::<Vec<_>>());
    format!("{:.2} ± {:.2}", mean.mean, mean.ci95)
}

fn head(first: &str, full: &str) {
    let windows = WINDOWS.map(|enough| match enough {
        Enough::Nodes(nodes) => format!("{nodes} nodes"),
        percent => percent.to_string().replace('%', " %"),
    });
    println!(
        "| {first} | {full} | {} |\n|---|---|{}",
        windows.join(" | "),
        "---|".repeat(WINDOWS.len())
    );
}

fn line(name: &str, full: &str, cells: &[String]) {
    println!("| {name} | {full} | {} |", cells.join(" | "));
}

/// Replays and lets pods come and go with every window; prints the tables. Without the folder of the openb trace those of
/// generated lists alone.
///
/// # Errors
/// If a file cannot be read.
pub fn sampling(folder: Option<&Path>, seeds: &RangeInclusive<u64>) -> Result<()> {
    let openb = match folder {
        Some(folder) => Some(Openb::read(folder, &lists(folder)?)?),
        None => None,
    };
    let grid = Grid::of(openb.as_ref())?;
    let tasks: Vec<queue::Task> = (0..grid.studies.len())
        .flat_map(|at| seeds.clone().map(move |seed| (at, OURS, seed)))
        .collect();
    let outcomes = queue::run(&grid.studies, &tasks)?;
    println!(
        "\nseeds {} to {}; differences to the full view, seed by seed\n",
        seeds.start(),
        seeds.end()
    );
    let allocated =
        |level: u32| move |outcome: &Outcome| outcome.replayed()?.allocated.get(&level).copied();
    println!(
        "**Allocated at 130 % of arrivals, points; in brackets the worst level from 5 to 130 %**\n"
    );
    head("list", "100 %");
    for row in &grid.replays {
        let of = |at: usize, level| values(&outcomes[row.studies[at]], allocated(level));
        let cell = |at: usize| {
            let levels = (STEP..=130).step_by(STEP as usize);
            let levels = levels.map(|level| (level, difference(&of(0, level), &of(at, level))));
            let worst = levels.min_by(|a, b| a.1.mean.total_cmp(&b.1.mean));
            let worst = worst.map(|(level, it)| format!(" ({:+.2} @{level})", it.mean));
            shown(difference(&of(0, 130), &of(at, 130))) + &worst.unwrap_or_default()
        };
        let cells: Vec<String> = (1..row.studies.len()).map(cell).collect();
        line(&row.name, &plain(&of(0, 130)), &cells);
    }
    refused(&grid.replays, &outcomes);
    if openb.is_some() {
        partly(&grid, &outcomes);
        departures(&grid, &outcomes);
    }
    nearly_empty();
    Ok(())
}

type Outcomes = [Vec<(crate::baselines::Choice, u64, Outcome)>];

/// How often a window refuses a pod that fits elsewhere, and what it takes until that pod is placed.
fn refused(rows: &[Row], outcomes: &Outcomes) {
    println!(
        "\n**Refused in the window although a node outside it fits, in percent of attempts; in brackets the further windows \
         until placed, mean and most**\n"
    );
    head("list", "100 %");
    for row in rows {
        let cell = |at: &usize| {
            let runs = outcomes[*at].iter().map(|(.., outcome)| match outcome {
                Outcome::Replay(run) => run.looks,
                Outcome::Churn(run) => run.looks,
            });
            let sampled = Sampled::of(runs);
            match sampled.further_max {
                0 => "0".to_owned(),
                most => format!(
                    "{:.2} ({:.1}, {most})",
                    sampled.refused_pct, sampled.further_mean
                ),
            }
        };
        let cells: Vec<String> = row.studies.iter().map(cell).collect();
        line(&row.name, &cells[0], &cells[1..]);
    }
}

/// What a partly full cluster runs.
fn partly(grid: &Grid, outcomes: &Outcomes) {
    println!(
        "\n**GPUs of nodes in use, in percent of all, list {DEFAULT_LIST}: less is better**\n"
    );
    head("arrivals", "100 %");
    let default = grid.replays.iter().find(|row| row.name == DEFAULT_LIST);
    for level in PARTLY {
        let running = |run: &Run| run.whole.get(&level).map(|whole| whole.running_pct);
        let of = |at: usize| values(&outcomes[at], |outcome| running(outcome.replayed()?));
        let Some(row) = default else { continue };
        let full = of(row.studies[0]);
        let cells: Vec<String> = row.studies[1..]
            .iter()
            .map(|at| shown(difference(&full, &of(*at))))
            .collect();
        line(&format!("{level} %"), &plain(&full), &cells);
    }
}

/// Clusters that pods leave.
fn departures(grid: &Grid, outcomes: &Outcomes) {
    let held = |outcome: &Outcome| match outcome {
        Outcome::Churn(run) => Some(run.allocated),
        Outcome::Replay(_) => None,
    };
    let waits = |outcome: &Outcome| match outcome {
        Outcome::Churn(run) => {
            let waits: Vec<f64> = run.waits.values().flatten().copied().collect();
            Some(waits.iter().sum::<f64>() / waits.len().max(1) as f64)
        }
        Outcome::Replay(_) => None,
    };
    println!("\n**With departures: allocated, points; in brackets the mean wait, minutes**\n");
    head("list", "100 %");
    for row in &grid.churns {
        let of = |at: usize| {
            let outcomes = &outcomes[row.studies[at]];
            (values(outcomes, held), values(outcomes, waits))
        };
        let full = of(0);
        let cell = |at: usize| {
            let (held, waits) = of(at);
            let waits = difference(&full.1, &waits);
            format!("{} ({:+.2})", shown(difference(&full.0, &held)), waits.mean)
        };
        let cells: Vec<String> = (1..row.studies.len()).map(cell).collect();
        let wait = Mean::of(&full.1.values().copied().collect::<Vec<_>>()).mean;
        line(
            &row.name,
            &format!("{} ({wait:.2})", plain(&full.0)),
            &cells,
        );
    }
    refused(&grid.churns, outcomes);
}

/// How many nodes the pods of `bench-cluster` open in a cluster that is otherwise empty.
fn nearly_empty() {
    println!(
        "\n**Nodes that {BACKLOG} pods open in an empty cluster, of nodes with 8 GPUs of 80 GiB; in brackets where \
         nodes in use come first; where pods are nominated to them, and percent of pods that are**\n"
    );
    head("nodes", "100 %");
    for nodes in [1000, 5000, 15_000] {
        for workers in [1, 16] {
            let cell = |enough: Enough| {
                let window = |in_use| Window {
                    enough,
                    workers,
                    in_use,
                };
                let (opened, _) = open(nodes, window(InUse::Off));
                match window(InUse::Off).is_all() {
                    true => opened.to_string(),
                    false => {
                        let (prefer, _) = open(nodes, window(InUse::Prefer));
                        let (nominate, sampled) = open(nodes, window(InUse::Nominate));
                        let nominated = sampled.nominated_pct;
                        format!("{opened} ({prefer}; {nominate}, {nominated:.0} %)")
                    }
                }
            };
            let cells = WINDOWS.map(cell);
            let name = match workers {
                1 => format!("{nodes}"),
                workers => format!("{nodes}, kube-scheduler on {workers} cores"),
            };
            line(&name, &cell(Enough::Percent(100)), &cells);
        }
    }
}

fn open(nodes: usize, window: Window) -> (usize, Sampled) {
    let host = Host {
        cpu: 128_000,
        ram: 1_048_576,
        model: 1,
        card: CARD,
        left: vec![CARD; 8],
    };
    let mut hosts = vec![host; nodes];
    let settings = Settings {
        window,
        ..Settings::default()
    };
    let mut stowed = Stowed::new(&hosts, PolicyKind::Tight, settings);
    let job = |id: usize| {
        let class = id % REQUESTS.len();
        Job {
            class,
            cpu: 100,
            ram: 0,
            gpus: 1,
            milli: REQUESTS[class] * 1000 / CARD,
            units: REQUESTS[class],
            models: Models::MAX,
        }
    };
    // All of them wait before the first is placed.
    (0..BACKLOG).for_each(|id| stowed.comes(id, &job(id)));
    let mut used = HashSet::new();
    for id in 0..BACKLOG {
        let job = job(id);
        if let Some(placed) = stowed.place(&hosts, &job, id)
            && hosts[placed.host].take(&job, &placed.cards)
        {
            used.insert(placed.host);
        }
    }
    (used.len(), Sampled::of([stowed.looks()]))
}
