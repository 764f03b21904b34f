//! The table of the results.

use std::collections::HashMap;

use gpustow_testkit::{median, quantile, sorted, spread};

use crate::{Args, CARDS, Round, Way};

/// Prints the table, of which docs/benchmarks.md has columns.
pub(crate) fn report(nodes: usize, args: &Args, results: &HashMap<Way, Vec<Round>>) {
    println!(
        "\n{nodes} nodes × {} GPUs, {} pods, {} rounds in turn; median (least..most) of rounds\n\n\
         | | pods/s | ÷ first | created → bound p50 / p99, ms | nodes used, allocated | conflicts | CPU ms a pod: kube-scheduler, \
         API server and etcd, extender | /filter a pod, its ms, /bind's ms |\n|---|---|---|---|---|---|---|---|",
        CARDS.len(),
        args.pods,
        args.rounds
    );
    let of = |way: &Way| results.get(way).map_or(&[][..], Vec::as_slice);
    let ways = Way::all(args);
    let base = ways.first().map_or(&[][..], of);
    for way in &ways {
        let rounds = of(way);
        let middle = |value: fn(&Round) -> f64| median(rounds.iter().map(value));
        let ratios = rounds.iter().zip(base).map(|(a, b)| a.rate / b.rate);
        let halves = rounds.iter().map(|round| quantile(&round.waits, 0.5));
        let waits = sorted(rounds.iter().flat_map(|round| round.waits.iter().copied()));
        println!(
            "| {} | {} | {} | {} / {:.0} | {:.0}, {:.0} % | {:.0} | {:.1}, {:.1}, {:.1} | {:.1}, {:.1}, {:.1} |",
            way.name(),
            spread(rounds.iter().map(|round| round.rate), 1),
            spread(ratios, 2),
            spread(halves, 0),
            quantile(&waits, 0.99),
            middle(|round| round.nodes),
            middle(|round| round.allocated),
            rounds.iter().map(|round| round.conflicts).sum::<f64>(),
            middle(|round| round.cpu[0]),
            middle(|round| round.cpu[1]),
            middle(|round| round.cpu[2]),
            middle(|round| round.calls),
            middle(|round| round.verbs[0]),
            middle(|round| round.verbs[1]),
        );
    }
}
