//! Gangs whose pods state which GPUs they may get, and with which pods they share one.

use std::collections::BTreeSet;
use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_ledger::{Ask, Config, Ledger};
use gpustow_pack::{PolicyKind, Rules};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};

use crate::build::{asking, assumed, at, joins};
use crate::pod_groups::gang;
use crate::rules::with;

const NAMES: [&str; 2] = ["n0", "n1"];

/// A pod: GPUs, MiB on each, rules.
type Wish = (u32, u64, Rules);
/// Where it is: the node, and a bit for each GPU.
type Spot = (usize, u32);

fn rules(kind: u32) -> Rules {
    let group = |name: &str| Some(Arc::from(name));
    let mut rules = Rules::default();
    match kind {
        0 | 1 => rules.affinity = group("x"),
        2 => rules.affinity = group("y"),
        3 | 4 => rules.anti_affinity = group("x"),
        5 => (rules.affinity, rules.anti_affinity) = (group("x"), group("z")),
        6 => rules.uuids = vec!["n0-1".into(), "n1-0".into()],
        7 => rules.not_uuids = vec!["n0-0".into()],
        _ => {}
    }
    rules
}

fn selects(rules: &Rules, node: usize, index: usize) -> bool {
    let uuid = format!("n{node}-{index}");
    let is_in = |list: &[Box<str>]| list.iter().any(|it| **it == *uuid);
    (rules.uuids.is_empty() || is_in(&rules.uuids)) && !is_in(&rules.not_uuids)
}

/// Do the pods share the GPUs that they must share, and no others that they must not?
fn is_kept(wishes: &[Wish], spots: &[Spot]) -> bool {
    let of = |group: fn(&Rules) -> &Option<Arc<str>>, name: &str| -> Vec<Spot> {
        let all = wishes.iter().zip(spots);
        let its = all.filter(|((.., rules), _)| group(rules).as_deref() == Some(name));
        its.map(|(_, spot)| *spot).collect()
    };
    let together = ["x", "y"].iter().all(|name| {
        let spots = of(|rules| &rules.affinity, name);
        let nodes: BTreeSet<usize> = spots.iter().map(|(node, _)| *node).collect();
        let all = spots.iter().fold(0, |all, (_, set)| all | set);
        nodes.len() <= 1 && (spots.is_empty() || spots.iter().any(|(_, set)| *set == all))
    });
    let apart = ["x", "z"].iter().all(|name| {
        let spots = of(|rules| &rules.anti_affinity, name);
        let pairs = spots.iter().enumerate().flat_map(|(at, one)| {
            let after = spots[at + 1..].iter();
            after.map(move |other| (one, other))
        });
        pairs
            .into_iter()
            .all(|(one, other)| one.0 != other.0 || one.1 & other.1 == 0)
    });
    together && apart
}

/// Is there a way to place all of these? Every way is tried.
fn can(free: &mut [Vec<u64>], wishes: &[Wish], spots: &mut Vec<Spot>) -> bool {
    let Some((gpus, mib, rules)) = wishes.get(spots.len()) else {
        return is_kept(wishes, spots);
    };
    for node in 0..free.len() {
        for set in 0..1_u32 << free[node].len() {
            let cards = (0..free[node].len()).filter(|card| set >> card & 1 == 1);
            let cards: Vec<usize> = cards.collect();
            let fits = |card: &usize| free[node][*card] >= *mib && selects(rules, node, *card);
            if set.count_ones() != *gpus || !cards.iter().all(fits) {
                continue;
            }
            cards.iter().for_each(|&card| free[node][card] -= mib);
            spots.push((node, set));
            let found = can(free, wishes, spots);
            spots.pop();
            cards.iter().for_each(|&card| free[node][card] += mib);
            if found {
                return true;
            }
        }
    }
    false
}

/// In whatever order kube-scheduler asks, a gang whose pods have rules is placed if any way of placing it keeps them.
/// The placement keeps them, too.
#[test]
fn gang_with_rules_is_placed_where_an_exhaustive_search_places_it() {
    let (mut placed, mut refused) = (0, 0);
    for seed in 0..2000 {
        let mut random = SmallRng::seed_from_u64(seed);
        let nodes: Vec<Vec<u64>> = (0..random.random_range(1..=2))
            .map(|_| {
                let cards = random.random_range(1..=3);
                (0..cards).map(|_| random.random_range(1..=6)).collect()
            })
            .collect();
        let wishes: Vec<Wish> = (0..random.random_range(2..=4))
            .map(|_| {
                let gpus = 1 + u32::from(random.random_bool(0.3));
                (
                    gpus,
                    random.random_range(1..=3),
                    rules(random.random_range(0..10)),
                )
            })
            .collect();
        let policy = PolicyKind::ALL[usize::try_from(seed).unwrap() % PolicyKind::ALL.len()];
        let mut ledger = Ledger::new(Config {
            policy,
            ..Config::default()
        });
        for (name, cards) in NAMES.iter().zip(&nodes) {
            joins(&mut ledger, name, cards);
        }
        let members = wishes
            .iter()
            .enumerate()
            .map(|(index, (gpus, mib, rules))| {
                let pod = asking(&format!("g{index}"), &[(*gpus, *mib)]);
                match rules.is_empty() {
                    true => pod,
                    false => with(pod, rules.clone()),
                }
            });
        let members = gang(&mut ledger, "g", wishes.len(), members.collect());
        let fits = can(&mut nodes.clone(), &wishes, &mut Vec::new());
        let mut order: Vec<usize> = (0..members.len()).collect();
        order.shuffle(&mut random);
        let offered = &NAMES[..nodes.len()];
        let what = format!("{seed}: {nodes:?} {wishes:?} {order:?}");
        let mut answers = vec![Vec::new(); members.len()];
        for &index in &order {
            let answer = ledger.filter(&Ask::of(&members[index]), offered, at(0));
            assert_eq!(answer.nodes.len(), usize::from(fits), "{what}: {answer:?}");
            answers[index] = answer.nodes;
        }
        placed += usize::from(fits);
        refused += usize::from(!fits);
        if !fits {
            assert_eq!(assumed(&ledger), (0, 0), "{what}");
            continue;
        }
        let spots: Vec<Spot> = members
            .iter()
            .zip(&answers)
            .map(|(member, nodes)| spot(&mut ledger, member, nodes[0]).unwrap())
            .collect();
        assert!(is_kept(&wishes, &spots), "{what}: {spots:?}");
    }
    assert!(placed > 300 && refused > 300, "{placed} {refused}");
}

/// Where a pod is bound.
fn spot(ledger: &mut Ledger, pod: &PodFacts, name: &str) -> Option<Spot> {
    let begun = ledger.begin_bind(pod, name, at(0)).ok()?;
    let mut set = 0;
    for (uuid, _) in &begun.charges {
        let index: u32 = uuid.rsplit_once('-')?.1.parse().ok()?;
        set |= 1 << index;
    }
    Some((NAMES.iter().position(|it| *it == name)?, set))
}
