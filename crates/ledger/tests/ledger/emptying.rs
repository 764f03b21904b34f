//! Nearly empty nodes whose pods move to fuller ones.

use gpustow_api::{Group, NodeFacts, PodFacts};
use gpustow_ledger::{Config, Ledger};

use crate::act::Act as _;
use crate::build::{at, bound, card, choose, joins, node, pod, protect, report, waiting};
use crate::fragmented::leaving;
use crate::moving::on;

/// The time of day when a test begins; pods that started at 0 have run for long.
const DAWN: i64 = 100_000;

/// Three nodes of two GPUs with 100 MiB each: `a` holds 30 and `b` 60, `c` is empty. Both pods may move.
fn nearly_empty() -> Ledger {
    let mut ledger = Ledger::new(Config {
        defragment: true,
        empty_nodes: true,
        ..Config::default()
    });
    for name in ["a", "b", "c"] {
        ledger.apply_node(node(name));
    }
    ledger.apply_pod(evictable("x", "a-0", 30));
    ledger.apply_pod(evictable("y", "b-0", 60));
    look(&mut ledger, 0);
    ledger
}

/// Begins a look: sets the time, and all agents report.
fn look(ledger: &mut Ledger, second: u64) {
    ["a", "b", "c"]
        .iter()
        .for_each(|name| reports(ledger, name, second));
    tell(ledger, second);
}

fn reports(ledger: &mut Ledger, name: &str, second: u64) {
    let cards = [0, 1].map(|index| card(&format!("{name}-{index}"), 100));
    let mut status = report(&cards);
    status.heartbeat = Some(second.to_string());
    ledger.apply_gpunode(name, status, at(second));
}

fn tell(ledger: &mut Ledger, second: u64) {
    ledger.tell_time(DAWN + second.cast_signed());
    ledger.fragmented(at(second));
}

fn evictable(uid: &str, card: &str, mib: u64) -> PodFacts {
    PodFacts {
        evictable: Some("its-replicaset".into()),
        started: 0,
        ..bound(uid, &card[..1], card, mib)
    }
}

fn replacement(uid: &str, mib: u64) -> PodFacts {
    PodFacts {
        evictable: Some("its-replicaset".into()),
        ..pod(uid, mib)
    }
}

/// The node that begins to be emptied, if so many pods may be evicted and budgets protect none.
fn begins(ledger: &mut Ledger, most: usize, second: u64) -> Option<String> {
    let node = ledger.empty(most, at(second))?;
    Some(node.to_string())
}

/// Who is to be evicted still, and from where.
fn emptying(ledger: &Ledger, second: u64) -> Option<(String, Vec<String>)> {
    let it = ledger.emptying(at(second))?;
    let pods = it.moves.iter().map(|it| it.pod.uid.to_string());
    Some((it.node.to_string(), pods.collect()))
}

#[test]
fn pods_of_the_emptiest_node_move_to_a_fuller_one() {
    let mut ledger = nearly_empty();
    assert_eq!(begins(&mut ledger, 1, 0).as_deref(), Some("a"));
    assert_eq!(emptying(&ledger, 1), on("a", &["x"]));
    ledger.apply_pod(leaving(evictable("x", "a-0", 30)));
    assert_eq!(emptying(&ledger, 2), on("a", &[]));
    ledger.delete_pod("x");
    let comes = replacement("x2", 30);
    assert_eq!(choose(&mut ledger, &comes, &["a", "b", "c"], at(3)), ["b"]);
    ledger.apply_pod(evictable("x2", "b-0", 30));
    look(&mut ledger, 4);
    assert_eq!(emptying(&ledger, 4), None);
}

#[test]
fn room_for_a_replacement_is_kept_until_it_is_bound() {
    let mut ledger = nearly_empty();
    ledger.apply_pod(evictable("y", "b-0", 70));
    ledger.apply_pod(bound("full", "b", "b-1", 100));
    assert_eq!(begins(&mut ledger, 1, 0).as_deref(), Some("a"));
    ledger.apply_pod(leaving(evictable("x", "a-0", 30)));
    assert!(choose(&mut ledger, &pod("other", 10), &["b"], at(1)).is_empty());
    ledger.delete_pod("other");
    let comes = replacement("x2", 30);
    assert_eq!(choose(&mut ledger, &comes, &["b"], at(1)), ["b"]);
}

#[test]
fn emptied_node_ranks_last_meanwhile() {
    let mut ledger = nearly_empty();
    // On a, next to the pod that is there, exactly 70 are free.
    let exact = pod("exact", 70);
    assert_eq!(choose(&mut ledger, &exact, &["a", "c"], at(0)), ["a"]);
    ledger.delete_pod("exact");
    assert_eq!(begins(&mut ledger, 1, 0).as_deref(), Some("a"));
    let exact = pod("exact2", 70);
    assert_eq!(choose(&mut ledger, &exact, &["a", "c"], at(1)), ["c"]);
}

#[test]
fn node_stays_as_it_is_if_one_pod_cannot_move() {
    let x = || evictable("x", "a-0", 30);
    let kept = |also: PodFacts| {
        let mut ledger = nearly_empty();
        ledger.apply_pod(also);
        assert_eq!(begins(&mut ledger, 9, 0), None);
    };
    let fixed = bound("fixed", "a", "a-1", 10);
    let young = PodFacts {
        started: DAWN - 599,
        ..evictable("young", "a-1", 10)
    };
    let tied = PodFacts { tied: true, ..x() };
    let of_gang = PodFacts {
        group: Some(Group::in_tree("default", "gang")),
        ..x()
    };
    let plain = PodFacts {
        node: Some("a".into()),
        ..PodFacts::new("kube-system", "coredns", "coredns")
    };
    let ends = leaving(evictable("ends", "a-1", 10));
    for also in [fixed, young, tied, of_gang, plain.clone(), ends] {
        kept(also);
    }
    // A pod of a DaemonSet goes with the node.
    let mut ledger = nearly_empty();
    ledger.apply_pod(PodFacts {
        goes_with_node: true,
        ..plain
    });
    assert_eq!(begins(&mut ledger, 9, 0).as_deref(), Some("a"));
    assert_eq!(emptying(&ledger, 0), on("a", &["x"]));
}

#[test]
fn node_stays_as_it_is_while_a_pod_is_on_its_way_there() {
    let mut ledger = nearly_empty();
    assert_eq!(choose(&mut ledger, &pod("p", 10), &["a"], at(0)), ["a"]);
    assert_eq!(begins(&mut ledger, 9, 0), None);
    // It is bound elsewhere after all.
    ledger.apply_pod(bound("p", "b", "b-0", 10));
    assert_eq!(begins(&mut ledger, 9, 61).as_deref(), Some("a"));
    assert_eq!(choose(&mut ledger, &pod("q", 10), &["a"], at(62)), ["a"]);
    assert_eq!(emptying(&ledger, 62), None);
}

#[test]
fn cordoned_node_is_left_to_its_administrator() {
    let mut ledger = nearly_empty();
    ledger.apply_node(NodeFacts {
        cordoned: true,
        ..node("a")
    });
    assert_eq!(begins(&mut ledger, 9, 0), None);
}

#[test]
fn node_stays_as_it_is_if_not_all_replacements_fit_at_the_same_time() {
    let mut ledger = nearly_empty();
    ledger.apply_pod(bound("full", "b", "b-1", 100));
    // 40 are free on b: one of the two would fit, and c is empty.
    ledger.apply_pod(evictable("x2", "a-1", 30));
    assert_eq!(begins(&mut ledger, 9, 0), None);
    ledger.delete_pod("x2");
    assert_eq!(begins(&mut ledger, 9, 60).as_deref(), Some("a"));
}

#[test]
fn no_node_is_emptied_beyond_the_rate_or_against_a_budget() {
    let mut ledger = nearly_empty();
    assert_eq!(begins(&mut ledger, 0, 0), None);
    protect(&mut ledger, &["x"], 0);
    assert_eq!(begins(&mut ledger, 9, 0), None);
    protect(&mut ledger, &["x"], 1);
    // The next round begins after a minute.
    assert_eq!(begins(&mut ledger, 9, 59), None);
    look(&mut ledger, 120);
    assert_eq!(begins(&mut ledger, 1, 120).as_deref(), Some("a"));
}

#[test]
fn no_node_is_emptied_while_a_pod_waits() {
    let waits = waiting(0, pod("p", 150));
    let mut ledger = nearly_empty();
    ledger.apply_pod(waits.clone());
    assert_eq!(begins(&mut ledger, 9, 0), None);
    ledger.delete_pod("p");
    assert_eq!(begins(&mut ledger, 9, 1).as_deref(), Some("a"));
    // It stops where it is, and nothing is kept any more.
    ledger.apply_pod(waits);
    assert_eq!(emptying(&ledger, 2), None);
    ledger.apply_pod(bound("full", "b", "b-1", 100));
    look(&mut ledger, 2);
    let other = pod("other", 40);
    assert_eq!(choose(&mut ledger, &other, &["b"], at(2)), ["b"]);
}

#[test]
fn replacement_that_is_queued_for_a_moment_stops_nothing() {
    let mut ledger = nearly_empty();
    ledger.configure(Config {
        defragment: true,
        empty_nodes: true,
        queue: true,
        ..Config::default()
    });
    ledger.apply_pod(evictable("x2", "a-1", 20));
    assert_eq!(begins(&mut ledger, 9, 0).as_deref(), Some("a"));
    ledger.apply_pod(leaving(evictable("x", "a-0", 30)));
    ledger.apply_pod(PodFacts {
        queued: true,
        ..replacement("x3", 30)
    });
    tell(&mut ledger, 1);
    assert_eq!(emptying(&ledger, 1), on("a", &["x2"]));
}

#[test]
fn no_pod_is_evicted_by_a_stale_report() {
    let stale = Config::default().stale_after.as_secs() + 1;
    for silent in ["a", "b"] {
        let others = || ["a", "b", "c"].into_iter().filter(|name| *name != silent);
        let mut ledger = nearly_empty();
        others().for_each(|name| reports(&mut ledger, name, stale));
        tell(&mut ledger, stale);
        assert_eq!(begins(&mut ledger, 9, stale), None, "{silent}");

        let mut ledger = nearly_empty();
        assert_eq!(begins(&mut ledger, 9, 0).as_deref(), Some("a"));
        others().for_each(|name| reports(&mut ledger, name, stale));
        assert_eq!(emptying(&ledger, stale), None, "{silent}");
    }
}

#[test]
fn no_node_is_emptied_if_the_feature_is_off() {
    let mut ledger = nearly_empty();
    assert_eq!(begins(&mut ledger, 9, 0).as_deref(), Some("a"));
    let off = Config {
        defragment: true,
        ..Config::default()
    };
    ledger.configure(off);
    assert_eq!(emptying(&ledger, 1), None);
    assert_eq!(begins(&mut ledger, 9, 200), None);
}

/// Looks every minute for these hours. Evicted pods come back at once, on the card that `to` names, with another UID.
/// Returns the number of evictions.
fn evictions(ledger: &mut Ledger, hours: u64, to: impl Fn(&str) -> &'static str) -> usize {
    let mut count = 0;
    for minute in 1..=60 * hours {
        let second = 60 * minute;
        look(ledger, second);
        begins(ledger, 9, second);
        let Some(it) = ledger.emptying(at(second)) else {
            continue;
        };
        for pod in it.moves.into_iter().map(|it| it.pod) {
            count += 1;
            let mib = pod.asks.request().map_or(0, |it| it.in_sum().0);
            ledger.delete_pod(&pod.uid);
            ledger.apply_pod(PodFacts {
                started: DAWN + second.cast_signed(),
                ..evictable(&format!("r{count}"), to(&it.node), mib)
            });
        }
    }
    count
}

#[test]
fn two_nodes_do_not_empty_into_each_other() {
    let mut ledger = nearly_empty();
    ledger.apply_pod(evictable("y", "b-0", 30));
    // One of the two equals is emptied, and then there is no fuller one.
    let other = |node: &str| if node == "a" { "b-1" } else { "a-1" };
    assert_eq!(evictions(&mut ledger, 48, other), 1);
}

#[test]
fn pod_that_comes_back_to_its_node_is_evicted_more_and_more_rarely() {
    let back = |_: &str| "a-1";
    // At 0, 1, 3, 7 and 15 hours.
    assert_eq!(evictions(&mut nearly_empty(), 16, back), 5);
}

#[test]
fn one_look_at_nodes_costs_no_more_with_five_hundred_than_with_fifty() {
    let most = |nodes: usize| {
        let mut ledger = Ledger::new(Config {
            defragment: true,
            empty_nodes: true,
            ..Config::default()
        });
        ledger.tell_time(DAWN);
        for number in 0..nodes {
            let name = format!("n{number}");
            joins(&mut ledger, &name, &[100; 4]);
            // No two of these fit on one GPU, and all GPUs hold one.
            for index in 0..4 {
                let uid = format!("{name}-{index}");
                ledger.apply_pod(PodFacts {
                    node: Some(name.as_str().into()),
                    ..evictable(&uid, &uid, 49)
                });
                let uid = format!("{uid}-block");
                if number % 2 == 0 {
                    ledger.apply_pod(bound(&uid, &name, &format!("{name}-{index}"), 3));
                }
            }
        }
        let (mut most, mut looked) = (0, 0);
        for second in 0..60 {
            let before = ledger.work();
            ledger.empty(9, at(second));
            most = most.max(ledger.work() - before);
            looked += ledger.work() - before;
        }
        assert!(looked > 0);
        most
    };
    let (few, many) = (most(50), most(500));
    println!("{few} and {many} a look");
    assert!(few <= 6_000 && many <= 6_000, "{few} and {many}");
}
