//! Groups of pods of which a scheduler binds all or none.

use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_ledger::{Config, Ledger, Outcome};

use crate::build::{assumed, at, choose, free, joins, ledger, pod};

/// One pod of a group, which wants a whole card.
fn member(group: &str, number: usize) -> PodFacts {
    PodFacts {
        group: Some(format!("default/{group}").into()),
        ..pod(&format!("{group}{number}"), 100)
    }
}

/// Asks for the pods in this order, each group's until one is refused, and binds the groups that have
/// room for all of `size`. Their names.
fn attempt(
    ledger: &mut Ledger,
    order: &[(&'static str, usize)],
    size: usize,
    now: Duration,
) -> Vec<&'static str> {
    let mut failed: Vec<&str> = Vec::new();
    let mut bound = Vec::new();
    for &(group, number) in order {
        if failed.contains(&group) {
            continue;
        }
        if choose(ledger, &member(group, number), &["n"], now).is_empty() {
            failed.push(group);
        } else if number + 1 == size {
            for number in 0..size {
                let pod = member(group, number);
                let begun = ledger.begin_bind(&pod, "n", now);
                assert!(begun.is_ok(), "{begun:?}");
                ledger.end_bind(&pod, Outcome::Bound, now);
            }
            bound.push(group);
        }
    }
    bound
}

#[test]
fn groups_that_met_do_not_keep_each_other_out() {
    let mut ledger = ledger(&[("n", &[100, 100, 100, 100])]);
    let order: Vec<_> = (0..3)
        .flat_map(|number| [("p", number), ("q", number)])
        .collect();
    for &(group, number) in &order {
        ledger.apply_pod(member(group, number));
    }
    assert_eq!(attempt(&mut ledger, &order, 3, at(0)), ["q"]);
    (0..3).for_each(|number| ledger.delete_pod(&format!("q{number}")));
    let p: Vec<_> = (0..3).map(|number| ("p", number)).collect();
    assert_eq!(attempt(&mut ledger, &p, 3, at(5)), ["p"]);
}

#[test]
fn a_member_that_is_refused_gives_back_what_its_own_group_reserved_and_no_more() {
    let mut ledger = ledger(&[("n", &[100, 100, 100, 100])]);
    for (group, number) in [("p", 0), ("p", 1), ("q", 0)] {
        ledger.apply_pod(member(group, number));
        assert_eq!(
            choose(&mut ledger, &member(group, number), &["n"], at(0)).len(),
            1
        );
    }
    // A Binding that is under way stays.
    assert!(ledger.begin_bind(&member("p", 1), "n", at(0)).is_ok());
    assert_eq!(
        choose(&mut ledger, &pod("lone", 100), &["n"], at(0)).len(),
        1
    );
    assert!(choose(&mut ledger, &member("p", 2), &["n"], at(0)).is_empty());
    assert_eq!(free(&ledger, "n").iter().sum::<u64>(), 100);
    assert_eq!(assumed(&ledger), (2, 1));
}

#[test]
fn queued_pod_is_not_stalled_while_the_leader_may_assume_a_gang_in_its_room() {
    let mut standby = Ledger::new(Config {
        queue: true,
        ..Config::default()
    });
    joins(&mut standby, "n", &[100]);
    standby.apply_pod(PodFacts {
        queued: true,
        ..pod("queued", 100)
    });
    let stalled = |standby: &Ledger| standby.stalled(at(1)).len();
    assert_eq!(stalled(&standby), 1);
    standby.apply_pod(member("gang", 0));
    assert_eq!(stalled(&standby), 0);
    // One that is gated itself, or fits nowhere, is not assumed.
    standby.apply_pod(PodFacts {
        gated: true,
        ..member("gang", 0)
    });
    assert_eq!(stalled(&standby), 1);
    standby.apply_pod(PodFacts {
        group: member("gang", 0).group,
        ..pod("gang0", 101)
    });
    assert_eq!(stalled(&standby), 1);
}
