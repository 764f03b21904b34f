//! The effect of each means for a pod that waits, or the reason why it does nothing.

use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_ledger::{Cause, Config, Ledger, MEANS, NotNow, Pursuit};

use crate::act::Act as _;
use crate::build::{at, bound, card, choose, node, offer_all, pod, report, used, waiting, waits};

/// Everything is on. A pod that borrows 60 MiB on `a`, one of low priority that may be evicted on `b`, and 50 MiB free
/// on `c`: 80 fit on none.
fn cluster(config: Config) -> Ledger {
    let mut ledger = Ledger::new(config);
    for name in ["a", "b", "c"] {
        let mut card = card(&format!("{name}-0"), 100);
        if name == "a" {
            card.pods = vec![used("greedy", 90)];
        }
        ledger.apply_node(node(name));
        ledger.apply_gpunode(name, report(&[card]), at(0));
    }
    ledger.apply_pod(of_priority(20, bound("greedy", "a", "a-0", 20)));
    let low = bound("low", "b", "b-0", 50);
    ledger.apply_pod(PodFacts {
        evictable: Some("its-replicaset".into()),
        ..low
    });
    ledger.apply_pod(of_priority(20, bound("high", "c", "c-0", 50)));
    ledger
}

fn all_on() -> Config {
    Config {
        reclaim: true,
        defragment: true,
        preempt_fragmented: true,
        reserve_after: Some(at(120)),
        ..Config::default()
    }
}

fn of_priority(priority: i32, pod: PodFacts) -> PodFacts {
    PodFacts { priority, ..pod }
}

fn told(ledger: &Ledger, pod: PodFacts, means: Cause, second: u64) -> Vec<Pursuit> {
    let all = ledger.report(&Arc::new(pod), at(second)).into_iter();
    let of_means = all.filter(|(it, _)| *it == means);
    of_means.map(|(_, pursuit)| pursuit).collect()
}

fn plan(node: &str, pods: &[&str]) -> Pursuit {
    Pursuit::Plan {
        node: node.into(),
        pods: pods.iter().map(|&uid| uid.into()).collect(),
    }
}

#[test]
fn report_names_the_pods_that_each_means_would_have_leave() {
    let mut ledger = cluster(all_on());
    ledger.apply_pod(waits("p", 80));
    let told = |means| told(&ledger, waits("p", 80), means, 0);
    assert_eq!(told(Cause::Reclaim), [plan("a", &["greedy"])]);
    assert_eq!(told(Cause::Preempt), [plan("b", &["low"])]);
    assert!(matches!(told(Cause::Reserve)[..], [Pursuit::Plan { .. }]));
}

#[test]
fn report_names_the_pods_that_defragment_would_have_leave_for_a_pod_of_equal_priority() {
    let mut ledger = cluster(Config {
        defragment: true,
        ..Config::default()
    });
    let equal = of_priority(0, waits("p", 80));
    ledger.apply_pod(equal.clone());
    let pursuit = told(&ledger, equal, Cause::Defragment, 0);
    assert_eq!(pursuit, [plan("b", &["low"])]);
}

#[test]
fn report_says_that_a_means_is_off() {
    let mut ledger = cluster(Config::default());
    ledger.apply_pod(waits("p", 80));
    for means in MEANS {
        assert_eq!(told(&ledger, waits("p", 80), means, 0), [Pursuit::Off]);
    }
}

#[test]
fn report_says_why_a_means_does_not_act_for_the_pod() {
    let mut ledger = cluster(all_on());
    let pods = [
        (
            PodFacts {
                nominated: Some("a".into()),
                ..waits("p", 80)
            },
            Cause::Reserve,
            NotNow::Nominated,
        ),
        (
            PodFacts {
                preempts: false,
                ..waits("p", 80)
            },
            Cause::Preempt,
            NotNow::NeverPreempts,
        ),
        (
            PodFacts {
                gated: true,
                ..waits("p", 80)
            },
            Cause::Reclaim,
            NotNow::NotPlaced,
        ),
    ];
    for (pod, means, why) in pods {
        ledger.apply_pod(pod.clone());
        assert_eq!(told(&ledger, pod, means, 0), [Pursuit::NotNow(why)]);
    }
}

#[test]
fn report_says_that_nothing_would_help() {
    let mut ledger = cluster(all_on());
    let pod = waiting(0, pod("huge", 101));
    ledger.apply_pod(pod.clone());
    for means in MEANS {
        assert_eq!(told(&ledger, pod.clone(), means, 0), [Pursuit::NoPlan]);
    }
}

#[test]
fn report_says_what_is_waited_for_and_that_the_others_leave_it_alone() {
    let mut ledger = cluster(Config {
        defragment: false,
        ..all_on()
    });
    ledger.apply_pod(waits("p", 80));
    assert_eq!(
        choose(&mut ledger, &waits("p", 80), &["a", "b", "c"], at(0)),
        [""; 0]
    );
    let waits_for = |it: &Pursuit| matches!(it, Pursuit::WaitsFor { node, pods, .. } if (&**node, &**pods) == ("a", &["greedy".into()]));
    assert!(
        told(&ledger, waits("p", 80), Cause::Reclaim, 1)
            .iter()
            .all(waits_for)
    );
    for means in [Cause::Preempt, Cause::Reserve] {
        let pursuit = told(&ledger, waits("p", 80), means, 1);
        assert_eq!(pursuit, [Pursuit::NotNow(NotNow::HasRoom)]);
    }
}

#[test]
fn report_says_until_when_a_means_backs_off() {
    let mut ledger = crate::build::ledger(&[("a", &[100, 100])]);
    ledger.configure(Config {
        preempt_fragmented: true,
        ..Config::default()
    });
    for (uid, card) in [("x", "a-0"), ("y", "a-1")] {
        ledger.apply_pod(bound(uid, "a", card, 40));
    }
    ledger.apply_pod(waits("p", 80));
    for second in [0, 3] {
        offer_all(&mut ledger, at(second));
        ledger.fragmented(at(second));
    }
    assert!(ledger.preempts_for("p", at(3)));
    let pursuit = told(&ledger, waits("p", 80), Cause::Preempt, 4);
    let [Pursuit::WaitsFor { until, .. }] = &pursuit[..] else {
        panic!("no pod is evicted: {pursuit:?}");
    };
    // No pod finishes until the reservation ends.
    let late = until.as_secs() + 1;
    ledger.fragmented(at(late));
    let pursuit = told(&ledger, waits("p", 80), Cause::Preempt, late);
    assert!(matches!(pursuit[..], [Pursuit::BackingOff(until)] if until > at(late)));
}
