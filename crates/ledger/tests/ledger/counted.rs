//! Whatever is planned or kept for a pod counts all that decides whether the pod can run there: rules of GPU affinity, pod
//! slots and MPS clients as well as memory.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{NodeFacts, PodFacts};
use gpustow_ledger::{Cause, Config, Ledger, Pursuit};
use gpustow_pack::Rules;

use crate::act::Act as _;
use crate::build::{
    at, bound, card, choose, computing, configured, ledger, mps, node, offer_all, pod, report,
    waiting,
};
use crate::rules::with;

/// The same pod, which shares no GPU with others of the group.
fn apart(pod: PodFacts) -> PodFacts {
    let rules = Rules {
        anti_affinity: Some("default/g".into()),
        ..Rules::default()
    };
    with(pod, rules)
}

fn of_priority(priority: i32, pod: PodFacts) -> PodFacts {
    PodFacts { priority, ..pod }
}

fn leaving(pod: PodFacts) -> PodFacts {
    PodFacts {
        deleting: true,
        ..pod
    }
}

fn evictable(pod: PodFacts) -> PodFacts {
    PodFacts {
        evictable: Some("its-replicaset".into()),
        started: 0,
        ..pod
    }
}

fn preempting() -> Config {
    Config {
        preempt_fragmented: true,
        ..Config::default()
    }
}

/// Node `a` of two GPUs with 40 of 100 MiB held on each, by `x` of the lower priority on `a-0`. `p` waits for 80 and `x` is
/// chosen.
fn chosen(ledger: &mut Ledger, p: &PodFacts) {
    ledger.apply_pod(of_priority(1, bound("x", "a", "a-0", 40)));
    ledger.apply_pod(of_priority(2, bound("y", "a", "a-1", 40)));
    ledger.apply_pod(p.clone());
    offer_all(ledger, at(0));
    ledger.fragmented(at(0));
    assert_eq!(ledger.fragmented(at(3)).len(), 1);
    assert!(ledger.preempts_for("p", at(3)));
    let victims = ledger.preemptions(at(3));
    assert_eq!(*victims[0].victims[0].uid, *"x");
}

/// The GPU that filter and bind give the pod on `a`.
fn gets(ledger: &mut Ledger, pod: &PodFacts, second: u64) -> Option<String> {
    ledger.apply_pod(pod.clone());
    choose(ledger, pod, &["a"], at(second)).pop()?;
    let begun = ledger.begin_bind(pod, "a", at(second)).ok()?;
    Some(begun.charges[0].0.to_string())
}

#[test]
fn room_kept_for_a_preemptor_goes_to_no_pod_of_its_anti_affinity_group() {
    let mut ledger = configured(preempting(), &[("a", &[100, 100])]);
    let p = apart(waiting(10, pod("p", 80)));
    chosen(&mut ledger, &p);
    ledger.apply_pod(leaving(of_priority(1, bound("x", "a", "a-0", 40))));
    let q = apart(pod("q", 20));
    assert_eq!(gets(&mut ledger, &q, 4).as_deref(), Some("a-1"));
    ledger.delete_pod("x");
    assert_eq!(gets(&mut ledger, &p, 5).as_deref(), Some("a-0"));
}

#[test]
fn last_pod_slot_of_a_node_is_kept_for_a_preemptor() {
    let mut ledger = configured(preempting(), &[("a", &[100, 100])]);
    ledger.apply_node(NodeFacts {
        pods: Some(3),
        ..node("a")
    });
    let p = waiting(10, pod("p", 80));
    chosen(&mut ledger, &p);
    ledger.apply_pod(leaving(of_priority(1, bound("x", "a", "a-0", 40))));
    // One slot is free, and the victim leaves one more: that is the preemptor's.
    assert!(gets(&mut ledger, &pod("q1", 10), 4).is_some());
    ledger.delete_pod("x");
    assert_eq!(gets(&mut ledger, &pod("q2", 10), 4), None);
    assert_eq!(ledger.refused_in_tree("a", &p), None);
    assert_eq!(gets(&mut ledger, &p, 5).as_deref(), Some("a-0"));
}

#[test]
fn preempt_sees_that_room_is_kept_for_a_pod_of_the_same_anti_affinity_group() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(PodFacts {
        nominated: Some("a".into()),
        ..apart(waiting(10, pod("p", 50)))
    });
    let fits = |pod: &PodFacts| {
        let budget = &mut ledger.budget();
        let victims = ledger.preempt(pod, "a", &[], budget, at(1));
        victims.is_some()
    };
    assert!(fits(&pod("q", 50)));
    assert!(!fits(&apart(pod("q", 50))));
}

/// The GPU that is planned for the replacement of each pod.
fn places(ledger: &Ledger, second: u64) -> Vec<String> {
    let moves = ledger.emptying(at(second)).map(|it| it.moves);
    let cards = moves.into_iter().flatten().flat_map(|it| it.cards);
    cards.map(|(uuid, _)| uuid.to_string()).collect()
}

#[test]
fn emptied_node_sends_replicas_to_gpus_that_they_need_not_share() {
    for (cards, planned) in [(1, 0), (2, 2)] {
        let mut ledger = Ledger::new(Config {
            defragment: true,
            empty_nodes: true,
            ..Config::default()
        });
        let all = [card("b-0", 100), card("b-1", 100)];
        for (name, cards) in [
            ("a", vec![card("a-0", 100), card("a-1", 100)]),
            ("b", all[..cards].to_vec()),
        ] {
            ledger.apply_node(node(name));
            ledger.apply_gpunode(name, report(&cards), at(0));
        }
        ledger.apply_pod(apart(evictable(bound("r1", "a", "a-0", 10))));
        ledger.apply_pod(apart(evictable(bound("r2", "a", "a-1", 10))));
        ledger.apply_pod(bound("y", "b", "b-0", 60));
        ledger.tell_time(100_000);
        ledger.fragmented(at(0));
        let begun = ledger.empty(3, at(0)).is_some();
        assert_eq!(begun, planned > 0, "{cards} GPUs");
        let mut places = places(&ledger, 0);
        places.sort();
        places.dedup();
        assert_eq!(places.len(), planned, "{cards} GPUs");
    }
}

#[test]
fn reservation_is_made_on_a_gpu_that_a_replica_of_the_pod_must_leave() {
    let mut ledger = configured(
        Config {
            reserve_after: Some(at(120)),
            reserve_max_percent: 100,
            stale_after: Duration::MAX,
            ..Config::default()
        },
        &[("a", &[100, 100])],
    );
    ledger.apply_pod(apart(bound("r0", "a", "a-0", 30)));
    ledger.apply_pod(apart(bound("r1", "a", "a-1", 30)));
    // Memory alone would suffice.
    let p = apart(waiting(10, pod("p", 60)));
    ledger.apply_pod(p.clone());
    assert!(choose(&mut ledger, &p, &["a"], at(0)).is_empty());
    let report = ledger.report(&Arc::new(p.clone()), at(121));
    let reserve = report.into_iter().find(|(it, _)| *it == Cause::Reserve);
    let plan = Pursuit::Plan {
        node: "a".into(),
        pods: vec!["r0".into()],
    };
    assert_eq!(reserve.map(|(_, it)| it), Some(plan));
    // It lasts as long as the replica stays.
    for second in 121_u64..400 {
        ledger.tell_time(second.cast_signed());
        ledger.keep_reservations(at(second));
        let all = ledger.reservations();
        assert_eq!(all.len(), 1, "{second}");
        assert_eq!(*all[0].victims[0].uid, *"r0", "{second}");
    }
    ledger.delete_pod("r0");
    assert_eq!(gets(&mut ledger, &apart(pod("late", 60)), 400), None);
    assert_eq!(gets(&mut ledger, &p, 400).as_deref(), Some("a-0"));
}

/// MPS lets 48 clients compute on a GPU.
#[test]
fn last_mps_client_of_a_gpu_is_kept_for_a_nominated_pod() {
    for (others, fits) in [(46, true), (47, false)] {
        let mut ledger = Ledger::new(Config {
            compute: 200,
            ..Config::default()
        });
        ledger.apply_node(node("a"));
        ledger.apply_gpunode("a", report(&[mps(card("a-0", 1000))]), at(0));
        for number in 0..others {
            let pod = bound(&format!("other-{number}"), "a", "a-0", 1);
            ledger.apply_pod(client(pod));
        }
        ledger.apply_pod(PodFacts {
            nominated: Some("a".into()),
            ..waiting(10, computing(pod("p", 1), 1))
        });
        let late = computing(pod("late", 1), 1);
        let nodes = choose(&mut ledger, &late, &["a"], at(1));
        assert_eq!(!nodes.is_empty(), fits, "{others}");
    }
}

/// The same bound pod, which has a hundredth of its GPU's compute.
fn client(pod: PodFacts) -> PodFacts {
    let assignment = pod.assignment.clone().map(|it| {
        it.map(|it| {
            Arc::new(gpustow_api::Assignment {
                compute: 1,
                ..(*it).clone()
            })
        })
    });
    PodFacts {
        assignment,
        ..computing(pod, 1)
    }
}
