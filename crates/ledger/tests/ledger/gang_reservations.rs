//! GPUs are reserved for the pods of a gang that has waited for long, on one or more nodes.

use gpustow_api::PodFacts;
use gpustow_ledger::{Config, Ledger};

use crate::act::Act as _;
use crate::build::{at, bound, choose, pod};
use crate::pod_groups::gang;
use crate::reservations::{AFTER, keep, keeping};

/// A ledger that reserves, with one GPU of 100 on each node, which another pod has.
fn full(nodes: &[&str], config: Config) -> Ledger {
    let cards: Vec<_> = nodes.iter().map(|name| (*name, 1)).collect();
    let mut ledger = keeping(&cards, config);
    for name in nodes {
        let gpu = format!("{name}-0");
        ledger.apply_pod(bound(&format!("on-{name}"), name, &gpu, 100));
    }
    ledger
}

/// kube-scheduler asks about the first pod of the gang, which is refused, and marks all of them as waiting.
fn waits(ledger: &mut Ledger, pods: &[PodFacts], nodes: &[&str]) {
    assert_eq!(choose(ledger, &pods[0], nodes, at(0)), [""; 0]);
    for pod in pods {
        let waiting = true;
        ledger.apply_pod(PodFacts {
            waiting,
            ..pod.clone()
        });
    }
}

fn nodes(ledger: &Ledger) -> Vec<String> {
    let places = ledger.reservations().into_iter();
    let mut nodes: Vec<String> = places.map(|place| place.node.to_string()).collect();
    nodes.sort_unstable();
    nodes
}

#[test]
fn reservation_for_a_gang_lasts_until_gpus_of_all_its_nodes_are_free() {
    let mut ledger = full(&["a", "b"], Config::default());
    let pods = gang(&mut ledger, "g", 2, vec![pod("g0", 100), pod("g1", 100)]);
    waits(&mut ledger, &pods, &["a", "b"]);
    for second in AFTER..AFTER + 3 {
        keep(&mut ledger, second);
    }
    assert_eq!(nodes(&ledger), ["a", "b"]);
    ledger.delete_pod("on-a");
    // Longer than the reservation of a single pod is kept that does not come.
    for second in AFTER + 3..AFTER + 300 {
        keep(&mut ledger, second);
    }
    assert_eq!(nodes(&ledger), ["a", "b"]);
    let late = pod("late", 40);
    assert_eq!(choose(&mut ledger, &late, &["a"], at(AFTER + 300)), [""; 0]);
    ledger.delete_pod("on-b");
    let woken = ledger.wake(10, at(AFTER + 300));
    assert!(woken.iter().any(|pod| pod.group.is_some()), "{woken:?}");
    for pod in &pods {
        let nodes = choose(&mut ledger, pod, &["a", "b"], at(AFTER + 300));
        assert_eq!(nodes.len(), 1);
    }
}

#[test]
fn room_for_a_part_of_a_gang_is_reserved_until_the_rest_is_free() {
    let mut ledger = full(&["a", "b"], Config::default());
    ledger.delete_pod("on-a");
    let pods = gang(&mut ledger, "g", 2, vec![pod("g0", 100), pod("g1", 100)]);
    waits(&mut ledger, &pods, &["a", "b"]);
    for second in AFTER..AFTER + 3 {
        keep(&mut ledger, second);
    }
    assert_eq!(nodes(&ledger), ["a", "b"]);
    let late = pod("late", 40);
    assert_eq!(choose(&mut ledger, &late, &["a"], at(AFTER + 3)), [""; 0]);
}

#[test]
fn pods_of_a_gang_share_the_gpu_that_is_reserved_for_them() {
    let mut ledger = full(&["a"], Config::default());
    let pods = gang(&mut ledger, "g", 2, vec![pod("g0", 50), pod("g1", 50)]);
    waits(&mut ledger, &pods, &["a"]);
    for second in AFTER..AFTER + 3 {
        keep(&mut ledger, second);
    }
    assert_eq!(nodes(&ledger), ["a", "a"]);
    ledger.delete_pod("on-a");
    keep(&mut ledger, AFTER + 4);
    for pod in &pods {
        assert_eq!(choose(&mut ledger, pod, &["a"], at(AFTER + 4)), ["a"]);
    }
}

#[test]
fn nothing_is_reserved_for_a_part_of_a_gang_if_the_bound_leaves_too_little() {
    let bounded = Config {
        reserve_max: 1,
        ..Config::default()
    };
    let mut ledger = full(&["a", "b"], bounded);
    let pods = gang(&mut ledger, "g", 2, vec![pod("g0", 100), pod("g1", 100)]);
    waits(&mut ledger, &pods, &["a", "b"]);
    for second in AFTER..AFTER + 3 {
        keep(&mut ledger, second);
    }
    assert_eq!(nodes(&ledger), [""; 0]);
}

#[test]
fn nothing_is_reserved_for_a_gang_of_which_too_few_pods_exist() {
    let mut ledger = full(&["a", "b"], Config::default());
    let pods = gang(&mut ledger, "g", 3, vec![pod("g0", 100), pod("g1", 100)]);
    waits(&mut ledger, &pods, &["a", "b"]);
    for second in AFTER..AFTER + 3 {
        keep(&mut ledger, second);
    }
    assert_eq!(nodes(&ledger), [""; 0]);
}
