//! Kept room is GPU memory, CPU and memory of the host, whatever it is kept for.

use gpustow_api::{NodeFacts, PodFacts};
use gpustow_ledger::{Config, Ledger};
use gpustow_pack::Mib;

use crate::act::Act as _;
use crate::build::{at, bound, card, choose, node, pod, report, requesting, used, waits};

/// A node of two cards of 100 MiB, 4,000 m of CPU and 4,000 MiB.
fn small(config: Config) -> Ledger {
    let mut ledger = Ledger::new(config);
    ledger.apply_node(NodeFacts {
        cpu_milli: 4_000,
        ram: Mib(4_000).into(),
        ..node("a")
    });
    ledger.apply_gpunode("a", report(&[card("a-0", 100), card("a-1", 100)]), at(0));
    ledger
}

/// The same pod, which asks for so much CPU.
fn cpu(milli: u64, pod: PodFacts) -> PodFacts {
    requesting(pod, |request| request.cpu_milli = milli)
}

/// The same pod, which asks for so much memory of the host.
fn ram(mib: u64, pod: PodFacts) -> PodFacts {
    requesting(pod, |request| request.ram = Mib(mib).into())
}

/// It asks about `a`. True if it gets it.
fn gets(ledger: &mut Ledger, pod: &PodFacts, second: u64) -> bool {
    let got = !choose(ledger, pod, &["a"], at(second)).is_empty();
    ledger.delete_pod(&pod.uid);
    got
}

/// Of the node's resources, `p` needs 3,000 m and 3,000 MiB: others get the rest.
fn others_get_the_rest(ledger: &mut Ledger, second: u64) {
    let late = |what| pod(&format!("{what} at {second}"), 10);
    assert!(!gets(ledger, &cpu(1_001, late("CPU")), second), "CPU");
    assert!(!gets(ledger, &ram(1_001, late("RAM")), second), "RAM");
    let rest = ram(1_000, cpu(1_000, late("rest")));
    assert!(gets(ledger, &rest, second), "the rest");
}

fn large(pod: PodFacts) -> PodFacts {
    ram(3_000, cpu(3_000, pod))
}

#[test]
fn preemption_keeps_cpu_and_host_memory_of_the_node() {
    let mut ledger = small(Config {
        preempt_fragmented: true,
        ..Config::default()
    });
    ledger.apply_pod(bound("x", "a", "a-0", 40));
    ledger.apply_pod(bound("y", "a", "a-1", 40));
    let p = large(waits("p", 80));
    ledger.apply_pod(p.clone());
    assert!(choose(&mut ledger, &p, &["a"], at(0)).is_empty());
    ledger.fragmented(at(0));
    assert_eq!(ledger.fragmented(at(3)).len(), 1);
    assert!(ledger.preempts_for("p", at(3)));
    others_get_the_rest(&mut ledger, 3);
    // While the victim terminates, and when it is gone.
    ledger.apply_pod(PodFacts {
        deleting: true,
        ..bound("x", "a", "a-0", 40)
    });
    others_get_the_rest(&mut ledger, 4);
    ledger.delete_pod("x");
    others_get_the_rest(&mut ledger, 5);
    assert!(gets(&mut ledger, &p, 5));
}

#[test]
fn preemption_lets_others_have_cpu_that_its_victims_leave() {
    let mut ledger = small(Config {
        preempt_fragmented: true,
        ..Config::default()
    });
    ledger.apply_pod(cpu(2_000, bound("x", "a", "a-0", 40)));
    ledger.apply_pod(PodFacts {
        priority: 5,
        ..bound("y", "a", "a-1", 40)
    });
    let p = cpu(2_000, waits("p", 80));
    ledger.apply_pod(p.clone());
    assert!(choose(&mut ledger, &p, &["a"], at(0)).is_empty());
    ledger.fragmented(at(0));
    ledger.fragmented(at(3));
    assert!(ledger.preempts_for("p", at(3)));
    // 2,000 m are free, and 2,000 will be.
    assert!(gets(&mut ledger, &cpu(2_000, pod("late", 10)), 3));
}

#[test]
fn a_node_is_planned_for_no_more_pods_than_its_cpu_takes() {
    let mut ledger = small(Config {
        preempt_fragmented: true,
        ..Config::default()
    });
    ledger.apply_pod(bound("x", "a", "a-0", 40));
    ledger.apply_pod(bound("y", "a", "a-1", 40));
    for (uid, milli) in [("p", 3_000), ("q", 2_000)] {
        let pod = cpu(milli, waits(uid, 80));
        ledger.apply_pod(pod.clone());
        assert!(choose(&mut ledger, &pod, &["a"], at(0)).is_empty());
    }
    ledger.fragmented(at(0));
    ledger.fragmented(at(3));
    assert!(ledger.preempts_for("p", at(3)));
    assert!(!ledger.preempts_for("q", at(3)));
}

#[test]
fn a_nomination_a_reclaim_and_a_reservation_keep_cpu_and_host_memory() {
    let mut ledger = small(Config::default());
    ledger.apply_pod(PodFacts {
        nominated: Some("a".into()),
        ..large(waits("p", 80))
    });
    others_get_the_rest(&mut ledger, 1);
    // Preemption does not take a pod that filter refuses.
    for (milli, fits) in [(1_000, true), (1_001, false)] {
        let late = cpu(milli, pod("late", 10));
        let mut budget = ledger.budget();
        let victims = ledger.preempt(&late, "a", &[], &mut budget, at(1));
        assert_eq!(victims.is_some(), fits, "{milli}");
    }

    let mut ledger = small(Config {
        reclaim: true,
        ..Config::default()
    });
    let mut greedy = card("a-0", 100);
    greedy.pods = vec![used("greedy", 90)];
    let mut full = card("a-1", 100);
    full.pods = vec![used("full", 80)];
    ledger.apply_gpunode("a", report(&[greedy, full]), at(0));
    ledger.apply_pod(bound("greedy", "a", "a-0", 30));
    ledger.apply_pod(bound("full", "a", "a-1", 80));
    let p = large(waits("p", 60));
    ledger.apply_pod(p.clone());
    assert!(choose(&mut ledger, &p, &["a"], at(0)).is_empty());
    assert_eq!(ledger.reclaims(at(0)).len(), 1);
    others_get_the_rest(&mut ledger, 1);

    let mut ledger = small(Config {
        reserve_after: Some(at(60)),
        ..Config::default()
    });
    ledger.apply_pod(bound("x", "a", "a-0", 40));
    ledger.apply_pod(bound("y", "a", "a-1", 40));
    let p = large(waits("p", 80));
    ledger.apply_pod(p.clone());
    assert!(choose(&mut ledger, &p, &["a"], at(0)).is_empty());
    ledger.tell_time(1_000);
    ledger.keep_reservations(at(1));
    assert_eq!(ledger.reservations().len(), 1);
    others_get_the_rest(&mut ledger, 1);
}

#[test]
fn pod_that_should_be_gone_holds_no_room_for_the_pod_that_waits_for_it() {
    for (unix, room) in [(1_059, false), (1_060, true)] {
        let mut ledger = crate::build::ledger(&[("a", &[100])]);
        ledger.apply_pod(PodFacts {
            deleting: true,
            gone_by: Some(1_000),
            ..bound("stuck", "a", "a-0", 60)
        });
        ledger.apply_pod(PodFacts {
            priority: 10,
            nominated: Some("a".into()),
            ..pod("p", 80)
        });
        // 60 come and 40 are free: 20 of these are p's, as long as the 60 are expected.
        ledger.tell_time(unix);
        let chosen = choose(&mut ledger, &pod("late", 40), &["a"], at(1));
        assert_eq!(!chosen.is_empty(), room, "{unix}");
    }
}
