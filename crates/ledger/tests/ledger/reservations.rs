//! Memory is reserved for a pod that has waited long.

use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_ledger::{Config, Ended, Ledger, Reason};
use gpustow_pack::Refusal;

use crate::act::Act as _;
use crate::build::{ask, asking, at, bound, card, choose, joins, node, pod, report};

const CARD: u64 = 100;
/// Seconds that a pod waits before it gets a reservation, and that a reservation is waited for.
pub(crate) const AFTER: u64 = 120;
const LASTS: u64 = 1000;

/// A ledger that reserves, with that many cards of 100 on each node.
pub(crate) fn keeping(nodes: &[(&str, usize)], config: Config) -> Ledger {
    let mut ledger = Ledger::new(Config {
        reserve_after: Some(at(AFTER)),
        reserve_give_up_after: at(LASTS),
        reserve_max_percent: 100,
        stale_after: Duration::MAX,
        ..config
    });
    for (name, cards) in nodes {
        ledger.apply_node(node(name));
        let card = |index| card(&format!("{name}-{index}"), CARD);
        let cards: Vec<_> = (0..*cards).map(card).collect();
        ledger.apply_gpunode(name, report(&cards), at(0));
    }
    ledger
}

/// The pod is created then, asks on these nodes, and is refused.
fn waits(ledger: &mut Ledger, pod: PodFacts, nodes: &[&str], second: i64) -> PodFacts {
    let pod = PodFacts {
        created: second,
        ..pod
    };
    ledger.apply_pod(pod.clone());
    assert_eq!(choose(ledger, &pod, nodes, at(0)), [""; 0]);
    pod
}

pub(crate) fn keep(ledger: &mut Ledger, second: u64) {
    ledger.tell_time(second as i64);
    ledger.keep_reservations(at(second));
}

/// Which pods have reservations, and where.
fn reservations(ledger: &Ledger) -> Vec<(String, String)> {
    let all = ledger.reservations().into_iter();
    all.map(|it| (it.pod.uid.to_string(), it.node.to_string()))
        .collect()
}

fn is(uid: &str, node: &str) -> (String, String) {
    (uid.to_owned(), node.to_owned())
}

fn refusals(ledger: &mut Ledger, pod: &PodFacts, nodes: &[&'static str]) -> Vec<Reason> {
    ledger.apply_pod(pod.clone());
    let verdict = ledger.filter(&ask(pod), nodes, at(AFTER));
    assert_eq!(verdict.nodes, [""; 0]);
    verdict.refused.into_iter().map(|(_, why)| why).collect()
}

/// At most one reservation.
fn one_at_a_time() -> Config {
    Config {
        reserve_max: 1,
        ..Config::default()
    }
}

#[test]
fn what_comes_free_is_kept_for_the_pod_that_waited_until_it_fits() {
    let mut ledger = keeping(&[("a", 2)], Config::default());
    ledger.apply_pod(bound("one", "a", "a-0", 60));
    ledger.apply_pod(bound("two", "a", "a-1", 60));
    let large = waits(&mut ledger, asking("large", &[(2, 100)]), &["a"], 0);
    keep(&mut ledger, AFTER - 1);
    assert_eq!(reservations(&ledger), []);
    keep(&mut ledger, AFTER);
    assert_eq!(reservations(&ledger), [is("large", "a")]);
    let victims = ledger.reservation("large").map(|place| place.victims.len());
    assert_eq!(victims, Some(2));
    // Neither the free memory of now nor memory that comes free goes to a pod that came later.
    let late = pod("late", 40);
    assert_eq!(refusals(&mut ledger, &late, &["a"]), [Reason::Reserved]);
    assert_eq!(ledger.explain(&late, "a", at(AFTER)), Err(Reason::Reserved));
    ledger.delete_pod("one");
    assert_eq!(refusals(&mut ledger, &late, &["a"]), [Reason::Reserved]);
    assert_eq!(refusals(&mut ledger, &large, &["a"]).len(), 1);
    ledger.delete_pod("two");
    let woken = ledger.wake(10, at(AFTER));
    let woken: Vec<&str> = woken.iter().map(|pod| &*pod.uid).collect();
    assert_eq!(woken, ["large"]);
    assert_eq!(choose(&mut ledger, &large, &["a"], at(AFTER)), ["a"]);
    assert_eq!(reservations(&ledger), []);
    let given_up = Ended::GIVEN_UP.map(|cause| ledger.given_up(cause));
    assert_eq!(given_up, [0; 4]);
}

#[test]
fn the_place_is_where_the_fewest_have_to_end_and_moves_to_a_better_one() {
    let mut ledger = keeping(&[("a", 1), ("b", 1)], Config::default());
    for (uid, node, mib) in [
        ("1", "a", 30),
        ("2", "a", 30),
        ("3", "b", 70),
        ("4", "b", 5),
    ] {
        ledger.apply_pod(bound(uid, node, &format!("{node}-0"), mib));
    }
    // On b one has to end, on a both.
    waits(&mut ledger, pod("p", 95), &["a", "b"], 0);
    keep(&mut ledger, AFTER);
    assert_eq!(reservations(&ledger), [is("p", "b")]);
    // On a one is left that has to end, too: that is no better.
    ledger.delete_pod("1");
    keep(&mut ledger, AFTER + 1);
    assert_eq!(reservations(&ledger), [is("p", "b")]);
    // A second one comes to b around us.
    ledger.apply_pod(bound("5", "b", "b-0", 25));
    keep(&mut ledger, AFTER + 2);
    keep(&mut ledger, AFTER + 3);
    assert_eq!(reservations(&ledger), [is("p", "a")]);
    assert_eq!(ledger.given_up(Ended::Better), 1);
}

#[test]
fn higher_priority_gets_the_room_all_the_same() {
    let mut ledger = keeping(&[("a", 1)], Config::default());
    ledger.apply_pod(bound("one", "a", "a-0", 60));
    waits(&mut ledger, pod("p", 100), &["a"], 0);
    keep(&mut ledger, AFTER);
    let equal = pod("equal", 40);
    assert_eq!(refusals(&mut ledger, &equal, &["a"]), [Reason::Reserved]);
    let higher = PodFacts {
        priority: 1,
        ..pod("higher", 40)
    };
    ledger.apply_pod(higher.clone());
    assert_eq!(choose(&mut ledger, &higher, &["a"], at(AFTER)), ["a"]);
}

#[test]
fn places_are_few_and_the_first_in_turn_have_them() {
    let bounded = Config {
        reserve_max: 2,
        ..Config::default()
    };
    let mut ledger = keeping(&[("a", 1), ("b", 1), ("c", 1)], bounded);
    for name in ["a", "b", "c"] {
        ledger.apply_pod(bound(name, name, &format!("{name}-0"), 60));
    }
    let nodes = ["a", "b", "c"];
    for (uid, created) in [("third", 3), ("first", 1), ("second", 2)] {
        // Of one kind one pod is found in a look: these are three kinds.
        waits(&mut ledger, pod(uid, 90 + created), &nodes, created as i64);
    }
    keep(&mut ledger, AFTER + 3);
    assert_eq!(reservations(&ledger), [is("first", "a"), is("second", "b")]);
    let higher = PodFacts {
        priority: 1,
        ..pod("higher", 99)
    };
    waits(&mut ledger, higher, &nodes, 4);
    keep(&mut ledger, AFTER + 4);
    let uids: Vec<String> = reservations(&ledger)
        .into_iter()
        .map(|(uid, _)| uid)
        .collect();
    assert_eq!(uids, ["first", "higher"]);
    assert_eq!(ledger.given_up(Ended::Overtaken), 1);
}

#[test]
fn places_are_a_small_part_of_the_cluster_but_for_the_first() {
    let mut ledger = Ledger::new(Config {
        reserve_after: Some(at(AFTER)),
        reserve_max_percent: 50,
        ..Config::default()
    });
    for name in ["a", "b", "c"] {
        joins(&mut ledger, name, &[CARD; 2]);
        for index in 0..2 {
            let uuid = format!("{name}-{index}");
            ledger.apply_pod(bound(&uuid, name, &uuid, 60));
        }
    }
    let nodes = ["a", "b", "c"];
    for (uid, gpus) in [("p0", 2), ("p1", 2), ("p2", 1)] {
        waits(&mut ledger, asking(uid, &[(gpus, 99)]), &nodes, 0);
    }
    keep(&mut ledger, AFTER);
    let uids: Vec<String> = reservations(&ledger)
        .into_iter()
        .map(|(uid, _)| uid)
        .collect();
    assert_eq!(uids, ["p0", "p2"], "half of six cards are three");
}

#[test]
fn what_does_not_come_free_in_time_is_given_up_for_other_cards() {
    let mut ledger = keeping(&[("a", 1), ("b", 1)], Config::default());
    ledger.apply_pod(bound("one", "a", "a-0", 60));
    ledger.apply_pod(bound("two", "b", "b-0", 60));
    waits(&mut ledger, pod("p", 100), &["a", "b"], 0);
    keep(&mut ledger, AFTER);
    assert_eq!(reservations(&ledger), [is("p", "a")]);
    keep(&mut ledger, AFTER + LASTS - 1);
    assert_eq!(reservations(&ledger), [is("p", "a")]);
    keep(&mut ledger, AFTER + LASTS);
    assert_eq!(reservations(&ledger), [is("p", "b")]);
    assert_eq!(ledger.given_up(Ended::Late), 1);
    // For a minute nothing is kept then; after that the first ones are tried again.
    let both = AFTER + 2 * LASTS;
    for second in [both, both + 1, both + 60] {
        keep(&mut ledger, second);
        assert_eq!(reservations(&ledger), [], "at {second}");
    }
    keep(&mut ledger, both + 61);
    assert_eq!(reservations(&ledger), [is("p", "a")]);
}

#[test]
fn a_place_ends_with_its_pod_and_with_its_node() {
    let mut ledger = keeping(&[("a", 1)], Config::default());
    ledger.apply_pod(bound("one", "a", "a-0", 60));
    waits(&mut ledger, pod("p", 100), &["a"], 0);
    keep(&mut ledger, AFTER);
    ledger.delete_pod("p");
    assert_eq!(reservations(&ledger), []);
    let late = pod("late", 40);
    ledger.apply_pod(late.clone());
    assert_eq!(choose(&mut ledger, &late, &["a"], at(AFTER)), ["a"]);
    waits(&mut ledger, pod("q", 100), &["a"], 0);
    keep(&mut ledger, AFTER);
    assert_eq!(reservations(&ledger), [is("q", "a")]);
    ledger.delete_gpunode("a");
    keep(&mut ledger, AFTER + 1);
    assert_eq!(reservations(&ledger), []);
    assert_eq!(ledger.given_up(Ended::Unfit), 1);
}

#[test]
fn no_pod_gets_a_place_that_can_never_fit_or_that_fits() {
    let mut ledger = keeping(&[("a", 1)], Config::default());
    ledger.apply_pod(bound("one", "a", "a-0", 60));
    waits(&mut ledger, pod("large", 101), &["a"], 0);
    waits(&mut ledger, asking("many", &[(2, 10)]), &["a"], 0);
    waits(&mut ledger, pod("p", 100), &["a"], 0);
    ledger.delete_pod("one");
    keep(&mut ledger, AFTER);
    assert_eq!(reservations(&ledger), []);
}

#[test]
fn of_pods_that_ask_for_the_same_the_first_takes_the_place_that_is_free_first() {
    let mut ledger = keeping(&[("a", 1), ("b", 1)], Config::default());
    ledger.apply_pod(bound("one", "a", "a-0", 60));
    ledger.apply_pod(bound("two", "b", "b-0", 60));
    let first = waits(&mut ledger, pod("first", 100), &["a", "b"], 0);
    let second = waits(&mut ledger, pod("second", 100), &["a", "b"], 1);
    keep(&mut ledger, AFTER);
    keep(&mut ledger, AFTER + 1);
    assert_eq!(reservations(&ledger), [is("first", "a"), is("second", "b")]);
    ledger.delete_pod("two");
    assert_eq!(choose(&mut ledger, &first, &["b"], at(AFTER)), ["b"]);
    assert_eq!(refusals(&mut ledger, &second, &["b"]).len(), 1);
}

#[test]
fn without_a_place_the_reason_is_what_it_is_without_places() {
    let mut ledger = keeping(&[("a", 2)], Config::default());
    ledger.apply_pod(bound("one", "a", "a-0", 60));
    waits(&mut ledger, asking("p", &[(2, 100)]), &["a"], 0);
    keep(&mut ledger, AFTER);
    let late = pod("late", 101);
    let reasons = refusals(&mut ledger, &late, &["a"]);
    assert_eq!(reasons, [Reason::Fit(Refusal::TooLarge)]);
}

/// A ledger with so many nodes of so many GPUs, each of which one pod holds in part.
fn full(nodes: usize, gpus: usize, config: Config) -> (Ledger, Vec<String>) {
    let names: Vec<String> = (0..nodes).map(|index| format!("n{index:04}")).collect();
    let sizes: Vec<(&str, usize)> = names.iter().map(|name| (name.as_str(), gpus)).collect();
    let mut ledger = keeping(&sizes, config);
    for name in &names {
        for gpu in 0..gpus {
            let uuid = format!("{name}-{gpu}");
            ledger.apply_pod(bound(&uuid, name, &uuid, 60));
        }
    }
    (ledger, names)
}

fn named(names: &[String]) -> Vec<&str> {
    names.iter().map(String::as_str).collect()
}

#[test]
fn a_pod_that_no_node_could_hold_takes_no_reservation_from_others() {
    let (mut ledger, names) = full(2, 2, one_at_a_time());
    let nodes = named(&names);
    let hopeless = PodFacts {
        priority: 9,
        ..asking("hopeless", &[(64, 10)])
    };
    waits(&mut ledger, hopeless, &nodes, 0);
    waits(&mut ledger, asking("p", &[(2, 100)]), &nodes, 1);
    keep(&mut ledger, AFTER + 1);
    assert_eq!(reservations(&ledger), [is("p", "n0000")]);
}

#[test]
fn a_pod_whose_gpus_were_all_tried_takes_no_reservation_from_others() {
    let mut ledger = keeping(&[("a", 1), ("b", 1)], one_at_a_time());
    ledger.apply_pod(bound("one", "a", "a-0", 60));
    ledger.apply_pod(bound("two", "b", "b-0", 60));
    waits(&mut ledger, pod("p", 100), &["a", "b"], 0);
    keep(&mut ledger, AFTER);
    keep(&mut ledger, AFTER + LASTS);
    assert_eq!(reservations(&ledger), [is("p", "b")]);
    waits(&mut ledger, pod("q", 99), &["a", "b"], 1);
    keep(&mut ledger, AFTER + 2 * LASTS);
    assert_eq!(reservations(&ledger), [is("q", "a")]);
}

#[test]
fn a_reservation_of_which_all_is_free_ends_after_a_minute_and_others_come_first() {
    let mut ledger = keeping(&[("a", 1), ("b", 1)], one_at_a_time());
    ledger.apply_pod(bound("one", "a", "a-0", 60));
    ledger.apply_pod(bound("bit", "a", "a-0", 10));
    ledger.apply_pod(bound("two", "b", "b-0", 70));
    let higher = PodFacts {
        priority: 9,
        ..pod("p", 90)
    };
    waits(&mut ledger, higher, &["a", "b"], 0);
    keep(&mut ledger, AFTER);
    assert_eq!(reservations(&ledger), [is("p", "a")]);
    ledger.delete_pod("one");
    let free = AFTER + 10;
    keep(&mut ledger, free);
    let until = ledger.reservation("p").map(|place| place.until);
    assert_eq!(until, Some(at(free + 60)));
    // While others hold some of it, it is awaited like any other.
    ledger.apply_pod(bound("three", "a", "a-0", 10));
    keep(&mut ledger, free + 59);
    ledger.delete_pod("three");
    waits(&mut ledger, pod("q", 95), &["b"], 1);
    for second in [free + 60, free + 119] {
        keep(&mut ledger, second);
        assert_eq!(reservations(&ledger), [is("p", "a")], "at {second}");
    }
    keep(&mut ledger, free + 120);
    assert_eq!(reservations(&ledger), [is("q", "a")]);
    assert_eq!(ledger.given_up(Ended::Late), 1);
    // A minute later the pod would be tried elsewhere, but others stand before it now.
    keep(&mut ledger, free + 181);
    assert_eq!(reservations(&ledger), [is("q", "a")]);
    ledger.delete_pod("q");
    ledger.apply_pod(bound("four", "a", "a-0", 50));
    keep(&mut ledger, free + 182);
    assert_eq!(reservations(&ledger), [is("p", "b")]);
}

#[test]
fn a_pod_that_fits_and_does_not_come_has_its_reservation_for_a_minute() {
    let mut ledger = keeping(&[("a", 1)], Config::default());
    ledger.apply_pod(bound("one", "a", "a-0", 60));
    waits(&mut ledger, pod("p", 100), &["a"], 0);
    keep(&mut ledger, AFTER);
    // After that it fits there like any other, and does not need a reservation.
    ledger.delete_pod("one");
    let mut kept = 0;
    for second in AFTER + 1..AFTER + 3600 {
        keep(&mut ledger, second);
        kept += reservations(&ledger).len();
    }
    assert_eq!(kept, 60);
}

#[test]
fn a_pod_behind_any_number_of_others_that_cannot_have_one_gets_a_reservation() {
    let (mut ledger, names) = full(2, 2, Config::default());
    let nodes = named(&names);
    for index in 0..100_u32 {
        let hopeless = asking(&format!("hopeless{index:03}"), &[(3 + index, 10)]);
        waits(&mut ledger, hopeless, &nodes, 0);
    }
    // These have not waited for long enough.
    for index in 0..100 {
        waits(
            &mut ledger,
            pod(&format!("new{index:03}"), 41 + index % 50),
            &nodes,
            50,
        );
    }
    waits(&mut ledger, asking("p", &[(2, 100)]), &nodes, 1);
    keep(&mut ledger, AFTER + 1);
    assert_eq!(reservations(&ledger), [is("p", "n0000")]);
}

#[test]
fn a_pod_of_higher_priority_takes_the_reservation_where_there_is_no_other_node() {
    let mut ledger = keeping(&[("a", 1), ("b", 1)], Config::default());
    ledger.apply_pod(bound("one", "a", "a-0", 60));
    ledger.apply_pod(bound("two", "b", "b-0", 60));
    waits(&mut ledger, pod("p", 100), &["a", "b"], 0);
    waits(&mut ledger, pod("q", 99), &["a", "b"], 1);
    keep(&mut ledger, AFTER + 1);
    assert_eq!(reservations(&ledger), [is("p", "a"), is("q", "b")]);
    let higher = PodFacts {
        priority: 1,
        ..pod("higher", 98)
    };
    waits(&mut ledger, higher, &["a", "b"], 2);
    keep(&mut ledger, AFTER + 2);
    let uids: Vec<String> = reservations(&ledger)
        .into_iter()
        .map(|(uid, _)| uid)
        .collect();
    assert_eq!(uids.len(), 2);
    assert!(uids.contains(&"higher".to_owned()), "{uids:?}");
    assert_eq!(ledger.given_up(Ended::Overtaken), 1);
}

#[test]
fn a_pod_that_is_being_ungated_counts_as_one_that_has_a_reservation() {
    let bounded = Config {
        queue: true,
        ..one_at_a_time()
    };
    let mut ledger = keeping(&[("a", 1), ("b", 1)], bounded);
    for node in ["a", "b"] {
        ledger.apply_pod(bound(node, node, &format!("{node}-0"), 60));
    }
    for (uid, created) in [("p", 0), ("q", 1)] {
        ledger.apply_pod(PodFacts {
            queued: true,
            created,
            ..pod(uid, 100 - created as u64)
        });
    }
    ledger.wake(9, at(0));
    keep(&mut ledger, AFTER + 1);
    assert_eq!(reservations(&ledger), [is("p", "a")]);
    // Its gate is taken off, which the watch has not shown yet.
    ledger.delete_pod("a");
    let ungated = ledger.wake(9, at(AFTER + 2));
    assert_eq!(ungated.first().map(|pod| &*pod.uid), Some("p"));
    keep(&mut ledger, AFTER + 2);
    assert_eq!(reservations(&ledger), [is("p", "a")]);
}

/// The highest cost of one look, and the number of looks after which the last of these pods has its reservation.
fn work_of(nodes: usize) -> (u64, u64) {
    const PODS: usize = 8;
    let config = Config {
        reserve_max: PODS + 1,
        ..Config::default()
    };
    let (mut ledger, names) = full(nodes, 8, config);
    // kube-scheduler asked about one node; the ledger looks at all.
    for index in 0..PODS {
        let mib = 90 + index as u64;
        waits(
            &mut ledger,
            pod(&format!("p{index}"), mib),
            &[names[0].as_str()],
            0,
        );
    }
    let (mut most, mut looks) = (0, 0);
    while reservations(&ledger).len() < PODS {
        let before = ledger.work();
        keep(&mut ledger, AFTER + looks);
        most = most.max(ledger.work() - before);
        looks += 1;
        assert!(looks < 1000, "{nodes} nodes: {:?}", reservations(&ledger));
    }
    (most, looks)
}

#[test]
fn a_look_costs_the_same_in_a_cluster_of_any_size_and_goes_on_where_it_stopped() {
    let small = work_of(100);
    let large = work_of(1000);
    // Two searches of 50,000 and one node beyond each.
    for (most, looks) in [small, large] {
        assert!(most < 102_000, "{most} in one of {looks} looks");
    }
    assert!(small.1 < large.1 && large.1 < 100, "{small:?} {large:?}");
}
