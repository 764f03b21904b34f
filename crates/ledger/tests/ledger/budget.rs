//! The search budget of one call, and the result for a pod whose call has spent it.

use gpustow_api::PodFacts;
use gpustow_ledger::{Config, Ledger, Reason};

use crate::build::{ask, asking, at, card, node, report};
use crate::model::Random;

const NODES: u64 = 12;

fn name(index: u64) -> String {
    format!("n{index:02}")
}

fn apply(ledger: &mut Ledger, index: u64, sizes: &[u64]) {
    let name = name(index);
    let card = |(number, &size): (usize, &u64)| card(&format!("{name}-{number}"), size);
    let cards: Vec<_> = sizes.iter().enumerate().map(card).collect();
    ledger.apply_gpunode(&name, report(&cards), at(0));
}

/// A ledger whose calls stop after the first node that takes a search.
fn sparing() -> Ledger {
    let mut ledger = Ledger::new(Config {
        search_steps: 1,
        ..Config::default()
    });
    for index in 0..NODES {
        ledger.apply_node(node(&name(index)));
    }
    ledger
}

/// Two or three containers on one or two cards each.
fn wish(random: &mut Random) -> PodFacts {
    let claims: Vec<_> = (0..2 + random.below(2))
        .map(|_| (1 + u32::from(random.below(3) == 0), 3 + random.below(6)))
        .collect();
    asking("p", &claims)
}

fn sizes(random: &mut Random) -> Vec<u64> {
    (0..1 + random.below(3))
        .map(|_| 4 + random.below(12))
        .collect()
}

/// The definition: the pod fits where a look at that node alone accepts it. Meanwhile other nodes change, so that there
/// is always something new to look at.
#[test]
fn a_pod_that_fits_is_placed_within_as_many_calls_as_there_are_nodes() {
    let (mut placed, mut late) = (0, 0);
    for seed in 0..400 {
        let random = &mut Random::new(seed);
        let mut ledger = sparing();
        (0..NODES).for_each(|index| apply(&mut ledger, index, &sizes(random)));
        let p = wish(random);
        ledger.apply_pod(p.clone());
        let names: Vec<String> = (0..NODES).map(name).collect();
        let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
        let fits = |ledger: &Ledger, index| ledger.explain(&p, &name(index), at(0)).is_ok();
        let fitting: Vec<u64> = (0..NODES).filter(|&index| fits(&ledger, index)).collect();
        let mut calls = 0;
        loop {
            calls += 1;
            names.rotate_left(random.below(NODES) as usize);
            let verdict = ledger.filter(&ask(&p), &names, at(0));
            if let [chosen] = verdict.nodes[..] {
                assert!(ledger.begin_bind(&p, chosen, at(0)).is_ok());
                placed += 1;
                late += u32::from(calls > 1);
                break;
            }
            let not_yet = verdict
                .refused
                .iter()
                .any(|&(_, why)| why == Reason::NotYet);
            if !not_yet {
                assert!(
                    fitting.is_empty(),
                    "seed {seed}: {fitting:?} after {calls} calls"
                );
                break;
            }
            assert_eq!(verdict.refused.len(), names.len());
            assert!(calls < NODES, "seed {seed}: not placed in {calls} calls");
            let woken = ledger.wake(1, at(0));
            assert_eq!(woken.first().map(|pod| &*pod.uid), Some("p"), "seed {seed}");
            // Where the pod does not fit, something changes.
            for index in (0..NODES).filter(|index| !fitting.contains(index)) {
                apply(&mut ledger, index, &[1 + random.below(3)]);
            }
        }
    }
    assert!(
        placed > 100 && late > 50,
        "{placed} placed, {late} of them late"
    );
}

#[test]
fn a_call_that_stops_answers_with_the_best_it_has_found() {
    let mut ledger = sparing();
    (0..NODES).for_each(|index| apply(&mut ledger, index, &[100 + index, 50]));
    let names: Vec<String> = (0..NODES).map(name).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let p = asking("p", &[(1, 10), (1, 20)]);
    let verdict = ledger.filter(&ask(&p), &names, at(0));
    assert_eq!((verdict.nodes.len(), verdict.refused), (1, Vec::new()));
    // Pods of one card each are no search: every node is looked at.
    let single = asking("single", &[(1, 100)]);
    assert_eq!(ledger.filter(&ask(&single), &names, at(0)).nodes, ["n00"]);
}
