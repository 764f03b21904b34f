//! Which pods would move for one that waits for pieces.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_ledger::{Config, Ledger, Moves};
use gpustow_pack::Mib;

use crate::build::{asking, at, bound, exclusive, joins, ledger, node, pod};
use crate::model::Random;

/// A bound pod that may be moved.
fn evictable(uid: &str, card: &str, mib: u64) -> PodFacts {
    let node = card.split('-').next().unwrap_or_default();
    PodFacts {
        evictable: Some("its-replicaset".into()),
        ..bound(uid, node, card, mib)
    }
}

fn plan(ledger: &Ledger, pod: PodFacts) -> Option<Moves> {
    ledger.moves_for(&Arc::new(pod), at(0))
}

/// Who moves, and onto which card.
fn said(plan: Option<Moves>) -> Vec<String> {
    let moves = plan.into_iter().flat_map(|plan| plan.moves);
    let said = moves.map(|it| format!("{} to {}", it.pod.uid, it.cards[0].0));
    said.collect()
}

/// Two cards of 100 MiB with 60 free on each, on two nodes: 80 fit on none.
fn fragmented() -> Ledger {
    let mut ledger = ledger(&[("a", &[100]), ("b", &[100])]);
    ledger.apply_pod(evictable("x", "a-0", 40));
    ledger.apply_pod(evictable("y", "b-0", 30));
    ledger.apply_pod(bound("z", "b", "b-0", 10));
    ledger
}

#[test]
fn the_fewest_mib_move_to_where_there_is_room_now() {
    let found = plan(&fragmented(), pod("p", 80)).unwrap();
    assert_eq!((&*found.node, found.mib()), ("b", Mib(30)));
    assert_eq!(found.cards, [("b-0".into(), Mib(80))]);
    assert_eq!(said(Some(found)), ["y to a-0"]);
}

#[test]
fn a_pod_of_several_gpus_and_one_of_whole_ones_get_room_too() {
    let mut two = ledger(&[("a", &[100, 100, 100]), ("b", &[30])]);
    two.apply_pod(evictable("x", "a-0", 30));
    two.apply_pod(evictable("y", "a-1", 20));
    two.apply_pod(bound("z", "a", "a-2", 15));
    // a-2 has 85 free, and of the others y is on the card that lacks least.
    assert_eq!(said(plan(&two, asking("p", &[(2, 85)]))), ["y to b-0"]);
    two.apply_pod(bound("z2", "a", "a-1", 60));
    two.apply_pod(bound("z", "a", "a-2", 80));
    let whole = exclusive(pod("p", 100));
    assert_eq!(said(plan(&two, whole)), ["x to b-0"]);
}

#[test]
fn no_pod_moves_that_may_not_or_need_not() {
    let unmarked = |pod: PodFacts| PodFacts {
        evictable: None,
        ..pod
    };
    let mut ledger = fragmented();
    ledger.apply_pod(unmarked(evictable("y", "b-0", 30)));
    assert_eq!(said(plan(&ledger, pod("p", 80))), ["x to b-0"]);
    ledger.apply_pod(unmarked(evictable("x", "a-0", 40)));
    assert_eq!(said(plan(&ledger, pod("p", 80))), Vec::<String>::new());
    assert!(ledger.waits_for_fragmented(&Arc::new(pod("p", 80)), at(0)));

    // The pod fits, or it is larger than the free memory, or larger than any card.
    for mib in [60, 121, 101] {
        let pod = pod("p", mib);
        assert!(plan(&fragmented(), pod.clone()).is_none(), "{mib}");
        let waits = fragmented().waits_for_fragmented(&Arc::new(pod), at(0));
        assert!(!waits, "{mib}");
    }
    // A pod of higher priority stays, a pod that leaves makes room, and so does preemption.
    let mut ledger = fragmented();
    for (uid, card, mib) in [("x", "a-0", 40), ("y", "b-0", 30)] {
        let priority = 5;
        ledger.apply_pod(PodFacts {
            priority,
            ..evictable(uid, card, mib)
        });
    }
    assert!(plan(&ledger, pod("p", 80)).is_none());
    let mut ledger = fragmented();
    let deleting = true;
    ledger.apply_pod(PodFacts {
        deleting,
        ..evictable("x", "a-0", 40)
    });
    assert!(plan(&ledger, pod("p", 80)).is_none());
    let important = PodFacts {
        priority: 5,
        ..pod("p", 80)
    };
    assert!(plan(&fragmented(), important.clone()).is_none());
    let never = PodFacts {
        preempts: false,
        ..important
    };
    assert_eq!(said(plan(&fragmented(), never)), ["y to a-0"]);
}

#[test]
fn a_place_has_host_memory_and_is_not_kept_for_others() {
    let mut ledger = fragmented();
    let small = gpustow_api::NodeFacts {
        pods: Some(1),
        ..node("a")
    };
    ledger.apply_node(small);
    assert_eq!(said(plan(&ledger, pod("p", 80))), Vec::<String>::new());
    let mut ledger = fragmented();
    let nominated = Some("a".into());
    ledger.apply_pod(PodFacts {
        nominated,
        ..pod("other", 60)
    });
    assert_eq!(said(plan(&ledger, pod("p", 80))), Vec::<String>::new());
}

#[test]
fn preempting_for_fragmented_memory_comes_before_moving() {
    let config = Config {
        preempt_fragmented: true,
        ..Config::default()
    };
    let mut ledger = Ledger::new(config);
    joins(&mut ledger, "a", &[100, 100]);
    ledger.apply_pod(evictable("x", "a-0", 40));
    ledger.apply_pod(evictable("y", "a-1", 40));
    assert_eq!(said(plan(&ledger, pod("p", 80))), ["x to a-1"]);
    assert!(
        plan(
            &ledger,
            PodFacts {
                priority: 1,
                ..pod("p", 80)
            }
        )
        .is_none()
    );
}

/// A small world: the free memory of each card by name, and the pods on each card.
struct World {
    cards: Vec<(String, u64)>,
    pods: Vec<(String, usize, u64, bool)>,
}

const SIZE: u64 = 12;

impl World {
    fn random(random: &mut Random) -> Self {
        let mut cards = Vec::new();
        for node in ["a", "b", "c"].iter().take(1 + random.below(3) as usize) {
            let count = 1 + random.below(3);
            cards.extend((0..count).map(|index| (format!("{node}-{index}"), SIZE)));
        }
        let mut pods = Vec::new();
        for number in 0..random.below(9) {
            let at = random.below(cards.len() as u64) as usize;
            let mib = 1 + random.below(7);
            if cards[at].1 >= mib {
                cards[at].1 -= mib;
                pods.push((format!("p{number}"), at, mib, random.below(4) > 0));
            }
        }
        Self { cards, pods }
    }

    fn node(&self, card: usize) -> &str {
        self.cards[card].0.split('-').next().unwrap_or_default()
    }

    fn ledger(&self) -> Ledger {
        let mut sizes: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
        for card in 0..self.cards.len() {
            sizes.entry(self.node(card)).or_default().push(SIZE);
        }
        let nodes: Vec<_> = sizes
            .iter()
            .map(|(name, sizes)| (*name, &sizes[..]))
            .collect();
        let mut ledger = ledger(&nodes);
        for (uid, card, mib, may) in &self.pods {
            let pod = evictable(uid, &self.cards[*card].0, *mib);
            let evictable = pod.evictable.clone().filter(|_| *may);
            ledger.apply_pod(PodFacts { evictable, ..pod });
        }
        ledger
    }

    /// The fewest MiB, by trying everything: every set of cards, every set of pods of that node, every place of each.
    fn least(&self, gpus: u32, mib: u64) -> Option<u64> {
        let mut least = None;
        for wanted in 0..1usize << self.cards.len() {
            let is_wanted = |card: usize| wanted >> card & 1 == 1;
            let of: Vec<_> = (0..self.cards.len())
                .filter(|&card| is_wanted(card))
                .collect();
            let same = of
                .windows(2)
                .all(|pair| self.node(pair[0]) == self.node(pair[1]));
            if of.len() != gpus as usize || !same {
                continue;
            }
            let here = |card: usize| self.node(card) == self.node(of[0]);
            let may: Vec<_> = self
                .pods
                .iter()
                .filter(|pod| pod.3 && here(pod.1))
                .collect();
            for set in 0..1usize << may.len() {
                let moving: Vec<_> = (0..may.len())
                    .filter(|at| set >> at & 1 == 1)
                    .map(|at| may[at])
                    .collect();
                let freed = |card: usize| {
                    moving
                        .iter()
                        .filter(|pod| pod.1 == card)
                        .map(|pod| pod.2)
                        .sum::<u64>()
                };
                let then = |card: usize| {
                    let asked = if is_wanted(card) { mib } else { 0 };
                    (self.cards[card].1 + freed(card)).checked_sub(asked)
                };
                let free: Option<Vec<u64>> = (0..self.cards.len())
                    .map(|card| Some(then(card)?.min(self.cards[card].1)))
                    .collect();
                let sum: u64 = moving.iter().map(|pod| pod.2).sum();
                let sizes: Vec<u64> = moving.iter().map(|pod| pod.2).collect();
                if free.is_some_and(|free| all_fit(&free, &sizes)) {
                    least = Some(least.map_or(sum, |least: u64| least.min(sum)));
                }
            }
        }
        least
    }
}

fn all_fit(free: &[u64], sizes: &[u64]) -> bool {
    let Some((&size, others)) = sizes.split_first() else {
        return true;
    };
    (0..free.len())
        .filter(|&card| free[card] >= size)
        .any(|card| {
            let mut less = free.to_vec();
            less[card] -= size;
            all_fit(&less, others)
        })
}

#[test]
fn no_plan_moves_less_than_the_ledgers_and_every_plan_holds() {
    let mut moved = 0;
    for seed in 0..3000 {
        let mut random = Random::new(seed);
        let world = World::random(&mut random);
        let (gpus, mib) = (1 + random.below(2) as u32, 3 + random.below(SIZE - 2));
        let found = plan(&world.ledger(), asking("p", &[(gpus, mib)]));
        let least = world.least(gpus, mib).filter(|least| *least > 0);
        let sum = found.as_ref().map(|found| found.mib().0);
        assert_eq!(sum, least, "seed {seed}: {gpus} x {mib}");
        let Some(found) = found else {
            continue;
        };
        moved += 1;
        // Every place is free before anybody leaves, and all of it fits when everybody is there.
        let free = |uuid: &str| world.cards.iter().find(|card| card.0 == uuid).unwrap().1;
        let sums = |cards: &mut dyn Iterator<Item = &(Arc<str>, Mib)>| {
            let mut sums: BTreeMap<Arc<str>, u64> = BTreeMap::new();
            cards.for_each(|(uuid, mib)| *sums.entry(uuid.clone()).or_default() += mib.0);
            sums
        };
        let places = sums(&mut found.moves.iter().flat_map(|it| &it.cards));
        let left = sums(&mut found.moves.iter().flat_map(|it| &it.from));
        let got = sums(&mut found.cards.iter());
        for (uuid, mib) in &places {
            assert!(*mib <= free(uuid), "seed {seed}: {uuid}");
        }
        for (uuid, _) in &world.cards {
            let of = |sums: &BTreeMap<Arc<str>, u64>| sums.get(&**uuid).copied().unwrap_or(0);
            assert!(
                of(&places) + of(&got) <= free(uuid) + of(&left),
                "seed {seed}: {uuid}"
            );
        }
    }
    assert!(moved > 200, "of 3000 worlds only {moved} had a plan");
}
