//! The cache of filter between calls is invisible: filter chooses as a look at every node would.

use std::time::Duration;

use gpustow_api::gpunode::Gpu;
use gpustow_api::{NodeFacts, PodFacts};
use gpustow_ledger::{Ledger, Outcome};
use gpustow_pack::Bytes;

use crate::build::{
    ask, asking, at, card, computing, exclusive, isolated, ledger, limited, makes_instances, mps,
    node, report,
};
use crate::model::Random;

const NODES: u64 = 20;
const STEPS: u64 = 150;
const CLUSTERS: u64 = 200;

fn name(index: u64) -> String {
    format!("n{index:02}")
}

/// One of a few dozen requests, some of pods that are bound to a model.
fn wish(random: &mut Random, uid: &str) -> PodFacts {
    let size = [10, 20, 30, 50, 90, 100][random.below(6) as usize];
    let mut pod = match random.below(4) {
        0 => asking(uid, &[(2, size)]),
        1 => asking(uid, &[(1, size), (1, 10)]),
        _ => asking(uid, &[(1, size)]),
    };
    pod.asks.change(|request| {
        request.cpu_milli = 1000 * random.below(3);
        request.ram = Bytes((1 << 30) + random.below(2));
    });
    if random.below(5) == 0 {
        pod.models = [["A", "B"][random.below(2) as usize].into()].into();
    }
    match random.below(7) {
        0 => exclusive(pod),
        6 if pod.containers.len() == 1
            && pod.asks.request().is_none_or(|it| it.claims[0].gpus <= 1) =>
        {
            isolated(pod)
        }
        1 | 2 => limited(pod),
        3 => computing(pod, [30, 60][random.below(2) as usize]),
        _ => pod,
    }
}

fn cards(random: &mut Random, node: &str) -> Vec<Gpu> {
    let count = random.below(5);
    let share = |random: &mut Random, gpu| match random.below(4) {
        0 => mps(gpu),
        1 => makes_instances(gpu, &[]),
        _ => gpu,
    };
    let gpu = |index| Gpu {
        model: ["A", "B"][random.below(2) as usize].into(),
        healthy: random.below(12) > 0,
        memory_limit: [None, Some("Driver".into()), Some("Holds".into())][random.below(3) as usize]
            .clone(),
        unmanaged_mib: [0, 0, 0, 15][random.below(4) as usize],
        ..card(
            &format!("{node}-{index}"),
            [80, 100][random.below(2) as usize],
        )
    };
    let gpus: Vec<Gpu> = (0..count).map(gpu).collect();
    gpus.into_iter().map(|gpu| share(random, gpu)).collect()
}

/// Asks for a pod that is forgotten again, and looks at every node for the same pod.
fn compare(ledger: &mut Ledger, random: &mut Random, now: Duration) {
    let mut names: Vec<String> = (0..NODES).map(name).collect();
    names.rotate_left(random.below(NODES) as usize);
    names.truncate(1 + random.below(NODES) as usize);
    if random.below(2) == 0 {
        let (a, b) = (random.below(64) as usize, random.below(64) as usize);
        let len = names.len();
        names.swap(a % len, b % len);
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let probe = wish(random, &format!("probe-{}", ledger.copies()));
    let verdict = ledger.filter(&ask(&probe), &names, now);
    ledger.delete_pod(&probe.uid);
    let looked = names
        .iter()
        .map(|name| (*name, ledger.explain(&probe, name, now)));
    let (fit, refused): (Vec<_>, Vec<_>) = looked.partition(|(_, answer)| answer.is_ok());
    let best = fit
        .into_iter()
        .filter_map(|(name, answer)| Some((answer.ok()?.cost, name)))
        .min();
    assert_eq!(verdict.nodes.first(), best.map(|(_, name)| name).as_ref());
    let mut refused: Vec<_> = refused
        .into_iter()
        .filter_map(|(name, answer)| Some((name, answer.err()?)))
        .collect();
    let mut told = verdict.refused;
    refused.sort_unstable();
    told.sort_unstable();
    assert_eq!(told, refused);
}

fn history(seed: u64) {
    let random = &mut Random::new(seed);
    let mut ledger = ledger(&[]);
    for index in 0..NODES {
        // Nodes of one make differ by a few bytes.
        ledger.apply_node(NodeFacts {
            ram: Bytes((16 << 30) + random.below(2)),
            ..node(&name(index))
        });
        let cards = cards(random, &name(index));
        ledger.apply_gpunode(&name(index), report(&cards), at(0));
    }
    let mut pods: Vec<PodFacts> = Vec::new();
    for step in 0..STEPS {
        let now = at(step / 10);
        let on = name(random.below(NODES));
        match random.below(10) {
            0..6 => {
                let pod = wish(random, &format!("p{step}"));
                ledger.apply_pod(pod.clone());
                let names: Vec<String> = (0..NODES).map(name).collect();
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                let chosen = ledger.filter(&ask(&pod), &names, now).nodes;
                if let Some(node) = chosen.first()
                    && ledger.begin_bind(&pod, node, now).is_ok()
                {
                    ledger.end_bind(&pod, Outcome::Bound, now);
                    pods.push(pod);
                }
            }
            6 | 7 if !pods.is_empty() => {
                let gone = pods.swap_remove(random.below(pods.len() as u64) as usize);
                ledger.delete_pod(&gone.uid);
            }
            8 => {
                let cards = cards(random, &on);
                ledger.apply_gpunode(&on, report(&cards), now);
            }
            9 if random.below(4) == 0 => ledger.delete_gpunode(&on),
            9 if random.below(4) == 0 => ledger.learn(),
            9 => drop(ledger.warm(random.below(100) as usize)),
            _ => {}
        }
        compare(&mut ledger, random, now);
    }
}

#[test]
fn what_filter_remembers_equals_a_full_rescan() {
    (0..CLUSTERS).for_each(history);
}
