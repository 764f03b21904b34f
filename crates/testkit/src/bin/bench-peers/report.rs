//! The table of the results.

use std::collections::BTreeMap;

use gpustow_testkit::{median, quantile, sorted, spread};

use crate::program::{Books, Program};
use crate::{Args, CARDS};

/// The number of violations of each kind that the report shows.
const SHOWN: usize = 3;

/// One turn's figures.
pub(crate) struct Round {
    /// Pods per second of the burst.
    pub(crate) rate: f64,
    /// Milliseconds from creation to bound in the steady part, ascending.
    pub(crate) waits: Vec<f64>,
    /// CPU ms of each process per pod of the burst.
    pub(crate) cpu: Vec<(&'static str, f64)>,
    /// CPU ms of API server and etcd per pod of the burst.
    pub(crate) api: f64,
    /// The most MiB of each process.
    pub(crate) memory: Vec<(&'static str, f64)>,
    /// How long kube-scheduler's calls of the extender took, if there is one.
    pub(crate) calls: Option<String>,
    pub(crate) burst: Books,
    /// Of the nodes that were filled during restarts.
    pub(crate) filled: Books,
    /// Of these nodes after a part of their pods ended.
    pub(crate) refilled: Option<Books>,
}

impl Round {
    fn phases(&self) -> impl Iterator<Item = (&'static str, &Books)> {
        let phases = [("burst", &self.burst), ("filled", &self.filled)];
        let refilled = self.refilled.iter().map(|it| ("refilled", it));
        phases.into_iter().chain(refilled)
    }
}

/// The tables for docs/benchmarks.md, and the failures.
pub(crate) fn report(
    nodes: usize,
    args: &Args,
    results: &BTreeMap<Program, Vec<Round>>,
    failures: &BTreeMap<Program, String>,
) -> String {
    let (gpus, rounds) = (CARDS.len(), args.rounds);
    let Args {
        pods,
        paced,
        filled,
        ended,
        ..
    } = args;
    let mut text = format!(
        "{nodes} nodes × {gpus} GPUs, a burst of {pods} pods, {paced} paced, {filled} more nodes filled during three restarts, then {ended} % of \
         their pods ended; median (least..most) of {rounds} rounds\n\n\
         | program | pods/s | created → bound p50 / p99, ms | CPU ms a pod | of API server and etcd | memory, MiB |\n\
         |---|---|---|---|---|---|\n",
    );
    let mut packing = format!(
        "\n| program | nodes | used | GPUs used | filled, % | over-committed | without a GPU | unbound | unbound of {gpus} GPUs |\n\
         |---|---|---|---|---|---|---|---|---|\n",
    );
    for program in Program::chosen(&args.only) {
        if let Some(rounds) = results.get(&program) {
            text += &speed(program, rounds);
            for (phase, of) in [("burst", nodes), ("filled", *filled), ("refilled", *filled)] {
                let books = rounds.iter().flat_map(Round::phases);
                let books = books.filter(|(of, _)| *of == phase);
                let books: Vec<&Books> = books.map(|(_, books)| books).collect();
                if !books.is_empty() {
                    let name = program.name();
                    packing += &format!("| {name}, {phase} | {of} | {}", packed(of, &books));
                }
            }
        }
        if let Some(problem) = failures.get(&program) {
            let first = problem.lines().next().unwrap_or_default();
            text += &format!("| {} | {first} |\n", program.name());
        }
    }
    text += &packing;
    for (program, round) in results
        .iter()
        .flat_map(|(program, rounds)| rounds.iter().map(move |it| (program, it)))
    {
        let name = program.name();
        if let Some(calls) = &round.calls {
            text += &format!("\n{name}: calls of its extender, p50 / p99, ms at most: {calls}");
        }
        for (_, books) in round.phases() {
            let wrong = [&books.over, &books.without];
            let shown = wrong.into_iter().flat_map(|it| it.iter().take(SHOWN));
            text.extend(shown.map(|it| format!("\n{name}: {it}")));
        }
    }
    for (program, problem) in failures {
        text += &format!("\n{}: {problem}\n", program.name());
    }
    text
}

fn speed(program: Program, rounds: &[Round]) -> String {
    let of = |value: fn(&Round) -> f64, digits| spread(rounds.iter().map(value), digits);
    let waits = sorted(rounds.iter().flat_map(|round| round.waits.iter().copied()));
    format!(
        "| {} | {} | {} / {:.0} | {} | {:.1} | {} |\n",
        program.name(),
        of(|round| round.rate, 1),
        of(|round| quantile(&round.waits, 0.5), 0),
        quantile(&waits, 0.99),
        each(rounds, |round| &round.cpu, 1),
        median(rounds.iter().map(|round| round.api)),
        each(rounds, |round| &round.memory, 0),
    )
}

/// How so many nodes are packed in each round. Over-commits are counted, not averaged away.
fn packed(nodes: usize, rounds: &[&Books]) -> String {
    let of = |value: fn(&Books) -> f64, digits| spread(rounds.iter().map(|it| value(it)), digits);
    let sum = |value: fn(&Books) -> usize| -> usize { rounds.iter().map(|it| value(it)).sum() };
    let all = nodes as f64 * CARDS.iter().sum::<u64>() as f64 / 100.0;
    format!(
        "{} | {} | {} | {} | {} | {} | {} of {} |\n",
        of(|it| it.nodes as f64, 0),
        of(|it| it.gpus as f64, 0),
        spread(rounds.iter().map(|it| it.mib as f64 / all), 1),
        sum(|it| it.over.len()),
        sum(|it| it.without.len()),
        of(|it| it.unbound as f64, 0),
        sum(|it| it.of_node.1),
        sum(|it| it.of_node.0),
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
