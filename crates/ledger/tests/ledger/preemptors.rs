//! Queued pods that are ungated because kube-scheduler may evict others for them: which, how many, and at which cost.

use gpustow_api::PodFacts;
use gpustow_api::gpunode::GpuNodeStatus;
use gpustow_ledger::{Config, Ledger, Ungate};

use crate::build::{at, bound, card, node, pod, report, requesting};

/// Nodes with one GPU of 100 MiB, each taken by a pod of priority 0.
fn full(nodes: usize) -> Ledger {
    let mut ledger = Ledger::new(Config {
        queue: true,
        ..Config::default()
    });
    for index in 0..nodes {
        let (name, gpu) = (format!("n{index}"), format!("n{index}-0"));
        ledger.apply_node(node(&name));
        ledger.apply_gpunode(&name, report(&[card(&gpu, 100)]), at(0));
        ledger.apply_pod(bound(&format!("low-{index}"), &name, &gpu, 60));
    }
    ledger
}

fn queued(name: &str, mib: u64, priority: i32) -> PodFacts {
    PodFacts {
        queued: true,
        priority,
        ..pod(name, mib)
    }
}

/// The names of the pods that are ungated now because they may preempt; the API server does so at once.
fn ungated(ledger: &mut Ledger, second: u64) -> Vec<String> {
    let mut names = Vec::new();
    let mut more = true;
    while more {
        let pods = ledger.wake(100, at(second));
        for pod in pods.iter().filter(|pod| pod.queued) {
            if ledger.ungated_because(&pod.uid) == Ungate::MayPreempt {
                names.push(pod.uid.to_string());
            }
            ledger.apply_pod(PodFacts {
                queued: false,
                ..PodFacts::clone(pod)
            });
        }
        more = ledger.wakes_on();
    }
    names
}

/// A pod that wants a whole GPU, each of another class.
fn wide(number: u64) -> PodFacts {
    let queued = queued(&format!("wide-{number}"), 100, 1);
    requesting(queued, |request| request.cpu_milli = number)
}

#[test]
fn stalled_are_no_pods_that_this_replica_chose_to_ungate_when_it_led() {
    let mut ledger = full(1);
    ledger.apply_pod(queued("p", 60, 1));
    // It loses the lead before it ungates anyone.
    assert!(ledger.wake(0, at(1)).is_empty());
    assert!(ledger.stalled(at(20)).is_empty());
    assert_eq!(ungated(&mut ledger, 20), ["p"]);
}

#[test]
fn look_for_preemptors_costs_no_more_on_1000_nodes_than_on_100() {
    for nodes in [100, 1000] {
        let mut ledger = full(nodes);
        // On every node a pod of higher priority holds 40: whichever pod is evicted, no pod of 100 fits.
        for index in 0..nodes {
            let (name, gpu) = (format!("n{index}"), format!("n{index}-0"));
            ledger.apply_pod(PodFacts {
                priority: 9,
                ..bound(&format!("high-{index}"), &name, &gpu, 40)
            });
        }
        (0..16).for_each(|number| ledger.apply_pod(wide(number)));
        let mut most = 0;
        for look in 0..200 {
            let before = ledger.spent_on_preemptors();
            let pods = ledger.wake(100, at(1 + look / 50));
            assert!(pods.is_empty());
            most = most.max(ledger.spent_on_preemptors() - before);
        }
        assert!(most <= 4096 + 16, "{nodes} nodes: {most}");
        // Nothing changes, and every class knows every node: a look costs the pods in the queue.
        let before = ledger.spent_on_preemptors();
        ledger.wake(100, at(60));
        let quiet = ledger.spent_on_preemptors() - before;
        assert!(quiet <= 16, "{nodes} nodes: {quiet}");
        // One node changes, and each of the 16 looks at it alone.
        ledger.delete_pod("high-7");
        let before = ledger.spent_on_preemptors();
        let names = ungated(&mut ledger, 62);
        assert_eq!(names.len(), 4, "{nodes} nodes: {names:?}");
        let change = ledger.spent_on_preemptors() - before;
        assert!(change <= 16 * 60, "{nodes} nodes: {change}");
    }
}

#[test]
fn preemptor_is_found_behind_pods_that_may_not_preempt() {
    for before in [15, 16, 200] {
        let mut ledger = full(1);
        for number in 0..before {
            ledger.apply_pod(PodFacts {
                preempts: false,
                ..queued(&format!("never-{number:03}"), 60, 2)
            });
        }
        ledger.apply_pod(queued("urgent", 60, 1));
        assert_eq!(ungated(&mut ledger, 1), ["urgent"], "{before} before it");
    }
}

#[test]
fn preemptor_is_found_behind_pods_that_no_eviction_helps() {
    let mut ledger = full(50);
    for index in 0..50 {
        let (name, gpu) = (format!("n{index}"), format!("n{index}-0"));
        ledger.apply_pod(PodFacts {
            priority: 9,
            ..bound(&format!("high-{index}"), &name, &gpu, 40)
        });
    }
    (0..100).for_each(|number| ledger.apply_pod(wide(number)));
    ledger.apply_pod(queued("z-urgent", 60, 1));
    assert_eq!(ungated(&mut ledger, 1), ["z-urgent"]);
}

#[test]
fn pods_that_were_ungated_to_preempt_count_while_they_wait() {
    let mut ledger = full(1);
    for number in 0..100 {
        ledger.apply_pod(queued(&format!("p{number:04}"), 60, 1));
    }
    let mut all = Vec::new();
    for second in 1..3600 {
        let status = GpuNodeStatus {
            heartbeat: Some(second.to_string()),
            ..report(&[card("n0-0", 100)])
        };
        ledger.apply_gpunode("n0", status, at(second));
        all.extend(ungated(&mut ledger, second));
        if second == 59 {
            assert_eq!(all, ["p0000", "p0001", "p0002", "p0003"]);
        }
    }
    // They come to nothing, so pods that ask for the same rest for five minutes each time.
    assert!((8..=48).contains(&all.len()), "{} in an hour", all.len());
}

#[test]
fn preemptor_of_another_class_is_ungated_when_the_first_came_to_nothing() {
    let mut ledger = full(1);
    for number in 0..20 {
        ledger.apply_pod(queued(&format!("a{number:02}"), 60, 1));
    }
    ledger.apply_pod(queued("b", 70, 1));
    assert_eq!(ungated(&mut ledger, 1).len(), 4);
    assert!(ungated(&mut ledger, 60).is_empty());
    assert_eq!(ungated(&mut ledger, 61), ["b"]);
}

#[test]
fn new_preemptor_of_higher_priority_does_not_wait_for_the_end_of_a_round() {
    let mut ledger = full(1000);
    for index in 0..1000 {
        let (name, gpu) = (format!("n{index}"), format!("n{index}-0"));
        ledger.apply_pod(PodFacts {
            priority: 5,
            ..bound(&format!("high-{index}"), &name, &gpu, 40)
        });
    }
    (0..16).for_each(|number| ledger.apply_pod(wide(number)));
    // A round of 16 classes on 1,000 nodes takes more than 50 looks.
    (0..5).for_each(|_| assert!(ledger.wake(100, at(1)).is_empty()));
    ledger.apply_pod(queued("urgent", 60, 8));
    let urgent = (0..100).find(|_| {
        let woken = ledger.wake(100, at(1));
        woken.iter().any(|pod| &*pod.uid == "urgent")
    });
    assert!(urgent.is_some_and(|looks| looks < 5), "{urgent:?}");
}
