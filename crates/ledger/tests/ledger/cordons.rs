//! GPUs that an administrator has closed for new pods.

use std::time::Duration;

use gpustow_api::NodeFacts;
use gpustow_api::gpunode::{Gpu, Place};
use gpustow_ledger::{BindRefusal, Config, Ledger, Problem, Reason};
use gpustow_pack::Refusal;

use crate::act::Act as _;
use crate::build::{at, bound, card, choose, joins, ledger, node, pod, probed, report};

fn cordon(ledger: &mut Ledger, uuids: &[&str]) {
    ledger.apply_node(NodeFacts {
        cordoned_gpus: uuids.iter().map(|uuid| (*uuid).into()).collect(),
        ..node("a")
    });
}

#[test]
fn a_cordoned_gpu_takes_no_new_pod_and_keeps_those_it_has() {
    let mut ledger = ledger(&[("a", &[100, 50])]);
    ledger.apply_pod(bound("old", "a", "a-0", 30));
    assert_eq!(probed(&mut ledger, 60), None);
    cordon(&mut ledger, &["a-0"]);
    assert_eq!(probed(&mut ledger, 60), Some(Reason::Cordoned));
    assert_eq!(probed(&mut ledger, 50), None, "the other GPU takes pods");
    assert_eq!(probed(&mut ledger, 80), Some(Reason::Fit(Refusal::NoRoom)));
    let [view] = ledger.snapshot(at(1)).try_into().unwrap();
    let states = view.cards.iter().map(|card| (card.cordoned, card.healthy));
    assert_eq!(states.collect::<Vec<_>>(), [(true, false), (false, true)]);
    assert_eq!((view.cards[0].held.0, view.problems.len()), (30, 0));
}

#[test]
fn a_cordon_that_ends_wakes_who_waits_for_it() {
    let mut ledger = ledger(&[("a", &[100])]);
    cordon(&mut ledger, &["a-0"]);
    let waits = pod("p", 60);
    ledger.apply_pod(waits.clone());
    assert!(choose(&mut ledger, &waits, &["a"], at(0)).is_empty());
    assert!(ledger.wake(9, at(1)).is_empty());
    cordon(&mut ledger, &[]);
    assert_eq!(ledger.wake(9, at(2)).len(), 1);
}

#[test]
fn a_cordon_between_filter_and_bind_refuses_the_bind() {
    let mut ledger = ledger(&[("a", &[100])]);
    let pod = pod("p", 60);
    choose(&mut ledger, &pod, &["a"], at(0));
    cordon(&mut ledger, &["a-0"]);
    let bind = ledger.begin_bind(&pod, "a", at(0));
    let cordoned = |it: &_| {
        matches!(
            it,
            Err(BindRefusal::NoFit {
                reason: Reason::Cordoned,
                ..
            })
        )
    };
    assert!(cordoned(&bind), "{bind:?}");
}

#[test]
fn a_gpu_that_is_unhealthy_too_is_refused_for_that() {
    let mut ledger = ledger(&[("a", &[100])]);
    cordon(&mut ledger, &["a-0"]);
    let ill = Gpu {
        healthy: false,
        ..card("a-0", 100)
    };
    ledger.apply_gpunode("a", report(&[ill]), at(1));
    assert_eq!(
        probed(&mut ledger, 60),
        Some(Reason::Fit(Refusal::Unhealthy))
    );
}

#[test]
fn the_uuid_of_a_gpu_cordons_its_mig_instances() {
    let mut ledger = ledger(&[("a", &[])]);
    let place = Place {
        parent: Some("GPU-0".into()),
        ..Place::default()
    };
    let instance = Gpu {
        place: Some(Box::new(place)),
        ..card("MIG-0", 100)
    };
    ledger.apply_gpunode("a", report(&[instance]), at(1));
    cordon(&mut ledger, &["GPU-0"]);
    assert_eq!(probed(&mut ledger, 60), Some(Reason::Cordoned));
}

#[test]
fn entries_that_are_no_gpu_of_the_node_are_told_of() {
    let mut ledger = ledger(&[("a", &[100])]);
    let long = "x".repeat(100_000);
    cordon(&mut ledger, &["a-0", "gpu 1", &long]);
    let [view] = ledger.snapshot(at(1)).try_into().unwrap();
    let unknown = |gpu: String| Problem::UnknownCordon { gpu };
    assert_eq!(
        view.problems,
        [unknown("gpu 1".into()), unknown("x".repeat(96))]
    );
    let many: Vec<String> = (0..10_000).map(|at| format!("{at:05}")).collect();
    cordon(
        &mut ledger,
        &many.iter().map(String::as_str).collect::<Vec<_>>(),
    );
    let [view] = ledger.snapshot(at(1)).try_into().unwrap();
    assert_eq!(view.problems.len(), 8);
}

/// A Node is deleted, and its report is left over for a while.
#[test]
fn reservations_pass_over_a_node_that_is_gone() {
    let mut ledger = Ledger::new(Config {
        reserve_after: Some(at(0)),
        stale_after: Duration::MAX,
        ..Config::default()
    });
    for name in ["a", "b"] {
        joins(&mut ledger, name, &[100]);
    }
    ledger.apply_pod(bound("one", "b", "b-0", 60));
    ledger.delete_node("a");
    let p = pod("p", 95);
    ledger.apply_pod(p.clone());
    assert!(choose(&mut ledger, &p, &["b"], at(0)).is_empty());
    ledger.tell_time(1);
    ledger.keep_reservations(at(1));
    let places = ledger.reservations();
    let nodes: Vec<&str> = places.iter().map(|place| &*place.node).collect();
    assert_eq!(nodes, ["b"]);
}
