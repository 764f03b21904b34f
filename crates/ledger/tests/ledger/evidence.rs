//! No pod ends or moves for another but where kube-scheduler offered the node for it, and one that cannot be helped
//! keeps no other from being helped.

use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_ledger::{Config, Ledger};

use crate::act::Act as _;
use crate::build::{asking, at, bound, card, choose, node, offer_all, report, waiting, waits};

/// A ledger that preempts, with these nodes and the sizes of their cards. On each card is a pod of priority 1 that holds
/// 40, and is named like the card.
pub(crate) fn ledger(nodes: &[(&str, &[u64])]) -> Ledger {
    let config = Config {
        preempt_fragmented: true,
        ..Config::default()
    };
    of(config, nodes)
}

fn of(config: Config, nodes: &[(&str, &[u64])]) -> Ledger {
    let mut ledger = Ledger::new(config);
    for (name, sizes) in nodes {
        ledger.apply_node(node(name));
        report_of(&mut ledger, name, sizes, 0);
        for index in 0..sizes.len() {
            let uid = format!("{name}-{index}");
            ledger.apply_pod(low(&uid));
        }
    }
    ledger
}

pub(crate) fn report_of(ledger: &mut Ledger, name: &str, sizes: &[u64], second: u64) {
    let card = |(index, &size)| card(&format!("{name}-{index}"), size);
    let cards: Vec<_> = sizes.iter().enumerate().map(card).collect();
    let mut status = report(&cards);
    status.heartbeat = Some(second.to_string());
    ledger.apply_gpunode(name, status, at(second));
}

pub(crate) fn low(card: &str) -> PodFacts {
    let node = card.split('-').next().unwrap_or_default();
    PodFacts {
        priority: 1,
        evictable: Some("its-replicaset".into()),
        ..bound(card, node, card, 40)
    }
}

pub(crate) fn named(pods: &[Arc<PodFacts>]) -> Vec<String> {
    pods.iter().map(|pod| pod.uid.to_string()).collect()
}

/// Looks at each of these seconds. The first pod that is decided for, when, where, and who ends.
pub(crate) fn first_decision(
    ledger: &mut Ledger,
    seconds: std::ops::Range<u64>,
) -> Option<(u64, String, String, Vec<String>)> {
    for second in seconds {
        ledger.fragmented(at(second));
        if let Some(it) = ledger.preemptions(at(second)).first() {
            let (pod, node) = (it.pod.uid.to_string(), it.node.to_string());
            return Some((second, pod, node, named(&it.victims)));
        }
    }
    None
}

pub(crate) const TWO: &[u64] = &[100, 100];

#[test]
fn no_pod_ends_on_a_node_that_kube_scheduler_does_not_offer() {
    let mut ledger = ledger(&[("a", TWO), ("b", TWO)]);
    let p = waits("p", 80);
    ledger.apply_pod(p.clone());
    assert_eq!(first_decision(&mut ledger, 0..10), None, "never asked");
    // On b kube-scheduler refuses it: a port, or a sibling.
    for second in 10..20 {
        assert!(choose(&mut ledger, &p, &["a"], at(second)).is_empty());
    }
    for uid in ["a-0", "a-1"] {
        ledger.apply_pod(PodFacts {
            priority: 10,
            ..low(uid)
        });
    }
    assert_eq!(first_decision(&mut ledger, 20..50), None, "not on b");
    assert!(choose(&mut ledger, &p, &["a", "b"], at(50)).is_empty());
    let decided = first_decision(&mut ledger, 50..60);
    assert_eq!(decided.map(|it| it.2).as_deref(), Some("b"));
}

#[test]
fn a_node_that_was_offered_and_then_refused_has_no_victims() {
    let mut ledger = ledger(&[("a", TWO)]);
    let p = |refusal| PodFacts {
        refusal,
        ..waits("p", 80)
    };
    ledger.apply_pod(p(0));
    assert!(choose(&mut ledger, &p(0), &["a"], at(0)).is_empty());
    ledger.apply_pod(p(1));
    // kube-scheduler tries again, and no node passes its own filters.
    ledger.apply_pod(p(2));
    assert_eq!(first_decision(&mut ledger, 1..30), None);
    assert!(choose(&mut ledger, &p(2), &["a"], at(30)).is_empty());
    assert!(first_decision(&mut ledger, 30..35).is_some());
}

#[test]
fn a_node_that_is_refused_after_the_choice_has_no_more_victims() {
    let mut ledger = ledger(&[("a", TWO), ("b", TWO)]);
    let p = waits("p", 80);
    ledger.apply_pod(p.clone());
    assert!(choose(&mut ledger, &p, &["a"], at(0)).is_empty());
    let (second, _, node, victims) = first_decision(&mut ledger, 0..5).unwrap();
    assert_eq!((&*node, victims.len()), ("a", 1));
    // A sibling came to a meanwhile.
    assert!(choose(&mut ledger, &p, &["b"], at(second + 1)).is_empty());
    let all = ledger.preemptions(at(second + 1));
    assert!(all.iter().all(|it| it.victims.is_empty()));
    // The room is given up, and no pod ends on b before a pause.
    assert_eq!(first_decision(&mut ledger, second + 2..second + 30), None);
}

#[test]
fn evidence_that_is_too_old_wakes_the_pod_and_no_more_often_than_once_a_minute() {
    let mut ledger = ledger(&[("a", TWO)]);
    let p = waits("p", 80);
    ledger.apply_pod(p.clone());
    let mut woken = Vec::new();
    for second in 0..400 {
        report_of(&mut ledger, "a", TWO, second);
        assert_eq!(first_decision(&mut ledger, second..second + 1), None);
        let names = named(&ledger.wake(9, at(second)));
        woken.extend(names.iter().map(|_| second));
    }
    assert_eq!(woken.len(), 3, "{woken:?}");
    assert!(woken[0] <= 2 && woken[1] - woken[0] >= 60, "{woken:?}");
    // It asks.
    assert!(choose(&mut ledger, &p, &["a"], at(400)).is_empty());
    assert!(first_decision(&mut ledger, 400..405).is_some());
}

#[test]
fn room_on_a_node_that_kube_scheduler_refuses_is_no_room() {
    let mut ledger = ledger(&[("a", TWO)]);
    ledger.apply_node(node("b"));
    report_of(&mut ledger, "b", TWO, 0);
    let p = waits("p", 80);
    ledger.apply_pod(p.clone());
    assert!(choose(&mut ledger, &p, &["a"], at(0)).is_empty());
    let decided = first_decision(&mut ledger, 0..5);
    assert_eq!(decided.map(|it| it.2).as_deref(), Some("a"));
}

#[test]
fn a_pod_that_never_terminates_keeps_no_other_node_from_having_victims() {
    let mut ledger = ledger(&[("a", &[100]), ("b", TWO)]);
    ledger.apply_pod(PodFacts {
        deleting: true,
        ..low("a-0")
    });
    ledger.apply_pod(waits("p", 80));
    let decided = (0..120).find_map(|second| {
        if second % 30 == 0 {
            offer_all(&mut ledger, at(second));
            report_of(&mut ledger, "a", &[100], second);
            report_of(&mut ledger, "b", TWO, second);
        }
        first_decision(&mut ledger, second..second + 1)
    });
    // For a minute its room may come.
    let (second, _, node, _) = decided.unwrap();
    assert!((60..65).contains(&second), "{second}");
    assert_eq!(node, "b");
}

#[test]
fn a_pod_that_is_late_does_not_count_as_leaving() {
    let deleted = |ledger: &mut Ledger| {
        ledger.apply_pod(PodFacts {
            deleting: true,
            gone_by: Some(1_000),
            ..low("a-0")
        });
        ledger.apply_pod(waits("p", 80));
        offer_all(ledger, at(0));
    };
    for (unix, ends) in [(1_055, false), (1_060, true)] {
        let mut ledger = ledger(&[("a", TWO)]);
        deleted(&mut ledger);
        ledger.tell_time(unix);
        let decided = first_decision(&mut ledger, 0..3);
        assert_eq!(decided.is_some(), ends, "{unix}");
        assert!(decided.is_none_or(|it| it.3 == ["a-1"]));
    }
}

#[test]
fn seventeen_kinds_that_may_not_keep_no_pod_behind_them_from_having_victims() {
    let mut ledger = ledger(&[("a", TWO)]);
    for number in 0..17 {
        ledger.apply_pod(PodFacts {
            priority: 1000,
            preempts: false,
            ..waits(&format!("never{number}"), 70 + number)
        });
    }
    ledger.apply_pod(waits("p", 95));
    offer_all(&mut ledger, at(0));
    let decided = first_decision(&mut ledger, 0..5);
    assert_eq!(decided.map(|it| it.1).as_deref(), Some("p"));
}

#[test]
fn seventeen_kinds_that_cannot_be_helped_keep_no_pod_behind_them_from_it() {
    let mut ledger = ledger(&[("a", TWO)]);
    for number in 0..17 {
        ledger.apply_pod(PodFacts {
            priority: 1000,
            ..waits(&format!("large{number}"), 101 + number)
        });
    }
    ledger.apply_pod(waits("p", 95));
    offer_all(&mut ledger, at(0));
    let decided = first_decision(&mut ledger, 0..10);
    assert_eq!(decided.map(|it| it.1).as_deref(), Some("p"));
}

#[test]
fn a_reservation_keeps_no_pod_from_having_victims() {
    let config = Config {
        preempt_fragmented: true,
        reserve_after: Some(at(60)),
        ..Config::default()
    };
    let mut ledger = of(config, &[("a", TWO)]);
    ledger.apply_pod(waits("p", 80));
    offer_all(&mut ledger, at(0));
    ledger.tell_time(1_000);
    ledger.keep_reservations(at(0));
    assert_eq!(ledger.reservations().len(), 1);
    assert!(first_decision(&mut ledger, 0..5).is_some());
}

#[test]
fn what_kube_scheduler_could_do_and_does_not_is_waited_for_a_minute() {
    let mut ledger = ledger(&[("a", TWO), ("b", &[40])]);
    let p = waits("p", 80);
    ledger.apply_pod(PodFacts {
        priority: 1,
        ..bound("full", "c", "c-0", 90)
    });
    ledger.apply_node(node("c"));
    report_of(&mut ledger, "c", &[100], 0);
    ledger.apply_pod(p.clone());
    let decided = (0..120).find_map(|second| {
        if second % 30 == 0 {
            assert!(choose(&mut ledger, &p, &["a"], at(second)).is_empty());
            report_of(&mut ledger, "a", TWO, second);
            report_of(&mut ledger, "c", &[100], second);
        }
        first_decision(&mut ledger, second..second + 1)
    });
    let (second, _, node, _) = decided.unwrap();
    assert!((60..65).contains(&second), "{second}");
    assert_eq!(node, "a");
}

#[test]
fn a_controller_whose_pods_come_and_go_has_no_more_victims_than_one_pod() {
    let nodes: Vec<String> = (0..30).map(|number| format!("n{number}")).collect();
    let sizes: Vec<(&str, &[u64])> = nodes.iter().map(|name| (name.as_str(), TWO)).collect();
    let mut ledger = ledger(&sizes);
    let mut decided = 0;
    for second in 0..1800_u64 {
        let pod = PodFacts {
            controller: Some("job".into()),
            ..waits(&format!("p{}", second / 20), 80)
        };
        if second % 20 == 0 {
            let old = (second / 20).checked_sub(1);
            old.into_iter()
                .for_each(|old| ledger.delete_pod(&format!("p{old}")));
            ledger.apply_pod(pod.clone());
            sizes
                .iter()
                .for_each(|(name, sizes)| report_of(&mut ledger, name, sizes, second));
            offer_all(&mut ledger, at(second));
        }
        let before = ledger.preemptions(at(second)).len();
        decided +=
            usize::from(before == 0 && first_decision(&mut ledger, second..second + 1).is_some());
    }
    assert!((2..=6).contains(&decided), "{decided}");
}

/// The most that one look cost, and in which second the pod behind sixteen others that cannot be helped was.
fn looks(nodes: usize, gpus: u32) -> (u64, u64) {
    // Of two cards 120 are free, of three 180.
    let (cards, mib): (&[u64], u64) = match gpus {
        1 => (TWO, 95),
        _ => (&[100, 100, 100], 85),
    };
    let names: Vec<String> = (0..nodes).map(|number| format!("n{number}")).collect();
    let sizes: Vec<(&str, &[u64])> = names.iter().map(|name| (name.as_str(), cards)).collect();
    let mut ledger = ledger(&sizes);
    for number in 0..16 {
        ledger.apply_pod(PodFacts {
            priority: 1000,
            ..waits(&format!("large{number}"), 101 + number)
        });
    }
    let p = waiting(10, asking("p", &[(gpus, mib)]));
    ledger.apply_pod(p);
    let mut most = 0;
    for second in 0..100 {
        if second % 25 == 0 {
            sizes
                .iter()
                .for_each(|(name, sizes)| report_of(&mut ledger, name, sizes, second));
            offer_all(&mut ledger, at(second));
        }
        let before = ledger.work();
        ledger.fragmented(at(second));
        most = most.max(ledger.work() - before);
        if !ledger.preemptions(at(second)).is_empty() {
            return (most, second);
        }
    }
    (most, u64::MAX)
}

#[test]
fn one_look_costs_no_more_with_a_thousand_nodes_than_with_a_hundred() {
    for gpus in [1, 2] {
        let (few, soon) = looks(100, gpus);
        let (many, later) = looks(1000, gpus);
        println!("{gpus} GPUs: {few} and {many} a look, after {soon} and {later} s");
        assert!(few <= 8_500 && many <= 8_500, "{few} and {many}");
        assert!(later < 60, "{later}");
    }
}

#[test]
fn question_of_who_ends_costs_no_more_on_1000_nodes_than_on_100() {
    for nodes in [100, 1000] {
        let names: Vec<String> = (0..nodes).map(|number| format!("n{number}")).collect();
        let sizes: Vec<(&str, &[u64])> = names.iter().map(|name| (&**name, TWO)).collect();
        let mut ledger = ledger(&sizes);
        ledger.apply_pod(waits("p", 80));
        offer_all(&mut ledger, at(0));
        let decided = first_decision(&mut ledger, 0..60);
        let second = decided.unwrap().0 + 1;
        let ask = |ledger: &mut Ledger| {
            let before = ledger.work();
            let all = ledger.preemptions(at(second));
            let victims = all.iter().map(|it| it.victims.len()).sum::<usize>();
            (victims, ledger.work() - before)
        };
        let (victims, cost) = ask(&mut ledger);
        assert_eq!(victims, 1, "{nodes} nodes");
        assert!(cost <= 64, "{nodes} nodes: {cost}");
        // The pod has room on another node.
        ledger.delete_pod("n7-1");
        let (victims, cost) = ask(&mut ledger);
        assert_eq!(victims, 0, "{nodes} nodes");
        assert!(cost <= 64, "{nodes} nodes: {cost}");
        // Many nodes gain room that does not suffice: no pod ends before all of them were looked at.
        ledger.apply_pod(low("n7-1"));
        for name in &names[..nodes - 20] {
            report_of(&mut ledger, name, &[100, 110], second);
        }
        assert_eq!(ask(&mut ledger).0, 0, "{nodes} nodes");
        (0..5).for_each(|_| drop(ledger.fragmented(at(second))));
        let (victims, cost) = ask(&mut ledger);
        assert_eq!(victims, 1, "{nodes} nodes");
        assert!(cost <= 64, "{nodes} nodes: {cost}");
    }
}
