//! The ledger's signs that its own view is late.

use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_ledger::{Config, Ledger};

use crate::act::Act as _;
use crate::build::{
    ask, at, bound, card, configured, ledger, node, offer_all, pod, report, used, waiting,
};

fn fits_without(ledger: &Ledger, mib: u64, leaving: &[&str], ended: bool) -> bool {
    let leaving: Vec<Arc<str>> = leaving.iter().map(|uid| (*uid).into()).collect();
    ledger.fits_without(&pod("p", mib), "a", &leaving, ended, at(0))
}

#[test]
fn ledger_is_behind_where_an_offered_node_lacks_room_in_sum() {
    let mut ledger = ledger(&[("a", &[100, 100])]);
    ledger.apply_pod(bound("x", "a", "a-0", 60));
    ledger.apply_pod(bound("y", "a", "a-1", 60));
    // 40 + 40 are left: 60 lack a GPU, 81 lack the sum.
    assert!(!ledger.is_behind(&pod("p", 60), "a", at(0)));
    assert!(ledger.is_behind(&pod("p", 81), "a", at(0)));
    ledger.delete_pod("x");
    assert!(!ledger.is_behind(&pod("p", 81), "a", at(0)));
}

#[test]
fn ledger_is_behind_where_an_offered_node_has_no_fresh_report() {
    let ledger = ledger(&[("a", &[100])]);
    assert!(ledger.is_behind(&pod("p", 1), "unknown", at(0)));
    assert!(ledger.is_behind(&pod("p", 1), "a", at(86_400)));
    assert!(!ledger.is_behind(&pod("p", 1), "a", at(0)));
}

#[test]
fn pod_fits_as_soon_as_the_leaving_are_gone() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(bound("x", "a", "a-0", 50));
    ledger.apply_pod(bound("y", "a", "a-0", 50));
    let mut here: Vec<_> = ledger
        .bound_on("a")
        .iter()
        .map(|it| it.uid.clone())
        .collect();
    here.sort_unstable();
    assert_eq!(here, ["x".into(), "y".into()]);
    assert!(!fits_without(&ledger, 100, &["x"], false));
    assert!(fits_without(&ledger, 50, &["x"], false));
    assert!(fits_without(&ledger, 100, &["x", "y"], false));
    assert!(!fits_without(&ledger, 101, &["x", "y"], true));
}

#[test]
fn memory_of_a_pod_that_is_gone_counts_until_the_caller_says_otherwise() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(bound("x", "a", "a-0", 80));
    let mut gpu = card("a-0", 100);
    gpu.pods = vec![used("x", 70)];
    ledger.apply_gpunode("a", report(&[gpu]), at(0));
    ledger.delete_pod("x");
    assert!(!fits_without(&ledger, 80, &[], false));
    assert!(fits_without(&ledger, 80, &[], true));
    // A pod that is still bound is not one of these.
    ledger.apply_pod(PodFacts {
        deleting: true,
        ..bound("x", "a", "a-0", 80)
    });
    assert!(!fits_without(&ledger, 80, &[], true));
}

#[test]
fn memory_of_an_assumed_pod_of_lower_priority_counts_until_the_caller_says_otherwise() {
    let mut ledger = ledger(&[("a", &[100])]);
    for (uid, priority) in [("x", -1), ("y", 0)] {
        let assumed = PodFacts {
            priority,
            ..pod(uid, 40)
        };
        ledger.apply_pod(assumed.clone());
        assert_eq!(ledger.filter(&ask(&assumed), &["a"], at(0)).nodes, ["a"]);
    }
    assert!(!fits_without(&ledger, 60, &[], false));
    assert!(fits_without(&ledger, 60, &[], true));
    // One of equal priority stays.
    assert!(!fits_without(&ledger, 61, &[], true));
}

/// A borrower on `a`, from which memory can be reclaimed for a pod of 40, and on `b` one that terminates.
fn lent_beside_leaving() -> Ledger {
    let mut ledger = Ledger::new(Config {
        reclaim: true,
        ..Config::default()
    });
    for (name, uid, used_mib) in [("a", "lent", 90), ("b", "leaves", 90)] {
        ledger.apply_node(node(name));
        let mut gpu = card(&format!("{name}-0"), 100);
        gpu.pods = vec![used(uid, used_mib)];
        ledger.apply_gpunode(name, report(&[gpu]), at(0));
    }
    ledger.apply_pod(bound("lent", "a", "a-0", 10));
    let leaves = PodFacts {
        deleting: true,
        ..bound("leaves", "b", "b-0", 90)
    };
    ledger.apply_pod(leaves);
    ledger.apply_pod(pod("p", 40));
    ledger
}

fn reclaims(ledger: &mut Ledger, second: u64) -> usize {
    ledger.filter(&ask(&pod("p", 40)), &["a"], at(second));
    ledger.reclaim(at(second));
    ledger.reclaims(at(second)).len()
}

#[test]
fn no_memory_is_reclaimed_elsewhere_while_victims_of_kube_scheduler_leave() {
    assert_eq!(reclaims(&mut lent_beside_leaving(), 1), 1);
    let mut ledger = lent_beside_leaving();
    ledger.expect_room(&"p".into(), &"b".into(), at(1));
    assert_eq!(reclaims(&mut ledger, 1), 0);
    // The node's report may show their use for a while.
    ledger.delete_pod("leaves");
    assert_eq!(reclaims(&mut ledger, 59), 0);
    // Room that has not come by then does not come.
    ledger.expect_room(&"p".into(), &"b".into(), at(60));
    assert_eq!(reclaims(&mut ledger, 61), 1);
}

#[test]
fn memory_is_reclaimed_when_another_pod_took_what_victims_of_kube_scheduler_left() {
    let mut ledger = lent_beside_leaving();
    ledger.expect_room(&"p".into(), &"b".into(), at(1));
    ledger.delete_pod("leaves");
    ledger.apply_pod(bound("taker", "b", "b-0", 80));
    assert_eq!(reclaims(&mut ledger, 2), 1);
}

#[test]
fn node_where_others_were_disrupted_is_known_after_a_restart() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(pod("p", 60));
    assert_eq!(ledger.disrupted_on("p"), None);
    ledger.apply_pod(PodFacts {
        reserved_on: Some("a".into()),
        ..pod("p", 60)
    });
    assert_eq!(ledger.disrupted_on("p").as_deref(), Some("a"));
}

/// The API server's list of the node's pods may be older than the extender's own eviction.
#[test]
fn pod_fits_where_the_extender_preempts_for_it_though_the_victim_does_not_terminate_yet() {
    let mut ledger = configured(
        Config {
            preempt_fragmented: true,
            ..Config::default()
        },
        &[("a", &[100, 100])],
    );
    for (uid, card, mib) in [("x", "a-0", 60), ("y", "a-1", 70)] {
        ledger.apply_pod(bound(uid, "a", card, mib));
    }
    let waits = waiting(10, pod("p", 60));
    ledger.apply_pod(waits.clone());
    offer_all(&mut ledger, at(0));
    for second in 0..3 {
        ledger.fragmented(at(second));
    }
    assert_eq!(ledger.preemptions(at(2)).len(), 1);
    assert!(!ledger.fits_without(&waits, "a", &[], false, at(2)));
    assert!(ledger.fits_without(&waits, "a", &[], true, at(2)));
}
