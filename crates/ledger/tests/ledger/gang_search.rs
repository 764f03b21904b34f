//! Whether a gang fits, compared with a search that tries every way.

use gpustow_ledger::{Ask, Config, Ledger};
use gpustow_pack::PolicyKind;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::build::{asking, assumed, at, joins};
use crate::pod_groups::gang;

/// Can so many of these be placed at the same time? Every way is tried.
fn most(free: &mut Vec<Vec<u64>>, pods: &[(u32, u64)]) -> usize {
    let Some((&(gpus, mib), rest)) = pods.split_first() else {
        return 0;
    };
    let mut best = most(free, rest);
    for node in 0..free.len() {
        for set in 0..1_u32 << free[node].len() {
            let cards: Vec<usize> = (0..free[node].len())
                .filter(|card| set >> card & 1 == 1)
                .collect();
            let fits = cards.iter().all(|&card| free[node][card] >= mib);
            if set.count_ones() == gpus && fits {
                cards.iter().for_each(|&card| free[node][card] -= mib);
                best = best.max(1 + most(free, rest));
                cards.iter().for_each(|&card| free[node][card] += mib);
            }
        }
    }
    best
}

/// In whatever order kube-scheduler asks, a gang is placed if any way of placing it exists, and not begun otherwise.
#[test]
fn gang_is_placed_where_an_exhaustive_search_places_it() {
    let (mut placed, mut refused) = (0, 0);
    for seed in 0..2000 {
        let mut random = SmallRng::seed_from_u64(seed);
        let mut some = |most: usize, up_to: u64| -> Vec<u64> {
            let count = random.random_range(1..=most);
            (0..count).map(|_| random.random_range(1..=up_to)).collect()
        };
        let nodes: Vec<Vec<u64>> = some(3, 1).iter().map(|_| some(3, 6)).collect();
        let sizes = some(4, 4);
        let pods: Vec<(u32, u64)> = sizes
            .into_iter()
            .map(|mib| (1 + u32::from(some(1, 3)[0] == 3), mib))
            .collect();
        let names = ["n0", "n1", "n2"];
        let mut ledger = Ledger::new(Config {
            policy: match seed % 2 {
                0 => PolicyKind::Binpack,
                _ => PolicyKind::Tight,
            },
            ..Config::default()
        });
        for (name, cards) in names.iter().zip(&nodes) {
            joins(&mut ledger, name, cards);
        }
        let count = pods.len();
        let members = pods.iter().enumerate();
        let members = members.map(|(index, claim)| asking(&format!("g{index}"), &[*claim]));
        let members = gang(&mut ledger, "g", count, members.collect());
        let fit = most(&mut nodes.clone(), &pods);
        for member in &members {
            let answer = ledger.filter(&Ask::of(member), &names[..nodes.len()], at(0));
            if fit == count {
                assert_eq!(
                    answer.nodes.len(),
                    1,
                    "{seed}: {nodes:?} {pods:?} {answer:?}"
                );
                continue;
            }
            let shortfall = answer.shortfall.map(|it| (it.fit, it.of));
            assert_eq!(shortfall, Some((fit, count)), "{seed}: {nodes:?} {pods:?}");
            assert_eq!(assumed(&ledger), (0, 0));
        }
        placed += usize::from(fit == count);
        refused += usize::from(fit < count);
    }
    assert!(placed > 300 && refused > 300, "{placed} {refused}");
}
