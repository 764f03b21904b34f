//! Who finishes for a gang of higher priority.

use std::collections::BTreeSet;

use gpustow_api::gpunode::Gpu;
use gpustow_api::intree::Label;
use gpustow_api::{Group, GroupPolicy, PodFacts, PodGroupFacts, names};
use gpustow_ledger::{Config, Ledger, Outcome, Reserved};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::act::Act as _;
use crate::build::{
    at, card, choose, configured, holder, joins, offer_all, placed_by, pod, protect, report,
    required, used,
};

pub(crate) fn ledger(nodes: &[(&str, &[u64])]) -> Ledger {
    let config = Config {
        preempt_fragmented: true,
        ..Config::default()
    };
    configured(config, nodes)
}

pub(crate) fn pod_group(name: &str, min_count: usize, singly: bool) -> PodGroupFacts {
    PodGroupFacts {
        group: Group::in_tree("default", name),
        uid: name.into(),
        policy: GroupPolicy::Gang(min_count),
        disrupted_singly: singly,
        part_of: None,
    }
}

pub(crate) fn in_group(name: &str, pod: PodFacts) -> PodFacts {
    PodFacts {
        group: Some(Group::in_tree("default", name)),
        ..pod
    }
}

/// A gang `g` of priority 10 that kube-scheduler could not place.
fn gang(ledger: &mut Ledger, min_count: usize, sizes: &[u64]) -> Vec<PodFacts> {
    ledger.apply_pod_group(pod_group("g", min_count, true));
    let pods = sizes.iter().enumerate().map(|(index, mib)| {
        let pod = PodFacts {
            priority: 10,
            waiting: true,
            ..pod(&format!("g{index}"), *mib)
        };
        in_group("g", pod)
    });
    let pods: Vec<PodFacts> = pods.collect();
    pods.iter().for_each(|pod| ledger.apply_pod(pod.clone()));
    pods
}

/// The pods that the ledger names at the third second, once it has decided. No two of the protected may finish.
fn decide(ledger: &mut Ledger, protected: &[&str], most: usize) -> BTreeSet<String> {
    offer_all(ledger, at(0));
    protect(ledger, protected, most);
    assert!(ledger.fragmented(at(0)).is_empty());
    ledger.fragmented(at(3));
    victims(ledger, 3)
}

pub(crate) fn preemptions(ledger: &Ledger, second: u64) -> Vec<Reserved> {
    ledger.preemptions(at(second))
}

fn victims(ledger: &Ledger, second: u64) -> BTreeSet<String> {
    let all = preemptions(ledger, second).into_iter();
    let victims = all.flat_map(|it| it.victims);
    victims.map(|pod| pod.uid.to_string()).collect()
}

pub(crate) fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// Two GPUs, each held by a pod of low priority, and a gang that wants both.
fn full() -> (Ledger, Vec<PodFacts>) {
    let mut ledger = ledger(&[("a", &[15_000, 15_000])]);
    ledger.apply_pod(holder("x", "a-0", 10_000, 1));
    ledger.apply_pod(holder("y", "a-1", 10_000, 1));
    let pods = gang(&mut ledger, 2, &[10_000, 10_000]);
    (ledger, pods)
}

#[test]
fn gang_that_is_a_part_of_a_whole_preempts_no_pod() {
    let (mut ledger, _) = full();
    for (part_of, victims) in [(Some("whole".into()), set(&[])), (None, set(&["x", "y"]))] {
        ledger.apply_pod_group(PodGroupFacts {
            part_of,
            ..pod_group("g", 2, false)
        });
        assert_eq!(decide(&mut ledger, &[], 0), victims);
    }
}

#[test]
fn all_victims_of_a_gang_are_named_together_and_its_room_is_kept_until_it_is_bound() {
    let (mut ledger, pods) = full();
    assert_eq!(decide(&mut ledger, &[], 0), set(&["x", "y"]));
    let kept = preemptions(&ledger, 3);
    let both: BTreeSet<_> = kept.iter().map(|it| it.pod.uid.to_string()).collect();
    assert_eq!(both, set(&["g0", "g1"]));
    assert!(
        kept.iter()
            .all(|it| it.gang == pods[0].group && it.until == kept[0].until)
    );
    ledger.delete_pod("x");
    assert_eq!(victims(&ledger, 4), set(&["y"]));
    let single = PodFacts {
        priority: 10,
        ..pod("single", 10_000)
    };
    assert!(choose(&mut ledger, &single, &["a"], at(4)).is_empty());
    ledger.delete_pod("y");
    assert!(victims(&ledger, 5).is_empty());
    // A cycle that comes to nothing does not cost the gang its room.
    for pod in &pods {
        assert_eq!(choose(&mut ledger, pod, &["a"], at(5)), ["a"]);
    }
    assert!(choose(&mut ledger, &single, &["a"], at(8)).is_empty());
    for pod in &pods {
        assert_eq!(choose(&mut ledger, pod, &["a"], at(9)), ["a"]);
    }
    for pod in &pods {
        assert!(ledger.begin_bind(pod, "a", at(9)).is_ok());
        ledger.end_bind(pod, Outcome::Bound, at(9));
    }
    ledger.fragmented(at(10));
    assert!(preemptions(&ledger, 10).is_empty());
}

#[test]
fn budget_that_protects_one_victim_spares_all() {
    let (mut ledger, _) = full();
    assert!(decide(&mut ledger, &["y"], 0).is_empty());
    let (mut ledger, _) = full();
    assert!(decide(&mut ledger, &["x", "y"], 1).is_empty());
    let (mut ledger, _) = full();
    assert_eq!(decide(&mut ledger, &["x", "y"], 2), set(&["x", "y"]));
}

#[test]
fn no_pod_finishes_for_a_gang_that_never_preempts_or_would_not_fit_anyway() {
    let (mut ledger, pods) = full();
    ledger.apply_pod(PodFacts {
        preempts: false,
        ..pods[1].clone()
    });
    assert!(decide(&mut ledger, &[], 0).is_empty());
    let (mut ledger, _) = full();
    ledger.apply_pod(holder("y", "a-1", 10_000, 10));
    assert!(decide(&mut ledger, &[], 0).is_empty());
    let (mut ledger, _) = full();
    gang(&mut ledger, 3, &[10_000, 10_000, 10_000]);
    assert!(decide(&mut ledger, &[], 0).is_empty());
}

#[test]
fn no_pod_finishes_where_kube_scheduler_did_not_offer_the_node() {
    let (mut ledger, pods) = full();
    joins(&mut ledger, "b", &[15_000]);
    assert!(choose(&mut ledger, &pods[0], &["b"], at(0)).is_empty());
    for second in [0, 3] {
        assert!(ledger.fragmented(at(second)).is_empty());
    }
}

#[test]
fn room_of_a_gang_is_kept_until_the_agent_reports_that_its_victims_use_none_of_it() {
    let (mut ledger, _) = full();
    let in_use = |mib| {
        let pods = vec![used("x", mib)];
        let first = card("a-0", 15_000);
        report(&[Gpu { pods, ..first }, card("a-1", 15_000)])
    };
    ledger.apply_gpunode("a", in_use(12_000), at(0));
    decide(&mut ledger, &[], 0);
    ["x", "y"].iter().for_each(|uid| ledger.delete_pod(uid));
    for second in [4, 30] {
        ledger.fragmented(at(second));
        assert_eq!(preemptions(&ledger, second).len(), 2);
    }
}

/// Kubernetes deletes the report of a node some time after the node.
#[test]
fn gang_preempts_though_the_report_of_a_node_that_is_gone_is_still_there() {
    let (mut ledger, _) = full();
    offer_all(&mut ledger, at(0));
    let gpus = [card("gone-0", 15_000), card("gone-1", 15_000)];
    ledger.apply_gpunode("gone", report(&gpus), at(0));
    assert!(ledger.fragmented(at(0)).is_empty());
    ledger.fragmented(at(3));
    assert_eq!(victims(&ledger, 3), set(&["x", "y"]));
}

/// kube-scheduler offers no node whose sum is too small, and so asks nothing.
#[test]
fn gang_preempts_where_the_whole_node_is_full_without_being_asked_about() {
    let mut ledger = ledger(&[("a", &[100, 100])]);
    ledger.apply_pod(holder("x", "a-0", 100, 1));
    ledger.apply_pod(holder("y", "a-1", 100, 1));
    gang(&mut ledger, 2, &[100, 100]);
    assert!(ledger.fragmented(at(0)).is_empty());
    ledger.fragmented(at(3));
    assert_eq!(victims(&ledger, 3), set(&["x", "y"]));
}

#[test]
fn gangs_of_2_to_16_pods_preempt_as_many_pods_on_nodes_as_large() {
    for gpus in 2..=16 {
        for (nodes, wanted) in (1..=gpus).map(|it| (1, it)).chain([(2, gpus)]) {
            let names = ["a", "b"];
            let cards = vec![100; gpus / nodes];
            let all: Vec<(&str, &[u64])> = names[..nodes].iter().map(|it| (*it, &*cards)).collect();
            let mut ledger = ledger(&all);
            for name in &names[..nodes] {
                for index in 0..cards.len() {
                    let card = format!("{name}-{index}");
                    ledger.apply_pod(holder(&card, &card, 100, 1));
                }
            }
            let wanted = wanted.min(nodes * cards.len());
            gang(&mut ledger, wanted, &vec![100; wanted]);
            let helped = (0..10).any(|second| {
                ledger.fragmented(at(second));
                victims(&ledger, second).len() == wanted
            });
            assert!(helped, "{wanted} pods on {nodes} nodes with {gpus} GPUs");
        }
    }
}

/// The same pods, each of which has the label and is on no node with another that has it.
fn kept_apart(ledger: &mut Ledger, pods: &[PodFacts]) {
    for pod in pods {
        let spec = required("podAntiAffinity", names::HOSTNAME);
        ledger.apply_pod(PodFacts {
            labels: [Label::new("app", "other")].into(),
            ..placed_by(pod.clone(), spec)
        });
    }
}

#[test]
fn no_pod_finishes_on_a_full_node_for_a_pod_that_anti_affinity_keeps_off_it() {
    let build = || {
        let mut ledger = ledger(&[("a", &[100, 100]), ("b", &[100, 100])]);
        for card in ["a-0", "a-1", "b-0", "b-1"] {
            ledger.apply_pod(holder(card, card, 100, 1));
        }
        ledger
    };
    let second = |ledger: &mut Ledger| {
        ledger.fragmented(at(0));
        ledger.fragmented(at(3));
        victims(ledger, 3)
    };
    // Pods of the gang keep each other off.
    let mut ledger = build();
    let pods = gang(&mut ledger, 2, &[100, 100]);
    kept_apart(&mut ledger, &pods);
    let nodes: Vec<String> = second(&mut ledger).into_iter().collect();
    assert!(
        matches!(&nodes[..], [one, two] if one.starts_with("a-") && two.starts_with("b-")),
        "{nodes:?}"
    );
    let mut ledger = build();
    let pods = gang(&mut ledger, 3, &[100, 100, 100]);
    kept_apart(&mut ledger, &pods);
    assert!(second(&mut ledger).is_empty());
    // A pod that stays keeps them off.
    for (priority, expected) in [(20, set(&[])), (1, set(&["a-0", "b-0"]))] {
        let mut ledger = build();
        for card in ["a-0", "b-0"] {
            kept_apart(&mut ledger, &[holder(card, card, 100, priority)]);
        }
        let pods = gang(&mut ledger, 2, &[100, 100]);
        kept_apart(&mut ledger, &pods);
        assert_eq!(second(&mut ledger), expected);
    }
}

#[test]
fn gang_among_the_victims_goes_whole_or_stays() {
    let build = |other: i32| {
        let mut ledger = ledger(&[("a", &[100, 100]), ("b", &[50])]);
        ledger.apply_pod_group(pod_group("v", 2, false));
        ledger.apply_pod(in_group("v", holder("v0", "a-0", 60, 1)));
        ledger.apply_pod(in_group("v", holder("v1", "b-0", 50, other)));
        ledger.apply_pod(holder("y", "a-1", 60, 1));
        gang(&mut ledger, 2, &[80, 80]);
        ledger
    };
    assert_eq!(decide(&mut build(1), &[], 0), set(&["v0", "v1", "y"]));
    assert!(decide(&mut build(10), &[], 0).is_empty());
    assert!(decide(&mut build(1), &["v1"], 0).is_empty());
}

#[test]
fn plan_ends_for_all_pods_when_one_of_the_gang_is_deleted_or_a_victim_stays() {
    let (mut ledger, pods) = full();
    decide(&mut ledger, &[], 0);
    ledger.delete_pod(&pods[0].uid);
    ledger.fragmented(at(4));
    assert!(preemptions(&ledger, 4).is_empty());
    let (mut ledger, pods) = full();
    decide(&mut ledger, &[], 0);
    let gang = pods[0].group.clone().expect("it is in a group");
    ledger.spare_for_gang(&gang);
    assert!(preemptions(&ledger, 4).is_empty());
    // It is not tried again at once.
    for second in 5..20 {
        offer_all(&mut ledger, at(second));
        assert!(ledger.fragmented(at(second)).is_empty());
    }
}

#[test]
fn pods_that_terminate_already_make_the_room_first() {
    let (mut ledger, _) = full();
    for (uid, card) in [("x", "a-0"), ("y", "a-1")] {
        ledger.apply_pod(PodFacts {
            deleting: true,
            ..holder(uid, card, 10_000, 1)
        });
    }
    assert!(decide(&mut ledger, &[], 0).is_empty());
    let (mut ledger, _) = full();
    ledger.apply_pod(PodFacts {
        deleting: true,
        ..holder("x", "a-0", 10_000, 1)
    });
    assert_eq!(decide(&mut ledger, &[], 0), set(&["y"]));
}

/// Can so many of these sizes be placed at the same time?
fn fits(free: &mut Vec<u64>, sizes: &[u64], wanted: usize) -> bool {
    let Some((&mib, rest)) = sizes.split_first() else {
        return wanted == 0;
    };
    if wanted == 0 {
        return true;
    }
    for card in 0..free.len() {
        if free[card] >= mib {
            free[card] -= mib;
            let fits = fits(free, rest, wanted - 1);
            free[card] += mib;
            if fits {
                return true;
            }
        }
    }
    fits(free, rest, wanted)
}

/// The values of two sets of victims that kube-scheduler compares first, as far as the sets differ here.
fn rank(victims: &[(i32, usize)]) -> (Option<i32>, i64) {
    let highest = victims.iter().map(|(priority, _)| *priority).max();
    let weights = victims
        .iter()
        .map(|(priority, _)| i64::from(*priority) - i64::from(i32::MIN));
    (highest, weights.sum())
}

/// The victims are the best of all sets that make room, and there are none where no set does.
#[test]
fn victims_are_those_of_an_exhaustive_search() {
    let (mut preempted, mut spared) = (0, 0);
    for seed in 0..1500 {
        let mut random = SmallRng::seed_from_u64(seed);
        let nodes = random.random_range(1..=3);
        let mut some = |most: usize, up_to: u64| -> Vec<u64> {
            let count = random.random_range(1..=most);
            (0..count).map(|_| random.random_range(1..=up_to)).collect()
        };
        let names = ["a", "b", "c"];
        let cards: Vec<Vec<u64>> = (0..nodes).map(|_| some(2, 6)).collect();
        let sizes = some(4, 4);
        let wanted = some(1, sizes.len() as u64)[0] as usize;
        let all: Vec<(&str, &[u64])> = names
            .iter()
            .copied()
            .zip(cards.iter().map(|it| &**it))
            .collect();
        let mut ledger = ledger(&all);
        // Each pod: its priority, its GPU, the memory that it holds, and its group, 0 without one.
        let mut free: Vec<u64> = cards.iter().flatten().copied().collect();
        let mut pods: Vec<(i32, usize, u64, u64)> = Vec::new();
        let places = cards.iter().enumerate();
        let places = places.flat_map(|(node, it)| (0..it.len()).map(move |card| (node, card)));
        let places: Vec<(usize, usize)> = places.collect();
        for group in [1, 2] {
            ledger.apply_pod_group(pod_group(&format!("v{group}"), 1, false));
        }
        let mut protected: Vec<String> = Vec::new();
        for (index, (node, card)) in places.iter().enumerate() {
            while pods.len() < 7 && some(1, 4)[0] > 1 {
                let (priority, mib) = ([1, 1, 2, 10][some(1, 4)[0] as usize - 1], some(1, 3)[0]);
                let group = [0, 0, 0, 1, 2][some(1, 5)[0] as usize - 1];
                if free[index] < mib {
                    continue;
                }
                free[index] -= mib;
                let uid = format!("p{}", pods.len());
                let name = format!("{}-{card}", names[*node]);
                let pod = holder(&uid, &name, mib, priority);
                ledger.apply_pod(match group {
                    0 => pod,
                    group => in_group(&format!("v{group}"), pod),
                });
                pods.push((priority, index, mib, group));
                if some(1, 8)[0] == 8 {
                    protected.push(uid);
                }
            }
        }
        gang(&mut ledger, wanted, &sizes);
        let mut best: Option<(Option<i32>, i64)> = None;
        for mask in 0..1_u32 << pods.len() {
            let has = |pod: usize| mask >> pod & 1 == 1;
            let may = (0..pods.len()).all(|pod| {
                let whole = (0..pods.len()).all(|other| {
                    let same = pods[pod].3 > 0 && pods[pod].3 == pods[other].3;
                    !same || has(other) == has(pod)
                });
                let is_protected = protected.contains(&format!("p{pod}"));
                !has(pod) || whole && pods[pod].0 < 10 && !is_protected
            });
            let mut free = free.clone();
            let victims: Vec<(i32, usize)> = (0..pods.len())
                .filter(|pod| has(*pod))
                .map(|pod| (pods[pod].0, pod))
                .collect();
            for &(_, pod) in &victims {
                free[pods[pod].1] += pods[pod].2;
            }
            if may && fits(&mut free, &sizes, wanted) {
                let rank = rank(&victims);
                best = Some(best.map_or(rank, |best| best.min(rank)));
            }
        }
        let protected: Vec<&str> = protected.iter().map(|it| &**it).collect();
        let victims = decide(&mut ledger, &protected, 0);
        let found: Vec<(i32, usize)> = victims
            .iter()
            .map(|uid| uid[1..].parse::<usize>().expect("a number"))
            .map(|pod| (pods[pod].0, pod))
            .collect();
        let text =
            format!("{seed}: {cards:?} {pods:?} {protected:?} {sizes:?} {wanted}: {victims:?}");
        match best {
            // It fits without any victim.
            Some((None, _)) => assert!(victims.is_empty(), "{text}"),
            Some(best) => {
                assert_eq!(rank(&found), best, "{text}");
                preempted += 1;
            }
            None => {
                assert!(victims.is_empty(), "{text}");
                spared += 1;
            }
        }
    }
    assert!(preempted > 200 && spared > 200, "{preempted} {spared}");
}

/// A look sees 16 nodes, and one for each pod of the gang.
#[test]
fn nodes_without_victims_hide_no_node_that_has_some() {
    let names: Vec<String> = (0..40).map(|number| format!("a{number:02}")).collect();
    let gpus: &[u64] = &[15_000, 15_000];
    let mut nodes: Vec<(&str, &[u64])> = names.iter().map(|name| (&**name, gpus)).collect();
    nodes.push(("z", gpus));
    let mut ledger = ledger(&nodes);
    for (index, name) in names.iter().enumerate() {
        // Half of them have pods of low priority, which are too small to be of use.
        let lower = if index % 2 == 0 { 1 } else { 20 };
        for gpu in 0..2 {
            let card = format!("{name}-{gpu}");
            ledger.apply_pod(holder(&format!("{card}-high"), &card, 14_000, 20));
            ledger.apply_pod(holder(&format!("{card}-low"), &card, 1_000, lower));
        }
    }
    ledger.apply_pod(holder("x", "z-0", 10_000, 1));
    ledger.apply_pod(holder("y", "z-1", 10_000, 1));
    gang(&mut ledger, 2, &[10_000, 10_000]);
    assert_eq!(decide(&mut ledger, &[], 0), set(&["x", "y"]));
}

#[test]
fn nodes_with_protected_victims_alone_hide_no_node_that_has_others() {
    let names: Vec<String> = (0..30).map(|number| format!("a{number:02}")).collect();
    let gpus: &[u64] = &[15_000];
    let mut nodes: Vec<(&str, &[u64])> = names.iter().map(|name| (&**name, gpus)).collect();
    nodes.extend([("y", gpus), ("z", gpus)]);
    let mut ledger = ledger(&nodes);
    for name in &names {
        ledger.apply_pod(holder(name, &format!("{name}-0"), 10_000, 0));
    }
    ledger.apply_pod(holder("x", "y-0", 10_000, 1));
    ledger.apply_pod(holder("w", "z-0", 10_000, 1));
    gang(&mut ledger, 2, &[10_000, 10_000]);
    let protected: Vec<&str> = names.iter().map(|name| &**name).collect();
    assert_eq!(decide(&mut ledger, &protected, 0), set(&["x", "w"]));
}
