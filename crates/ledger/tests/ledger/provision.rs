//! Placeholders: for which pods, how many, and until when.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::intree::{Label, Taint};
use gpustow_api::{NodeFacts, PodFacts, names};
use gpustow_ledger::{Config, Ledger, Placeholder};
use gpustow_pack::Mib;

use crate::build::{ask, at, bound, card, node, pod, report};

/// A kind of nodes: its instance type and its GPUs.
pub(crate) type Kind = (&'static str, &'static [u64]);

pub(crate) const SMALL: Kind = ("small", &[24]);
pub(crate) const LARGE: Kind = ("large", &[80]);
pub(crate) const WIDE: Kind = ("wide", &[40, 40, 40, 40]);

pub(crate) fn ledger(max: usize) -> Ledger {
    Ledger::new(Config {
        provision: max,
        queue: true,
        ..Config::default()
    })
}

pub(crate) fn of_type(name: &str, instance_type: &str) -> NodeFacts {
    NodeFacts {
        labels: [Arc::new(Label::new(names::INSTANCE_TYPE, instance_type))].into(),
        ..node(name)
    }
}

/// A node of this kind comes and reports.
pub(crate) fn comes(ledger: &mut Ledger, name: &str, (instance_type, sizes): Kind) {
    ledger.apply_node(of_type(name, instance_type));
    let sizes = sizes.iter().enumerate();
    let cards: Vec<_> = sizes
        .map(|(index, size)| card(&format!("{name}-{index}"), *size))
        .collect();
    ledger.apply_gpunode(name, report(&cards), at(0));
}

/// A node of this kind whose GPUs are all taken.
pub(crate) fn full(ledger: &mut Ledger, name: &str, kind: Kind) {
    comes(ledger, name, kind);
    for (index, size) in kind.1.iter().enumerate() {
        let holder = format!("{name}-holder-{index}");
        ledger.apply_pod(bound(&holder, name, &format!("{name}-{index}"), *size));
    }
}

/// It waits with a scheduling gate.
fn queued(name: &str, mib: u64) -> PodFacts {
    PodFacts {
        queued: true,
        ..pod(name, mib)
    }
}

/// kube-scheduler asked for it, and it was refused.
fn waits(ledger: &mut Ledger, pod: PodFacts, nodes: &[&str]) {
    ledger.apply_pod(pod.clone());
    assert!(ledger.filter(&ask(&pod), nodes, at(0)).nodes.is_empty());
}

pub(crate) fn created(ledger: &mut Ledger, now: Duration) -> Vec<Placeholder> {
    ledger.provision(now).create
}

/// The extender creates the placeholder.
pub(crate) fn create(ledger: &mut Ledger, placeholder: &Placeholder) -> PodFacts {
    let name = format!("placeholder-{}", placeholder.pod.name);
    let facts = PodFacts {
        stands_for: Some(placeholder.pods.clone().into()),
        ..PodFacts::new("default", &name, &name)
    };
    ledger.apply_pod(facts.clone());
    facts
}

pub(crate) fn deleted(ledger: &mut Ledger, now: Duration) -> Vec<String> {
    let pods = ledger.provision(now).delete;
    pods.iter().map(|pod| pod.name.to_string()).collect()
}

/// Half of each GPU of a node is taken.
fn fragmented(max: usize) -> Ledger {
    let mut ledger = ledger(max);
    comes(&mut ledger, "n", ("pair", &[100, 100]));
    ledger.apply_pod(bound("a", "n", "n-0", 50));
    ledger.apply_pod(bound("b", "n", "n-1", 50));
    ledger
}

#[test]
fn a_pod_that_waits_for_fragmented_memory_has_one_placeholder() {
    let mut ledger = fragmented(5);
    waits(&mut ledger, pod("p", 60), &["n"]);
    let wanted = created(&mut ledger, at(1));
    let [it] = &wanted[..] else {
        panic!("{wanted:?}");
    };
    assert_eq!((it.mib, it.gpu_mib, it.gpus), (Mib(60), Mib(60), 1));
    assert_eq!(it.types, ["pair".into()]);
    create(&mut ledger, it);
    assert_eq!(created(&mut ledger, at(2)), []);
    assert_eq!(deleted(&mut ledger, at(2)), Vec::<String>::new());
}

#[test]
fn there_is_none_unless_the_administrator_wants_it() {
    let mut ledger = fragmented(0);
    waits(&mut ledger, pod("p", 60), &["n"]);
    assert_eq!(created(&mut ledger, at(1)), []);
}

#[test]
fn there_is_none_if_a_present_gpu_suffices() {
    let mut ledger = fragmented(5);
    ledger.apply_pod(queued("p", 40));
    assert_eq!(created(&mut ledger, at(1)), []);
}

#[test]
fn a_pod_for_which_the_autoscaler_sees_no_room_has_none() {
    let mut ledger = ledger(5);
    full(&mut ledger, "n", LARGE);
    waits(&mut ledger, pod("p", 60), &["n"]);
    assert_eq!(created(&mut ledger, at(1)), []);
    // It does not see a queued pod. The node that it adds takes both.
    ledger.apply_pod(queued("q", 20));
    assert_eq!(created(&mut ledger, at(1)), []);
    ledger.apply_pod(queued("r", 30));
    assert_eq!(created(&mut ledger, at(1)).len(), 1);
}

#[test]
fn a_pod_that_is_larger_than_every_gpu_goes_to_unknown_kinds() {
    let mut ledger = ledger(5);
    comes(&mut ledger, "n", WIDE);
    waits(&mut ledger, pod("p", 60), &["n"]);
    let wanted = created(&mut ledger, at(1));
    let [it] = &wanted[..] else {
        panic!("{wanted:?}");
    };
    assert_eq!((it.types.len(), &*it.others), (0, &["wide".into()][..]));
}

#[test]
fn a_placeholder_goes_when_its_need_ends() {
    type End = fn(&mut Ledger);
    let ends: [(&str, End); 5] = [
        ("deleted", |ledger| ledger.delete_pod("p")),
        ("bound", |ledger| {
            ledger.apply_pod(bound("p", "n", "n-0", 60));
        }),
        ("memory is free", |ledger| ledger.delete_pod("a")),
        ("its node has come", |ledger| {
            comes(ledger, "new", ("pair", &[100, 100]));
        }),
        ("off", |ledger| ledger.configure(Config::default())),
    ];
    for (why, end) in ends {
        let mut ledger = fragmented(5);
        waits(&mut ledger, pod("p", 60), &["n"]);
        let wanted = created(&mut ledger, at(1));
        create(&mut ledger, &wanted[0]);
        end(&mut ledger);
        assert_eq!(deleted(&mut ledger, at(2)), ["placeholder-p"], "{why}");
    }
}

/// Others that it stands for may wait on: the garbage collector deletes it with its owner, or nothing does.
#[test]
fn placeholder_goes_when_its_owner_needs_none_whatever_the_others_need() {
    type End = fn(&mut Ledger);
    let ends: [(&str, End); 3] = [
        ("deleted", |ledger| ledger.delete_pod("a")),
        ("bound", |ledger| {
            ledger.apply_pod(bound("a", "elsewhere", "elsewhere-0", 30));
        }),
        ("finished", |ledger| {
            ledger.apply_pod(PodFacts {
                released: true,
                ..bound("a", "elsewhere", "elsewhere-0", 30)
            });
        }),
    ];
    for (why, end) in ends {
        let mut ledger = ledger(5);
        full(&mut ledger, "n", WIDE);
        for name in ["a", "b", "c"] {
            ledger.apply_pod(queued(name, 30));
        }
        let wanted = created(&mut ledger, at(1));
        assert_eq!(wanted[0].pods.len(), 3);
        create(&mut ledger, &wanted[0]);
        end(&mut ledger);
        let provision = ledger.provision(at(2));
        let deleted = provision.delete.iter().map(|pod| &*pod.name);
        assert!(deleted.eq(["placeholder-a"]), "{why}");
        // They have their own.
        let owner = provision.create.first().map(|it| &*it.pod.name);
        assert_eq!(owner, Some("b"), "{why}");
    }
}

/// The placeholders that no node answers, at this time since 1970.
fn unanswered(ledger: &mut Ledger, now: Duration, unix: i64) -> Vec<String> {
    ledger.tell_time(unix);
    let pods = ledger.provision(now).unanswered;
    pods.iter().map(|pod| pod.name.to_string()).collect()
}

#[test]
fn a_placeholder_is_unanswered_if_no_node_comes_in_15_minutes() {
    let mut ledger = ledger(5);
    full(&mut ledger, "n", LARGE);
    for (name, born) in [("p", 1000), ("q", 1060)] {
        ledger.apply_pod(queued(name, 60));
        let wanted = created(&mut ledger, at(1));
        let facts = create(&mut ledger, &wanted[0]);
        ledger.apply_pod(PodFacts {
            created: born,
            ..facts
        });
    }
    // The time is not known yet.
    assert_eq!(ledger.provision(at(1)).unanswered, []);
    let (p, q) = ("placeholder-p", "placeholder-q");
    assert!(unanswered(&mut ledger, at(2), 1899).is_empty());
    assert_eq!(unanswered(&mut ledger, at(3), 1900), [p]);
    assert_eq!(unanswered(&mut ledger, at(4), 1960), [p, q]);
    // A node arrives for one of them. Its agent never reports.
    ledger.apply_node(of_type("new", "large"));
    assert_eq!(unanswered(&mut ledger, at(5), 1960), [q]);
    assert_eq!(unanswered(&mut ledger, at(605), 2560), [p, q]);
    // It reports at last.
    ledger.apply_gpunode("new", report(&[card("new-0", 80)]), at(606));
    assert!(unanswered(&mut ledger, at(606), 2561).is_empty());
}

/// Looks, creates and deletes the placeholders of the look, and returns the owners of the placeholders that are there
/// then.
fn turns(ledger: &mut Ledger, second: u64) -> Vec<String> {
    ledger.tell_time(1_000 + second as i64);
    let provision = ledger.provision(at(second));
    for placeholder in provision.delete {
        ledger.delete_pod(&placeholder.uid);
    }
    for placeholder in &provision.create {
        let facts = create(ledger, placeholder);
        ledger.apply_pod(PodFacts {
            created: 1_000 + second as i64,
            ..facts
        });
    }
    let all = ledger.placeholders().into_iter();
    let all = all.filter_map(|it| it.placeholder_owner().map(ToString::to_string));
    all.collect()
}

#[test]
fn pods_that_no_node_answers_come_after_all_others_and_rest_twice_as_long_each_time() {
    let mut ledger = ledger(5);
    full(&mut ledger, "n", LARGE);
    // No known node could take these, whatever it had free.
    for junk in 0..10 {
        ledger.apply_pod(queued(&format!("a-junk-{junk}"), 200));
    }
    turns(&mut ledger, 1);
    // The first placeholders are unanswered after 900 s. Each pod that comes then is helped before pods that wait
    // again.
    let mut second = 2;
    for round in 0..8 {
        let name = format!("needs-{round}");
        ledger.apply_pod(queued(&name, 60));
        let came = second;
        while !turns(&mut ledger, second).contains(&name) {
            assert!(second < came + 920, "{name} is not helped");
            second += 10;
        }
        // A node has come for it.
        ledger.delete_pod(&name);
        turns(&mut ledger, second + 1);
        second += 300;
    }
}

#[test]
fn rest_of_a_pod_that_no_node_answers_doubles() {
    let mut ledger = ledger(1);
    full(&mut ledger, "n", LARGE);
    ledger.apply_pod(queued("asks", 70));
    let mut second = 1;
    for rest in [900, 1800, 3600, 7200] {
        assert_eq!(turns(&mut ledger, second), ["asks"], "{second}");
        // No node comes, and another pod needs one as well.
        ledger.apply_pod(queued("other", 60));
        while turns(&mut ledger, second) != ["other"] {
            second += 10;
        }
        let gave_way = second;
        ledger.delete_pod("other");
        while turns(&mut ledger, second).is_empty() {
            second += 10;
        }
        let rested = second - gave_way;
        assert!(rested.abs_diff(rest) <= 30, "{rested} s, not {rest}");
    }
}

#[test]
fn a_pod_that_no_node_answered_comes_after_one_that_was_never_asked_for() {
    let mut ledger = ledger(1);
    full(&mut ledger, "n", LARGE);
    let mut second = 1;
    // Each is the first in turn when its own rest is over, and those after it have waited for less.
    for name in ["a", "b", "c", "d"] {
        ledger.apply_pod(queued(name, 60));
        let came = second;
        while turns(&mut ledger, second) != [name] {
            assert!(second < came + 930, "{name} is behind others");
            second += 10;
        }
    }
    // Of pods that were asked for equally often, the first in turn is the next.
    while turns(&mut ledger, second) == ["d"] {
        second += 10;
    }
    assert_eq!(turns(&mut ledger, second), ["a"]);
}

#[test]
fn a_node_that_arrives_takes_pods_before_it_reports() {
    let mut ledger = ledger(5);
    full(&mut ledger, "n", LARGE);
    ledger.apply_pod(queued("p", 60));
    ledger.apply_node(of_type("new", "large"));
    assert_eq!(created(&mut ledger, at(1)), []);
    ledger.apply_pod(queued("q", 60));
    let wanted = created(&mut ledger, at(2));
    assert_eq!(wanted.len(), 1);
    // It never reports.
    for seconds in [700, 701] {
        assert_eq!(created(&mut ledger, at(seconds)).len(), 2);
    }
}

#[test]
fn a_node_with_the_startup_taint_is_no_reason_for_another() {
    for (key, wanted) in [(names::STARTUP_TAINT, 0), ("example.com/closed", 1)] {
        let mut ledger = ledger(5);
        full(&mut ledger, "n", LARGE);
        comes(&mut ledger, "new", LARGE);
        ledger.apply_node(NodeFacts {
            taints: [Taint::new(key, "", "NoSchedule")].into(),
            ..of_type("new", "large")
        });
        ledger.apply_pod(queued("p", 60));
        assert_eq!(created(&mut ledger, at(1)).len(), wanted, "{key}");
        // Its agent never removes it.
        ledger.apply_gpunode("new", report(&[card("new-0", 80)]), at(700));
        assert_eq!(created(&mut ledger, at(701)).len(), 1, "{key}");
    }
}

#[test]
fn one_node_serves_the_pods_that_fit_on_it_together() {
    let mut ledger = ledger(5);
    full(&mut ledger, "n", WIDE);
    for name in ["a", "b", "c", "d", "e"] {
        ledger.apply_pod(queued(name, 30));
    }
    let wanted = created(&mut ledger, at(1));
    let sizes: Vec<usize> = wanted.iter().map(|it| it.pods.len()).collect();
    assert_eq!(sizes, [4, 1]);
    // The placeholders that exist after a takeover cover the same pods.
    for it in &wanted {
        create(&mut ledger, it);
    }
    assert_eq!(created(&mut ledger, at(2)), []);
    assert_eq!(deleted(&mut ledger, at(2)), Vec::<String>::new());
}

#[test]
fn there_are_no_more_than_the_administrator_allows() {
    let mut ledger = ledger(3);
    full(&mut ledger, "n", LARGE);
    for nth in 0..500 {
        ledger.apply_pod(queued(&format!("p{nth:03}"), 60));
    }
    let wanted = created(&mut ledger, at(1));
    assert_eq!(wanted.len(), 3);
    for it in &wanted {
        create(&mut ledger, it);
    }
    assert_eq!(created(&mut ledger, at(2)), []);
    ledger.configure(Config {
        provision: 1,
        queue: true,
        ..Config::default()
    });
    assert_eq!(deleted(&mut ledger, at(3)).len(), 2);
}

#[test]
fn a_placeholder_that_no_node_answers_gives_way_to_the_next() {
    let mut ledger = ledger(1);
    full(&mut ledger, "n", LARGE);
    for name in ["p", "q"] {
        ledger.apply_pod(queued(name, 60));
    }
    let wanted = created(&mut ledger, at(1));
    assert_eq!(wanted.len(), 1);
    let facts = create(&mut ledger, &wanted[0]);
    ledger.apply_pod(PodFacts {
        created: 1000,
        ..facts
    });
    ledger.tell_time(1899);
    assert_eq!(deleted(&mut ledger, at(900)), [""; 0]);
    ledger.tell_time(1900);
    assert_eq!(deleted(&mut ledger, at(901)), ["placeholder-p"]);
    ledger.delete_pod("placeholder-p");
    let next = created(&mut ledger, at(902));
    assert_eq!(*next[0].pod.uid, *"q");
    create(&mut ledger, &next[0]);
    assert_eq!(created(&mut ledger, at(903)), []);
}

#[test]
fn a_pod_behind_any_number_that_need_no_placeholder_has_one() {
    let mut ledger = ledger(5);
    full(&mut ledger, "n", LARGE);
    for number in 0..300 {
        // The autoscaler sees that no node takes it.
        waits(&mut ledger, pod(&format!("a{number}"), 70), &["n"]);
    }
    ledger.apply_pod(PodFacts {
        created: 1,
        ..queued("z", 79)
    });
    let wanted = created(&mut ledger, at(1));
    assert!(wanted.iter().any(|it| *it.pod.uid == *"z"), "{wanted:?}");
}
