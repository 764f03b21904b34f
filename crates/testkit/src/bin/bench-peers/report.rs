//! The table of the results.

use std::collections::BTreeMap;

use gpustow_testkit::{median, quantile, sorted, spread};

use crate::program::{Books, Program};
use crate::{Args, CARDS};

/// Of each kind of what is wrong, so many are shown.
const SHOWN: usize = 3;

/// One turn's figures.
pub(crate) struct Round {
    /// Pods per second of the burst.
    pub(crate) rate: f64,
    /// Milliseconds from creation to bound in the steady part, ascending.
    pub(crate) waits: Vec<f64>,
    /// CPU ms of each process per pod of the burst.
    pub(crate) cpu: Vec<(&'static str, f64)>,
    /// The same of API server and etcd.
    pub(crate) api: f64,
    /// The most MiB of each process.
    pub(crate) memory: Vec<(&'static str, f64)>,
    /// How long kube-scheduler's calls of the extender took, if there is one.
    pub(crate) calls: Option<String>,
    pub(crate) burst: Books,
    /// Of the nodes that were filled during restarts.
    pub(crate) filled: Books,
}

/// The table for docs/benchmarks.md, and what failed.
pub(crate) fn report(
    nodes: usize,
    args: &Args,
    results: &BTreeMap<Program, Vec<Round>>,
    failures: &BTreeMap<Program, String>,
) -> String {
    let mut text = format!(
        "{nodes} nodes × {} GPUs, a burst of {} pods, {} paced, {} more nodes filled during three restarts; median (least..most) of {} rounds\n\n\
         | program | pods/s | created → bound p50 / p99, ms | CPU ms a pod | of API server and etcd | memory, MiB | nodes, GPUs used | \
         over-committed, without a GPU, unbound | filled | over-committed, without a GPU, unbound |\n\
         |---|---|---|---|---|---|---|---|---|---|\n",
        CARDS.len(),
        args.pods,
        args.paced,
        args.filled,
        args.rounds,
    );
    for program in Program::chosen(&args.only) {
        if let Some(rounds) = results.get(&program) {
            text += &row(program, args, rounds);
        }
        if let Some(problem) = failures.get(&program) {
            let first = problem.lines().next().unwrap_or_default();
            text += &format!("| {} | {first} |\n", program.name());
        }
    }
    for (program, rounds) in results {
        for round in rounds {
            if let Some(calls) = &round.calls {
                text += &format!(
                    "\n{}: calls of its extender, p50 / p99, ms at most: {calls}",
                    program.name()
                );
            }
            for books in [&round.burst, &round.filled] {
                for wrong in [&books.over, &books.without] {
                    let shown = wrong.iter().take(SHOWN);
                    text.extend(shown.map(|it| format!("\n{}: {it}", program.name())));
                }
            }
        }
    }
    for (program, problem) in failures {
        text += &format!("\n{}: {problem}\n", program.name());
    }
    text
}

fn row(program: Program, args: &Args, rounds: &[Round]) -> String {
    let of = |value: fn(&Round) -> f64, digits| spread(rounds.iter().map(value), digits);
    let waits = sorted(rounds.iter().flat_map(|round| round.waits.iter().copied()));
    let whole = args.filled as f64 * CARDS.iter().sum::<u64>() as f64;
    let filled = rounds
        .iter()
        .map(|round| round.filled.mib as f64 * 100.0 / whole);
    // Over-commits are counted, not averaged away.
    let wrong = |books: fn(&Round) -> &Books| {
        let all = rounds.iter().map(books);
        let over: usize = all.clone().map(|it| it.over.len()).sum();
        let without: usize = all.clone().map(|it| it.without.len()).sum();
        let unbound = spread(all.map(|it| it.unbound as f64), 0);
        format!("{over}, {without}, {unbound}")
    };
    let gpus = match program {
        Program::Plain => "none chosen".to_owned(),
        _ => of(|round| round.burst.gpus as f64, 0),
    };
    format!(
        "| {} | {} | {} / {:.0} | {} | {:.1} | {} | {:.0}, {gpus} | {} | {} % | {} |\n",
        program.name(),
        of(|round| round.rate, 1),
        of(|round| quantile(&round.waits, 0.5), 0),
        quantile(&waits, 0.99),
        each(rounds, |round| &round.cpu, 1),
        median(rounds.iter().map(|round| round.api)),
        each(rounds, |round| &round.memory, 0),
        median(rounds.iter().map(|round| round.burst.nodes as f64)),
        wrong(|round| &round.burst),
        spread(filled, 1),
        wrong(|round| &round.filled),
    )
}

/// The median of each process.
fn each(
    rounds: &[Round],
    figures: fn(&Round) -> &Vec<(&'static str, f64)>,
    digits: usize,
) -> String {
    let names = rounds.first().map(figures).into_iter().flatten();
    let of = |(at, (name, _)): (usize, &(&'static str, f64))| {
        let values = rounds
            .iter()
            .filter_map(|round| Some(figures(round).get(at)?.1));
        format!("{name} {:.digits$}", median(values))
    };
    names.enumerate().map(of).collect::<Vec<_>>().join(", ")
}
