//! The borrowers that give memory back, their nodes, and the cost of a look for them.

use gpustow_api::PodFacts;
use gpustow_api::config::Action;
use gpustow_api::gpunode::PodUse;
use gpustow_ledger::{Config, Ledger};

use crate::act::Act as _;
use crate::build::{ask, at, bound, card, node, pod, report, used, waiting};
use crate::reclaim::{CARD, is, lent, refused, uses, victims, with_priority};

#[test]
fn borrowers_give_nothing_back_on_a_node_that_kube_scheduler_does_not_offer() {
    let mut ledger = lent(&[
        ("a", &[&[used("one", 90)]]),
        ("b", &[&[used("two", 90), used("three", 5)]]),
    ]);
    for (uid, card) in [("one", "a-0"), ("two", "b-0"), ("three", "b-0")] {
        ledger.apply_pod(bound(uid, &card[..1], card, 5));
    }
    // Whether it could come is not known: it is woken, and kube-scheduler asks.
    ledger.apply_pod(waiting(0, pod("p", 40)));
    ledger.reclaim(at(1));
    assert_eq!(victims(&ledger, 1), []);
    let woken = ledger.wake(9, at(1));
    assert_eq!(woken.iter().map(|pod| &*pod.uid).collect::<Vec<_>>(), ["p"]);
    // Something else bars it from a, where less would have to be given back.
    ledger.filter(&ask(&pod("p", 40)), &["b"], at(2));
    assert_eq!(victims(&ledger, 2), [is("p", "two", 85)]);
    // Then from b, too.
    ledger.filter(&ask(&pod("p", 40)), &["a"], at(3));
    ledger.reclaim(at(3));
    assert_eq!(victims(&ledger, 3), [is("p", "one", 85)]);
}

#[test]
fn the_pod_that_may_be_evicted_is_asked_before_one_whose_owner_softens_that() {
    let on_card = [used("soft", 65), used("hard", 35)];
    let of = |softens| {
        let mut ledger = Ledger::new(Config {
            reclaim: true,
            action: Action::Evict,
            owners_soften: softens,
            ..Config::default()
        });
        ledger.apply_node(node("a"));
        uses(&mut ledger, "a", &[&on_card], 0);
        ledger.apply_pod(PodFacts {
            action: Some(Action::Event),
            ..bound("soft", "a", "a-0", 10)
        });
        ledger.apply_pod(bound("hard", "a", "a-0", 10));
        refused(&mut ledger, &pod("p", 25), 0);
        victims(&ledger, 0)
    };
    assert_eq!(of(true), [is("p", "hard", 25)]);
    // Where owners may not, both are alike, and the larger borrower comes first.
    assert_eq!(of(false), [is("p", "soft", 55)]);
}

#[test]
fn a_pod_that_was_asked_without_result_shields_no_other() {
    let on_card = [used("low", 65), used("high", 35)];
    let mut ledger = lent(&[("a", &[&on_card])]);
    ledger.apply_pod(bound("low", "a", "a-0", 10));
    ledger.apply_pod(with_priority(1, bound("high", "a", "a-0", 10)));
    ledger.apply_pod(pod("p", 25));
    let asked = |ledger: &mut Ledger, second: u64| {
        uses(ledger, "a", &[&on_card], second);
        ledger.filter(&ask(&pod("p", 25)), &["a"], at(second));
        ledger.reclaim(at(second));
        victims(ledger, second)
    };
    assert_eq!(asked(&mut ledger, 0), [is("p", "low", 55)]);
    assert_eq!(asked(&mut ledger, 59), [is("p", "low", 55)]);
    // Its time is over; after a pause the other is asked.
    assert_eq!(asked(&mut ledger, 60), []);
    let again = (61..200).find(|second| !asked(&mut ledger, *second).is_empty());
    assert!(again.is_some_and(|second| second <= 122), "{again:?}");
    assert_eq!(victims(&ledger, again.unwrap()), [is("p", "high", 25)]);
}

#[test]
fn a_borrower_that_should_be_gone_shields_no_other() {
    let on_card = [used("stuck", 65), used("other", 35)];
    let mut ledger = lent(&[("a", &[&on_card])]);
    let stuck = PodFacts {
        deleting: true,
        gone_by: Some(1000),
        ..bound("stuck", "a", "a-0", 10)
    };
    ledger.apply_pod(stuck);
    ledger.apply_pod(bound("other", "a", "a-0", 10));
    ledger.tell_time(1000);
    refused(&mut ledger, &pod("p", 25), 0);
    // The memory that it uses is about to come.
    assert_eq!(
        (ledger.reclaims(at(0)).len(), victims(&ledger, 0)),
        (1, vec![])
    );
    ledger.tell_time(1060);
    ledger.reclaim(at(60));
    ledger.filter(&ask(&pod("p", 25)), &["a"], at(61));
    let second = (61..200).find(|second| {
        ledger.filter(&ask(&pod("p", 25)), &["a"], at(*second));
        ledger.reclaim(at(*second));
        !victims(&ledger, *second).is_empty()
    });
    assert_eq!(
        second.map(|second| victims(&ledger, second)),
        Some(vec![is("p", "other", 25)])
    );
}

#[test]
fn reclaim_serves_a_pod_behind_any_number_that_it_cannot_help() {
    let mut ledger = lent(&[("a", &[&[used("greedy", 90)]])]);
    ledger.apply_pod(bound("greedy", "a", "a-0", 30));
    for index in 0..100 {
        let hopeless = PodFacts {
            priority: 9,
            ..waiting(0, pod(&format!("hopeless{index:03}"), 101 + index))
        };
        ledger.apply_pod(hopeless);
    }
    ledger.apply_pod(PodFacts {
        reserved_on: Some("a".into()),
        ..waiting(0, pod("p", 60))
    });
    ledger.reclaim(at(1));
    assert_eq!(victims(&ledger, 1), [is("p", "greedy", 60)]);
}

#[test]
fn what_is_used_beyond_capacity_comes_back_first_and_from_the_same_gpu() {
    // The first card is overdrawn by 60, which no hardware allows; the headroom of a real one can be.
    let overdrawn = [used("x1", 60), used("x2", 60), used("x3", 40)];
    let other = [used("y", 90)];
    let mut ledger = lent(&[("a", &[&overdrawn, &other])]);
    for (uid, card) in [("x1", "a-0"), ("x2", "a-0"), ("x3", "a-0"), ("y", "a-1")] {
        ledger.apply_pod(bound(uid, "a", card, 5));
    }
    // One of y's is enough; on the first card it takes two.
    refused(&mut ledger, &pod("p", 40), 0);
    assert_eq!(victims(&ledger, 0), [is("p", "y", 85)]);
    ledger.delete_pod("p");
    ledger.delete_pod("y");
    ledger.apply_pod(bound("full", "a", "a-1", 90));
    uses(&mut ledger, "a", &[&overdrawn, &[used("full", 90)]], 1);
    refused(&mut ledger, &pod("p", 40), 1);
    // 40 are free once 100 of 160 have come back.
    assert_eq!(victims(&ledger, 1), [is("p", "x1", 55), is("p", "x2", 55)]);
}

#[test]
fn borrowers_that_use_the_headroom_give_that_back_too() {
    let mut ledger = lent(&[("a", &[&[]])]);
    ledger.apply_pod(bound("one", "a", "a-0", 10));
    ledger.apply_pod(bound("two", "a", "a-0", 10));
    let mut gpu = card("a-0", CARD);
    gpu.pods = vec![used("one", 40), used("two", 60)];
    let mut status = report(&[gpu]);
    status.headroom_mib = 10;
    ledger.apply_gpunode("a", status, at(0));
    // 10 beyond capacity and 50 for the pod: neither of them has that alone.
    refused(&mut ledger, &pod("p", 50), 0);
    assert_eq!(
        victims(&ledger, 0),
        [is("p", "one", 30), is("p", "two", 50)]
    );
}

/// The highest cost of one look, and the number of looks after which the last of these pods was asked for.
fn work_of(nodes: usize) -> (u64, u64) {
    const PODS: usize = 4;
    let names: Vec<String> = (0..nodes).map(|index| format!("n{index:04}")).collect();
    let on_card = [used("", 90)];
    let cards: Vec<&[PodUse]> = vec![&on_card; 8];
    let sizes: Vec<(&str, &[&[PodUse]])> = names
        .iter()
        .map(|name| (name.as_str(), cards.as_slice()))
        .collect();
    let mut ledger = lent(&sizes);
    for name in &names {
        let mut gpus = Vec::new();
        for gpu in 0..8 {
            let uuid = format!("{name}-{gpu}");
            ledger.apply_pod(bound(&uuid, name, &uuid, 10));
            let mut gpu = card(&uuid, CARD);
            gpu.pods = vec![used(&uuid, 95)];
            gpus.push(gpu);
        }
        let mut status = report(&gpus);
        status.heartbeat = Some("1".to_owned());
        ledger.apply_gpunode(name, status, at(1));
    }
    for (index, name) in names.iter().enumerate().take(PODS) {
        ledger.apply_pod(PodFacts {
            reserved_on: Some(name.as_str().into()),
            ..waiting(0, pod(&format!("p{index:02}"), 20 + index as u64))
        });
    }
    let (mut most, mut looks) = (0, 0);
    while ledger.reclaims(at(1)).len() < PODS {
        let before = ledger.work();
        ledger.reclaim(at(1));
        most = most.max(ledger.work() - before);
        looks += 1;
        assert!(looks < 1000, "{nodes} nodes");
    }
    (most, looks)
}

#[test]
fn a_look_costs_the_same_in_a_cluster_of_any_size_and_goes_on_where_it_stopped() {
    let small = work_of(100);
    let large = work_of(1000);
    for (most, looks) in [small, large] {
        assert!(most < 52_000, "{most} in one of {looks} looks");
    }
    assert!(small.1 < large.1 && large.1 < 200, "{small:?} {large:?}");
}
