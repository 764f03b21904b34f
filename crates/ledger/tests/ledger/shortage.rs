//! Cards on which a pod could not grow to its request, because others use more than theirs.

use gpustow_api::PodFacts;
use gpustow_api::config::Action;
use gpustow_api::gpunode::{Condition, Gpu, PROCESSES_READABLE, PodUse};
use gpustow_ledger::{Config, Ledger, Purpose};

use crate::act::Act as _;
use crate::build::{at, bound, card, node, pod, report, used};

const CARD: u64 = 100;

/// A ledger that calls memory back, with a node whose one card is used like this, and of which 10 are to be kept
/// free.
fn short(pods: &[PodUse]) -> Ledger {
    let mut ledger = Ledger::new(Config {
        reclaim: true,
        ..Config::default()
    });
    ledger.apply_node(node("a"));
    uses(&mut ledger, pods, 0);
    ledger
}

fn uses(ledger: &mut Ledger, pods: &[PodUse], second: u64) {
    says(ledger, second, |gpu| gpu.pods = pods.to_vec());
}

fn says(ledger: &mut Ledger, second: u64, change: impl FnOnce(&mut Gpu)) {
    let mut gpu = card("a-0", CARD);
    change(&mut gpu);
    let mut status = report(&[gpu]);
    (status.headroom_mib, status.heartbeat) = (10, Some(second.to_string()));
    ledger.apply_gpunode("a", status, at(second));
}

/// The shortages: the harmed pod, none if it is the headroom; the missing memory; the pods that must give back.
fn found(ledger: &Ledger, second: u64) -> Vec<(Option<String>, u64, Vec<String>)> {
    let short = ledger.shortages(at(second));
    let each = short.iter().map(|short| {
        let harmed = match &short.harm {
            Purpose::Pod(pod) => Some(pod.uid.to_string()),
            Purpose::Headroom(headroom) => {
                assert_eq!(headroom.0, 10);
                None
            }
            Purpose::Limit | Purpose::Autoscaler => Some(format!("{short:?}")),
        };
        let victims = short.victims.iter();
        let victims = victims.map(|victim| victim.pod.uid.to_string());
        (harmed, short.missing.0, victims.collect())
    });
    each.collect()
}

fn is(harmed: Option<&str>, missing: u64, victims: &[&str]) -> (Option<String>, u64, Vec<String>) {
    let victims = victims.iter().map(|uid| (*uid).to_owned());
    (harmed.map(str::to_owned), missing, victims.collect())
}

/// `greedy` holds 30, `quiet` 40.
fn two(pods: &[PodUse]) -> Ledger {
    let mut ledger = short(pods);
    ledger.apply_pod(bound("greedy", "a", "a-0", 30));
    ledger.apply_pod(bound("quiet", "a", "a-0", 40));
    ledger
}

#[test]
fn a_borrower_gives_back_what_a_neighbour_lacks_to_its_request_and_no_other_pod_does() {
    let mut ledger = two(&[used("greedy", 70), used("quiet", 10)]);
    // 20 are free, and it may want 30 more.
    assert_eq!(found(&ledger, 0), [is(Some("quiet"), 10, &["greedy"])]);
    // It grows, and lacks as much; then the other gives back enough.
    uses(&mut ledger, &[used("greedy", 70), used("quiet", 20)], 1);
    assert_eq!(found(&ledger, 1), [is(Some("quiet"), 10, &["greedy"])]);
    uses(&mut ledger, &[used("greedy", 60), used("quiet", 10)], 2);
    assert_eq!(found(&ledger, 2), []);
    // One that has not begun may want all of its request.
    uses(&mut ledger, &[used("greedy", 70)], 3);
    assert_eq!(found(&ledger, 3), [is(Some("quiet"), 10, &["greedy"])]);
}

#[test]
fn borrowing_all_that_no_other_pod_has_a_right_to_is_no_offence() {
    let mut ledger = short(&[used("greedy", 90)]);
    ledger.apply_pod(bound("greedy", "a", "a-0", 30));
    assert_eq!(found(&ledger, 0), []);
    // But for the headroom.
    uses(&mut ledger, &[used("greedy", 93)], 1);
    assert_eq!(found(&ledger, 1), [is(None, 3, &["greedy"])]);
}

#[test]
fn of_several_who_borrow_no_more_give_back_than_it_takes_and_low_priority_first() {
    let on_card = [used("high", 35), used("low", 20), used("mid", 25)];
    let mut ledger = short(&on_card);
    for (uid, priority) in [("high", 9), ("low", 0), ("mid", 0)] {
        ledger.apply_pod(PodFacts {
            priority,
            ..bound(uid, "a", "a-0", 10)
        });
    }
    // 20 are free.
    ledger.apply_pod(bound("quiet", "a", "a-0", 30));
    assert_eq!(found(&ledger, 0), [is(Some("quiet"), 10, &["mid"])]);
    ledger.apply_pod(bound("quiet", "a", "a-0", 40));
    assert_eq!(found(&ledger, 0), [is(Some("quiet"), 20, &["low", "mid"])]);
    // No more can be given back than is lent.
    ledger.apply_pod(bound("quiet", "a", "a-0", 90));
    let all = is(Some("quiet"), 50, &["high", "low", "mid"]);
    assert_eq!(found(&ledger, 0), [all]);
}

#[test]
fn a_pod_that_was_asked_goes_on_being_asked_and_no_other_is() {
    let mut ledger = short(&[used("one", 40), used("two", 40)]);
    ledger.apply_pod(bound("one", "a", "a-0", 10));
    ledger.apply_pod(bound("two", "a", "a-0", 10));
    ledger.apply_pod(bound("quiet", "a", "a-0", 40));
    assert_eq!(found(&ledger, 0), [is(Some("quiet"), 20, &["one"])]);
    let asked = PodFacts {
        asked_back: Some(Action::Event),
        ..bound("two", "a", "a-0", 10)
    };
    ledger.apply_pod(asked.clone());
    assert_eq!(found(&ledger, 0), [is(Some("quiet"), 20, &["two"])]);
    // No pod need be asked while it ends, nor when it is gone and its agent has yet to report that.
    ledger.apply_pod(PodFacts {
        deleting: true,
        ..asked
    });
    assert_eq!(found(&ledger, 0), [is(Some("quiet"), 20, &[])]);
    ledger.delete_pod("two");
    assert_eq!(found(&ledger, 0), []);
}

#[test]
fn a_neighbour_that_ends_or_has_ended_is_not_waited_for() {
    let mut ledger = two(&[used("greedy", 80), used("quiet", 10)]);
    assert_eq!(found(&ledger, 0).len(), 1);
    for (deleting, released) in [(true, false), (false, true)] {
        ledger.apply_pod(PodFacts {
            deleting,
            released,
            ..bound("quiet", "a", "a-0", 40)
        });
        assert_eq!(found(&ledger, 0), []);
    }
}

#[test]
fn no_pod_is_asked_by_a_stale_report_nor_by_one_that_does_not_say_whose_processes_they_are() {
    let on_card = [used("greedy", 80), used("quiet", 10)];
    let mut ledger = two(&on_card);
    assert_eq!(found(&ledger, 180).len(), 1);
    assert_eq!(found(&ledger, 181), []);
    uses(&mut ledger, &on_card, 181);
    assert_eq!(found(&ledger, 181).len(), 1);
    let mut gpu = card("a-0", CARD);
    gpu.pods = on_card.to_vec();
    let mut half = report(&[gpu]);
    half.conditions = vec![Condition {
        r#type: PROCESSES_READABLE.to_owned(),
        status: "False".to_owned(),
        ..Condition::default()
    }];
    ledger.apply_gpunode("a", half, at(182));
    assert_eq!(found(&ledger, 182), []);
}

#[test]
fn no_pod_is_asked_for_a_card_that_failed_or_is_missing() {
    let on_card = [used("greedy", 80), used("quiet", 10)];
    let mut ledger = two(&on_card);
    assert_eq!(found(&ledger, 0).len(), 1);
    says(&mut ledger, 1, |gpu| {
        (gpu.pods, gpu.healthy) = (on_card.to_vec(), false);
    });
    assert_eq!(found(&ledger, 1), []);
    says(&mut ledger, 2, |gpu| {
        (gpu.pods, gpu.missing) = (on_card.to_vec(), true);
    });
    assert_eq!(found(&ledger, 2), []);
}

#[test]
fn reclaim_of_a_gpu_for_a_pod_asks_no_pod_for_another_cause() {
    let mut ledger = two(&[used("greedy", 80), used("quiet", 10)]);
    assert_eq!(found(&ledger, 0).len(), 1);
    let waits = pod("waits", 20);
    ledger.apply_pod(waits.clone());
    ledger.filter(&crate::build::ask(&waits), &["a"], at(0));
    assert_eq!(ledger.reclaims(at(0)).len(), 1);
    assert_eq!(found(&ledger, 0), []);
    ledger.delete_pod("waits");
    assert_eq!(found(&ledger, 0).len(), 1);
}

#[test]
fn no_pod_is_asked_unless_the_operator_wants_it() {
    let mut ledger = crate::build::ledger(&[("a", &[CARD])]);
    ledger.apply_pod(bound("greedy", "a", "a-0", 30));
    ledger.apply_pod(bound("quiet", "a", "a-0", 40));
    uses(&mut ledger, &[used("greedy", 90), used("quiet", 10)], 0);
    assert_eq!(found(&ledger, 0), []);
}

#[test]
fn a_borrower_that_should_be_gone_shields_no_other() {
    let mut ledger = short(&[used("stuck", 55), used("other", 45)]);
    ledger.apply_pod(PodFacts {
        deleting: true,
        gone_by: Some(1000),
        ..bound("stuck", "a", "a-0", 10)
    });
    ledger.apply_pod(bound("other", "a", "a-0", 10));
    ledger.apply_pod(bound("quiet", "a", "a-0", 45));
    ledger.tell_time(1059);
    assert_eq!(found(&ledger, 59), [is(Some("quiet"), 45, &[])]);
    ledger.tell_time(1060);
    assert_eq!(found(&ledger, 60), [is(Some("quiet"), 35, &["other"])]);
}

#[test]
fn a_pod_that_was_asked_without_result_shields_no_other() {
    let on_card = [used("soft", 50), used("hard", 40)];
    let mut ledger = short(&on_card);
    ledger.apply_pod(bound("soft", "a", "a-0", 10));
    ledger.apply_pod(PodFacts {
        priority: 1,
        ..bound("hard", "a", "a-0", 10)
    });
    ledger.apply_pod(bound("quiet", "a", "a-0", 30));
    ledger.reclaim(at(0));
    assert_eq!(found(&ledger, 0), [is(Some("quiet"), 20, &["soft"])]);
    ledger.apply_pod(PodFacts {
        asked_back: Some(Action::Event),
        ..bound("soft", "a", "a-0", 10)
    });
    for (second, victim) in [(1, "soft"), (60, "soft"), (61, "hard"), (62, "hard")] {
        uses(&mut ledger, &on_card, second);
        ledger.reclaim(at(second));
        assert_eq!(
            found(&ledger, second),
            [is(Some("quiet"), 20, &[victim])],
            "at {second}"
        );
    }
}

#[test]
fn look_for_shortages_costs_no_more_on_1000_nodes_that_lend_than_on_100() {
    for nodes in [100, 1000] {
        let mut ledger = Ledger::new(Config {
            reclaim: true,
            ..Config::default()
        });
        for number in 0..nodes {
            let (name, gpu) = (format!("n{number}"), format!("n{number}-0"));
            let (busy, quiet) = (format!("busy-{number}"), format!("quiet-{number}"));
            ledger.apply_node(node(&name));
            ledger.apply_pod(bound(&busy, &name, &gpu, 10));
            ledger.apply_pod(bound(&quiet, &name, &gpu, 30));
            // Each lends, and two are short.
            let used = [used(&busy, if number < 2 { 80 } else { 20 })];
            let gpu = Gpu {
                pods: used.to_vec(),
                ..card(&gpu, 100)
            };
            ledger.apply_gpunode(&name, report(&[gpu]), at(0));
        }
        ledger.reclaim(at(0));
        let before = ledger.work();
        ledger.reclaim(at(1));
        assert_eq!(ledger.shortages(at(1)).len(), 2, "{nodes} nodes");
        let cost = ledger.work() - before;
        assert!(cost <= 8, "{nodes} nodes: {cost}");
    }
}
