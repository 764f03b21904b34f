//! The tables of the results.

use std::collections::HashMap;

use gpustow_testkit::{median, quantile, sorted, spread};

use crate::{Args, CARDS, Round, Way};

/// Prints the tables.
pub(crate) fn report(nodes: usize, args: &Args, results: &HashMap<Way, Vec<Round>>) {
    println!(
        "\n{nodes} nodes × {} GPUs, {} pods, {} rounds in turn; median (min..max) of rounds",
        CARDS.len(),
        args.pods,
        args.rounds
    );
    let ways = Way::all(args);
    let ways = ways
        .iter()
        .filter_map(|way| Some((way.name(), results.get(way)?)));
    println!(
        "{:34} {:>22} {:>18} {:>18} {:>7} {:>9} {:>6} {:>10}",
        "", "pods/s", "ratio", "bound after ms", "p99", "conflicts", "nodes", "allocated"
    );
    let base = || {
        ways.clone()
            .next()
            .into_iter()
            .flat_map(|(_, rounds)| rounds)
    };
    for (name, rounds) in ways.clone() {
        let of = |value: fn(&Round) -> f64| spread(rounds.iter().map(value), 0);
        let rates = spread(rounds.iter().map(|round| round.rate), 1);
        let ratios = rounds.iter().zip(base()).map(|(a, b)| a.rate / b.rate);
        let ratios = spread(ratios, 2);
        let p50 = of(|round| quantile(&round.waits, 0.5));
        let waits = sorted(rounds.iter().flat_map(|round| round.waits.iter().copied()));
        println!(
            "{name:34} {rates:>22} {ratios:>18} {p50:>18} {:>7.0} {:>9.0} {:>6.0} {:>8.0} %",
            quantile(&waits, 0.99),
            rounds.iter().map(|round| round.conflicts).sum::<f64>(),
            median(rounds.iter().map(|round| round.nodes)),
            median(rounds.iter().map(|round| round.allocated)),
        );
    }
    println!(
        "{:34} {:>12} {:>12} {:>12} {:>12} {:>12} {:>12}",
        "CPU ms per pod and calls",
        "scheduler",
        "API + etcd",
        "extender",
        "filters/pod",
        "filter ms",
        "bind ms"
    );
    for (name, rounds) in ways {
        let of = |value: fn(&Round) -> f64| median(rounds.iter().map(value));
        println!(
            "{name:34} {:>12.1} {:>12.1} {:>12.1} {:>12.1} {:>12.1} {:>12.1}",
            of(|round| round.cpu[0]),
            of(|round| round.cpu[1]),
            of(|round| round.cpu[2]),
            of(|round| round.calls),
            of(|round| round.verbs[0]),
            of(|round| round.verbs[1]),
        );
    }
    if !args.percentage.is_empty() {
        println!("\n{}", percentages(nodes, args, results));
    }
}

/// The table of docs/benchmarks.md.
fn percentages(nodes: usize, args: &Args, results: &HashMap<Way, Vec<Round>>) -> String {
    let mut text = format!(
        "| {nodes} nodes | nodes used | pods/s | ÷ alone | created → bound p50 / p99 | CPU ms a pod: kube-scheduler, \
         API server and etcd, extender |\n|---|---|---|---|---|---|\n"
    );
    let of = |way| results.get(way).map_or(&[][..], Vec::as_slice);
    for way in &Way::all(args) {
        let rounds = of(way);
        let base = of(&Way::Alone).iter();
        let ratios = rounds.iter().zip(base).map(|(a, b)| a.rate / b.rate);
        let waits = sorted(rounds.iter().flat_map(|round| round.waits.iter().copied()));
        let cpu = |of: usize| median(rounds.iter().map(|round| round.cpu[of]));
        text += &format!(
            "| {} | {:.0} | {} | {} | {:.0} / {:.0} ms | {:.1}, {:.1}, {:.1} |\n",
            way.name(),
            median(rounds.iter().map(|round| round.nodes)),
            spread(rounds.iter().map(|round| round.rate), 1),
            spread(ratios, 2),
            quantile(&waits, 0.5),
            quantile(&waits, 0.99),
            cpu(0),
            cpu(1),
            cpu(2),
        );
    }
    text
}
