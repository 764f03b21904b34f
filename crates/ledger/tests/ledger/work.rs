//! The cost of looks for gangs, placeholders and pods that sleep under the lock, in clusters of 100 and of 1,000 nodes.

use std::collections::BTreeSet;

use gpustow_api::{Group, GroupPolicy, Memory, PodFacts, PodGroupFacts, Sleep};
use gpustow_ledger::{Config, Ledger};

use crate::act::Act as _;
use crate::build::{at, bound, card, node, offer_all, pod, report, requesting, used};

/// The budget of a look, see `Ledger::work`.
const LOOK: u64 = 4096;

/// Nodes with one GPU of 100 MiB, each taken by a pod of this priority.
fn full(config: Config, priorities: impl Iterator<Item = i32>) -> (Ledger, Vec<String>) {
    let mut ledger = Ledger::new(config);
    let mut names = Vec::new();
    for (number, priority) in priorities.enumerate() {
        let name = format!("n{number}");
        let gpu = format!("{name}-0");
        ledger.apply_node(node(&name));
        ledger.apply_gpunode(&name, report(&[card(&gpu, 100)]), at(0));
        ledger.apply_pod(PodFacts {
            priority,
            ..bound(&format!("on-{name}"), &name, &gpu, 100)
        });
        names.push(name);
    }
    (ledger, names)
}

fn report_again(ledger: &mut Ledger, names: &[String], second: u64) {
    for name in names {
        let mut status = report(&[card(&format!("{name}-0"), 100)]);
        status.heartbeat = Some(second.to_string());
        ledger.apply_gpunode(name, status, at(second));
    }
}

/// A gang of priority 10 that kube-scheduler could not place.
fn gang(ledger: &mut Ledger, sizes: impl Iterator<Item = u64>) {
    let sizes: Vec<u64> = sizes.collect();
    let group = Group::in_tree("default", "g");
    ledger.apply_pod_group(PodGroupFacts {
        group: group.clone(),
        uid: "g".into(),
        policy: GroupPolicy::Gang(sizes.len()),
        disrupted_singly: true,
        part_of: None,
    });
    for (number, mib) in sizes.into_iter().enumerate() {
        ledger.apply_pod(PodFacts {
            priority: 10,
            waiting: true,
            group: Some(group.clone()),
            ..pod(&format!("g{number}"), mib)
        });
    }
}

/// The most that one look or question cost in these seconds, and when pods were to finish first.
fn preempts(ledger: &mut Ledger, names: &[String], seconds: u64) -> (u64, Option<u64>) {
    let mut most = 0;
    let mut before = ledger.work();
    let mut note = |ledger: &Ledger| {
        most = most.max(ledger.work() - before);
        before = ledger.work();
    };
    for second in 0..seconds {
        if second % 25 == 0 {
            report_again(ledger, names, second);
            offer_all(ledger, at(second));
        }
        note(ledger);
        ledger.fragmented(at(second));
        note(ledger);
        let all = ledger.preemptions(at(second));
        note(ledger);
        if all.iter().any(|it| !it.victims.is_empty()) {
            return (most, Some(second));
        }
    }
    (most, None)
}

fn preempting() -> Config {
    Config {
        preempt_fragmented: true,
        ..Config::default()
    }
}

#[test]
fn look_for_a_gang_that_others_may_finish_for_costs_no_more_on_1000_nodes_than_on_100() {
    for nodes in [100, 1000] {
        let (mut ledger, names) = full(preempting(), (0..nodes).map(|_| 1));
        gang(&mut ledger, (0..8).map(|_| 80));
        let (most, decided) = preempts(&mut ledger, &names, 30);
        println!("{nodes} nodes: {most} a look, decided at {decided:?}");
        assert!(most > 0 && most <= 3 * LOOK, "{nodes} nodes: {most}");
        assert!(decided.is_some_and(|it| it <= 10), "{nodes}: {decided:?}");
    }
}

#[test]
fn look_for_a_gang_that_cannot_be_helped_costs_no_more_than_for_another() {
    for nodes in [100, 1000] {
        // Two of its pods fit on a GPU, and eight of nine on four.
        let priorities = (0..nodes).map(|number| if number < 4 { 1 } else { 20 });
        let (mut ledger, names) = full(preempting(), priorities);
        gang(&mut ledger, 34..43);
        let (most, decided) = preempts(&mut ledger, &names, 30);
        println!("{nodes} nodes: {most} a look");
        assert!(most > 0 && most <= 3 * LOOK, "{nodes} nodes: {most}");
        assert_eq!(decided, None);
    }
}

#[test]
fn question_of_who_finishes_for_a_gang_is_counted_and_asks_of_each_node_alone() {
    let (mut ledger, names) = full(preempting(), (0..100).map(|_| 1));
    gang(&mut ledger, (0..8).map(|_| 80));
    let (_, decided) = preempts(&mut ledger, &names, 30);
    let second = decided.unwrap_or_default() + 1;
    let before = ledger.work();
    let all = ledger.preemptions(at(second));
    let victims: usize = all.iter().map(|it| it.victims.len()).sum();
    let cost = ledger.work() - before;
    assert_eq!(victims, 8);
    // Eight pods get their GPUs, and each of eight that finish is asked about with the one that gets its GPU.
    assert!((128..200).contains(&cost), "{cost}");
}

/// Nodes with two GPUs, half of each taken.
fn fragmented(nodes: usize) -> Ledger {
    let mut ledger = Ledger::new(Config {
        provision: 5,
        queue: true,
        ..Config::default()
    });
    for number in 0..nodes {
        let name = format!("n{number}");
        let gpus = [0, 1].map(|index| format!("{name}-{index}"));
        ledger.apply_node(node(&name));
        let cards = gpus.each_ref().map(|gpu| card(gpu, 100));
        ledger.apply_gpunode(&name, report(&cards), at(0));
        for gpu in &gpus {
            ledger.apply_pod(bound(&format!("on-{gpu}"), &name, gpu, 50));
        }
    }
    ledger
}

#[test]
fn look_for_placeholders_costs_no_more_on_1000_nodes_than_on_100() {
    for nodes in [100, 1000] {
        let mut ledger = fragmented(nodes);
        for number in 0..20_u64 {
            // Half of them need more memory than is free on a GPU, and half more CPU than any node has.
            let its = pod(&format!("p{number}"), [60, 30][number as usize % 2]);
            let its = requesting(its, |request| {
                request.cpu_milli = [number, 99_000 + number][number as usize % 2];
            });
            ledger.apply_pod(its);
        }
        offer_all(&mut ledger, at(0));
        let before = ledger.work();
        let created = ledger.provision(at(1)).create.len();
        let cost = ledger.work() - before;
        println!("{nodes} nodes: {cost} a look for {created} placeholders");
        assert!(cost > 0 && cost <= 3 * LOOK, "{nodes} nodes: {cost}");
        let idle = ledger.work();
        (0..20).for_each(|number| ledger.delete_pod(&format!("p{number}")));
        ledger.provision(at(2));
        assert!(ledger.work() - idle <= 8, "nothing waits");
    }
}

#[test]
fn pods_that_sleep_are_told_in_looks_that_cost_no_more_however_many_they_are() {
    for nodes in [100, 1000] {
        let config = Config {
            reclaim: true,
            ..Config::default()
        };
        let (mut ledger, names) = full(config, (0..nodes).map(|_| 1));
        for name in &names {
            let uids: Vec<String> = (0..8).map(|number| format!("{name}-{number}")).collect();
            ledger.delete_pod(&format!("on-{name}"));
            let gpu = format!("{name}-0");
            for uid in &uids {
                ledger.apply_pod(PodFacts {
                    sleep: Some(Sleep {
                        asleep: false,
                        told: None,
                    }),
                    ..bound(uid, name, &gpu, 10)
                });
            }
            let mut gpu = card(&gpu, 100);
            gpu.pods = uids.iter().map(|uid| used(uid, 1)).collect();
            ledger.apply_gpunode(name, report(&[gpu]), at(1));
        }
        let mut told = BTreeSet::new();
        for _ in 0..50 {
            let before = ledger.work();
            let all = ledger.memory_news(|uid| told.contains(uid), at(1));
            let cost = ledger.work() - before;
            assert!(cost > 0 && cost <= LOOK + 100, "{nodes} nodes: {cost}");
            for news in all {
                assert_eq!(news.memory, Memory::Free);
                assert!(told.insert(news.pod.uid.to_string()), "told twice");
            }
        }
        assert_eq!(told.len(), 8 * nodes);
    }
}
