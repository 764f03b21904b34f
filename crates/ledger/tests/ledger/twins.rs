//! GPUs that several nodes report: the memory of one GPU is promised once.

use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_ledger::{BindRefusal, Ledger, Outcome, Problem, Reason};
use gpustow_pack::Refusal;

use crate::build::{ask, at, bound, card, choose, exclusive, free, ledger, node, pod, report};
use crate::model::Random;

const NO_ROOM: Reason = Reason::Fit(Refusal::NoRoom);

/// Two nodes with one GPU of 100 of their own each, and one of 100 that both report.
fn twins() -> Ledger {
    let mut ledger = ledger(&[]);
    for name in ["a", "b"] {
        ledger.apply_node(node(name));
        let own = card(&format!("{name}-own"), 10);
        ledger.apply_gpunode(name, report(&[own, card("shared", 100)]), at(0));
    }
    ledger
}

fn bind(ledger: &mut Ledger, pod: &PodFacts, node: &str, now: Duration) -> bool {
    let done = ledger.begin_bind(pod, node, now).is_ok();
    if done {
        ledger.end_bind(pod, Outcome::Bound, now);
    }
    done
}

#[test]
fn memory_that_is_held_through_one_node_is_not_free_on_the_other() {
    let mut ledger = twins();
    let large = pod("large", 80);
    assert_eq!(choose(&mut ledger, &large, &["a"], at(0)), ["a"]);
    assert_eq!(
        (free(&ledger, "a"), free(&ledger, "b")),
        (vec![10, 20], vec![10, 20])
    );
    let second = pod("second", 60);
    ledger.apply_pod(second.clone());
    assert_eq!(
        ledger.filter(&ask(&second), &["b"], at(0)).refused,
        [("b", NO_ROOM)]
    );
    assert!(bind(&mut ledger, &large, "a", at(0)));
    assert_eq!(choose(&mut ledger, &pod("small", 20), &["b"], at(0)), ["b"]);
    assert_eq!(
        (free(&ledger, "a"), free(&ledger, "b")),
        (vec![10, 0], vec![10, 0])
    );
    // The waiting pod is woken for the node on which nothing happened.
    ledger.delete_pod("large");
    let woken = ledger.wake(9, at(1));
    assert_eq!(
        woken.iter().map(|pod| &*pod.uid).collect::<Vec<_>>(),
        ["second"]
    );
}

#[test]
fn a_whole_gpu_is_whole_on_both_nodes() {
    let mut ledger = twins();
    let whole = exclusive(pod("whole", 50));
    assert_eq!(choose(&mut ledger, &whole, &["a"], at(0)), ["a"]);
    assert_eq!(free(&ledger, "b"), [10, 0]);
}

#[test]
fn a_bind_is_refused_where_the_gpu_turns_out_to_be_anothers() {
    let mut ledger = ledger(&[("a", &[100]), ("b", &[100])]);
    let (one, two) = (pod("one", 80), pod("two", 80));
    assert_eq!(choose(&mut ledger, &one, &["a"], at(0)), ["a"]);
    assert_eq!(choose(&mut ledger, &two, &["b"], at(0)), ["b"]);
    assert!(bind(&mut ledger, &one, "a", at(0)));
    ledger.apply_gpunode("b", report(&[card("b-0", 100), card("a-0", 100)]), at(1));
    assert!(bind(&mut ledger, &two, "b", at(1)), "another GPU");
    let three = pod("three", 60);
    let refused = ledger.begin_bind(&three, "b", at(1));
    assert!(
        matches!(
            refused,
            Err(BindRefusal::NoFit {
                reason: NO_ROOM,
                ..
            })
        ),
        "{refused:?}"
    );
}

#[test]
fn the_bound_at_bind_counts_both_nodes() {
    let mut ledger = ledger(&[("a", &[100]), ("b", &[])]);
    let one = pod("one", 80);
    assert_eq!(choose(&mut ledger, &one, &["a"], at(0)), ["a"]);
    ledger.apply_pod(bound("q", "b", "a-0", 80));
    ledger.apply_gpunode("b", report(&[card("a-0", 100)]), at(1));
    assert!(!bind(&mut ledger, &one, "a", at(1)));
    ledger.delete_pod("q");
    assert!(bind(&mut ledger, &one, "a", at(1)));
}

#[test]
fn a_node_whose_report_is_gone_shares_nothing() {
    let mut ledger = twins();
    assert_eq!(choose(&mut ledger, &pod("p", 80), &["a"], at(0)), ["a"]);
    ledger.apply_gpunode("b", report(&[card("b-own", 10)]), at(1));
    assert_eq!(free(&ledger, "b"), [10]);
    ledger.apply_gpunode("b", report(&[card("shared", 100)]), at(2));
    assert_eq!(free(&ledger, "b"), [20]);
    ledger.delete_gpunode("a");
    assert_eq!(free(&ledger, "b"), [100]);
}

#[test]
fn promises_of_two_nodes_that_come_to_too_much_are_told_of() {
    let mut ledger = twins();
    ledger.apply_pod(bound("p", "a", "shared", 80));
    ledger.apply_pod(bound("q", "b", "shared", 80));
    let problems: Vec<_> = ledger
        .snapshot(at(0))
        .into_iter()
        .flat_map(|node| node.problems)
        .collect();
    let over = |it: &&Problem| matches!(it, Problem::Overcommitted { held, .. } if held.0 == 160);
    assert_eq!(problems.iter().filter(over).count(), 2, "{problems:?}");
}

/// So a report is not refused because another one has the same GPU: one agent in wrong hands could close all nodes.
#[test]
fn report_that_names_the_gpus_of_all_nodes_closes_none_of_them() {
    let mut ledger = ledger(&[("a", &[100]), ("b", &[100])]);
    ledger.apply_node(node("liar"));
    let all = [card("a-0", 100), card("b-0", 100)];
    ledger.apply_gpunode("liar", report(&all), at(0));
    for name in ["a", "b"] {
        assert_eq!(choose(&mut ledger, &pod(name, 80), &[name], at(0)), [name]);
    }
}

/// The memory that bound pods and reservations hold of a GPU, on all nodes.
fn held(ledger: &Ledger, uuid: &str, now: Duration) -> u64 {
    let cards = ledger.snapshot(now).into_iter().flat_map(|node| node.cards);
    cards
        .filter(|card| card.uuid == uuid)
        .map(|card| card.held.0)
        .sum()
}

#[test]
fn no_history_promises_a_gpu_twice() {
    for seed in 0..200 {
        let random = &mut Random::new(seed);
        let mut ledger = twins();
        let mut pods: Vec<PodFacts> = Vec::new();
        for step in 0..60 {
            let now = at(step);
            let name = ["a", "b"][random.below(2) as usize];
            match random.below(10) {
                0..5 => {
                    let mut new = pod(&format!("p{step}"), 10 * (1 + random.below(9)));
                    if random.below(5) == 0 {
                        new = exclusive(new);
                    }
                    let names: &[&str] =
                        [&["a", "b"][..], &["a"], &["b"]][random.below(3) as usize];
                    ledger.apply_pod(new.clone());
                    choose(&mut ledger, &new, names, now);
                    pods.push(new);
                }
                5 | 6 if !pods.is_empty() => {
                    let pod = pods[random.below(pods.len() as u64) as usize].clone();
                    bind(&mut ledger, &pod, name, now);
                }
                7 if !pods.is_empty() => {
                    let pod = pods.swap_remove(random.below(pods.len() as u64) as usize);
                    ledger.delete_pod(&pod.uid);
                }
                8 => ledger.expire(now),
                _ => {
                    // The same cards in another order, so that the report is a new one.
                    let mut cards = vec![card(&format!("{name}-own"), 10), card("shared", 100)];
                    cards.rotate_left(random.below(2) as usize);
                    ledger.apply_gpunode(name, report(&cards), now);
                }
            }
            let held = held(&ledger, "shared", at(step));
            assert!(held <= 100, "seed {seed}, step {step}: {held} of 100");
        }
    }
}
